"""A timer whose moment moves on."""

from __future__ import annotations

import asyncio

from ds4q.runtime.serve.alarm import Alarm


async def some_turns() -> None:
    """Let what is due in the event loop happen."""
    for _ in range(4):
        await asyncio.sleep(0)


def test_it_rings_when_no_time_is_left_and_not_before() -> None:
    async def run() -> list[str]:
        looked: list[str] = []
        left = [0.001, 0.001, 0.0]
        rang = asyncio.Event()

        def left_s() -> float:
            looked.append("look")
            return left[len(looked) - 1]

        alarm = Alarm(left_s, rang.set)
        alarm.start()
        alarm.start()  # is started already
        await rang.wait()
        return looked

    assert asyncio.run(run()) == ["look"] * 3


def test_it_may_be_stopped_and_started_again() -> None:
    async def run() -> int:
        rings = 0

        def ring() -> None:
            nonlocal rings
            rings += 1

        alarm = Alarm(lambda: 0.0, ring)
        alarm.start()
        alarm.stop()
        alarm.stop()
        await some_turns()
        assert rings == 0
        for _ in range(2):
            alarm.start()
            await some_turns()
        return rings

    assert asyncio.run(run()) == 2
