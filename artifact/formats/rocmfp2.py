"""Owns ROCmFP2 (107): 2-bit codes in blocks of 10 bytes, which have four meanings.

``dual``, ``affine`` and ``s40`` are three builds' readings of the same bytes (Luce-Org/lucebox with
and without its affine switch, ciru-ai/ROCmFPX); ``sign`` is ``dual`` with a mirror bit. Nothing in
the bytes says which: the artifact has to name it.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.artifact.formats import U8, Coding, RowCodec, _rules
from ds4q.artifact.formats._affine import search_affine
from ds4q.artifact.formats._blocks import (
    BLOCK,
    BlockCodec,
    F32Array,
    RuleCodec,
    known_variant,
    unpack_block,
    unpack_reference,
)
from ds4q.artifact.formats._ue4m3 import UE4M3
from ds4q.artifact.types import ROCMFP2, TensorType

LEVELS: dict[str, F32Array] = {
    "dual": _rules.LEVELS[_rules.DUAL],
    "affine": np.array([0, 1, 2, 3], dtype=np.float32),  # less the offset
    "s40": _rules.LEVELS[_rules.S40],
}
MIRRORED: F32Array = np.array([1, 0, -1, -2], dtype=np.float32)  # a half of ``sign`` with bit 7
BITS = 2


def _decode_affine_reference(units: U8, out: F32Array) -> None:
    """Code times the scale (byte 8), less the offset (byte 9), both for all 32 weights."""
    levels = LEVELS["affine"][unpack_reference(units, BITS)]
    out[:] = levels * UE4M3[units[:, 8:9]] - UE4M3[units[:, 9:10]]


@jit
def _decode_affine_fast(units: U8, out: F32Array) -> None:
    codes = np.empty(BLOCK, dtype=np.uint8)
    for b in range(units.shape[0]):
        unpack_block(units[b], BITS, codes)
        scale, offset = UE4M3[units[b, 8]], UE4M3[units[b, 9]]
        for i in range(BLOCK):
            product = np.float32(codes[i]) * scale
            out[b, i] = product - offset


_decode_affine = FastPath(_decode_affine_reference, _decode_affine_fast)


class RocmFp2Codec(RuleCodec):
    """``dual``, ``s40`` and ``sign``: a scale for each half."""

    type: ClassVar[TensorType] = ROCMFP2
    bits: ClassVar[int] = BITS


class AffineCodec(BlockCodec):
    """``affine``: a scale and an offset for the block."""

    type: ClassVar[TensorType] = ROCMFP2
    bits: ClassVar[int] = BITS
    group: ClassVar[int] = BLOCK

    def decode_units(self, units: U8) -> F32Array:
        out = np.empty((len(units), BLOCK), dtype=np.float32)
        _decode_affine(units, out)
        return out

    def search(
        self, values: F32Array, importance: F32Array, scales: U8, codes: U8
    ) -> tuple[int, int]:
        return search_affine(values, importance, scales, codes)


_CODECS: dict[str, BlockCodec] = {
    "dual": RocmFp2Codec(_rules.DUAL),
    "affine": AffineCodec(LEVELS["affine"]),
    "s40": RocmFp2Codec(_rules.S40),
    "sign": RocmFp2Codec(_rules.SIGN, upper=MIRRORED),
}


def codec(kind: TensorType, coding: Coding) -> RowCodec:
    """The codec of a variant; another word is a ``CodingError``."""
    return known_variant(kind, coding, _CODECS)
