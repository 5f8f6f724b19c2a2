"""Number codes against their definition, computed anew in float64 for every code there is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ds4q.artifact.numeric import (
    E2M1,
    E4M3,
    E8M0,
    bf16_to_f32,
    unpack_nibbles,
)
from tests.checks import same_bits


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)


def e2m1(code: int) -> float:
    """OCP MX 1.0, 5.3.3: sign, two exponent bits (bias 1), one mantissa bit."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return math.copysign(magnitude, -1 if code & 8 else 1)


def e4m3(code: int) -> float:
    """OCP FP8 1.0: sign, four exponent bits (bias 7), three mantissa bits; all ones is NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return math.copysign(magnitude, -1 if code & 128 else 1)


@pytest.mark.parametrize("code", range(16))
def test_e2m1(code: int) -> None:
    assert E2M1[code] == e2m1(code)
    assert np.signbit(E2M1[code]) == (code >= 8)


def test_e2m1_values() -> None:
    assert E2M1.dtype == np.float32
    assert E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_e8m0_is_a_power_of_two_for_every_byte() -> None:
    assert E8M0.dtype == np.float32
    expected = np.array([2.0 ** (byte - 127) for byte in range(255)]).astype(np.float32)
    same_bits(E8M0[:255], expected)
    assert np.isnan(E8M0[255])


def test_e8m0_ends() -> None:
    assert [hex(bits(E8M0)[byte]) for byte in (0, 1, 127, 254, 255)] == [
        "0x400000",
        "0x800000",
        "0x3f800000",
        "0x7f000000",
        "0x7fc00000",
    ]


def test_e4m3_every_code() -> None:
    assert E4M3.dtype == np.float32
    expected = np.array([e4m3(code) for code in range(256)])
    finite = np.isfinite(expected)
    assert np.flatnonzero(~finite).tolist() == [0x7F, 0xFF]
    same_bits(E4M3[finite], expected[finite].astype(np.float32))
    assert np.isnan(E4M3[~finite]).all()
    assert (E4M3[1], E4M3[0x38], E4M3[0x7E], E4M3[0xFE]) == (2.0**-9, 1, 448, -448)


def test_every_code_times_every_scale_is_exact_or_overflows() -> None:
    # f32 holds every product but those beyond its range: scale 253 from 4 up, 254 from 2 up.
    with np.errstate(over="ignore"):
        product = E2M1[:, None] * E8M0[None, :255]
        exact = E2M1.astype(np.float64)[:, None] * 2.0 ** (np.arange(255) - 127.0)
        same_bits(product, exact.astype(np.float32))
    assert np.array_equal(product.astype(np.float64), exact) is False
    beyond = np.argwhere(np.isinf(product)).tolist()
    assert beyond == [[c, s] for c in range(16) for s in (253, 254) if c & 7 >= (6, 4)[s - 253]]
    inside = np.isfinite(product)
    assert (product.astype(np.float64)[inside] == exact[inside]).all()


def test_unpack_nibbles_low_first() -> None:
    packed = np.array([[0x10, 0x32], [0xFE, 0x0F]], dtype=np.uint8)
    assert unpack_nibbles(packed).tolist() == [[0, 1, 2, 3], [14, 15, 15, 0]]
    assert unpack_nibbles(packed[0]).tolist() == [0, 1, 2, 3]


def test_unpack_nibbles_of_every_byte() -> None:
    packed = np.arange(256, dtype=np.uint8)
    codes = unpack_nibbles(packed)
    assert (codes[0::2] | codes[1::2] << 4 == packed).all()
    assert codes.max() == 15


def test_bf16_every_pattern_is_the_upper_half() -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    values = bf16_to_f32(patterns)
    assert (bits(values) == patterns.astype(np.uint32) << 16).all()
