"""Owns ROCmFP6 (102): 6-bit codes, sign and magnitude, and a scale for each half.

What code 32 means differs between implementations, and no byte says which: 0 in Luce-Org/lucebox
("zero"), -32 in ciru-ai/ROCmFPX ("neg32"). The artifact has to name it.
"""

from __future__ import annotations

from typing import ClassVar

from ds4q.artifact.formats import Coding, RowCodec, _rules
from ds4q.artifact.formats._blocks import F32Array, RuleCodec, known_variant
from ds4q.artifact.types import ROCMFP6, TensorType

RULES = {"zero": _rules.FP6_ZERO, "neg32": _rules.FP6_NEG32}
LEVELS: dict[str, F32Array] = {variant: _rules.LEVELS[rule] for variant, rule in RULES.items()}


class RocmFp6Codec(RuleCodec):
    """Two scale bytes."""

    type: ClassVar[TensorType] = ROCMFP6
    bits: ClassVar[int] = 6


_CODECS = {variant: RocmFp6Codec(rule) for variant, rule in RULES.items()}


def codec(kind: TensorType, coding: Coding) -> RowCodec:
    """The codec of a variant; another word is a ``CodingError``."""
    return known_variant(kind, coding, _CODECS)
