"""Owns ``pull``: which files a tag means, what is there already, and fetching the rest.

How one file is fetched is ``fetch.py``. Removes nothing, believes nothing that it did not check.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import xxhash

from ds4q.artifact.errors import ArtifactError, Ds4qError
from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import SUFFIX, Receipt, read_receipt
from ds4q.registry.blocks import check_room
from ds4q.registry.entries import Entry, Sidecar
from ds4q.registry.errors import (
    EITHER,
    ExistsError,
    HubError,
    LocalOnlyError,
    OtherFileError,
    PullError,
    TransferError,
    UnverifiedError,
)
from ds4q.registry.fetch import RANGES, Wanted, fetch
from ds4q.registry.hub import HubRepo, look_up
from ds4q.registry.rules import RECEIPTS
from ds4q.registry.store import Store, compare_sha256, compare_size

Advance = Callable[[int], None]
Progress = Callable[[str, int], AbstractContextManager[Advance]]
Tell = Callable[[str], None]

TRUNK = "trunk"
READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class PulledFile:
    """One file of a tag. ``state`` is ``fetched``, ``present`` or ``would fetch``.

    ``unverified`` says that the registry has no digest to hold it against.
    """

    file: str
    kind: str
    path: str
    state: str
    size_bytes: int | None
    sha256: str | None
    unverified: bool


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull did, or would do; ``commit`` is the hub's, where the hub was asked."""

    tag: str
    repo: str
    commit: str | None
    files: tuple[PulledFile, ...]

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return asdict(self)


def _silent(label: str, total: int) -> AbstractContextManager[Advance]:
    return nullcontext(lambda amount: None)


def pull(
    entry: Entry,
    folder: Path,
    *,
    trunk_only: bool = False,
    adapter: bool = False,
    allow_unverified: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = _silent,
    tell: Tell = lambda line: None,
    ranges: int = RANGES,
) -> Pulled:
    """Have all files of a tag in ``folder``, each of the registered size and digest.

    The receipt comes first, then the trunk, then the other sidecars, a draft after its receipt. A
    file that is there is checked; it is read where no earlier check was noted. What was fetched
    before a failure stays.

    Parameters
    ----------
    trunk_only : leave out sidecars, the receipt excepted
    adapter : fetch the experimental adapter, too
    allow_unverified : fetch files of which nobody published a digest
    force : replace a file that is there and is not the registered one
    dry_run : check what is there and say what would be fetched; asks no server

    Raises
    ------
    LocalOnlyError, UnverifiedError, UnsafeNameError : before anything is done
    OtherFileError, ExistsError : something else stands where a file goes; nothing is fetched then
    PullError : the trunk is there, a sidecar could not be had
    HubError, and what ``fetch`` raises : the trunk could not be had
    """
    job = _Pull(entry, Store(folder), force, progress, tell, ranges)
    wanted = list(_files(entry, trunk_only=trunk_only, adapter=adapter))
    bare = [what.file for _, what in wanted if what.sha256 is None]
    if bare and not allow_unverified:
        raise UnverifiedError(f"no digest is published for {', '.join(bare)}", path=entry.tag)
    states = {what.file: job.present(kind, what) for kind, what in wanted}
    absent = [(kind, what) for kind, what in wanted if states[what.file] is None]
    if absent and not entry.repo:
        raise LocalOnlyError(
            path=entry.tag, remedy=f"put {absent[0][1].file} into {job.store.folder}"
        )
    if dry_run:
        for kind, what in absent:
            states[what.file] = job.file(kind, what, "would fetch", what.sha256)
    elif absent:
        job.fetch_all(absent, states)
    if not dry_run:
        for _, what in wanted:
            job.store.take_back(what.file, entry.tag)
    commit = job.hub.commit if job.hub else None
    files = tuple(done for _, what in wanted if (done := states[what.file]) is not None)
    if job.failed:
        errors = job.failed.values()
        remedies = dict.fromkeys(error.remedy for error in errors if error.remedy)
        remedy = " and ".join(remedies) or "pull again"
        if any(what.file in job.failed for kind, what in wanted if kind != "receipt"):
            remedy += "; or do without by --trunk-only"
        raise PullError(
            f"pulled without {', '.join(job.failed)}",
            path=entry.tag,
            found="; ".join(str(error).removesuffix(f"; {error.remedy}") for error in errors),
            remedy=remedy,
        )
    return Pulled(entry.tag, entry.repo, commit, files)


def _files(
    entry: Entry, *, trunk_only: bool, adapter: bool
) -> Iterator[tuple[str, Entry | Sidecar]]:
    """Kind and file of everything that a pull is about, in order."""
    receipts = [each for each in entry.sidecars if each.kind == "receipt"]
    yield from ((each.kind, each) for each in receipts)
    yield TRUNK, entry
    for each in entry.sidecars:
        if each.kind != "receipt" and not trunk_only and (adapter or each.kind != "adapter"):
            yield each.kind, each


class _Pull:
    """The files of one entry on their way into one folder."""

    def __init__(
        self, entry: Entry, store: Store, force: bool, progress: Progress, tell: Tell, ranges: int
    ) -> None:
        self.entry, self.store, self.force = entry, store, force
        self.hub: HubRepo | None = None
        self.failed: dict[str, Ds4qError] = {}
        self._progress, self._tell, self._ranges = progress, tell, ranges

    def file(self, kind: str, what: Entry | Sidecar, state: str, sha256: str | None) -> PulledFile:
        """What is reported of a file."""
        size = what.size_bytes if state == "would fetch" else self.store.size(what.file)
        path = str(self.store.path(what.file))
        return PulledFile(what.file, kind, path, state, size, sha256, what.sha256 is None)

    def present(self, kind: str, what: Entry | Sidecar) -> PulledFile | None:
        """The file that is there, checked; None where it is to be fetched."""
        size = self.store.size(what.file)
        if size is None:
            self._check_place(self.store.path(what.file))
            return None
        failures = list(compare_size(what, size))
        sha256 = None
        if not failures:
            sha256 = self.store.verified(what.file)
            if sha256 is None:
                with self._progress(f"check {what.file}", size) as advance:
                    sha256 = self.store.digest(what.file, advance=advance)
            failures = list(compare_sha256(what, sha256))
        for failure in failures:
            if self.force:
                return None
            raise OtherFileError(
                failure.message,
                path=self.store.path(what.file),
                expected=failure.expected,
                found=failure.found,
            )
        return self.file(kind, what, "present", sha256)

    def _check_place(self, path: Path) -> None:
        """Refuse what stands where a file goes and is none, if it cannot be replaced."""
        if path.is_symlink() and not path.exists():  # of nothing: it can be
            if not self.force:
                raise ExistsError("a link to nothing stands here", path=path)
        elif path.exists():
            what = "a folder" if path.is_dir() else "something that is no file"
            remedy = "move it away, or name another folder with --models-dir"
            raise ExistsError(f"{what} stands where a file goes", path=path, remedy=remedy)

    def fetch_all(
        self,
        absent: Sequence[tuple[str, Entry | Sidecar]],
        states: dict[str, PulledFile | None],
    ) -> None:
        """Fetch in order. A sidecar that fails is noted, and what follows it is fetched still."""
        if "://" not in self.entry.repo:
            self.hub = look_up(self.entry.repo, self.entry.revision)
            self._tell(f"{self.entry.tag}: {self.entry.repo} at commit {self.hub.commit}")
            self._compare_all(self.hub, absent)
        self.store.folder.mkdir(parents=True, exist_ok=True)
        self._check_room([what for _, what in absent])
        for kind, what in absent:
            try:
                states[what.file] = self.file(kind, what, "fetched", self._fetch(what))
            except (Ds4qError, OSError) as error:
                if not isinstance(error, Ds4qError):
                    error = TransferError(error.strerror, path=self.store.path(what.file))
                if kind == TRUNK:
                    raise error from None
                self.failed[what.file] = error

    def _check_room(self, files: Sequence[Entry | Sidecar]) -> None:
        """All files together, before the first; what earlier runs left of them counts as there."""
        needed = 0
        for what in files:
            needed += what.size_bytes or 0
            part = self.store.path(what.file + ".partial")
            if part.exists():
                needed -= min(part.stat().st_blocks * 512, what.size_bytes or 0)
        check_room(self.store.folder, needed)

    def _fetch(self, what: Entry | Sidecar) -> str:
        """Fetch one file, note that it was checked, and give its digest."""
        wanted = self._wanted(what)
        with ExitStack() as stack:
            shown: list[Advance] = []
            done = 0

            def heard(now: int, total: int) -> None:
                nonlocal done
                if not shown:
                    shown.append(stack.enter_context(self._progress(f"pull {what.file}", total)))
                if now != done:  # what does not move needs no line
                    shown[0](now - done)
                    done = now

            sha256 = fetch(
                wanted,
                self.store.path(what.file),
                progress=heard,
                ranges=self._ranges,
                replace=self.force,
                damaged=self._damaged_of(what),
                tell=self._tell,
            )
        self.store.note_verified(what.file, sha256)
        return sha256

    def _compare_all(self, hub: HubRepo, files: Sequence[tuple[str, Entry | Sidecar]]) -> None:
        """What the hub says of its files must not differ from what is registered.

        A trunk that it lacks is refused here; a sidecar is noted when it is its turn.
        """
        for kind, what in files:
            if what.file not in hub.files and kind != TRUNK:
                continue
            there = hub.file(what.file)
            for registered, found in (
                (what.size_bytes, there.size_bytes),
                (what.sha256 and what.sha256.lower(), there.sha256),
            ):
                if registered is not None and found is not None and registered != found:
                    raise HubError(
                        f"{what.file} of the hub is not the registered one",
                        path=hub.name,
                        expected=registered,
                        found=found,
                        remedy=f"nothing was fetched; {EITHER}",
                    )

    def _wanted(self, what: Entry | Sidecar) -> Wanted:
        """Where a file is, and what is known of it."""
        if self.hub is None:
            url = f"{self.entry.repo.rstrip('/')}/{quote(os.fsencode(what.file))}"
            return Wanted(url, what.size_bytes, what.sha256)
        there = self.hub.file(what.file)
        return Wanted(
            there.url,
            what.size_bytes if what.size_bytes is not None else there.size_bytes,
            what.sha256 or there.sha256,
            self.hub.headers,
        )

    def _damaged_of(
        self, what: Entry | Sidecar
    ) -> Callable[[Path], Iterable[tuple[int, int]]] | None:
        """What finds the damaged byte ranges of a trunk or draft; None where it has no receipt."""
        named = {each.file for each in self.entry.sidecars if each.kind in RECEIPTS}
        place = self.store.path(what.file + SUFFIX) if what.file + SUFFIX in named else None
        if place is None:
            return None

        def damaged(path: Path) -> list[tuple[int, int]]:
            try:
                receipt = read_receipt(place)
            except (ArtifactError, OSError):
                return []
            return damaged_ranges(path, receipt) if receipt.sha256 == what.sha256 else []

        return damaged


def damaged_ranges(path: Path, receipt: Receipt) -> list[tuple[int, int]]:
    """Byte ranges (offset, length) of an artifact that are not as its receipt says.

    Where the front (header, metadata, index) is damaged, it is the only range: without it nothing
    else can be found. Where no tensor is, it is the front as well: that holds the only bytes which
    no digest of the receipt covers.
    """
    front = (0, receipt.file_bytes - sum(record.nbytes for record in receipt.tensors))
    try:
        with Reader(path) as reader:
            said = receipt.index_xxh3, receipt.metadata_xxh3 or reader.metadata_xxh3
            if (reader.index_xxh3, reader.metadata_xxh3) != said:
                return [front]
            buffer = np.empty(READ_BYTES, dtype=np.uint8)
            found = []
            for record in receipt.tensors:
                entry, digest = reader.entry(record.name), xxhash.xxh3_128()
                for start in range(0, entry.nbytes, READ_BYTES):
                    part = buffer[: min(READ_BYTES, entry.nbytes - start)]
                    reader.read_into(entry, part, start)
                    digest.update(part.data)
                if digest.hexdigest() != record.xxh3:
                    found.append((entry.offset, entry.nbytes))
    except ArtifactError:
        return [front]
    return found or [front]
