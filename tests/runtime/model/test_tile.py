"""The vector primitive: bit for bit a plain running sum, for any strides, writing only its tile."""

from __future__ import annotations

import numpy as np
import pytest

from ds4q.artifact.fastpath import jit
from ds4q.runtime.model.tile import LANES, ROWS, tile


def tile_reference(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """What ``tile`` computes, bit for bit, in numpy."""
    total = np.zeros((ROWS, LANES), dtype=np.float32)
    for i in range(a.shape[1]):
        total += a[:ROWS, i, None] * b[i, None, :LANES]
    out[:ROWS, :LANES] = total


@jit
def call_tile(a, b, out):
    tile(a, b, out)


@pytest.mark.parametrize("steps", [0, 1, 7, 130])
@pytest.mark.parametrize("flip", [False, True])
def test_tile_is_a_running_sum(steps: int, flip: bool) -> None:
    rng = np.random.default_rng(steps)
    a = rng.standard_normal((steps, 9) if flip else (9, steps), dtype=np.float32)
    a = a.T[2 : 2 + ROWS] if flip else a[2 : 2 + ROWS]
    b = rng.standard_normal((steps, 40), dtype=np.float32)[:, 5:30]
    found = np.full((6, 50), 7.0, dtype=np.float32)
    expected = found.copy()
    call_tile(a, b, found[1:5, 3:40])
    tile_reference(a, b, expected[1:5, 3:40])
    assert np.array_equal(found, expected)
    assert (found[0] == 7).all()
    assert (found[1:5, 3 + LANES :] == 7).all()
    exact = a.astype(np.float64) @ b[:, :LANES]
    assert found[1:5, 3 : 3 + LANES] == pytest.approx(exact, abs=1e-4)
