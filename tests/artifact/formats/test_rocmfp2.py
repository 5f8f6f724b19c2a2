"""ROCmFP2: one block, four readings; golden and worked bytes; mirrored halves; error bounds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.errors import PayloadSizeError
from ds4q.artifact.formats import rocmfp2
from ds4q.artifact.formats._ue4m3 import UE4M3, UE4M3_LOW
from tests.artifact.formats import rocmfpx
from tests.artifact.formats.rocmfpx import GOLDEN, NEAR, blocks_of, codec_of
from tests.checks import Array, check_parity, check_refused, check_round_trip, same_bits

VARIANTS = ["dual", "affine", "s40", "sign"]
DUAL, AFFINE, S40, SIGN = (codec_of(107, variant) for variant in VARIANTS)
ALL = pytest.mark.parametrize("codec", [DUAL, AFFINE, S40, SIGN], ids=VARIANTS)
BLOCK = np.array([[0xE4] * 8 + [0x38, 0x40]], dtype=np.uint8)  # codes 0 1 2 3, scales 0.5 and 1


# ------------------------------------------------------------------ decoding


@pytest.mark.parametrize(
    ("codec", "half0", "half1"),
    [
        (DUAL, [-0.5, 0, 0.5, 1], [-1, 0, 1, 2]),
        (AFFINE, [-1, -0.5, 0, 0.5], [-1, -0.5, 0, 0.5]),
        (S40, [-2, -0.5, 0.5, 2], [-4, -1, 1, 4]),
        (SIGN, [-0.5, 0, 0.5, 1], [-1, 0, 1, 2]),
    ],
    ids=VARIANTS,
)
def test_one_block_four_readings(
    codec: rocmfpx.BlockCodec, half0: list[float], half1: list[float]
) -> None:
    expected = np.array([half0 * 4 + half1 * 4], dtype=np.float32)
    same_bits(codec.decode_units(BLOCK), expected)


def test_golden_discriminator() -> None:
    case: dict[str, Any] = json.loads((GOLDEN / "rocmfpx.json").read_text())[
        "type107_discriminator"
    ]
    units = np.frombuffer(bytes.fromhex(case["bytes"]), dtype=np.uint8).reshape(1, 10)
    for codec, key in ((DUAL, "luce_dual"), (S40, "s40_dual"), (AFFINE, "affine")):
        same_bits(codec.decode_units(units)[0], np.array(case[key], dtype=np.float32), what=key)


def test_mirrored_halves() -> None:
    units = BLOCK.copy()
    units[0, 8:] = (0x40 | 0x80, 0x40)
    values = SIGN.decode_units(units)[0]
    assert values.tolist() == [1, 0, -1, -2] * 4 + [-1, 0, 1, 2] * 4
    assert not np.signbit(values[1::4]).any()  # a zero level has no sign
    units[0, 8] = 0xFF
    values = SIGN.decode_units(units)[0, :4]
    assert np.signbit(values).tolist() == [False, False, True, True]
    assert not values.any()
    same_bits(DUAL.decode_units(units)[0, :4], np.array([-0.0, 0, 0, 0], dtype=np.float32))


@pytest.mark.parametrize("variant", ["dual", "s40", "sign"])
def test_every_scale_decodes(variant: str) -> None:
    units = np.repeat(BLOCK, 256, axis=0)
    units[:, 8:] = np.arange(256, dtype=np.uint8)[:, None]
    if variant == "sign":
        upper = np.arange(256)[:, None] > 127
        expected = np.where(upper, rocmfp2.MIRRORED, rocmfp2.LEVELS["dual"]) * UE4M3_LOW[:, None]
    else:
        expected = rocmfp2.LEVELS[variant] * UE4M3[:, None]
    found = codec_of(107, variant).decode_units(units)
    same_bits(found, np.tile(expected, 8).astype(np.float32), block_bytes=128)


def test_affine_decoding() -> None:
    pairs = np.stack(np.meshgrid(np.arange(256), np.arange(256), indexing="ij"), axis=-1)
    units = np.repeat(BLOCK, 65536, axis=0)
    units[:, 8:] = pairs.reshape(-1, 2)
    out = np.zeros((65536, 32), dtype=np.float32)
    _, (_, values) = check_parity(rocmfp2._decode_affine, [units, out], block_bytes=128)
    for code in range(4):
        product = np.float32(code) * UE4M3
        expected = product[:, None] - UE4M3[None, :]  # rounded to float32
        same_bits(values[:, code].reshape(256, 256), expected)


# ------------------------------------------------------------------ encoding


@pytest.mark.parametrize(
    ("codec", "key"),
    [
        (DUAL, "luce.q2_fp2.ref"),
        (DUAL, "luce.q2_fp2.imatrix"),
        (S40, "ciru_main.q2_fp2.ref"),
        (S40, "ciru_main.q2_fp2.imatrix"),
        (AFFINE, "affine_reimpl.q2_0_rocmfp2.ref"),
    ],
)
def test_golden(codec: rocmfpx.BlockCodec, key: str) -> None:
    rocmfpx.check_quantizer_case(codec, key)


def test_worked_block() -> None:
    rocmfpx.check_worked(DUAL, "d614d614d624d624 2a3f")
    rocmfpx.check_worked(S40, "e668e668e668e668 2136")
    rocmfpx.check_worked(AFFINE, "55555555d624d624 3e3f")


@ALL
def test_edges(codec: rocmfpx.BlockCodec) -> None:
    rocmfpx.check_edges(codec)
    rocmfpx.check_lost_weights(codec)
    rocmfpx.check_scale_bytes(codec)


@ALL
@pytest.mark.parametrize("k", [32, 64, 96, 160])
def test_rows_of_no_128_weights_are_refused(codec: rocmfpx.BlockCodec, k: int) -> None:
    values = np.ones((4, k), dtype=np.float32)
    payload = np.zeros(4 * k // 32 * 10, dtype=np.uint8)
    for use in (
        lambda: codec.encode_rows(values),
        lambda: codec.encode(values),
        lambda: codec.decode(payload, (4, k)),
        lambda: codec.validate(payload, (4, k)),
    ):
        check_refused(PayloadSizeError, use, says=["ROCmFP2", "a multiple of 128", str(k)])


def test_round_trip_of_what_it_holds() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 4, (4, 128))
    codes[:, ::16] = 3
    for variant, codec in (("dual", DUAL), ("s40", S40)):
        check_round_trip(codec, rocmfp2.LEVELS[variant][codes] * np.float32(0.375))
    # Both signs of ``sign``: one half mirrored, the next not.
    levels = np.where(
        np.arange(128) // 16 % 2, rocmfp2.LEVELS["dual"][codes], rocmfp2.MIRRORED[codes]
    )
    packed = check_round_trip(SIGN, levels.astype(np.float32))
    bits = packed.reshape(-1, 10)[:, 8:] >> 7
    assert bits.tolist() == [[1, 0]] * 16
    codes[:, ::32] = 0
    check_round_trip(AFFINE, codes.astype(np.float32) * np.float32(0.375) - np.float32(0.5))


@given(head=NEAR, power=st.integers(-9, 6))
def test_sign_keeps_the_better_half(head: list[float], power: int) -> None:
    values = blocks_of(head) * np.float32(2.0**power)
    dual, sign = DUAL.encode_units(values), SIGN.encode_units(values)
    other = DUAL.encode_units(-values)
    errors = []
    for units, source in ((dual, values), (other, -values)):
        d = source - DUAL.decode_units(units)
        errors.append(np.add.accumulate((d * d).reshape(2, 16), axis=1, dtype=np.float32)[:, -1])
    for half in range(2):
        mirrored = errors[1][half] < errors[0][half]  # a tie is not mirrored
        chosen = other if mirrored else dual
        assert sign[0, 8 + half] == chosen[0, 8 + half] | (0x80 if mirrored else 0)
        same_bits(sign[0, 4 * half : 4 * half + 4], chosen[0, 4 * half : 4 * half + 4])


def test_a_tie_is_not_mirrored() -> None:
    values = np.tile(np.array([1, -1, 0.3, -0.3], dtype=np.float32), 8)[None]
    assert (SIGN.encode_units(values)[0, 8:] < 0x80).all()


@given(head=NEAR, power=st.integers(-9, 6))
def test_error_bounds(head: list[float], power: int) -> None:
    values = blocks_of(head) * np.float32(2.0**power)

    def dual(place: Array) -> Array:
        return np.where((place >= -1.5) & (place <= 2.5), 0.5, np.nan)

    def s40(place: Array) -> Array:
        size = np.abs(place)
        return np.select([size == 0, size <= 5.5], [1.0, 1.5], np.nan)

    rocmfpx.check_error_bounds(DUAL, values, dual)
    rocmfpx.check_error_bounds(SIGN, values, dual)
    rocmfpx.check_error_bounds(S40, values, s40)


@given(head=NEAR, power=st.integers(-9, 6))
def test_error_bounds_of_affine(head: list[float], power: int) -> None:
    values = blocks_of(head) * np.float32(2.0**power)
    units = AFFINE.encode_units(values)
    scale, offset = (float(v) for v in UE4M3[units[0, 8:]])
    error = np.abs(AFFINE.decode_units(units).astype(np.float64) - values)
    inside = (values >= -offset - scale / 2) & (values <= 3.5 * scale - offset)
    # (x + o) / s + 0.5 is rounded three times, and the value once.
    slack = 4e-7 * (np.abs(values) + offset + 3 * scale)
    assert (error <= scale / 2 + slack)[inside].all()
