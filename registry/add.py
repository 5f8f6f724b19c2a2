"""Owns registering a local artifact: its entry, computed from the file, in the user's registry.

What a file says of itself is taken from it and its receipt, never typed: bytes, digest, arch_id,
quantization, recipe, sidecars. Removes nothing, and copies no artifact.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ds4q.artifact.check import check_structure, own_metadata
from ds4q.artifact.files import AppearedError, fsync_folder, unless_changed, write_whole
from ds4q.artifact.hfq import Reader
from ds4q.artifact.locks import FileLock
from ds4q.artifact.places import broken_link, to_json
from ds4q.artifact.receipt import receipt_path
from ds4q.artifact.report import Check
from ds4q.registry.arch import ARCH_NAMES, MIXED, quant_for
from ds4q.registry.entries import (
    SCHEMA_VERSION,
    Entry,
    Registry,
    check_document,
)
from ds4q.registry.errors import RegistryError
from ds4q.registry.installed import companions
from ds4q.registry.names import plain_name
from ds4q.registry.rules import GB, SIDECAR_KINDS
from ds4q.registry.schema import canonical, parse
from ds4q.registry.sources import read_file
from ds4q.registry.store import digest_of
from ds4q.registry.verify import CheckAdapter, check_draft, check_receipt, is_draft

COMPUTED = frozenset(
    {"arch_id", "file", "quant", "quant_recipe", "sha256", "size_bytes", "size_gb", "unverified"}
    | {*SIDECAR_KINDS}
)
"""Keys of an entry that come from the files; all others are kept when a tag is registered again."""

DRAFTS = ("dspark", "mtp")
_DIGITS = 3  # of a size in GB, for people


class AddError(RegistryError):
    """A file cannot be registered under this tag."""

    rule = "cannot register"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a user may say of an artifact; None keeps what was said before, or says nothing.

    ``drafts`` are files of draft models; None takes those that are the artifact's by name.
    """

    tag: str
    desc: str | None = None
    min_vram_gb: float | None = None
    adapter: Path | None = None
    drafts: Sequence[Path] | None = None
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Added:
    """What registering did: the entry, where it stands, and the keys that are not as before.

    ``was`` is what stood there before, None for a new tag.
    """

    tag: str
    entry: Mapping[str, Any]
    path: Path
    was: Mapping[str, Any] | None
    changed: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def check_early(
    registry: Registry, file: str, tag: str, arch_id: int, *, path: Path | None = None
) -> None:
    """Refuse, before an artifact is made, a tag or a file name that it could not be registered by.

    ``path`` is where the artifact will be, for what is advised.

    Raises
    ------
    UnsafeNameError : ``file`` is not a plain name
    AddError : ``tag`` is taken, or no tag for a model of this architecture
    """
    _check_names(registry, file, Wish(tag), path or file)
    entry = {"repo": "", "file": to_json(file), "desc": "", "size_gb": 0, "min_vram_gb": 0}
    _check_rules(registry, tag, entry | {"arch_id": arch_id, "quant": MIXED})


def _check_names(registry: Registry, file: str, wish: Wish, given: Path | str) -> None:
    """``given`` is the file as the user spells it."""
    plain_name(file, what="name of the artifact")
    _check_words(wish)
    tag = wish.tag
    if tag in registry.aliases:
        raise AddError(
            f"{tag!r} is an alias of {registry.aliases[tag]!r}",
            remedy="choose another tag, or register it under that one",
        )
    earlier = registry.entries.get(tag)
    if earlier is None or wish.replace:
        return
    again = f"ds4q registry add {shlex.join([str(given), '--tag', tag, '--force'])}"
    if earlier.repo:
        raise AddError(
            f"{tag!r} is what {earlier.repo} publishes",
            path=registry.origin,
            remedy=f"choose another tag, or replace it here: {again}",
        )
    if earlier.sha256 is not None and earlier.file != file:
        raise AddError(
            f"{tag!r} names another file",
            path=registry.origin,
            expected=earlier.file,
            found=file,
            remedy=f"choose another tag, or replace it: {again}",
        )


def _check_words(wish: Wish) -> None:
    """Refuse what JSON cannot hold."""
    if wish.min_vram_gb is not None and not math.isfinite(wish.min_vram_gb):
        raise AddError("min_vram_gb is not a number of gigabytes", found=wish.min_vram_gb)
    for what, text in (("tag", wish.tag), ("description", wish.desc or "")):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            remedy = "give another one with --tag" if what == "tag" else "write it in UTF-8"
            raise AddError(
                f"the {what} is not UTF-8 text", found=repr(text), remedy=remedy
            ) from None


def default_tag(registry: Registry, file: str) -> str:
    """The user's own tag that names ``file`` already, else its name without the suffix."""
    own = [tag for tag in sorted(registry.local) if registry.entries[tag].file == file]
    return own[0] if len(own) == 1 else os.path.splitext(file)[0]


@dataclass(slots=True)
class _Described:
    entry: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def add(
    registry: Registry,
    local: Path,
    file: Path,
    wish: Wish,
    *,
    dry_run: bool = False,
    check_adapter: CheckAdapter | None = None,
    sha256: Callable[[Path], str] = digest_of,
) -> Added:
    """Register ``file`` under ``wish.tag`` in the registry at ``local``.

    Doing so again changes nothing, unless the file or the wish changed.

    Parameters
    ----------
    registry : all that is known, what stands at ``local`` included
    local : the user's own registry; made where there is none, and written to through a link
    dry_run : write nothing
    check_adapter : without it an adapter is taken to be the model's
    sha256 : gives the digest (hex) of a file

    Raises
    ------
    AddError : a name is taken, the file is not sound, or a sidecar belongs to another trunk
    ArtifactError, UnknownQuantError : no artifact, or nobody knows its quantization
    DocumentError : the registry at ``local`` cannot be read
    """
    _check_names(registry, file.name, wish, file)
    earlier = registry.entries.get(wish.tag)
    described = _describe(file, wish, earlier, check_adapter, sha256)
    entry = described.entry
    _check_rules(registry, wish.tag, entry)
    place = Path(os.path.realpath(local))
    with nullcontext() if dry_run else _locked(place):
        may_replace = unless_changed(place)
        was, document = _after(place, wish.tag, entry)
        text = canonical(document)
        problems = check_document(text.encode(), str(local), beneath=registry.entries)
        if problems:
            raise AddError(
                "; ".join(map(str, problems)), path=local, remedy="mend the document first"
            )
        if was != entry and not dry_run:
            _put(place, text, may_replace)
    before = was or {}
    changed = sorted(k for k in {*entry, *before} if entry.get(k) != before.get(k))
    return Added(wish.tag, entry, local, was, tuple(changed), tuple(described.warnings))


def forget(local: Path, tag: str) -> bool:
    """Take a tag out of the user's own registry; whether it was there. No file of a model goes."""
    place = Path(os.path.realpath(local))
    with _locked(place):
        may_replace = unless_changed(place)
        was, document = _after(place, tag, None)
        if was is not None:  # a document holds one entry or more
            _put(place, canonical(document) if document["models"] else None, may_replace)
    return was is not None


def _put(place: Path, text: str | None, may_replace: Callable[[Path], bool]) -> None:
    """Write a document, or remove it, unless it was edited since ``may_replace``."""
    try:
        if text is not None:
            write_whole(place, text, replace=may_replace)
        elif may_replace(place):
            place.unlink()
        else:
            raise AppearedError
    except AppearedError:
        what = "the registry was edited meanwhile; it was kept as it is"
        raise AppearedError(what, path=place, remedy="run the command again") from None
    fsync_folder(place.parent)


def _describe(
    file: Path,
    wish: Wish,
    earlier: Entry | None,
    check_adapter: CheckAdapter | None,
    sha256: Callable[[Path], str],
) -> _Described:
    """The entry of a file."""
    with Reader(file) as reader:
        if is_draft(reader):
            raise AddError(
                "a draft model is a sidecar, not a model",
                path=file,
                remedy="register its trunk: a draft beside it goes with it",
            )
        ours = own_metadata(reader)
        quant = quant_for(file.name, ours)
        _check_sound(reader)
        digest = sha256(file)
        reader.check_unchanged()
        entry: dict[str, Any] = {
            "repo": "",
            "file": to_json(file.name),
            "sha256": digest,
            "size_bytes": reader.file_bytes,
            "size_gb": _rounded(reader.file_bytes / GB),
            "arch_id": reader.arch_id,
            "quant": quant,
        }
        if ours is not None and ours.get("recipe"):
            entry["quant_recipe"] = str(ours["recipe"])
        described = _Described(entry)
        beside = companions(file.name)
        receipt = receipt_path(file)
        if receipt.exists():
            check_receipt(receipt, digest, reader.file_bytes)
            entry["receipt"] = _sidecar(receipt, sha256(receipt))
        else:
            what = broken_link(receipt)
            what = "is not there" if what is None else f"is a {what}"
            described.warnings.append(f"{receipt} {what}: registered without a receipt")
        drafts = wish.drafts
        if drafts is None:
            named = [file.with_name(n) for n, kind in beside.items() if kind in DRAFTS]
            drafts = [path for path in named if path.exists()]
        for draft in drafts:
            kind = beside.get(draft.name)
            if kind not in DRAFTS or kind in entry:
                raise AddError(
                    "not a draft of this artifact by its name",
                    path=draft,
                    expected=" or ".join(n for n, k in beside.items() if k in DRAFTS),
                )
            check_draft(draft, reader)
            entry[kind] = _sidecar(draft, sha256(draft))
            receipt = receipt_path(draft)
            if receipt.exists():
                check_receipt(receipt, entry[kind]["sha256"], entry[kind]["size_bytes"])
                entry[f"{kind}_receipt"] = _sidecar(receipt, sha256(receipt))
        if wish.adapter is not None:
            if check_adapter is not None:
                check_adapter(wish.adapter, file)
            entry["adapter"] = _sidecar(wish.adapter, sha256(wish.adapter))
            if wish.adapter.parent.resolve() != file.parent.resolve():
                described.warnings.append(f"{wish.adapter} has to lie beside {file} to be found")
        entry |= _said(entry, reader, wish, earlier)
    return described


def _check_sound(reader: Reader) -> None:
    """Refuse what can be seen to be broken without reading weights, before much is read."""
    check = Check("structure")
    check_structure(reader, check)
    if not check.ok:
        raise AddError(
            f"the file is not sound: {check.lines()[0]}",
            path=reader.path,
            remedy=f"see ds4q verify {shlex.quote(str(reader.path))}",
        )


def _sidecar(path: Path, sha256: str) -> dict[str, Any]:
    return {"file": to_json(path.name), "sha256": sha256, "size_bytes": path.stat().st_size}


def _said(
    entry: Mapping[str, Any], reader: Reader, wish: Wish, earlier: Entry | None
) -> dict[str, Any]:
    """What people say of an artifact, or what stands in for it."""
    said: dict[str, Any] = {}
    if earlier is not None and not earlier.repo and not wish.replace:  # else another model's words
        said = {key: value for key, value in earlier.raw.items() if key not in COMPUTED}
        if said["desc"] in (_description(earlier.raw, part=part) for part in (False, True)):
            del said["desc"]
        if said["min_vram_gb"] == _need_gb(earlier.raw):
            del said["min_vram_gb"]
    said["repo"] = ""
    said.pop("revision", None)
    if wish.desc is not None:
        said["desc"] = wish.desc
    part = bool((own_metadata(reader) or {}).get("partial"))
    said.setdefault("desc", _description(entry, part=part))
    if wish.min_vram_gb is not None:
        said["min_vram_gb"] = wish.min_vram_gb
    said.setdefault("min_vram_gb", _need_gb(entry))
    generation = reader.metadata.get("generation_config")
    if "sampling" not in said and isinstance(generation, dict):
        most = {"temperature": 2, "top_p": 1}
        known = {key: value for key, value in generation.items() if key in most}
        fit = all(type(v) in (int, float) and 0 <= v <= most[k] for k, v in known.items())
        said |= {"sampling": known} if known and fit else {}
    return said


def _description(entry: Mapping[str, Any], *, part: bool) -> str:
    model = ARCH_NAMES.get(entry["arch_id"], f"arch {entry['arch_id']}")
    recipe = f", recipe {entry['quant_recipe']}" if "quant_recipe" in entry else ""
    return f"{model} as {entry['quant']}{recipe}" + (", a part of the model only" if part else "")


def _need_gb(entry: Mapping[str, Any]) -> float | None:
    """Memory for the whole file in GB, where its length is known."""
    size_bytes = entry.get("size_bytes")
    return None if size_bytes is None else _rounded_up(size_bytes / GB)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _rounded_up(value: float) -> float:
    """``value`` in as many digits, never less than it is."""
    step = 10.0 ** (math.floor(math.log10(value)) - _DIGITS + 1)
    return _rounded(math.ceil(value / step) * step)


def _check_rules(registry: Registry, tag: str, entry: Mapping[str, Any]) -> None:
    """Refuse an entry that the strict rules refuse, alone or beside those that are there."""
    before = {each: one.raw for each, one in registry.entries.items()}

    def problems(models: Mapping[str, Any]) -> Iterator[str]:
        document = _document(models, registry.aliases)
        return map(str, check_document(canonical(document).encode(), registry.origin))

    old = set(problems(before)) if before else set()
    new = [problem for problem in problems(before | {tag: entry}) if problem not in old]
    if new:
        raise AddError("; ".join(new), remedy="choose another tag or file name")


def _document(models: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "schema_version": SCHEMA_VERSION,
        "generated_at": now,
        "models": dict(models),
        "aliases": dict(aliases),
    }


@contextmanager
def _locked(local: Path) -> Iterator[None]:
    """One process at a time changes the documents of a folder; nothing is left in it for that."""
    local.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(local.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock = FileLock(fd, local.parent / "registry", wait=True)
        try:
            yield
        finally:
            lock.release()
    finally:
        os.close(fd)


def _after(
    local: Path, tag: str, entry: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
    """What stands under ``tag`` in the document, and the document with ``entry`` in its place.

    Without an entry the tag goes, and its aliases with it.
    """
    document = _document({}, {})
    if local.exists():
        document |= parse(read_file(str(local)), str(local))
    models, aliases = dict(document["models"]), dict(document.get("aliases", {}))
    was: Mapping[str, Any] | None = models.pop(tag, None)
    if entry is not None:
        models[tag] = entry
    else:
        aliases = {alias: to for alias, to in aliases.items() if to != tag}
    return was, document | _document(models, aliases)
