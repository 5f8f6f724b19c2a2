"""Regular files: bounded reads, atomic writes, publishing without replacing, ownership."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.files import (
    AppearedError,
    ForeignFileError,
    NotRegularError,
    TooLongError,
    claim,
    create,
    file_identity,
    open_regular,
    publish,
    read_head,
    read_small,
    remove_own,
    write_whole,
)
from tests.checks import check_refused


def ours(head: bytes) -> bool:
    return head.startswith(b"ours")


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)  # a path of a socket may have 108 bytes
        made.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


ODD: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a named pipe": os.mkfifo,
    "a socket": make_socket,
    "a symbolic link": lambda path: path.symlink_to("nowhere"),
}


# --- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [what for what in ODD if what != "a symbolic link"])
def test_only_regular_files_are_read_and_nothing_waits(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    ODD[what](path)
    for read in (open_regular, read_head, lambda path: read_small(path, 10)):
        check_refused(NotRegularError, lambda read=read: read(path), path=path)  # type: ignore[misc]


def test_a_link_is_followed_only_where_that_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"text")
    (tmp_path / "link").symlink_to("there")
    assert read_small(tmp_path / "link", 4) == b"text"
    check_refused(
        NotRegularError, lambda: read_small(tmp_path / "link", 4, follow=False), says=["link"]
    )
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "absent")


def test_a_long_file_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.touch()
    os.truncate(path, 3 << 30)
    check_refused(TooLongError, lambda: read_small(path, 100), path=path, says=["3,221,225,472"])
    path.write_bytes(bytes(100))
    assert read_small(path, 100) == bytes(100)
    check_refused(TooLongError, lambda: read_small(path, 99), path=path)
    check_refused(TooLongError, lambda: read_small("/proc/self/status", 20))  # says it has 0 bytes


# --- ownership ---------------------------------------------------------------------------------


def test_a_file_is_ours_by_its_own_beginning(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert claim(path, ours) is None
    path.write_bytes(b"ours, and more")
    status = claim(path, ours)
    assert status is not None
    assert os.path.samestat(status, path.stat())
    check_refused(
        ForeignFileError, lambda: claim(path, ours, inputs=[path.stat()]), says=["an input"]
    )
    for mine, found in ((b"", "an empty file"), (b"diary", "another file")):
        path.write_bytes(mine)
        check_refused(ForeignFileError, lambda: claim(path, ours), path=path, says=[found, "move"])
        remove_own(path, ours)
        assert path.read_bytes() == mine
    path.write_bytes(b"ours")
    os.link(path, tmp_path / "other")
    check_refused(ForeignFileError, lambda: claim(path, ours), says=["2 hard links"])
    (tmp_path / "other").unlink()
    remove_own(path, ours)
    assert names(tmp_path) == []
    remove_own(path, ours)


@pytest.mark.parametrize("what", ODD)
def test_what_is_not_a_file_is_not_ours(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    ODD[what](path)
    check_refused(ForeignFileError, lambda: claim(path, ours), path=path, says=[f"found {what}"])
    remove_own(path, ours)
    assert names(tmp_path) == ["x"]


def test_a_device_is_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    check_refused(ForeignFileError, lambda: claim(Path("/dev/null"), ours), says=["a device"])


# --- writing -----------------------------------------------------------------------------------


def test_text_is_written_whole(tmp_path: Path) -> None:
    target = tmp_path / "r.json"
    write_whole(target, "ü", replace=True)
    assert target.read_text("utf-8") == "ü"
    assert target.stat().st_mode & 0o777 == 0o644
    target.chmod(0o640)
    write_whole(target, b"new", replace=True)
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o640
    write_whole(target, "secret", mode=0o600, replace=True)
    assert target.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["r.json"]


@pytest.fixture(params=["nameless", "named", "no links"])
def tmpfile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the file system can make a file without a name, and give it one."""
    if request.param == "named":
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_WRONLY)  # EISDIR, as of old
    elif request.param == "no links":
        without_links(monkeypatch)
    return str(request.param)


def test_a_created_file_has_its_bytes_from_the_beginning(
    tmpfile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = tmp_path / "x", os.fsync
    seen: list[list[str]] = []

    def look(fd: int) -> None:
        seen.append(names(tmp_path))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", look)
    fd = create(path, b"mark", mode=0o640)
    assert seen == {"nameless": [[]], "named": [["x"]], "no links": [[], ["x"]]}[tmpfile]
    os.write(fd, b" and more")
    os.close(fd)
    assert path.read_bytes() == b"mark and more"
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.stat().st_nlink == 1
    for what in ("x", "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("nowhere")
        with pytest.raises(FileExistsError):
            create(tmp_path / what, b"other")
    assert path.read_bytes() == b"mark and more"
    assert names(tmp_path) == ["link", "x"]


def test_a_file_that_cannot_be_created_leaves_nothing(
    tmpfile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        create(tmp_path / "x", b"mark")
    assert names(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_name_may_be_as_long_as_names_can_be(tmp_path: Path) -> None:
    write_whole(tmp_path / ("x" * 255), "text", replace=True)
    assert names(tmp_path) == ["x" * 255]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("there")
    write_whole(tmp_path / "link", "text", replace=True)
    assert (tmp_path / "there").read_bytes() == b"mine"
    assert (tmp_path / "link").stat().st_mode & 0o777 == 0o644


def test_a_full_disk_leaves_the_old_text_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "r.json"
    target.write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(target, "new", replace=True)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("r.json", "old")]


# --- publishing --------------------------------------------------------------------------------


class _Libc:
    """A C library whose ``renameat2`` fails, or which has none."""

    def __init__(self, number: int) -> None:
        self._number = number
        if number:
            self.renameat2 = self._fail

    def _fail(self, *_: object) -> int:
        ctypes.set_errno(self._number)
        return -1


def without_rename(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: _Libc(number))


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)


@pytest.fixture(params=["renameat2", "link", "no renameat2", "neither"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the file system can do."""
    if request.param == "no renameat2":
        without_rename(monkeypatch, 0)
    elif request.param != "renameat2":
        without_rename(monkeypatch, errno.EINVAL)
    if request.param == "neither":
        without_links(monkeypatch)
    return str(request.param)


def test_publishing_never_replaces_unless_it_may(system: str, tmp_path: Path) -> None:
    new, final = tmp_path / "new", tmp_path / "final"
    new.write_bytes(b"new")
    publish(new, final)
    assert (names(tmp_path), final.read_bytes()) == (["final"], b"new")
    new.write_bytes(b"newer")
    asked = []

    def refuse(path: Path) -> bool:
        asked.append(path)
        return False

    check_refused(AppearedError, lambda: publish(new, final), path=final)
    check_refused(AppearedError, lambda: publish(new, final, replace=refuse), path=final)
    assert asked == [final]
    assert (new.read_bytes(), final.read_bytes()) == (b"newer", b"new")
    publish(new, final, replace=lambda path: path.read_bytes() == b"new")
    assert (names(tmp_path), final.read_bytes()) == (["final"], b"newer")
    new.write_bytes(b"newest")
    publish(new, final, replace=True)
    assert (names(tmp_path), final.read_bytes()) == (["final"], b"newest")


@pytest.mark.parametrize("what", ODD)
def test_nor_is_anything_else_replaced(what: str, system: str, tmp_path: Path) -> None:
    new, final = tmp_path / "new", tmp_path / "final"
    new.write_bytes(b"new")
    ODD[what](final)
    check_refused(AppearedError, lambda: publish(new, final), path=final)
    assert new.read_bytes() == b"new"
    assert os.path.lexists(final)


def test_a_folder_is_published_and_replaces_nothing(system: str, tmp_path: Path) -> None:
    new, final = tmp_path / "new", tmp_path / "final"
    new.mkdir()
    (new / "file").touch()
    final.write_bytes(b"mine")
    check_refused(AppearedError, lambda: publish(new, final), path=final)
    final.unlink()
    publish(new, final)
    assert names(tmp_path) == ["final"]
    assert names(final) == ["file"]


@pytest.mark.parametrize("system", ["renameat2", "link"], indirect=True)
def test_a_link_whose_unlink_was_cut_off_is_completed(system: str, tmp_path: Path) -> None:
    new, final = tmp_path / "new", tmp_path / "final"
    new.write_bytes(b"new")
    os.link(new, final)
    publish(new, final)
    assert (names(tmp_path), final.read_bytes()) == (["final"], b"new")


def test_other_failures_of_renaming_are_raised(tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "new", tmp_path / "no" / "final")
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "absent", tmp_path / "final")


def test_write_whole_keeps_what_appears_while_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, fsync = tmp_path / "x", os.fsync

    def appears(fd: int) -> None:
        fsync(fd)
        target.write_bytes(b"mine")

    before = file_identity(target)
    assert before is None
    monkeypatch.setattr(os, "fsync", appears)

    def may_replace(path: Path) -> bool:
        return file_identity(path) == before

    for replace in (False, may_replace):
        check_refused(AppearedError, lambda r=replace: write_whole(target, "new", replace=r))  # type: ignore[misc]
        assert target.read_bytes() == b"mine"
        target.unlink()
    target.write_bytes(b"earlier")
    before = file_identity(target)
    monkeypatch.setattr(os, "fsync", fsync)
    write_whole(target, "new", replace=may_replace)
    assert target.read_bytes() == b"new"
    check_refused(AppearedError, lambda: write_whole(target, "newer", replace=may_replace))
    assert names(tmp_path) == ["x"]


def test_a_caller_says_whether_a_file_may_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="replace"):
        write_whole(tmp_path / "x", "text")  # type: ignore[call-arg]
    assert not names(tmp_path)


def test_the_error_names_the_file_and_a_remedy(tmp_path: Path) -> None:
    for kind in (ForeignFileError, AppearedError):
        assert issubclass(kind, Ds4qError)
        assert str(kind(path="x")).startswith("x: ")
        assert "choose another output" in str(kind(path="x"))
