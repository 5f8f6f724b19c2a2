"""File systems that lack a call: another kind of lock; permissions and folders left as they are."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds4q.artifact import files
from ds4q.artifact.files import fsync_folder
from ds4q.artifact.locks import FileLock, LockedError
from ds4q.artifact.writer import PartialFile
from tests.checks import check_refused


def failing(code: int) -> Callable[..., Any]:
    def call(*arguments: object, **options: object) -> Any:
        raise OSError(code, os.strerror(code))

    return call


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP], ids=errno.errorcode.get)
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(request.param))


@pytest.mark.usefixtures("no_flock")
def test_without_flock_one_process_writes_a_file(tmp_path: Path) -> None:
    first = PartialFile(tmp_path / "x.hfq", 4)
    lock = tmp_path / "x.hfq.partial.lock"
    check_refused(
        LockedError,
        lambda: PartialFile(tmp_path / "x.hfq", 4),
        path=first.path,
        says=[str(lock), "remove the lock"],
    )
    first.close()
    assert os.listdir(tmp_path) == ["x.hfq.partial"]
    PartialFile(tmp_path / "x.hfq", 4).discard()
    assert os.listdir(tmp_path) == []


HOLD = """
import errno, fcntl, os, sys
from pathlib import Path
from ds4q.artifact.writer import PartialFile
def no(*arguments):
    raise OSError(errno.ENOSYS, "no flock")
fcntl.flock = no
PartialFile(Path(sys.argv[1]), 0)
print("held", flush=True)
if sys.argv[2] == "crash":
    os._exit(9)
sys.stdin.read()
"""


@pytest.mark.usefixtures("no_flock")
def test_a_lock_is_its_process_s_until_that_has_ended(tmp_path: Path) -> None:
    out = tmp_path / "x.hfq"
    for how in ("wait", "crash"):
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, str(out), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"held\n"
            if how == "wait":
                with pytest.raises(LockedError):
                    PartialFile(out, 0)
                child.kill()
        PartialFile(out, 0).close()
        assert os.listdir(tmp_path) == ["x.hfq.partial"]


@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize("text", ["", "a user's", "[]", '{"ds4q": "lock"}', "host", "x" * 5000])
def test_a_lock_that_may_be_somebody_s_stays(text: str, tmp_path: Path) -> None:
    lock = tmp_path / "x.hfq.partial.lock"
    if text == "host":
        mine = PartialFile(tmp_path / "x.hfq", 0)
        document = json.loads(lock.read_text()) | {"host": "another", "pid": 2**22 + 1}
        mine.close()
        text = json.dumps(document)
    lock.write_text(text)
    with pytest.raises(LockedError):
        PartialFile(tmp_path / "x.hfq", 0)
    assert lock.read_text() == text


@pytest.mark.usefixtures("no_flock")
def test_a_turn_is_waited_for(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    first = FileLock(fd, tmp_path / "registry", wait=True)
    got: list[FileLock] = []
    other = threading.Thread(
        target=lambda: got.append(FileLock(fd, tmp_path / "registry", wait=True))
    )
    other.start()
    assert not got
    first.release()
    other.join(60)
    got.pop().release()
    os.close(fd)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["flock", "fsync"])
def test_a_lock_that_fails_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails, not one that lacks locks; or one too full for a lock file."""
    if call == "flock":
        monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    else:
        monkeypatch.setattr(fcntl, "flock", failing(errno.ENOSYS))
        monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(OSError, match=r"x\.hfq\.partial"):
        PartialFile(tmp_path / "x.hfq", 0)
    assert os.listdir(tmp_path) == []
    (tmp_path / "x.hfq.partial").write_text("an earlier run's")
    with pytest.raises(OSError, match=r"x\.hfq\.partial"):
        PartialFile(tmp_path / "x.hfq", 0)
    assert os.listdir(tmp_path) == ["x.hfq.partial"]


def test_what_a_file_system_lacks_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_text("before")
    monkeypatch.setattr(os, "fchmod", failing(errno.EPERM))
    files.write_whole(path, "after", replace=True)
    assert path.read_text() == "after"
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    fsync_folder(tmp_path)
    monkeypatch.setattr(os, "posix_fadvise", failing(errno.ENOSYS))
    files.advise(0, 0, 1)
    monkeypatch.setattr(os, "statvfs", failing(errno.ENOSYS))
    assert files.free_bytes(tmp_path) == sys.maxsize
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        fsync_folder(tmp_path)
