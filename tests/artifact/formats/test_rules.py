"""Rounding rules: nearest level, ties, and that both sides of a rule agree for every weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.formats import _rules
from ds4q.artifact.formats._rules import (
    DUAL,
    FP3,
    FP4,
    FP6_NEG32,
    FP6_ZERO,
    FP8,
    LEVELS,
    S40,
    SIGN,
    code_of,
    codes_reference,
    dual_level,
    fp3_level,
    fp4_level,
    s40_level,
    whole_level,
)
from tests.artifact.formats.rocmfpx import FINITE
from tests.checks import Array

RULES = [FP4, FP3, FP6_ZERO, FP6_NEG32, FP8, DUAL, S40]
ONE = np.float32(1)
# Codes that are never written: a second zero, and -128.
REDUNDANT = {FP4: {8}, FP3: {4}, FP6_ZERO: {32}, FP8: {128}}


def codes(rule: int, *q: float) -> list[int]:
    found: list[int] = codes_reference(rule, np.array(q, dtype=np.float32), ONE).tolist()
    return found


def compiled(rule: int, q: Any) -> int:
    return int(code_of(rule, np.float32(q), ONE))


@pytest.mark.parametrize("rule", RULES)
def test_a_level_has_its_code_and_redundant_codes_are_never_written(rule: int) -> None:
    for side in (lambda q: codes(rule, q)[0], lambda q: compiled(rule, q)):
        written = {side(float(level)) for level in LEVELS[rule]}
        assert written == set(range(len(LEVELS[rule]))) - REDUNDANT.get(rule, set())
        assert all(side(float(LEVELS[rule][code])) == code for code in written)


@pytest.mark.parametrize(
    ("rule", "ties"),
    [
        (FP4, {0.5: 0, 1.5: 1, 2.5: 2, 3.5: 3, 5: 4, 7: 6, 9: 8, -0.5: 0, -5: -4, -9: -8}),
        (FP3, {0.5: 0, 1.5: 1, 3: 2, -0.5: 0, -1.5: -1, -3: -2}),
        (FP6_ZERO, {0.5: 1, -0.5: -1, 30.5: 31, -30.5: -31, 31.5: 31, -31.5: -31, -40: -31}),
        (FP6_NEG32, {0.5: 1, -0.5: -1, 31.5: 31, -31.5: -32, -31.4: -31, -40: -32, 40: 31}),
        (FP8, {0.5: 1, -0.5: -1, 126.5: 127, 127.5: 127, -127.5: -127, -200: -127}),
        (DUAL, {-0.5: -1, 0.5: 0, 1.5: 1, -9: -1, 9: 2}),
        (S40, {2.5: 1, -2.5: -1, 9: 4, -9: -4}),
    ],
)
def test_ties_and_ends(rule: int, ties: dict[float, float]) -> None:
    for q, level in ties.items():
        assert LEVELS[rule][codes(rule, q)[0]] == level, q
        assert LEVELS[rule][compiled(rule, q)] == level, q


def test_just_below_half_is_zero() -> None:
    # Adding one half before truncating would give one.
    below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    for rule in (FP6_ZERO, FP6_NEG32, FP8):
        assert codes(rule, below, -below) == [0, 0]
        assert (compiled(rule, below), compiled(rule, -below)) == (0, 0)


def test_zeros() -> None:
    # ``s40`` has no zero: the sign bit decides.
    for rule in RULES:
        expected = {S40: [2, 1], DUAL: [1, 1]}.get(rule, [0, 0])
        assert codes(rule, 0.0, -0.0) == expected
        assert [compiled(rule, q) for q in (0.0, -0.0)] == expected


def test_code_32_is_zero_or_minus_32() -> None:
    assert LEVELS[FP6_ZERO][32] == 0
    assert LEVELS[FP6_NEG32][32] == -32
    assert codes(FP6_NEG32, -32, -31) == [32, 63]


@pytest.mark.parametrize("rule", [FP4, FP3, FP6_ZERO, FP6_NEG32, DUAL])
@given(q=st.floats(-300, 300, width=32))
def test_a_level_next_to_the_weight_is_chosen(rule: int, q: float) -> None:
    chosen = float(LEVELS[rule][codes(rule, q)[0]])
    levels = np.unique(LEVELS[rule]).astype(np.float64)
    nearest = float(np.abs(levels - q).min())
    # FP4's threshold between 8 and 10 is 9, between 4 and 6 it is 5: all are in the middle.
    assert abs(chosen - q) == nearest


@pytest.mark.parametrize("rule", RULES)
@given(x=FINITE, inverse=st.sampled_from([2.0**-8, 1 / 224, 1.0, 3.3, 1024.0]))
def test_both_sides_agree(rule: int, x: float, inverse: float) -> None:
    with np.errstate(over="ignore"):
        weights = np.array([x], dtype=np.float32)
        expected = int(codes_reference(rule, weights, np.float32(inverse))[0])
    assert code_of(rule, np.float32(x), np.float32(inverse)) == expected


def level_by_lane(rule: int, q: Any) -> Any:
    """What the search's lanes compute."""
    if rule in (FP6_ZERO, FP6_NEG32, FP8):
        return whole_level(q, _rules.LOWEST[rule], _rules.TOPS[rule])
    return {FP4: fp4_level, FP3: fp3_level, DUAL: dual_level, S40: s40_level}[rule](q)


@pytest.mark.parametrize("rule", RULES)
@given(q=st.floats(-300, 300, width=32))
def test_lanes_know_the_same_levels(rule: int, q: float) -> None:
    value = np.float32(q)
    signed = rule in (FP6_NEG32, DUAL)
    expected: Array = LEVELS[rule][codes(rule, q)]
    found = level_by_lane(rule, value if signed else abs(value))
    assert found == (expected[0] if signed else abs(expected[0]))


def test_tables_have_a_row_for_each_rule() -> None:
    assert list(LEVELS) == [*RULES, SIGN]
    for rule, levels in LEVELS.items():
        assert _rules.TOPS[rule] == levels.max()
        assert levels[_rules.ZERO_CODES[rule]] == (0 if rule != S40 else -4)
