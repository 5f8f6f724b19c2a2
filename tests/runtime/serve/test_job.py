"""What a job's ticket does, and what the scheduler's protocol asks of both engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds4q.runtime.serve.job import BatchEngine, Ticket
from ds4q.runtime.serve.service import ServedEngine

if TYPE_CHECKING:  # checked by mypy: either engine is one that can be served
    from ds4q.runtime.device.engine import HipEngine
    from ds4q.runtime.engine import Engine

    def _on_cpu(engine: Engine) -> ServedEngine:
        return engine

    def _on_device(engine: HipEngine) -> ServedEngine:
        return engine

    def _scheduled(engine: ServedEngine) -> BatchEngine:
        return engine


def test_a_ticket_is_cancelled_once() -> None:
    wakes: list[bool] = []
    ticket = Ticket(lambda: wakes.append(ticket.cancelled))
    assert not ticket.cancelled
    ticket.cancel()
    ticket.cancel()
    assert ticket.cancelled
    assert wakes == [True]  # whoever is woken finds it cancelled
