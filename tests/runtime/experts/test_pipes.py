"""What is read must be a regular file: nothing else may hang the open or be read half."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ds4q.artifact.files import NotRegularError
from ds4q.runtime.experts.adapter import read_adapter
from ds4q.runtime.experts.header import Identity
from ds4q.runtime.experts.profile import read_profile
from ds4q.runtime.experts.trace import read_trace
from tests.checks import check_refused

Read = Callable[[Path], object]
READERS: list[Read] = [
    read_trace,
    read_adapter,
    partial(read_profile, model=Identity("", ""), layers=1, experts=1),
]


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("read", READERS)
def test_a_pipe_is_refused_at_once(pipe: Path, read: Read) -> None:
    refused = threading.Event()

    def ask() -> None:
        check_refused(NotRegularError, lambda: read(pipe), path=pipe)
        refused.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(300)
    assert refused.is_set()


@pytest.mark.parametrize("read", READERS)
def test_so_is_a_pipe_that_somebody_writes_to(read: Read) -> None:
    out, into = os.pipe()
    os.write(into, b"something")
    path = Path(f"/dev/fd/{out}")
    check_refused(NotRegularError, lambda: read(path), path=path, says=["a named pipe"])
    os.close(out)
    os.close(into)
