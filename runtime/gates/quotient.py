"""Statistics of the load-time gate: distribution-free intervals, and the verdict they give.

No measurement is assumed to be normal. One slow outlier moves an interval by one rank only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

Outcome = Literal["pass", "fail", "undecided"]


class Series(NamedTuple):
    """Seconds of loads and of what they are measured against; entry i of each is of pair i.

    Attributes
    ----------
    load_s, read_s : the load, and a plain read of the bytes that it read
    one_s, all_s : fixed work on one thread, and on as many as a load reads with
    """

    load_s: Sequence[float]
    read_s: Sequence[float]
    one_s: Sequence[float]
    all_s: Sequence[float]


class Interval(NamedTuple):
    """An estimate and its bounds; each bound is wrong with probability ``alpha`` at most."""

    low: float
    middle: float
    high: float


def quotient(now: Sequence[float], before: Sequence[float], alpha: float) -> Interval:
    """By what factor ``now`` is above ``before``: both are positive measurements of one quantity.

    All quotients of a value of ``now`` and a value of ``before`` are sorted; the bounds are the
    k-th smallest and the k-th largest, with k from the exact distribution of Mann and Whitney's U.
    With too few values for ``alpha`` the bounds are 0 and infinity.
    """
    found = sorted(a / b for a in now for b in before)
    return _cut(found, _rank_of_pairs(len(now), len(before), alpha))


def centre(values: Sequence[float], alpha: float) -> Interval:
    """The median of what ``values`` are drawn from, by the sign test."""
    total, below, rank = 2 ** len(values), 0, 0
    while (below := below + math.comb(len(values), rank)) <= alpha * total:
        rank += 1
    return _cut(sorted(values), rank)


def outcome(intervals: Iterable[Interval], limit: float) -> Outcome:
    """Whether all that ``intervals`` estimate is at most ``limit``, or all of it above."""
    bounds = list(intervals)
    if all(each.high <= limit for each in bounds):
        return "pass"
    return "fail" if all(each.low > limit for each in bounds) else "undecided"


def slowdown(
    now: Series, before: Series, limit: float, alpha: float
) -> tuple[dict[str, Interval], Outcome]:
    """By what factor loads are slower than before, and whether that is more than ``limit``.

    A load of the same code slows down by no more than the disk or the processor does, whichever
    slows down most. So it fails where it is slower by more than ``limit`` beside each of the plain
    read and the two kinds of work alone. It passes where it is slower by less beside what the pair
    would have it take: the read, and for what a load took longer than a read before, work; and the
    processor is as fast as before, since how work and waiting share that rest is not known.
    """
    alone = {name: getattr(now, name) for name in ("read_s", "one_s", "all_s")}
    intervals = {
        name: quotient(
            _over(now.load_s, beside), _over(before.load_s, getattr(before, name)), alpha
        )
        for name, beside in alone.items()
    }
    if outcome(intervals.values(), limit) == "fail":
        return intervals, "fail"
    rest = max(0.0, statistics.median(before.load_s) - statistics.median(before.read_s))
    expected = {}
    as_fast = True
    for name in ("one_s", "all_s"):
        usual = statistics.median(getattr(before, name))
        as_fast &= statistics.median(getattr(now, name)) <= limit * usual
        ratios = []
        for each in (now, before):
            work = zip(each.read_s, getattr(each, name), strict=True)
            ratios.append(_over(each.load_s, [read + rest * s / usual for read, s in work]))
        expected[f"expected_by_{name}"] = quotient(ratios[0], ratios[1], alpha)
    intervals |= expected
    passed = as_fast and outcome(expected.values(), limit) == "pass"
    return intervals, "pass" if passed else "undecided"


def _over(loads: Sequence[float], beside: Sequence[float]) -> list[float]:
    return [load / other for load, other in zip(loads, beside, strict=True)]


def _cut(ordered: Sequence[float], rank: int) -> Interval:
    """The ``rank``-th value from either end; 0: no bound."""
    low, high = (ordered[rank - 1], ordered[-rank]) if rank else (0.0, math.inf)
    return Interval(low, statistics.median(ordered), high)


@cache
def _rank_of_pairs(n: int, m: int, alpha: float) -> int:
    """The largest k for which P(U < k) is at most ``alpha``, of samples of ``n`` and ``m``."""
    # chances[j][u] is P(U = u) of samples of i and j: the largest value is in the first or second.
    chances = [np.ones(1) for _ in range(m + 1)]
    for i in range(1, n + 1):
        row = [np.ones(1)]
        for j in range(1, m + 1):
            both = np.zeros(i * j + 1)
            both[j:] += chances[j] * (i / (i + j))
            both[: i * (j - 1) + 1] += row[j - 1] * (j / (i + j))
            row.append(both)
        chances = row
    return int(np.searchsorted(np.cumsum(chances[m]), alpha, side="right"))
