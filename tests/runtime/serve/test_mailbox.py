"""The way of events into the event loop: how often it is woken, and in which order they come."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ds4q.runtime.serve.job import Event, NewToken
from ds4q.runtime.serve.mailbox import Mailbox


def test_all_that_a_step_tells_comes_with_one_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[list[int], list[int], int]:
        mailbox, wakes = Mailbox(), 0
        heard: tuple[list[int], list[int]] = ([], [])
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(*args: object) -> object:
            nonlocal wakes
            wakes += 1
            return wake(*args)  # type: ignore[arg-type]

        def take(place: int, event: Event) -> None:
            assert isinstance(event, NewToken)
            heard[place].append(event.id)

        listeners = [
            mailbox.listener(lambda event, place=place: take(place, event))  # type: ignore[misc]
            for place in (0, 1)
        ]
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

        def tell() -> None:
            for step in range(3):
                for listener in listeners:
                    listener(NewToken(step))
                mailbox.deliver()
            mailbox.deliver()  # nothing was told: nobody is woken

        thread = threading.Thread(target=tell)
        thread.start()
        thread.join()
        assert heard == ([], [])  # here, not in the thread that told
        await asyncio.sleep(0)
        return *heard, wakes

    assert asyncio.run(run()) == ([0, 1, 2], [0, 1, 2], 3)
