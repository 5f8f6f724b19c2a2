"""Owns copies of sequences in host memory: what later steps can read of one, and nothing else.

Rows go through pinned memory, as many at a time as fit there. Knows neither layers nor steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ds4q.hipkern.handles import Pinned
from ds4q.runtime.backend.hip import HipBackend
from ds4q.runtime.device.state import Caches, DeviceState
from ds4q.runtime.errors import SequenceError

U8 = npt.NDArray[np.uint8]

HELD_BYTES = 4 << 20  # that are copied at a time


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """A sequence as it was after ``position`` tokens: ``rows`` are those that it then told of."""

    position: int
    rows: U8
    caches: Caches

    @property
    def nbytes(self) -> int:
        """Host memory that it holds."""
        return self.rows.nbytes


class Snapshots:
    """Copies the sequences of one engine from its device and to it."""

    def __init__(self, backend: HipBackend, caches: Caches) -> None:
        self._backend = backend
        self._caches = caches

    def take(self, state: DeviceState) -> DeviceSnapshot:
        """A copy of ``state``, waited for; later steps of it change nothing of the copy."""
        stream, held, done = self._backend.stream, self._pinned.array, 0
        rows = np.empty(sum(nbytes for _, nbytes in state.rows()), np.uint8)
        for places in _rounds(state.rows()):
            end = 0
            for address, nbytes in places:
                stream.download(held[end : end + nbytes], address)
                end += nbytes
            stream.synchronize()
            rows[done : done + end] = held[:end]
            done += end
        rows.flags.writeable = False
        return DeviceSnapshot(state.position, rows, self._caches)

    def put(self, snapshot: DeviceSnapshot, state: DeviceState) -> None:
        """Let ``state``, which is empty, go on from ``snapshot``.

        Raises
        ------
        SequenceError : the snapshot is another engine's; nothing was changed
        """
        if snapshot.caches is not self._caches:
            raise SequenceError("not a snapshot of this engine", remedy="take one of its sequences")
        state.reserve(snapshot.position)
        state.position = snapshot.position
        stream, held, done = self._backend.stream, self._pinned.array, 0
        for places in _rounds(state.rows()):
            end = sum(nbytes for _, nbytes in places)
            held[:end] = snapshot.rows[done : done + end]
            done += end
            at = 0
            for address, nbytes in places:
                stream.upload(address, held[at : at + nbytes])
                at += nbytes
            stream.synchronize()  # before the pinned memory is used again

    @cached_property
    def _pinned(self) -> Pinned:
        return self._backend.device.pinned(HELD_BYTES)


def _rounds(places: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """(address, bytes) of ``places`` in order, cut so that those of a round fit HELD_BYTES."""
    found: list[tuple[int, int]] = []
    room = HELD_BYTES
    for address, nbytes in places:
        while nbytes:
            part = min(nbytes, room)
            found.append((address, part))
            address, nbytes, room = address + part, nbytes - part, room - part
            if not room:
                yield found
                found, room = [], HELD_BYTES
    if found:
        yield found
