"""Owns fetching one file whole: resume, size, free space, digest, final name.

The one fetcher for hub, HTTP(S) and file URLs. How ranges are asked for is ``remote.py``, what is
kept on disk meanwhile ``blocks.py``, the threads ``transfer.py``. Knows no tag and no registry.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ds4q.registry.blocks import BLOCK_BYTES, About, Blocks, check_room
from ds4q.registry.errors import EITHER, DigestError, ExistsError, SizeError
from ds4q.registry.remote import Answer, Lane, Remote, TryAgain
from ds4q.registry.transfer import FIRST_TRIES, LEAST_SPAN_BYTES, Pauses, Transfer, runs

RANGES = 4
REPAIRS = 3  # rounds in which damaged bytes are fetched again
PAGE = "a web page in place of the file"
SIGN_IN = "check the address, and whether the server wants you to sign in"
MAX_PAGE_START_BYTES = 512
FAR = 1 << 62  # behind the end of any file, where its length is not known


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file to fetch: where it is, and what is known of it.

    ``headers`` (a token, say) go to the origin of ``url`` only.
    """

    url: str
    size_bytes: int | None
    sha256: str | None
    headers: Mapping[str, str] = field(default_factory=dict)


def fetch(
    wanted: Wanted,
    to: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    ranges: int = RANGES,
    replace: bool = False,
    damaged: Callable[[Path], Iterable[tuple[int, int]]] | None = None,
    tell: Callable[[str], None] | None = None,
) -> str:
    """Fetch a file to ``to``; SHA-256 (hex) of what now stands there.

    Until it is whole, the bytes lie in ``NAME.partial`` beside it, and any stop leaves them there:
    the next call goes on. Nothing is ever removed because a digest differs.

    Parameters
    ----------
    progress : hears (bytes on disk, bytes of the file)
    ranges : connections that are open at once
    replace : give up what stands at ``to``, and a whole partial file of the wrong digest
    damaged : asked about a whole partial file of the wrong digest: which byte ranges (offset,
        length) are known to be wrong; they are fetched again
    tell : hears a line about what goes wrong and passes

    Raises
    ------
    ExistsError : something stands at ``to``
    SizeError, DigestError : the server's file is not the one that is wanted
    SpaceError, OSError : the disk is too full, or does not take the bytes
    LockedError : another process fetches this file
    UnfinishedError : another job's partial file is in the way
    TransferError, RefusedError : the server does not give it
    """
    if os.path.lexists(to) and not replace:
        raise ExistsError(path=to)
    blocks = Blocks(to)
    try:
        job = _Job(wanted, blocks, ranges, progress or (lambda done, total: None), tell or _mute)
        sha256 = job.run()
        if replace and not job.received and not job.fits(sha256):
            job.start_over()
            sha256 = job.run()
        for _ in range(REPAIRS):
            if job.fits(sha256) or damaged is None:
                break
            job.missing = _covering(damaged(blocks.file.path), job.size)
            if not job.missing:
                break
            job.tell(f"{to.name}: {len(job.missing)} damaged blocks are fetched again")
            sha256 = job.run()
        if not job.fits(sha256):
            page = _is_page(os.pread(blocks.file.fd, MAX_PAGE_START_BYTES, 0))
            raise DigestError(
                f"the server {job.server} sends {PAGE}" if page else None,
                path=to,
                expected=wanted.sha256,
                found=sha256,
                remedy=f"{SIGN_IN if page else EITHER}; {blocks.file.path.name} is kept, "
                "--force fetches it anew",
            )
        blocks.publish(replace=replace)
        return sha256
    finally:
        blocks.close()


def _is_page(start: bytes) -> bool:
    """Whether a file begins as a web page does."""
    return start.lstrip().lower().startswith((b"<!doctype html", b"<html"))


def _mute(line: str) -> None:
    """Hear nothing."""


def _covering(ranges: Iterable[tuple[int, int]], size: int) -> list[int]:
    """Numbers of the blocks that hold any byte of ``ranges``."""
    numbers: set[int] = set()
    for offset, nbytes in ranges:
        end = min(offset + nbytes, size)
        if offset < end:
            numbers.update(range(offset // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1))
    return sorted(numbers)


class _Job:
    """One file: what is there of it, and the passes that complete it.

    ``missing`` holds the numbers of the blocks to fetch, or None before the server was asked.
    """

    def __init__(
        self,
        wanted: Wanted,
        blocks: Blocks,
        ranges: int,
        progress: Callable[[int, int], None],
        tell: Callable[[str], None],
    ) -> None:
        self.wanted, self.blocks, self.tell = wanted, blocks, tell
        self.missing: list[int] | None = None
        self.received = 0
        self._remote = Remote(wanted.url, wanted.headers)
        self._sha256 = (wanted.sha256 or "").lower()
        self._ranges, self._progress = ranges, progress
        self._ranged, self._validator = True, ""
        about = blocks.about
        if about is not None and self._may_continue(about):
            if about.url == self._remote.name:
                self._validator = about.validator
            if not _absent(blocks):
                self.missing = []

    @property
    def server(self) -> str:
        """The URL, for messages."""
        return self._remote.name

    @property
    def size(self) -> int:
        """Bytes of the file, once it is known."""
        return self.blocks.file.file_bytes

    def fits(self, sha256: str) -> bool:
        """Whether a digest is the one that is wanted, if one is."""
        return not self._sha256 or sha256 == self._sha256

    def start_over(self) -> None:
        """Ask the server again, and keep nothing of what is there."""
        if (about := self.blocks.about) is not None:
            self.blocks.start(about)
        self.missing, self._validator = None, ""

    def run(self) -> str:
        """Fetch what is missing and hash the whole."""
        first = None
        if self.missing is None:
            first = lane, answer = self._ask()
            self.missing = _absent(self.blocks)
            if answer.ranged and answer.start != self.missing[0] * BLOCK_BYTES:
                lane.reset()  # this is what an earlier run lacked, and its blocks are of no use
                first = None
        transfer = Transfer(
            self._remote,
            self._validator,
            self.blocks,
            self.missing,
            lanes=max(1, min(self._ranges, len(self.missing))) if self._ranged else 1,
            ranged=self._ranged,
            progress=self._progress,
            tell=self.tell,
        )
        try:
            return transfer.run(first)
        finally:
            self.received += transfer.received

    # ------------------------------------------------------------------ the first answer

    def _may_continue(self, earlier: About) -> bool:
        """Whether an earlier run's blocks can be of use, as far as the server need not be asked."""
        known = bool(self._sha256) and earlier.sha256 == self._sha256
        return self.wanted.size_bytes in (None, earlier.size_bytes) and (
            known or earlier.url == self._remote.name
        )

    def _ask(self) -> tuple[Lane, Answer]:
        """Begin with the first missing byte: the answer tells length, version, and of ranges."""
        start, stop = 0, self.wanted.size_bytes or FAR
        earlier = self.blocks.about
        if earlier is not None and self._may_continue(earlier):
            first, end = runs(_absent(self.blocks))[0]
            start = first * BLOCK_BYTES
            stop = min(end * BLOCK_BYTES, earlier.size_bytes)
        lane = self._remote.lane()
        try:
            answer, size = self._patiently(lane, start, stop, self._validator)
            if not answer.ranged and self._validator:
                # Another version than the earlier run's: this says nothing about ranges.
                lane.reset()
                answer, size = self._patiently(lane, 0, stop, "")
            self._validator, self._ranged = answer.validator, answer.ranged
            check_room(self.blocks.final.parent, size - self.blocks.held_bytes)
            about = About(self._remote.name, size, answer.validator, self._sha256)
            if earlier is not None and self._may_continue(earlier) and about.continues(earlier):
                self.tell(f"{self.blocks.final.name}: goes on with what an earlier run fetched")
            else:
                self.blocks.start(about)
        except BaseException:
            lane.reset()
            raise
        return lane, answer

    def _patiently(self, lane: Lane, start: int, stop: int, validator: str) -> tuple[Answer, int]:
        """An answer, and the length of the file, which is compared before anything is fetched."""
        pauses, wanted, wrong = Pauses(FIRST_TRIES), self.wanted.size_bytes, 0
        while True:
            try:
                answer = lane.open(start, min(stop, start + LEAST_SPAN_BYTES), validator)
                size = answer.total if answer.total is not None else wanted
                if size is None:
                    raise TryAgain("the server does not say how long the file is")
                if size and wanted in (None, size):
                    return answer, size
                wrong += 1
                if wrong > 1:  # it is not one odd answer
                    page = answer.media.lower().startswith("text/html")
                    raise SizeError(
                        f"the server sends {PAGE}" if page else None,
                        path=self._remote.name,
                        expected=wanted,
                        found=size,
                        remedy=SIGN_IN if page else None,
                    )
                raise TryAgain(f"the server's file has {size} bytes")
            except TryAgain as failure:
                lane.reset()
                pause_s = pauses.after(
                    failure,
                    progress=False,
                    name=self._remote.name,
                    resumes=bool(self.blocks.digests),
                )
                self.tell(f"{self._remote.name}: {failure}; again in {pause_s:.1f} s")
                time.sleep(pause_s)


def _absent(blocks: Blocks) -> list[int]:
    """Numbers of the blocks that were not written yet."""
    count = -(-blocks.file.file_bytes // BLOCK_BYTES)
    return [number for number in range(count) if number not in blocks.digests]
