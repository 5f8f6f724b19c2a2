"""Owns the threads of a download: lanes that fetch ranges, the hash behind them, the flush.

Lanes take spans in the order of the file and write whole blocks; one thread follows behind the
contiguous front and hashes what is on disk, so that the digest is ready when the last block is. A
lane that fails gives its span back, with its place in it, for whoever is free next.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from ds4q.artifact.errors import TruncatedError
from ds4q.artifact.hfq import U8, pread_all
from ds4q.registry.blocks import BLOCK_BYTES, Blocks
from ds4q.registry.errors import SpaceError, TransferError
from ds4q.registry.remote import Answer, Lane, Remote, TryAgain

READ_BYTES = 256 << 10
LEAST_SPAN_BYTES = 2 * BLOCK_BYTES
MOST_SPAN_BYTES = 32 * BLOCK_BYTES
SPANS_PER_LANE = 8  # in what is left, so that lanes end together

TRIES = 10  # of one lane, while no lane gets anything
FIRST_TRIES = 4  # before anything was ever received: a wrong address should be told soon
PROGRESS_BYTES = 64 << 10  # less than this is not worth a fresh count of tries
PAUSE_S = 0.25  # doubled with each try
MOST_PAUSE_S = 16.0
MOST_WAIT_S = 300.0  # that a server may ask for
SLOW_AFTER_S = 15.0
HURRY_S = 5.0  # the same, and silence, while other lanes have nothing left to do
SLOW_BYTES_PER_S = 8 << 10
SLOW_SHARE = 1 / 16  # of what the other lanes get

FLUSH_BYTES = 256 << 20
FLUSH_EVERY_S = 15.0
TELL_EVERY_S = 0.1
JOIN_S = 5.0


@dataclass(order=True, slots=True)
class Span:
    """Bytes ``at`` .. ``stop`` to fetch; ``digest`` is of what came of the block with ``at``."""

    at: int
    stop: int
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128, compare=False)


class Pauses:
    """Counts the tries of one lane, and says how long to wait before the next."""

    def __init__(self, tries: int) -> None:
        self._most = tries
        self._tries = 0

    def after(
        self, failure: TryAgain, *, progress: bool, name: str, resumes: bool = False
    ) -> float:
        """Seconds to wait; raises ``TransferError`` where patience has ended.

        ``resumes``: another run would go on with what has come.
        """
        self._tries = 0 if progress else self._tries
        self._tries += 1
        if self._tries >= self._most:
            remedy = "pull again: it goes on where it stopped" if resumes else None
            raise TransferError(f"{TransferError.rule}: {failure}", path=name, remedy=remedy)
        pause_s = 0.0 if progress else min(PAUSE_S * 2 ** (self._tries - 1), MOST_PAUSE_S)
        return max(pause_s, min(failure.after_s, MOST_WAIT_S))


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Sorted numbers as runs ``(first, behind the last)``."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


class Transfer:
    """One pass over a file: fetch the ``missing`` blocks, hash the whole.

    Parameters
    ----------
    remote, validator : what to ask, and which version of it
    blocks : where to write; started
    missing : numbers of the blocks that are not on disk, sorted
    lanes : how many connections; 1 where the server does not know ranges
    progress : hears (bytes on disk, bytes of the file), on the calling thread
    tell : hears a line about what goes wrong and passes
    """

    def __init__(
        self,
        remote: Remote,
        validator: str,
        blocks: Blocks,
        missing: list[int],
        *,
        lanes: int,
        ranged: bool,
        progress: Callable[[int, int], None],
        tell: Callable[[str], None],
    ) -> None:
        self._remote, self._validator, self._blocks = remote, validator, blocks
        self._ranged, self._progress, self._tell = ranged, progress, tell
        self._size = blocks.file.file_bytes
        self._count = -(-self._size // BLOCK_BYTES)
        self._missing = set(missing)
        self._earlier = {n: d for n, d in blocks.digests.items() if n not in self._missing}
        self._todo = [Span(a * BLOCK_BYTES, self._end(b - 1)) for a, b in runs(missing)]
        self._lanes = [remote.lane() for _ in range(lanes)]
        self._turn = threading.Condition()  # guards everything below, and tells of changes
        self._on_disk = self._size - sum(span.stop - span.at for span in self._todo)
        self._received = 0
        self._idle = 0
        self._heard_s: dict[Lane, float] = {}  # when a lane that has work got something last
        self._stopped = False
        self._error: BaseException | None = None
        self._sha256: str | None = None

    @property
    def received(self) -> int:
        """Bytes that were fetched and written."""
        return self._received

    def run(self, first: tuple[Lane, Answer] | None = None) -> str:
        """Fetch and hash; SHA-256 (hex) of the whole file.

        ``first`` is an answer that was already begun, at the first missing byte.

        Raises
        ------
        TransferError, RefusedError : the server does not give the file
        SpaceError, OSError : the disk does not take it
        """
        span = answer = None
        if first is not None:
            self._lanes[0], answer = first
            span = self._take(answer)
        works: list[tuple[Callable[..., None], tuple[object, ...]]] = [
            (self._work, (lane,)) for lane in self._lanes
        ]
        works[0] = (self._work, (self._lanes[0], span, answer))
        works += [(self._hash, ()), (self._flush, ())]
        threads = [
            threading.Thread(target=self._guard, args=work, name="ds4q-fetch", daemon=True)
            for work in works
        ]
        try:
            for thread in threads:
                thread.start()
            self._watch()
        finally:
            with self._turn:
                self._stopped = True
                self._turn.notify_all()
            for lane in self._lanes:
                lane.abort()
            for thread in threads:
                if thread.ident is not None:
                    thread.join(JOIN_S)
            for lane in self._lanes:
                lane.reset()
        if self._sha256 is None:
            raise TransferError("stopped", path=self._remote.name)
        return self._sha256

    # ------------------------------------------------------------------ the calling thread

    def _watch(self) -> None:
        while True:
            with self._turn:
                if self._error is None and self._sha256 is None:
                    self._turn.wait(TELL_EVERY_S)
                error, done, on_disk = self._error, self._sha256, self._on_disk
                silent = self._silent()
            for lane in silent:
                lane.abort()
            if error is not None:
                raise error
            self._progress(on_disk, self._size)
            if done is not None:
                return

    def _silent(self) -> list[Lane]:
        """Lanes whose spans would be better off with those that are idle."""
        late_s = time.monotonic() - HURRY_S
        if not self._idle or self._todo:
            return []
        silent = [lane for lane, heard_s in self._heard_s.items() if heard_s < late_s]
        for lane in silent:
            del self._heard_s[lane]
        return silent

    def _guard(self, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
        """Run a thread's work; its error becomes the caller's."""
        try:
            work(*arguments)
        except BaseException as error:
            with self._turn:
                self._error = self._error or self._named(error)
                self._turn.notify_all()

    def _named(self, error: BaseException) -> BaseException:
        """The error with the file that the system had no name for, and what to do if it is full."""
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self._blocks.file.path)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = "free some space and pull again: what came is kept"
                return SpaceError(path=error.filename, remedy=remedy)
        return error

    # ------------------------------------------------------------------ lanes

    def _work(self, lane: Lane, span: Span | None = None, answer: Answer | None = None) -> None:
        """Fetch spans until there is nothing left, beginning with one that was taken already."""
        pauses, seen = Pauses(TRIES), 0
        while (span := span or self._take()) is not None:
            with self._turn:
                self._heard_s[lane] = time.monotonic()
            try:
                self._fill(lane, span, answer)
                with self._turn:
                    self._heard_s.pop(lane, None)
            except TryAgain as failure:
                lane.reset()
                with self._turn:
                    self._heard_s.pop(lane, None)
                    if self._stopped:
                        return
                    heapq.heappush(self._todo, span)
                    self._turn.notify_all()
                    progress = self._received - seen >= PROGRESS_BYTES
                    seen = self._received
                pause_s = pauses.after(
                    failure,
                    progress=progress,
                    name=self._remote.name,
                    resumes=self._ranged and bool(self._blocks.digests),
                )
                again = f"again in {pause_s:.1f} s" if pause_s else "trying again"
                self._tell(f"{self._remote.name}: {failure}; {again}")
                with self._turn:
                    self._turn.wait_for(lambda: self._stopped, pause_s)
            span = answer = None

    def _take(self, answer: Answer | None = None) -> Span | None:
        """The next span to fetch; None when there will be none. Waits while others may fail."""
        with self._turn:
            self._idle += 1
            self._turn.wait_for(lambda: self._todo or self._stopped or self._sha256 is not None)
            self._idle -= 1
            if self._stopped or self._sha256 is not None:
                return None
            span = heapq.heappop(self._todo)
            if not self._ranged:
                return span
            left = span.stop - span.at + sum(other.stop - other.at for other in self._todo)
            share = left // (SPANS_PER_LANE * len(self._lanes))
            want = min(max(share, LEAST_SPAN_BYTES), MOST_SPAN_BYTES)
            if answer is not None and answer.stop is not None:
                want = answer.stop - span.at
            cut = (span.at + want) // BLOCK_BYTES * BLOCK_BYTES
            if span.at < cut < span.stop and want < span.stop - span.at:
                heapq.heappush(self._todo, Span(cut, span.stop))
                span.stop = cut
                self._turn.notify_all()
            return span

    def _fill(self, lane: Lane, span: Span, answer: Answer | None) -> None:
        """Fetch one span; what came before a failure is kept in it."""
        pace = _Pace(self._received)
        while span.at < span.stop:
            if answer is None:
                answer = lane.open(span.at, span.stop, self._validator)
            self._check(answer, span)
            self._copy(lane, answer, span, pace)
            answer = None  # a server may offer less than it was asked for

    def _copy(self, lane: Lane, answer: Answer, span: Span, pace: _Pace) -> None:
        """Write what one answer holds of a span."""
        skip = span.at - answer.start
        stop = span.stop if answer.stop is None else min(span.stop, answer.stop)
        while span.at < stop:
            end = min((span.at // BLOCK_BYTES + 1) * BLOCK_BYTES, self._size)
            data = answer.read(min(READ_BYTES, skip or min(end, stop) - span.at))
            if not data:
                raise TryAgain("the connection ended early")
            patience_s = HURRY_S if self._idle else SLOW_AFTER_S
            pace.check(len(data), self._received, len(self._lanes) - 1, patience_s)
            if self._stopped:
                raise TryAgain("stopped")
            if skip:
                skip -= len(data)
                continue
            self._blocks.file.pwrite(data, span.at)
            span.digest.update(data)
            span.at += len(data)
            if span.at == end:
                self._blocks.record((end - 1) // BLOCK_BYTES, span.digest.hexdigest())
                span.digest = xxhash.xxh3_128()
            with self._turn:
                self._heard_s[lane] = time.monotonic()
                self._received += len(data)
                self._on_disk += len(data)
                if span.at == end:
                    self._missing.discard((end - 1) // BLOCK_BYTES)
                    self._turn.notify_all()

    def _check(self, answer: Answer, span: Span) -> None:
        """Only bytes of this version of the file, at their place."""
        if answer.total is not None and answer.total != self._size:
            raise TryAgain(f"the server's file has {answer.total} bytes now, not {self._size}")
        if answer.validator and self._validator and answer.validator != self._validator:
            raise TryAgain("the file on the server has changed")
        if answer.start != span.at and self._ranged:
            raise TryAgain("the server sent the whole file in place of a range")

    def _end(self, block: int) -> int:
        return min((block + 1) * BLOCK_BYTES, self._size)

    # ------------------------------------------------------------------ behind the front

    def _hash(self) -> None:
        digest = hashlib.sha256()
        buffer = np.empty(BLOCK_BYTES, dtype=np.uint8)
        for number in range(self._count):
            part = buffer[: self._end(number) - number * BLOCK_BYTES]
            while not self._read_block(number, part):
                self._give_up(number, len(part))
            if self._stopped:
                return
            digest.update(part.data)
        with self._turn:
            self._sha256 = digest.hexdigest()
            self._turn.notify_all()

    def _read_block(self, number: int, out: U8) -> bool:
        """Wait for a block and read it; False where an earlier run's block is not what it wrote."""
        with self._turn:
            self._turn.wait_for(lambda: self._stopped or number not in self._missing)
            earlier = self._earlier.pop(number, None)
            if self._stopped:
                return True
        try:
            pread_all(self._blocks.file.fd, out, number * BLOCK_BYTES, path=self._blocks.file.path)
        except TruncatedError:
            if earlier is None:
                raise
            return False
        return earlier is None or xxhash.xxh3_128_hexdigest(out.data) == earlier

    def _give_up(self, number: int, nbytes: int) -> None:
        """A block that was thought to be there is fetched again."""
        with self._turn:
            self._missing.add(number)
            self._on_disk -= nbytes
            start = number * BLOCK_BYTES
            heapq.heappush(self._todo, Span(start, start + nbytes))
            self._turn.notify_all()

    def _flush(self) -> None:
        """Push data to the disk meanwhile, so that little is left to wait for at the end."""
        due = self._received + FLUSH_BYTES

        def is_due() -> bool:
            return self._stopped or self._received >= due

        while True:
            with self._turn:
                self._turn.wait_for(is_due, FLUSH_EVERY_S)
                if self._stopped:
                    return
                due = self._received + FLUSH_BYTES
            os.fdatasync(self._blocks.file.fd)


class _Pace:
    """Finds a connection that has become much slower than it could be."""

    def __init__(self, received: int) -> None:
        self._since_s, self._received, self._mine = time.monotonic(), received, 0

    def check(self, nbytes: int, received: int, others: int, patience_s: float) -> None:
        """Count bytes of this connection; raise ``TryAgain`` where a fresh one is worth trying."""
        self._mine += nbytes
        now_s = time.monotonic()
        passed_s = now_s - self._since_s
        if passed_s < patience_s:
            return
        elsewhere = received - self._received - self._mine
        share = SLOW_SHARE * elsewhere / others if others else 0
        if self._mine < max(SLOW_BYTES_PER_S * passed_s, share):
            raise TryAgain(f"slow: {self._mine} bytes in {passed_s:.0f} s")
        self._since_s, self._received, self._mine = now_s, received, 0
