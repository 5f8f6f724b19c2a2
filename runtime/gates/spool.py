"""Owns the recorded calls of one model on disk, while the other one runs. Compares nothing.

Two models of 100 GB do not fit into memory together, and a divergence needs whole distributions.
So the reference runs first, and its logits wait in a nameless temporary file, as exact as the model
made them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ds4q.runtime.errors import SpoolError
from ds4q.runtime.gates.forced import F32, Call
from ds4q.runtime.rows import check_room

_NO_LOGITS: F32 = np.empty((0, 0), np.float32)


class Spool:
    """A context manager; the file is gone with it, also after a crash.

    Parameters
    ----------
    nbytes : what it is going to hold

    Raises
    ------
    SpoolError : the folder for temporary files has no room for that
    """

    def __init__(self, nbytes: int) -> None:
        self.folder = check_room(nbytes)
        # Unbuffered: nothing is left to be written when a full disk has ended the comparison.
        self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        self._calls: list[tuple[Call, tuple[int, ...]]] = []  # without logits; their shape

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, call: Call) -> None:
        """Append ``call``; ``SpoolError`` where the disk is full, or failed."""
        left = memoryview(call.logits.astype("<f4", copy=False).tobytes())
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise SpoolError(path=self.folder, found=os.strerror(error.errno or 0)) from None
        self._calls.append((replace(call, logits=_NO_LOGITS), call.logits.shape))

    def calls(self) -> Iterator[Call]:
        """What was written, from the beginning."""
        self._file.seek(0)
        for call, shape in self._calls:
            logits = np.fromfile(self._file, "<f4", int(np.prod(shape)))
            if logits.size != np.prod(shape):
                raise SpoolError("the temporary file ends early", path=self.folder)
            yield replace(call, logits=logits.reshape(shape))
