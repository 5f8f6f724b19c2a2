"""Rows of float32 in nameless temporary files, for what is too large for memory.

The file has no name from the beginning, so that nothing is left of it, however the process ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ds4q.artifact.hfq import flat
from ds4q.runtime.errors import SpoolError

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


def check_room(nbytes: int) -> str:
    """The folder for temporary files; ``SpoolError`` where it has no room for so many bytes."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise SpoolError(path=folder, expected=f"{nbytes:,} bytes free", found=f"{free:,} bytes")
    return folder


class Rows:
    """An f32 array [rows, width] on disk; a context manager. Rows not yet written read as zeros.

    ``SpoolError`` where the folder for temporary files has no room, or the disk fails.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.folder = check_room(4 * rows * width)
        self._row_bytes = 4 * width
        self._width = width
        self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        try:
            os.truncate(self._file.fileno(), rows * self._row_bytes)
        except OSError as error:
            self._file.close()
            raise self._failed(error) from None

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, first: int, values: F32) -> None:
        """Replace the rows from ``first`` on by ``values``, of any shape that divides into rows."""
        left = flat(np.ascontiguousarray(values).view(np.uint8))
        at = first * self._row_bytes
        try:
            while left:
                done = os.pwrite(self._file.fileno(), left, at)
                left, at = left[done:], at + done
        except OSError as error:
            raise self._failed(error) from None

    def read(self, first: int, count: int) -> F32:
        """``count`` rows from ``first`` on, [count, width]."""
        out = np.empty((count, self._width), np.float32)
        left = flat(out.view(np.uint8))
        at = first * self._row_bytes
        try:
            while left:
                done = os.preadv(self._file.fileno(), [left], at)
                if not done:
                    raise SpoolError("the temporary file ends early", path=self.folder)
                left, at = left[done:], at + done
        except OSError as error:
            raise self._failed(error) from None
        return out

    def gather(self, rows: I64) -> F32:
        """The rows of these numbers, [len(rows), width]; numbers rise."""
        return np.concatenate([self.read(first, count) for first, count in _runs(rows)])

    def scatter(self, rows: I64, values: F32) -> None:
        """Replace the rows of these numbers, which rise, by ``values`` [len(rows), width]."""
        at = 0
        for first, count in _runs(rows):
            self.write(first, values[at : at + count])
            at += count

    def _failed(self, error: OSError) -> SpoolError:
        return SpoolError(path=self.folder, found=os.strerror(error.errno or 0))


def _runs(rows: I64) -> Iterator[tuple[int, int]]:
    """First number and length of each run of numbers that follow each other."""
    for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        yield int(run[0]), len(run)
