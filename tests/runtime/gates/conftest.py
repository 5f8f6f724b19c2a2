"""Owns ds4-tiny as whole artifacts that gates accept: lossless, with rounded dense, damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.artifact.hfq import Reader
from ds4q.artifact.report import Check, Report
from ds4q.artifact.types import Q8F16
from ds4q.runtime.gates import Gate, Surroundings
from tests.runtime import artifacts
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


@pytest.fixture(scope="session")
def damaged(made: Made, lossless: Path) -> Path:
    """ds4-tiny with the codes of one expert in four replaced by noise: it no longer copies well."""
    noise, tensors = np.random.default_rng(1), {}
    for name, (kind, shape, payload) in artifacts.pack(TINY).items():
        if ".experts.0." in name or ".experts.5." in name or ".experts.10." in name:
            rows = payload.reshape(shape[0], -1).copy()
            blocks = rows[:, 16:].reshape(shape[0], -1, 17)
            blocks[:, :, 1:] = noise.integers(0, 256, blocks[:, :, 1:].shape, np.uint8)
            tensors[name] = kind, shape, rows.reshape(-1)
    with Reader(lossless) as reader:
        assert tensors.keys() < reader.tensors.keys()
    return made(tensors, recipe="damaged")


@pytest.fixture
def measure() -> Measure:
    """Runs a gate as ``verify`` does: an error becomes the failure of its check."""

    def run(gate: Gate, path: Path, **where: Any) -> Check:
        report = Report({"path": str(path)})
        with report.check(gate.name) as check:
            gate.run(check, path, Surroundings(**{"threads": 2} | where))
        return check

    return run
