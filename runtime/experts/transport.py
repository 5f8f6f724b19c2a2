"""Owns the threads that fill slots in host memory. Knows neither policy nor file layout."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ds4q.runtime.errors import TransportClosedError
from ds4q.runtime.experts.catalogue import Catalogue, Key, Record
from ds4q.runtime.experts.reading import Done, ExpertReader, Fill, Purpose, aligned_buffer
from ds4q.runtime.experts.transform import Parts

U8 = npt.NDArray[np.uint8]


class Slots(Protocol):
    """Where experts are kept in host memory."""

    def views(self, record: Record, slot: int) -> Parts:
        """Gate, up, down of a slot, each of exactly the tensor's length."""


@dataclass(order=True)
class _Job:
    """A fill in the queue: by purpose, then in order of arrival."""

    purpose: Purpose
    number: int
    fill: Fill = field(compare=False)
    done: Done = field(compare=False)


class HostTransport:
    """Fills slots in host memory: worker threads that each read one expert after the other.

    Where the catalogue has a transform, an expert is read whole into a thread's own buffer, checked
    there, and transformed into its slot.

    Parameters
    ----------
    reader : closed with the transport; with ``threads`` bounces where there is no transform
    threads : reads at a time
    """

    def __init__(
        self, catalogue: Catalogue, reader: ExpertReader, slots: Slots, *, threads: int
    ) -> None:
        self._catalogue = catalogue
        self._reader = reader
        self._slots = slots
        self._ready = threading.Condition()
        self._queue: list[_Job] = []
        self._waiting: dict[Key, _Job] = {}
        self._arrivals = count()
        self._closed = False
        self._counts = dict.fromkeys(("fills_transformed", "transform_us", "bytes_written"), 0)
        whole = 0 if catalogue.transform is None else reader.staging_bytes
        self._threads = [
            threading.Thread(
                target=self._work, args=(aligned_buffer(whole),), name=f"ds4q-read-{n}", daemon=True
            )
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, fills: Sequence[Fill], done: Done) -> None:
        """See ``Transport``; ``TransportClosedError`` after ``close``."""
        with self._ready:
            if self._closed:
                raise TransportClosedError(path=self._reader.path)
            for fill in fills:
                job = _Job(fill.purpose, next(self._arrivals), fill, done)
                self._waiting[fill.key] = job
                heapq.heappush(self._queue, job)
            self._ready.notify(len(fills))

    def hurry(self, keys: Sequence[Key]) -> None:
        """See ``Transport``; nothing happens where the read has begun."""
        with self._ready:
            for key in keys:
                if key in self._waiting:
                    self._waiting[key].purpose = Purpose.DEMAND
            heapq.heapify(self._queue)

    def counters(self) -> dict[str, int]:
        """Those of the reader, and what was written into slots."""
        with self._ready:
            return self._reader.counters() | self._counts

    def close(self) -> None:
        """See ``Transport``. May be called again."""
        with self._ready:
            self._closed = True
            refused, self._queue = self._queue, []
            self._waiting.clear()
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()
        for job in refused:
            job.done(job.fill, TransportClosedError(path=self._reader.path))
        self._reader.close()

    def _work(self, staging: U8) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                job = heapq.heappop(self._queue)
                self._waiting.pop(job.fill.key, None)
            error: BaseException | None = None
            try:
                self._fill(job.fill, staging)
            except BaseException as raised:
                error = raised
            job.done(job.fill, error)

    def _fill(self, fill: Fill, staging: U8) -> None:
        transform = self._catalogue.transform
        layer, expert = fill.key
        record = self._catalogue.records[layer][expert]
        written = self._slots.views(self._catalogue.packed[layer][expert], fill.slot)
        took = 0.0
        if transform is None:
            self._reader.read(record, *written)
        else:
            read = self._reader.stage(record, staging)
            started = time.perf_counter()
            transform.apply(record, read, written)
            took = time.perf_counter() - started
        with self._ready:
            self._counts["bytes_written"] += sum(part.nbytes for part in written)
            self._counts["fills_transformed"] += transform is not None
            self._counts["transform_us"] += round(took * 1e6)
