"""Owns the simulated device that tests of the device runtime use, and a model small enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4q.hipkern.sim.control import Control
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.engine import Engine
from tests.runtime.device.micro import write_micro

Load = Callable[..., HipEngine]


@pytest.fixture
def load(sim: Control) -> Iterator[Load]:
    """Loads artifacts onto the device; the engines are closed when the test ends."""
    engines: list[HipEngine] = []

    def load(path: Path, **options: Any) -> HipEngine:
        engines.append(HipEngine.load(path, **options))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def micro_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The micro model as an artifact."""
    return write_micro(tmp_path_factory.mktemp("micro") / "micro.hfq")


@pytest.fixture(scope="session")
def micro_engine(micro_path: Path) -> Engine:
    """The micro model on the CPU."""
    return Engine.load(micro_path, threads=1)
