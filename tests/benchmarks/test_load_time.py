"""Loads beside those of an older version: what has to be as it was, and what a disk decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import load_time
from benchmarks.harness import Recorder
from benchmarks.load_time import Sides, judge
from ds4q.artifact.hfq import Reader
from ds4q.runtime.gates.loading import Load


@pytest.fixture
def sides(tiny_artifact: Path, tmp_path: Path) -> Sides:
    """Two turns of sound loads: 10 s, and 4.4 s of a paged one whose plain read takes 4."""
    found = Sides(tiny_artifact, tmp_path)
    with Reader(tiny_artifact) as reader:
        entries = list(reader.tensors.values())
    for name in found.options:
        paged = name == "the smallest cache"
        kept = [entry for entry in entries if not paged or ".experts." not in entry.name]
        reads = np.array([(entry.offset, entry.nbytes, 0) for entry in kept], np.int64)
        load = Load(4.4 if paged else 10.0, 1, 20.0, reads, reads[:0], {} if paged else None, [])
        found.loads[name] = [load, load]
        found.plain_s[name] = [4.0, 4.0]
    return found


def change(sides: Sides, name: str, **values: Any) -> None:
    sides.loads[name] = [load._replace(**values) for load in sides.loads[name]]


def test_sound_loads_pass(sides: Sides) -> None:
    assert judge(sides) == []
    change(sides, "paging off", seconds=10.5)
    assert judge(sides) == []


def test_a_load_that_takes_longer_than_before_is_told(sides: Sides) -> None:
    change(sides, "a cache that holds all", seconds=10.6)
    assert judge(sides) == ["a cache that holds all: 1.060 x before"]
    change(sides, "before, again", seconds=10.8)  # the machine cannot tell that apart
    assert judge(sides) == []


def test_other_reads_than_before_are_told(sides: Sides) -> None:
    reads = sides.loads["before"][0].reads
    change(sides, "paging off", reads=reads[1:])
    change(sides, "a cache that holds all", later=reads[:1])
    assert judge(sides) == [
        f"{name}: other reads than before"
        for name in ("paging off", "a cache that holds all")
        for _ in range(2)
    ]


def test_a_paged_load_that_reads_an_expert_or_dawdles_is_told(sides: Sides) -> None:
    name = "the smallest cache"
    change(sides, name, seconds=4.9)
    assert judge(sides) == [f"{name}: 1.225 x a plain read of what it reads"]
    change(sides, name, seconds=4.0, reads=sides.loads["before"][0].reads)
    assert judge(sides) == [f"{name}: 192 reads of experts, 0 bytes twice"] * 2


@pytest.mark.parametrize(("costs", "red"), [(1.02, 0), (1.05, 1)])
def test_digests_are_judged_by_pairs_of_cold_loads(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, costs: float, red: int
) -> None:
    """Each pair drifts alike, by far more than digests may cost."""
    drift = iter([1.0, 1.0, 5.0, 5.0, 1.0, 1.0, 3.0, 3.0] * 2)
    sides = []

    def measure(path: Path, *, threads: int, cache: dict[str, bool]) -> Load:
        sides.append(cache.get("check_reads", True))
        nothing = np.empty((0, 3), np.int64)
        seconds = next(drift) * (costs if sides[-1] else 1)
        return Load(seconds, 1, 1, nothing, nothing, None, [])

    monkeypatch.setattr(load_time, "measure", measure)
    monkeypatch.setattr(load_time, "drop", lambda path: True)
    wrong = load_time.digests(tiny_artifact, 3, Recorder("load_time", []))
    assert len(wrong) == red
    assert sides[:4] == [False, True, True, False]  # in turn, not always one side first
