"""Owns what fills slots, and filling those in host memory. Knows neither policy nor file layout."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ds4q.runtime.experts.catalogue import Catalogue, Key, Record
from ds4q.runtime.experts.fillqueue import FillQueue
from ds4q.runtime.experts.reading import Done, ExpertReader, Fill
from ds4q.runtime.experts.transform import Parts

U8 = npt.NDArray[np.uint8]


class Transport(Protocol):
    """Fills slots in the background, wherever slots are."""

    def start(self, fills: Sequence[Fill], done: Done) -> None:
        """Queue ``fills`` and return.

        ``done`` is called once for each, from another thread, when all of its bytes are in the
        slot and checked, or with the error. It must not raise.
        """

    def hurry(self, keys: Sequence[Key]) -> None:
        """Fills of ``keys`` that are still queued are now waited for: serve them as demands."""

    def counters(self) -> dict[str, int]:
        """Reads, bytes and what else this transport counts."""

    def close(self) -> None:
        """Refuse the reads that wait, let those that run end, free everything.

        A read that hangs is told as failed and not waited for: what it uses stays.
        """


class Slots(Protocol):
    """Where experts are kept in host memory."""

    def views(self, record: Record, slot: int) -> Parts:
        """Gate, up, down of a slot, each of exactly the tensor's length."""


class HostTransport:
    """Fills slots in host memory: worker threads that each read one expert after the other.

    Where the catalogue has a transform, an expert is read whole into a thread's own buffer, checked
    there, and transformed into its slot.

    Parameters
    ----------
    reader : closed with the transport; with ``threads`` bounces where there is no transform
    threads : fills at a time; the reader limits how many of them read
    """

    def __init__(
        self, catalogue: Catalogue, reader: ExpertReader, slots: Slots, *, threads: int
    ) -> None:
        self._catalogue = catalogue
        self._reader = reader
        self._slots = slots
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("fills_transformed", "transform_us", "bytes_written"), 0)
        whole = 0 if catalogue.transform is None else reader.staging_bytes
        fillers = [partial(self._fill, np.empty(whole, dtype=np.uint8)) for _ in range(threads)]
        self._queue = FillQueue(reader.path, fillers)

    def start(self, fills: Sequence[Fill], done: Done) -> None:
        """See ``Transport``; ``TransportClosedError`` after ``close``."""
        self._queue.start(fills, done)

    def hurry(self, keys: Sequence[Key]) -> None:
        """See ``Transport``; nothing happens where the read has begun."""
        self._queue.hurry(keys)

    def counters(self) -> dict[str, int]:
        """Those of the reader, and what was written into slots."""
        with self._lock:
            return self._reader.counters() | self._counts

    def close(self) -> None:
        """See ``Transport``. May be called again."""
        self._queue.close()
        self._reader.close()

    def _fill(self, staging: U8, fill: Fill) -> None:
        transform = self._catalogue.transform
        layer, expert = fill.key
        record = self._catalogue.records[layer][expert]
        written = self._slots.views(self._catalogue.packed[layer][expert], fill.slot)
        took = 0.0
        if transform is None:
            self._reader.read(record, *written, fill.phase)
        else:
            read = self._reader.stage(record, staging, phase=fill.phase)
            started = time.perf_counter()
            transform.apply(record, read, written)
            took = time.perf_counter() - started
        with self._lock:
            self._counts["bytes_written"] += sum(part.nbytes for part in written)
            self._counts["fills_transformed"] += transform is not None
            self._counts["transform_us"] += round(took * 1e6)
