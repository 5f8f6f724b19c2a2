"""Owns which requests the model works on, and when: queue, batches, prefix reuse, ending.

It knows no text and no HTTP. Everything that the model does is done by its one thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds4q.runtime.errors import DrainingError, QueueFullError, ServeError
from ds4q.runtime.serve.job import BatchEngine, Event, FinishReason, Job, Ticket
from ds4q.runtime.serve.prefix import PrefixCache, PrefixStats
from ds4q.runtime.serve.running import Running

F32 = npt.NDArray[np.float32]
Piece = tuple[Running, Sequence[int]]
"""A request, and the ids that its sequence gets next."""

RATE_WINDOW_S = 5.0
SHARE_OF_LAST = 0.2  # that the last request has in the mean time of a request
SHORTEST_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """What a scheduler does now and has done so far.

    Attributes
    ----------
    running, waiting : requests that hold a place, and those in the queue
    prompt_tokens, cached_tokens : of the prompts whose turn has come; cached ones were not computed
    completion_tokens : of all answers
    tokens_per_s : completion tokens of the last seconds
    retry_after_s : estimate of when the queue as it stands has been worked off
    prefix : of the prefix cache
    """

    running: int
    waiting: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_per_s: float
    retry_after_s: float
    prefix: PrefixStats


class Scheduler:
    """Serves many jobs with one model, in steps that all of them share.

    A step has one token for every answer, and fills the engine's batch with tokens of the prompts
    whose answers have not begun, in the order in which they came. So a long prompt holds up the
    answers of others by one batch at a time.

    Parameters
    ----------
    engine : a loaded model; nobody else calls it as long as this is open
    queue : jobs that may wait beside those that run
    concurrent : jobs that run together
    prefix_cache_bytes : of the snapshots that later prompts may go on from; 0: none
    told : called when something was told, once for all listeners that a step concerns, and from the
        thread that runs the model

    Raises
    ------
    ServeError : a number that cannot be
    """

    def __init__(
        self,
        engine: BatchEngine,
        *,
        queue: int = 64,
        concurrent: int = 8,
        prefix_cache_bytes: int,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        if queue < 1:
            raise ServeError("length of the queue", expected="1 or more", found=queue)
        if not 1 <= concurrent <= engine.batch_tokens:
            raise ServeError(
                "requests at once", expected=f"1 to {engine.batch_tokens}", found=concurrent
            )
        if prefix_cache_bytes < 0:
            raise ServeError("prefix cache", expected="0 or more bytes", found=prefix_cache_bytes)
        self._engine = engine
        self._queue = queue
        self._concurrent = concurrent
        self._prefixes = PrefixCache(prefix_cache_bytes)
        self._told = told
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []  # in the order in which they came
        self._busy = False  # in a turn: what has left may not have been told yet
        self._draining = False
        self._closed = False
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0
        self._recent: deque[tuple[float, int]] = deque()  # when, and completion tokens before it
        self._mean_s: float | None = None
        self._thread = threading.Thread(target=self._serve, name="ds4q-scheduler", daemon=True)
        self._thread.start()

    # ---- from any thread -------------------------------------------------------------------------

    def submit(self, job: Job, listener: Callable[[Event], None]) -> Ticket:
        """Queue ``job``.

        Parameters
        ----------
        listener : called with each event, from the thread that runs the model: it must not block;
            where it raises, the job is cancelled

        Raises
        ------
        QueueFullError : too many wait; it tells when to try again
        DrainingError : the scheduler takes no jobs any more
        SamplingError, TokenError, ContextError : the job cannot be run
        """
        ticket = Ticket(self._wake)
        running = Running(job, listener, ticket, self._engine)
        with self._changed:
            if self._draining:
                raise DrainingError()
            taken = self._alive_waiting() + len(self._running)
            if taken >= self._queue + self._concurrent:
                raise QueueFullError(
                    expected=f"at most {self._queue} waiting requests",
                    retry_after_s=self._retry_after_s(),
                )
            self._waiting.append(running)
            self._changed.notify_all()
        return ticket

    def stats(self) -> SchedulerStats:
        """What it does now and has done so far."""
        with self._changed:
            return SchedulerStats(
                running=len(self._running),
                waiting=self._alive_waiting(),
                prompt_tokens=self._prompt_tokens,
                cached_tokens=self._cached_tokens,
                completion_tokens=self._completion_tokens,
                tokens_per_s=self._tokens_per_s(),
                retry_after_s=self._retry_after_s(),
                prefix=self._prefixes.stats(),
            )

    def drain(self, timeout_s: float) -> bool:
        """Take no new job, and wait for those that run and wait; cancel what is left after that.

        Returns whether all of them ended by themselves. What is cancelled has ended, too.
        """
        with self._changed:
            self._draining = True
            if self._changed.wait_for(self._idle, timeout_s):
                return True
            self._cancel_all()
            self._changed.wait_for(self._idle)
        return False

    def close(self) -> None:
        """Cancel what there is, wait until it has ended, and let go of all snapshots."""
        with self._changed:
            self._draining = self._closed = True
            self._cancel_all()
        self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _idle(self) -> bool:
        return not (self._waiting or self._running or self._busy)

    def _alive_waiting(self) -> int:
        return sum(not each.ticket.cancelled for each in self._waiting)

    def _cancel_all(self) -> None:
        for each in (*self._waiting, *self._running):
            each.ticket.cancel()
        self._changed.notify_all()

    def _retry_after_s(self) -> float:
        mean_s = self._mean_s
        if mean_s is None:  # none has ended yet: they take as long as the first one does at least
            now = time.perf_counter()
            mean_s = max((now - each.started_at for each in self._running), default=0.0)
        return max(SHORTEST_RETRY_S, mean_s * self._alive_waiting() / self._concurrent)

    def _tokens_per_s(self) -> float:
        self._forget()
        before = self._recent[0][1] if self._recent else self._completion_tokens
        return (self._completion_tokens - before) / RATE_WINDOW_S

    def _forget(self) -> None:
        oldest = time.perf_counter() - RATE_WINDOW_S
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()

    # ---- the thread that runs the model ----------------------------------------------------------

    def _serve(self) -> None:
        while self._await_work():
            try:
                self._end_cancelled()
                self._admit()
                answers = self._answers()
                room = self._engine.batch_tokens - len(answers)
                self._step([*answers, *self._prompts(room)])
            except Exception as error:  # of no request alone, and none may be left without an end
                for each in list(self._running):
                    self._fail(each, error)
            self._told()
        self._prefixes.clear()

    def _await_work(self) -> bool:
        """Whether there is something to do; False once it is closed and all has ended."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()  # whoever drains
            self._changed.wait_for(lambda: self._closed or not self._idle())
            self._busy = not self._idle()
            return self._busy

    def _end_cancelled(self) -> None:
        with self._changed:
            gone = [each for each in self._waiting if each.ticket.cancelled]
            for each in gone:
                self._waiting.remove(each)
        for each in gone:
            each.finish("cancelled")
        for each in [each for each in self._running if each.ticket.cancelled]:
            self._finish(each, "cancelled")

    def _admit(self) -> None:
        with self._changed:
            while self._waiting and len(self._running) < self._concurrent:
                each = self._waiting.popleft()
                each.started_at = time.perf_counter()
                self._running.append(each)

    def _answers(self) -> list[Piece]:
        """One token for each that takes one."""
        return [(each, each.piece(1)) for each in self._running if each.single]

    def _prompts(self, room: int) -> list[Piece]:
        """At most ``room`` tokens of prompts; one is looked up when its first token is due."""
        pieces: list[Piece] = []
        for each in list(self._running):
            if not room:
                break
            if each.ticket.cancelled or each.single:
                continue
            if each.state is None and not self._start(each):
                continue
            ids = each.piece(room)
            room -= len(ids)
            pieces.append((each, ids))
        return pieces

    def _start(self, each: Running) -> bool:
        """Give it a sequence, from the longest start of its prompt that is known."""
        try:
            known = self._prefixes.find(each.prompt)
            state = self._engine.new_state() if known is None else self._engine.restore(known)
        except Exception as error:
            self._fail(each, error)
            return False
        each.start(state, marked=self._prefixes.on)
        with self._changed:
            self._prompt_tokens += each.prompt_tokens
            self._cached_tokens += each.position
        return True

    def _step(self, pieces: Sequence[Piece]) -> None:
        """Run the pieces together; where that fails each by itself, so that one fails alone."""
        if not pieces:
            return
        try:
            logits = self._engine.forward_many([(each.state, ids) for each, ids in pieces])
        except Exception as error:
            if len(pieces) == 1:
                self._fail(pieces[0][0], error)
                return
            for piece in pieces:
                self._step([piece])
            return
        for (each, _), row in zip(pieces, logits, strict=True):
            self._take(each, row)

    def _take(self, each: Running, logits: F32) -> None:
        if each.at_cut:
            self._keep(each)
            each.pass_cut()
        before = each.completion_tokens
        try:
            reason = each.take(logits)
        except Exception as error:
            self._fail(each, error)
            return
        self._count(each.completion_tokens - before)
        if reason is not None:
            self._finish(each, reason)

    def _count(self, tokens: int) -> None:
        with self._changed:
            self._forget()  # whether anybody asks or not
            self._recent.append((time.perf_counter(), self._completion_tokens))
            self._completion_tokens += tokens

    def _keep(self, each: Running) -> None:
        """A snapshot of where it stands, for later prompts; for want of one no request fails."""
        if not self._prefixes.on or self._prefixes.touch(each.held):
            return
        try:
            snapshot = self._engine.snapshot(each.state)
        except Exception:
            self._prefixes.refuse()
            return
        self._prefixes.put(each.held, snapshot)

    def _finish(self, each: Running, reason: FinishReason) -> None:
        if each.completion_tokens:
            self._keep(each)
        self._leave(each)
        each.finish(reason)

    def _fail(self, each: Running, error: Exception) -> None:
        self._leave(each)
        each.fail(error)

    def _leave(self, each: Running) -> None:
        held_s = time.perf_counter() - each.started_at
        with self._changed:
            self._running.remove(each)
            if self._mean_s is None:
                self._mean_s = held_s
            self._mean_s += SHARE_OF_LAST * (held_s - self._mean_s)
