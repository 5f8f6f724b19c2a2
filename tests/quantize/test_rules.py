"""TOML recipes: what rules select, which comes first, and every refusal by rule and remedy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.types import (
    F16,
    HFP4G32,
    Q8F16,
    ROCMFP2,
    ROCMFP2_MIX,
    ROCMFP3,
    ROCMFP3_MIX,
    ROCMFP6,
    TensorType,
)
from ds4q.quantize.deepseek4 import TensorInfo, classify
from ds4q.quantize.errors import FileKindError
from ds4q.quantize.grid import ExpertDims
from ds4q.quantize.recipe import PARTS, ExpertPart, Recipe
from ds4q.quantize.rules import RecipeError, load_recipe
from tests.checks import check_refused

DIMS = ExpertDims(layers=4, experts=8, gate_up_k=256, down_k=128)
Place = tuple[int, int, ExpertPart]


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def load(
    folder: Path, text: str, *, dims: ExpertDims = DIMS, hot: npt.NDArray[np.int64] | None = None
) -> Recipe:
    return load_recipe(write(folder, text), dims, None if hot is None else hot.__getitem__)


def holders(recipe: Recipe, kind: TensorType) -> set[Place]:
    """Every part of every expert that has ``kind``."""
    return {
        (layer, expert, part)
        for layer in range(DIMS.layers)
        for expert in range(DIMS.experts)
        for part in PARTS
        if recipe.experts.type_of(layer, expert, part) is kind
    }


def info(name: str, shape: tuple[int, ...] = (64, 256)) -> TensorInfo:
    found = classify(name, None, shape)
    assert found is not None
    return found


def test_a_default_alone_gives_one_type_to_all(tmp_path: Path) -> None:
    recipe = load(tmp_path, 'default = "rocmfp3"')
    assert len(holders(recipe, ROCMFP3)) == 4 * 8 * 2
    assert (recipe.name, recipe.dense) == ("mine", "fp4-q8")
    assert (recipe.variant_107, recipe.fp6_code32) == ("", "")
    assert recipe.type_for(info("layers.3.ffn.experts.7.w2.weight"), "fp4") is ROCMFP3
    assert recipe.type_for(info("layers.3.attn.wq_a.weight"), "fp8") is Q8F16


def test_the_first_rule_that_selects_decides(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        """
        default = "rocmfp2-mix"
        [[rule]]
        type = "fp4"
        layers = 2
        experts = "0-1,7"
        [[rule]]
        type = "rocmfp3"
        layers = [1, "2"]
        part = "down"
        """,
    )
    wanted: set[Place] = {(2, expert, part) for expert in (0, 1, 7) for part in PARTS}
    assert holders(recipe, HFP4G32) == wanted
    downs: set[Place] = {(layer, e, "down") for layer in (1, 2) for e in range(8)}
    assert holders(recipe, ROCMFP3) == downs - wanted
    assert len(holders(recipe, ROCMFP2_MIX)) == 64 - len(wanted | downs)


@pytest.mark.parametrize(
    "layers", ['"1-3"', '"1,2,3"', '" 1 - 2 , 3"', '[1, "2-3"]', '["1-2", "2,3"]', '"3,1-2"']
)
def test_ways_to_write_the_same_layers(tmp_path: Path, layers: str) -> None:
    recipe = load(tmp_path, f'default = "fp4"\n[[rule]]\ntype = "rocmfp3"\nlayers = {layers}')
    assert {place[0] for place in holders(recipe, ROCMFP3)} == {1, 2, 3}
    assert len(holders(recipe, ROCMFP3)) == 3 * 8 * 2


def test_hotness_is_the_rank_within_the_layer(tmp_path: Path) -> None:
    counts = np.array([[5, 9, 0, 9, 1, 1, 1, 1], np.arange(8), np.arange(8)[::-1], [0] * 8])
    recipe = load(
        tmp_path, 'default = "fp4"\n[[rule]]\ntype = "rocmfp3"\nhotness = "0,3"', hot=counts
    )
    found = {place[:2] for place in holders(recipe, ROCMFP3)}
    # Equal counts rank by id: 1 before 3 in layer 0, and 4 first of those that were used once.
    assert found == {(0, 1), (0, 4), (1, 7), (1, 4), (2, 0), (2, 3), (3, 0), (3, 3)}


def test_selectors_must_all_agree(tmp_path: Path) -> None:
    counts = np.tile(np.arange(8), (4, 1))
    text = (
        'default = "fp4"\n[[rule]]\ntype = "rocmfp3"\nhotness = "0-3"\nexperts = "0-5"\n'
        "layers = 0\npart = 'down'\nmatch = 'experts\\.[45]'"
    )
    found = holders(load(tmp_path, text, hot=counts), ROCMFP3)
    assert found == {(0, 4, "down"), (0, 5, "down")}


def test_match_is_found_anywhere_in_the_name(tmp_path: Path) -> None:
    text = (
        'default = "fp4"\n'
        "[[rule]]\ntype = 'rocmfp3-mix'\nmatch = '\\.w2\\.weight$'\nlayers = '0-1'\n"
        "[[rule]]\ntype = 'rocmfp2-mix'\nmatch = 'layers\\.3\\..*\\.w[13]'\n"
    )
    recipe = load(tmp_path, text)
    assert holders(recipe, ROCMFP3_MIX) == {(n, e, "down") for n in (0, 1) for e in range(8)}
    assert holders(recipe, ROCMFP2_MIX) == {(3, e, "gate-up") for e in range(8)}


def test_variants_come_from_the_words(tmp_path: Path) -> None:
    text = 'default = "rocmfp2-affine"\n[[rule]]\ntype = "rocmfp6-neg32"\nlayers = 0\nexperts = 3\n'
    recipe = load(tmp_path, text)
    assert (recipe.variant_107, recipe.fp6_code32) == ("affine", "neg32")
    assert recipe.variant_of(ROCMFP2) == "affine"
    assert len(holders(recipe, ROCMFP6)) == 2
    assert load(tmp_path, 'variant_107 = "affine"\n' + text).variant_107 == "affine"


def test_two_words_of_one_variant_go_together(tmp_path: Path) -> None:
    text = 'default = "rocmfp2"\n[[rule]]\ntype = "rocmfp2-dual"\nmatch = "w3"'
    recipe = load(tmp_path, text)
    assert len(holders(recipe, ROCMFP2)) == 64
    assert recipe.variant_107 == "dual"


def test_dense_tensors_follow_their_own_recipe(tmp_path: Path) -> None:
    recipe = load(tmp_path, 'default = "rocmfp3"\n[dense]\nrecipe = "fp4-f16"')
    assert recipe.dense == "fp4-f16"
    assert recipe.type_for(info("layers.3.attn.wq_a.weight"), "fp8") is F16
    assert load(tmp_path, 'default = "rocmfp3"\n[dense]\nrecipe = "fp4"').exact_dense


def test_a_name_of_its_own_goes_before_the_files(tmp_path: Path) -> None:
    recipe = load(tmp_path, 'name = "budget"\ndescription = "98 GB"\ndefault = "rocmfp3"')
    assert recipe.name == "budget"


def test_a_draft_keeps_its_codes(tmp_path: Path) -> None:
    name = "mtp.0.ffn.experts.1.w2.weight"
    drafted = classify(name, "dspark", (64, 256))
    assert drafted is not None
    assert load(tmp_path, 'default = "rocmfp3"').type_for(drafted, "fp4") is HFP4G32


# ---------------------------------------------------------------- refusals

RULE = 'default = "fp4"\n[[rule]]\n'
REFUSED = {
    "not toml": ("default = ", ["not TOML"]),
    "duplicate key": ('default = "fp4"\ndefault = "fp4"', ["not TOML"]),
    "no default": ('[[rule]]\ntype = "fp4"', ["no default", 'add default = "fp4"']),
    "unknown key": ('default = "fp4"\nlayers = 3', ["unknown key in the recipe", "'layers'"]),
    "key of a rule": (RULE + 'type = "fp4"\nlayer = 3', ["unknown key in rule 1", "'layer'"]),
    "no type": (RULE + "layers = 3", ["rule 1: no type", "rocmfp2-sign"]),
    "unknown word": (RULE + 'type = "q4_k"', ["rule 1: unknown type", "'q4_k'", "rocmfp3-mix"]),
    "word of another case": (RULE + 'type = "ROCmFP3"', ["rule 1: unknown type"]),
    "number": (RULE + "type = 104", ["rule 1: types are words, never numbers", "found 104"]),
    "number as text": (RULE + 'type = "104"', ["rule 1: types are words, never numbers"]),
    "number as default": ("default = 107", ["default: types are words, never numbers"]),
    "list as type": (RULE + 'type = ["fp4"]', ["rule 1: unknown type"]),
    "one table": ('default = "fp4"\n[rule]\ntype = "fp4"', ["rule is not a list", "[[rule]]"]),
    "rules of text": ('default = "fp4"\nrule = ["fp4"]', ["rule is not a list of tables"]),
    "dense word": ('default = "fp4"\n[dense]\nrecipe = "q8"', ["fp4 or fp4-q8", "'q8'"]),
    "dense number": ('default = "fp4"\n[dense]\nrecipe = 8', ["fp4-q8", "found 8"]),
    "dense key": ('default = "fp4"\n[dense]\ntype = "fp4"', ["unknown key in [dense]", "'type'"]),
    "dense no table": ('default = "fp4"\ndense = "fp4"', ["dense is not a table", "[dense]"]),
    "name of a recipe": ('default = "fp4"\nname = "mix"', ["mix is the name of a built-in"]),
    "empty name": ('default = "fp4"\nname = ""', ["not a name", 'name = "..."']),
    "name of controls": ('default = "fp4"\nname = "a\\u0007"', ["not a name"]),
    "long name": (f'default = "fp4"\nname = "{"a" * 65}"', ["1 to 64"]),
    "number as name": ('default = "fp4"\nname = 3', ["name is not text"]),
    "number as description": ('default = "fp4"\ndescription = 3', ["description is not text"]),
    "two variants of 107": (
        'default = "rocmfp2"\n[[rule]]\ntype = "rocmfp2-s40"\nlayers = 0',
        ["rule 1: two variants of ROCmFP2", "dual as in the default", "s40", "one word"],
    ),
    "two meanings of code 32": (
        RULE + 'type = "rocmfp6-zero"\nlayers = 0\n[[rule]]\ntype = "rocmfp6-neg32"\nlayers = 1',
        ["rule 2: two meanings of code 32", "zero as in the rule 1", "neg32"],
    ),
    "variant against the word": (
        'default = "rocmfp2"\nvariant_107 = "s40"',
        ["variant_107 is not what the rules say", "expected 'dual'", "found 's40'"],
    ),
    "variant without use": (
        'default = "rocmfp3"\nvariant_107 = "s40"',
        ["variant_107", "no such key"],
    ),
    "layer out of range": (
        RULE + 'type = "rocmfp3"\nlayers = "2-4"',
        ["rule 1: layers out of range", "expected 0..3", "found 2-4"],
    ),
    "expert out of range": (
        RULE + 'type = "rocmfp3"\nexperts = 8',
        ["rule 1: experts out of range", "expected 0..7"],
    ),
    "rank out of range": (
        RULE + 'type = "rocmfp3"\nhotness = "0-8"',
        ["rule 1: hotness out of range"],
    ),
    "very large range": (RULE + 'type = "rocmfp3"\nlayers = "0-999999999"', ["layers out of"]),
    "reversed range": (RULE + 'type = "rocmfp3"\nlayers = "3-1"', ["not a list of ids", "3-1"]),
    "negative": (RULE + 'type = "rocmfp3"\nlayers = -1', ["rule 1: layers is not a list of ids"]),
    "more digits than Python writes": (
        RULE + f'type = "rocmfp3"\nlayers = 0x{"f" * 5000}',
        ["not usable TOML", "4300 digits"],
    ),
    "words as ids": (RULE + 'type = "rocmfp3"\nexperts = "all"', ["not a list of ids"]),
    "real as id": (RULE + 'type = "rocmfp3"\nexperts = 1.5', ["not a list of ids"]),
    "truth as id": (RULE + 'type = "rocmfp3"\nexperts = true', ["not a list of ids"]),
    "other digits": (
        RULE + 'type = "rocmfp3"\nexperts = "\u0663"',
        ["not a list of ids"],
    ),
    "empty ids": (RULE + 'type = "rocmfp3"\nexperts = []', ["matches nothing: experts is empty"]),
    "empty text": (RULE + 'type = "rocmfp3"\nexperts = ""', ["not a list of ids"]),
    "hotness without counts": (
        RULE + 'type = "rocmfp3"\nhotness = 0',
        ["rule 1: hotness needs routing counts", "--imatrix"],
    ),
    "unknown part": (
        RULE + 'type = "rocmfp3"\npart = "w2"',
        ["rule 1: unknown part", "gate-up or down", "'w2'"],
    ),
    "part of a number": (RULE + 'type = "rocmfp3"\npart = 2', ["rule 1: unknown part"]),
    "bad expression": (
        RULE + 'type = "rocmfp3"\nmatch = "(w2"',
        ["rule 1: match is not a regular expression"],
    ),
    "number as expression": (RULE + 'type = "rocmfp3"\nmatch = 2', ["rule 1: match is not text"]),
    "matches nothing": (RULE + 'type = "rocmfp3"\nmatch = "w4"', ["rule 1: matches nothing"]),
    "selectors without a common tensor": (
        RULE + 'type = "rocmfp3"\npart = "down"\nmatch = "w1"',
        ["rule 1: matches nothing", "no tensor in common"],
    ),
    "two types for one tensor": (
        RULE + 'type = "rocmfp3"\nlayers = "0-2"\n'
        '[[rule]]\ntype = "rocmfp4"\nlayers = 1\nexperts = 2',
        [
            "rule 2: two types for one tensor",
            "layers.1.ffn.experts.2.w1.weight",
            "rocmfp3 (rule 1)",
            "found rocmfp4",
            "reorder or remove",
        ],
    ),
    "said twice": (
        RULE + 'type = "rocmfp3"\nlayers = 1\n[[rule]]\ntype = "rocmfp3"\nlayers = 1',
        ["rule 2: no use", "rocmfp3 (rule 1)"],
    ),
    "w1 and w3 apart": (
        RULE + 'type = "rocmfp3"\nmatch = "2\\\\.w3"',
        [
            "rule 1: two types for the gate and up of one expert",
            "layers.0.ffn.experts.2.w3.weight",
            "w1 (fp4, default) and w3 (rocmfp3, rule 1)",
            "gate-up",
        ],
    ),
    "w1 by a later rule": (
        RULE + 'type = "rocmfp3"\nmatch = "w3"\n[[rule]]\ntype = "rocmfp4"\nmatch = "1\\\\.w1"',
        ["rule 1: two types for the gate and up", "layers.0.ffn.experts.0.w3.weight"],
    ),
    "105 on gate and up": (
        'default = "rocmfp3-mix"',
        ["default: rocmfp3-mix is for down only", 'add part = "down"'],
    ),
    "105 on gate by a rule": (
        RULE + 'type = "rocmfp3-mix"\nlayers = 3\nexperts = 5',
        ["rule 1: rocmfp3-mix is for down only", "layers.3.ffn.experts.5.w1.weight"],
    ),
    "both mixed types in a layer": (
        'default = "rocmfp2-mix"\n[[rule]]\ntype = "rocmfp3-mix"\npart = "down"\n'
        'layers = "1-2"\nexperts = "3-4"',
        [
            "rule 1: both kinds of mixed types among the down projections of layer 1",
            "layers.1.ffn.experts.3.w2.weight",
            "rocmfp2-mix (default)",
        ],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    text, says = REFUSED[case]
    path = write(tmp_path, text)
    check_refused(RecipeError, lambda: load_recipe(path, DIMS), path=path, says=says)


@pytest.mark.parametrize("word", ["rocmfp2-mix", "rocmfp2"])
def test_two_bit_types_need_rows_of_whole_windows(tmp_path: Path, word: str) -> None:
    narrow = ExpertDims(layers=4, experts=8, gate_up_k=256, down_k=96)
    path = write(tmp_path, f'default = "{word}"')
    says = [f"default: {word} cannot hold rows of this model's down", "multiple of 128", "found 96"]
    check_refused(RecipeError, lambda: load_recipe(path, narrow), path=path, says=says)
    legal = f'default = "{word}"\n[[rule]]\ntype = "rocmfp3"\npart = "down"'
    assert holders(load(tmp_path, legal, dims=narrow), ROCMFP3)


def test_both_mixed_types_may_meet_in_different_layers(tmp_path: Path) -> None:
    text = (
        'default = "rocmfp2-mix"\n[[rule]]\ntype = "rocmfp3"\npart = "down"\nlayers = 1\n'
        'experts = 0\n[[rule]]\ntype = "rocmfp3-mix"\npart = "down"\nlayers = 1\n'
    )
    assert len(holders(load(tmp_path, text), ROCMFP3_MIX)) == 7


def test_the_name_of_the_file_is_judged_too(tmp_path: Path) -> None:
    path = write(tmp_path, 'default = "rocmfp3"', "rocmfp2.toml")
    check_refused(RecipeError, lambda: load_recipe(path, DIMS), path=path, says=["built-in"])


def test_files_that_hold_no_recipe(tmp_path: Path) -> None:
    missing = tmp_path / "no.toml"
    check_refused(RecipeError, lambda: load_recipe(missing, DIMS), path=missing, says=["no such"])
    check_refused(FileKindError, lambda: load_recipe(tmp_path, DIMS), path=tmp_path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'default = "fp4" # \xe9')
    check_refused(RecipeError, lambda: load_recipe(latin, DIMS), path=latin, says=["byte 18"])
    deep = write(tmp_path, "default = " + "[" * 100_000)
    check_refused(RecipeError, lambda: load_recipe(deep, DIMS), path=deep)


def test_a_checkpoint_without_experts_has_nothing_to_select(tmp_path: Path) -> None:
    path = write(tmp_path, 'default = "fp4"')
    none = ExpertDims(layers=0, experts=0, gate_up_k=0, down_k=0)
    check_refused(RecipeError, lambda: load_recipe(path, none), path=path, says=["no routed"])
