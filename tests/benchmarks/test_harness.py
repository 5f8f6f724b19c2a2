"""The benchmark harness: sides take turns, rates come from seconds, rows reach the file."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Recorder, Times, alternate


def test_sides_take_turns_after_one_unmeasured_run() -> None:
    order: list[str] = []
    times = alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3)
    assert order == ["a", "b"] * 4
    assert {name: (len(t.wall), len(t.cpu)) for name, t in times.items()} == {
        "a": (3, 3),
        "b": (3, 3),
    }


def test_rows_carry_the_rate_and_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "commit", lambda: "abc1234")
    times = Times(wall=[2.0, 4.0, 1.0], cpu=[2.0, 1.0, 0.5])
    for _ in range(2):
        record = Recorder("some", ["--repeats", "3"])
        record.add("copy", times, "GB/s", amount=8.0)
        record.add("start", times, "s")
        record.add("encode", times, "M/CPU-s", amount=8.0, per_cpu=True)
        record.write()
    with (tmp_path / "some.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6, "a second run is appended under one header"
    assert tuple(rows[0]) == harness.COLUMNS
    assert [rows[0][key] for key in ("n", "median", "min", "max", "unit", "cpu_per_wall")] == [
        "3",
        "4",
        "2",
        "8",
        "GB/s",
        "0.50",
    ]
    assert rows[1]["median"] == "2"
    assert [rows[2][key] for key in ("median", "min", "max")] == ["8", "4", "16"]
    assert rows[0]["command"] == "python -m benchmarks.some --repeats 3"
    assert rows[0]["commit"] == "abc1234"
    assert "cores" in rows[0]["machine"]
