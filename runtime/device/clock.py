"""Owns how far a stream has come: points in its queue that can be asked for, however many."""

from __future__ import annotations

import threading

from ds4q.hipkern.streams import Event, Stream

_EVENTS = 64  # points that may be ahead of the stream before a new one waits


class Point:
    """A point in a stream's queue."""

    __slots__ = ("_clock", "_number")

    def __init__(self, clock: Clock, number: int) -> None:
        self._clock = clock
        self._number = number

    def query(self) -> bool:
        """Whether the stream has come here; any thread may ask."""
        return self._clock.has_passed(self._number)

    def wait(self) -> None:
        """Return once it has."""
        self._clock.wait(self._number)


class Clock:
    """The points of one stream, in the order in which they are made: a later one is passed later.

    A few events serve them all, since who has passed a point has passed all before it.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._events: list[Event | None] = [None] * _EVENTS
        self._made = 0
        self._passed = 0

    def mark(self) -> Point:
        """A point behind everything that is queued now."""
        with self._lock:
            number = self._made + 1
            self._wait(number - _EVENTS)
            at = number % _EVENTS
            self._events[at] = self._stream.record(self._events[at])
            self._made = number
        return Point(self, number)

    def has_passed(self, number: int) -> bool:
        """Whether the stream has come to point ``number``."""
        with self._lock:
            if number > self._passed:
                self._stream.device.enter()
                if self._event(number).query():
                    self._passed = number
            return number <= self._passed

    def wait(self, number: int) -> None:
        """Wait until it has."""
        with self._lock:
            self._wait(number)

    def _wait(self, number: int) -> None:
        if number > self._passed:
            self._event(number).synchronize()
            self._passed = number

    def _event(self, number: int) -> Event:
        """That of a point which may not be passed yet: its event serves no later one."""
        event = self._events[number % _EVENTS]
        if event is None:
            raise ValueError(f"no point {number} was made")
        return event
