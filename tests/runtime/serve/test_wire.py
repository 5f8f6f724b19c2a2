"""When a connection whose client does not read is ended."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from ds4q.runtime.serve.wire import FLUSH_S, STALLED_READER_S, Protocol

OPEN, FULL, CLOSING = (False, False), (True, False), (False, True)


class Transport:
    """As much of a transport as is looked at."""

    closing = False
    unsent = 0
    aborted = False

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


def looked_at(looks: Sequence[tuple[float, tuple[bool, bool], int]]) -> bool:
    """Whether a connection is dropped that looks so at these times: what state, bytes unsent."""
    protocol = Protocol.__new__(Protocol)
    transport = Transport()
    protocol.transport = transport  # type: ignore[assignment]
    protocol.flow = SimpleNamespace(write_paused=False)  # type: ignore[assignment]
    protocol._unsent_bytes, protocol._stuck_since = 0, None
    for now, (full, closing), unsent in looks:
        protocol.flow.write_paused, transport.closing, transport.unsent = full, closing, unsent
        protocol.drop_if_stuck(now)
    return transport.aborted


@pytest.mark.parametrize(("limit_s", "state"), [(STALLED_READER_S, FULL), (FLUSH_S, CLOSING)])
def test_no_progress_ends_it_in_its_time(limit_s: float, state: tuple[bool, bool]) -> None:
    assert not looked_at([(0, state, 9), (limit_s - 1, state, 9)])
    assert looked_at([(0, state, 9), (limit_s, state, 9)])


@pytest.mark.parametrize("state", [FULL, CLOSING])
def test_a_slow_reader_is_waited_for(state: tuple[bool, bool]) -> None:
    seconds = 2 * int(STALLED_READER_S)
    assert not looked_at([(now, state, 1000 - now) for now in range(seconds)])


def test_a_connection_that_waits_for_nothing_stays() -> None:
    hours = [3600.0 * n for n in range(3)]
    assert not looked_at([(now, OPEN, 500) for now in hours])
    assert not looked_at([(0, FULL, 9), (50, OPEN, 9), (59, FULL, 9), (70, FULL, 9)])
