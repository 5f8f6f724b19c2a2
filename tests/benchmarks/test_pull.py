"""The benchmark of pulls, at its true size: every fault, a kill, and the bytes that it took."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import harness, pull
from tests.registry.server import serving


@pytest.mark.slow
def test_two_gibibytes_come_through_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    (tmp_path / "served").mkdir()
    with serving(tmp_path / "served", rate_bytes_per_s=400e6) as server:
        bench = pull.Bench(tmp_path, server, 2048)
        assert pull.misbehave(bench, harness.Recorder("pull", [])) == []
    bench.clear()
    bench.artifact.unlink()
