"""Owns the way of events from the model's thread into the event loop. Knows no request.

All that one step tells goes over together: each wake of the loop costs a system call, and takes the
interpreter away from the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from ds4q.runtime.serve.job import Event, Listener

Take = Callable[[Event], None]


class Mailbox:
    """Collects events in the model's thread, and hands them out in the event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: list[tuple[Take, Event]] = []

    def listener(self, take: Take) -> Listener:
        """What a scheduler may tell; ``take`` hears it in the loop that calls this."""
        self._loop = asyncio.get_running_loop()
        return lambda event: self._told.append((take, event))

    def deliver(self) -> None:
        """Send what was told since the last call on its way; from the thread that tells."""
        if not self._told or self._loop is None:
            return
        told, self._told = self._told, []
        with suppress(RuntimeError):  # the loop has ended, and with it whoever would listen
            self._loop.call_soon_threadsafe(self._hand_out, told)

    @staticmethod
    def _hand_out(told: list[tuple[Take, Event]]) -> None:
        for take, event in told:
            take(event)
