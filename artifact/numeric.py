"""Owns the meaning of number codes: E2M1, E8M0, E4M3, BF16, F16. Plain numpy, no layouts.

E2M1 and E8M0 follow the OCP Microscaling Formats specification 1.0, E4M3 the OCP 8-bit floating
point specification 1.0 (the "FN" variant: no infinity, 0x7F and 0xFF are NaN).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32Array = npt.NDArray[np.float32]

E2M1: F32Array = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32
)


def _e8m0_table() -> F32Array:
    bits = np.arange(256, dtype=np.uint32) << 23
    bits[0] = 0x0040_0000  # 2^-127 is an f32 subnormal, not zero
    bits[255] = 0x7FC0_0000  # NaN by the specification, not infinity
    return bits.view(np.float32)


def _e4m3_table() -> F32Array:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)
    )
    magnitude[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


E8M0: F32Array = _e8m0_table()
E4M3: F32Array = _e4m3_table()


def unpack_nibbles(packed: U8) -> U8:
    """Codes ``[..., 2n]`` of bytes ``[..., n]``; the low nibble is the even column."""
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.uint8)
    out[..., 0::2] = packed & 15
    out[..., 1::2] = packed >> 4
    return out


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> F32Array:
    """Exact: a BF16 is the upper half of an F32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
