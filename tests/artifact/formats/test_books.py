"""The search over two books: every candidate, ties, importance as it is, overflow, parity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.artifact.formats._books import midpoints_of, search_books
from ds4q.artifact.formats._ue4m3 import UE4M3, nearest
from tests.artifact.formats.rocmfpx import ANY, NEAR, WEIGHTS, blocks_of
from tests.checks import Array, check_parity

NONE = np.empty(0, dtype=np.float32)
FOUR = np.array([[-0.875, -0.25, 0.25, 0.875], [-1, -0.375, 0.25, 1]], dtype=np.float32)
EIGHT = np.array(
    [[-1, -0.6, -0.3, -0.1, 0.1, 0.3, 0.6, 1], [-1, -0.5, -0.25, -0.125, 0, 0.0625, 0.5, 0.75]],
    dtype=np.float32,
)


def parity(
    values: Array, levels: Array, importance: Array = NONE
) -> tuple[tuple[int, int], Array, Array]:
    m, k = values.shape
    outputs = np.zeros((m, k // 16), np.uint8), np.zeros((m, k), np.uint8)
    args = [values, importance, levels, midpoints_of(levels), *outputs]
    result, after = check_parity(search_books, args)
    return result, after[4], after[5]


def best_of_ten(x: Array, weights: Array, levels: Array) -> tuple[float, int, int, list[int]]:
    """(error, book, byte, codes) of the first best candidate, in float32 throughout."""
    found: list[tuple[float, int, int, list[int]]] = []
    for book in range(2):
        top = np.abs(levels[book]).max()
        centre = int(nearest((np.abs(x).max() / top)[None])[0])
        for byte in range(max(1, centre - 2), min(126, centre + 2) + 1):
            inverse = np.float32(1) / UE4M3[byte]
            middles = (levels[book, 1:] + levels[book, :-1]) / np.float32(2)
            codes = [int((value * inverse > middles).sum()) for value in x]
            error = np.float32(0)
            for value, weight, code in zip(x, weights, codes, strict=True):
                d = value - levels[book, code] * UE4M3[byte]
                error = error + weight * d * d
            found.append((float(error), book, byte, codes))
    return min(found, key=lambda candidate: candidate[:3])


@pytest.mark.parametrize("levels", [FOUR, EIGHT], ids=["106", "105"])
@settings(max_examples=25)
@given(head=NEAR, power=st.integers(-9, 6), importance=WEIGHTS)
def test_best_of_ten(levels: Array, head: list[float], power: int, importance: list[float]) -> None:
    values = blocks_of(head) * np.float32(2.0**power)
    weights = np.array(importance, dtype=np.float32)
    for given_weights in (NONE, weights):
        _, scales, codes = parity(values, levels, given_weights)
        for half in range(2):
            cut = slice(16 * half, 16 * half + 16)
            x, w = values[0, cut], weights[cut]
            if not x.any():
                continue
            w = w if given_weights.size and w.any() else np.ones(16, np.float32)
            _, book, byte, expected = best_of_ten(x, w, levels)
            assert scales[0, half] == byte | book << 7
            assert codes[0, cut].tolist() == expected


@pytest.mark.parametrize("levels", [FOUR, EIGHT], ids=["106", "105"])
@settings(max_examples=50)
@given(head=ANY, importance=WEIGHTS, weighted=st.booleans())
def test_parity_of_any_floats(
    levels: Array, head: list[float], importance: list[float], weighted: bool
) -> None:
    weights = np.array(importance, dtype=np.float32) if weighted else NONE
    parity(blocks_of(head), levels, weights)


@pytest.mark.parametrize("levels", [FOUR, EIGHT, FOUR * 1e30, EIGHT * 1e-30, FOUR * 2e38])
def test_parity_of_rows(levels: Array) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((50, 128)) * 10.0 ** rng.uniform(-5, 3, (50, 1))
    values = values.astype(np.float32)
    values[3], values[4, :40] = 0, -0.0
    importance = rng.random(128).astype(np.float32)
    importance[64:96] = 0
    parity(values, levels.astype(np.float32))
    assert parity(values, levels.astype(np.float32), importance)[0][0] == 49 * 2


def test_zeros_take_the_level_nearest_to_zero() -> None:
    zeros = np.array([[0.0, -0.0] * 16], dtype=np.float32)
    for levels, code in ((FOUR, 1), (EIGHT, 3), (EIGHT[::-1].copy(), 4), (FOUR + 2, 0)):
        result, scales, codes = parity(zeros, levels, np.zeros(32, dtype=np.float32))
        assert result == (0, -1)
        assert not scales.any()
        assert (codes == code).all()


def test_equal_books_take_the_lower() -> None:
    rng = np.random.default_rng(4)
    values = rng.standard_normal((20, 128)).astype(np.float32)
    _, scales, _ = parity(values, np.stack([FOUR[0], FOUR[0]]))
    assert (scales < 0x80).all()


def test_a_value_on_a_midpoint_takes_the_lower_level() -> None:
    levels = np.stack([[-1, 0, 0.5, 1], [-1, 0, 0.5, 1]]).astype(np.float32)
    values = np.ones((1, 32), dtype=np.float32)
    values[0, :4] = (1, 0.25, 0.75, -0.5)
    values[0, 16:20] = (1, 0.2500001, 0.7500001, -0.4999999)
    _, scales, codes = parity(values, levels, np.where(values[0] == 1, 1, 1e-6).astype(np.float32))
    assert scales.tolist() == [[0x40, 0x40]]
    assert codes[0, :4].tolist() == [3, 1, 2, 0]
    assert codes[0, 16:20].tolist() == [3, 2, 3, 1]


def test_importance_chooses_book_and_byte() -> None:
    # Book 0 has +-0.875 and +-0.25, book 1 has +-1 and others: each half fits one of them.
    values = np.zeros((1, 32), dtype=np.float32)
    values[0] = np.tile(np.array([0.875, 0.25, 1, -0.375], dtype=np.float32), 8)
    loud = np.tile(np.array([1, 1, 1e-9, 1e-9], dtype=np.float32), 8)
    assert parity(values, FOUR, loud)[1].tolist() == [[0x40, 0x40]]
    loud = np.tile(np.array([1e-9, 1e-9, 1, 1], dtype=np.float32), 8)
    assert parity(values, FOUR, loud)[1].tolist() == [[0xC0, 0xC0]]


def test_overflow() -> None:
    values = np.ones((2, 64), dtype=np.float32)
    values[1, 40] = 3e38
    assert parity(values, FOUR)[0] == (0, 6)
    values[:] = np.tile(np.array([100, 50, -37, 9], dtype=np.float32), (2, 16))
    values[0, :16] = 0
    assert parity(values, FOUR, np.full(64, 3e38, dtype=np.float32))[0] == (0, 1)
