"""Owns how experts get from the artifact into slots on a device: reads, staging, copies.

Each thread reads into pinned memory of its own, queues the copy of each matrix as soon as it is
there, has digests compared meanwhile and waits for all of it, while other threads read and copy
theirs. So a buffer is not written before its copy has been made, and a slot is not told complete
before its bytes are there and are the right ones.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds4q.hipkern.driver import Device
from ds4q.hipkern.streams import Event, Stream
from ds4q.runtime.device.pools import ExpertPools
from ds4q.runtime.experts.catalogue import Catalogue, Key
from ds4q.runtime.experts.fillqueue import FillQueue
from ds4q.runtime.experts.reading import Done, ExpertReader, Fill

U8 = npt.NDArray[np.uint8]


class DeviceTransport:
    """Fills slots on a device.

    Parameters
    ----------
    reader : closed with the transport
    threads : fills at a time; the reader limits how many of them read

    Attributes
    ----------
    staging_bytes : pinned memory of all threads
    """

    def __init__(
        self,
        catalogue: Catalogue,
        reader: ExpertReader,
        pools: ExpertPools,
        device: Device,
        *,
        threads: int,
    ) -> None:
        self._reader = reader
        self.staging_bytes = threads * reader.staging_bytes
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("copies", "bytes_copied"), 0)
        self._stream = device.stream()
        self._lanes = [
            _Lane(self, catalogue, reader, pools, device, self._stream) for _ in range(threads)
        ]
        self._queue = FillQueue(reader.path, [lane.fill for lane in self._lanes])

    def start(self, fills: Sequence[Fill], done: Done) -> None:
        """See ``Transport``; slots are those of the pools."""
        self._queue.start(fills, done)

    def hurry(self, keys: Sequence[Key]) -> None:
        """See ``Transport``."""
        self._queue.hurry(keys)

    def counters(self) -> dict[str, int]:
        """Those of the reader, and experts that were copied, with their bytes."""
        with self._lock:
            return self._reader.counters() | self._counts

    def close(self) -> None:
        """See ``Transport``. May be called again."""
        ended = self._queue.close()
        for lane in self._lanes:
            lane.free() if ended else lane.leave()
        if ended:
            self._stream.free()
        self._reader.close()

    def count_copy(self, nbytes: int) -> None:
        """An expert was copied into its slot."""
        with self._lock:
            self._counts["copies"] += 1
            self._counts["bytes_copied"] += nbytes


class _Lane:
    """What one thread fills slots with."""

    def __init__(
        self,
        transport: DeviceTransport,
        catalogue: Catalogue,
        reader: ExpertReader,
        pools: ExpertPools,
        device: Device,
        stream: Stream,
    ) -> None:
        self._transport = transport
        self._catalogue = catalogue
        self._reader = reader
        self._pools = pools
        self._device = device
        self._stream = stream
        self._staging = device.pinned(reader.staging_bytes)
        self._event: Event | None = None

    def fill(self, fill: Fill) -> None:
        """Read an expert, check it, and have it in its slot."""
        record = self._catalogue[fill.key]

        addresses = self._pools.addresses(fill.key.layer, fill.slot)

        def copy(number: int, part: U8) -> None:
            self._device.enter()
            self._stream.upload(addresses[number], part)

        try:
            self._reader.stage(record, self._staging.array, copy, fill.phase)
        finally:  # copies read the staging, also where not all could be begun
            self._device.enter()
            self._event = self._stream.record(self._event)
            self._await_copy()
        self._transport.count_copy(record.nbytes)

    def _await_copy(self) -> None:
        """The staging is read, and the slot incomplete, until the copies have been made."""
        if self._event is not None:
            self._event.synchronize()

    def leave(self) -> None:
        """A fill may be under way that never ends: what it reads into is never freed."""
        self._device.disown(self._staging)

    def free(self) -> None:
        """Give everything back; no fill may be under way."""
        if self._event is not None:
            self._event.free()
        self._staging.free()
