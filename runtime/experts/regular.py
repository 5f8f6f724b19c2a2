"""Owns opening a file that is read as a whole: a regular one, at once. Knows no format."""

from __future__ import annotations

import os
from typing import BinaryIO

from ds4q.artifact import files
from ds4q.artifact.files import NotRegularError
from ds4q.runtime.errors import RunError


def open_regular(path: str | os.PathLike[str], refused: type[RunError], what: str) -> BinaryIO:
    """``path``, open to be read.

    Raises ``refused`` where it is anything but a regular file: ``what`` is not read from a pipe,
    which may never give a byte and cannot be read twice.
    """
    try:
        return open(files.open_regular(path), "rb")  # the caller closes it
    except NotRegularError as error:
        what = f"not {what}: not a regular file"
        raise refused(what, path=path, found=error.found, remedy="give a file") from None
