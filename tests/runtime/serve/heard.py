"""What a listener heard, and jobs in few words, for the tests of the scheduler."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ds4q.runtime.serve.job import (
    Event,
    Failed,
    Finished,
    Job,
    NewToken,
    Started,
    Ticket,
)
from ds4q.runtime.serve.scheduler import Scheduler
from tests.runtime.serve.scripted import EOS, PATIENCE_S


def job(prompt_ids: Sequence[int], marks: Sequence[int] = (), **other: Any) -> Job:
    """A greedy job that ends at EOS."""
    return Job(
        prompt_ids=prompt_ids,
        marks=marks,
        **{
            "max_tokens": 100,
            "temperature": 0.0,
            "top_p": 1.0,
            "seed": 0,
            "stop_ids": frozenset({EOS}),
            **other,
        },
    )


class Heard:
    """A listener that keeps all events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ended = threading.Event()

    def __call__(self, event: Event) -> None:
        assert not self._ended.is_set(), f"{event} after the end"
        self.events.append(event)
        if isinstance(event, Finished | Failed):
            self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def ids(self) -> list[int]:
        return [event.id for event in self.events if isinstance(event, NewToken)]

    @property
    def cached(self) -> int:
        (started,) = [event for event in self.events if isinstance(event, Started)]
        return started.cached_tokens

    def end(self) -> Finished | Failed:
        """The last event, once it has come."""
        assert self._ended.wait(PATIENCE_S), f"no end after {self.events[-3:]}"
        last = self.events[-1]
        assert isinstance(last, Finished | Failed)
        return last

    def finished(self) -> Finished:
        last = self.end()
        assert isinstance(last, Finished), last
        return last

    def failed(self) -> Exception:
        last = self.end()
        assert isinstance(last, Failed), last
        return last.error


def ask(scheduler: Scheduler, wanted: Job) -> tuple[Heard, Ticket]:
    """Submit; what will be heard, and the ticket."""
    heard = Heard()
    return heard, scheduler.submit(wanted, heard)


def answer(scheduler: Scheduler, wanted: Job) -> Heard:
    """Submit and wait for the end."""
    heard, _ = ask(scheduler, wanted)
    heard.finished()
    return heard
