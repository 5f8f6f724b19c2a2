"""An engine that answers by a script: to drive the scheduler and the server without a model."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.runtime.errors import ContextError, SequenceError

BOS, EOS, USER, ASSISTANT = 256, 257, 258, 259  # of ds4-tiny's tokenizer
PATIENCE_S = 300.0  # kernels are compiled meanwhile, where a machine runs a test first


class ScriptedState:
    """A sequence: all ids that it was fed."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids = list(ids)
        self.closed = False

    @property
    def position(self) -> int:
        return len(self.ids)

    def close(self) -> None:
        self.closed = True


class ScriptedSnapshot:
    """The ids of a sequence at one time."""

    def __init__(self, ids: Sequence[int], bytes_per_token: int) -> None:
        self.ids = tuple(ids)
        self.nbytes = bytes_per_token * len(ids)

    @property
    def position(self) -> int:
        return len(self.ids)


class ScriptedEngine:
    """Answers a prompt with given ids, then with EOS for ever.

    Parameters
    ----------
    answers : ids to answer with, by the whole prompt's ids; may be added to at any time
    default : the answer to any other prompt that ends in Assistant and one more token (every chat
        prompt does): ids, or a function of the prompt's ids; a prompt of neither kind gets EOS

    Attributes
    ----------
    delay_s : seconds that every forward takes
    fails : asked for every sequence what error (or None) its step ends with, given all its ids
        with the new ones; replace it to have steps fail
    forwards : for each forward that was tried, its parts as (position before, ids)
    """

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]] | None = None,
        *,
        default: Sequence[int] | Callable[[list[int]], Sequence[int]] = (),
        vocab_size: int = 512,
        max_context: int = 4096,
        batch_tokens: int = 64,
        snapshot_bytes_per_token: int = 8,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.answers = {tuple(prompt): list(ids) for prompt, ids in (answers or {}).items()}
        self.default = default
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.batch_tokens = batch_tokens
        self.metadata = {} if metadata is None else metadata
        self.notes: list[str] = []
        self.load_s: dict[str, float] = {}
        self.delay_s = 0.0
        self.fails: Callable[[list[int]], BaseException | None] = lambda ids: None
        self.forwards: list[list[tuple[int, list[int]]]] = []
        self.closed = False
        self.damage: Exception | None = None  # of the file
        self._bytes_per_token = snapshot_bytes_per_token
        self._gate = threading.Condition()
        self._held = False
        self._arrived = 0
        self._passes = 0
        self._states: weakref.WeakSet[ScriptedState] = weakref.WeakSet()
        self._snapshots: weakref.WeakSet[ScriptedSnapshot] = weakref.WeakSet()

    # ---- what tests ask ------------------------------------------------------------------------

    @property
    def live_states(self) -> int:
        """Sequences that were made and not closed."""
        return sum(not state.closed for state in self._states)

    @property
    def live_snapshots(self) -> int:
        """Snapshots that somebody still holds."""
        if self._snapshots:
            gc.collect()  # an error that a test keeps holds on to the frames it came through
        return len(self._snapshots)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let every forward wait at its start; they go on when the block is left."""
        with self._gate:
            self._held, self._arrived, self._passes = True, 0, 0
        try:
            yield
        finally:
            with self._gate:
                self._held = False
                self._gate.notify_all()

    def await_held(self) -> None:
        """Return once a forward has come to wait (each call: for one more)."""
        with self._gate:
            if not self._gate.wait_for(lambda: self._arrived > 0, PATIENCE_S):
                raise TimeoutError("no forward was begun")
            self._arrived -= 1

    def step(self) -> None:
        """Let the forward that is held go on, and return when the next one is held."""
        with self._gate:
            self._passes += 1
            self._gate.notify_all()
        self.await_held()

    # ---- what the scheduler asks ---------------------------------------------------------------

    def new_state(self) -> ScriptedState:
        return self._kept(ScriptedState())

    def forward_many(
        self, parts: Sequence[tuple[ScriptedState, Sequence[int]]]
    ) -> npt.NDArray[np.float32]:
        self.forwards.append([(state.position, list(ids)) for state, ids in parts])
        self._pass_gate()
        if self.delay_s:
            time.sleep(self.delay_s)
        if not parts or sum(len(ids) for _, ids in parts) > self.batch_tokens:
            raise AssertionError(f"a batch of {self.forwards[-1]}")
        if len({id(state) for state, _ in parts}) != len(parts) or not all(i for _, i in parts):
            raise AssertionError("a sequence twice in one batch, or with nothing to do")
        for state, ids in parts:
            if state.closed:
                raise SequenceError("a closed sequence")
            if state.position + len(ids) > self.max_context:
                raise ContextError(found=state.position + len(ids))
            if (error := self.fails([*state.ids, *ids])) is not None:
                raise error
        for state, ids in parts:
            state.ids.extend(ids)
        return np.stack([self._logits(state.ids) for state, _ in parts])

    def snapshot(self, state: ScriptedState) -> ScriptedSnapshot:
        made = ScriptedSnapshot(state.ids, self._bytes_per_token)
        self._snapshots.add(made)
        return made

    def restore(self, snapshot: ScriptedSnapshot) -> ScriptedState:
        return self._kept(ScriptedState(snapshot.ids))

    def cache_counters(self) -> dict[str, Any] | None:
        return None

    def experts_view(self) -> None:
        return None

    def check_file(self) -> None:
        if self.damage is not None:
            raise self.damage

    def close(self) -> None:
        self.closed = True

    def _pass_gate(self) -> None:
        with self._gate:
            if not self._held:
                return
            self._arrived += 1
            self._gate.notify_all()
            if not self._gate.wait_for(lambda: self._passes or not self._held, PATIENCE_S):
                raise TimeoutError("a forward was held for too long")
            self._passes -= self._passes > 0

    # ---- the script ----------------------------------------------------------------------------

    def _kept(self, state: ScriptedState) -> ScriptedState:
        self._states.add(state)
        return state

    def _logits(self, ids: list[int]) -> npt.NDArray[np.float32]:
        """The script's next id stands out; the others fall with their number."""
        logits = np.linspace(0, -8, self.vocab_size, dtype=np.float32)
        logits[self._next(ids)] = 32
        return logits

    def _next(self, ids: list[int]) -> int:
        for length in sorted({len(prompt) for prompt in self.answers}, reverse=True):
            answer = self.answers.get(tuple(ids[:length]))
            if answer is not None:
                return self._going_on(answer, ids[length:])
        if ASSISTANT not in ids[:-1]:
            return EOS
        length = len(ids) - ids[-2::-1].index(ASSISTANT)
        prompt = ids[:length]
        answer = list(self.default(prompt) if callable(self.default) else self.default)
        return self._going_on(answer, ids[length:])

    def _going_on(self, answer: Sequence[int], said: Sequence[int]) -> int:
        if list(answer[: len(said)]) == list(said) and len(said) < len(answer):
            return answer[len(said)]
        return EOS
