"""Owns the line of fills that wait to be read, and the threads that serve it. Reads nothing."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from ds4q.runtime.errors import TransportClosedError
from ds4q.runtime.experts.catalogue import Key
from ds4q.runtime.experts.reading import Done, Fill, Purpose

Filler = Callable[[Fill], None]


@dataclass(order=True)
class _Job:
    """A fill in the line: by purpose, then in order of arrival."""

    purpose: Purpose
    number: int
    fill: Fill = field(compare=False)
    done: Done = field(compare=False)


class FillQueue:
    """Threads that each fill one slot after the other, the most urgent first.

    Parameters
    ----------
    path : the artifact; named in errors
    fillers : one for each thread, which alone calls it; returns once a slot is complete
    """

    def __init__(self, path: object, fillers: Sequence[Filler]) -> None:
        self._path = path
        self._ready = threading.Condition()
        self._line: list[_Job] = []
        self._waiting: dict[Key, _Job] = {}
        self._arrivals = count()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(filler,), name=f"ds4q-read-{n}", daemon=True)
            for n, filler in enumerate(fillers)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, fills: Sequence[Fill], done: Done) -> None:
        """See ``Transport``; ``TransportClosedError`` after ``close``."""
        with self._ready:
            if self._closed:
                raise TransportClosedError(path=self._path)
            for fill in fills:
                job = _Job(fill.purpose, next(self._arrivals), fill, done)
                self._waiting[fill.key] = job
                heapq.heappush(self._line, job)
            self._ready.notify(len(fills))

    def hurry(self, keys: Sequence[Key]) -> None:
        """See ``Transport``; nothing happens where the read has begun."""
        with self._ready:
            for key in keys:
                if key in self._waiting:
                    self._waiting[key].purpose = Purpose.DEMAND
            heapq.heapify(self._line)

    def close(self) -> None:
        """Let the fills that run end, and refuse those that wait. May be called again."""
        with self._ready:
            self._closed = True
            refused, self._line = self._line, []
            self._waiting.clear()
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()
        for job in refused:
            job.done(job.fill, TransportClosedError(path=self._path))

    def _work(self, filler: Filler) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._line or self._closed)
                if self._closed:
                    return
                job = heapq.heappop(self._line)
                self._waiting.pop(job.fill.key, None)
            error: BaseException | None = None
            try:
                filler(job.fill)
            except BaseException as raised:
                error = raised
            job.done(job.fill, error)
