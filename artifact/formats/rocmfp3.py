"""Owns ROCmFP3 (104): 3-bit codes and a scale for each half (Luce-Org/lucebox)."""

from __future__ import annotations

from typing import ClassVar

from ds4q.artifact.formats import Codec, _rules
from ds4q.artifact.formats._blocks import F32Array, RuleCodec
from ds4q.artifact.types import ROCMFP3, TensorType

LEVELS: F32Array = _rules.LEVELS[_rules.FP3]


class RocmFp3Codec(RuleCodec):
    """Two scale bytes; code 4 (+0) is never written."""

    type: ClassVar[TensorType] = ROCMFP3
    bits: ClassVar[int] = 3


CODECS: dict[int, Codec] = {ROCMFP3.id: RocmFp3Codec(_rules.FP3)}
