"""Owns ROCmFP3Mix (105) and ROCmFP2Mix (106): codes whose levels lie in a decode table.

Mode 0 has the fixed levels of ROCmFP3 and of ROCmFP2 ``dual``; mode 1 two books of levels, of which
bit 7 of a half's scale byte chooses (Luce-Org/lucebox). Tables themselves are read elsewhere.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ds4q.artifact.errors import CodingError
from ds4q.artifact.formats import U8, Coding, MixRow, RowCodec
from ds4q.artifact.formats._blocks import BlockCodec, F32Array
from ds4q.artifact.formats._books import midpoints_of, search_books
from ds4q.artifact.formats._rules import DUAL, FP3
from ds4q.artifact.formats._search import search
from ds4q.artifact.numeric import bf16_to_f32
from ds4q.artifact.types import ROCMFP2_MIX, ROCMFP3_MIX, TensorType

# As types 104 and 107, but for code 4: kernels of 105 negate a float, so that it is -0.
FIXED: dict[int, F32Array] = {
    ROCMFP3_MIX.id: np.array([0, 1, 2, 4, -0.0, -1, -2, -4], dtype=np.float32),
    ROCMFP2_MIX.id: np.array([-1, 0, 1, 2], dtype=np.float32),
}


def levels_of(kind: TensorType, row: MixRow) -> F32Array:
    """The levels of a table row, float32 ``(books, K)``: one book in mode 0, two in mode 1.

    Raises ``CodingError`` for an unknown mode, and for a book that is not K finite levels in
    strictly ascending order. The books of a row of mode 0 are not looked at.
    """
    fixed = FIXED[kind.id]
    if row.mode == 0:
        return fixed[None, :]
    if row.mode != 1:
        raise CodingError.of("mix-table-format", "unknown mode", expected="0 or 1", found=row.mode)
    nbytes = 2 * 2 * len(fixed)
    if len(row.books) != nbytes:
        raise CodingError.of(
            "mix-table-format",
            f"two books of {kind.name} are {nbytes} bytes",
            expected=nbytes,
            found=len(row.books),
        )
    levels = bf16_to_f32(row.words)
    if not (np.isfinite(levels).all() and (levels[:, 1:] > levels[:, :-1]).all()):
        raise CodingError.of(
            "mix-table-format",
            "the levels of a book are not finite and strictly ascending",
            found=row.books.hex(),
        )
    return levels


class MixCodec(BlockCodec):
    """A codec of one table row. Its encoder writes the row's mode, whatever the weights."""

    fixed_rule: ClassVar[int]  # how mode 0 rounds

    def __init__(self, row: MixRow) -> None:
        super().__init__(*levels_of(self.type, row))
        self.mode = row.mode
        self.midpoints = midpoints_of(self.levels)

    def search(
        self, values: F32Array, importance: F32Array, scales: U8, codes: U8
    ) -> tuple[int, int]:
        if self.mode == 0:
            return search(values, importance, self.fixed_rule, scales, codes)
        return search_books(values, importance, self.levels, self.midpoints, scales, codes)


class RocmFp3MixCodec(MixCodec):
    """Eight levels."""

    type: ClassVar[TensorType] = ROCMFP3_MIX
    bits: ClassVar[int] = 3
    fixed_rule: ClassVar[int] = FP3


class RocmFp2MixCodec(MixCodec):
    """Four levels."""

    type: ClassVar[TensorType] = ROCMFP2_MIX
    bits: ClassVar[int] = 2
    fixed_rule: ClassVar[int] = DUAL


_CODECS: dict[int, type[MixCodec]] = {
    ROCMFP3_MIX.id: RocmFp3MixCodec,
    ROCMFP2_MIX.id: RocmFp2MixCodec,
}


def codec(kind: TensorType, coding: Coding) -> RowCodec:
    """The codec of a tensor whose table row is ``coding``; a bad row is a ``CodingError``."""
    if not isinstance(coding, MixRow):
        raise CodingError.of("mix-unregistered", f"{kind.name} needs a decode table row")
    return _CODECS[kind.id](coding)
