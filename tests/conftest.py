"""Owns what every test runs under: a clean environment, a fixed hypothesis profile, case files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ds4q import api
from ds4q.hipkern.library import open_library
from ds4q.hipkern.sim.control import Control

ROOT = Path(__file__).parents[1]

settings.register_profile("house", derandomize=True, deadline=None, database=None)
settings.load_profile("house")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started with & by a shell: children of
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests would ignore Ctrl-C, too


@pytest.fixture(scope="session", autouse=True)
def house_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the caller's ``DS4Q_*`` and point caches at a temporary folder.

    ``DS4Q_REFERENCE`` stays: the same tests run on both paths.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("DS4Q_") and n != "DS4Q_REFERENCE"]:
            patch.delenv(name)
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # users' streams are buffered
        base = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            base = base.parent  # of this run, not of one worker: what is built is built once
        home = base / "ds4q-home"
        home.mkdir(exist_ok=True)
        patch.setenv("DS4Q_HOME", str(home))
        yield


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    """The simulated device with its settings; whatever a test leaves on it is a failure."""
    monkeypatch.setenv("DS4Q_HIP", "sim")
    control = Control(Path(open_library().path).parents[1])
    control.reset()
    before = control.live()  # of other tests of this process
    yield control
    control.reset()
    assert control.live() == before


def _quantized(name: str, folder: Path) -> Path:
    out = folder / f"{name}.hfq"
    api.quantize(ROOT / "tests" / "data" / name, out, warn=lambda text: None)
    return out


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ds4-tiny as a lossless artifact with its receipt; not to be written to."""
    return _quantized("ds4-tiny", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def random_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ds4-random as a lossless artifact; its DSpark sidecar lies beside it."""
    return _quantized("ds4-random", tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="session")
def cases_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small bad and good inputs that ``tests/data/cases/README.md`` describes."""
    folder = tmp_path_factory.mktemp("cases")
    script = ROOT / "tests" / "data" / "cases" / "make_fixtures.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return folder
