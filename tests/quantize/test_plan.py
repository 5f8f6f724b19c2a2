"""Plans: sizes to the byte, filters, drafts, file names; every tensor is accounted for.

The sizes of DeepSeek-V4-Flash were computed from hipfire's format and from the tensor lists of the
published checkpoints, without this code; three of them are those of published files.
"""

from __future__ import annotations

import json
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import read_receipt, receipt_path
from ds4q.artifact.types import TYPES
from ds4q.quantize import plan as plans
from ds4q.quantize.audit import Audit, Kind, Unit, audit
from ds4q.quantize.checkpoint import Checkpoint, SourceTensor
from ds4q.quantize.config import check_config
from ds4q.quantize.deepseek4 import Draft, Inventory, Storage, classify
from ds4q.quantize.errors import JobError
from ds4q.quantize.plan import (
    AccountingError,
    FilterError,
    Options,
    Output,
    Plan,
    make_plan,
    sidecar_path,
)
from ds4q.quantize.recipe import DENSE_RECIPES, RECIPES
from tests.checks import check_refused
from tests.quantize import models
from tests.quantize.builders import FLASH, RANDOM, TINY

PREVIEW = {key: value for key, value in FLASH.items() if not key.startswith("dspark_")}
KINDS: dict[Storage, tuple[Kind, str]] = {
    Storage.FP4: ("fp4", "I8"),
    Storage.FP8: ("fp8", "F8_E4M3"),
    Storage.BF16: ("bf16", "BF16"),
    Storage.F32: ("f32", "F32"),
    Storage.INTEGER: ("i64", "I64"),
}


class Listed(Checkpoint):
    """A checkpoint that is a list of names: there is nothing to read."""

    def fingerprint(self) -> str:
        return "f" * 64


@cache
def flash(draft: Draft, stages: int) -> tuple[Checkpoint, Audit]:
    """All weights that the published config implies, without one byte of data."""
    config = FLASH if draft == "dspark" else PREVIEW
    dims = check_config(config, "config.json")
    inventory = Inventory(dims, draft, stages)
    units = []
    for name in inventory.required():
        expected = inventory.expected(name)
        shape = tuple(n for n in expected.shape if n is not None)
        info = classify(name, draft, shape)
        assert info is not None
        kind, dtype = KINDS[expected.storage]
        weight = SourceTensor(name, name, dtype, shape, "s", 0, 0)
        scale_name = name.removesuffix("weight") + "scale"
        scale = SourceTensor(scale_name, scale_name, "F8_E8M0", (1, 1), "s", 0, 0)
        units.append(Unit(weight, scale if kind in ("fp4", "fp8") else None, info, kind))
    checkpoint = Listed(Path("flash"))
    checkpoint.config = config
    checkpoint.tensors = {t.name: t for u in units for t in (u.weight, u.scale) if t is not None}
    return checkpoint, Audit(units, [], [], [], [], False, draft, stages, dims)


@cache
def flash_plan(recipe: str, draft: Draft = "dspark", stages: int = 3) -> Plan:
    checkpoint, audited = flash(draft, stages)
    return make_plan(checkpoint, audited, Path("f.hfq"), Options(RECIPES[recipe]), "0")


def payload(output: Output) -> int:
    return sum(tensor.entry.nbytes for tensor in output.tensors)


@pytest.mark.parametrize(
    ("recipe", "nbytes"),
    [("fp4", 163_306_218_588), ("fp4-q8", 156_874_335_406), ("fp4-f16", 163_235_587_246)],
)
def test_trunk_of_flash(recipe: str, nbytes: int) -> None:
    trunk = flash_plan(recipe).outputs[0]
    assert (trunk.part, trunk.path) == ("trunk", Path("f.hfq"))
    assert (len(trunk.tensors), len(trunk.layout.index)) == (34_223, 1_987_768)
    assert payload(trunk) == nbytes
    assert trunk.layout.file_bytes == trunk.layout.data_offset + nbytes


def test_types_of_flash_under_fp4_q8() -> None:
    types: dict[str, tuple[int, int]] = {}
    for tensor in flash_plan("fp4-q8").outputs[0].tensors:
        count, nbytes = types.get(tensor.target.name, (0, 0))
        types[tensor.target.name] = count + 1, nbytes + tensor.entry.nbytes
    assert types == {
        "HFP4G32": (33_024, 148_612_579_328),
        "Q8F16": (389, 7_209_418_752),
        "F16": (807, 1_043_029_166),
        "TidI32": (3, 9_308_160),
    }


def test_dspark_sidecar_of_flash() -> None:
    sidecar = flash_plan("fp4-q8").outputs[1]
    assert (sidecar.part, sidecar.path) == ("dspark", Path("f-dspark.hfq"))
    assert (len(sidecar.tensors), len(sidecar.layout.index)) == (2_376, 128_939)
    assert payload(sidecar) == 10_921_533_150


def test_mtp_sidecar_of_the_preview() -> None:
    sidecar = flash_plan("fp4-q8", "mtp", 1).outputs[1]
    assert (sidecar.part, sidecar.path) == ("mtp", Path("f-mtp.hfq"))
    assert (len(sidecar.tensors), len(sidecar.layout.index)) == (797, 43_160)
    assert payload(sidecar) == 3_634_999_030


def test_offsets_are_back_to_back_in_the_order_of_name_bytes() -> None:
    for output in flash_plan("fp4").outputs:
        entries = [tensor.entry for tensor in output.tensors]
        assert entries[0].offset == output.layout.data_offset
        assert output.layout.data_offset % 4096 == 0
        for before, after in pairwise(entries):
            assert before.name.encode() < after.name.encode()
            assert before.offset + before.nbytes == after.offset
        assert entries[-1].offset + entries[-1].nbytes == output.layout.file_bytes
    names = [t.entry.name for t in flash_plan("fp4").outputs[0].tensors]
    assert names.index("layers.0.ffn.experts.10.w1.weight") < names.index(
        "layers.0.ffn.experts.2.w1.weight"
    )


# ---------------------------------------------------------------- types by table, on real data


LARGE_DENSE = (
    "embed.weight",
    "head.weight",
    "attn.wq_a.weight",
    "attn.wq_b.weight",
    "attn.wkv.weight",
    "attn.wo_a.weight",
    "attn.wo_b.weight",
    "ffn.gate.weight",
    "shared_experts.w1.weight",
    "shared_experts.w2.weight",
    "shared_experts.w3.weight",
    "main_proj.weight",
    "markov_w1.weight",
    "markov_w2.weight",
    "confidence_head.proj.weight",
)


def table_type(name: str, recipe: str, dtype: str) -> str:
    """hipfire's table, by name, as its readers know it; for ``fp4`` what the source has."""
    if ".ffn.experts." in name:
        return "HFP4G32"
    if name.endswith("tid2eid"):
        return "TidI32"
    if recipe == "fp4":
        return {"F8_E4M3": "BF16", "BF16": "BF16", "F32": "F32"}[dtype]
    if "indexer" not in name and name.endswith(LARGE_DENSE):
        return "Q8F16" if recipe == "fp4-q8" else "F16"
    return "F16"


@pytest.mark.parametrize("recipe", DENSE_RECIPES)
@pytest.mark.parametrize("source", [TINY, RANDOM], ids=lambda path: path.name)
def test_each_tensor_has_the_type_of_the_table(source: Path, recipe: str) -> None:
    with Checkpoint.open(source) as checkpoint:
        made = make_plan(
            checkpoint, audit(checkpoint), Path("x.hfq"), Options(RECIPES[recipe]), "0"
        )
        for output in made.outputs:
            for tensor in output.tensors:
                name = tensor.entry.name
                wanted = table_type(name, recipe, tensor.unit.weight.dtype)
                assert TYPES[tensor.entry.type_id].name == wanted, name


def test_partner_scales_are_consumed_not_written() -> None:
    with Checkpoint.open(RANDOM) as checkpoint:
        made = make_plan(checkpoint, audit(checkpoint), Path("x.hfq"), Options(RECIPES["fp4"]), "0")
        names = [t.entry.name for output in made.outputs for t in output.tensors]
        assert not [name for name in names if name.endswith("scale") and "hc_" not in name]
        assert made.source_bytes == sum(t.nbytes for t in checkpoint.tensors.values())


# ---------------------------------------------------------------- dry runs


FILTERS: list[dict[str, Any]] = [
    {},
    {"include": ["layers.0.ffn"]},
    {"include": ["layers.0", "mtp."], "exclude": ["layers.0.ffn.experts.1"]},
    {"exclude": ["mtp."]},
]


@pytest.mark.parametrize("recipe", DENSE_RECIPES)
@pytest.mark.parametrize("draft", ["split", "keep", "drop"])
@pytest.mark.parametrize("filters", FILTERS, ids=json.dumps)
def test_a_dry_run_promises_what_is_written(
    recipe: str, draft: str, filters: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    options = {"recipe": recipe, "draft": draft} | filters
    promised = models.run(source, out, dry_run=True, **options).document()
    assert list(tmp_path.iterdir()) == []
    done = models.run(source, out, **options).document()
    for document in (promised, done):
        for part in (document, *document["sidecars"]):
            assert part.pop("sha256", None) is None or document is done
            if document is done:
                assert part["bytes"] == Path(part["output"]).stat().st_size
        del document["seconds"], document["events"]
    assert promised == done
    written = {p.name for p in tmp_path.iterdir() if p.suffix == ".hfq"}
    split = (
        draft == "split"
        and filters.get("exclude") != ["mtp."]
        and "layers.0.ffn" not in str(filters.get("include", ""))
    )
    assert written == ({"x.hfq", "x-dspark.hfq"} if split else {"x.hfq"})


@pytest.mark.parametrize("recipe", DENSE_RECIPES)
def test_a_dry_run_of_ds4_random(recipe: str, tmp_path: Path) -> None:
    """The parts of a whole model add up: what the types say is what the payload takes."""
    options: dict[str, Any] = {"recipe": recipe, "allow_partial": False}
    document = models.run(RANDOM, tmp_path / "x.hfq", dry_run=True, **options).document()
    models.run(RANDOM, tmp_path / "x.hfq", **options)
    for part in (document, *document["sidecars"]):
        path = Path(part["output"])
        assert path.stat().st_size == part["bytes"]
        with Reader(path) as reader:
            assert len(reader.tensors) == part["tensors"]
            payload_bytes = reader.file_bytes - reader.data_offset
        assert sum(entry["bytes"] for entry in part["types"].values()) == payload_bytes
        assert sum(entry["tensors"] for entry in part["types"].values()) == part["tensors"]


# ---------------------------------------------------------------- filters and drafts


def planned(source: Path, **options: Any) -> tuple[Plan, set[str]]:
    """The plan, and the names of all source tensors."""
    with Checkpoint.open(source, allow_partial=True) as checkpoint:
        audited = audit(checkpoint, allow_partial=True)
        recipe = RECIPES[options.pop("recipe", "fp4")]
        made = make_plan(checkpoint, audited, Path("x.hfq"), Options(recipe, **options), "0")
        return made, set(checkpoint.tensors)


def names(made: Plan) -> list[set[str]]:
    return [{tensor.entry.name for tensor in output.tensors} for output in made.outputs]


def test_include_comes_first_and_exclude_wins(source: Path) -> None:
    made, _ = planned(
        source,
        include=("layers.0.ffn.experts.", "layers.0.attn"),
        exclude=("layers.0.ffn.experts.1",),
    )
    assert names(made) == [
        {
            "layers.0.ffn.experts.0.w1.weight",
            "layers.0.ffn.experts.2.w2.weight",
            "layers.0.attn.wq_a.weight",
            "layers.0.attn_norm.weight",
        }
    ]
    reasons = dict(made.skipped)
    assert (
        reasons["layers.0.ffn.experts.10.w1.weight"] == "excluded by prefix layers.0.ffn.experts.1"
    )
    assert (
        reasons["layers.0.ffn.experts.10.w1.scale"] == reasons["layers.0.ffn.experts.10.w1.weight"]
    )
    assert reasons["mtp.0.main_norm.weight"] == "not included"


def test_a_prefix_is_literal(source: Path) -> None:
    made, _ = planned(source, exclude=("layers.0.ffn.experts.1",))
    assert "layers.0.ffn.experts.10.w1.weight" not in names(made)[0]
    for pattern in ("layers.*", "layers.0.ffn.experts.1$", "layers?0", "^layers"):
        check_refused(
            FilterError,
            partial(planned, source, exclude=(pattern,)),
            says=[repr(pattern), "matches no tensor", "inspect --tensors"],
        )


@pytest.mark.parametrize("which", ["include", "exclude"])
def test_an_idle_prefix_is_an_error(which: str, source: Path) -> None:
    for prefix in ("layers.7.", "layers.0.attn_norm.weightx", "model.layers.0."):
        check_refused(
            FilterError,
            partial(planned, source, **{which: ("layers.0.", prefix)}),
            says=[repr(prefix)],
        )


def test_a_prefix_that_only_matches_what_was_not_included_is_not_idle(source: Path) -> None:
    made, _ = planned(source, include=("layers.0.attn",), exclude=("mtp.",))
    assert len(names(made)) == 1


def test_a_trunk_without_tensors_is_refused(source: Path) -> None:
    check_refused(
        JobError,
        lambda: planned(source, include=("mtp.",)),
        says=["no tensor of the trunk", "keep"],
    )
    made, _ = planned(source, include=("mtp.",), draft="keep")
    assert [output.part for output in made.outputs] == ["trunk"]


def test_drafts_split_keep_and_drop(source: Path) -> None:
    split, everything = planned(source)
    assert [output.part for output in split.outputs] == ["trunk", "dspark"]
    assert all(name.startswith("mtp.") for name in names(split)[1])
    assert not any(name.startswith("mtp.") for name in names(split)[0])
    kept, _ = planned(source, draft="keep")
    assert names(kept) == [names(split)[0] | names(split)[1]]
    dropped, _ = planned(source, draft="drop")
    assert names(dropped) == [names(split)[0]]
    assert {name for name, why in dropped.skipped if why == "draft dropped"} == {
        name for name in everything if name.startswith("mtp.")
    }


@pytest.mark.parametrize(
    ("out", "part", "sidecar"),
    [
        ("a/flash.hfq", "dspark", "a/flash-dspark.hfq"),
        ("flash.v1.hfq", "mtp", "flash.v1-mtp.hfq"),
        ("noext", "mtp", "noext-mtp"),
    ],
)
def test_sidecar_names(out: str, part: Any, sidecar: str) -> None:
    assert sidecar_path(Path(out), part) == Path(sidecar)


# ---------------------------------------------------------------- accounting, partial files


@pytest.mark.parametrize("filters", FILTERS, ids=json.dumps)
@pytest.mark.parametrize("draft", ["split", "keep", "drop"])
def test_every_source_tensor_is_in_a_receipt_row_or_skipped_with_a_reason(
    draft: str, filters: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    models.run(source, tmp_path / "x.hfq", draft=draft, **filters)
    rows: list[str] = []
    skipped: set[tuple[str, str]] = set()
    for path in tmp_path.glob("*.hfq"):
        receipt = read_receipt(receipt_path(path))
        rows += [s.name for tensor in receipt.tensors for s in tensor.sources]
        skipped |= set(receipt.skipped)
    assert all(why for _, why in skipped)
    left_out = [name for name, _ in skipped]
    with Checkpoint.open(source, allow_partial=True) as checkpoint:
        assert sorted(rows + left_out) == sorted(checkpoint.tensors)


def test_an_unknown_integer_tensor_is_skipped_with_a_reason(tmp_path: Path) -> None:
    tensors = models.mini_tensors() | {"position_ids": models.Tensor("I64", (4,), bytes(32))}
    made, _ = planned(models.save(tmp_path / "s", tensors))
    assert made.skipped == (("position_ids", "integer tensor of unknown name"),)


def test_a_tensor_that_gets_lost_on_the_way_fails_the_job(source: Path) -> None:
    with Checkpoint.open(source, allow_partial=True) as checkpoint:
        audited = audit(checkpoint, allow_partial=True)
        lost = audited.units.pop(3)
        check_refused(
            AccountingError,
            lambda: make_plan(checkpoint, audited, Path("x.hfq"), Options(RECIPES["fp4"]), "0"),
            path=source,
            tensor=min(t.name for t in (lost.weight, lost.scale) if t is not None),
            says=["neither planned nor skipped"],
        )


def partial_parts(**options: Any) -> dict[str, bool]:
    """Part -> whether its file is marked as partial, of a plan over the whole ds4-random."""
    with Checkpoint.open(RANDOM) as checkpoint:
        made = make_plan(
            checkpoint, audit(checkpoint), Path("x.hfq"), Options(RECIPES["fp4"], **options), "0"
        )
    found: dict[str, bool] = {o.part: o.metadata["ds4q"]["partial"] for o in made.outputs}
    assert made.partial == any(found.values())
    return found


def test_a_file_is_partial_where_its_own_tensors_are_missing() -> None:
    assert partial_parts() == {"trunk": False, "dspark": False}
    assert partial_parts(draft="drop") == {"trunk": False}
    assert partial_parts(draft="keep") == {"trunk": False}
    assert partial_parts(exclude=("mtp.",)) == {"trunk": False}
    assert partial_parts(exclude=("layers.1.attn",)) == {"trunk": True, "dspark": False}
    assert partial_parts(exclude=("mtp.1.attn",)) == {"trunk": False, "dspark": True}
    assert partial_parts(exclude=("mtp.1.attn",), draft="keep") == {"trunk": True}
    assert partial_parts(exclude=("mtp.1.attn",), draft="drop") == {"trunk": False}


def test_metadata_says_what_was_done() -> None:
    with Checkpoint.open(TINY) as checkpoint:
        made = make_plan(
            checkpoint, audit(checkpoint), Path("x.hfq"), Options(RECIPES["fp4-q8"]), "1.2"
        )
        metadata = made.outputs[0].metadata
        assert metadata["config"] == checkpoint.config
        assert metadata["tokenizer"] == (TINY / "tokenizer.json").read_text()
        assert metadata["generation_config"] == json.loads(
            (TINY / "generation_config.json").read_text()
        )
        ours = metadata["ds4q"]
        assert ours["source_fingerprint"] == checkpoint.fingerprint()
    assert (ours["recipe"], ours["tool_version"], ours["partial"]) == ("fp4-q8", "1.2", False)
    assert metadata["architecture"] == "deepseek_v4"
    assert metadata["hipfire_quant_recipe"] == "ds4q-fp4-q8"
    assert metadata["hipfire_recipe_census"]["HFP4G32"] == 192
    assert ours["k256"] == (not made.warnings)


def test_a_chat_template_file_is_folded_in(tmp_path: Path) -> None:
    folder = models.mini(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ é }}\n")
    with Checkpoint.open(folder, allow_partial=True) as checkpoint:
        assert plans.source_metadata(checkpoint)["tokenizer_config"] == {
            "chat_template": "{{ é }}\n"
        }
    (folder / "tokenizer_config.json").write_text('{"chat_template": "own", "x": 1}')
    with Checkpoint.open(folder, allow_partial=True) as checkpoint:
        assert plans.source_metadata(checkpoint)["tokenizer_config"] == {
            "chat_template": "own",
            "x": 1,
        }


def test_rows_that_upstream_cannot_load_are_one_warning_and_a_mark(source: Path) -> None:
    made, _ = planned(source)
    assert made.warnings == (
        "1 tensors have rows that are no multiple of 256 "
        "(first: layers.0.ffn.experts.2.w2.weight, 64): not loadable by upstream hipfire",
    )
    assert [output.metadata["ds4q"]["k256"] for output in made.outputs] == [False, True]
