"""Worker threads: each row exactly once, errors reach the caller, small work is not shared."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ds4q.runtime.backend import workers
from ds4q.runtime.backend.workers import Workers
from ds4q.runtime.errors import RunError
from tests.checks import check_refused


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 1000])
def test_every_row_is_visited_once(threads: int, rows: int) -> None:
    visits = np.zeros(rows, dtype=np.int64)

    def piece(lo: int, hi: int) -> None:
        assert lo < hi
        visits[lo:hi] += 1

    pool = Workers(threads)
    for _ in range(3):
        pool.run(piece, rows)
    assert (visits == 3).all()


def test_several_threads_take_part() -> None:
    meeting = threading.Barrier(3, timeout=300)
    names = set()

    def piece(lo: int, hi: int) -> None:
        if lo < 3:
            meeting.wait()  # passes only when three threads are inside at once
        names.add(threading.current_thread().name)

    Workers(3).run(piece, 12)
    assert len(names) == 3


def test_an_error_in_a_helper_reaches_the_caller() -> None:
    caller = threading.get_ident()
    both = threading.Barrier(2, timeout=300)

    def piece(lo: int, hi: int) -> None:
        if lo < 2:
            both.wait()
        if threading.get_ident() != caller:
            raise ZeroDivisionError("in a helper")

    with pytest.raises(ZeroDivisionError):
        Workers(2).run(piece, 8)


def test_small_work_and_single_threads_are_not_shared() -> None:
    assert Workers(2).shares(2 * workers.SHARED_BYTES)
    assert not Workers(2).shares(2 * workers.SHARED_BYTES - 1)
    assert Workers(16).shares(16 * workers.SHARED_BYTES // 15 + 1)
    assert not Workers(16).shares(16 * workers.SHARED_BYTES // 15 - 1)
    assert not Workers(1).shares(1 << 40)


@pytest.mark.parametrize("threads", [0, -1])
def test_a_backend_needs_a_thread(threads: int) -> None:
    check_refused(RunError, lambda: Workers(threads), says=["threads", f"found {threads}"])
