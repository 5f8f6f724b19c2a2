"""Owns the threads of the CPU backend: a range of rows is cut up and shared out.

It knows no kernel; results cannot depend on it, since every row is computed alone.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ds4q.runtime.errors import RunError

# What sharing out a call costs, as work: 0.15 ms. Two threads must have twice as much to share.
SHARED_BYTES = 4 << 20
PIECES_PER_THREAD = 4  # so that a core which other programs slow down gets less


class Workers:
    """``threads - 1`` helper threads, started on first use, beside the caller's own."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise RunError("bad number of threads", expected="1 or more", found=threads)
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def shares(self, work_bytes: int) -> bool:
        """Whether a call that reads ``work_bytes`` of weights is worth sharing out."""
        return self.pays(work_bytes, SHARED_BYTES)

    def pays(self, work: int, least: int) -> bool:
        """Whether sharing out saves more than it costs, which is ``least`` of ``work``.

        N threads save all but the N-th part: two save half of it, many save nearly all.
        """
        return work * (self.threads - 1) >= least * self.threads and self.threads > 1

    def run(self, piece: Callable[[int, int], None], rows: int) -> None:
        """Call ``piece(lo, hi)`` for disjoint ranges that cover ``range(rows)``.

        ``piece`` must own references to all that its kernel addresses: after an interrupt in the
        calling thread the helpers still finish the ranges they have begun.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="ds4q-cpu")
        step = -(-rows // (self.threads * PIECES_PER_THREAD))
        starts = iter(range(0, rows, step))  # shared: each thread takes the next range

        def work() -> None:
            for lo in starts:
                piece(lo, min(lo + step, rows))

        helpers = [self._pool.submit(work) for _ in range(self.threads - 1)]
        work()
        for helper in helpers:
            helper.result()
