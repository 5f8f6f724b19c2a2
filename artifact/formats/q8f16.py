"""Owns Q8F16: groups of 32 row-major values as (f16 scale, 32 x int8). Lossy.

Encoder as hipfire's: scale = max|x| / 127 in f32, codes from the unrounded scale, rounded half away
from zero; the scale is then stored as f16 (nearest-even).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ds4q.artifact.errors import PayloadValueError
from ds4q.artifact.fastpath import FastPath, jit
from ds4q.artifact.formats import U8, Codec, Values
from ds4q.artifact.types import Q8F16, TensorType

GROUP = 32
GROUP_BYTES = 34


def _codes_reference(values: Values, scales: Values, units: U8) -> None:
    scales[:] = np.abs(values).max(axis=1) / np.float32(127)
    inverse = np.divide(
        np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0
    )  # 1/0 is taken as 0: a zero group has zero codes
    scaled = values * inverse[:, None]
    whole = np.trunc(scaled)
    away = np.abs(scaled - whole) >= np.float32(0.5)
    rounded = whole + np.where(away, np.copysign(np.float32(1), scaled), np.float32(0))
    units[:, 2:] = np.clip(rounded, -128, 127).astype(np.int8).view(np.uint8)


@jit
def _codes_fast(values: Values, scales: Values, units: U8) -> None:
    for g in range(values.shape[0]):
        largest = np.float32(0)
        for i in range(GROUP):
            largest = max(largest, abs(values[g, i]))
        scale = largest / np.float32(127)
        scales[g] = scale
        inverse = np.float32(0)
        if scale != 0:
            inverse = np.float32(1) / scale
        for i in range(GROUP):
            x = values[g, i] * inverse
            whole = np.trunc(x)
            if abs(x - whole) >= np.float32(0.5):
                whole += np.copysign(np.float32(1), x)
            units[g, 2 + i] = np.uint8(np.int8(min(max(whole, np.float32(-128)), np.float32(127))))


_codes = FastPath(_codes_reference, _codes_fast)


class Q8F16Codec(Codec):
    """8-bit codes with one half-precision scale per 32 values."""

    type: ClassVar[TensorType] = Q8F16

    def decode_units(self, units: U8) -> Values:
        scales = np.ascontiguousarray(units[:, :2]).view("<f2").astype(np.float32)
        return units[:, 2:].view(np.int8).astype(np.float32) * scales

    def encode_units(self, values: Values) -> U8:
        """Non-finite input, and a scale that f16 cannot hold, are refused."""
        values = np.ascontiguousarray(values, dtype=np.float32)
        finite = np.isfinite(values).reshape(-1)
        if not finite.all():
            at = int(np.argmin(finite))
            raise PayloadValueError(
                "Q8F16 cannot hold a value that is not finite",
                found=f"{values.reshape(-1)[at]} at value {at}",
            )
        units = np.empty((len(values), GROUP_BYTES), dtype=np.uint8)
        scales = np.empty(len(values), dtype=np.float32)
        # A subnormal scale has an infinite inverse: such a group is refused below.
        with np.errstate(over="ignore", invalid="ignore"):
            _codes(values, scales, units)
            stored = scales.astype("<f2")
        bad = np.flatnonzero(~np.isfinite(stored) | ((stored == 0) & values.any(axis=1)))
        if bad.size:
            raise PayloadValueError(
                "Q8F16 scale leaves the f16 range", found=f"{scales[bad[0]]} in group {bad[0]}"
            )
        units[:, :2] = stored.view(np.uint8).reshape(-1, 2)
        return units

    def validate_units(self, units: U8, *, first: int, path: object, tensor: str | None) -> None:
        scales = np.ascontiguousarray(units[:, :2]).view("<f2").reshape(-1)
        bad = np.flatnonzero(~np.isfinite(scales) | np.signbit(scales))
        if bad.size:
            raise PayloadValueError(
                "Q8F16 scale is negative or not finite",
                path=path,
                tensor=tensor,
                found=f"{scales[bad[0]]} in group {first + bad[0]}",
            )


CODECS: dict[int, Codec] = {Q8F16.id: Q8F16Codec()}
