"""Weights of errors, by themselves; whole rows are in ``test_encode.py``."""

from __future__ import annotations

import numpy as np

from ds4q.artifact.formats import hfp4g32
from ds4q.artifact.formats._search import weights_reference
from ds4q.quantize.exact import kernel
from tests.checks import same_bits
from tests.quantize.exact.sources import importance_of, mixed_codes


def test_weights_are_those_of_the_general_encoder() -> None:
    rng = np.random.default_rng(0)
    for rows, k in ((1, 32), (8, 96), (5, 2048)):
        codes = mixed_codes(rng, rows + 3, k)
        scales = rng.integers(60, 140, (rows + 3, k // 32), dtype=np.uint8)
        importance = importance_of(rng, k, gaps=True)
        found = np.full((kernel.TILE, k), 7, np.float32)  # as an earlier tile leaves it
        assert kernel.weigh(codes, scales, 3, rows, importance, found)
        values = hfp4g32.source_values(codes, scales)[3:]
        same_bits(found[:rows], weights_reference(values, importance), block_bytes=4)


def test_a_weight_that_is_not_finite_is_told() -> None:
    k = 64
    codes, tile = np.full((2, k // 2), 0x77, np.uint8), np.zeros((kernel.TILE, k), np.float32)
    scales = np.full((2, k // 32), 120, np.uint8)
    ones = np.ones(k, np.float32)
    assert kernel.weigh(codes, scales, 0, 2, ones, tile)
    large = ones.copy()
    large[40] = 3e38
    scales[1] = 135
    assert kernel.weigh(codes, scales, 0, 1, large, tile)
    assert not kernel.weigh(codes, scales, 0, 2, large, tile)
    scales[1] = 192  # the squares overflow; a weight of zero times infinity would be NaN
    assert not kernel.weigh(codes, scales, 0, 2, 0 * ones, tile) or not tile.any()
    assert not kernel.weigh(codes, scales, 0, 2, ones, tile)
