"""Teacher forcing: what goes into the model, and that no comparison passes on anything else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.runtime.errors import (
    EmptyComparisonError,
    ExtraRecordError,
    ForcedTokenError,
    FreeRunError,
    GateError,
    IncompleteArmError,
    LogitsError,
)
from ds4q.runtime.gates import forced
from ds4q.runtime.gates.forced import F32, I64, Call, forced_calls, forced_logits, scored_tokens
from tests.checks import check_refused, same_bits

VOCAB = 11
TABLE = np.random.default_rng(7).normal(size=(50, VOCAB, VOCAB)).astype(np.float32)
WINDOWS = [np.array(ids) for ids in ([0, 5, 6, 7, 1, 2], [0, 3], [0, 9, 9, 4])]


@dataclass
class ToyState:
    position: int = 0


class Toy:
    """Logits depend on the place and the token alone; every call is noted."""

    def __init__(self) -> None:
        self.fed: list[tuple[int, list[int]]] = []

    def new_state(self) -> ToyState:
        return ToyState()

    def forward(self, state: ToyState, ids: I64, logits: str) -> F32:
        assert logits == "all"
        self.fed.append((state.position, ids.tolist()))
        places = np.arange(state.position, state.position + len(ids))
        state.position += len(ids)
        return TABLE[places, ids]


def proven(calls: Iterable[Call], windows: Sequence[I64] = WINDOWS) -> list[F32]:
    return list(forced_logits("arm", windows, calls))


def one_by_one() -> list[Call]:
    """A call for each token, so that single records can be lost, doubled or bent."""
    return [
        Call(call.window, call.position + t, call.fed[t : t + 1], call.logits[t : t + 1])
        for call in forced_calls(Toy(), WINDOWS)
        for t in range(len(call.fed))
    ]


def refused(kind: type[GateError | LogitsError], calls: Iterable[Call], *says: str) -> None:
    check_refused(kind, lambda: proven(calls), says=says)


# ---------------------------------------------------------------- what goes in


def test_every_window_starts_anew_and_is_fed_all_but_its_last_token() -> None:
    toy = Toy()
    calls = list(forced_calls(toy, WINDOWS))
    assert toy.fed == [(0, [0, 5, 6, 7, 1]), (0, [0]), (0, [0, 9, 9])]
    assert [(call.window, call.position, call.fed.tolist()) for call in calls] == [
        (0, 0, [0, 5, 6, 7, 1]),
        (1, 0, [0]),
        (2, 0, [0, 9, 9]),
    ]
    assert scored_tokens(WINDOWS) == 9


def test_long_windows_go_in_by_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = proven(forced_calls(Toy(), WINDOWS))
    monkeypatch.setattr(forced, "CALL_TOKENS", 2)
    toy = Toy()
    pieces = proven(forced_calls(toy, WINDOWS))
    assert toy.fed == [(0, [0, 5]), (2, [6, 7]), (4, [1]), (0, [0]), (0, [0, 9]), (2, [9])]
    for found, expected in zip(pieces, whole, strict=True):
        same_bits(found, expected)


# ---------------------------------------------------------------- what passes


@given(cuts=st.sets(st.integers(1, 4)), order=st.permutations(range(5)))
def test_records_pair_by_key_however_they_were_cut_and_ordered(
    cuts: set[int], order: list[int]
) -> None:
    (first, *others) = forced_calls(Toy(), WINDOWS)
    bounds = list(itertools.pairwise([0, *sorted(cuts), 5]))
    pieces = [Call(0, a, first.fed[a:b], first.logits[a:b]) for a, b in bounds]
    pieces = [pieces[place] for place in order if place < len(pieces)]
    same_bits(proven([*pieces, *others])[0], first.logits)


def test_a_legal_run_is_proven() -> None:
    logits = proven(one_by_one())
    assert [rows.shape for rows in logits] == [(5, VOCAB), (1, VOCAB), (3, VOCAB)]
    same_bits(logits[2], TABLE[[0, 1, 2], [0, 9, 9]])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("windows", [[], [np.array([0])], [WINDOWS[0], np.array([], int)]])
def test_an_empty_comparison_is_refused(windows: list[I64]) -> None:
    check_refused(
        EmptyComparisonError,
        lambda: proven(forced_calls(Toy(), windows), windows),
        says=["nothing to compare"],
    )


def test_no_records_at_all_are_refused() -> None:
    refused(IncompleteArmError, [], "expected window 0 position 0, found none in arm")


@pytest.mark.parametrize("lost", range(9))
def test_an_incomplete_arm_is_refused(lost: int) -> None:
    calls = one_by_one()
    gone = calls.pop(lost)
    refused(IncompleteArmError, calls, f"window {gone.window} position {gone.position}")


def test_a_call_without_its_rows_is_refused() -> None:
    calls = one_by_one()
    calls[3] = replace(calls[3], logits=calls[3].logits[:0])
    refused(IncompleteArmError, calls, "one row of logits for each token")


@pytest.mark.parametrize("key", [(0, 5), (0, -1), (0, 2), (2, 3), (3, 0)])
def test_a_longer_arm_is_refused(key: tuple[int, int]) -> None:
    window, position = key
    calls = one_by_one()
    calls.append(replace(calls[0], window=window, position=position))
    calls.sort(key=lambda call: call.window)
    refused(ExtraRecordError, calls, f"window {window} position {position}")


def test_the_forced_list_shifted_by_one_is_refused() -> None:
    for step in (1, -1):
        shifted = [np.roll(window, step) for window in WINDOWS]
        with pytest.raises(ForcedTokenError):
            proven(forced_calls(Toy(), shifted))


def test_a_list_that_starts_a_token_late_is_refused() -> None:
    """The first token free, the second forced by the list's first: one text, other places."""
    late = [np.concatenate(([3], window[:-1])) for window in WINDOWS]
    refused(ForcedTokenError, forced_calls(Toy(), late), "expected 0 at window 0 position 0")


@pytest.mark.parametrize("place", range(9))
def test_a_single_other_token_is_refused(place: int) -> None:
    calls = one_by_one()
    call = calls[place]
    before = TABLE[call.position - 1, WINDOWS[call.window][call.position - 1]].argmax()
    other = next(i for i in range(VOCAB) if i not in (call.fed[0], before))
    calls[place] = replace(call, fed=np.array([other]))
    refused(
        ForcedTokenError,
        calls,
        f"expected {call.fed[0]} at window {call.window} position {call.position}",
        f"found {other} in arm",
    )


def test_an_arm_that_ran_free_is_refused() -> None:
    """From the second token on it is fed what it chose itself."""
    toy, calls = Toy(), []
    for number, window in enumerate(WINDOWS):
        state, token = toy.new_state(), window[0]
        for position in range(len(window) - 1):
            fed = np.array([token])
            logits = toy.forward(state, fed, "all")
            calls.append(Call(number, position, fed, logits))
            token = logits[0].argmax()
    refused(FreeRunError, calls, "ran free", "expected 5 at window 0 position 1")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    calls = one_by_one()
    logits = calls[7].logits.copy()
    logits[0, 3] = value
    calls[7] = replace(calls[7], logits=logits)
    refused(LogitsError, calls, "not finite", "window 2 position 1")
