"""Owns one timer for a moment that keeps moving on. Knows nothing of what is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Rings once no time is left, from ``start`` to ``stop``.

    Starting a timer for each token and stopping it takes longer than writing the token. This one
    only looks again when it goes off.

    Parameters
    ----------
    left_s : seconds until it should ring, as things stand
    ring : called in the event loop, once for each ``start``
    """

    def __init__(self, left_s: Callable[[], float], ring: Callable[[], None]) -> None:
        self._left_s = left_s
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Ring in time; does nothing where it is started already."""
        if self._timer is None:
            self._wait(self._left_s())

    def stop(self) -> None:
        """Ring no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._look)

    def _look(self) -> None:
        left_s = self._left_s()
        if left_s > 0:
            self._wait(left_s)
        else:
            self._timer = None
            self._ring()
