"""Owns the small checkpoint that tests of this room share, and the process that kills jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.quantize import models, traps


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint; not to be written to."""
    return models.mini(tmp_path_factory.mktemp("mini"))


@pytest.fixture(scope="session")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """SHA-256 of the four files that a job over it writes."""
    folder = tmp_path_factory.mktemp("expected")
    models.run(source, folder / "x.hfq")
    return models.digests(folder)


@pytest.fixture(scope="session")
def server() -> Iterator[traps.Server]:
    """Runs jobs in processes that may be killed at any system call."""
    with traps.Server() as running:
        yield running
