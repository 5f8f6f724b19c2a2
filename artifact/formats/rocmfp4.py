"""Owns ROCmFP4 (100) and ROCmFP4Fast (101): 4-bit codes, a scale for each half or for the block.

The levels are E2M1's, doubled, with 12 lowered to 10 (Luce-Org/lucebox).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ds4q.artifact.formats import Codec
from ds4q.artifact.formats._blocks import BlockCodec, F32Array
from ds4q.artifact.types import ROCMFP4, ROCMFP4_FAST, TensorType

LEVELS: F32Array = np.array(
    [0, 1, 2, 3, 4, 6, 8, 10, 0, -1, -2, -3, -4, -6, -8, -10], dtype=np.float32
)  # code 8 is +0, and never written


class RocmFp4Codec(BlockCodec):
    """Two scale bytes."""

    type: ClassVar[TensorType] = ROCMFP4
    bits: ClassVar[int] = 4


class RocmFp4FastCodec(BlockCodec):
    """One scale byte."""

    type: ClassVar[TensorType] = ROCMFP4_FAST
    bits: ClassVar[int] = 4


CODECS: dict[int, Codec] = {
    ROCMFP4.id: RocmFp4Codec(LEVELS),
    ROCMFP4_FAST.id: RocmFp4FastCodec(LEVELS),
}
