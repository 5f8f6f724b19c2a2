"""Locks between processes on one file, also where the file system has no ``flock``.

Imports no numpy: the search for a HIP library takes a lock, and starts in small processes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from ds4q.artifact import stops
from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.files import NotRegularError, TooLongError, create, read_small


class WriteError(Ds4qError):
    """Writing failed; nothing stands at the final name."""

    rule = "could not write"


class LockedError(WriteError):
    """Another process writes the same output."""

    rule = "another ds4q process is writing this file"
    cure = "wait for it, or choose another output"


# What a file system answers that has no flock: old Lustre and NFS mounts, some of FUSE.
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)
_LOCK_BYTES = 1024
_TURN_S = 0.05


class FileLock:
    """A lock on an open file or folder, of one process at a time; released by ``release``.

    Where the file system has no ``flock``, the file ``PATH.lock`` is the lock: made exclusively,
    with host and process in it. One that a process of this host left behind is removed.

    Parameters
    ----------
    path : where ``fd`` was opened
    wait : wait for whoever has the lock

    Raises
    ------
    LockedError : another process has it, and ``wait`` is not set
    """

    def __init__(self, fd: int, path: Path, *, wait: bool = False) -> None:
        self._file: Path | None = None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise LockedError(path=path) from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                error.filename = str(path)
                raise
            self._make(path.with_name(path.name + ".lock"), path, wait)

    def release(self) -> None:
        """Remove a lock file; a lock of the file itself goes with its descriptor."""
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)
            self._file = None

    def _make(self, file: Path, path: Path, wait: bool) -> None:
        while True:
            with stops.held():
                try:
                    os.close(create(file, _holder(os.getpid())))
                    self._file = file
                    return
                except FileExistsError:
                    pass
                except OSError as error:
                    file.unlink(missing_ok=True)
                    error.filename = str(file)
                    raise
            if not _remove_stale(file):
                if not wait:
                    raise LockedError(
                        path=path,
                        found=f"the lock {file}",
                        remedy="wait; if no ds4q on any machine writes this file, remove the lock",
                    )
                time.sleep(_TURN_S)


def _holder(pid: int) -> bytes:
    """What a lock file says of process ``pid`` of this host; empty where there is no such process.

    The time of its start is part of it, since numbers are used again.
    """
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return b""
    return json.dumps(_host() | {"pid": pid, "started": started}).encode()


def _host() -> dict[str, str]:
    """What the numbers of processes are of: host and container."""
    space = os.readlink("/proc/self/ns/pid")
    return {"ds4q": "lock", "host": socket.gethostname(), "processes": space}


def _remove_stale(file: Path) -> bool:
    """Whether a lock file was gone, or belonged to a process of this host that has ended."""
    try:
        found = read_small(file, _LOCK_BYTES, follow=False)
        who = json.loads(found)
        here = all(who[key] == value for key, value in _host().items())
        if not here or _holder(int(who["pid"])) == found:
            return False
        aside = file.with_name(f".ds4q-{secrets.token_hex(8)}.part")
        os.rename(file, aside)  # of those who find it stale, one
        if aside.read_bytes() != found:  # another has just made its own
            os.rename(aside, file)
            return False
        aside.unlink()
    except FileNotFoundError:
        return True
    except (NotRegularError, TooLongError, ValueError, TypeError, KeyError):
        return False
    return True
