"""Owns the way from host memory to the device: a ring of pinned buffers and their copies."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ds4q.hipkern.driver import Device
from ds4q.hipkern.errors import HipError
from ds4q.hipkern.streams import Event, Stream

U8 = npt.NDArray[np.uint8]


class Staging:
    """``slots`` pinned buffers in turn: taken, filled by whoever took them, sent in that order.

    Leaving the context waits for the copies, then frees the buffers.
    """

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
        event = self._events[slot]
        if event is not None:
            event.synchronize()
        return self._buffer(slot)[:nbytes]

    def send(self, address: int, nbytes: int) -> None:
        """Copy the longest taken buffer to the device."""
        slot = self._sent % self.slots
        self._sent += 1
        self._stream.upload(address, self._buffer(slot), nbytes)
        self._events[slot] = self._stream.record(self._events[slot])

    def put(self, address: int, values: npt.NDArray[np.generic] | bytes) -> None:
        """Copy ``values`` to the device, by way of as many buffers as they take."""
        raw = np.frombuffer(values, dtype=np.uint8)
        for start in range(0, raw.size, self.nbytes):
            part = raw[start : start + self.nbytes]
            self.take(part.size)[:] = part
            self.send(address + start, part.size)

    def _buffer(self, slot: int) -> U8:
        return self._pinned.array[slot * self.nbytes : (slot + 1) * self.nbytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self._stream.synchronize()
        except HipError:
            if error is None:  # else the first error is the one to tell
                raise
        finally:
            for event in self._events:
                if event is not None:
                    event.free()
            self._pinned.free()
