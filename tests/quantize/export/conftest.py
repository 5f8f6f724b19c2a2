"""Owns the artifacts that tests of exports share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quantize.export import small


@pytest.fixture(scope="session")
def small_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of ``small``; not to be written to."""
    return small.write(tmp_path_factory.mktemp("small") / "m")


@pytest.fixture(scope="session")
def small_artifact(small_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, lossless, with its receipt; not to be written to."""
    return small.artifact(small_source, tmp_path_factory.mktemp("small") / "x.hfq")
