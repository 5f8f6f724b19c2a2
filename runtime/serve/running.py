"""Owns one request while it holds a place: what it feeds the model next, and what comes of it.

It runs no model and knows no other request.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ds4q.runtime.errors import EngineError, SamplingError
from ds4q.runtime.generate import room_after
from ds4q.runtime.sampling import Sampler
from ds4q.runtime.serve.job import (
    BatchEngine,
    Event,
    Failed,
    Finished,
    FinishReason,
    Job,
    Listener,
    NewToken,
    Prefilled,
    Sequenced,
    Started,
    Ticket,
)

F32 = npt.NDArray[np.float32]


class Running:
    """A job on its way through the model.

    Parameters
    ----------
    job, listener, ticket : see ``Scheduler.submit``
    engine : for its limits alone

    Attributes
    ----------
    state : its sequence; None before its turn and after its end
    prompt_tokens : length of the prompt
    started_at : when it got its place, on the clock of ``time.perf_counter``

    Raises
    ------
    SamplingError, TokenError, ContextError : as ``generate`` does
    """

    def __init__(self, job: Job, listener: Listener, ticket: Ticket, engine: BatchEngine) -> None:
        if job.max_tokens < 1:
            raise SamplingError("max_tokens", expected="at least 1", found=job.max_tokens)
        room = room_after(job.prompt_ids, engine.vocab_size, engine.max_context)
        self.ticket = ticket
        self.state: Sequenced | None = None
        self.started_at = 0.0
        self._job = job
        self._listener = listener
        self._sampler = Sampler(temperature=job.temperature, top_p=job.top_p, seed=job.seed)
        self._limit_tokens = min(job.max_tokens, room)
        self._ids = array("i", job.prompt_ids)  # the answer's follow; the last is not in the state
        self.prompt_tokens = len(self._ids)
        self._cuts: list[int] = []  # positions at which a snapshot is due, the next one last
        self._cached_tokens = 0
        self._submitted_at = time.perf_counter()
        self._first_at: float | None = None
        self._last_at: float | None = None

    @property
    def prompt(self) -> array[int]:
        """The ids of the prompt."""
        return self._ids[: self.prompt_tokens]

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self._ids) - self.prompt_tokens

    @property
    def held(self) -> array[int]:
        """The ids that its sequence holds."""
        return self._ids[: self.position]

    @property
    def position(self) -> int:
        """Tokens that its sequence holds."""
        return 0 if self.state is None else self.state.position

    @property
    def at_cut(self) -> bool:
        """Whether it stands where a later prompt may begin to differ."""
        return bool(self._cuts) and self._cuts[-1] == self.position

    def start(self, state: Sequenced, *, marked: bool) -> None:
        """Go on from ``state``, which holds a start of the prompt; ``marked``: stop at marks."""
        self.state = state
        self._cached_tokens = state.position
        ends = {self.prompt_tokens}
        if marked:
            ends |= {m for m in self._job.marks if state.position < m < self.prompt_tokens}
        self._cuts = sorted(ends, reverse=True)
        self.tell(Started(self._cached_tokens))

    def piece(self, most: int) -> Sequence[int]:
        """What to append to its sequence next: at most ``most`` ids, up to the next cut."""
        first = self.position
        if first >= self.prompt_tokens:
            return [self._ids[-1]]
        return self._ids[first : min(self._cuts[-1], first + most)].tolist()

    @property
    def single(self) -> bool:
        """Whether what it appends next is one token, as a token of an answer is.

        So is the last of a prompt where a mark stands before it: it needs no step of its own.
        """
        return self.state is not None and len(self.piece(2)) == 1

    def pass_cut(self) -> None:
        """A snapshot is taken, or not wanted."""
        self._cuts.pop()

    def take(self, logits: F32) -> FinishReason | None:
        """The step is through, ``logits`` [vocab] are those of its last token: why it ends, if so.

        Raises
        ------
        LogitsError : no token can be chosen from them
        """
        if self.position <= self.prompt_tokens:
            self.tell(Prefilled(self.position, self.prompt_tokens))
        if self.position < self.prompt_tokens:
            return None
        token = self._sampler(logits)
        self._last_at = time.perf_counter()
        self._first_at = self._first_at or self._last_at
        self._ids.append(token)
        self.tell(self._described(token, logits))
        if token in self._job.stop_ids and not self._job.ignore_stop:
            return "stop"
        return "length" if self.completion_tokens == self._limit_tokens else None

    def finish(self, reason: FinishReason) -> None:
        """Free its sequence and tell why it ended."""
        try:
            self._free()
        except Exception as error:
            self.tell(Failed(EngineError.of(error)))
            return
        first_s = decode_s = None
        if self._first_at is not None and self._last_at is not None:
            first_s, decode_s = self._first_at - self._submitted_at, self._last_at - self._first_at
        self.tell(
            Finished(
                reason=reason,
                prompt_tokens=self.prompt_tokens,
                completion_tokens=self.completion_tokens,
                cached_tokens=self._cached_tokens,
                first_token_s=first_s,
                decode_s=decode_s,
            )
        )

    def fail(self, error: Exception) -> None:
        """Free its sequence and tell what went wrong."""
        with suppress(Exception):  # what came first is what is told
            self._free()
        self.tell(Failed(EngineError.of(error)))

    def tell(self, event: Event) -> None:
        """Tell the listener; one that raises has gone away, as a client does."""
        try:
            self._listener(event)
        except Exception:
            self.ticket.cancel()

    def _free(self) -> None:
        state, self.state = self.state, None
        if state is not None:
            state.close()

    def _described(self, token: int, logits: F32) -> NewToken:
        if self._job.top_logprobs is None:
            return NewToken(token)
        shifted = logits.astype(np.float64) - float(logits.max())
        logs = shifted - np.log(np.exp(shifted).sum())
        best = _largest(logits, self._job.top_logprobs)
        return NewToken(token, float(logs[token]), tuple((int(i), float(logs[i])) for i in best))


def _largest(values: F32, count: int) -> npt.NDArray[np.intp]:
    """Places of the ``count`` largest of ``values`` [V], the largest first, the lower on ties."""
    if not count:
        return np.empty(0, np.intp)
    count = min(count, values.size)
    places = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return places[np.argsort(-values[places], kind="stable")][:count]
