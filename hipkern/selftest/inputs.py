"""Owns the numbers that the self-test feeds to kernels: the same on every machine and for ever.

They come from an integer generator of its own, so no library's release changes a digest. Knows
the byte layouts of packed types only as far as a block's scale bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ds4q.artifact.types import (
    BF16,
    F16,
    F32,
    HFP4G32,
    MQ2_LLOYD,
    Q8F16,
    ROCMFP2,
    ROCMFPX,
    TensorType,
)

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
F32Array = npt.NDArray[np.float32]

EDGES = (0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x33800000)
"""Float patterns that careless kernels get wrong: -0, the ends of the subnormals, 2^-24."""
LAST_UE4M3 = 0x7E  # the largest byte of a ROCmFPX scale that is a number
LAST_E8M0 = 0xFE


class Inputs:
    """Numbers from a name: SplitMix64 (Steele, Lea, Flood 2014) over a running counter."""

    def __init__(self, name: str) -> None:
        self._seed = np.uint64(xxhash.xxh3_64_intdigest(name.encode()))
        self._drawn = 0

    def words(self, count: int) -> U64:
        """``count`` 64-bit words."""
        number = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64)
        self._drawn += count
        z = number * np.uint64(0x9E3779B97F4A7C15) + self._seed
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def bytes(self, *shape: int) -> U8:
        """Bytes of ``shape``."""
        return (self.words(int(np.prod(shape))) >> np.uint64(56)).astype(np.uint8).reshape(shape)

    def below(self, limit: int, *shape: int) -> npt.NDArray[np.int32]:
        """Whole numbers 0 .. ``limit`` - 1."""
        words = self.words(int(np.prod(shape)))
        return (words % np.uint64(limit)).astype(np.int32).reshape(shape)

    def values(self, *shape: int, scale: float = 1.0, edges: bool = True) -> F32Array:
        """float32 in [-scale, scale), ``scale`` a power of two; the first few are ``EDGES``."""
        words = self.words(int(np.prod(shape))) >> np.uint64(40)  # 24 bits: every value is exact
        found = (words.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)) * np.float32(
            scale
        )
        if edges and found.size > 8 * len(EDGES):
            found[: 8 * len(EDGES) : 8] = np.array(EDGES, dtype=np.uint32).view(np.float32)
        return found.reshape(shape)

    def packed(self, kind: TensorType, rows: int, cols: int, *, wide: bool, coding: Any) -> U8:
        """Legal bytes ``(rows, row_bytes)`` of a type.

        ``wide`` takes every scale there is, for decoding; else scales are near 1, so that sums of
        products stay finite.
        """
        if kind in (F16, BF16, F32):
            return self._plain(kind, rows, cols, wide)
        row_bytes = kind.row_bytes(cols)
        found = self.bytes(rows, row_bytes)
        if kind is MQ2_LLOYD:
            groups = found.reshape(rows, -1, kind.block_bytes)
            groups[:, :, :8] = self._half_levels(groups.shape[:2], wide)
            return found
        blocks = found[:, kind.row_header_bytes :].reshape(rows, cols // 32, kind.block_bytes)
        if kind is Q8F16:
            blocks[:, :, :2] = self._half_scales(blocks.shape[:2], wide)
        elif kind is HFP4G32:
            found[:, : kind.row_header_bytes] = self._headers(rows, cols, wide)
            blocks[:, :, 0] = _spread(blocks[:, :, 0], *((0, LAST_E8M0) if wide else (122, 128)))
        elif kind in ROCMFPX:
            codes = kind.block_bytes - (1 if kind.block_bytes % 2 else 2)
            scales = blocks[:, :, codes:]
            book = scales & 0x80 if _mirrors(kind, coding) else np.zeros_like(scales)
            scales[:] = book | _spread(scales, *((0, LAST_UE4M3) if wide else (0x30, 0x48)))
        return found

    def _plain(self, kind: TensorType, rows: int, cols: int, wide: bool) -> U8:
        if not wide:
            values = self.values(rows, cols)
            if kind is F16:
                return values.astype("<f2").view(np.uint8).reshape(rows, -1)
            return np.ascontiguousarray(
                values.view(np.uint8).reshape(rows, cols, 4)[:, :, 4 - kind.block_bytes :]
            ).reshape(rows, -1)
        found = self.bytes(rows, cols, kind.block_bytes)
        top = found[:, :, -1]
        top[:] = np.where(top & 0x7F > 0x7A, top & 0x87, top)  # no infinity and no NaN
        top[:, ::7] &= 0x80  # subnormals and zeros
        return found.reshape(rows, -1)

    def _half_scales(self, shape: tuple[int, ...], wide: bool) -> U8:
        """f16 scales >= 0 as bytes: all finite ones, or those from 2^-8 up to 2^-4."""
        bits = self.below(0x7C00, *shape) if wide else 0x1C00 + self.below(0x1000, *shape)
        return bits.astype("<u2")[..., None].view(np.uint8)

    def _half_levels(self, shape: tuple[int, ...], wide: bool) -> U8:
        """Four ascending f16 of either sign as bytes, in magnitude as the scales."""
        magnitudes = self._half_scales((*shape, 4), wide).view("<i2")[..., 0]
        ordered = np.sort(np.where(self.bytes(*shape, 4) & 1, -magnitudes - 1, magnitudes))
        bits = np.where(ordered < 0, -ordered - 1, ordered).astype("<u2")
        bits[ordered < 0] |= 0x8000
        return bits.view(np.uint8)

    def _headers(self, rows: int, cols: int, wide: bool) -> U8:
        found = np.zeros((rows, HFP4G32.row_header_bytes), dtype=np.uint8)
        scales = 1 + self.below(0x7BFF, rows) if wide else np.full(rows, 0x3C00)
        found[:, :2] = scales.astype("<u2")[:, None].view(np.uint8)
        found[:, 4:6] = np.frombuffer((cols // 32).to_bytes(2, "little"), dtype=np.uint8)
        return found


def _spread(raw: U8, first: int, last: int) -> U8:
    """``raw`` mapped to ``first`` .. ``last``; the first of a row take both ends."""
    found = (first + raw.astype(np.uint16) % (last - first + 1)).astype(np.uint8)
    found[:, 0] = first
    found[:, -1] = last
    return found


def _mirrors(kind: TensorType, coding: Any) -> bool:
    """Whether bit 7 of a scale byte chooses between two sets of levels."""
    if kind is ROCMFP2:
        return bool(coding == "sign")
    return bool(getattr(coding, "mode", 0) == 1)
