"""Ranks and devices that are not there yet: refused by name, from the runtime's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import SpreadError
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.spread import Spread
from tests.checks import check_refused

PAGED = CacheOptions(slots=4)


@pytest.mark.parametrize(
    ("spread", "cache", "says"),
    [
        (Spread(2), None, ["there are no ranks yet", "found 2"]),
        (Spread(2), PAGED, ["paged expert cache", "fill transform", "guard goes when", "found 2"]),
        (Spread(0), PAGED, ["number of ranks", "found 0"]),
        (Spread(1, ("cpu", "hip")), PAGED, ["several devices (cpu, hip)", "one device"]),
        (Spread(1, ("cpu", "hip")), None, ["several devices (cpu, hip)"]),
    ],
)
def test_an_engine_refuses(
    tiny_path: Path, spread: Spread, cache: CacheOptions | None, says: list[str]
) -> None:
    load = lambda: Engine.load(tiny_path, threads=1, cache=cache, spread=spread)  # noqa: E731
    check_refused(SpreadError, load, says=says)


def test_one_rank_is_no_rank(tiny_path: Path) -> None:
    with Engine.load(tiny_path, threads=1, cache=PAGED, spread=Spread(1)) as engine:
        assert engine.cache_counters() is not None
