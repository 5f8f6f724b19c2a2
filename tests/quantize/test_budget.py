"""Planned recipes: targets kept from below, refusals, files that repeat a plan, reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q import __version__
from ds4q.artifact.types import MIXED, ROCMFP3_MIX
from ds4q.quantize.budget import BudgetPlan, TargetSizeError, plan_budget
from ds4q.quantize.errors import JobError
from ds4q.quantize.grid import ExpertDims
from ds4q.quantize.imatrix import Imatrix
from ds4q.quantize.losses import VARIANTS_107, WORDS
from ds4q.quantize.plan import Options, make_plan
from ds4q.quantize.recipe import PARTS, Recipe
from ds4q.quantize.rules import load_recipe
from tests.checks import check_refused
from tests.quantize import routed
from tests.quantize.builders import TINY

LAYERS, EXPERTS = 3, 6


class Bar:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, int]] = []

    @contextmanager
    def __call__(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        done: list[int] = []
        yield done.append
        self.heard.append((label, total, sum(done)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return routed.write(tmp_path_factory.mktemp("m") / "m", layers=LAYERS, experts=EXPERTS)


def plan(
    source: Path,
    bpw: float | None = None,
    nbytes: int | None = None,
    imatrix: Imatrix | None = None,
    **options: Any,
) -> BudgetPlan:
    """A plan for the checkpoint, sizes of files taken from the real planner."""
    with routed.opened(source) as (checkpoint, audited):

        def file_bytes(recipe: Recipe) -> int:
            chosen = Options(recipe, allow_partial=True)
            planned = make_plan(checkpoint, audited, Path("x.hfq"), chosen, __version__)
            return planned.trunk.layout.file_bytes

        settings: dict[str, Any] = {
            "variant_107": None,
            "file_bytes": file_bytes,
            "threads": 1,
            "progress": Bar(),
        }
        return plan_budget(
            checkpoint,
            audited,
            imatrix=imatrix,
            target_bpw=bpw,
            target_bytes=nbytes,
            **settings | options,
        )


def file_bytes(source: Path, recipe: Recipe) -> int:
    """Length of the trunk that a recipe leads to."""
    with routed.opened(source) as (checkpoint, audited):
        chosen = Options(recipe, allow_partial=True)
        planned = make_plan(checkpoint, audited, Path("x.hfq"), chosen, __version__)
        return planned.trunk.layout.file_bytes


@pytest.mark.parametrize("bpw", [2.5, 2.6, 2.75, 3.0, 3.5, 4.0, 5.0])
def test_bits_per_weight_are_kept_from_below(source: Path, bpw: float) -> None:
    found = plan(source, bpw)
    assert found.bpw <= bpw
    # A step of one gate and up, or of the last part that is left, is the coarsest there is.
    coarsest = 2 * 8 * 36 / (LAYERS * EXPERTS * 3 * 128)
    assert found.bpw >= bpw - max(0.005 * bpw, coarsest)
    assert found.recipe.name == "budget"
    assert found.recipe.dense == "fp4-q8"
    assert found.payload_bytes == round(found.bpw * found.measured.weights / 8)


def test_more_bits_lose_less(source: Path) -> None:
    losses = [plan(source, bpw).spent.loss for bpw in (2.5, 2.8, 3.5, 4.5, 5.0)]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == len(losses)
    assert plan(source, 6.0).spent.loss == 0


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.9, 1.0, 1.5])
def test_the_whole_file_is_kept_from_below(source: Path, share: float) -> None:
    low = file_bytes(source, plan(source, 2.5, variant_107="dual").recipe)
    high = file_bytes(source, plan(source, 6.0).recipe)
    # The file of 2.5 bits may hold tables; without them it is a little smaller.
    target = low + round(share * (high - low))
    found = plan(source, nbytes=target)
    size = file_bytes(source, found.recipe)
    assert size <= target
    if share <= 1:
        assert target - size <= max(0.005 * target, 2 * 8 * 36 * 128 / 128)


@pytest.mark.parametrize("each", [-60, 60])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_what_the_file_has_beside_the_experts_may_depend_on_the_plan(
    source: Path, each: int, share: float
) -> None:
    """As tables and metadata do, only much more: bytes for each part that is not of 2 bits."""
    sizes = plan(source, 3.0).measured.nbytes

    def file_bytes(recipe: Recipe) -> int:
        words = [
            (layer, expert, at, WORDS.index(recipe.experts.word_of(layer, expert, part)))  # type: ignore[attr-defined]
            for layer in range(LAYERS)
            for expert in range(EXPERTS)
            for at, part in enumerate(PARTS)
        ]
        larger = sum(WORDS[word].startswith(("rocmfp3", "rocmfp4", "fp4")) for *_, word in words)
        return 50_000 + each * larger + sum(int(sizes[place]) for place in words)

    low, high = (file_bytes(plan(source, bpw).recipe) for bpw in (2.5, 6.0))
    target = low + round(share * (high - low))
    size = file_bytes(plan(source, nbytes=target, file_bytes=file_bytes).recipe)
    assert 0.995 * target <= size <= target


def test_a_file_below_the_smallest_is_refused_with_its_size(source: Path) -> None:
    with pytest.raises(TargetSizeError) as caught:
        plan(source, nbytes=1000)
    smallest = int(str(caught.value).split("at least ")[1].split(" bytes")[0])
    found = plan(source, nbytes=smallest)
    assert file_bytes(source, found.recipe) == smallest
    assert not any(kind in MIXED for kind in types(found)), "tables are no part of the smallest"
    says = ["below the smallest", f"at least {smallest} bytes (2.5", "found"]
    check_refused(TargetSizeError, lambda: plan(source, nbytes=smallest - 1), says=says)


@pytest.mark.parametrize("bpw", [2.4999, 0.0, -1.0, float("nan"), float("-inf")])
def test_bits_below_the_smallest_are_refused(source: Path, bpw: float) -> None:
    says = ["below the smallest", "at least 2.5000 bits per weight", "raise the target"]
    check_refused(TargetSizeError, lambda: plan(source, bpw), says=says)


def test_the_smallest_that_is_told_is_accepted(tmp_path: Path) -> None:
    """Also where it is no round number: 3-bit down because its rows fit no window."""
    source = routed.write(tmp_path / "m", k=256, down_k=96)
    with pytest.raises(TargetSizeError) as caught:
        plan(source, 1.0)
    told = float(str(caught.value).split("at least ")[1].split(" bits")[0])
    assert told > 2.5
    assert plan(source, told).bpw <= told


def types(found: BudgetPlan) -> set[Any]:
    layers, experts, _ = found.grid.codes.shape
    return {
        found.recipe.experts.type_of(layer, expert, part)
        for layer in range(layers)
        for expert in range(experts)
        for part in PARTS
    }


def test_infinite_targets_take_all_that_is_of_use(source: Path) -> None:
    assert plan(source, float("inf")).grid.used() == ["fp4"]
    assert plan(source, nbytes=10**30).grid.used() == ["fp4"]


@pytest.mark.parametrize("bpw", [2.5, 2.8, 3.3, 4.2])
def test_constraints_of_the_format_hold(source: Path, tmp_path: Path, bpw: float) -> None:
    imatrix = routed.statistics(tmp_path / "i", layers=LAYERS, experts=EXPERTS)
    # With the worst variant both mixed types are tempting, each at its own size.
    for statistics, variant in ((None, None), (imatrix, None), (None, "dual"), (imatrix, "dual")):
        found = plan(source, bpw, imatrix=statistics, variant_107=variant)
        words = np.array(WORDS)[found.grid.codes]
        assert len(set(words.ravel()) & set(VARIANTS_107)) <= 1
        assert not (words[:, :, 0] == "rocmfp3-mix").any()
        for down in words[:, :, 1]:
            assert not {"rocmfp3-mix", "rocmfp2-mix"} <= set(down)


def test_the_file_repeats_the_plan(source: Path, tmp_path: Path) -> None:
    for bpw in (2.5, 2.8, 3.3, 4.2):
        found = plan(source, bpw)
        path = tmp_path / "anything.toml"
        path.write_text(found.toml)
        with routed.opened(source) as (_, audited):
            loaded = load_recipe(path, ExpertDims.of(audited))
        assert loaded.document() == found.recipe.document()
        assert file_bytes(source, loaded) == file_bytes(source, found.recipe)


def test_threads_and_runs_change_nothing(source: Path, tmp_path: Path) -> None:
    imatrix = routed.statistics(tmp_path / "i", layers=LAYERS, experts=EXPERTS)
    one, again, more = (plan(source, 2.9, imatrix=imatrix, threads=n) for n in (1, 1, 4))
    assert one.toml == again.toml == more.toml
    assert one.report() == again.report() == more.report()
    assert one.toml != plan(source, 2.9).toml, "an imatrix changes what is worth its bytes"


def test_a_used_expert_gets_more_bits_than_an_idle_one(source: Path, tmp_path: Path) -> None:
    imatrix = routed.statistics(tmp_path / "i", layers=LAYERS, experts=EXPERTS)
    found = plan(source, 2.9, imatrix=imatrix)
    nbytes = np.take_along_axis(found.measured.nbytes, found.grid.codes[..., None].astype(int), 3)
    by_expert = nbytes.sum(axis=(2, 3))
    first = imatrix.tokens(0)
    assert first[-1] == 0
    assert by_expert[0, int(first.argmax())] > by_expert[0, -1]
    assert by_expert[0].sum() > by_expert[-1].sum(), "errors of early layers reach further"


def test_the_variant_can_be_asked_for(source: Path) -> None:
    for variant in ("affine", "sign"):
        found = plan(source, 2.6, variant_107=variant)
        assert found.recipe.variant_107 == variant
        assert list(found.measured.variants) == [f"rocmfp2-{variant}"]
    check_refused(JobError, lambda: plan(source, 2.5, variant_107="zero"), says=["unknown variant"])


def test_types_without_107_name_no_variant(source: Path) -> None:
    assert plan(source, 6.0).recipe.variant_107 == ""


def test_only_what_goes_into_the_file_is_planned(source: Path) -> None:
    with routed.opened(source) as (_, audited):
        kept = [u for u in audited.units if u.name.startswith("layers.1.")]
    found = plan(source, 3.0, units=kept)
    assert found.measured.weights * LAYERS == plan(source, 3.0).measured.weights
    assert not found.measured.nbytes[[0, 2]].any()
    assert 2.9 < found.bpw <= 3.0


def test_a_part_of_a_model_is_planned_as_far_as_it_is_there(tmp_path: Path) -> None:
    without = ("layers.0.ffn.experts.1.w3", "layers.1.ffn.experts.0.", "layers.1.ffn.experts.2.w2")
    source = routed.write(tmp_path / "m", without=without)
    found = plan(source, 3.0)
    assert 2.8 < found.bpw <= 3.0
    report = found.report()
    assert sum(report["layers"][1]["down"]["types"].values()) == 1
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    path = tmp_path / "plan.toml"
    path.write_text(found.toml)
    with routed.opened(source) as (_, audited):
        assert load_recipe(path, ExpertDims.of(audited)).document() == found.recipe.document()


def test_a_checkpoint_without_experts_has_nothing_to_plan(source: Path) -> None:
    check_refused(JobError, lambda: plan(source, 3.0, units=[]), says=["no routed experts"])


def test_the_report_adds_up(source: Path) -> None:
    bar = Bar()
    found = plan(source, 3.0, progress=bar)
    report = found.report()
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["target"] == {"bpw": 3.0, "bytes": None}
    assert report["bpw_experts"] == found.bpw
    assert report["payload_bytes"] == found.payload_bytes
    for part in PARTS:
        assert sum(report["types"][part].values()) == LAYERS * EXPERTS
        for word, count in report["types"][part].items():
            assert sum(entry[part]["types"].get(word, 0) for entry in report["layers"]) == count
    told = sum(entry[part]["loss"] for entry in report["layers"] for part in PARTS)
    assert told == pytest.approx(report["loss"])
    last, following = report["border"]["last"], report["border"]["next"]
    assert last["loss_saved_per_gigabyte"] == 1e9 * last["loss_saved"] / last["bytes"]
    code = found.grid.codes[last["layer"], last["expert"], PARTS.index(last["part"])]
    assert WORDS[code] == last["type"], "the last step is part of the plan"
    code = found.grid.codes[following["layer"], following["expert"], PARTS.index(following["part"])]
    assert WORDS[code] != following["type"], "the next is not"
    assert bar.heard == [("measure", bar.heard[0][1], bar.heard[0][1])]


def test_the_table_names_every_layer_and_the_border(source: Path) -> None:
    lines = plan(source, 3.0).table().splitlines()
    assert lines[0].startswith("budget: 3 bits per weight; 3.0000 bits")
    assert [line.split(":")[0] for line in lines[1:4]] == ["layer 0", "layer 1", "layer 2"]
    assert lines[4].startswith("last step: layer ")
    assert lines[5].startswith("next step: layer ")
    assert len(lines) == 6
    assert plan(source, 6.0).table().count("next step") == 0


def test_a_trained_model_gets_mixed_downs_and_its_first_layers_first() -> None:
    found = plan(TINY, 3.0, threads=2, sample_weights=1 << 12)
    assert 2.985 < found.bpw <= 3.0
    assert found.recipe.variant_107 == "affine"
    assert ROCMFP3_MIX in types(found)
    spent = found.measured.nbytes.shape
    assert spent[:2] == (4, 16)
    layers = [entry["gate-up"]["types"] for entry in found.report()["layers"]]
    assert layers[0].get("rocmfp2-affine", 0) == 0
    assert layers[3].get("rocmfp2-affine", 0) == 16 - layers[3].get("rocmfp2-mix", 0)


# ---------------------------------------------------------------- one type per layer and part


def columns(found: BudgetPlan) -> set[int]:
    """How many types the experts of a layer have in one part."""
    layers, _, parts = found.grid.codes.shape
    return {
        len(np.unique(found.grid.codes[layer, :, part]))
        for layer in range(layers)
        for part in range(parts)
    }


@pytest.mark.parametrize("bpw", [2.5, 2.6, 2.9, 3.3, 4.2, 6.0])
def test_by_projection_all_experts_of_a_layer_have_one_type(source: Path, bpw: float) -> None:
    found, free = plan(source, bpw, per_projection=True), plan(source, bpw)
    assert columns(found) == {1}
    assert found.bpw <= bpw
    # The coarsest step takes gate and up of all experts of one layer from one type to the next.
    assert found.bpw >= min(bpw, 5.0) - 2 / 3 * 2 / LAYERS
    assert found.spent.loss >= free.spent.loss * (1 - 1e-12)
    losses = np.take_along_axis(
        found.measured.losses, found.grid.codes[..., None].astype(np.int64), axis=3
    )
    assert losses.sum() == pytest.approx(found.spent.loss)


def test_by_projection_more_bits_lose_less(source: Path) -> None:
    plans = [plan(source, bpw, per_projection=True) for bpw in (2.5, 2.8, 3.0, 3.5, 4.0, 4.5, 5.0)]
    losses = [found.spent.loss for found in plans]
    assert losses == sorted(losses, reverse=True)
    assert len({found.toml for found in plans}) > 4
    assert columns(plan(source, 2.8)) != {1}, "a free plan would do the same here"


def test_by_projection_the_whole_file_is_kept_from_below(source: Path) -> None:
    low, high = (file_bytes(source, plan(source, bpw).recipe) for bpw in (2.5, 6.0))
    sizes = []
    for share in (0.1, 0.4, 0.7):
        target = low + round(share * (high - low))
        found = plan(source, nbytes=target, per_projection=True)
        assert columns(found) == {1}
        sizes.append(file_bytes(source, found.recipe))
        assert sizes[-1] <= target
    assert sizes == sorted(set(sizes))
    with pytest.raises(TargetSizeError) as caught:
        plan(source, nbytes=1000, per_projection=True)
    smallest = int(str(caught.value).split("at least ")[1].split(" bytes")[0])
    found = plan(source, nbytes=smallest, per_projection=True)
    assert file_bytes(source, found.recipe) == smallest


def test_by_projection_the_report_names_no_expert(source: Path) -> None:
    found = plan(source, 3.0, per_projection=True)
    report = found.report()
    assert report["per_projection"] is True
    assert plan(source, 3.0).report()["per_projection"] is False
    for which in ("last", "next"):
        step = report["border"][which]
        assert step["expert"] is None
        code = found.grid.codes[step["layer"], 0, PARTS.index(step["part"])]
        assert (WORDS[code] == step["type"]) == (which == "last")
    lines = found.table().splitlines()
    assert lines[4].startswith(f"last step: layer {report['border']['last']['layer']} all experts ")


def test_by_projection_a_part_of_a_model_is_planned_as_far_as_it_is_there(tmp_path: Path) -> None:
    without = ("layers.0.ffn.experts.1.w3", "layers.1.ffn.experts.0.", "layers.1.ffn.experts.2.w2")
    source = routed.write(tmp_path / "m", without=without)
    found = plan(source, 3.3, per_projection=True)
    assert columns(found) == {1}
    assert 2.5 < found.bpw <= 3.3
    assert sum(found.report()["layers"][1]["down"]["types"].values()) == 1
    path = tmp_path / "plan.toml"
    path.write_text(found.toml)
    assert "experts" not in found.toml
    with routed.opened(source) as (_, audited):
        assert load_recipe(path, ExpertDims.of(audited)).document() == found.recipe.document()
