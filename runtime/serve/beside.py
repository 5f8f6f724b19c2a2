"""Owns work of requests that takes too long for the event loop. Knows no request.

Reading a long prompt takes seconds: JSON, then tokens. Other clients are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Beside:
    """Runs work in threads of its own, a few at a time: each may hold a large request.

    The threads end with the process, whatever they are at: nobody waits for them at its end.

    Parameters
    ----------
    most : threads at a time; others wait
    """

    def __init__(self, most: int) -> None:
        self._places = asyncio.Semaphore(most)

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises; when this is cancelled, it goes on for nobody."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(deliver: Callable[[], None]) -> None:
            self._places.release()
            if not done.done():
                deliver()

        def call() -> None:
            try:
                result = work()
            except BaseException as error:
                failure = error
                deliver = lambda: done.set_exception(failure)  # noqa: E731
            else:
                deliver = lambda: done.set_result(result)  # noqa: E731
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, deliver)

        threading.Thread(target=call, name="ds4q-prompt", daemon=True).start()
        return await done
