"""Owns opening a file that is read as a whole: a regular one, at once. Knows no format."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

from ds4q.runtime.errors import RunError


def open_regular(path: str | os.PathLike[str], refused: type[RunError], what: str) -> BinaryIO:
    """``path``, open to be read.

    Raises ``refused`` where it is anything but a regular file: ``what`` is not read from a pipe,
    which may never give a byte and cannot be read twice.
    """
    file = open(path, "rb", opener=_at_once)  # noqa: SIM115  # the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise refused(
            f"not {what}: not a regular file", path=path, remedy="give a file (not a pipe)"
        )
    return file


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a named pipe must not hang the open
