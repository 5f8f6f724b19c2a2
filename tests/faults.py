"""Owns system calls that fail: counts the writing calls under a folder, and spoils a chosen one.

Calls of Python's own files are among them: a file opened for writing goes through ``os`` here.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ON_PATHS = ("open", "link", "rename", "replace", "unlink", "mkdir")
ON_FILES = ("write", "pwrite", "ftruncate", "fsync", "fchmod", "close")
CALLS = (*ON_PATHS, *ON_FILES, "flock")
SHORT = 0
"""In place of an error number: only half of the bytes are written."""


def ways(call: str) -> list[int]:
    """The faults that a call can have: error numbers, or ``SHORT``."""
    if call in ("write", "pwrite"):
        return [errno.ENOSPC, errno.EIO, SHORT]
    if call == "flock":
        return [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EIO]
    if call in ("open", "ftruncate", "fsync"):  # Python repeats these after EINTR
        return [errno.ENOSPC, errno.EIO, errno.EDQUOT]
    if call == "link":
        return [errno.ENOSPC, errno.EIO, errno.EINTR, errno.EPERM, errno.ENOTSUP]
    if call == "fchmod":
        return [errno.EPERM, errno.EIO, errno.ENOTSUP]
    return [errno.EIO, errno.ENOSPC, errno.EINTR] if call == "close" else [errno.EIO, errno.ENOSPC]


class _File(io.RawIOBase):
    """A file whose calls go through ``os``, as those of ``open`` do not."""

    def __init__(self, fd: int, closefd: bool) -> None:
        self._fd, self._closefd = fd, closefd

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return os.write(self._fd, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._closefd:
                os.close(self._fd)


class Faults:
    """Counts writing calls below ``folder``; the ``n``-th ``call`` fails as ``way`` says."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        folder: Path,
        call: str = "",
        n: int = 0,
        way: int = 0,
        calls: tuple[str, ...] = CALLS,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._folder = str(folder.resolve())
        self._lock = threading.Lock()
        self._chosen = call, n, way
        for name in calls:
            owner = fcntl if name == "flock" else os
            patch.setattr(owner, name, self._wrapped(name, getattr(owner, name)))
        if "open" in calls:
            real = io.open
            for module in (builtins, io):
                patch.setattr(module, "open", self._opener(real))

    def _opener(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if mode not in ("wb", "xb", "w") or not self._here(file):
                return real(file, mode, *rest, **options)
            if not isinstance(file, int):
                extra = os.O_EXCL if "x" in mode else os.O_TRUNC
                file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | extra, 0o666)
            raw = io.BufferedWriter(_File(file, options.get("closefd", True)))
            if "b" in mode:
                return raw
            return io.TextIOWrapper(raw, options.get("encoding") or "utf-8")

        return opened

    def _here(self, file: Any) -> bool:
        try:
            path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file
            return os.path.abspath(os.fsdecode(path)).startswith(self._folder)
        except (OSError, TypeError):
            return False

    def _counts_as(self, name: str, arguments: tuple[Any, ...]) -> bool:
        if not arguments or not self._here(arguments[0]):
            return False
        if name == "open":
            return bool(arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if name == "close":
            return bool(fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_ACCMODE)
        return True

    def _wrapped(self, name: str, real: Any) -> Any:
        call, n, way = self._chosen

        def wrapper(*arguments: Any, **options: Any) -> Any:
            due = False
            if self._counts_as(name, arguments):
                with self._lock:
                    self.counts[name] += 1
                    due = name == call and self.counts[name] == n
            if not due:
                return real(*arguments, **options)
            if way == SHORT:
                data = memoryview(arguments[1]).cast("B")
                return real(arguments[0], data[: max(1, len(data) // 2)], *arguments[2:])
            if name == "close":  # whatever it says, the descriptor is gone
                real(*arguments)
            files: tuple[Any, ...] = ()
            if name in ON_PATHS:  # as the system's own errors are
                second = name in ("link", "rename", "replace")
                files = (arguments[0], None, arguments[1]) if second else arguments[:1]
            raise OSError(way, os.strerror(way), *files)

        return wrapper
