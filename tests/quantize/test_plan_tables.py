"""Plans of re-encoded experts: published sizes, tables among the tensors, metadata's length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds4q.artifact.formats import MixRow
from ds4q.artifact.metadata import object_length, parse_metadata
from ds4q.artifact.tables import Table
from ds4q.artifact.types import RAW, ROCMFP2_MIX, ROCMFP3_MIX, ROCMFPX, TYPES, TensorType
from ds4q.quantize.audit import audit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.errors import JobError
from ds4q.quantize.plan import Options, Output, make_plan
from ds4q.quantize.recipe import RECIPES, ExpertPart, Recipe
from tests.checks import check_refused
from tests.quantize import models
from tests.quantize.test_plan import flash_plan

# Bytes of all routed experts of DeepSeek-V4-Flash: 43 layers, 256 experts, 3 x 8,388,608 weights.
EXPERT_BYTES = {
    "rocmfp4": 155_826_782_208,
    "rocmfp4-fast": 147_169_738_752,
    "rocmfp3": 121_198_608_384,
    "rocmfp23": 98_113_159_168,
    "mix": 98_113_159_168,
    "rocmfp2": 86_570_434_560,
    "mix2": 86_570_434_560,
}
TABLE_BYTES = {"mix": 751_984, "mix2": 43 * 3 * 4_380}
COMMON = ("rocmfp3", "rocmfp23", "mix")  # one type, a type for each projection, tables


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=() if r in COMMON else pytest.mark.slow) for r in EXPERT_BYTES],
)
def test_published_sizes_of_flash(recipe: str) -> None:
    trunk = flash_plan(recipe).trunk
    experts = [t for t in trunk.tensors if t.is_routed_expert]
    assert sum(t.entry.nbytes for t in experts) == EXPERT_BYTES[recipe]
    assert sum(t.entry.nbytes for t in trunk.tables) == TABLE_BYTES.get(recipe, 0)
    assert len(trunk.layout.entries) == len(trunk.tensors) + len(trunk.tables)


@pytest.mark.parametrize("recipe", ["fp4", "fp4-q8", "rocmfp3", "mix"])
def test_only_the_trunk_is_private(recipe: str) -> None:
    plan = flash_plan(recipe)
    lossy = not recipe.startswith("fp4")
    assert [o.metadata["ds4q"]["private_qt"] for o in plan.outputs] == [lossy, False]
    assert ["rocmfpx" in o.metadata for o in plan.outputs] == [lossy, False]
    assert plan.lossless == (recipe == "fp4")


def small_plan(folder: Path, recipe: Recipe, **options: Any) -> Output:
    source = models.save(folder / "s", models.expert_tensors(), config=models.EXPERT_CONFIG)
    with Checkpoint.open(source, allow_partial=True) as checkpoint:
        audited = audit(checkpoint, allow_partial=True)
        return make_plan(
            checkpoint, audited, folder / "x.hfq", Options(recipe, **options), "0"
        ).trunk


def test_a_table_serves_each_projection_with_a_mixed_expert(tmp_path: Path) -> None:
    trunk = small_plan(tmp_path, RECIPES["mix"])
    assert [(t.layer, t.projection, t.kind, t.experts, t.shape) for t in trunk.tables] == [
        (layer, w, kind, 4, shape)
        for layer in (0, 3)
        for w, kind, shape in (
            ("w1", ROCMFP2_MIX, (128, 256)),
            ("w2", ROCMFP3_MIX, (256, 128)),
            ("w3", ROCMFP2_MIX, (128, 256)),
        )
    ]
    for table in trunk.tables:
        for expert, number in table.members:
            name = f"layers.{table.layer}.ffn.experts.{expert}.{table.projection}.weight"
            assert trunk.tensors[number].entry.name == name
        assert (table.entry.type_id, table.entry.group_size) == (RAW.id, 0)


def test_entries_are_sorted_with_the_tables_among_them(tmp_path: Path) -> None:
    names = [e.name for e in small_plan(tmp_path, RECIPES["mix"]).layout.entries]
    assert names == sorted(names, key=str.encode)
    assert "layers.3.ffn.experts.w2.mix_table" in names


def test_the_metadata_keeps_its_length_when_digests_come(tmp_path: Path) -> None:
    trunk = small_plan(tmp_path, RECIPES["mix"])
    digests = [(f"{n:064x}", n) for n in range(len(trunk.tables))]
    front = trunk.layout.front(trunk.sealed("ab" * 32, digests))
    assert len(front) == trunk.layout.data_offset
    text = front[32 : 32 + object_length(memoryview(front)[32:], None)]
    found = parse_metadata(text)["rocmfpx"]
    assert [item["sha256"] for item in found["mix_tables"]] == [d for d, _ in digests]
    assert [r["count"] for r in found["repairs"]] == [f"{n:04d}" for _, n in digests]


def test_a_table_holds_the_books_of_its_members_only(tmp_path: Path) -> None:
    trunk = small_plan(tmp_path, RECIPES["mix"], exclude=("layers.3.ffn.experts.2.",))
    table = next(t for t in trunk.tables if (t.layer, t.projection) == (3, "w2"))
    assert [expert for expert, _ in table.members] == [0, 1, 3]
    row = MixRow(1, bytes.fromhex("80bf20bfc0be00be003ec03e203f803f" * 2))
    payload = table.payload({expert: row for expert, _ in table.members})
    assert len(payload) == table.entry.nbytes
    assert Table.decode(payload, 105, mixed={0, 1, 3}).rows == (row, row, None, row)


class _Both:
    """Types 105 and 106 in one projection of a layer."""

    def type_of(self, layer: int, expert: int, part: ExpertPart) -> TensorType:
        return ROCMFP3_MIX if part == "down" and expert == 1 else ROCMFP2_MIX

    def document(self) -> Any:
        return "both"


def test_two_mixed_types_in_one_projection_are_refused(tmp_path: Path) -> None:
    recipe = Recipe("both", experts=_Both())
    check_refused(
        JobError,
        lambda: small_plan(tmp_path, recipe),
        tensor="layers.0.ffn.experts.0.w2.weight",
        says=["both mixed types"],
    )


def test_a_recipe_that_has_no_name_of_ours_leaves_its_digest(tmp_path: Path) -> None:
    named = small_plan(tmp_path / "a", RECIPES["rocmfp23"]).metadata["ds4q"]
    other = replace(RECIPES["rocmfp23"], variant_107="affine")
    ours = small_plan(tmp_path / "b", other).metadata["ds4q"]
    again = small_plan(tmp_path / "c", replace(other)).metadata["ds4q"]
    assert "recipe_sha256" not in named
    assert len(ours["recipe_sha256"]) == 64
    assert ours["recipe_sha256"] == again["recipe_sha256"]


def test_flash_types_are_counted_in_the_census() -> None:
    census = flash_plan("mix").trunk.metadata["hipfire_recipe_census"]
    assert census["ROCmFP2Mix"] == 2 * 43 * 256
    assert census["ROCmFP3Mix"] == 43 * 256
    assert census["Raw"] == 3 * 43
    assert {TYPES[t.entry.type_id] for t in flash_plan("mix").trunk.tensors} & set(ROCMFPX) == {
        ROCMFP2_MIX,
        ROCMFP3_MIX,
    }
