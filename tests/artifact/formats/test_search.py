"""The search for a scale: all 126 bytes against both sides, ties, weights, overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.artifact.formats import _search
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
    codes_reference,
)
from ds4q.artifact.formats._search import search
from ds4q.artifact.formats._ue4m3 import UE4M3
from tests.artifact.formats.rocmfpx import ANY, NEAR, WEIGHTS, blocks_of
from tests.checks import Array, check_parity

RULES = [FP4, FP3, FP6_ZERO, FP6_NEG32, FP8, DUAL, S40, SIGN]
NONE = np.empty(0, dtype=np.float32)
F = np.float32


def outputs(values: Array, size: int = 16) -> tuple[Array, Array]:
    """Empty scale bytes and codes."""
    m, k = values.shape
    return np.zeros((m, k // size), np.uint8), np.zeros((m, k), np.uint8)


def scales_of(values: Array, rule: int, importance: Array = NONE, size: int = 16) -> list[Any]:
    scales, codes = outputs(values, size)
    search(values, importance, rule, scales, codes)
    found: list[Any] = scales.tolist()
    return found


def parity(values: Array, importance: Array, rule: int, size: int = 16) -> tuple[int, int]:
    result, _ = check_parity(search, [values, importance, rule, *outputs(values, size)])
    found: tuple[int, int] = result
    return found


def errors_of_all(x: Array, weights: Array, rule: int) -> Array:
    """The error of each byte 1..126, one float32 operation after the other."""
    scales = UE4M3[1:127]
    errors = np.zeros(126, dtype=np.float32)
    for value, weight in zip(x, weights, strict=True):
        d = value - LEVELS[rule][codes_reference(rule, value, F(1) / scales)] * scales
        errors = errors + (weight * d) * d
    assert errors.dtype == np.float32
    return errors


# ------------------------------------------------------------------ the best of all


@pytest.mark.parametrize("rule", [FP4, FP3, FP6_ZERO, FP6_NEG32, DUAL, S40])
@settings(max_examples=50)
@given(head=NEAR, power=st.integers(-9, 9))
def test_no_byte_is_better(rule: int, head: list[float], power: int) -> None:
    values = blocks_of(head) * F(2.0**power)
    for x, byte in zip(values.reshape(2, 16), scales_of(values, rule)[0], strict=True):
        if not x.any():
            assert byte == 0
            continue
        errors = errors_of_all(x, np.ones(16, F), rule)
        assert byte == int(np.argmin(errors)) + 1  # the first of equals is the smallest byte


@given(head=NEAR, importance=WEIGHTS)
def test_no_byte_is_better_when_weighed(head: list[float], importance: list[float]) -> None:
    values, weights = blocks_of(head), np.array(importance, dtype=np.float32)
    total = F(0)
    for value in values[0]:
        total = F(total + F(value * value))
    mean = F(total / F(32))
    each = np.array(
        [F(w * np.sqrt(F(mean + F(x * x)))) for x, w in zip(values[0], weights, strict=True)],
        dtype=np.float32,
    )
    for rule, size in ((FP4, 16), (FP8, 32)):
        found = scales_of(values, rule, weights, size)[0]
        for g, byte in enumerate(found):
            cut = slice(size * g, size * g + size)
            if values[0, cut].any() and each[cut].any():
                errors = errors_of_all(values[0, cut], each[cut], rule)
                assert byte == int(np.argmin(errors)) + 1


def test_the_smaller_of_equal_bytes() -> None:
    # One weight of 1: each power of two up to 1 is exact, and so is 1/3 + ... of other levels.
    values = np.zeros((1, 32), dtype=np.float32)
    values[0, 3] = values[0, 20] = 1
    errors = errors_of_all(values[0, :16], np.ones(16, F), FP4)
    exact = [byte + 1 for byte, error in enumerate(errors) if error == 0]
    assert len(exact) > 3
    assert scales_of(values, FP4) == [[exact[0]] * 2]


def test_the_row_s_mean_square_counts() -> None:
    # The same block within a quiet and within a loud row: only importance looks at the row.
    rng = np.random.default_rng(0)
    values = np.zeros((2, 1024), dtype=np.float32)
    values[:, :512] = rng.standard_normal(512)
    values[1, 512:] = 40
    importance = rng.random(1024).astype(np.float32) ** 4
    quiet, loud = np.array(scales_of(values, FP4, importance))[:, :32]
    assert (quiet != loud).any()
    quiet, loud = np.array(scales_of(values, FP4))[:, :32]
    assert (quiet == loud).all()


# ------------------------------------------------------------------ both sides


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40)
@given(head=ANY, importance=WEIGHTS, weighted=st.booleans())
def test_parity_of_any_floats(
    rule: int, head: list[float], importance: list[float], weighted: bool
) -> None:
    weights = np.array(importance, dtype=np.float32) if weighted else NONE
    parity(blocks_of(head), weights, rule, 32 if rule == FP8 else 16)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [16, 32])
def test_parity_of_rows(rule: int, size: int) -> None:
    rng = np.random.default_rng(rule)
    values = rng.standard_normal((40, 256)) * 10.0 ** rng.uniform(-5, 4, (40, 1))
    values = values.astype(np.float32)
    values[3], values[4, :40], values[5, ::3] = 0, 0, -0.0
    importance = rng.random(256).astype(np.float32)
    importance[64:96], importance[100] = 0, 1e20
    for weights in (NONE, importance):
        assert parity(values, weights, rule, size)[1] == -1


def test_parity_beyond_the_numpy_side_s_cache() -> None:
    rng = np.random.default_rng(2)
    values = rng.standard_normal((70, 1024)).astype(np.float32)  # 4480 groups
    assert values.size // 16 > _search.CACHED_GROUPS
    parity(values, NONE, FP3)


@pytest.mark.parametrize("rule", RULES)
def test_parity_where_weights_overflow(rule: int) -> None:
    # The row's mean square is infinite, and an exact weight's error infinity times 0.
    values = np.ones((2, 64), dtype=np.float32)
    values[1, 40] = 3e38
    parity(values, np.ones(64, dtype=np.float32), rule)


# ------------------------------------------------------------------ edges


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weighted", [False, True])
def test_overflow_is_told_by_the_group(rule: int, weighted: bool) -> None:
    values = np.ones((3, 64), dtype=np.float32)
    values[1, 33] = values[2, 0] = -3e38
    importance = np.ones(64, dtype=np.float32) if weighted else NONE
    lost, failed = parity(values, importance, rule)
    assert lost == 0
    if rule == FP8 and not weighted:
        assert failed == -1  # nothing is searched: the weight saturates
    else:
        # A weighted row loses all its groups, since the mean square of the row is infinite.
        assert failed == (4 if weighted else 6)


def test_largest_error_that_float32_holds() -> None:
    values = np.zeros((1, 32), dtype=np.float32)
    values[0, 0] = 1.8e19
    # The weight is so large that no level moves it in float32: all bytes are equal.
    assert scales_of(values, FP4)[0] == [1, 0]
    assert parity(values, NONE, FP4) == (0, -1)
    values[0, 0] = 1.9e19
    assert parity(values, NONE, FP4) == (0, 0)


def test_scale_of_fp8_may_become_nothing() -> None:
    values = np.zeros((1, 32), dtype=np.float32)
    values[0, 0] = 2.0**-149  # divided by 127: 0 in float32
    scales, codes = outputs(values, 32)
    search(values, NONE, FP8, scales, codes)
    assert not scales.any()
    assert not codes.any()
    parity(values, NONE, FP8, 32)


@pytest.mark.parametrize("rule", RULES)
def test_groups_without_weight(rule: int) -> None:
    values = np.ones((2, 64), dtype=np.float32)
    values[1, :16] = 0
    importance = np.ones(64, dtype=np.float32)
    importance[:32] = 0
    importance[40:64] = 1e-45  # times the root of a mean square near 1: not lost
    assert parity(values, importance, rule) == (3, -1)
    importance[:] = 0
    assert parity(values, importance, rule) == (7, -1)


def test_a_weight_that_underflows_is_none() -> None:
    values = np.full((1, 32), 1e-6, dtype=np.float32)
    importance = np.full(32, 1e-42, dtype=np.float32)
    assert parity(values, importance, FP4) == (2, -1)
    assert scales_of(values, FP4, importance) == scales_of(values, FP4)
