"""Plans as TOML: reading one back gives the same types, and equal plans have equal files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.types import ROCMFP2_MIX, ROCMFP3_MIX
from ds4q.quantize.grid import ExpertDims, TypeGrid
from ds4q.quantize.recipe import EXPERT_TYPES, PARTS, Recipe
from ds4q.quantize.rules import load_recipe
from ds4q.quantize.ruletext import recipe_text

WORDS = tuple(EXPERT_TYPES)


def recipe_of(grid: TypeGrid, dense: str = "fp4-q8") -> Recipe:
    return Recipe("budget", dense, grid, grid.variant_107, grid.fp6_code32)


def read_back(text: str, grid: TypeGrid) -> Recipe:
    layers, experts, _ = grid.codes.shape
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(text, "utf-8")
        return load_recipe(path, ExpertDims(layers, experts, 256, 256))


@st.composite
def grids(draw: st.DrawFn) -> TypeGrid:
    """Any legal types: one variant each of 107 and 102, one mixed type for a layer's downs."""
    layers, experts = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    shared = [w for w in WORDS if w not in ("rocmfp3-mix", "rocmfp2-mix") and "-" not in w]
    shared += draw(st.sampled_from([["rocmfp2-dual"], []]))
    if not draw(st.booleans()):
        affine = draw(st.sampled_from(["rocmfp2-affine", "rocmfp2-s40", "rocmfp2-sign"]))
        shared = [w for w in shared if not w.startswith("rocmfp2")] + [affine]
    shared.append(draw(st.sampled_from(["rocmfp6-zero", "rocmfp6-neg32"])))
    few = draw(st.lists(st.sampled_from(shared), min_size=1, max_size=3, unique=True))
    codes = np.zeros((layers, experts, 2), np.uint8)
    for layer in range(layers):
        mixed = draw(st.sampled_from(["rocmfp3-mix", "rocmfp2-mix"]))
        for part, words in zip(PARTS, ([*few, "rocmfp2-mix"], [*few, mixed]), strict=True):
            column = draw(st.lists(st.sampled_from(words), min_size=experts, max_size=experts))
            codes[layer, :, PARTS.index(part)] = [WORDS.index(word) for word in column]
    return TypeGrid(WORDS, codes)


@given(grids(), st.sampled_from(["fp4", "fp4-q8", "fp4-f16"]))
def test_a_plan_survives_its_file(grid: TypeGrid, dense: str) -> None:
    recipe = recipe_of(grid, dense)
    text = recipe_text(recipe, grid, 'for 98 GB, "é" and \\')
    found = read_back(text, grid)
    assert found.document() == recipe.document()
    same = TypeGrid(WORDS, grid.codes.copy(order="F"))
    assert recipe_text(recipe_of(same, dense), same, 'for 98 GB, "é" and \\') == text


def test_a_plan_of_whole_layers_is_a_few_lines() -> None:
    codes = np.full((43, 256, 2), WORDS.index("rocmfp2-mix"), np.uint8)
    codes[[*range(10), 42], :, 1] = WORDS.index("rocmfp3-mix")
    codes[7, 3] = WORDS.index("fp4")
    codes[20, 250:] = WORDS.index("fp4")
    grid = TypeGrid(WORDS, codes)
    assert recipe_text(recipe_of(grid), grid, "98 GB") == (
        'name = "budget"\ndescription = "98 GB"\ndefault = "rocmfp2-mix"\n\n'
        '[dense]\nrecipe = "fp4-q8"\n\n'
        '[[rule]]\ntype = "fp4"\nlayers = "7"\nexperts = "3"\n\n'
        '[[rule]]\ntype = "fp4"\nlayers = "20"\nexperts = "250-255"\n\n'
        '[[rule]]\ntype = "rocmfp3-mix"\nlayers = "0-6,8-9,42"\npart = "down"\n\n'
        '[[rule]]\ntype = "rocmfp3-mix"\nlayers = "7"\npart = "down"\nexperts = "0-2,4-255"\n'
    )
    found = read_back(recipe_text(recipe_of(grid), grid), grid)
    assert found.experts.type_of(42, 0, "down") is ROCMFP3_MIX
    assert found.experts.type_of(20, 249, "down") is ROCMFP2_MIX
    assert found.document() == recipe_of(grid).document()


def test_the_variant_is_written_down() -> None:
    grid = TypeGrid(WORDS, np.full((1, 2, 2), WORDS.index("rocmfp2-sign"), np.uint8))
    text = recipe_text(recipe_of(grid), grid)
    assert 'variant_107 = "sign"' in text
    assert read_back(text, grid).variant_107 == "sign"
