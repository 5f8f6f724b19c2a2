"""Owns a stopwatch of named laps: what a load spent its time on. Prints nothing."""

from __future__ import annotations

import time


class Laps:
    """Seconds by name, in the order of first mention; running since it was made."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to ``name``."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
