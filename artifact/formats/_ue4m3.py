"""Owns UE4M3, the scale byte of ROCmFPX blocks: its values and the byte nearest to a number.

The code is unsigned and ends at 0x7e; what lies above is invalid and decodes to 0, as in Lucebox's
kernels (github.com/Luce-Org/lucebox).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath, jit

F32Array = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

LAST = 0x7E  # the largest valid byte, 224
LOW_BITS = 0x7F  # where bit 7 says something else, the scale is what is left


def _ue4m3_table() -> F32Array:
    byte = np.arange(256)
    exponent, mantissa = byte >> 3, byte & 7
    values = np.where(exponent == 0, mantissa * 2.0**-10, (8 + mantissa) * 2.0 ** (exponent - 11.0))
    values[LAST + 1 :] = 0
    return values.astype(np.float32)


UE4M3: F32Array = _ue4m3_table()
UE4M3_LOW: F32Array = UE4M3[np.arange(256) & LOW_BITS]  # by the whole byte, bit 7 ignored


@jit
def nearest_byte(target: np.float32) -> int:
    """One element of ``nearest``."""
    if not (target > 0 and np.isfinite(target)):
        return 0
    best = 1
    closest = abs(UE4M3[1] - target)
    for byte in range(2, LAST + 1):
        distance = abs(UE4M3[byte] - target)
        if distance < closest:
            closest = distance
            best = byte
    return best


def _nearest_reference(targets: F32Array) -> U8:
    """The scale bytes nearest to ``targets`` (float32, any shape).

    0 where a target is not above 0 or not finite; else the byte in 1..0x7e with the smallest
    distance in float32, the lower byte on a tie. Far above 224 all distances are equal, so that the
    answer is 1: the rule is upstream's.
    """
    with np.errstate(invalid="ignore"):
        distance = np.abs(UE4M3[1 : LAST + 1] - targets[..., None])
    found = np.argmin(distance, axis=-1) + 1
    return np.where((targets > 0) & np.isfinite(targets), found, 0).astype(np.uint8)


@jit
def _nearest_fast(targets: F32Array) -> U8:
    flat = targets.ravel()
    out = np.empty(flat.size, dtype=np.uint8)
    for i in range(flat.size):
        out[i] = nearest_byte(flat[i])
    return out.reshape(targets.shape)


nearest = FastPath(_nearest_reference, _nearest_fast)
