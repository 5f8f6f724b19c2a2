"""Recipes: the type of every role under each, and which may be called lossless."""

from __future__ import annotations

from typing import get_args

import pytest

from ds4q.artifact.types import BF16, F16, F32, HFP4G32, Q8F16, TIDI32, TensorType
from ds4q.quantize.audit import Kind
from ds4q.quantize.deepseek4 import Role
from ds4q.quantize.errors import JobError
from ds4q.quantize.recipe import RECIPES, find_recipe

# What hipfire's default recipe stores as Q8F16; everything else that is dense is F16 there.
LARGE = {
    Role.EMBED,
    Role.HEAD,
    Role.ATTENTION,
    Role.GATE,
    Role.SHARED_EXPERT,
    Role.DRAFT_PROJECTION,
    Role.MARKOV,
    Role.CONFIDENCE,
}
DENSE = [role for role in Role if role not in (Role.EXPERT, Role.HASH_TABLE)]
FLOATS: dict[Kind, TensorType] = {"fp8": BF16, "bf16": BF16, "f16": F16, "f32": F32}


def test_the_names_are_the_published_ones() -> None:
    assert list(RECIPES) == ["fp4", "fp4-q8", "fp4-f16"]
    assert [name for name, recipe in RECIPES.items() if recipe.lossless] == ["fp4"]


@pytest.mark.parametrize("name", RECIPES)
def test_experts_and_ids_never_change_their_values(name: str) -> None:
    assert RECIPES[name].type_for(Role.EXPERT, "fp4") is HFP4G32
    assert RECIPES[name].type_for(Role.HASH_TABLE, "i64") is TIDI32
    assert RECIPES[name].type_for(Role.HASH_TABLE, "i32") is TIDI32


@pytest.mark.parametrize("role", DENSE)
def test_fp4_keeps_what_the_source_has(role: Role) -> None:
    for kind, target in FLOATS.items():
        assert RECIPES["fp4"].type_for(role, kind) is target


@pytest.mark.parametrize("role", DENSE)
@pytest.mark.parametrize(("name", "large"), [("fp4-q8", Q8F16), ("fp4-f16", F16)])
def test_the_rounding_recipes_choose_by_role_alone(
    name: str, large: TensorType, role: Role
) -> None:
    for kind in FLOATS:
        assert RECIPES[name].type_for(role, kind) is (large if role in LARGE else F16)


def test_every_kind_has_a_type() -> None:
    for recipe in RECIPES.values():
        for kind in get_args(Kind):
            assert isinstance(recipe.type_for(Role.NORM, kind), TensorType)


def test_a_recipe_is_found_by_its_exact_name() -> None:
    assert find_recipe("fp4-q8") is RECIPES["fp4-q8"]
    for name in ("", "FP4", "fp4-", "q8"):
        with pytest.raises(JobError, match=f"fp4, fp4-q8 or fp4-f16, found {name}"):
            find_recipe(name)
