"""Error sums: figures by hand, order, weights, empty sides, both paths."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ds4q.quantize import measure
from ds4q.quantize.measure import ErrorSums
from tests.checks import check_parity


def sums_of(x: list[list[float]], y: list[list[float]], w: list[float] | None = None) -> ErrorSums:
    sums = ErrorSums.zero()
    weights = None if w is None else np.array(w, np.float32)
    sums.add(np.array(x, np.float32), np.array(y, np.float32), weights)
    return sums


def test_figures_by_hand() -> None:
    sums = sums_of([[3, 4]], [[3, 2]])
    assert sums.squared_error == 4
    assert sums.squared_source == 25
    assert sums.nrmse == 2 / 5
    assert sums.cosine == pytest.approx((9 + 8) / math.sqrt(25 * 13))


def test_weights_count_columns() -> None:
    sums = sums_of([[3, 4], [1, 1]], [[0, 4], [1, 0]], [10, 0.5])
    assert sums.squared_error == 90 + 0.5
    assert sums.squared_source == 90 + 8 + 10 + 0.5


def test_no_weight_counts_for_nothing() -> None:
    assert sums_of([[3, 4]], [[9, 4]], [0, 1]).nrmse == 0


def test_weights_of_zero_throughout_are_as_none() -> None:
    assert sums_of([[3, 4]], [[3, 2]], [0, 0]).nrmse == 2 / 5


@pytest.mark.parametrize(
    ("x", "y", "nrmse", "cosine"),
    [
        ([[0.0, 0.0]], [[0.0, 0.0]], 0.0, 1.0),
        ([[0.0, 0.0]], [[1.0, 0.0]], math.inf, 0.0),
        ([[1.0, 0.0]], [[0.0, 0.0]], 1.0, 0.0),
        ([[1.0, 2.0]], [[-1.0, -2.0]], 2.0, -1.0),
    ],
)
def test_edges(x: list[list[float]], y: list[list[float]], nrmse: float, cosine: float) -> None:
    sums = sums_of(x, y)
    assert sums.nrmse == nrmse
    assert sums.cosine == pytest.approx(cosine)


def test_runs_of_rows_add_up_to_the_bit() -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((40, 96)).astype(np.float32) for _ in range(2))
    w = rng.random(96).astype(np.float32)
    whole, parts = ErrorSums.zero(), ErrorSums.zero()
    whole.add(x, y, w)
    for at in range(0, 40, 7):
        parts.add(x[at : at + 7], y[at : at + 7], w)
    assert whole.sums.tobytes() == parts.sums.tobytes()


def test_both_paths_agree_to_the_bit() -> None:
    rng = np.random.default_rng(2)
    x, y = (rng.standard_normal((9, 64)).astype(np.float32) for _ in range(2))
    w, sums = rng.random(64).astype(np.float32), rng.random(4)
    check_parity(measure._add, [x, y, w, sums])
