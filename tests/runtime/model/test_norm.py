"""RMSNorm on both paths, at widths that do and do not fill the lanes."""

from __future__ import annotations

import numpy as np
import pytest

from ds4q.runtime.model.norm import rms_norm


@pytest.mark.parametrize("width", [1, 31, 32, 33, 128, 1000])
def test_rms_norm(path: str, width: int) -> None:
    rng = np.random.default_rng(width)
    x = rng.standard_normal((3, width), dtype=np.float32)
    weight = rng.standard_normal(width, dtype=np.float32)
    before = x.copy()
    found = rms_norm(x, weight, 1e-6)
    exact = weight * (x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-6))
    assert found.dtype == np.float32
    assert np.abs(found - exact).max() < 2e-6
    assert np.array_equal(x, before)


def test_eps_counts(path: str) -> None:
    x = np.full((1, 64), 1e-3, dtype=np.float32)
    found = rms_norm(x, np.ones(64, dtype=np.float32), 1e-6)
    assert found[0] == pytest.approx(np.full(64, 0.5**0.5), abs=1e-6)
    zeros = rms_norm(np.zeros((1, 64), dtype=np.float32), np.ones(64, dtype=np.float32), 1e-6)
    assert not zeros.any()
