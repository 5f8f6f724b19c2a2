"""Owns the two test models as artifacts and as loaded engines, made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4q.runtime.engine import Engine
from tests.runtime import artifacts


def _artifact(name: str, folder: Path) -> Path:
    source = artifacts.DATA / name
    return artifacts.write(
        folder / f"{name}.hfq", artifacts.config_of(source), artifacts.pack(source)
    )


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ds4-tiny as a lossless artifact."""
    return _artifact("ds4-tiny", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def random_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The backbone of ds4-random as a lossless artifact."""
    return _artifact("ds4-random", tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="session")
def tiny_engine(tiny_path: Path) -> Engine:
    """ds4-tiny, loaded."""
    return Engine.load(tiny_path, threads=2)


@pytest.fixture(scope="session")
def random_engine(random_path: Path) -> Engine:
    """ds4-random, loaded."""
    return Engine.load(random_path, threads=2)
