"""Owns what of a registry lies in the folder of models, and what lies there beside it.

Reads directory entries and first bytes, no payload; changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ds4q.artifact.files import NotRegularError, read_head
from ds4q.artifact.hfq import MAGIC
from ds4q.artifact.receipt import SUFFIX
from ds4q.artifact.writer import PARTIAL_SUFFIX
from ds4q.registry.entries import Entry, Registry, Sidecar
from ds4q.registry.names import ARTIFACT_SUFFIXES, fits
from ds4q.registry.store import Store

State = Literal[
    "absent",
    "broken link",
    "partial",
    "wrong size",
    "wrong hash",
    "unverified",
    "not hashed",
    "verified",
]
"""Of a file: not there; a link that leads nowhere; begun to be fetched; of another length than
registered; noted with another digest; registered without one; of the right length and not hashed
since it changed; noted with the right digest."""

TRUNK = "trunk"
JOURNAL_SUFFIX = ".blocks"  # of what a download has of an unfinished file
UNFINISHED = (PARTIAL_SUFFIX, PARTIAL_SUFFIX + JOURNAL_SUFFIX)


@dataclass(frozen=True, slots=True)
class Held:
    """A registered file: ``kind`` is "trunk" or a sidecar's, ``size_bytes`` None if absent."""

    kind: str
    file: str
    size_bytes: int | None
    state: State


@dataclass(frozen=True, slots=True)
class Model:
    """A tag, its aliases, and where its files stand: the trunk first."""

    entry: Entry
    aliases: tuple[str, ...]
    files: tuple[Held, ...]

    @property
    def installed(self) -> bool:
        """Whether its trunk is there, sound or not."""
        return self.files[0].size_bytes is not None


@dataclass(frozen=True, slots=True)
class Stray:
    """An artifact that no tag names, and the files that are its own by name."""

    file: str
    size_bytes: int
    hfq: bool
    companions: tuple[str, ...]


def held(store: Store, kind: str, what: Entry | Sidecar) -> Held:
    """Where a registered file stands. Nothing is hashed."""
    return Held(kind, what.file, store.size(what.file), _state(store, what))


def _state(store: Store, what: Entry | Sidecar) -> State:
    size = store.size(what.file)
    if size is None and store.broken(what.file) is not None:
        return "broken link"
    if size is None:
        begun = store.size(what.file + PARTIAL_SUFFIX) is not None
        return "partial" if begun else "absent"
    if what.size_bytes not in (None, size):
        return "wrong size"
    if what.sha256 is None:
        return "unverified"
    noted = store.verified(what.file)
    if noted is None:
        return "not hashed"
    return "verified" if noted == what.sha256 else "wrong hash"


def model_of(registry: Registry, store: Store, entry: Entry) -> Model:
    """A tag and its files."""
    aliases = sorted(name for name, tag in registry.aliases.items() if tag == entry.tag)
    sidecars = (held(store, sidecar.kind, sidecar) for sidecar in entry.sidecars)
    return Model(entry, tuple(aliases), (held(store, TRUNK, entry), *sidecars))


def models(registry: Registry, store: Store) -> list[Model]:
    """Every tag, sorted."""
    return [model_of(registry, store, entry) for _, entry in sorted(registry.entries.items())]


def companions(file: str) -> dict[str, str]:
    """Name -> kind of the files that are those of artifact ``file`` by name, exactly.

    Never by a common beginning: the draft of ``flash-0731.hfq`` is none of ``flash.hfq``.
    """
    if file.endswith(PARTIAL_SUFFIX):
        return {file + JOURNAL_SUFFIX: "journal"}
    stem, dot, suffix = file.rpartition(".")
    drafts = {
        f"{stem}-mtp{dot}{suffix}": "mtp",
        f"{stem}-dspark{dot}{suffix}": "dspark",
        f"{stem}.mtp": "mtp",
    }
    drafts |= {name + SUFFIX: f"{kind}_receipt" for name, kind in drafts.items()}
    named = (drafts if stem else {}) | {file + SUFFIX: "receipt"}
    return {name: kind for name, kind in named.items() if fits(name)}


def artifacts(store: Store) -> set[str]:
    """Names of the artifacts in the folder: by their first bytes, or by a known suffix."""
    return {name for name, _ in _files(store) if _is_artifact(store, name)}


def _is_artifact(store: Store, name: str) -> bool:
    return os.path.splitext(name)[1] in ARTIFACT_SUFFIXES or _is_hfq(store, name)


def registered_files(registry: Registry) -> dict[str, list[str]]:
    """Every file name that the registry holds -> the tags that name it, sorted."""
    found: dict[str, list[str]] = {}
    for tag, entry in sorted(registry.entries.items()):
        for file in {entry.file, *(sidecar.file for sidecar in entry.sidecars)}:
            found.setdefault(file, []).append(tag)
    return found


def strays(registry: Registry, store: Store) -> list[Stray]:
    """Artifacts in the folder that no tag names: by their first bytes, or by a known suffix.

    What is one's companion by name is told with it, not for itself.
    """
    named = registered_files(registry)
    sizes = {name: size for name, size in _files(store) if name not in named}
    hfq = {name: _is_hfq(store, name) for name in sizes}
    artifacts = [
        name
        for name in sorted(sizes)
        if hfq[name] or os.path.splitext(name)[1] in ARTIFACT_SUFFIXES
    ]
    owned = {own for name in artifacts for own in companions(name) if own in sizes}
    return [
        Stray(name, sizes[name], hfq[name], tuple(sorted(companions(name).keys() & sizes.keys())))
        for name in artifacts
        if name not in owned
    ]


def _files(store: Store) -> Iterator[tuple[str, int]]:
    """Regular files of the folder, without those that a job or a download has begun."""
    if not store.folder.exists():
        return
    with os.scandir(store.folder) as entries:
        for entry in entries:
            status = entry.stat() if entry.is_file() else None
            unfinished = entry.name.endswith(UNFINISHED)
            if status is not None and not entry.name.startswith(".") and not unfinished:
                yield entry.name, status.st_size


def _is_hfq(store: Store, name: str) -> bool:
    """Whether a file can be read, and begins as an artifact does."""
    try:
        return read_head(store.path(name), len(MAGIC)) == MAGIC
    except (OSError, NotRegularError):
        return False
