"""Owns recipes: which tensor type each source tensor becomes. Knows no bytes and no offsets.

``fp4`` is lossless: experts keep their codes, FP8 becomes BF16 where that is exact, everything
else keeps its type. ``fp4-q8`` follows hipfire's default recipe for the dense tensors and
``fp4-f16`` its "dense precise" variant; both round, and the receipt says by how much. Recipes with
a ROCmFPX name re-encode the trunk's routed experts and treat dense tensors as ``fp4-q8`` does. A
draft's experts keep their codes in every recipe: it is small, and its guesses are only as useful
as they are good.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ds4q.artifact.types import (
    BF16,
    F16,
    F32,
    HFP4G32,
    Q8F16,
    ROCMFP2,
    ROCMFP2_MIX,
    ROCMFP3,
    ROCMFP3_MIX,
    ROCMFP4,
    ROCMFP4_FAST,
    ROCMFP6,
    ROCMFP8,
    TIDI32,
    TensorType,
)
from ds4q.quantize.audit import Kind
from ds4q.quantize.deepseek4 import Role, TensorInfo
from ds4q.quantize.errors import JobError

ExpertPart = Literal["gate-up", "down"]
PARTS: tuple[ExpertPart, ...] = ("gate-up", "down")

# The large dense matrices, which hipfire's loader wants as Q8F16; the rest is F16 there.
_LARGE_DENSE = frozenset(
    {
        Role.EMBED,
        Role.HEAD,
        Role.ATTENTION,
        Role.GATE,
        Role.SHARED_EXPERT,
        Role.DRAFT_PROJECTION,
        Role.MARKOV,
        Role.CONFIDENCE,
    }
)
_EXACT: dict[Kind, TensorType] = {
    "fp4": HFP4G32,
    "fp8": BF16,
    "bf16": BF16,
    "f16": F16,
    "f32": F32,
    "i64": TIDI32,
    "i32": TIDI32,
}
_INTEGERS = frozenset({"i64", "i32"})
DENSE_RECIPES: dict[str, TensorType | None] = {"fp4": None, "fp4-q8": Q8F16, "fp4-f16": F16}

# Words for the types of routed experts in recipes; a word of type 107 or 102 is also its variant.
EXPERT_TYPES: dict[str, tuple[TensorType, str]] = {
    "fp4": (HFP4G32, ""),
    "rocmfp4": (ROCMFP4, ""),
    "rocmfp4-fast": (ROCMFP4_FAST, ""),
    "rocmfp3": (ROCMFP3, ""),
    "rocmfp3-mix": (ROCMFP3_MIX, ""),
    "rocmfp2-mix": (ROCMFP2_MIX, ""),
    "rocmfp6-zero": (ROCMFP6, "zero"),
    "rocmfp6-neg32": (ROCMFP6, "neg32"),
    "rocmfp8": (ROCMFP8, ""),
    "rocmfp2": (ROCMFP2, "dual"),
    "rocmfp2-dual": (ROCMFP2, "dual"),
    "rocmfp2-affine": (ROCMFP2, "affine"),
    "rocmfp2-s40": (ROCMFP2, "s40"),
    "rocmfp2-sign": (ROCMFP2, "sign"),
}


def part_of(projection: str | None) -> ExpertPart:
    """The part that a projection belongs to: w1 and w3 always carry one type."""
    return "down" if projection == "w2" else "gate-up"


class ExpertTypes(Protocol):
    """Types of the trunk's routed experts."""

    def type_of(self, layer: int, expert: int, part: ExpertPart) -> TensorType:
        """The type of one part of one expert."""

    def document(self) -> Any:
        """What decides the types, as JSON: two choices that can differ have different documents."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """One type for all gate and up projections, one for all down projections."""

    gate_up: TensorType = HFP4G32
    down: TensorType = HFP4G32

    def type_of(self, layer: int, expert: int, part: ExpertPart) -> TensorType:
        """The type of one part of one expert."""
        return self.down if part == "down" else self.gate_up

    def document(self) -> Any:
        """The two names."""
        return [self.gate_up.name, self.down.name]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A choice of types.

    Attributes
    ----------
    dense : word of ``DENSE_RECIPES``; ``fp4`` keeps every dense value exactly
    experts : types of the trunk's routed experts
    variant_107, fp6_code32 : how types 107 and 102 are to be read; empty where neither is used
    """

    name: str
    dense: str = "fp4-q8"
    experts: ExpertTypes = field(default_factory=Uniform)
    variant_107: str = ""
    fp6_code32: str = ""

    @property
    def exact_dense(self) -> bool:
        """Whether a dense value that the target type cannot hold exactly is refused."""
        return DENSE_RECIPES[self.dense] is None

    def type_for(self, info: TensorInfo, kind: Kind) -> TensorType:
        """The artifact type of a tensor that the source stores as ``kind``."""
        if kind == "fp4":
            if info.role is Role.EXPERT and info.part == "trunk" and info.layer is not None:
                return self.experts.type_of(info.layer, info.expert or 0, part_of(info.projection))
            return HFP4G32
        large = DENSE_RECIPES[self.dense]
        if large is None or kind in _INTEGERS:
            return _EXACT[kind]
        return large if info.role in _LARGE_DENSE else F16

    def variant_of(self, kind: TensorType) -> str:
        """The word that ``kind`` is to be read by; empty for types that need none."""
        return {ROCMFP2: self.variant_107, ROCMFP6: self.fp6_code32}.get(kind, "")

    def document(self) -> dict[str, Any]:
        """For the journal: resuming demands the same."""
        return {
            "name": self.name,
            "dense": self.dense,
            "experts": self.experts.document(),
            "variant_107": self.variant_107,
            "fp6_code32": self.fp6_code32,
        }


def _uniform(name: str, gate_up: str, down: str) -> Recipe:
    chosen = [EXPERT_TYPES[word] for word in (gate_up, down)]
    variants = {kind.id: variant for kind, variant in chosen if variant}
    return Recipe(
        name,
        experts=Uniform(chosen[0][0], chosen[1][0]),
        variant_107=variants.get(ROCMFP2.id, ""),
        fp6_code32=variants.get(ROCMFP6.id, ""),
    )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        *(Recipe(name, dense=name) for name in DENSE_RECIPES),
        *(
            _uniform(word, word, word)
            for word, (kind, _) in EXPERT_TYPES.items()
            if kind.coding != "row" and kind is not HFP4G32
        ),
        _uniform("rocmfp23", "rocmfp2", "rocmfp3"),
        _uniform("mix", "rocmfp2-mix", "rocmfp3-mix"),
        _uniform("mix2", "rocmfp2-mix", "rocmfp2-mix"),
    )
}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; ``JobError`` lists the names where there is none."""
    if name not in RECIPES:
        names = f"{', '.join(RECIPES)}, budget or a .toml file"
        raise JobError("unknown recipe", expected=names, found=name)
    return RECIPES[name]
