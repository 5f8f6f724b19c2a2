"""One server for all tests of a module that need no limits of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.serve.served import Served, serving


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def served(shared: Served) -> Served:
    """The module's server, which answers nothing until a test says what."""
    shared.script("")
    return shared
