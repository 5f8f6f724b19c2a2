"""The plain data of a page: sizes that add up, identity as told, checks as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds4q import api
from ds4q.artifact.describe import describe
from ds4q.artifact.hfq import Reader
from ds4q.artifact.report import Failure, Report
from ds4q.artifact.types import BF16, HFP4G32, RAW, ROCMFP2_MIX, ROCMFP3_MIX
from ds4q.quantize.page import gather
from ds4q.quantize.page.data import MAX_TABLE_ROWS, MAX_TEXT, text
from tests.artifact.build import File, Tensor
from tests.quantize import models
from tests.quantize.page.pages import document, expert, row


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of four experts."""
    folder = tmp_path_factory.mktemp("experts")
    return models.save(folder, models.expert_tensors(), config=models.EXPERT_CONFIG)


def of_file(path: Path) -> dict[str, Any]:
    with Reader(path) as reader:
        return gather(*describe(reader), "1.2.3")


def facts(page: dict[str, Any]) -> dict[str, str]:
    return dict(page["facts"])


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("name", ["fp4", "rocmfp23", "mix"])
def test_the_sizes_of_an_artifact_add_up_to_its_length(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    summary = models.run(checkpoint, tmp_path / "x.hfq", recipe=name).document()
    page = of_file(tmp_path / "x.hfq")
    assert sum(r["bytes"] for r in page["roles"]) == summary["bytes"] == page["bytes"]
    assert sum(r["share"] for r in page["roles"]) == pytest.approx(1)
    assert {t["name"]: (t["tensors"], t["bytes"]) for t in page["types"]} == {
        kind: (held["tensors"], held["bytes"]) for kind, held in summary["types"].items()
    }
    assert page["experts"]["bpw"] == summary["bpw_experts"]
    roles = [r["name"] for r in page["roles"]]
    assert ("decode tables" in roles) == (name == "mix")
    sizes = [r["bytes"] for r in page["roles"]][:-1]
    assert sizes == sorted(sizes, reverse=True)
    assert json.loads(json.dumps(page, allow_nan=False))["name"] == "x.hfq"


def test_roles_and_bits_of_a_small_file() -> None:
    rows = [
        *expert(0, 0, ROCMFP2_MIX, ROCMFP3_MIX),
        row("layers.0.ffn.experts.mix.w1", RAW, (100,)),
        row("layers.0.attn.wq_a.weight", BF16, (8, 16)),
        row("layers.0.ffn.shared_experts.w1.weight", BF16, (8, 16)),
        row("embed.weight", BF16, (8, 16)),
        row("layers.0.ffn.gate.weight", BF16, (8, 16)),
        row("layers.0.attn_norm.weight", BF16, (16,)),
        row("visual.blocks.0.weight", BF16, (16,)),
    ]
    page = gather(document(rows, bytes=4096 + sum(r["bytes"] for r in rows) + 7), rows, "1")
    found = {r["name"]: (r["tensors"], r["bytes"], r["bpw"]) for r in page["roles"]}
    assert found == {
        "experts, gate and up": (2, 20480, 2.5),
        "experts, down": (1, 14336, 3.5),
        "attention": (1, 256, 16.0),
        "embedding and head": (1, 256, 16.0),
        "routing": (1, 256, 16.0),
        "shared experts": (1, 256, 16.0),
        "decode tables": (1, 100, None),
        "norms, streams and draft heads": (1, 32, 16.0),
        "other tensors": (1, 32, 16.0),
        "index and metadata": (None, 4096, None),
        "padding and trailing bytes": (None, 7, None),
    }
    colours = [r["colour"] for r in page["roles"]]
    assert len(set(colours)) == len(colours)


def test_a_role_keeps_its_colour_whatever_else_a_file_holds() -> None:
    few = [row("layers.0.attn.wq_a.weight", BF16, (8, 16))]
    many = expert(0, 0, HFP4G32, HFP4G32) + few
    colours = [
        {r["name"]: r["colour"] for r in gather(document(rows), rows, "1")["roles"]}
        for rows in (few, many)
    ]
    assert colours[0]["attention"] == colours[1]["attention"]


def test_a_checkpoint_counts_bytes_but_no_weights() -> None:
    rows = [
        row("layers.0.ffn.experts.0.w2.weight", "I8", (256, 64), 16384),
        row("layers.0.ffn.experts.0.w2.scale", "F8_E8M0", (256, 4), 1024),
    ]
    page = gather(document(rows, kind="checkpoint", data_offset=0, bytes=17408), rows, "1")
    assert page["counted"] is False
    assert [(r["name"], r["bytes"], r["bpw"]) for r in page["roles"]] == [
        ("experts, down", 17408, None)
    ]
    assert page["experts"]["bpw"] is None
    (part,) = page["experts"]["parts"]
    assert part["kinds"] == [{"number": 0, "type": "I8 + F8_E8M0", "bytes": 17408, "experts": 1}]


# ---------------------------------------------------------------- identity


def test_an_artifact_says_what_it_is(checkpoint: Path, tmp_path: Path) -> None:
    summary = models.run(checkpoint, tmp_path / "x.hfq", recipe="rocmfp23")
    found = facts(of_file(tmp_path / "x.hfq"))
    assert found["Kind"] == "HFQ artifact, version 1"
    assert found["Recipe"] == "rocmfp23"
    assert found["Source fingerprint"] == summary.plan.fingerprint
    assert found["Calibration"] == "none: every column weighs alike"
    assert found["Type 107 is read as"] == "dual"
    assert found["Part of a model"].startswith("yes")
    assert "SHA-256" not in found  # nobody has read the file


def test_an_imatrix_and_variants_are_named() -> None:
    told = {"recipe": "mine", "recipe_sha256": "a" * 64, "imatrix_sha256": "b" * 64}
    metadata = {
        "ds4q": told | {"tool_version": "9"},
        "rocmfpx": {"calibration": "imatrix", "fp6_code32": "zero"},
    }
    found = facts(gather(document([], metadata=metadata), [], "1"))
    assert found["Calibration"] == f"imatrix {'b' * 64}"
    assert found["Recipe digest"] == "a" * 64
    assert found["Code 32 of FP6 is read as"] == "zero"
    assert found["Made by"] == "ds4q 9"
    assert "Part of a model" not in found


def test_a_receipt_has_its_identity_at_the_top() -> None:
    metadata = {"sha256": "c" * 64, "recipe": "fp4", "tool_version": "1", "partial": False}
    receipt = {"kind": "receipt", "path": "x.receipt", "bytes": 9, "tensors": 0}
    page = gather(receipt | {"metadata": metadata, "skipped": 3}, [], "1")
    assert facts(page) == {
        "Kind": "receipt",
        "Recipe": "fp4",
        "Made by": "ds4q 1",
        "SHA-256": "c" * 64,
        "Skipped source tensors": "3",
    }
    assert page["roles"] == []


def test_a_version_2_file_of_another_tool(tmp_path: Path) -> None:
    tensors = (
        Tensor("model.layers.0.mlp.w.weight", 13, (256,), 256, bytes(136)),
        Tensor("layers.0.ffn.experts.5.w1.weight", 13, (2, 256), 256, bytes(272)),
    )
    metadata = b'{"config":{},"hipfire_quant_recipe":["odd",{"deep":1}],"partial":1,"sha256":"0"}'
    path = File(tensors, metadata=metadata, version=2).write(tmp_path)
    page = of_file(path)
    assert facts(page) == {
        "Kind": "HFQ artifact, version 2",
        "Recipe": "['odd', {'deep': 1}]",
    }
    assert sum(r["bytes"] for r in page["roles"]) == path.stat().st_size
    assert page["experts"]["columns"] == [5]


def test_a_draft_beside_its_trunk(random_artifact: Path) -> None:
    page = of_file(random_artifact.with_name("ds4-random-dspark.hfq"))
    names = {r["name"] for r in page["roles"]}
    assert {"draft's experts, gate and up", "draft's experts, down"} <= names
    assert not {"experts, gate and up", "experts, down"} & names
    assert page["experts"]["layers"] == ["mtp.0", "mtp.1", "mtp.2"]


def test_what_could_not_be_opened_has_a_name_and_its_checks() -> None:
    report = Report({"path": "/x/y.hfq"})
    with report.check("structure") as check:
        check.fail(Failure("file is too short"))
    page = gather({"kind": "artifact", "path": "/x/y.hfq"}, [], "1", report)
    assert (page["name"], page["ok"], page["bytes"]) == ("y.hfq", False, None)
    assert (page["roles"], page["experts"]) == ([], None)
    assert page["checks"][0]["failures"] == ["file is too short"]


# ---------------------------------------------------------------- checks


def test_figures_become_words_and_tables() -> None:
    report = Report()
    with report.check("source") as check:
        check.figures |= {
            "bytes": 1234567,
            "nrmse": 0.25,
            "reencoded": True,
            "repeats": {"one": 20, "two": 19},
            "sizes": [1, 2000],
            "worst": [{"tensor": f"t{i}", "nrmse": i} for i in range(30)],
        }
        check.notes.append("a note")
    (found,) = gather(document([]), [], "1", report)["checks"]
    assert found["figures"] == [
        ["bytes", "1,234,567"],
        ["nrmse", "0.25"],
        ["reencoded", "yes"],
        ["repeats", "one 20, two 19"],
        ["sizes", "1, 2,000"],
    ]
    (table,) = found["tables"]
    assert (table["name"], table["columns"]) == ("worst", ["tensor", "nrmse"])
    assert table["rows"][1] == ["t1", "1"]
    assert len(table["rows"]) == MAX_TABLE_ROWS
    assert found["notes"] == ["a note"]


def test_all_failures_are_counted_and_a_hundred_listed() -> None:
    report = Report()
    with report.check("source") as check:
        for i in range(130):
            check.fail(Failure("differs", tensor=f"t{i}"))
    (found,) = gather(document([]), [], "1", report)["checks"]
    assert (found["verdict"], found["count"], len(found["failures"])) == ("failed", 130, 101)
    assert found["failures"][-1] == "and 30 more"


def test_the_digest_of_a_verified_file_is_part_of_its_identity(
    checkpoint: Path, tmp_path: Path
) -> None:
    made = models.run(checkpoint, tmp_path / "x.hfq", recipe="mix").document()
    report = api.verify(tmp_path / "x.hfq", source=checkpoint)
    assert report.reader is not None
    page = gather(*describe(report.reader), "1", report, report.errors)
    assert facts(page)["SHA-256"] == made["sha256"]
    (source,) = [check for check in report.checks if check.name == "source"]
    assert page["nrmse"] == source.figures["nrmse"] > 0.1
    for row_ in page["experts"]["summary"]:
        if row_["part"] == "down":
            stem = f"layers.{row_['layer']}.ffn.experts"
            found = [report.errors[f"{stem}.{e}.w2.weight"].nrmse for e in range(4)]
            assert row_["error_max"] == round(max(found), 6)
            assert row_["worst"] == found.index(max(found))
    assert len(report.errors) == source.figures["lossy_tensors"] == 24


def test_errors_of_a_comparison_that_was_cut_short_are_not_shown(
    checkpoint: Path, tmp_path: Path
) -> None:
    models.run(checkpoint, tmp_path / "x.hfq", recipe="rocmfp23")
    (shard,) = checkpoint.glob("*weights*.safetensors")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())

    def cut(label: str, total: int, **more: Any) -> Any:
        (copy / shard.name).write_bytes(b"")
        return api.silent(label, total)

    report = api.verify(tmp_path / "x.hfq", source=copy, progress=cut)
    assert not report.ok
    assert report.errors == {}


# ---------------------------------------------------------------- texts


def test_texts_are_cut_and_cleaned() -> None:
    assert text("a\x1b[31m\n\u202eb") == "a\\x1b[31m\\x0a\\u202eb"
    assert text("x" * MAX_TEXT) == "x" * MAX_TEXT
    cut = text("x" * 1000)
    assert cut == "x" * MAX_TEXT + " … (1,000 characters)"
    assert text("\ud800").encode("utf-8")


def test_types_of_a_source_are_texts_of_a_file_too() -> None:
    rows = [row("layers.0.ffn.experts.0.w2.weight", "F\x008\ud800", (2,), 2)]
    page = gather(document(rows, kind="checkpoint"), rows, "1")
    assert page["types"][0]["name"] == "F\\x008\\ud800"
    assert page["experts"]["parts"][0]["kinds"][0]["type"] == "F\\x008\\ud800"
