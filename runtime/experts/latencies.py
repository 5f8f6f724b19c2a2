"""Owns percentiles of durations."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

_EDGES_US = tuple(1.05**i for i in range(420))  # to about 13 minutes


class Latencies:
    """Percentiles of any number of durations in fixed memory, to within 5 %."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_EDGES_US) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.total_s += seconds
        self._counts[bisect_left(_EDGES_US, seconds * 1e6)] += 1

    def percentile_us(self, percent: float) -> int:
        """Microseconds that ``percent`` of the durations do not exceed; 0 where there are none."""
        reached = list(accumulate(self._counts))
        if not reached[-1]:
            return 0
        edge = bisect_left(reached, reached[-1] * percent / 100)
        return round(_EDGES_US[min(edge, len(_EDGES_US) - 1)])
