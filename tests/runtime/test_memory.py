"""Memory is asked for before weights are read; the refusal names both numbers and what works."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ds4q.artifact.hfq import Reader
from ds4q.cli import main
from ds4q.hipkern.driver import Device
from ds4q.hipkern.errors import DeviceMemoryError
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.config import checked_config
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.engine import Engine, expected_state_bytes
from ds4q.runtime.errors import CacheError, HostMemoryError
from ds4q.runtime.experts import budget
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.source import ArtifactSource
from tests.checks import check_refused

MIB = 1 << 20
Machine = Callable[[int | None], None]


def must_not_read(*args: object) -> None:
    raise AssertionError("the weights were read")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes /proc/meminfo say that so many bytes are available; None: there is no such file."""

    def says(available: int | None) -> None:
        text = None if available is None else f"MemAvailable: {available >> 10} kB\n"
        monkeypatch.setattr(
            budget, "_text", lambda path: text if path == Path("/proc/meminfo") else None
        )

    return says


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArtifactSource, "fill", must_not_read)


def needed_of(error: HostMemoryError) -> int:
    return int(str(error.expected).split()[0].replace(",", ""))


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    tiny_artifact: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(8 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(ArtifactSource, "fill", must_not_read)
        error = check_refused(
            HostMemoryError,
            lambda: Engine.load(tiny_artifact, threads=1),
            path=tiny_artifact,
            says=["for weights", "for sequences", f"found {8 * MIB:,}", "shorter context"],
        )
        machine(needed_of(error) - 1024)
        tight = check_refused(HostMemoryError, lambda: Engine.load(tiny_artifact, threads=1))
    size = int(str(tight.remedy).split("--expert-cache ")[1].rstrip(")"))
    with Engine.load(tiny_artifact, threads=1, cache=CacheOptions(budget=size)) as engine:
        assert engine.cache_counters() is not None  # the remedy that was named works
    machine(needed_of(error) + 1024)
    assert Engine.load(tiny_artifact, threads=1).notes == []


@pytest.mark.usefixtures("unread")
def test_the_context_counts(tiny_artifact: Path, machine: Machine) -> None:
    machine(MIB)
    found = {}
    for context in (256, 512):
        load = partial(Engine.load, tiny_artifact, threads=1, max_context=context, sequences=3)
        found[context] = needed_of(check_refused(HostMemoryError, load))
    with Reader(tiny_artifact) as reader:
        model = checked_config(reader)
    grown = expected_state_bytes(model, 512) - expected_state_bytes(model, 256)
    assert found[512] - found[256] == 3 * grown > 0


def test_memory_that_cannot_be_told_is_a_warning(tiny_artifact: Path, machine: Machine) -> None:
    machine(None)
    (note,) = Engine.load(tiny_artifact, threads=1).notes
    assert "memory was not checked before loading" in note
    assert "MemAvailable" in note


@pytest.mark.parametrize(
    ("command", "says"), [("run", "the model does not fit"), ("calibrate", "memory leaves too")]
)
def test_a_command_fails_with_one_line(
    command: str, says: str, tiny_artifact: Path, machine: Machine, tmp_path: Path
) -> None:
    machine(MIB)
    text = tmp_path / "t.txt"
    text.write_text("def f():")
    words = {
        "run": ["-p", "x", "--raw", "--max-tokens", "1"],
        "calibrate": ["--text", str(text), "-o", str(tmp_path / "i")],
    }
    result = CliRunner().invoke(main, [command, str(tiny_artifact), *words[command], "-q"])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"ds4q: error: {tiny_artifact}: {says}")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


# ------------------------------------------------------------------------------ on a device


def test_an_integrated_gpu_that_reports_too_little_is_tried(
    sim: Control, tiny_artifact: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds4q.hipkern.driver.Device.free_bytes", lambda device: 8_000_000)
    with HipEngine.load(tiny_artifact, cache=CacheOptions(budget=4 * MIB)) as engine:
        assert engine.cache_counters() is not None
    with HipEngine.load(tiny_artifact):
        pass
    error = check_refused(
        CacheError, lambda: HipEngine.load(tiny_artifact, cache=CacheOptions(budget="auto"))
    )
    size = int(str(error.remedy).split("--expert-cache ")[1].split()[0])
    with HipEngine.load(tiny_artifact, cache=CacheOptions(budget=size)):
        pass
    machine(MIB)  # neither the device nor the host has as much
    check_refused(
        DeviceMemoryError,
        lambda: HipEngine.load(tiny_artifact),
        says=["--expert-cache", "8,000,000"],
    )


def test_a_discrete_gpu_is_believed(
    sim: Control, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Device.__init__

    def discrete(self: Any, *args: Any) -> None:
        real(self, *args)
        self.unified = False

    monkeypatch.setattr(Device, "__init__", discrete)
    monkeypatch.setattr(Device, "free_bytes", lambda device: 8_000_000)
    check_refused(
        DeviceMemoryError, lambda: HipEngine.load(tiny_artifact), says=["8,000,000", "context"]
    )
    for asked in ("auto", 4 * MIB):
        cache = CacheOptions(budget=asked)
        load = partial(HipEngine.load, tiny_artifact, cache=cache)
        check_refused(CacheError, load, says=["shorter context"])


def test_memory_that_the_device_does_not_give(sim: Control, tiny_artifact: Path) -> None:
    sim.set(memory_bytes=4 * MIB)  # an integrated GPU: the host's figure lets it pass
    check_refused(
        DeviceMemoryError,
        lambda: HipEngine.load(tiny_artifact),
        says=["hipErrorOutOfMemory", "bytes on the device in all", "--expert-cache"],
    )
