"""Owns ROCmFP8 (103): signed bytes and one scale for the block (Luce-Org/lucebox)."""

from __future__ import annotations

from typing import ClassVar

from ds4q.artifact.formats import Codec, _rules
from ds4q.artifact.formats._blocks import BLOCK, F32Array, RuleCodec
from ds4q.artifact.types import ROCMFP8, TensorType

LEVELS: F32Array = _rules.LEVELS[_rules.FP8]


class RocmFp8Codec(RuleCodec):
    """The encoder stays within 127, and code 0x80 decodes to -128.

    Without importance the scale is the byte nearest to max / 127, and nothing is searched.
    """

    type: ClassVar[TensorType] = ROCMFP8
    bits: ClassVar[int] = 8
    group: ClassVar[int] = BLOCK


CODECS: dict[int, Codec] = {ROCMFP8.id: RocmFp8Codec(_rules.FP8)}
