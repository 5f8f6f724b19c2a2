"""Recipes: the type of every role under each, and which may be called lossless."""

from __future__ import annotations

import json
from typing import get_args

import pytest

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
from ds4q.quantize.deepseek4 import Part, Role, TensorInfo
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


EXPERTS = {
    "fp4": (HFP4G32, HFP4G32),
    "rocmfp4": (ROCMFP4, ROCMFP4),
    "rocmfp4-fast": (ROCMFP4_FAST, ROCMFP4_FAST),
    "rocmfp3": (ROCMFP3, ROCMFP3),
    "rocmfp6-zero": (ROCMFP6, ROCMFP6),
    "rocmfp6-neg32": (ROCMFP6, ROCMFP6),
    "rocmfp8": (ROCMFP8, ROCMFP8),
    "rocmfp2": (ROCMFP2, ROCMFP2),
    "rocmfp2-dual": (ROCMFP2, ROCMFP2),
    "rocmfp2-affine": (ROCMFP2, ROCMFP2),
    "rocmfp2-s40": (ROCMFP2, ROCMFP2),
    "rocmfp2-sign": (ROCMFP2, ROCMFP2),
    "rocmfp23": (ROCMFP2, ROCMFP3),
    "mix": (ROCMFP2_MIX, ROCMFP3_MIX),
    "mix2": (ROCMFP2_MIX, ROCMFP2_MIX),
    "fp4-q8": (HFP4G32, HFP4G32),
    "fp4-f16": (HFP4G32, HFP4G32),
}
VARIANTS = {
    "rocmfp2": "dual",
    "rocmfp2-dual": "dual",
    "rocmfp2-affine": "affine",
    "rocmfp2-s40": "s40",
    "rocmfp2-sign": "sign",
    "rocmfp23": "dual",
}


def info(role: Role, part: Part = "trunk", projection: str | None = None) -> TensorInfo:
    return TensorInfo("x", role, 3, 5, projection, part, (4, 4))


def test_the_names_are_the_published_ones() -> None:
    assert RECIPES.keys() == EXPERTS.keys()
    assert [name for name, recipe in RECIPES.items() if recipe.exact_dense] == ["fp4"]


@pytest.mark.parametrize("name", RECIPES)
def test_experts_get_the_type_that_the_name_says(name: str) -> None:
    recipe = RECIPES[name]
    for projection, wanted in (
        ("w1", EXPERTS[name][0]),
        ("w3", EXPERTS[name][0]),
        ("w2", EXPERTS[name][1]),
    ):
        assert recipe.type_for(info(Role.EXPERT, projection=projection), "fp4") is wanted
        draft = recipe.type_for(info(Role.EXPERT, "dspark", projection), "fp4")
        assert draft is HFP4G32  # a draft keeps its codes


@pytest.mark.parametrize("name", RECIPES)
def test_variants_are_named_exactly_where_their_types_are_used(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.variant_of(ROCMFP2) == VARIANTS.get(name, "")
    endpoint = name.removeprefix("rocmfp6-") if name.startswith("rocmfp6") else ""
    assert recipe.variant_of(ROCMFP6) == endpoint
    assert recipe.variant_of(ROCMFP3) == ""


def test_different_choices_have_different_documents() -> None:
    documents = [json.dumps(recipe.document(), sort_keys=True) for recipe in RECIPES.values()]
    assert len(set(documents)) == len(documents)


@pytest.mark.parametrize("name", RECIPES)
def test_ids_never_change_their_values(name: str) -> None:
    assert RECIPES[name].type_for(info(Role.HASH_TABLE), "i64") is TIDI32
    assert RECIPES[name].type_for(info(Role.HASH_TABLE), "i32") is TIDI32


@pytest.mark.parametrize("role", DENSE)
def test_fp4_keeps_what_the_source_has(role: Role) -> None:
    for kind, target in FLOATS.items():
        assert RECIPES["fp4"].type_for(info(role), kind) is target


@pytest.mark.parametrize("role", DENSE)
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "fp4"])
def test_the_rounding_recipes_choose_by_role_alone(name: str, role: Role) -> None:
    large = F16 if name == "fp4-f16" else Q8F16
    for kind in FLOATS:
        assert RECIPES[name].type_for(info(role), kind) is (large if role in LARGE else F16)


def test_every_kind_has_a_type() -> None:
    for recipe in RECIPES.values():
        for kind in get_args(Kind):
            assert isinstance(recipe.type_for(info(Role.NORM), kind), TensorType)


def test_a_recipe_is_found_by_its_exact_name() -> None:
    assert find_recipe("fp4-q8") is RECIPES["fp4-q8"]
    for name in ("", "FP4", "fp4-", "q8"):
        with pytest.raises(JobError, match=f"fp4, .*, mix2, budget or a .toml file, found {name}"):
            find_recipe(name)
