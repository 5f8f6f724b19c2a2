"""Owns removing models: exactly the files that a tag registers, and none that another one needs.

Nothing is removed before the whole list is known and has been found safe.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from ds4q.artifact.receipt import SUFFIX
from ds4q.artifact.writer import PARTIAL_SUFFIX, PartialFile, fsync_folder
from ds4q.registry.entries import Entry, Registry
from ds4q.registry.errors import RegistryError, UnknownTagError
from ds4q.registry.installed import JOURNAL_SUFFIX, artifacts, companions, registered_files
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
    left : receipts of files that go, which no tag registers
    by_name : whether files were found by their names, as no tag registers them
    identities : of ``files``, what each was when it was listed
    """

    files: tuple[tuple[str, int], ...]
    kept: tuple[tuple[str, str], ...]
    left: tuple[str, ...]
    by_name: bool
    identities: tuple[Identity, ...]


def plan_removal(registry: Registry, store: Store, names: Sequence[str]) -> Removal:
    """What removing ``names`` (tags, aliases, names of files) together comes to.

    A tag stands for the files that it registers, and for what an unfinished download of them has
    left: ``NAME.partial`` and its journal. One without a journal is no download's, and stays. A
    file that no tag registers stands for itself and, if it is an artifact, for its companions by
    name (``companions``). What another installed tag names stays, and so does a companion of an
    artifact that stays.

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
            if store.size(name) is None:
                raise
            by_name = True
            own = companions(name) if name in present or name.endswith(PARTIAL_SUFFIX) else {}
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
    going = [name for name in found if name not in kept]
    receipts = {name + SUFFIX for name in going} - wanted.keys() - named_by.keys()
    left = sorted(name for name in receipts if fits(name) and store.size(name) is not None)
    return Removal(
        files=tuple((name, found[name].st_size) for name in going),
        kept=tuple(kept.items()),
        left=tuple(left),
        by_name=by_name,
        identities=tuple(identity_of(found[name]) for name in going),
    )


def _registered(entry: Entry) -> list[str]:
    return [*(sidecar.file for sidecar in entry.sidecars), entry.file]


def _with_download(store: Store, file: str) -> list[str]:
    """``file``, after what an unfinished download of it has left."""
    partial = file + PARTIAL_SUFFIX
    begun = store.size(partial + JOURNAL_SUFFIX) is not None
    return [*companions(partial), partial, file] if begun else [file]


def _installed(registry: Registry, store: Store, tag: str) -> bool:
    return store.size(registry.entries[tag].file) is not None


def _removable(store: Store, name: str) -> os.stat_result | None:
    """What a file that may be removed is; None where there is none."""
    path = store.path(name)
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        raise RemovalError(found=kind, path=path, remedy="look at it, and remove it by hand")
    if name.endswith(PARTIAL_SUFFIX):
        PartialFile(store.path(name.removesuffix(PARTIAL_SUFFIX)), 0).close()  # refused if in use
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
    if removal.files:
        fsync_folder(store.folder)
