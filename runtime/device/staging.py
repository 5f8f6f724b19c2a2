"""Owns the way from host memory to the device: a ring of pinned buffers and their copies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds4q.hipkern.driver import Device
from ds4q.hipkern.streams import Event, Stream

U8 = npt.NDArray[np.uint8]


class Staging:
    """``slots`` pinned buffers in turn: taken, filled by whoever took them, sent in that order."""

    def __init__(self, device: Device, stream: Stream, slots: int, nbytes: int) -> None:
        self.slots = slots
        self.nbytes = nbytes
        self._stream = stream
        self._pinned = device.pinned(slots * nbytes)
        self._events: list[Event | None] = [None] * slots
        self._taken = 0
        self._sent = 0

    def take(self, nbytes: int) -> U8:
        """The next buffer, once its last copy has been made."""
        slot = self._taken % self.slots
        self._taken += 1
        self._await(slot)
        return self._buffer(slot)[:nbytes]

    def send(self, address: int, nbytes: int) -> None:
        """Copy the longest taken buffer to the device."""
        slot = self._sent % self.slots
        self._sent += 1
        self._stream.upload(address, self._buffer(slot), nbytes)
        self._events[slot] = self._stream.record(self._events[slot])

    def _await(self, slot: int) -> None:
        """The last copy from a buffer reads it until it has been made."""
        event = self._events[slot]
        if event is not None:
            event.synchronize()

    def _buffer(self, slot: int) -> U8:
        return self._pinned.array[slot * self.nbytes : (slot + 1) * self.nbytes]

    def free(self) -> None:
        """Give the buffers back; every copy must have been made."""
        for event in self._events:
            if event is not None:
                event.free()
        self._pinned.free()
