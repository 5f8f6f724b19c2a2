"""The identity of an open file: writes are errors, renames and replacements are not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds4q.artifact.errors import ChangedError
from ds4q.artifact.opened import OpenedFile
from tests.checks import check_refused

LONG_AGO_NS = 10**18  # so that a write moves the time, however coarse the clock is


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.hfq"
    path.write_bytes(b"weights")
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return path


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def overwrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"W")


def overwrite_and_set_back(path: Path) -> None:
    overwrite(path)
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (overwrite, "later modification time"),
        (overwrite_and_set_back, "set back"),
        (lambda path: os.truncate(path, 3), "found 3 bytes"),
        (lambda path: os.truncate(path, 1000), "found 1,000 bytes"),
    ],
    ids=["write", "write and set the time back", "cut", "grow"],
)
def test_a_write_is_an_error(path: Path, fd: int, write: Callable[[Path], None], says: str) -> None:
    opened = OpenedFile(fd, path)
    assert opened.check_bytes(fd) is None
    write(path)
    for _ in range(2):  # it stays one
        check_refused(ChangedError, lambda: opened.check_bytes(fd), path=path, says=[says])


def replace(path: Path) -> None:
    other = path.with_name("new")
    other.write_bytes(b"others!")
    other.replace(path)


def move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


@pytest.mark.parametrize("how", [replace, move, Path.unlink])
def test_another_file_at_the_path_is_a_note_once(
    path: Path, fd: int, how: Callable[[Path], None]
) -> None:
    opened = OpenedFile(fd, path)
    how(path)
    note = opened.check_bytes(fd)
    assert note is not None
    assert note.startswith(f"{path}: the path now leads to another file")
    assert opened.check_bytes(fd) is None
    check_refused(ChangedError, opened.check_path, path=path)


def test_links_and_modes_touch_no_byte(path: Path, fd: int, tmp_path: Path) -> None:
    opened = OpenedFile(fd, path)
    os.link(path, tmp_path / "link")
    assert opened.check_bytes(fd) is None
    path.chmod(0o400)
    assert opened.check_bytes(fd) is None
    opened.check_path()


def test_it_opens_the_file_again_wherever_the_path_leads(path: Path, fd: int) -> None:
    opened = OpenedFile(fd, path)
    replace(path)
    again = opened.reopen(fd)
    assert os.pread(again, 100, 0) == b"weights"
    os.close(again)


def test_without_proc_only_the_file_at_the_path(
    path: Path, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def without_proc(name: str, flags: int) -> int:
        if str(name).startswith("/proc"):
            raise FileNotFoundError(name)
        return real(name, flags)

    monkeypatch.setattr(os, "open", without_proc)
    opened = OpenedFile(fd, path)
    os.close(opened.reopen(fd))
    replace(path)
    check_refused(ChangedError, lambda: opened.reopen(fd), path=path)
