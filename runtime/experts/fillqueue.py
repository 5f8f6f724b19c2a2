"""Owns the line of fills that wait to be read, and the threads that serve it. Reads nothing."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from ds4q.runtime.errors import ExpertReadError, TransportClosedError
from ds4q.runtime.experts.catalogue import Key
from ds4q.runtime.experts.reading import Done, Fill, Purpose

CLOSE_S = 10.0  # from its start, that closing gives a fill; a disk that answers takes far less

Filler = Callable[[Fill], None]


@dataclass(order=True)
class _Job:
    """A fill in the line: by purpose, then in order of arrival."""

    purpose: Purpose
    number: int
    fill: Fill = field(compare=False)
    done: Done = field(compare=False)
    began: float = field(default=0.0, compare=False)


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
        self._running: dict[int, _Job] = {}
        self._arrivals = count()
        self._closed = False
        self._hangs = False
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

    def close(self) -> bool:
        """Refuse the fills that wait, and let those that run end. May be called again.

        Returns
        -------
        whether all have ended. Those that have not, ``CLOSE_S`` after they began, are told as
        failed; their threads still use what they fill with, for as long as the disk hangs
        """
        with self._ready:
            self._closed = True
            refused, self._line = self._line, []
            self._waiting.clear()
            self._ready.notify_all()
        for job in refused:
            job.done(job.fill, TransportClosedError(path=self._path))
        with self._ready:
            until = max((job.began for job in self._running.values()), default=0.0) + CLOSE_S
            self._ready.wait_for(lambda: not self._running, until - time.monotonic())
            late, self._running = self._running, {}
            self._hangs |= bool(late)
        for job in late.values():
            job.done(job.fill, ExpertReadError("a read does not come back", path=self._path))
        if not self._hangs:
            for thread in self._threads:
                thread.join()
        return not self._hangs

    def _work(self, filler: Filler) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._line or self._closed)
                if self._closed:
                    return
                job = heapq.heappop(self._line)
                self._waiting.pop(job.fill.key, None)
                self._running[job.number] = job
                job.began = time.monotonic()
            error: BaseException | None = None
            try:
                filler(job.fill)
            except BaseException as raised:
                error = raised
            with self._ready:
                told = self._running.pop(job.number, None) is None
                if self._closed:  # else it would only wake those who have nothing to do
                    self._ready.notify_all()
            if not told:
                job.done(job.fill, error)
