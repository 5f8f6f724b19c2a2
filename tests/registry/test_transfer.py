"""Patience and pace: how often a lane tries, how long it waits, when a connection is too slow."""

from __future__ import annotations

import pytest

from ds4q.registry import transfer
from ds4q.registry.errors import TransferError
from ds4q.registry.remote import TryAgain
from ds4q.registry.transfer import Pauses, runs


def test_pauses_grow_and_end() -> None:
    pauses = Pauses(tries=5)
    failure = TryAgain("HTTP 503")
    waits = [pauses.after(failure, progress=False, name="x") for _ in range(4)]
    assert waits == [0.25, 0.5, 1.0, 2.0]
    with pytest.raises(TransferError, match=r"x: cannot be fetched: HTTP 503; pull again$"):
        pauses.after(failure, progress=False, name="x")


def test_progress_gives_fresh_patience_and_no_pause() -> None:
    pauses = Pauses(tries=3)
    failure = TryAgain("ended")
    for _ in range(50):
        assert pauses.after(failure, progress=False, name="x") > 0
        assert pauses.after(failure, progress=True, name="x") == 0


def test_a_server_may_ask_for_time_within_reason() -> None:
    pauses = Pauses(tries=10)
    assert pauses.after(TryAgain("429", 7.0), progress=True, name="x") == 7.0
    assert pauses.after(TryAgain("429", 1e6), progress=False, name="x") == transfer.MOST_WAIT_S


def test_pauses_have_a_ceiling() -> None:
    pauses = Pauses(tries=30)
    waits = [pauses.after(TryAgain("x"), progress=False, name="x") for _ in range(29)]
    assert waits[-1] == transfer.MOST_PAUSE_S


def test_numbers_become_runs() -> None:
    assert runs([]) == []
    assert runs([0]) == [(0, 1)]
    assert runs([1, 2, 3, 7, 9, 10]) == [(1, 4), (7, 8), (9, 11)]


@pytest.mark.parametrize(
    ("mine", "all_lanes", "others", "slow"),
    [
        (200_000, 200_000, 0, False),  # alone, above the least
        (50_000, 50_000, 0, True),
        (200_000, 30_000_000, 3, True),  # the others get fifty times as much each
        (2_000_000, 30_000_000, 3, False),
    ],
)
def test_a_slow_connection_is_one_beside_faster_ones(
    mine: int, all_lanes: int, others: int, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(transfer.time, "monotonic", lambda: now_s)  # type: ignore[attr-defined]
    pace = transfer._Pace(0)
    pace.check(mine // 2, mine // 2, others, 15.0)
    now_s += 16.0
    if slow:
        with pytest.raises(TryAgain, match="slow"):
            pace.check(mine // 2, all_lanes, others, 15.0)
    else:
        pace.check(mine // 2, all_lanes, others, 15.0)
