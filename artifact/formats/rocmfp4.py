"""Owns ROCmFP4 (100) and ROCmFP4Fast (101): 4-bit codes, a scale for each half or for the block.

The levels are E2M1's, doubled, with 12 lowered to 10 (Luce-Org/lucebox).
"""

from __future__ import annotations

from typing import ClassVar

from ds4q.artifact.formats import Codec, _rules
from ds4q.artifact.formats._blocks import BLOCK, F32Array, RuleCodec
from ds4q.artifact.types import ROCMFP4, ROCMFP4_FAST, TensorType

LEVELS: F32Array = _rules.LEVELS[_rules.FP4]


class RocmFp4Codec(RuleCodec):
    """Two scale bytes; code 8 is never written."""

    type: ClassVar[TensorType] = ROCMFP4
    bits: ClassVar[int] = 4


class RocmFp4FastCodec(RuleCodec):
    """One scale byte; code 8 is never written."""

    type: ClassVar[TensorType] = ROCMFP4_FAST
    bits: ClassVar[int] = 4
    group: ClassVar[int] = BLOCK


CODECS: dict[int, Codec] = {
    ROCMFP4.id: RocmFp4Codec(_rules.FP4),
    ROCMFP4_FAST.id: RocmFp4FastCodec(_rules.FP4),
}
