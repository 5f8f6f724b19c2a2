"""What is read must be a regular file: nothing else may hang the open or be read half."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ds4q.runtime.errors import AdapterError, ProfileError, RunError, TraceError
from ds4q.runtime.experts.adapter import read_adapter
from ds4q.runtime.experts.header import Identity
from ds4q.runtime.experts.profile import read_profile
from ds4q.runtime.experts.regular import open_regular
from ds4q.runtime.experts.trace import read_trace
from tests.checks import check_refused

Read = Callable[[Path], object]
READERS: list[tuple[Read, type[RunError], str]] = [
    (read_trace, TraceError, "not a trace"),
    (read_adapter, AdapterError, "not an expert predictor"),
    (
        partial(read_profile, model=Identity("", ""), layers=1, experts=1),
        ProfileError,
        "not a warm-start",
    ),
]


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize(("read", "kind", "says"), READERS)
def test_a_pipe_is_refused_at_once(pipe: Path, read: Read, kind: type[RunError], says: str) -> None:
    refused = threading.Event()

    def ask() -> None:
        check_refused(kind, lambda: read(pipe), path=pipe, says=[says, "not a regular file"])
        refused.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(300)
    assert refused.is_set()


@pytest.mark.parametrize(("read", "kind", "says"), READERS)
def test_so_is_a_pipe_that_somebody_writes_to(read: Read, kind: type[RunError], says: str) -> None:
    out, into = os.pipe()
    os.write(into, b"something")
    path = Path(f"/dev/fd/{out}")
    check_refused(kind, lambda: read(path), path=path, says=[says, "not a regular file"])
    os.close(out)
    os.close(into)


def test_a_regular_file_is_read_also_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").symlink_to("a")
    with open_regular(tmp_path / "b", TraceError, "a trace") as file:
        assert file.read() == b"abc"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none", TraceError, "a trace")
