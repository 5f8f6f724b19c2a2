"""Owns what is asked of the scheduler, what it tells, and what it asks of a model. No scheduling.

A request comes in as token ids and goes out as events; text, HTTP and JSON are others' business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import Ds4qError


class Snapshot(Protocol):
    """What a sequence held at one position; never changes."""

    @property
    def position(self) -> int:
        """Tokens that it stands for."""

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""


class Sequenced(Protocol):
    """One sequence of a model."""

    @property
    def position(self) -> int:
        """Tokens that it holds."""

    def close(self) -> None:
        """Free what it holds."""


class BatchEngine(Protocol):
    """What the scheduler needs of a loaded model; only one thread calls it."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def max_context(self) -> int:
        """Most tokens of one sequence."""

    @property
    def batch_tokens(self) -> int:
        """Most tokens that go through the layers together."""

    def new_state(self) -> Any:
        """An empty sequence (``Sequenced``)."""

    def forward_many(self, parts: Sequence[tuple[Any, Sequence[int]]]) -> npt.NDArray[np.float32]:
        """Append each part's ids to its own sequence; the logits [N, vocab] of each part's last id.

        At most ``batch_tokens`` ids in all. The logits have the bits that a part alone gives. After
        an error no sequence has moved.
        """

    def snapshot(self, state: Any) -> Any:
        """A compact copy of ``state`` (``Snapshot``)."""

    def restore(self, snapshot: Any) -> Any:
        """A new sequence that goes on where ``snapshot`` was taken."""


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt to be continued.

    Attributes
    ----------
    prompt_ids : the whole prompt
    marks : numbers of leading prompt tokens after which a later prompt may part from this one
    max_tokens : at most so many new tokens, and never more than the context leaves
    temperature, top_p, seed : of the draws, see ``Sampler``
    stop_ids : tokens that end the answer; the last event of an answer before ``Finished`` is such a
        token, which has no text
    ignore_stop : go on after stop tokens, up to the limit
    top_logprobs : so many alternatives with each token; None: no log probabilities at all
    """

    prompt_ids: Sequence[int]
    marks: Sequence[int]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_ids: frozenset[int]
    ignore_stop: bool = False
    top_logprobs: int | None = None


FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt's turn has come; its first ``cached_tokens`` tokens need no computing."""

    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """So many of the prompt's tokens have gone through the model, cached ones included."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token of the answer, stop tokens included.

    ``logprob`` and ``top`` (id, log probability; the likeliest first, the lower id on ties) are the
    log softmax of the raw logits, whatever the temperature; None and () where nobody asked.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer has ended; nothing follows.

    Attributes
    ----------
    completion_tokens : number of ``NewToken`` events
    cached_tokens : prompt tokens that were not computed again
    first_token_s : seconds from ``submit`` to the first token; None without one
    decode_s : seconds from the first token to the last; None without one
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    first_token_s: float | None
    decode_s: float | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer cannot go on; nothing follows."""

    error: Ds4qError


Event = Started | Prefilled | NewToken | Finished | Failed
Listener = Callable[[Event], None]


class Ticket:
    """A job's, for whoever submitted it.

    Parameters
    ----------
    wake : called at the first ``cancel``, from the thread that cancels
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End the job at its next token or piece of its prompt, or where it waits.

        May be called from any thread and more than once; ``Finished("cancelled")`` follows unless
        the job ends by itself before.
        """
        if not self._cancelled.is_set():
            self._cancelled.set()
            self._wake()
