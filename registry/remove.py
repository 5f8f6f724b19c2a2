"""Owns removing models: exactly the files that a tag registers, and none that another one needs.

Nothing is removed before the whole list is known and has been found safe.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from ds4q.artifact.errors import ArtifactError
from ds4q.artifact.files import file_kind, fsync_folder
from ds4q.artifact.receipt import SUFFIX, read_receipt
from ds4q.artifact.writer import PARTIAL_SUFFIX, PartialFile
from ds4q.registry.blocks import is_begun
from ds4q.registry.entries import Entry, Registry
from ds4q.registry.errors import RegistryError, UnknownTagError
from ds4q.registry.installed import artifacts, companions, registered_files
from ds4q.registry.names import fits
from ds4q.registry.store import Identity, Store, identity_of


class RemovalError(RegistryError):
    """Something that is not ours to remove stands under a registered name."""

    rule = "not removed"


@dataclass(frozen=True, slots=True)
class Removal:
    """What would go, and what stays although it was meant.

    Attributes
    ----------
    files : name and bytes, in the order in which they go: the trunk last
    kept : name of a file, and the installed tag that names it, too; or the artifact that stays and
        has the file by name, too
    given_up : name of a file, and the tags that are removed while it stays for another one
    left : files with the name of a receipt of a file that goes, which are not its receipt
    by_name : whether files were found by their names, as no tag registers them
    identities : of ``files``, what each was when it was listed
    """

    files: tuple[tuple[str, int], ...]
    kept: tuple[tuple[str, str], ...]
    given_up: tuple[tuple[str, tuple[str, ...]], ...]
    left: tuple[str, ...]
    by_name: bool
    identities: tuple[Identity, ...]


def plan_removal(registry: Registry, store: Store, names: Sequence[str]) -> Removal:
    """What removing ``names`` (tags, aliases, names of files) together comes to.

    A tag stands for the files that it registers, and for what an unfinished download of them has
    left: ``NAME.partial`` and its journal. One without a journal is no download's, and stays. A
    file that no tag registers stands for itself and, if it is an artifact, for its companions by
    name (``companions``). What another installed tag names stays, and so does a companion of an
    artifact that stays. A tag that was removed while its trunk stayed for another tag keeps
    nothing. The receipt of a file goes with it, registered or not.

    Raises
    ------
    UnknownTagError : neither in the registry nor in the folder
    RemovalError : a link, a folder or a device under one of the names
    LockedError : an unfinished file that another process is writing
    """
    wanted: dict[str, str] = {}  # in order: name -> the file whose tags may keep it
    beside: set[str] = set()  # names that were found by another's
    leaving: set[str] = set()
    by_name = False
    named_by = registered_files(registry)
    present = artifacts(store)
    for name in names:
        try:
            entry = registry.resolve(name)
        except UnknownTagError:
            if name in named_by:
                wanted |= dict.fromkeys(_with_download(store, name), name)  # a sidecar: for itself
                continue
            if store.size(name) is None and store.broken(name) is None:
                raise
            by_name = True
            final = name.removesuffix(PARTIAL_SUFFIX)
            begun = final != name and is_begun(store.path(final))
            own = companions(name) if name in present or begun else {}
            beside |= own.keys()
            wanted |= {each: each for each in (*own, name)}
        else:
            leaving.add(entry.tag)
            for file in _registered(entry):
                wanted |= dict.fromkeys(_with_download(store, file), file)
    found = {name: status for name in wanted if (status := _removable(store, name)) is not None}
    kept = {}
    for name in found:
        needed = [tag for tag in named_by.get(wanted[name], []) if tag not in leaving]
        holder = next((tag for tag in needed if _installed(registry, store, tag)), None)
        if holder is not None:
            kept[name] = holder
    claimed = {
        own: name for name in present - (found.keys() - kept.keys()) for own in companions(name)
    }
    kept |= {name: claimed[name] for name in found if name in beside & claimed.keys() - set(names)}
    left = []
    for name in [each for each in found if each not in kept]:
        receipt = name + SUFFIX
        if receipt in found or not fits(receipt) or store.size(receipt) is None:
            continue
        needed = [tag for tag in named_by.get(receipt, []) if tag not in leaving]
        holder = next((tag for tag in needed if _installed(registry, store, tag)), None)
        if holder is not None:
            kept[receipt] = holder
        elif _is_receipt_of(store, receipt, found[name].st_size):
            found = _before(found, name, receipt, store.path(receipt).lstat())
        else:
            left.append(receipt)
    going = [name for name in found if name not in kept]
    given_up = {name: tuple(sorted(leaving.intersection(named_by.get(name, ())))) for name in kept}
    return Removal(
        files=tuple((name, found[name].st_size) for name in going),
        kept=tuple(kept.items()),
        given_up=tuple((name, tags) for name, tags in given_up.items() if tags),
        left=tuple(left),
        by_name=by_name,
        identities=tuple(identity_of(found[name]) for name in going),
    )


def _registered(entry: Entry) -> list[str]:
    return [*(sidecar.file for sidecar in entry.sidecars), entry.file]


def _with_download(store: Store, file: str) -> list[str]:
    """``file``, after what an unfinished download of it has left."""
    partial = file + PARTIAL_SUFFIX
    return [*companions(partial), partial, file] if is_begun(store.path(file)) else [file]


def _installed(registry: Registry, store: Store, tag: str) -> bool:
    trunk = registry.entries[tag].file
    return store.size(trunk) is not None and tag not in store.given_up(trunk)


def _is_receipt_of(store: Store, receipt: str, nbytes: int) -> bool:
    """Whether a file is a receipt, of an artifact of this length; regular and no link."""
    path = store.path(receipt)
    try:
        return not path.is_symlink() and read_receipt(path).file_bytes == nbytes
    except (ArtifactError, OSError):
        return False


def _before(
    files: dict[str, os.stat_result], name: str, other: str, status: os.stat_result
) -> dict[str, os.stat_result]:
    """``files`` with ``other`` in front of ``name``."""
    out: dict[str, os.stat_result] = {}
    for each, known in files.items():
        if each == name:
            out[other] = status
        out[each] = known
    return out


def _removable(store: Store, name: str) -> os.stat_result | None:
    """What a file that may be removed is; None where there is none."""
    path = store.path(name)
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        what = store.broken(name)
        kind = file_kind(status.st_mode) if what is None else f"a {what}"
        raise RemovalError(found=kind, path=path, remedy="look at it, and remove it by hand")
    if name.endswith(PARTIAL_SUFFIX):
        final = store.path(name.removesuffix(PARTIAL_SUFFIX))
        PartialFile(final, 0, recognize=lambda head: True).close()  # refused if in use
    return status


def remove(store: Store, removal: Removal) -> None:
    """Remove what ``plan_removal`` found, as long as it is still what it was.

    Raises
    ------
    RemovalError : a file has changed since; those before it are gone
    """
    for (name, _), listed in zip(removal.files, removal.identities, strict=True):
        status = _removable(store, name)
        if status is None or identity_of(status) != listed:
            raise RemovalError("file changed since it was listed", path=store.path(name))
        os.unlink(store.path(name))
        store.forget(name)
    for name, tags in removal.given_up:
        store.give_up(name, tags)
    if removal.files:
        fsync_folder(store.folder)
