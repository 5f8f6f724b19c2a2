"""Owns ROCmFP6 (102): 6-bit codes, sign and magnitude, and a scale for each half.

What code 32 means differs between implementations, and no byte says which: 0 in Luce-Org/lucebox
("zero"), -32 in ciru-ai/ROCmFPX ("neg32"). The artifact has to name it.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ds4q.artifact.formats import Coding, RowCodec
from ds4q.artifact.formats._blocks import BlockCodec, F32Array, known_variant
from ds4q.artifact.types import ROCMFP6, TensorType


def _levels(code32: int) -> F32Array:
    return np.array([*range(32), code32, *range(-1, -32, -1)], dtype=np.float32)


LEVELS: dict[str, F32Array] = {"zero": _levels(0), "neg32": _levels(-32)}


class RocmFp6Codec(BlockCodec):
    """Two scale bytes."""

    type: ClassVar[TensorType] = ROCMFP6
    bits: ClassVar[int] = 6


_CODECS = {variant: RocmFp6Codec(levels) for variant, levels in LEVELS.items()}


def codec(kind: TensorType, coding: Coding) -> RowCodec:
    """The codec of a variant; another word is a ``CodingError``."""
    return known_variant(kind, coding, _CODECS)
