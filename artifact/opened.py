"""The identity of an open file: detects writes to it, and another file at its path.

An open descriptor keeps the bytes of a file that was renamed, unlinked or replaced at its path. It
does not protect from writes to the file itself.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ds4q.artifact.errors import ChangedError


class OpenedFile:
    """What a file was when it was opened; any thread may compare.

    Parameters
    ----------
    fd : the open descriptor
    path : where it was opened; named in errors

    Attributes
    ----------
    status : from ``fstat`` at construction
    """

    def __init__(self, fd: int, path: Path) -> None:
        self.path = path
        self.status = self._last = os.fstat(fd)
        self._lock = threading.Lock()
        self._replaced = False

    def check_path(self) -> None:
        """Raise ``ChangedError`` unless the path still leads to this file, not written to since."""
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            raise ChangedError("file is no longer there", path=self.path) from None
        if not os.path.samestat(now, self.status) or _written(now) != _written(self.status):
            raise ChangedError(path=self.path)

    def check_bytes(self, fd: int) -> str | None:
        """Raise ``ChangedError`` if the file behind ``fd`` was written to since it was opened.

        Returns a note, the first time that the path is found to lead to another file or nowhere:
        the descriptor still has the old bytes.
        """
        now = os.fstat(fd)
        if _written(now) != _written(self.status):
            before, after = self.status.st_size, now.st_size
            raise ChangedError(
                "the file was written to while it was in use",
                path=self.path,
                expected=None if before == after else f"{before:,} bytes",
                found="a later modification time" if before == after else f"{after:,} bytes",
            )
        if now.st_ctime_ns == self._last.st_ctime_ns:
            return None
        with self._lock:
            return self._explained(os.fstat(fd))

    def _explained(self, now: os.stat_result) -> str | None:
        """What moved the ctime alone: links, renames and changes of owner or mode touch no byte."""
        if now.st_ctime_ns == self._last.st_ctime_ns:  # another thread has seen it meanwhile
            return None
        elsewhere = not self._at_path()
        if not elsewhere and _attributes(now) == _attributes(self._last):
            raise ChangedError(
                "the file was changed while it was in use, and its modification time set back",
                path=self.path,
                found="a later ctime",
            )
        self._last = now
        if not elsewhere or self._replaced:
            return None
        self._replaced = True
        return (
            f"{self.path}: the path now leads to another file, or to none; this process goes on "
            "with the file that it opened"
        )

    def reopen(self, fd: int, flags: int = 0) -> int:
        """Another descriptor of the file behind ``fd``, wherever the path leads by now.

        Raises
        ------
        ChangedError : /proc is not mounted, and the path leads to another file
        OSError : the file cannot be opened with ``flags``
        """
        flags |= os.O_RDONLY | os.O_CLOEXEC
        try:
            return os.open(f"/proc/self/fd/{fd}", flags)
        except (FileNotFoundError, NotADirectoryError):
            again = os.open(self.path, flags | os.O_NONBLOCK)
        if not os.path.samestat(os.fstat(again), self.status):
            os.close(again)
            raise ChangedError(path=self.path)
        return again

    def _at_path(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), self.status)
        except OSError:
            return False


def _written(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _attributes(status: os.stat_result) -> tuple[int, ...]:
    return status.st_nlink, status.st_mode, status.st_uid, status.st_gid
