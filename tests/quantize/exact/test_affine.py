"""Affine blocks in the range of scales that tables serve, and beyond it."""

from __future__ import annotations

import numpy as np
import pytest

from ds4q.artifact.types import ROCMFP2
from ds4q.quantize.exact import encode, kernel
from tests.quantize.exact.sources import check_same, importance_of, mixed_codes


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS4Q_REFERENCE", raising=False)


def served(low: int, high: int) -> bool:
    """Whether the tables answer for scales from ``low`` to ``high``."""
    tables = encode.tables_of(ROCMFP2, "affine")
    assert tables is not None
    scales = np.array([[low, high]], np.uint8)
    out = np.empty((1, 20), np.uint8)
    codes = np.full((1, 32), 0x21, np.uint8)
    return tables.encode(codes, scales, None, out) != kernel.NOT_SERVED


@pytest.mark.parametrize("weights", ["none", "full", "gaps"])
def test_bytes_are_the_general_encoders(weights: str) -> None:
    rng = np.random.default_rng(0)
    for low, high in ((116, 124), (encode.AFFINE_E, encode.AFFINE_E_END)):
        codes = mixed_codes(rng, 21, 256)
        scales = rng.choice(np.array([low, 119, high - 1], np.uint8), (21, 8))
        importance = None
        if weights != "none":
            importance = importance_of(rng, 256, gaps=weights == "gaps")
            if weights == "gaps":
                importance[64:96] = 0  # a block of 32
        lost = check_same(codes, scales, (ROCMFP2, "affine"), importance)
        assert (lost > 0) == (weights == "gaps")
        assert served(low, high - 1)


def test_a_block_of_one_sign_needs_no_offset() -> None:
    rng = np.random.default_rng(1)
    for sign in (0x00, 0x88):
        codes = rng.integers(0, 256, (9, 64), dtype=np.uint8) & 0x77 | sign
        check_same(codes, np.full((9, 4), 119, np.uint8), (ROCMFP2, "affine"), None)


def test_only_weighted_values_choose_the_first_offset() -> None:
    """The most negative weight has no importance: the offset begins at the next one."""
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 4, (8, 64), dtype=np.uint8) * 0x11
    codes[:, ::8] = 0x0F  # -6 in an even column, 0 in an odd one
    importance = rng.random(128).astype(np.float32) + np.float32(0.1)
    importance[::16] = 0
    scales = rng.integers(116, 124, (8, 4), dtype=np.uint8)
    check_same(codes, scales, (ROCMFP2, "affine"), importance)


@pytest.mark.parametrize("e", [0, encode.AFFINE_E - 1, encode.AFFINE_E_END, 180])
def test_scales_far_from_a_models_take_the_general_way(e: int) -> None:
    assert not served(120, e)
    codes = mixed_codes(np.random.default_rng(e), 3, 128)
    check_same(codes, np.full((3, 4), e, np.uint8), (ROCMFP2, "affine"), None)
