"""The affine search: scale, offset, scale again; both sides, weights, zeros, overflow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.artifact.formats._affine import search_affine
from ds4q.artifact.formats._search import weights_reference
from ds4q.artifact.formats._ue4m3 import UE4M3, nearest
from tests.artifact.formats.rocmfpx import ANY, NEAR, WEIGHTS, blocks_of
from tests.checks import Array, check_parity

NONE = np.empty(0, dtype=np.float32)
HALF = np.float32(0.5)


def outputs(values: Array) -> tuple[Array, Array]:
    """Empty pairs of scale and offset, and codes."""
    m, k = values.shape
    return np.zeros((m, k // 16), np.uint8), np.zeros((m, k), np.uint8)


def parity(values: Array, importance: Array = NONE) -> tuple[tuple[int, int], Array, Array]:
    result, args = check_parity(search_affine, [values, importance, *outputs(values)])
    return result, args[2], args[3]


def error(x: Array, weights: Array, scale: int, offset: int) -> float:
    """The error of one pair, one float32 operation after the other."""
    s, o = UE4M3[scale], UE4M3[offset]
    total = np.float32(0)
    for value, weight in zip(x, weights, strict=True):
        code = min(max(np.floor((value + o) / s + HALF), np.float32(0)), np.float32(3))
        d = value - (code * s - o)
        total = total + weight * d * d
    return float(total)


def expected_pair(x: Array, weights: Array) -> tuple[int, int]:
    """The three scans in plain words; ties go to the smaller byte."""
    offset = int(nearest(max(-x[weights > 0].min(), np.float32(0))[None])[0])
    scale = min(range(1, 127), key=lambda byte: error(x, weights, byte, offset))
    offset = min(range(127), key=lambda byte: error(x, weights, scale, byte))
    return min(range(1, 127), key=lambda byte: error(x, weights, byte, offset)), offset


@settings(max_examples=4)
@given(head=NEAR, power=st.integers(-6, 6), importance=WEIGHTS)
def test_the_three_scans(head: list[float], power: int, importance: list[float]) -> None:
    values = blocks_of(head) * np.float32(2.0**power)
    if not values.any():
        return
    _, pairs, _ = parity(values)
    assert tuple(pairs[0]) == expected_pair(values[0], np.ones(32, np.float32))
    weights = np.array(importance, dtype=np.float32)
    each = weights_reference(values, weights)[0]
    if each.any():
        _, pairs, _ = parity(values, weights)
        assert tuple(pairs[0]) == expected_pair(values[0], each)


@settings(max_examples=30)
@given(head=ANY, importance=WEIGHTS, weighted=st.booleans())
def test_parity_of_any_floats(head: list[float], importance: list[float], weighted: bool) -> None:
    parity(blocks_of(head), np.array(importance, dtype=np.float32) if weighted else NONE)


@pytest.mark.parametrize("centre", [0.0, 3.0, -3.0])
def test_parity_of_rows(centre: float) -> None:
    rng = np.random.default_rng(3)
    values = (rng.standard_normal((30, 128)) + centre) * 10.0 ** rng.uniform(-5, 3, (30, 1))
    values = values.astype(np.float32)
    values[3], values[4, :40] = 0, -0.0
    importance = rng.random(128).astype(np.float32)
    importance[64:96], importance[2::3] = 0, 0
    assert parity(values)[0] == (0, -1)
    assert parity(values, importance)[0] == (29, -1)


def test_zeros_are_zero_bytes() -> None:
    result, pairs, codes = parity(np.array([[0.0, -0.0] * 16] * 2, dtype=np.float32))
    assert result == (0, -1)
    assert not pairs.any()
    assert not codes.any()


def test_range_ignores_what_has_no_weight() -> None:
    values = np.full((1, 32), 0.5, dtype=np.float32)
    values[0, 7] = -100
    importance = np.ones(32, dtype=np.float32)
    _, pairs, _ = parity(values)
    assert pairs[0, 1] > 0
    importance[7] = 0
    _, pairs, codes = parity(values, importance)
    assert pairs[0, 1] == 0
    decoded = codes[0] * UE4M3[pairs[0, 0]] - UE4M3[pairs[0, 1]]
    assert (np.delete(decoded, 7) == 0.5).all()


def test_overflow() -> None:
    values = np.ones((2, 64), dtype=np.float32)
    values[1, 40] = 3e38
    assert parity(values)[0] == (0, 3)
    values[1, 40] = -3e38
    values[0, 2] = 2e19
    assert parity(values)[0] == (0, 0)
