"""Owns ROCmFP8 (103): signed bytes and one scale for the block (Luce-Org/lucebox)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ds4q.artifact.formats import Codec
from ds4q.artifact.formats._blocks import BlockCodec, F32Array
from ds4q.artifact.types import ROCMFP8, TensorType

LEVELS: F32Array = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)


class RocmFp8Codec(BlockCodec):
    """The encoder stays within 127; code 0x80 decodes to -128."""

    type: ClassVar[TensorType] = ROCMFP8
    bits: ClassVar[int] = 8


CODECS: dict[int, Codec] = {ROCMFP8.id: RocmFp8Codec(LEVELS)}
