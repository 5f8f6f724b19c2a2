"""What the page cache holds of a file: all that was just written, nothing once it is driven out."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

import pytest

from ds4q.runtime.gates import pagecache
from ds4q.runtime.gates.pagecache import cached_bytes, drop


def test_the_page_cache_is_emptied_and_told(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(100_000))
    assert cached_bytes(path) >= 100_000
    gone = drop(path)  # not on a file system that is in memory only
    assert cached_bytes(path) == (0 if gone else 102_400)
    path.read_bytes()
    assert cached_bytes(path) >= 100_000


def test_an_empty_file_has_no_pages(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert cached_bytes(tmp_path / "empty") == 0
    assert drop(tmp_path / "empty")


def test_a_system_that_does_not_tell_has_dropped_nothing_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        @staticmethod
        def mincore(*_: object) -> int:
            ctypes.set_errno(errno.ENOSYS)
            return -1

    monkeypatch.setattr(pagecache, "_libc", Silent)
    path = tmp_path / "a"
    path.write_bytes(bytes(10))
    with pytest.raises(OSError, match="Function not implemented"):
        cached_bytes(path)
    assert not drop(path)
