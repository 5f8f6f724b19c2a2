"""Points of a stream."""

from __future__ import annotations

import pytest

from ds4q.hipkern.driver import Device
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.device import clock
from ds4q.runtime.device.clock import Clock


def test_points_are_passed_in_order_however_many_there_are(
    sim: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "_EVENTS", 3)
    others = sim.get("live_events")
    with Device.open() as device:
        stream, other = device.stream(), device.stream()
        room = device.alloc(1 << 20)
        marks = Clock(stream)
        early = [marks.mark() for _ in range(5)]
        early[-1].wait()
        assert all(point.query() for point in early)
        sim.set(delay_us=200_000, delay_seed=1)
        other.fill(room.address, 0, 1 << 20)
        stream.wait(other.record())
        sim.set(delay_us=0)
        late = [marks.mark() for _ in range(2)]
        assert not late[1].query()
        assert not late[0].query()
        assert early[0].query()
        more = [marks.mark() for _ in range(4)]  # their events are those of earlier points
        assert late[0].query()
        more[-1].wait()
        assert all(point.query() for point in (*late, *more))
        assert sim.get("live_events") <= others + 3 + 1
