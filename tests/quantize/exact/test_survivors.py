"""No candidate that could win is left out, and hardly any that could not is kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.numeric import E2M1, E8M0
from ds4q.artifact.types import ROCMFP2, ROCMFP3
from ds4q.quantize.exact.rules import scheme_of
from ds4q.quantize.exact.survivors import survivors
from tests.checks import Array

magnitude = np.arange(16) % 8


def sums_of(terms: Array, codes: Array, weights: Array | None) -> Array:
    """float32 sums in index order, ``(groups, candidates)``, of groups of codes ``(groups, n)``."""
    total = np.zeros((len(codes), terms.shape[1]), np.float32)
    for i in range(codes.shape[1]):
        term = terms[codes[:, i]]
        with np.errstate(over="ignore"):
            total = total + (term if weights is None else weights[:, i, None] * term * term)
    return total


def check(terms: Array, m: int, size: int, weighted: bool, rng: np.random.Generator) -> Array:
    """The first candidate with the smallest sum survives, whatever the codes up to ``m``."""
    kept = survivors(np.abs(terms), magnitude <= m, magnitude == m, size, weighted)
    few = rng.integers(0, m + 1, (300, 2), dtype=np.uint8)
    codes = np.take_along_axis(few, rng.integers(0, 2, (300, size)), axis=1)
    codes[150:] = rng.integers(0, m + 1, (150, size))
    codes[np.arange(300), rng.integers(0, size, 300)] = m
    codes |= rng.choice(np.array([0, 8], np.uint8), codes.shape)
    weights = None
    if weighted:
        weights = 10 ** rng.uniform(-8, 4, codes.shape)
        weights = (weights * rng.integers(0, 2, codes.shape)).astype(np.float32)
    sums = sums_of(terms, codes, weights)
    finite = np.isfinite(sums.min(axis=1))
    winners = np.argmin(sums, axis=1)[finite]
    assert set(winners.tolist()) <= set(kept.tolist())
    return kept


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["ties", "close", "far", "tiny", "huge"]),
    st.integers(0, 7),
    st.sampled_from([16, 32]),
    st.booleans(),
)
def test_the_best_candidate_is_never_left_out(
    seed: int, kind: str, m: int, size: int, weighted: bool
) -> None:
    rng = np.random.default_rng(seed)
    shape = 16, int(rng.integers(1, 12))
    if kind == "ties":
        terms = rng.integers(0, 3, shape).astype(np.float32)
    elif kind == "close":  # neighbours differ by less than the sums are off
        terms = (1 + rng.integers(-3, 4, shape) * 2.0**-23).astype(np.float32)
    elif kind == "far":
        terms = (10 ** rng.uniform(-6, 6, shape)).astype(np.float32)
    elif kind == "tiny":
        terms = (rng.integers(0, 5, shape) * 2.0**-149).astype(np.float32)
    else:  # sums of 16 or 32 overflow for some candidates
        largest = 3e38 if weighted else np.inf  # an error is finite where its value is
        terms = rng.choice(np.array([1e36, 1e37, 2e38, largest], np.float32), shape)
    check(terms, m, size, weighted, rng)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("kind", "coding"), [(ROCMFP3, None), (ROCMFP2, "dual"), (ROCMFP2, "s40")])
def test_tables_of_real_types_keep_the_best(kind: object, coding: object, weighted: bool) -> None:
    scheme = scheme_of(kind, coding)  # type: ignore[arg-type]
    assert scheme is not None
    rng = np.random.default_rng(0)
    for e in (0, 117, 119, 121, 128, 141):
        errors = scheme.candidates(E2M1 * E8M0[e])[1]
        for m in range(1, 8):
            kept = check(errors if weighted else errors * errors, m, 16, weighted, rng)
            assert len(kept) <= (126 if weighted else 24)


def test_later_copies_and_worse_candidates_go() -> None:
    terms = np.repeat(np.array([[2, 1, 1, 3, 0.9999999]], np.float32), 16, axis=0)
    every = np.ones(16, np.bool_)
    # The last is smaller than the second, but by less than sums of 16 can be off.
    assert survivors(terms, every, every, 16, False).tolist() == [1, 4]
    # With weights only what comes before can be held against a candidate: all errors may vanish.
    assert survivors(terms, every, every, 16, True).tolist() == [0, 1, 4]


def test_a_code_that_is_needed_counts() -> None:
    """Clipping code 7 costs more than rounding fifteen others, as long as 7 is there."""
    terms = np.zeros((16, 2), np.float32)
    terms[1:7, 0], terms[7] = 1, (0, 15.1)
    codes = np.arange(16) <= 7
    assert survivors(terms, codes, np.arange(16) == 7, 16, False).tolist() == [0]
    assert survivors(terms, codes, np.arange(16) == 7, 32, False).tolist() == [0, 1]
    assert survivors(terms, codes, codes, 16, False).tolist() == [0, 1]


def test_candidates_that_overflow_together_leave_the_first() -> None:
    terms = np.full((16, 3), np.inf, np.float32)
    every = np.ones(16, np.bool_)
    assert survivors(terms, every, every, 16, False).tolist() == [0]
    terms[:, 2] = 1
    assert survivors(terms, every, every, 16, False).tolist() == [2]
    terms[:, 2] = 2e37  # 16 of them may overflow too, and the first would win the tie
    assert survivors(terms, every, every, 16, False).tolist() == [0, 2]
