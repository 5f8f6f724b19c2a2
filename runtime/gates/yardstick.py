"""What a load is measured against in the same pair: a plain read of its bytes, and fixed work.

The plain read changes with the disk, the fixed work with the processor. Both are short, so that
they run close in time to the load and meet the same neighbours.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from ds4q.artifact.files import open_regular
from ds4q.artifact.hfq import pread_all
from ds4q.runtime.gates.loading import I64
from ds4q.runtime.gates.pagecache import drop

LANES = 4  # threads that a load reads with
PIECE_BYTES = 16 << 20
LEAST_READ_S = 0.1  # shorter plain reads are repeated, up to MOST_READS times
MOST_READS = 10
WORK_PIECES = 24  # 0.1 to 0.2 s on one thread
WORK_BYTES = 4 << 20
HASHED_BYTES = 2 << 20


class Work(NamedTuple):
    """What the fixed work took.

    Attributes
    ----------
    one_s, all_s : seconds on one thread, and of as much work for each of ``LANES`` threads
    share : of the processors that ``LANES`` threads could use, how much they got
    """

    one_s: float
    all_s: float
    share: float


def fixed_work() -> Work:
    """Fill and hash fresh memory: on one thread, then on ``LANES`` threads."""
    start_s = time.perf_counter()
    _work(WORK_PIECES)
    one_s = time.perf_counter() - start_s
    with ThreadPoolExecutor(LANES, "ds4q-work") as pool:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for _ in pool.map(_work, [WORK_PIECES] * LANES):
            pass
        all_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return Work(one_s, all_s, cpu_s / (all_s * min(LANES, len(os.sched_getaffinity(0)))))


def _work(pieces: int) -> None:
    """Lets other threads run meanwhile: filling and hashing release Python's lock."""
    for _ in range(pieces):
        with mmap.mmap(-1, WORK_BYTES) as memory:  # from the kernel each time, as a load's buffers
            filled = np.frombuffer(memory, np.uint8)
            filled.fill(1)
            hashlib.sha256(filled.data[:HASHED_BYTES]).digest()
            del filled  # or the map could not be closed


def timed_read(path: str | os.PathLike[str], reads: I64) -> tuple[float, bool]:
    """Mean seconds of ``plain_read``, and whether the file was never in the page cache before."""
    cold, spent_s, count = True, 0.0, 0
    while count < MOST_READS and spent_s < LEAST_READ_S:
        cold &= drop(path)
        spent_s += plain_read(path, reads)
        count += 1
    return spent_s / count, cold


def plain_read(path: str | os.PathLike[str], reads: I64) -> float:
    """Seconds in which the bytes of ``reads`` [N, 3] come from the disk, neighbours in one piece.

    By as many threads as a load has, each into one buffer of its own.
    """
    pieces = [
        (begin, min(PIECE_BYTES, end - begin))
        for start, stop in _merged(reads)
        for begin, end in ((at, stop) for at in range(start, stop, PIECE_BYTES))
    ]
    fd = open_regular(path)
    held = threading.local()

    def read(piece: tuple[int, int]) -> None:
        if not hasattr(held, "buffer"):
            held.buffer = np.empty(PIECE_BYTES, np.uint8)
        pread_all(fd, held.buffer[: piece[1]], piece[0], path=path)

    try:
        with ThreadPoolExecutor(LANES, "ds4q-plain") as pool:
            start_s = time.perf_counter()
            for _ in pool.map(read, pieces):
                pass
            return time.perf_counter() - start_s
    finally:
        os.close(fd)


def _merged(reads: I64) -> list[tuple[int, int]]:
    """Begin and end of the stretches of the file that ``reads`` [N, 3] cover."""
    merged: list[tuple[int, int]] = []
    for offset, nbytes, _ in sorted(reads.tolist()):
        if merged and offset <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], offset + nbytes)
        else:
            merged.append((offset, offset + nbytes))
    return merged
