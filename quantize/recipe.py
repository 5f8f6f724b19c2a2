"""Owns recipes: which tensor type each source tensor becomes. Knows no bytes and no offsets.

``fp4`` is lossless: experts keep their codes, FP8 becomes BF16 where that is exact, everything
else keeps its type. ``fp4-q8`` follows hipfire's default recipe for the dense tensors and
``fp4-f16`` its "dense precise" variant; both round, and the receipt says by how much.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4q.artifact.types import BF16, F16, F32, HFP4G32, Q8F16, TIDI32, TensorType
from ds4q.quantize.audit import Kind
from ds4q.quantize.deepseek4 import Role
from ds4q.quantize.errors import JobError

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
_ALWAYS_EXACT = frozenset({"fp4", "i64", "i32"})


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named choice of types. ``large_dense`` None keeps every dense value exactly."""

    name: str
    large_dense: TensorType | None

    @property
    def lossless(self) -> bool:
        """Whether a value that the target type cannot hold exactly is refused."""
        return self.large_dense is None

    def type_for(self, role: Role, kind: Kind) -> TensorType:
        """The artifact type of a tensor of ``role`` that the source stores as ``kind``."""
        if self.large_dense is None or kind in _ALWAYS_EXACT:
            return _EXACT[kind]
        return self.large_dense if role in _LARGE_DENSE else F16


RECIPES = {
    recipe.name: recipe
    for recipe in (Recipe("fp4", None), Recipe("fp4-q8", Q8F16), Recipe("fp4-f16", F16))
}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; ``JobError`` lists the names where there is none."""
    if name not in RECIPES:
        *some, last = RECIPES
        raise JobError("unknown recipe", expected=f"{', '.join(some)} or {last}", found=name)
    return RECIPES[name]
