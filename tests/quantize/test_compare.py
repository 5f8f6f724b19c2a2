"""The proof against config and source: what is found, at which place, and in which check."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q import api
from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import receipt_path
from ds4q.artifact.report import Check, Failure, Report
from ds4q.artifact.types import BF16, F16, F32, HFP4G32
from ds4q.quantize.inventory import check_inventory
from ds4q.quantize.recipe import DENSE_RECIPES
from tests.quantize import models
from tests.quantize.builders import RANDOM
from tests.quantize.damage import Payloads, flip, rebuild

W1 = "layers.0.ffn.experts.0.w1.weight"
NORM = "layers.0.attn_norm.weight"


@pytest.fixture
def artifact(source: Path, tmp_path: Path) -> Path:
    models.run(source, tmp_path / "x.hfq")
    return tmp_path / "x.hfq"


def check_of(report: Report, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


def source_failures(path: Path, source: Path, **options: Any) -> list[Failure]:
    report = api.verify(path, source=source, **options)
    check = check_of(report, "source")
    assert report.ok == (not any(c.count for c in report.checks))
    return check.failures


def other_source(folder: Path, **changes: models.Tensor | None) -> Path:
    """The small checkpoint with some tensors replaced, or left out where None."""
    tensors: dict[str, Any] = models.mini_tensors() | changes
    return models.save(folder, {name: t for name, t in tensors.items() if t is not None})


# ---------------------------------------------------------------- equal


@pytest.mark.parametrize("recipe", DENSE_RECIPES)
@pytest.mark.parametrize("draft", ["split", "keep"])
def test_each_recipe_equals_its_source(
    recipe: str, draft: str, source: Path, tmp_path: Path
) -> None:
    models.run(source, tmp_path / "x.hfq", recipe=recipe, draft=draft)
    for path in tmp_path.glob("*.hfq"):
        report = api.verify(path, source=source, threads=2)
        assert report.failure_lines() == []
        check = check_of(report, "source")
        with Reader(path) as reader:
            assert check.figures["tensors"] == len(reader.tensors)
            mine = {name.removesuffix(".weight") for name in reader.tensors}
        held = models.mini_tensors()
        sizes = [len(t.data) for n, t in held.items() if n.rsplit(".", 1)[0] in mine or n in mine]
        assert check.figures["source_bytes"] == sum(sizes)


def test_a_source_with_prefixed_names_is_the_same_source(source: Path, tmp_path: Path) -> None:
    prefixed = models.save(tmp_path / "p", models.mini_tensors(), prefix="model.")
    models.run(prefixed, tmp_path / "x.hfq")
    assert source_failures(tmp_path / "x.hfq", source) == []
    assert source_failures(tmp_path / "x.hfq", prefixed) == []


# ---------------------------------------------------------------- other data


def test_a_changed_source_byte_is_found_at_its_place(artifact: Path, tmp_path: Path) -> None:
    held = models.mini_tensors()[W1]
    data = bytearray(held.data)
    at = 50 * 128 + 3 * 16 + 7  # row 50, block 3
    data[at] ^= 0x40
    (failure,) = source_failures(
        artifact, other_source(tmp_path / "s", **{W1: held._replace(data=bytes(data))})
    )
    assert (failure.tensor, failure.layer, failure.expert, failure.projection) == (W1, 0, 0, "w1")
    assert (failure.row, failure.block) == (50, 3)
    assert failure.message == "packed block differs from the source"
    assert isinstance(failure.expected, str)
    assert isinstance(failure.found, str)
    scale = models.mini_tensors()[W1.replace("weight", "scale")].data[50 * 8 + 3]
    assert bytes.fromhex(failure.expected) == bytes([scale]) + bytes(data[at - 7 : at + 9])
    assert bytes.fromhex(failure.found) == bytes([scale]) + held.data[at - 7 : at + 9]


def test_swapped_experts_are_found(artifact: Path, source: Path, tmp_path: Path) -> None:
    """Each payload is legal and of the right length; only the source can tell."""
    a, b = W1, W1.replace("experts.0", "experts.10")
    swapped = rebuild(artifact, tmp_path / "y.hfq", lambda p: p | {a: p[b], b: p[a]})
    receipt_path(artifact).unlink()  # it would fit by length and index
    assert api.verify(swapped).ok
    failures = source_failures(swapped, source)
    assert [(f.tensor, f.expert, f.row, f.block) for f in failures] == [(a, 0, 0, 0), (b, 10, 0, 0)]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("layers.0.attn.wq_a.weight", b"\x7f", "FP8 NaN"),
        ("layers.0.ffn.gate.tid2eid", b"\x10" + bytes(7), "id out of range"),
        ("layers.0.attn.wq_a.scale", b"\xff", "NaN scale byte"),
    ],
)
def test_an_illegal_source_value_is_a_failure_that_names_the_tensor(
    name: str, data: bytes, says: str, artifact: Path, tmp_path: Path
) -> None:
    held = models.mini_tensors()[name]
    bad = held._replace(data=data + held.data[len(data) :])
    (failure,) = source_failures(artifact, other_source(tmp_path / "s", **{name: bad}))
    assert failure.tensor == name.replace("scale", "weight")
    assert says in failure.message


def test_each_tensor_of_many_bad_ones_is_one_failure_in_file_order(
    source: Path, tmp_path: Path
) -> None:
    models.run(source, tmp_path / "x.hfq")
    with Reader(tmp_path / "x.hfq") as reader:
        entries = list(reader.tensors.values())
    for entry in entries:  # 8 of one byte, in reverse
        flip(tmp_path / "x.hfq", entry.offset + entry.nbytes - 1)
        flip(tmp_path / "x.hfq", entry.offset + entry.nbytes // 2)
    orders = []
    for threads in (1, 2, 8):
        failures = source_failures(tmp_path / "x.hfq", source, threads=threads)
        assert [f.tensor for f in failures] == [e.name for e in entries]
        orders.append(failures)
    assert orders[0] == orders[1] == orders[2]


# ---------------------------------------------------------------- other tensors


def test_a_tensor_that_the_source_lacks(artifact: Path, tmp_path: Path) -> None:
    (failure,) = source_failures(artifact, other_source(tmp_path / "s", **{NORM: None}))
    assert (failure.tensor, failure.message) == (NORM, "tensor is not in the source")
    assert failure.layer == 0


def test_another_shape(artifact: Path, tmp_path: Path) -> None:
    norm = models.bf16(np.ones(65))
    (failure,) = source_failures(artifact, other_source(tmp_path / "s", **{NORM: norm}))
    assert failure.tensor == NORM
    assert (failure.expected, failure.found) == ("[65]", "[64]")


def as_f32(payloads: Payloads) -> Payloads:
    """The norm with the same values in a wider type."""
    _, shape, raw = payloads[NORM]
    wide = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).tobytes()
    return payloads | {NORM: (F32.id, shape, wide)}


def test_another_type_than_the_recipe_gives(artifact: Path, source: Path, tmp_path: Path) -> None:
    """Values may be equal, but the file is not what it says that it is."""
    changed = rebuild(artifact, tmp_path / "y.hfq", as_f32)
    assert api.verify(changed).ok
    (failure,) = source_failures(changed, source)
    assert (failure.tensor, failure.expected, failure.found) == (NORM, "BF16", "F32")
    assert failure.message == "type is not what recipe fp4 gives"


def without_recipe(metadata: dict[str, Any]) -> dict[str, Any]:
    return metadata | {"ds4q": metadata["ds4q"] | {"recipe": "of-a-later-version"}}


def test_an_unknown_recipe_is_compared_by_value(
    artifact: Path, source: Path, tmp_path: Path
) -> None:
    changed = rebuild(artifact, tmp_path / "y.hfq", as_f32, without_recipe)
    assert source_failures(changed, source) == []


@pytest.mark.parametrize("name", [W1, NORM, "layers.0.ffn.gate.tid2eid"])
def test_a_type_that_no_conversion_gives(
    name: str, artifact: Path, source: Path, tmp_path: Path
) -> None:
    def other(payloads: Payloads) -> Payloads:
        kind, shape, _ = payloads[name]
        wanted = F16 if kind in (HFP4G32.id, 22) else HFP4G32
        rows = np.zeros(wanted.payload_bytes(shape), np.uint8)
        if wanted is HFP4G32:
            rows[:6] = [0, 0x3C, 0, 0, 2, 0]
        return payloads | {name: (wanted.id, shape, rows.tobytes())}

    changed = rebuild(artifact, tmp_path / "y.hfq", other, without_recipe)
    (failure,) = source_failures(changed, source)
    assert (failure.tensor, failure.message) == (name, "type cannot come from this source")


@pytest.fixture(scope="module")
def whole(random_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model without its receipt."""
    copy = tmp_path_factory.mktemp("whole") / "r.hfq"
    shutil.copy(random_artifact, copy)
    return copy


def test_a_whole_artifact_lacks_nothing(whole: Path, tmp_path: Path) -> None:
    name = "layers.1.ffn.experts.5.w2.weight"
    cut = rebuild(whole, tmp_path / "y.hfq", lambda p: {n: v for n, v in p.items() if n != name})
    report = api.verify(cut, source=RANDOM)
    assert [f.message for f in check_of(report, "inventory").failures] == ["tensor is missing"]
    (failure,) = check_of(report, "source").failures
    assert failure.message == "source tensor is not in the artifact"
    assert (failure.tensor, failure.layer, failure.expert, failure.projection) == (name, 1, 5, "w2")


@pytest.mark.parametrize(
    "key", ["config", "tokenizer", "tokenizer_config", "generation_config", "architecture"]
)
def test_texts_are_compared(key: str, artifact: Path, source: Path, tmp_path: Path) -> None:
    """``architecture`` repeats model_type; a config of another kind fails more checks than one."""
    other = {"config": models.CONFIG | {"bos_token_id": 7}}.get(key, "other")
    changed = rebuild(artifact, tmp_path / "y.hfq", metadata=lambda m: m | {key: other})
    failures = source_failures(changed, source)
    assert [f.message for f in failures] == [f"metadata key '{key}' differs from the source"]


# ---------------------------------------------------------------- no usable source


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "other", "truncated"])
def test_a_source_that_cannot_be_used_is_a_failed_check(
    kind: str, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "s"
    if kind == "empty":
        folder.mkdir()
    elif kind == "file":
        folder.write_text("x")
    elif kind == "other":
        models.mini(folder)
    elif kind == "truncated":
        shutil.copytree(RANDOM, folder)
        shard = folder / "model-00003-of-00011.safetensors"
        os.truncate(shard, shard.stat().st_size - 100)
    report = api.verify(whole, source=folder)
    assert not report.ok
    assert [c.name for c in report.checks if not c.ok] == ["source"]
    (failure,) = check_of(report, "source").failures
    assert failure.message
    json.dumps(report.document())


@pytest.mark.parametrize("how", ["cut", "touched", "removed"])
def test_a_source_that_changes_meanwhile_fails_the_source_check(
    how: str, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.mini(tmp_path / "s")
    shard = source / "model-weights.safetensors"
    from ds4q.quantize import compare, convert

    def disturb(*arguments: Any) -> Any:
        if how == "cut":
            os.truncate(shard, 10)
        elif how == "touched":
            os.utime(shard, (1, 1))
        elif shard.exists():
            shard.unlink()
        return convert.compare(*arguments)

    monkeypatch.setattr(compare, "compare", disturb)
    report = api.verify(artifact, source=source)
    assert [c.name for c in report.checks if not c.ok] == ["source"]
    message = check_of(report, "source").failures[-1].message
    assert ("ended during a read" if how == "cut" else "source changed") in message


# ---------------------------------------------------------------- the inventory of the config


def inventory(path: Path) -> Check:
    check = Check("inventory")
    with Reader(path) as reader:
        check_inventory(reader, check)
    return check


def test_a_whole_model_and_its_sidecar_fit_their_config(random_artifact: Path) -> None:
    for path in random_artifact.parent.glob("*.hfq"):
        check = inventory(path)
        assert (check.ok, check.figures["missing"], check.figures["partial"]) == (True, 0, False)


def test_missing_tensors_are_named_unless_the_file_says_partial(
    whole: Path, tmp_path: Path
) -> None:
    gone = ["layers.0.attn_norm.weight", "layers.2.ffn.experts.7.w3.weight"]

    def cut(payloads: Payloads) -> Payloads:
        return {n: v for n, v in payloads.items() if n not in gone}

    check = inventory(rebuild(whole, tmp_path / "y.hfq", cut))
    assert [(f.tensor, f.message) for f in check.failures] == [
        (n, "tensor is missing") for n in gone
    ]
    partial = rebuild(
        whole, tmp_path / "z.hfq", cut, lambda m: m | {"ds4q": m["ds4q"] | {"partial": True}}
    )
    check = inventory(partial)
    assert (check.ok, check.figures["missing"], check.figures["partial"]) == (True, 2, True)


def marked(part: bool, metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata that says whether the file is partial."""
    return metadata | {"ds4q": metadata["ds4q"] | {"partial": part}}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("layers.0.attn.extra.weight", "unexpected tensor"),
        ("layers.99.attn_norm.weight", "the config rules this tensor out"),
        ("layers.0.ffn.experts.999.w1.weight", "the config rules this tensor out"),
    ],
)
def test_a_strange_tensor_is_refused_even_in_a_partial_file(
    name: str, says: str, whole: Path, tmp_path: Path
) -> None:
    for part in (False, True):
        changed = rebuild(
            whole,
            tmp_path / "y.hfq",
            lambda p: p | {name: (BF16.id, (4,), bytes(8))},
            partial(marked, part),
        )
        (failure,) = inventory(changed).failures
        assert failure.tensor == name
        assert says in failure.message


def test_another_shape_than_the_config_implies(whole: Path, tmp_path: Path) -> None:
    name = "norm.weight"
    changed = rebuild(whole, tmp_path / "y.hfq", lambda p: p | {name: (BF16.id, (4,), bytes(8))})
    (failure,) = inventory(changed).failures
    assert (failure.tensor, failure.found) == (name, "[4]")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "no config object"),
        ("text", "no config object"),
        ({"model_type": "llama"}, "llama"),
        ({}, "model_type"),
        ({"model_type": "deepseek_v4"}, "required key is missing"),
    ],
)
def test_a_file_needs_a_config_of_this_model(
    config: Any, says: str, whole: Path, tmp_path: Path
) -> None:
    changed = rebuild(whole, tmp_path / "y.hfq", metadata=lambda m: m | {"config": config})
    check = inventory(changed)
    assert check.count == 1
    assert says in check.failures[0].line()
