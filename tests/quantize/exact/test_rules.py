"""Candidates against the codecs: the rules of the general encoder, the values of the decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds4q.artifact.formats import MixRow, _rules, codec_for
from ds4q.artifact.formats._blocks import pack
from ds4q.artifact.formats._ue4m3 import UE4M3
from ds4q.artifact.formats._ue4m3 import nearest as general_nearest
from ds4q.artifact.numeric import E2M1, E8M0
from ds4q.artifact.types import (
    HFP4G32,
    ROCMFP2,
    ROCMFP2_MIX,
    ROCMFP3,
    ROCMFP3_MIX,
    ROCMFP4,
    ROCMFP4_FAST,
    ROCMFP6,
    ROCMFP8,
)
from ds4q.quantize.exact.rules import (
    OFFSET_BYTES,
    SCALE_BYTES,
    Books,
    affine_candidates,
    nearest,
    scheme_of,
)
from tests.checks import Array, same_bits
from tests.quantize.exact.sources import BOOKS, TARGETS, Target, name_of

SEARCHED = [target for target in TARGETS if target[1] != "affine"]
RULES: dict[Any, int] = {
    (ROCMFP4, None): _rules.FP4,
    (ROCMFP4_FAST, None): _rules.FP4,
    (ROCMFP6, "zero"): _rules.FP6_ZERO,
    (ROCMFP6, "neg32"): _rules.FP6_NEG32,
    (ROCMFP8, None): _rules.FP8,
    (ROCMFP3, None): _rules.FP3,
    (ROCMFP2, "dual"): _rules.DUAL,
    (ROCMFP2, "s40"): _rules.S40,
}


def decoded(target: Target, codes: Array, meta: int) -> Array:
    """Values of 32 codes under one scale byte, by the codec."""
    kind, coding = target
    groups = 1 if kind in (ROCMFP4_FAST, ROCMFP8) else 2
    unit = np.empty((1, kind.block_bytes), np.uint8)
    pack(codes[None], np.full((1, groups), meta, np.uint8), 8 * kind.block_bytes // 32, unit)
    values: Array = codec_for(kind.id, coding).decode_units(unit)[0]
    return values


@pytest.mark.parametrize("target", SEARCHED, ids=name_of)
def test_errors_are_those_of_the_decoded_candidates(
    target: Target,
) -> None:
    scheme = scheme_of(*target)
    assert scheme is not None
    for e in (0, 100, 118, 121, 127, 160):
        x = E2M1 * E8M0[e]
        with np.errstate(over="ignore"):
            codes, errors = scheme.candidates(x)
        assert codes.max() < 1 << scheme.bits
        for at in range(0, len(scheme.metas), 11):
            value = decoded(target, np.tile(codes[:, at], 2), int(scheme.metas[at]))
            for half in (value[:16], value[16:]):
                # An error of zero has no sign that counts.
                same_bits(errors[:, at] + np.float32(0), x - half + np.float32(0), block_bytes=4)


@pytest.mark.parametrize("target", list(RULES), ids=name_of)
def test_codes_are_those_of_the_general_encoder(
    target: Target,
) -> None:
    scheme = scheme_of(*target)
    assert scheme is not None
    grid = np.arange(-80, 81, dtype=np.float32) / 2  # on every threshold, and between them
    near = np.nextafter(grid, np.float32(np.inf)), np.nextafter(grid, np.float32(-np.inf))
    steps = np.concatenate([grid, *near, [-0.0, 126.5, 127.5, -127.5, -3e30, 3e30]])
    for scale in (1, UE4M3[0x21], UE4M3[0x7E]):
        x = steps.astype(np.float32) * np.float32(scale)
        codes = scheme.candidates(x)[0]
        for at, meta in enumerate(scheme.metas):
            inverse = np.float32(1) / UE4M3[meta]
            expected = _rules.codes_reference(RULES[target], x, inverse)
            same_bits(codes[:, at], expected, what=f"scale byte {meta:#x}")


def test_fixed_candidates_surround_the_scale_that_fits() -> None:
    levels = np.array([[-1, -0.5, 0.25, 0.5], [-0.25, 0, 0.125, 0.25]], np.float32)
    scheme = Books(2, levels)
    fixed = scheme.fixed(np.array([0.5, 2**-10, 300], np.float32), weighted=True)
    assert fixed is not None
    metas = [scheme.metas[kept].tolist() for kept in fixed]
    # 0.5 is byte 0x38 and 2.0 is 0x48; at the ends there are fewer neighbours.
    assert metas[0] == [*range(0x36, 0x3B), *range(0xC6, 0xCB)]
    assert metas[1] == [1, 2, 3, *range(0x82, 0x87)]
    assert metas[2] == [0x7C, 0x7D, 0x7E, 0xFC, 0xFD, 0xFE]
    assert scheme.zero == 2  # zero lies on no midpoint: -0.125 < 0 <= 0.375


def test_zero_on_a_midpoint_takes_the_lower_level() -> None:
    levels = np.array([[-1, -0.5, 0.5, 1], [-1, 0, 0.5, 1]], np.float32)
    assert Books(2, levels).zero == 1


def test_only_unweighted_int8_has_one_candidate() -> None:
    magnitudes = np.array([0, 127, 0.1], np.float32)
    for kind, coding in SEARCHED:
        scheme = scheme_of(kind, coding)
        assert scheme is not None
        if kind in BOOKS:
            continue
        assert scheme.fixed(magnitudes, weighted=True) is None
        fixed = scheme.fixed(magnitudes, weighted=False)
        if kind is ROCMFP8:
            assert fixed is not None
            assert [scheme.metas[kept].tolist() for kept in fixed[1:]] == [[0x40], [1]]
        else:
            assert fixed is None


def test_affine_candidates_decode_to_what_they_say() -> None:
    codec = codec_for(ROCMFP2.id, "affine")
    x = E2M1 * E8M0[120]
    for scales, offsets in ((SCALE_BYTES, OFFSET_BYTES[28:29]), (SCALE_BYTES[30:31], OFFSET_BYTES)):
        codes, errors = affine_candidates(x, scales, offsets)
        pairs = np.broadcast_arrays(scales, offsets)
        for at in range(0, codes.shape[1], 7):
            unit = np.empty((1, 10), np.uint8)
            both = np.array([[pair[at] for pair in pairs]], np.uint8)
            pack(np.tile(codes[:, at], 2)[None], both, 2, unit)
            same_bits(errors[:, at], x - codec.decode_units(unit)[0, :16], block_bytes=4)


def test_nearest_is_the_codecs() -> None:
    values = UE4M3[:0x7F]
    targets = np.concatenate([values, (values[1:] + values[:-1]) / 2, [-1, 225, 3e38, np.inf]])
    targets = np.concatenate([targets, np.nextafter(targets, np.inf)]).astype(np.float32)
    assert [nearest(t) for t in targets] == general_nearest(targets).tolist()


def test_what_has_no_scheme() -> None:
    assert scheme_of(ROCMFP2, "affine") is None
    assert scheme_of(HFP4G32, None) is None
    for kind in (ROCMFP2_MIX, ROCMFP3_MIX):
        assert scheme_of(kind, MixRow(0, bytes(32))) is None
        assert scheme_of(kind, BOOKS[kind]) is not None
