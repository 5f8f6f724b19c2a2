"""What ``ds4q verify`` is pointed at: artifacts, registry documents and folders of both.

Finds them, and has each checked by the room that knows it: what an artifact's own pass has hashed
is what its registry entry is held against. A receipt stands for its artifact, also where that is
too large to be at hand. Of several sources, an artifact is compared with the one whose fingerprint
it names. Knows no rule of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ds4q import api
from ds4q.artifact.check import own_metadata
from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.files import NotRegularError, read_head
from ds4q.artifact.hfq import MAGIC, UNFINISHED_MAGIC, Reader
from ds4q.artifact.places import reason
from ds4q.artifact.receipt import SUFFIX, find_receipt, read_receipt
from ds4q.artifact.report import NOT_COMPARED, Check, Failure, Report
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.registry.entries import Entry, Registry
from ds4q.registry.names import ARTIFACT_SUFFIXES
from ds4q.registry.signing import check_signature, signature_path
from ds4q.registry.store import digest_of
from ds4q.registry.verify import check_document, check_sidecars, check_trunk

REGISTRY_NAME = "registry.json"
SUFFIXES = ARTIFACT_SUFFIXES | {".mtp"}  # a draft may be called by its kind
REGISTRY_KEYS = {"schema_version", "generated_at", "models"}
MAX_DOCUMENT_BYTES = 64 << 20
UNFINISHED = (".partial", ".part")
Kind = Literal["artifact", "receipt", "document"]
HEAD_BYTES = 64


@dataclass(frozen=True, slots=True)
class Targets:
    """What a command line names: each file once, in the order in which it was found.

    ``receipts`` are those whose artifact is not beside them, ``empty`` folders without any target,
    ``unfollowed`` the links to folders below a folder, behind which nothing was looked for.
    """

    artifacts: tuple[Path, ...]
    receipts: tuple[Path, ...]
    documents: tuple[Path, ...]
    empty: tuple[Path, ...]
    unfollowed: tuple[Path, ...]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Targets:
        """What stands at ``paths``; a folder is walked, without following links to folders.

        Raises ``OSError`` where a folder cannot be read.
        """
        found: dict[Kind, dict[Path, None]] = {"artifact": {}, "receipt": {}, "document": {}}
        empty: list[Path] = []
        links: list[Path] = []
        for path in paths:
            if not path.is_dir():
                _add(found, _kind_of_named(path), path)
                continue
            here = [
                (kind, file) for file in _files(path, links) if (kind := _kind(file)) is not None
            ]
            for kind, file in here:
                _add(found, kind, file)
            if not here:
                empty.append(path)
        return cls(
            tuple(found["artifact"]),
            tuple(found["receipt"]),
            tuple(found["document"]),
            tuple(empty),
            tuple(links),
        )


def _add(found: dict[Kind, dict[Path, None]], kind: Kind, path: Path) -> None:
    """A receipt beside its artifact is checked with it."""
    if kind == "receipt" and os.path.lexists(artifact := path.with_suffix("")):
        kind, path = "artifact", artifact
    found[kind][path] = None


def _files(folder: Path, links: list[Path]) -> Iterator[Path]:
    """Files below ``folder`` but hidden ones, sorted; ``links`` gets the links to folders."""

    def stop(error: OSError) -> None:
        raise error

    for here, folders, files in os.walk(folder, onerror=stop):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links += (path for name in folders if (path := Path(here, name)).is_symlink())
        yield from (Path(here, name) for name in sorted(files) if not name.startswith("."))


def _head(path: Path) -> bytes:
    """How a file begins; nothing where it cannot be read, which whoever opens it will say."""
    try:
        return read_head(path, HEAD_BYTES)
    except (OSError, NotRegularError):
        return b""


def _kind_by_name(path: Path) -> Kind | None:
    if path.name == REGISTRY_NAME or path.name.endswith("." + REGISTRY_NAME):
        return "document"
    if path.suffix in SUFFIXES:
        return "artifact"
    if path.suffix == SUFFIX and path.with_suffix("").suffix in SUFFIXES:
        return "receipt"
    return None


def _kind_of_named(path: Path) -> Kind:
    """A file that a user names is one of the three, whatever it is called."""
    json_like = path.suffix == ".json" or _head(path).lstrip().startswith(b"{")
    return _kind_by_name(path) or ("document" if json_like else "artifact")


def _kind(path: Path) -> Kind | None:
    """By name, so that what lost its beginning counts; else by how it begins, or its keys."""
    if (kind := _kind_by_name(path)) is not None:
        return kind
    if path.suffix in UNFINISHED:
        return None
    if path.suffix != ".json":
        return "artifact" if _head(path).startswith((MAGIC, UNFINISHED_MAGIC)) else None
    with suppress(OSError, ValueError, RecursionError):
        if path.is_file() and path.stat().st_size <= MAX_DOCUMENT_BYTES:
            found = json.loads(path.read_bytes())
            if isinstance(found, dict) and found.keys() >= REGISTRY_KEYS:
                return "document"
    return None


# ------------------------------------------------------------------ verifying


@dataclass(slots=True)
class _Document:
    """A registry document, its report, and which of its entries have files beside it."""

    path: Path
    report: Report
    registry: Registry | None = None
    here: list[Entry] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path) -> _Document:
        report = Report({"path": os.fspath(path), "name": path.name, "kind": "registry"})
        found = cls(path, report)
        with report.check("document") as check:
            try:
                found.registry = check_document(path, check)
            except OSError as error:
                check.fail(_unreadable(error, path))
                return found
            if found.registry is None:
                return found
            entries = found.registry.entries.values()
            found.here = [entry for entry in entries if found.has_file_of(entry)]
            check.figures["entries"] = len(found.registry.entries)
            check.figures["with_files_here"] = len(found.here)
            report.artifact["entries"] = len(found.registry.entries)
        return found

    def has_file_of(self, entry: Entry) -> bool:
        names = [entry.file, *(sidecar.file for sidecar in entry.sidecars)]
        return any(os.path.lexists(self.path.parent / name) for name in names)


@dataclass(slots=True)
class _Sources:
    """The checkpoints that were given, and which of them an artifact was made from.

    Attributes
    ----------
    by_fingerprint : of those that could be opened; of two equal ones the first
    reports : a failed report for each that could not
    unknown : whether some artifact could not be asked which source it is from
    """

    by_fingerprint: dict[str, Path] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    unknown: bool = False

    @classmethod
    def open(cls, paths: Sequence[Path]) -> _Sources:
        found = cls()
        for path in paths:
            report = Report({"path": os.fspath(path), "name": path.name, "kind": "source"})
            with report.check("source") as check:
                try:
                    with Checkpoint.open(path, allow_partial=True) as checkpoint:
                        found.by_fingerprint.setdefault(checkpoint.fingerprint(), path)
                except OSError as error:
                    check.fail(_unreadable(error, path))
            if not report.ok:
                found.reports.append(report)
        return found

    def of(self, artifact: Path) -> tuple[Path | None, str]:
        """The source of ``artifact``; else None, and why there is none, in a few words."""
        try:
            fingerprint = _fingerprint(artifact)
        except (Ds4qError, OSError):
            self.unknown = True
            return None, "it cannot be read"
        if fingerprint is None:
            return None, "it does not record which checkpoint it was made from"
        if fingerprint not in self.by_fingerprint:
            return None, f"no --source has the fingerprint {fingerprint}"
        self.used.add(fingerprint)
        return self.by_fingerprint[fingerprint], ""

    def finish(self) -> list[Report]:
        """Reports of the sources that did not serve: unreadable ones, and those of no artifact.

        The latter are left out where an artifact could not be read: it may be from them.
        """
        unfit = Failure("no artifact here was made from this checkpoint")
        if not self.unknown:
            for fingerprint, path in self.by_fingerprint.items():
                if fingerprint not in self.used:
                    self.reports.append(failed(path, "source", unfit))
                    self.reports[-1].artifact["kind"] = "source"
        return self.reports


def _fingerprint(artifact: Path) -> str | None:
    """Of the checkpoint that an artifact was made from, by its metadata, else its receipt."""
    with Reader(artifact) as reader:
        found = (own_metadata(reader) or {}).get("source_fingerprint")
        if found is None and (receipt := find_receipt(reader, None)) is not None:
            found = receipt[1].source_fingerprint
    return found if isinstance(found, str) else None


def _made_with_imatrix(artifact: Path) -> bool:
    with Reader(artifact) as reader:
        return bool((own_metadata(reader) or {}).get("imatrix_sha256"))


def verify_targets(
    targets: Targets,
    *,
    public_key: Path | None,
    progress: api.Progress,
    sources: Sequence[Path] = (),
    imatrix: Path | None = None,
    **options: Any,
) -> list[Report]:
    """Check every target: artifacts first, then receipts without them, then registry documents.

    A registry document is held to its schema, and each of its entries with a file in its folder to
    that file. With ``sources`` each artifact is compared with the one that it was made from; where
    that was not given, its check "source" says that nothing was compared. A source that no artifact
    is from is a failure, as is what cannot be read. ``imatrix`` is for the artifacts that were made
    with one. ``options`` are those of ``api.verify``.
    """
    given = _Sources.open(sources)
    documents = [_Document.open(path) for path in targets.documents]
    registered = {
        os.path.realpath(document.path.parent / entry.file)
        for document in documents
        for entry in document.here
    }
    reports: list[Report] = []
    known: dict[str, api.Verification] = {}
    for path in targets.artifacts:
        source, why_not = given.of(path) if sources else (None, "")
        weights = imatrix if source is not None and _made_with_imatrix(path) else None
        found = verify_artifact(
            path,
            public_key=public_key,
            want_sha256=os.path.realpath(path) in registered,
            progress=progress,
            source=source,
            imatrix=weights,
            **options,
        )
        if why_not and found.checks[0].ok:
            with found.check("source") as check:
                check.unjudged = NOT_COMPARED
                check.notes.append(f"{NOT_COMPARED} with a source: {why_not}")
        reports.append(found)
        known[os.path.realpath(path)] = found
    reports += [_verify_receipt(path) for path in targets.receipts]
    for document in documents:
        for entry in document.here:
            with document.report.check(f"entry {entry.tag}") as check:
                check_registered(entry, document.path.parent, check, known, progress)
        reports.append(document.report)
    reports += given.finish()
    nothing = Failure("the folder holds neither an artifact nor a receipt nor a registry document")
    return reports + [failed(path, "folder", nothing) for path in targets.empty]


def verify_artifact(
    path: Path,
    *,
    entry: Entry | None = None,
    public_key: Path | None = None,
    signature: Path | None = None,
    want_sha256: bool = False,
    progress: api.Progress,
    **options: Any,
) -> api.Verification:
    """``api.verify``, then the artifact held to a signature and to a registry's entry.

    A file that cannot be read is a failure like any other. ``signature``: if not where
    ``signature_path`` has it.
    """
    asked = want_sha256 or entry is not None or public_key is not None
    try:
        report = api.verify(path, want_sha256=asked, progress=progress, **options)
    except OSError as error:
        return failed(path, "structure", _unreadable(error, path))
    if public_key is not None:
        place = signature_path(path) if signature is None else signature
        _hold_to_signature(report, public_key, place, progress)
    if entry is not None:
        _hold_to_entry(report, entry, progress)
    return report


def _hold_to_entry(report: api.Verification, entry: Entry, progress: api.Progress) -> None:
    """Add check "registry": the artifact that was verified is the one that ``entry`` registers."""
    path = Path(report.artifact["path"])
    with report.check("registry") as check:
        check_trunk(entry, path, lambda: _sha256(path, report, progress), check)
        check_sidecars(entry, path.parent, check, trunk=path, check_adapter=api.check_adapter)


def _hold_to_signature(
    report: api.Verification, public_key: Path, signature: Path, progress: api.Progress
) -> None:
    """Add check "signature": ``public_key`` has signed the artifact that was verified."""
    path = Path(report.artifact["path"])
    with report.check("signature") as check:
        try:
            sha256 = _sha256(path, report, progress)
            check_signature(path, sha256, public_key, signature, check)
        except OSError as error:
            check.fail(_unreadable(error, path))


def check_registered(
    entry: Entry,
    folder: Path,
    check: Check,
    known: Mapping[str, api.Verification],
    progress: api.Progress,
) -> None:
    """Hold the files of ``entry`` in ``folder`` to it; ``known`` is by real path."""
    path = folder / entry.file
    try:
        if os.path.lexists(path):
            verified = known.get(os.path.realpath(path))
            check_trunk(entry, path, lambda: _sha256(path, verified, progress), check)
        else:
            check.notes.append(f"{entry.file} is not here")
        check_sidecars(entry, folder, check, check_adapter=api.check_adapter)
    except OSError as error:
        check.fail(_unreadable(error, path))


def _sha256(path: Path, verified: api.Verification | None, progress: api.Progress) -> str:
    """From the artifact's own checks; where they did not come to that, the file is read."""
    if verified is not None and verified.sha256 is not None:
        return verified.sha256
    with progress("hash", path.stat().st_size) as advance:
        return digest_of(path, advance=advance)


def _verify_receipt(path: Path) -> Report:
    report = Report({"path": os.fspath(path), "name": path.name, "kind": "receipt"})
    with report.check("receipt") as check:
        try:
            receipt = read_receipt(path)
        except OSError as error:
            check.fail(_unreadable(error, path))
        else:
            check.figures["tensors"] = len(receipt.tensors)
            check.notes.append("the artifact is not here: only its receipt was read")
    return report


def _unreadable(error: OSError, path: Path) -> Failure:
    return Failure(f"{error.filename or path}: {reason(error)}")


def failed(path: Path, check_name: str, failure: Failure) -> api.Verification:
    """The report of what could not be looked at: one check with one failure."""
    report = api.Verification({"path": os.fspath(path), "name": path.name})
    with report.check(check_name) as check:
        check.fail(failure)
    return report


def document_of(reports: Sequence[Report]) -> dict[str, Any]:
    """The JSON document of several targets: each as ``ds4q verify FILE --json`` tells it."""
    return {
        "ok": all(report.ok for report in reports),
        "targets": [report.document() for report in reports],
    }
