"""Owns the grid of a trunk's routed experts: its sizes, and a type for each (layer, expert, part).

Reads no recipe and measures nothing. Words for types are those of ``recipe.EXPERT_TYPES``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact.types import ROCMFP2, ROCMFP6, TensorType
from ds4q.quantize.audit import Audit, Unit
from ds4q.quantize.deepseek4 import Role
from ds4q.quantize.recipe import EXPERT_TYPES, PARTS, ExpertPart, part_of

U8 = npt.NDArray[np.uint8]
Shape = tuple[int, int, int]  # layers, experts, parts in the order of PARTS
PROJECTIONS = ("w1", "w3", "w2")  # the first two are gate-up


def routed(units: Iterable[Unit]) -> Iterable[tuple[tuple[int, int, str], Unit]]:
    """The routed experts of the trunk among ``units``, by (layer, expert, projection)."""
    for unit in units:
        info = unit.info
        if info.role is Role.EXPERT and info.part == "trunk":
            yield (info.layer or 0, info.expert or 0, info.projection or ""), unit


@dataclass(frozen=True, slots=True)
class ExpertDims:
    """How many routed experts a trunk has, and how long their rows are.

    ``gate_up_k`` and ``down_k`` are in-features of w1, w3 and of w2; of a part of a model, the
    greatest common divisor of those that are there.
    """

    layers: int
    experts: int
    gate_up_k: int
    down_k: int

    @classmethod
    def of(cls, audit: Audit) -> ExpertDims:
        """The sizes that the config gives, or as far as the tensors of a partial model reach."""
        layers = experts = 0
        k = {part: 0 for part in PARTS}
        for (layer, expert, projection), unit in routed(audit.units):
            layers, experts = max(layers, layer + 1), max(experts, expert + 1)
            part = part_of(projection)
            k[part] = math.gcd(k[part], unit.info.logical_shape[-1])
        layers = layers if audit.dims.layers is None else audit.dims.layers
        experts = experts if audit.dims.experts is None else audit.dims.experts
        return cls(layers, experts, k["gate-up"], k["down"])

    @property
    def shape(self) -> Shape:
        """Of an array with one place for each part of each expert."""
        return self.layers, self.experts, len(PARTS)

    def k(self, part: ExpertPart) -> int:
        """In-features of the part's projections."""
        return self.down_k if part == "down" else self.gate_up_k


@dataclass(frozen=True, slots=True, eq=False)
class TypeGrid:
    """A type for each part of each routed expert: ``words[codes[layer, expert, part]]``.

    ``codes`` is uint8 ``(layers, experts, 2)``, parts in the order of ``PARTS``.
    """

    words: tuple[str, ...]
    codes: U8

    def word_of(self, layer: int, expert: int, part: ExpertPart) -> str:
        """The word of one part of one expert."""
        return self.words[int(self.codes[layer, expert, PARTS.index(part)])]

    def type_of(self, layer: int, expert: int, part: ExpertPart) -> TensorType:
        """The type of one part of one expert."""
        return EXPERT_TYPES[self.word_of(layer, expert, part)][0]

    def used(self) -> list[str]:
        """The words that some part of some expert has, in the order of ``words``."""
        return [self.words[code] for code in np.unique(self.codes)]

    def variant_of(self, kind: TensorType) -> str:
        """The word that ``kind`` is to be read by; empty where no expert has that type."""
        return next((EXPERT_TYPES[w][1] for w in self.used() if EXPERT_TYPES[w][0] is kind), "")

    @property
    def variant_107(self) -> str:
        """The variant of type 107; empty where it is not used."""
        return self.variant_of(ROCMFP2)

    @property
    def fp6_code32(self) -> str:
        """The meaning of code 32 of type 102; empty where it is not used."""
        return self.variant_of(ROCMFP6)

    def document(self) -> Any:
        """Sizes, and a digest of all types; variants are told by the recipe."""
        ids = np.array([EXPERT_TYPES[word][0].id for word in self.words], np.uint8)
        digest = hashlib.sha256(ids[self.codes].tobytes()).hexdigest()
        return {"shape": list(self.codes.shape), "types_sha256": digest}
