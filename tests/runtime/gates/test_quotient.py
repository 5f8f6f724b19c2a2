"""The statistics of the load-time gate on drawn series: wrong verdicts, power, undecided."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from ds4q.runtime.gates.load_time import ALPHA, LOOKS, MAX_RATIO
from ds4q.runtime.gates.quotient import (
    Interval,
    Series,
    _rank_of_pairs,
    centre,
    outcome,
    quotient,
    slowdown,
)

TRIALS = 200
LOOK = ALPHA / LOOKS / 3


def drawn(
    rng: np.random.Generator,
    count: int,
    spread: float,
    *,
    slow: float = 1,
    disk: float = 1,
    processor: float = 1,
    lasting: float = 0,
) -> Series:
    """Pairs of a load that reads for 0.7 s and works for 0.3 s.

    ``disk`` and ``processor`` slow down what the machine does, ``slow`` the load alone;
    ``lasting`` is the deviation of what a whole pair has in common.
    """
    common = np.exp(rng.normal(0, lasting, count))

    def seconds(middle: float) -> list[float]:
        found: list[float] = (middle * common * np.exp(rng.normal(0, spread, count))).tolist()
        return found

    load = slow * (0.7 * disk + 0.3 * processor)
    return Series(seconds(load), seconds(0.7 * disk), seconds(processor), seconds(processor))


def verdicts(now: int = 14, before: int = 14, spread: float = 0.03, **state: Any) -> Counter[str]:
    """Outcomes of ``TRIALS`` comparisons with a baseline of a quiet machine."""
    rng = np.random.default_rng(7)
    return Counter(
        slowdown(drawn(rng, now, spread, **state), drawn(rng, before, 0.03), MAX_RATIO, LOOK)[1]
        for _ in range(TRIALS)
    )


# ---------------------------------------------------------------- intervals


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (4, 4), (5, 2)])
def test_ranks_are_those_of_all_arrangements(n: int, m: int) -> None:
    """Counted out: how often a sample of ``n`` among ``n + m`` ranks has so few pairs below."""
    sums = [sum(at) - n * (n - 1) // 2 for at in combinations(range(n + m), n)]
    for alpha in (0.001, 0.01, 0.05, 0.1, 0.3, 0.5):
        good = [k for k in range(n * m + 2) if sum(s < k for s in sums) <= alpha * len(sums)]
        assert _rank_of_pairs(n, m, alpha) == max(good)


def test_bounds_of_a_quotient_and_of_a_median() -> None:
    now, before = [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0], [1.0, 1, 1, 1, 1, 1, 2]
    found = quotient(now, before, 0.0004)  # the smallest and the largest quotient
    assert found == Interval(1.0, 7.0, 14.0)
    assert quotient(now, before, 0.0002) == Interval(0.0, 7.0, math.inf)
    assert centre(now, 0.008) == Interval(2.0, 8.0, 14.0)
    assert centre(now[:3], 0.01) == Interval(0.0, 4.0, math.inf)


def test_an_outcome_needs_every_interval() -> None:
    low, across, high = Interval(0.9, 1, 1.1), Interval(1, 1.1, 1.2), Interval(1.15, 1.2, 1.3)
    assert outcome([low, low], 1.1) == "pass"
    assert outcome([high, high], 1.1) == "fail"
    for mixed in ([low, across], [high, across], [low, high], [across]):
        assert outcome(mixed, 1.1) == "undecided"


def test_a_bound_is_wrong_no_more_often_than_it_says() -> None:
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(2000):
        now, before = (np.exp(rng.normal(0, 0.1, 7)).tolist() for _ in range(2))
        wrong += quotient(now, before, 0.05).low > 1
    assert wrong <= 0.065 * 2000


# ---------------------------------------------------------------- verdicts


def test_an_unchanged_load_on_a_quiet_machine_passes() -> None:
    assert verdicts()["pass"] >= 0.95 * TRIALS
    assert verdicts(now=7)["pass"] >= 0.9 * TRIALS


def test_a_load_that_takes_20_percent_longer_fails_on_a_quiet_machine_and_passes_on_none() -> None:
    found = verdicts(slow=1.2)
    assert (found["pass"], found["fail"] >= 0.9 * TRIALS) == (0, True)
    for state in (
        {"spread": 0.1},
        {"spread": 0.3},
        {"spread": 0.1, "lasting": 0.5},
        {"disk": 2},
        {"processor": 2},
        {"disk": 2, "processor": 2},
        {"disk": 0.5},
        {"processor": 0.5},
    ):
        assert verdicts(slow=1.2, **state)["pass"] == 0, state


@pytest.mark.parametrize(
    "state",
    [
        {"spread": 0.1},
        {"spread": 0.3},
        {"spread": 0.1, "lasting": 0.5},
        {"disk": 2},
        {"disk": 0.5},
        {"processor": 2},
        {"processor": 0.5},
        {"disk": 2, "processor": 2, "spread": 0.2},
        {"disk": 1.5, "processor": 3, "spread": 0.2},
    ],
)
def test_an_unchanged_load_never_fails_on_a_noisy_machine(state: dict[str, Any]) -> None:
    assert verdicts(**state)["fail"] == 0
    assert verdicts(now=7, **state)["fail"] == 0


def test_a_slower_disk_alone_leaves_a_verdict_and_a_busy_processor_none() -> None:
    assert verdicts(disk=2)["pass"] >= 0.95 * TRIALS
    assert verdicts(processor=2) == {"undecided": TRIALS}
    assert verdicts(spread=0.3)["undecided"] >= 0.95 * TRIALS


def test_a_processor_that_is_slower_does_not_excuse_a_load_that_waits() -> None:
    """Work is twice as slow and the load 1.2 times, by sleeping: it stays undecided."""
    rng = np.random.default_rng(1)
    before = drawn(rng, 14, 0.01)
    now = drawn(rng, 14, 0.01, processor=2)._replace(load_s=[1.2] * 14)
    assert slowdown(now, before, MAX_RATIO, LOOK)[1] == "undecided"
