"""Percentiles of durations in fixed memory."""

from __future__ import annotations

import pytest

from ds4q.runtime.experts.latencies import Latencies


def test_latencies_are_told_to_within_five_percent() -> None:
    latencies = Latencies()
    assert latencies.percentile_us(50) == 0
    durations = [i * 1e-5 for i in range(1, 10_001)]
    for duration in durations:
        latencies.add(duration)
    assert latencies.percentile_us(50) == pytest.approx(50_000, rel=0.05)
    assert latencies.percentile_us(99) == pytest.approx(99_000, rel=0.05)
    assert latencies.percentile_us(100) >= 100_000
    assert latencies.total_s == pytest.approx(sum(durations))
    latencies.add(1e9)
    assert latencies.percentile_us(100) > 500e6
