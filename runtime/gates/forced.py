"""Owns teacher forcing: what a model was fed, call by call, and the proof that it was the text.

Two models can be compared only where both were fed the same tokens at the same places. So every
call is recorded with its window, its position and the ids that went in; ``forced_logits`` matches
the records with the text by these keys and raises where they do not cover it exactly, the first
token of each window included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ds4q.runtime.errors import (
    EmptyComparisonError,
    ExtraRecordError,
    ForcedTokenError,
    FreeRunError,
    IncompleteArmError,
    LogitsError,
)

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

CALL_TOKENS = 256  # bounds the logits that are held at once; results do not depend on it


class State(Protocol):
    """A sequence of an engine."""

    position: int


class Engine(Protocol):
    """What teacher forcing needs of a loaded model."""

    def new_state(self) -> Any:
        """An empty sequence."""

    def forward(self, state: Any, ids: I64, logits: Literal["all"]) -> F32:
        """Append ``ids`` to ``state`` and return the logits [T, vocab] after each."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a model.

    Attributes
    ----------
    window, position : the key of its first token: number of the window, place in it
    fed : ids [T] that the model was given
    logits : f32 [T, vocab], row t after ``fed[t]``
    """

    window: int
    position: int
    fed: I64
    logits: F32


def scored_tokens(windows: Sequence[I64]) -> int:
    """Tokens that ``windows`` ask a model to predict: all but the first of each."""
    return sum(max(len(window) - 1, 0) for window in windows)


def forced_calls(engine: Engine, windows: Sequence[I64]) -> Iterator[Call]:
    """Feed the windows to a model, each into an empty sequence; its choices are never fed.

    The last token of a window is not fed: nothing follows that its logits could predict.
    """
    for number, window in enumerate(windows):
        state = engine.new_state()
        for start in range(0, len(window) - 1, CALL_TOKENS):
            fed = window[:-1][start : start + CALL_TOKENS]
            position = state.position
            yield Call(number, position, fed, engine.forward(state, fed, "all"))


def forced_logits(arm: str, windows: Sequence[I64], calls: Iterable[Call]) -> Iterator[F32]:
    """The logits of each window in turn, f32 [len - 1, vocab], once its records are proven.

    Parameters
    ----------
    arm : name of the model, for messages
    windows : the forced ids
    calls : records in the order of their windows

    Raises
    ------
    EmptyComparisonError : there is no window, or one that asks for no token
    IncompleteArmError, ExtraRecordError : records do not cover the windows, or more than that
    ForcedTokenError, FreeRunError : the model was fed other ids than the forced ones
    LogitsError : NaN or infinity
    """
    short = [number for number, window in enumerate(windows) if len(window) < 2]
    if short or not windows:
        raise EmptyComparisonError(found=f"window {short[0]}" if short else None)
    rest = iter(calls)
    call = next(rest, None)
    for number, window in enumerate(windows):
        records = _Window(arm, number, len(window) - 1)
        while call is not None and call.window == number:
            records.add(call)
            call = next(rest, None)
        yield records.logits_for(window[:-1])
    if call is not None:
        raise ExtraRecordError(found=f"{arm}: {_key(call.window, call.position)}")


class _Window:
    """The records of one window of one arm."""

    def __init__(self, arm: str, number: int, tokens: int) -> None:
        self._arm = arm
        self._number = number
        self._fed = np.zeros(tokens, np.int64)
        self._recorded = np.zeros(tokens, np.bool_)
        self._logits: F32 | None = None

    def add(self, call: Call) -> None:
        """Take over a call's records; each key must be a place of the window, and new."""
        end = call.position + len(call.fed)
        if call.position < 0 or end > len(self._fed):
            past = len(self._fed) if call.position >= 0 else call.position
            raise ExtraRecordError(found=f"{self._arm}: {_key(self._number, past)}")
        places = slice(call.position, end)
        if self._recorded[places].any():
            again = call.position + int(self._recorded[places].argmax())
            raise ExtraRecordError(found=f"{self._arm}: {_key(self._number, again)} a second time")
        if call.logits.shape[0] != len(call.fed):
            raise IncompleteArmError(
                "a call has not one row of logits for each token",
                expected=len(call.fed),
                found=f"{self._arm}: {call.logits.shape[0]}",
            )
        if not np.isfinite(call.logits).all():
            raise LogitsError(found=f"{self._arm}: {_key(self._number, call.position)} or later")
        if self._logits is None:
            self._logits = np.empty((len(self._fed), call.logits.shape[1]), np.float32)
        self._logits[places] = call.logits
        self._fed[places] = call.fed
        self._recorded[places] = True

    def logits_for(self, forced: I64) -> F32:
        """All rows, if the window is complete and was fed ``forced``."""
        missing = np.flatnonzero(~self._recorded)
        if missing.size or self._logits is None:
            raise IncompleteArmError(
                expected=_key(self._number, int(missing[0])), found=f"none in {self._arm}"
            )
        wrong = np.flatnonzero(self._fed != forced)
        if not wrong.size:
            return self._logits
        place = int(wrong[0])
        before = self._logits[place - 1] if place else None
        free = before is not None and before.argmax() == self._fed[place]
        kind = FreeRunError if free else ForcedTokenError
        raise kind(
            expected=f"{forced[place]} at {_key(self._number, place)}",
            found=f"{self._fed[place]} in {self._arm}",
        )


def _key(window: int, position: int) -> str:
    return f"window {window} position {position}"
