"""Owns what a registry is held against: its rules, the files it names, whose draft is whose.

Reads headers, receipts and bytes to hash, never a tensor; changes nothing, and deletes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ds4q.artifact.check import own_metadata
from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.hfq import Reader
from ds4q.artifact.places import broken_link
from ds4q.artifact.receipt import read_receipt
from ds4q.artifact.report import Check, Failure
from ds4q.registry import entries, sources
from ds4q.registry.arch import quant_for
from ds4q.registry.entries import Entry, Registry, Sidecar
from ds4q.registry.errors import DocumentError, RegistryError
from ds4q.registry.names import plain_name
from ds4q.registry.rules import RECEIPTS
from ds4q.registry.schema import canonical
from ds4q.registry.store import compare_sha256, compare_size, digest_of

CheckAdapter = Callable[[Path, Path], None]
"""Called with an adapter and its trunk; raises a ``Ds4qError`` where they do not pair."""

_SOURCE_KEYS = ("source_fingerprint", "source_digest")
_DRAFT, _TRUNK = "mtp.", "layers."  # how names of tensors begin


class SidecarError(RegistryError):
    """A sidecar that belongs to another trunk, or to none."""

    rule = "sidecar does not belong to this trunk"
    cure = "fetch or make the sidecar of this trunk"


def check_document(path: Path, check: Check, *, beneath: Collection[str] = ()) -> Registry | None:
    """Hold a registry document against every rule, the strict ones, too.

    ``beneath`` are tags of the document that it is laid over. Returns what it says, or None where
    it cannot be used.
    """
    return _check_text(sources.read_file(str(path)), str(path), check, beneath)


def check_registry(check: Check, origin: str | None = None) -> None:
    """Hold every document that ``load_registry(origin, offline=True)`` reads against every rule.

    A document of a URL that was never fetched cannot be read, and is not held against any.
    """
    url = sources.configured() if origin is None else origin
    copy = None if url is None else sources.last_copy(url)
    name = "" if url is None else sources.words_for(url)
    base = None
    if copy is not None:
        base = _check_text(canonical(copy.document).encode(), f"copy of {name}", check)
    elif url is not None and not sources.is_remote(url):
        base = _check_text(sources.read_file(url), name, check)
    elif origin is None:
        base = _check_text(sources.bundled(), sources.BUNDLED, check)
    local = sources.local_registry_path()
    if origin is None and local.exists():
        check_document(local, check, beneath=() if base is None else base.entries)


def _check_text(
    raw: bytes, origin: str, check: Check, beneath: Collection[str] = ()
) -> Registry | None:
    known = check.count
    document = "" if origin == check.path else f"{origin}: "
    try:
        for problem in entries.check_document(raw, origin, beneath=beneath):
            what = f"{problem.key}: {problem.what}" if problem.where else problem.what
            check.fail(Failure(document + what, expected=problem.expected, found=problem.found))
        return entries.read_document(raw, origin, beneath=beneath)
    except DocumentError as error:
        if check.count == known:
            check.fail_with(error)
        return None


def check_trunk(entry: Entry, path: Path, sha256: Callable[[], str], check: Check) -> None:
    """Compare the artifact at ``path`` with its entry: length, digest, architecture, quantization.

    ``sha256`` is called where the length is right and a digest is registered.
    """
    size_bytes = path.stat().st_size
    check.figures |= {"file": entry.file, "bytes": size_bytes}
    if path.name != entry.file:
        check.notes.append(f"{path.name} is registered as {entry.file}")
    failures = list(compare_size(entry, size_bytes))
    if entry.sha256 is None:
        check.notes.append(f"{entry.file}: no digest was published, unverified")
    elif not failures:
        check.figures["sha256"] = found = sha256()
        failures += compare_sha256(entry, found)
    _fail(check, entry, failures)
    try:
        with Reader(path) as reader:
            _fail(check, entry, _compare_header(entry, reader))
    except Ds4qError as error:
        check.fail_with(error)


def _compare_header(entry: Entry, reader: Reader) -> Iterator[Failure]:
    """What the artifact says of itself, and its entry says otherwise."""
    said: list[tuple[str, str | int | None, str | int | None]] = [
        ("arch_id", entry.arch_id, reader.arch_id)
    ]
    ours = own_metadata(reader)
    if ours is not None:
        said.append(("quant", entry.quant, quant_for(reader.path.name, ours)))
        if entry.quant_recipe is not None:
            said.append(("quant_recipe", entry.quant_recipe, str(ours.get("recipe"))))
    for what, expected, found in said:
        if expected != found:
            yield Failure(
                f"{what} of the file differs from its registry entry",
                expected=expected,
                found=found,
            )


def check_sidecars(
    entry: Entry,
    folder: Path,
    check: Check,
    *,
    trunk: Path | None = None,
    check_adapter: CheckAdapter | None = None,
    sha256: Callable[[Path], str] = digest_of,
) -> None:
    """Hold every sidecar that lies in ``folder`` against the entry, and against its trunk.

    A sidecar that is not there is a note: whoever wants it pulls it.

    Parameters
    ----------
    trunk : where the trunk is, if not in ``folder`` under its registered name
    check_adapter : without it, of an adapter only the bytes are compared
    sha256 : called for a file whose length is right and whose digest is registered
    """
    place = folder / plain_name(entry.file, what=f"file of {entry.tag}") if trunk is None else trunk
    checked = 0
    for sidecar in entry.sidecars:
        path = folder / plain_name(sidecar.file, what=f"{sidecar.kind} of {entry.tag}")
        if not path.exists():
            what = broken_link(path)
            found = "not there" if what is None else f"a {what}"
            check.notes.append(f"{sidecar.kind} {sidecar.file} is {found}")
            continue
        checked += 1
        failures = list(compare_size(sidecar, path.stat().st_size))
        if not failures and sidecar.sha256 is not None:
            failures += compare_sha256(sidecar, sha256(path))
        _fail(check, entry, failures)
        if failures:
            continue
        if sidecar.sha256 is None:
            check.notes.append(f"{sidecar.file}: no digest was published, unverified")
        try:
            _check_identity(entry, sidecar, path, place, check_adapter, check)
        except Ds4qError as error:
            check.fail_with(error)
    check.figures["sidecars"] = checked


def _check_identity(
    entry: Entry,
    sidecar: Sidecar,
    path: Path,
    trunk: Path,
    check_adapter: CheckAdapter | None,
    check: Check,
) -> None:
    if (of := RECEIPTS.get(sidecar.kind)) is not None:
        owner = next((each for each in entry.sidecars if each.kind == of), entry)
        check_receipt(path, owner.sha256, owner.size_bytes)
        return
    if not trunk.exists():
        check.notes.append(f"{sidecar.file}: its trunk is not there to compare with")
    elif sidecar.kind == "adapter" and check_adapter is not None:
        check_adapter(path, trunk)
    elif sidecar.kind in ("dspark", "mtp"):
        with Reader(trunk) as reader:
            if not check_draft(path, reader):
                check.notes.append(f"{sidecar.file}: says of no source, only its bytes are known")


def check_receipt(path: Path, sha256: str | None, size_bytes: int | None) -> None:
    """Refuse a receipt of another file than the one with this digest and length.

    Raises
    ------
    ReceiptError : not a receipt
    SidecarError : that of another file
    """
    receipt = read_receipt(path)
    found = (receipt.sha256, receipt.file_bytes)
    if sha256 not in (None, found[0]) or size_bytes not in (None, found[1]):
        raise SidecarError(
            "receipt of another artifact",
            path=path,
            expected=f"SHA-256 {sha256}, {size_bytes} bytes",
            found=f"{found[0]}, {found[1]} bytes",
            remedy="make the artifact anew, or put its own receipt there",
        )


def check_draft(path: Path, trunk: Reader) -> bool:
    """Refuse a draft model that was not made for this trunk.

    Both must be of one architecture, and where ds4q wrote both, of one source. Returns whether
    there was a source to compare.

    Raises
    ------
    ArtifactError : not a sound artifact
    SidecarError : no draft, or one for another trunk
    """
    with Reader(path) as draft:
        if draft.arch_id != trunk.arch_id:
            raise SidecarError(
                "draft is of another architecture than its trunk",
                path=path,
                expected=f"arch_id {trunk.arch_id}",
                found=draft.arch_id,
            )
        if not is_draft(draft):
            raise SidecarError("not a draft model: it holds other tensors", path=path)
        ours, theirs = own_metadata(trunk), own_metadata(draft)
        if ours is None or theirs is None:
            return False
        for key in _SOURCE_KEYS:
            if ours.get(key) != theirs.get(key):
                raise SidecarError(
                    f"draft for another trunk: {key} differs",
                    path=path,
                    expected=f"{ours.get(key)} of {os.fspath(trunk.path)}",
                    found=theirs.get(key),
                )
    return True


def is_draft(reader: Reader) -> bool:
    """Whether an artifact holds layers of a draft model, and none of a trunk."""
    names = reader.tensors
    has = [any(name.startswith(prefix) for name in names) for prefix in (_DRAFT, _TRUNK)]
    return has == [True, False]


def _fail(check: Check, entry: Entry, failures: Iterable[Failure]) -> None:
    """Add failures, which then name the tag."""
    for failure in failures:
        check.fail(replace(failure, message=f"{entry.tag}: {failure.message}"))
