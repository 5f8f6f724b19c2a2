"""Owns how experts get from the artifact into slots on a device: reads, staging, copies.

Each thread reads into pinned memory of its own, queues the copy, compares digests meanwhile and
waits for both, while other threads read and copy theirs. So a buffer is not written before its copy
has been made, and a slot is not told complete before its bytes are there and are the right ones.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ds4q.hipkern.driver import Device
from ds4q.hipkern.streams import Event, Stream
from ds4q.runtime.device.pools import ExpertPools
from ds4q.runtime.experts.catalogue import Catalogue, Key
from ds4q.runtime.experts.fillqueue import FillQueue
from ds4q.runtime.experts.reading import Done, ExpertReader, Fill
from ds4q.runtime.experts.transform import Parts


class DeviceTransport:
    """Fills slots on a device.

    Parameters
    ----------
    reader : closed with the transport
    threads : reads and copies at a time

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
        self._counts = dict.fromkeys(("copies", "bytes_copied", "copy_us"), 0)
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
        """Those of the reader, and copies with their bytes and their time on the device."""
        with self._lock:
            return self._reader.counters() | self._counts

    def close(self) -> None:
        """See ``Transport``. May be called again."""
        self._queue.close()
        for lane in self._lanes:
            lane.free()
        self._stream.free()
        self._reader.close()

    def count_copy(self, nbytes: int, seconds: float) -> None:
        """A fill's copy was made."""
        with self._lock:
            self._counts["copies"] += 1
            self._counts["bytes_copied"] += nbytes
            self._counts["copy_us"] += round(1e6 * seconds)


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
        self._began: Event | None = None
        self._ended: Event | None = None

    def fill(self, fill: Fill) -> None:
        """Read an expert, check it, and have it in its slot."""
        record = self._catalogue[fill.key]

        def copy(parts: Parts) -> None:
            self._device.enter()
            self._began = self._stream.record(self._began)
            addresses = self._pools.addresses(fill.key.layer, fill.slot)
            try:
                for address, part in zip(addresses, parts, strict=True):
                    self._stream.upload(address, part)
            finally:  # what was queued reads the staging, also where the rest could not be
                self._ended = self._stream.record(self._ended)

        try:
            self._reader.stage(record, self._staging.array, copy)
        finally:
            took = self._await_copy()
        self._transport.count_copy(record.nbytes, took)

    def _await_copy(self) -> float:
        """The staging is read, and the slot incomplete, until the copy has been made.

        Returns the seconds that the device took for it.
        """
        if self._began is None or self._ended is None:
            return 0.0
        self._ended.synchronize()
        return self._began.elapsed_ms(self._ended) / 1e3

    def free(self) -> None:
        """Give everything back; no fill may be under way."""
        for event in (self._began, self._ended):
            if event is not None:
                event.free()
        self._staging.free()
