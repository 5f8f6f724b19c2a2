"""Owns ds4-tiny as whole artifacts that gates accept: lossless, and with rounded dense tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds4q.artifact.report import Check, Report
from ds4q.artifact.types import Q8F16
from ds4q.runtime.gates import Gate, LoadTime, Surroundings, loading, pagecache, yardstick
from tests.runtime import artifacts
from tests.runtime.gates.loads import Loads, reads_of
from tests.runtime.gates.tiny import TINY, Made, Measure, write


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Writes ds4-tiny with changes to its tensors, ``ds4q`` object, config or other metadata."""
    exact = artifacts.pack(TINY)
    folder = tmp_path_factory.mktemp("gates")

    def make(
        tensors: dict[str, artifacts.Packed] | None = None,
        config: dict[str, Any] | None = None,
        others: dict[str, Any] | None = None,
        **ours: Any,
    ) -> Path:
        path = folder / f"{len(list(folder.iterdir()))}.hfq"
        return write(path, exact | (tensors or {}), config or {}, others or {}, ours)

    return make


@pytest.fixture(scope="session")
def lossless(made: Made) -> Path:
    """ds4-tiny, exact."""
    return made()


@pytest.fixture(scope="session")
def rounded(made: Made) -> Path:
    """ds4-tiny with dense matrices in Q8F16."""
    return made(artifacts.pack(TINY, Q8F16), recipe="fp4-q8")


@pytest.fixture
def measure() -> Measure:
    """Runs a gate as ``verify`` does: an error becomes the failure of its check."""

    def run(gate: Gate, path: Path, **where: Any) -> Check:
        report = Report({"path": str(path)})
        with report.check(gate.name) as check:
            gate.prepare(path, Surroundings(**{"threads": 2} | where))(check)
        return check

    return run


@pytest.fixture
def loads(lossless: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    whole = reads_of(lossless)
    found = Loads(
        lossless, {"off": whole, "all": whole, "paged": reads_of(lossless, experts=False)}
    )
    monkeypatch.setattr(loading, "measure", found.measure)
    monkeypatch.setattr(yardstick, "timed_read", found.timed_read)
    monkeypatch.setattr(yardstick, "fixed_work", found.fixed_work)
    monkeypatch.setattr(yardstick, "plain_read", lambda path, reads: found.plain_s["off"])
    monkeypatch.setattr(pagecache, "drop", found.drop)
    return found


@pytest.fixture
def run(loads: Loads, measure: Measure) -> Callable[..., Any]:
    """Runs the gate over ``loads``."""
    return lambda **options: measure(LoadTime(**options), loads.path)
