"""Owns what tests of the driver share: a simulated device of their own, and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4q.hipkern.driver import Device
from ds4q.hipkern.library import open_library
from ds4q.hipkern.sim.control import Control
from tests.hipkern.sim_rig import Rig


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    """The simulated library with its settings; they are undone afterwards."""
    monkeypatch.setenv("DS4Q_HIP", "sim")
    control = Control(Path(open_library().path).parents[1])
    control.reset()
    yield control
    control.reset()


@pytest.fixture
def device(sim: Control) -> Iterator[Device]:
    """An open device; what a test leaves on it must be gone once it is closed."""
    before = sim.live()
    with Device.open() as device:
        yield device
    sim.reset()
    assert sim.live() == before


@pytest.fixture(scope="session")
def opened_rig() -> Rig:
    """The simulated library without the driver, with the kernels that its own tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS4Q_HIP", "sim")
        return Rig()


@pytest.fixture
def rig(opened_rig: Rig) -> Iterator[Rig]:
    """``opened_rig``; its settings are undone afterwards."""
    opened_rig.control.reset()
    yield opened_rig
    opened_rig.control.reset()
