"""Owns the way of one answer from the model's thread to whoever waits for it in the event loop.

However the wait ends, the job is cancelled: a client that leaves, a time limit and a stop string
cost the model one token more at most.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ds4q.artifact.errors import Ds4qError
from ds4q.runtime.errors import EngineError
from ds4q.runtime.serve.alarm import Alarm
from ds4q.runtime.serve.job import (
    Event,
    Failed,
    Finished,
    Job,
    Listener,
    NewToken,
    Prefilled,
    Started,
    Ticket,
)
from ds4q.runtime.serve.mailbox import Mailbox
from ds4q.runtime.serve.refusal import Refusal, shutting_down
from ds4q.runtime.serve.transcript import Piece, Transcript

log = logging.getLogger("ds4q.serve")

T = TypeVar("T")


class ClientLeftError(Exception):
    """Whoever asked has closed the connection."""


async def while_connected(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves.

    Parameters
    ----------
    receive : of ASGI; the request's body has been read

    Raises
    ------
    ClientLeftError : the client left first
    """

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(leave())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def too_late(limit_s: float) -> Refusal:
    """The refusal of a request that took all the time that one may take."""
    return Refusal(504, f"no end of the answer within {limit_s:g} s", code="timeout")


def _log_failure(error: Ds4qError) -> None:
    """One line for a rule that was broken, a damaged file say; where it came from, of a bug."""
    if isinstance(error, EngineError):  # what no rule foresaw
        came_from = error.__cause__
    else:
        came_from = error if log.isEnabledFor(logging.INFO) else None
    log.error("a request failed: %s", error, exc_info=came_from)


class Submits(Protocol):
    """What takes jobs: the scheduler."""

    def submit(self, job: Job, listener: Listener) -> Ticket:
        """Queue ``job``; ``listener`` hears its events, from another thread."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing new for a while; so many of the prompt's tokens have been read."""

    done: int
    total: int


class Follower:
    """One job, from its place in the queue to its last token.

    Parameters
    ----------
    mailbox : brings what the scheduler tells into this event loop
    transcript : takes the tokens; holds the counts of the answer
    keep_alive_s : ``pieces`` yields ``Waiting`` after so long without anything else
    limit_s : most seconds in all; None: no limit
    began : when the request came, on the clock of ``time.monotonic``

    Attributes
    ----------
    cached_tokens : prompt tokens that needed no computing
    first_token_s : seconds to the first token; None before it
    """

    def __init__(
        self,
        scheduler: Submits,
        mailbox: Mailbox,
        job: Job,
        transcript: Transcript,
        *,
        keep_alive_s: float,
        limit_s: float | None,
        began: float,
    ) -> None:
        self.job = job
        self.transcript = transcript
        self.cached_tokens = 0
        self.first_token_s: float | None = None
        self._keep_alive_s = keep_alive_s
        self._limit_s = limit_s
        self._began = began
        self._told = self._began
        self._last_token_s = 0.0
        self._prefilled = 0
        self._events: deque[Event] = deque()
        self._woken = asyncio.Event()
        self._ticket = scheduler.submit(job, mailbox.listener(self._hear))

    @property
    def token_s(self) -> float | None:
        """Mean seconds between two tokens; None with less than two."""
        tokens = self.transcript.tokens
        if self.first_token_s is None or tokens < 2:
            return None
        return (self._last_token_s - self.first_token_s) / (tokens - 1)

    def cancel(self) -> None:
        """Let the model drop the job; does nothing for one that has ended."""
        self._ticket.cancel()

    async def pieces(self) -> AsyncIterator[Piece | Waiting]:
        """What the answer grows by, to its end.

        Raises ``Refusal`` where the model fails, the time is up or the server ends.
        """
        alarm = Alarm(self._left_s, self._woken.set)
        try:
            while True:
                await self._wait(alarm)
                if not self._events:
                    yield Waiting(self._prefilled, len(self.job.prompt_ids))
                before = self.transcript.tokens
                piece, last = self._take()
                if self.transcript.tokens > before:
                    yield piece
                if self.transcript.stopped:
                    self.cancel()
                    yield self.transcript.end("stop")
                    return
                if last is not None:
                    yield self._end(last)
                    return
        finally:
            alarm.stop()

    def _hear(self, event: Event) -> None:
        self._events.append(event)
        self._woken.set()

    def _left_s(self) -> float:
        """Seconds until a client should hear something, whatever it is."""
        quiet_s, now = self._told + self._keep_alive_s, time.monotonic()
        limit_s = math.inf if self._limit_s is None else self._began + self._limit_s
        return min(quiet_s, limit_s) - now

    async def _wait(self, alarm: Alarm) -> None:
        """Return with events, or with none once a client should hear that it is waited for."""
        if self._events:
            await asyncio.sleep(0)  # however fast they come, others have their turn, too
        else:
            self._woken.clear()
            alarm.start()
            await self._woken.wait()
        now = time.monotonic()
        if self._limit_s is not None and now - self._began >= self._limit_s:
            raise too_late(self._limit_s)
        if not self._events:
            self._told = now

    def _take(self) -> tuple[Piece, Finished | Failed | None]:
        """What all events add that are there, and the last one where the answer ends with it."""
        piece = Piece()
        while self._events and not self.transcript.stopped:
            event = self._events.popleft()
            if isinstance(event, NewToken):
                self._told = time.monotonic()
                self._last_token_s = self._told - self._began
                if self.first_token_s is None:
                    self.first_token_s = self._last_token_s
                piece.add(self.transcript.take(event))
            elif isinstance(event, Started):
                self.cached_tokens = event.cached_tokens
            elif isinstance(event, Prefilled):
                self._prefilled = event.done
            else:
                return piece, event
        return piece, None

    def _end(self, last: Finished | Failed) -> Piece:
        """What was held back until the end; raises ``Refusal`` for an end that is none."""
        if isinstance(last, Failed):
            _log_failure(last.error)
            raise Refusal.of(last.error)
        if last.reason == "cancelled":
            raise shutting_down()
        return self.transcript.end(last.reason)
