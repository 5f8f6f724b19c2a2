"""A file in the making: nobody else's is touched, nothing is left of a failure."""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds4q.artifact.files import AppearedError, ForeignFileError
from ds4q.artifact.locks import LockedError, WriteError
from ds4q.artifact.newfile import NewFile
from ds4q.artifact.writer import UNFINISHED
from tests.checks import check_refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.trace"


def partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir())


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 5000])
@pytest.mark.parametrize("step", [1, 7, 16, 5000])
def test_what_is_written_stands_there_once_it_is_published(
    path: Path, size: int, step: int
) -> None:
    data = os.urandom(size)
    path.write_bytes(b"earlier")
    with NewFile(path) as new:
        for at in range(0, size, step):
            assert new.write(data[at : at + step]) == len(data[at : at + step])
        assert path.read_bytes() == b"earlier"
        assert partial(path).read_bytes().startswith(UNFINISHED)
        new.publish()
    assert path.read_bytes() == data
    assert names(path) == [path.name]


def test_what_is_not_published_is_removed(path: Path) -> None:
    path.write_bytes(b"earlier")
    with NewFile(path) as new:
        new.write(b"x" * 50)
    new.discard()
    assert path.read_bytes() == b"earlier"
    assert names(path) == [path.name]


def test_a_second_writer_is_refused_and_the_first_goes_on(path: Path) -> None:
    with NewFile(path) as first:
        first.write(b"of the first")
        check_refused(LockedError, lambda: NewFile(path), path=partial(path), says=["wait for it"])
        first.publish()
    assert path.read_bytes() == b"of the first"


@pytest.mark.parametrize(
    "mine", [b"mine", b"\0", UNFINISHED[:5], UNFINISHED[:-1] + b"!", b"^*M\x18\0\0\0\0ds4q.trace"]
)
def test_a_file_that_is_not_ours_stays(path: Path, mine: bytes) -> None:
    partial(path).write_bytes(mine)
    says = ["did not write", "move it away"]
    check_refused(ForeignFileError, lambda: NewFile(path), path=partial(path), says=says)
    assert partial(path).read_bytes() == mine
    assert names(path) == [partial(path).name]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Path.mkdir, "a folder"),
        (os.mkfifo, "a named pipe"),
        (lambda path: path.symlink_to("elsewhere"), "a symbolic link"),
        (lambda path: path.symlink_to(path.parent), "a symbolic link"),
    ],
)
def test_nor_is_anything_else_of_that_name_touched(
    path: Path, make: Callable[[Path], object], what: str
) -> None:
    make(partial(path))
    before = os.lstat(partial(path))
    says = [f"found {what}; move it away, or choose another"]
    check_refused(ForeignFileError, lambda: NewFile(path), path=partial(path), says=says)
    assert os.path.samestat(os.lstat(partial(path)), before)
    assert names(path) == [partial(path).name]


def test_what_a_killed_run_left_is_replaced(path: Path) -> None:
    for left in (UNFINISHED, UNFINISHED + bytes(99)):
        partial(path).write_bytes(left)
        with NewFile(path) as new:
            new.write(b"new")
            new.publish()
        assert path.read_bytes() == b"new"
        assert names(path) == [path.name]


@pytest.mark.parametrize("earlier", [b"earlier", None])
def test_a_file_that_appears_meanwhile_is_kept(path: Path, earlier: bytes | None) -> None:
    if earlier is not None:
        path.write_bytes(earlier)
    with NewFile(path) as new:
        new.write(b"new")
        path.unlink(missing_ok=True)
        path.write_bytes(b"the user's own")
        check_refused(AppearedError, new.publish, path=path)
    assert path.read_bytes() == b"the user's own"
    assert names(path) == [path.name]


def test_no_folder_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "no" / "x"
    says = [f"there is no folder '{tmp_path / 'no'}'; make it, or choose another output"]
    check_refused(WriteError, lambda: NewFile(path), path=path, says=says)
    (tmp_path / "no").write_bytes(b"a file")
    check_refused(WriteError, lambda: NewFile(path), path=path, says=says)


def test_a_name_too_long_for_the_unfinished_file_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)
    says = [os.strerror(errno.ENAMETOOLONG), "choose a shorter name: while it is written"]
    check_refused(WriteError, lambda: NewFile(path), path=path, says=says)


@pytest.mark.parametrize("earlier", [b"earlier", None])
def test_a_link_leads_to_what_is_written(path: Path, tmp_path: Path, earlier: bytes | None) -> None:
    there = tmp_path / "disk" / "there"
    there.parent.mkdir()
    if earlier is not None:
        there.write_bytes(earlier)
    path.symlink_to(Path("disk") / "there")
    (tmp_path / "again").symlink_to(path)
    with NewFile(tmp_path / "again") as new:
        assert sorted(names(there)) == sorted([partial(there).name, *["there"] * bool(earlier)])
        new.write(b"new")
        new.publish()
    assert there.read_bytes() == path.read_bytes() == b"new"
    assert os.readlink(path) == "disk/there"
    assert names(there) == ["there"]
    assert names(path) == ["again", "disk", path.name]


def test_what_can_be_no_file_is_refused_at_once(path: Path, tmp_path: Path) -> None:
    path.symlink_to(path.name)
    says = ["it is a link to itself", "choose another output"]
    check_refused(WriteError, lambda: NewFile(path), path=path, says=says)
    says = ["it is a folder", "choose another output"]
    check_refused(WriteError, lambda: NewFile(tmp_path), path=tmp_path, says=says)
    assert names(path) == [path.name]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may be longer than 4096 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_grows_too_large_leaves_nothing(path: Path, small_files: None) -> None:
    path.write_bytes(b"earlier")
    with NewFile(path) as new:
        says = [os.strerror(errno.EFBIG), "choose another output, where files may be longer"]
        check_refused(WriteError, lambda: new.write(bytes(5000)), path=path, says=says)
        assert names(path) == [path.name]
    assert path.read_bytes() == b"earlier"


def test_a_failed_sync_leaves_the_earlier_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"earlier")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with NewFile(path) as new:
        monkeypatch.setattr("os.fsync", full)
        new.write(b"new")
        check_refused(WriteError, new.publish, path=path, says=["No space", "make room"])
    assert path.read_bytes() == b"earlier"
    assert names(path) == [path.name]


def test_an_output_that_nobody_came_to_hold_is_removed(tmp_path: Path) -> None:
    """A stop may come between making it and holding it."""
    NewFile(tmp_path / "x")
    gc.collect()
    assert list(tmp_path.iterdir()) == []
