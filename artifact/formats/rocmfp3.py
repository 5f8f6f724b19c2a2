"""Owns ROCmFP3 (104): 3-bit codes and a scale for each half (Luce-Org/lucebox)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ds4q.artifact.formats import Codec
from ds4q.artifact.formats._blocks import BlockCodec, F32Array
from ds4q.artifact.types import ROCMFP3, TensorType

LEVELS: F32Array = np.array([0, 1, 2, 4, 0, -1, -2, -4], dtype=np.float32)  # code 4 is +0


class RocmFp3Codec(BlockCodec):
    """Two scale bytes; code 4 is never written."""

    type: ClassVar[TensorType] = ROCMFP3
    bits: ClassVar[int] = 3


CODECS: dict[int, Codec] = {ROCMFP3.id: RocmFp3Codec(LEVELS)}
