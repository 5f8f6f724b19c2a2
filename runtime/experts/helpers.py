"""Owns threads that share work and never hold up the end of the process. Knows no work.

Those of ``concurrent.futures`` are waited for when the interpreter ends: one that hangs in a read
would keep the process for as long as the disk does not answer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Helpers:
    """``count`` threads that serve calls in order of arrival."""

    def __init__(self, count: int, name: str) -> None:
        self._line: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._line = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have ``call`` made; its future tells what came of it, and cancels it until it begins."""
        future: Future[T] = Future()
        self._line.put((future, call))
        return future

    def close(self) -> None:
        """Serve what is in line, and end."""
        for _ in self._threads:
            self._line.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._line.get()) is not None:
            future, call = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del job, future, call  # they hold buffers, and the next job may be long in coming
