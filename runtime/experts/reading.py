"""Owns how experts' bytes get from the artifact into memory. Decides neither which nor where to;
the threads that do it are a transport's.

An expert that is one run in the file is one ``O_DIRECT`` read of the enclosing aligned range, which
a disk serves faster than the page cache is filled. Where the page cache holds it, reads are
buffered and scatter into place, and helpers share the work of copying.
"""

from __future__ import annotations

import enum
import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import PayloadValueError, TruncatedError
from ds4q.artifact.files import advise
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.runtime.digests import Digests
from ds4q.runtime.errors import CacheError, DigestError, ExpertReadError
from ds4q.runtime.experts.catalogue import Key, Record
from ds4q.runtime.experts.helpers import Helpers
from ds4q.runtime.experts.latencies import Latencies
from ds4q.runtime.experts.runs import PAGE, Run, runs, staging_bytes
from ds4q.runtime.experts.store import Phase
from ds4q.runtime.experts.transform import Parts

U8 = npt.NDArray[np.uint8]
READS = 4  # of a disk at a time: more were slower on every disk tried upstream (hipfire)
FILLERS = READS + 2  # threads that fill slots: so many read while two copy what they have read
_PROBES = 16  # pages of an expert that must all be cached for a buffered read
_GOLDEN = 0.6180339887498949
_COUNTS = [
    "reads",
    "bytes_read",
    "reads_direct",
    "reads_buffered",
    "direct_refused",
    "reads_checked",
]
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # of O_DIRECT or RWF_NOWAIT by a file system


class Purpose(enum.IntEnum):
    """Why an expert is read; the lowest is served first."""

    DEMAND = 0
    CERTAIN = 1
    SPECULATIVE = 2
    WARM = 3


class Fill(NamedTuple):
    """An expert to be read into a slot of its layer."""

    key: Key
    slot: int
    purpose: Purpose
    phase: Phase | None = None  # that demands it


Done = Callable[[Fill, BaseException | None], None]


def helpers_for(reads: int) -> int:
    """Helpers beside so many reads: two each, as far as there are processors."""
    return min(2 * reads, len(os.sched_getaffinity(0)) - 1)


class ExpertReader:
    """Reads experts of one artifact through file handles of its own; any thread may read.

    Parameters
    ----------
    reader : the open artifact; not used after construction
    records : all experts that will be read; they bound the buffers
    digests : compared with every expert that is read; None: nothing is compared
    legal : called with every tensor, and its bytes, that no digest vouches for; raises what it
        refuses. None: such bytes are believed
    reads : made at a time; threads beyond them copy and compare what they have read meanwhile
    notes : gets what a user should hear, one line each; may grow as long as experts are read
    bounces : buffers for ``read``, which needs one; more threads than that wait for each other
    helpers : threads beyond a caller's own that its matrices are read and compared by

    Attributes
    ----------
    staging_bytes : length of a buffer that ``stage`` can read any of the experts into
    notes : as given

    Raises
    ------
    CacheError : no reads at a time
    """

    def __init__(
        self,
        reader: Reader,
        records: Iterable[Record],
        *,
        digests: Digests | None = None,
        legal: Callable[[TensorEntry, U8], None] | None = None,
        notes: list[str] | None = None,
        reads: int = READS,
        bounces: int = 0,
        helpers: int = 0,
    ) -> None:
        if reads < 1:
            raise CacheError("reads at a time", path=reader.path, expected="1 or more", found=reads)
        self.path = reader.path
        self.notes: list[str] = [] if notes is None else notes
        self._opened = reader.opened
        self._digests = digests
        self._legal = legal
        self._seen: set[str] = set()  # tensors that were found legal
        self.staging_bytes = max(map(staging_bytes, records), default=0)
        self._lock = threading.Lock()
        self._latencies = Latencies()
        self._by_phase = {phase: Latencies() for phase in get_args(Phase)}
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._reads = threading.BoundedSemaphore(reads)
        self._turn = count()
        self._refused = False  # O_DIRECT
        self._closed = False
        self._running = 0
        self._direct = self._buffered = self._probe = -1
        try:
            self._buffered = reader.reopen()
            self._probe = reader.reopen()
            # Without it, asking for one page that is not cached would read ahead megabytes.
            advise(self._probe, 0, 0, os.POSIX_FADV_RANDOM)
            self._direct = self._open_direct(reader)
        except BaseException:
            self._close_files()
            raise
        self._helpers = Helpers(helpers, "ds4q-part") if helpers else None
        self._has_bounces = bounces > 0
        self._bounces: queue.SimpleQueue[U8] = queue.SimpleQueue()
        for _ in range(bounces):
            self._bounces.put(np.empty(self.staging_bytes, dtype=np.uint8))

    def read(self, record: Record, gate: U8, up: U8, down: U8, phase: Phase | None = None) -> None:
        """Fill three contiguous buffers, each of exactly its tensor's length, and check them.

        ``phase`` is the one that waits for it, for ``counters``.

        Raises
        ------
        CacheError : the reader has no buffers
        TruncatedError : the file ends within the expert
        ExpertReadError : the system cannot read it
        ChangedError : the file was written to since the artifact was opened
        DigestError : the bytes are not those that the receipt tells
        PayloadValueError : no receipt tells, and the type forbids them
        """
        if not self._has_bounces:  # also where the page cache makes them needless this time
            raise CacheError(
                "no buffers to read through",
                path=self.path,
                remedy="make the reader with bounces of 1 or more, or use stage",
            )
        parts = (gate, up, down)
        with self._under_way():
            if self._refused or self._cached(record):
                self._take_buffered(record, parts, phase)
                return
            bounce = self._bounces.get()
            try:
                with self._reads:
                    started = time.perf_counter()
                    staged, reads = self._read_direct(record, bounce)
                self._finish(
                    record, parts, started, reads, phase, lambda n: np.copyto(parts[n], staged[n])
                )
            finally:
                self._bounces.put(bounce)

    def stage(
        self,
        record: Record,
        staging: U8,
        begin: Callable[[int, U8], None] | None = None,
        phase: Phase | None = None,
    ) -> Parts:
        """Read an expert into ``staging``, wherever alignment puts it, and check it.

        Parameters
        ----------
        staging : (at least ``staging_bytes``,) u8, contiguous
        begin : called with the number of a matrix and its bytes as soon as they are read, from any
            thread; they are checked while what it begins goes on
        phase : as in ``read``

        Returns
        -------
        gate, up, down : views into ``staging``

        Raises
        ------
        as ``read``, or what ``begin`` raises; then it may have been called for some matrices
        """
        with self._under_way():
            if self._refused or self._cached(record):
                parts = _views(record, staging)
                self._take_buffered(record, parts, phase, begin)
                return parts
            with self._reads:
                started = time.perf_counter()
                parts, reads = self._read_direct(record, staging)

            def first(n: int) -> None:
                if begin is not None:
                    begin(n, parts[n])

            self._finish(record, parts, started, reads, phase, first)
            return parts

    def counters(self) -> dict[str, int]:
        """Reads, their bytes and how they were made; durations in microseconds, also by phase."""
        with self._lock:
            return self._counts | {
                "read_us": round(self._latencies.total_s * 1e6),
                "read_p50_us": self._latencies.percentile_us(50),
                "read_p99_us": self._latencies.percentile_us(99),
                **{
                    f"{phase}_read_p{percent}_us": latencies.percentile_us(percent)
                    for phase, latencies in self._by_phase.items()
                    for percent in (50, 99)
                },
            }

    def check_unwritten(self) -> None:
        """Raise ``ChangedError`` if the file was written to: no expert can be read any more."""
        with self._lock:  # so that ``close`` waits
            if not self._closed:
                self._check_unwritten()

    def close(self) -> None:
        """Close the files and free the buffers: at once, or when the last read that runs ends."""
        with self._lock:
            self._closed = True
            idle = not self._running
        if idle:
            self._free()

    # ------------------------------------------------------------------ how

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """A read, which keeps files and buffers even where nobody waits for it any more."""
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                last = self._closed and not self._running
            if last:
                self._free()

    def _free(self) -> None:
        if self._helpers is not None:
            self._helpers.close()
        self._close_files()
        while not self._bounces.empty():
            self._bounces.get()

    def _open_direct(self, reader: Reader) -> int:
        try:
            return reader.reopen(os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._refuse_direct()
            return -1

    def _refuse_direct(self) -> None:
        with self._lock:
            self._counts["direct_refused"] += 1
            if not self._refused:
                self.notes.append(
                    f"{self.path}: the file system refuses O_DIRECT; experts that are not in the "
                    "page cache are read through it"
                )
            self._refused = True

    def _close_files(self) -> None:
        for fd in (self._buffered, self._direct, self._probe):
            if fd >= 0:
                os.close(fd)
        self._direct = self._buffered = self._probe = -1

    def _cached(self, record: Record) -> bool:
        """Whether the page cache holds the expert, judged by some of its pages.

        They are other pages every time, since asking for one that is not there fetches it. A file
        system that cannot tell is read through the page cache.
        """
        whole = list(runs(record))
        span = whole[-1].offset + whole[-1].nbytes - whole[0].offset
        turn, byte = next(self._turn), bytearray(1)
        for probe in range(_PROBES):
            place = whole[0].offset + int((turn * _PROBES + probe) * _GOLDEN % 1.0 * span)
            try:
                os.preadv(self._probe, [byte], place, os.RWF_NOWAIT)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in _REFUSALS:
                    return True
                raise self._failed(whole[0], error) from error
        return True

    def _take_buffered(
        self,
        record: Record,
        parts: Parts,
        phase: Phase | None,
        begin: Callable[[int, U8], None] | None = None,
    ) -> None:
        """Through the page cache: helpers share a read, a matrix each.

        A disk serves one long read soonest, but one thread that copies from memory is slower than
        three.
        """
        whole = list(runs(record))

        def first(n: int) -> None:
            entry = record.entries[n]
            if self._helpers is not None:
                part = Run(entry.offset, entry.nbytes, (entry,))
                self._scatter(
                    part, parts[n : n + 1], any(part.offset == run.offset for run in whole)
                )
            if begin is not None:
                begin(n, parts[n])

        with self._reads:
            started = time.perf_counter()
            if self._helpers is None:
                for run in whole:
                    into = [parts[record.entries.index(entry)] for entry in run.entries]
                    self._scatter(run, into)
            self._finish(record, parts, started, len(whole), phase, first)

    def _scatter(self, run: Run, parts: Sequence[U8], counts: bool = True) -> None:
        """One buffered read into the buffers of its tensors; ``counts``: not a part of another."""
        left = [part.data for part in parts]
        at = run.offset
        while left:
            n = self._preadv_buffered(left, at, run)
            at += n
            while left and n >= len(left[0]):
                n -= len(left.pop(0))
            if left:
                left[0] = left[0][n:]
        self._count("reads_buffered", run.nbytes, counts)

    def _read_direct(self, record: Record, staging: U8) -> tuple[Parts, int]:
        """The expert in ``staging``, and how many reads it took; some buffered if need be."""
        found: dict[TensorEntry, U8] = {}
        reads = 0
        at = -staging.ctypes.data % PAGE
        for run in runs(record):
            start, nbytes = run.aligned
            window = staging[at : at + nbytes]
            try:
                have = os.preadv(self._direct, [window.data], start)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise self._failed(run, error) from error
                self._refuse_direct()
                have = 0
            # What is missing ends the file, or lies behind a sector that cannot be read: read
            # another way, it says which.
            wanted = run.offset + run.nbytes - start
            kind = "reads_direct" if have >= wanted else "reads_buffered"
            while have < wanted:
                have += self._preadv_buffered([window[have:wanted].data], start + have, run)
            self._count(kind, run.nbytes)
            reads += 1
            for entry in run.entries:
                lead = entry.offset - start
                found[entry] = window[lead : lead + entry.nbytes]
            at += nbytes
        return (found[record.gate], found[record.up], found[record.down]), reads

    def _preadv_buffered(self, views: Sequence[memoryview], offset: int, run: Run) -> int:
        """Bytes read, at least one."""
        try:
            n = os.preadv(self._buffered, views, offset)
        except OSError as error:
            raise self._failed(run, error) from error
        if n == 0:
            raise self._truncated(run, offset)
        return n

    # ------------------------------------------------------------------ what became of it

    def _finish(
        self,
        record: Record,
        parts: Parts,
        started: float,
        reads: int,
        phase: Phase | None,
        first: Callable[[int], None],
    ) -> None:
        """Do ``first`` with each matrix, by its number, and then compare it; side by side."""

        def handle(n: int) -> bool:
            first(n)
            return self._vouched(record.entries[n], parts[n])

        try:
            vouched = all(self._side_by_side(handle, len(parts)))
        except (DigestError, PayloadValueError):
            self._check_unwritten()  # a write to the file explains wrong bytes better
            raise
        self._check_unwritten()
        with self._lock:
            self._counts["reads_checked"] += reads if vouched else 0
            took = time.perf_counter() - started
            self._latencies.add(took)
            if phase is not None:
                self._by_phase[phase].add(took)

    def _vouched(self, entry: TensorEntry, part: U8) -> bool:
        """Whether a receipt says that these are the bytes; without one they must be legal.

        That is looked at the first time only: it takes as long as a read does from memory.
        """
        if self._digests is not None and self._digests.check(entry, part):
            return True
        if self._legal is not None and entry.name not in self._seen:
            self._legal(entry, part)
            self._seen.add(entry.name)
        return False

    def _check_unwritten(self) -> None:
        """Refuse bytes that were read from a file that was written to, checked or not."""
        note = self._opened.check_bytes(self._buffered)
        if note is not None:
            self.notes.append(note)

    def _side_by_side(self, handle: Callable[[int], bool], count: int) -> list[bool]:
        """``handle`` of each number, as far as helpers are free; all have ended when it returns."""
        ahead: dict[int, Future[bool]] = {}
        if self._helpers is not None:
            ahead = {n: self._helpers.submit(partial(handle, n)) for n in range(1, count)}
        found: list[bool] = []
        errors: list[BaseException] = []
        for n in range(count):
            try:
                begun = n in ahead and not ahead[n].cancel()
                found.append(ahead[n].result() if begun else handle(n))
            except BaseException as error:  # the others still use their buffers
                errors.append(error)
        if errors:
            raise errors[0]
        return found

    def _count(self, kind: str, nbytes: int, reads: int = 1) -> None:
        with self._lock:
            self._counts[kind] += reads
            self._counts["reads"] += reads
            self._counts["bytes_read"] += nbytes

    def _truncated(self, run: Run, at: int) -> TruncatedError:
        cut = next((e for e in run.entries if e.offset + e.nbytes > at), run.entries[-1])
        return TruncatedError(
            "the file ends inside an expert",
            path=self.path,
            tensor=cut.name,
            expected=f"{run.nbytes} bytes at offset {run.offset}",
            found=f"{max(0, at - run.offset)} bytes",
        )

    def _failed(self, run: Run, error: OSError) -> ExpertReadError:
        return ExpertReadError(path=self.path, tensor=run.entries[0].name, found=error.strerror)


def _views(record: Record, staging: U8) -> Parts:
    """Gate, up and down one after the other from the beginning of ``staging``."""
    up, down = record.gate.nbytes, record.gate.nbytes + record.up.nbytes
    return staging[:up], staging[up:down], staging[down : record.nbytes]
