"""Owns packed reads: runs of a file into one buffer per job, in parallel, jobs in their order.

It knows no device and no tensor: whoever asks brings the buffers, and may check what was read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds4q.artifact.files import open_regular
from ds4q.artifact.hfq import pread_all
from ds4q.runtime.errors import PackedReadError

U8 = npt.NDArray[np.uint8]

LANES = 4  # more parallel reads were slower on every disk tried upstream (hipfire)
_LARGEST_OFFSET = (1 << 63) - 1  # of a file, as pread takes it


class Run(NamedTuple):
    """``nbytes`` at ``offset`` of the file, to lie ``at`` that place of the job's buffer."""

    offset: int
    nbytes: int
    at: int


@dataclass(frozen=True, slots=True)
class Job:
    """Runs that land in one buffer of ``nbytes``, one behind the other.

    ``check``, where there is one, is called with the filled buffer in the lane that filled it.

    Raises
    ------
    PackedReadError : no runs, an empty one, or one that no file can hold
    """

    label: str
    runs: tuple[Run, ...]
    check: Callable[[U8], None] | None = None

    def __post_init__(self) -> None:
        end = 0
        for run in self.runs:
            if run.nbytes < 1 or run.offset < 0 or run.offset + run.nbytes > _LARGEST_OFFSET:
                raise PackedReadError(
                    f"{self.label}: bad run", found=f"{run.nbytes} bytes at {run.offset}"
                )
            if run.at < end:
                raise PackedReadError(f"{self.label}: runs overlap", expected=end, found=run.at)
            end = run.at + run.nbytes
        if not self.runs:
            raise PackedReadError(f"{self.label}: nothing to read")

    @property
    def nbytes(self) -> int:
        """Length of the buffer."""
        return self.runs[-1].at + self.runs[-1].nbytes


def packed(label: str, places: Sequence[tuple[int, int]]) -> Job:
    """A job of (offset, length) ``places``, back to back in exactly that order."""
    runs, at = [], 0
    for offset, nbytes in places:
        runs.append(Run(offset, nbytes, at))
        at += nbytes
    return Job(label, tuple(runs))


def read_jobs(
    path: str | os.PathLike[str],
    jobs: Sequence[Job],
    take: Callable[[int], U8],
    *,
    ahead: int = 2 * LANES,
    reopen: Callable[[], int] | None = None,
) -> Generator[tuple[Job, U8], None, None]:
    """Yield each job with its filled buffer, in the order of ``jobs``.

    Up to four lanes read, each through a file handle of its own.

    Parameters
    ----------
    take : called with the bytes that a job needs, for a buffer of that length; when it is called
        for a job, the consumer has had all but the ``ahead - 1`` jobs before it
    ahead : most jobs that have a buffer and have not been yielded
    reopen : makes a handle, which is closed here; None opens ``path``

    Raises
    ------
    TruncatedError : the file ends within a run
    """
    with ExitStack() as stack:
        handles: SimpleQueue[int] = SimpleQueue()
        for _ in range(min(LANES, len(jobs))):
            handle = open_regular(path) if reopen is None else reopen()
            stack.callback(os.close, handle)
            handles.put(handle)

        def fill(job: Job, buffer: U8) -> U8:
            handle = handles.get()
            try:
                for run in job.runs:
                    pread_all(handle, buffer[run.at : run.at + run.nbytes], run.offset, path=path)
            finally:
                handles.put(handle)
            if job.check is not None:
                job.check(buffer)
            return buffer

        pool = stack.enter_context(ThreadPoolExecutor(LANES, "ds4q-read"))
        # Runs before the pool is left, so that what nobody waits for any more is not read.
        stack.callback(pool.shutdown, cancel_futures=True)
        waiting: deque[tuple[Job, Future[U8]]] = deque()
        rest = iter(jobs)
        while True:
            for job in islice(rest, ahead - len(waiting)):
                waiting.append((job, pool.submit(fill, job, take(job.nbytes))))
            if not waiting:
                return
            job, filled = waiting.popleft()
            yield job, filled.result()
