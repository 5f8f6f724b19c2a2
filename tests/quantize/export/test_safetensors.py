"""Back to safetensors: byte for byte what the checkpoint had, and a checkpoint again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ds4q import api
from ds4q.artifact.hfq import Reader
from ds4q.artifact.types import RAW
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.export.plan import ExportError
from ds4q.quantize.export.safetensors import _convert_of
from tests.checks import check_refused
from tests.quantize import models
from tests.quantize.builders import RANDOM, TINY
from tests.quantize.export import small


class Held(NamedTuple):
    """One tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read(path: Path) -> dict[str, Held]:
    """A file, or all of a folder, without the product's own reader."""
    found: dict[str, Held] = {}
    for shard in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        raw = shard.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header: dict[str, Any] = json.loads(raw[8:start])
        assert header.pop("__metadata__") == {"format": "pt"}
        ends = set()
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            assert name not in found
            found[name] = Held(
                entry["dtype"], tuple(entry["shape"]), raw[start + first : start + last]
            )
            ends.add(last)
        assert start + max(ends) == len(raw)
    return found


def source_tensors(folder: Path) -> dict[str, Held]:
    with Checkpoint.open(folder) as checkpoint:
        return {
            t.name: Held(t.dtype, t.shape, checkpoint.read(t).tobytes())
            for t in checkpoint.tensors.values()
        }


def experts(tensors: dict[str, Held]) -> dict[str, Held]:
    return {name: held for name, held in tensors.items() if ".experts." in name}


def test_every_tensor_of_ds4_tiny_comes_back(tiny_artifact: Path, tmp_path: Path) -> None:
    done = api.export(tiny_artifact, tmp_path / "out", to="safetensors", threads=2)
    assert done.warnings == ()
    found, source = read(tmp_path / "out"), source_tensors(TINY)
    assert len(experts(source)) == 4 * 16 * 3 * 2
    assert experts(found) == experts(source)
    fp8 = {name for name, held in source.items() if held.dtype == "F8_E4M3"}
    scales = {name.removesuffix(".weight") + ".scale" for name in fp8}
    assert found.keys() == source.keys() - scales
    for name in found.keys() - fp8:
        assert found[name] == source[name], name
    assert {found[name].dtype for name in fp8} == {"BF16"}


def test_every_expert_of_ds4_random_and_of_its_draft_comes_back(
    random_artifact: Path, tmp_path: Path
) -> None:
    found: dict[str, Held] = {}
    for number, file in enumerate((random_artifact, draft_of(random_artifact))):
        out = tmp_path / f"{number}.safetensors"
        api.export(file, out, to="safetensors", only_experts=True)
        found |= read(out)
    assert len(found) == 9 * 16 * 3 * 2
    assert found == experts(source_tensors(RANDOM))


def draft_of(artifact: Path) -> Path:
    return artifact.with_name(f"{artifact.stem}-dspark.hfq")


def test_a_checkpoint_again(tiny_artifact: Path, tmp_path: Path) -> None:
    api.export(tiny_artifact, tmp_path / "out", to="safetensors")
    api.quantize(tmp_path / "out", tmp_path / "again.hfq", warn=lambda line: None)
    with Reader(tiny_artifact) as one, Reader(tmp_path / "again.hfq") as two:
        assert one.index_raw == two.index_raw
        for name in one.tensors:
            assert (one.read(name) == two.read(name)).all(), name
        for key in ("config", "tokenizer", "tokenizer_config", "generation_config"):
            assert one.metadata[key] == two.metadata[key]


@pytest.mark.parametrize("draft", ["split", "keep"])
def test_a_part_of_a_model_comes_back_as_far_as_it_is_there(tmp_path: Path, draft: str) -> None:
    file = tmp_path / "x.hfq"
    found: dict[str, Held] = {}
    source = {name: Held(*t) for name, t in models.mini_tensors().items()}
    models.run(models.mini(tmp_path / "m"), file, draft=draft)
    for number, part in enumerate((file, draft_of(file))[: 2 - (draft == "keep")]):
        out = tmp_path / f"{number}"
        api.export(part, out, to="safetensors")
        found |= read(out)
    dense = {"layers.0.attn.wq_a", "mtp.0.attn.wkv"}
    assert found.keys() == source.keys() - {f"{name}.scale" for name in dense}
    for name in found.keys() - {f"{name}.weight" for name in dense}:
        assert found[name] == source[name], name


def test_fp4_where_a_checkpoint_has_none_is_refused(small_artifact: Path) -> None:
    with Reader(small_artifact) as reader:
        entry = reader.entry("layers.0.ffn.experts.0.w1.weight")
    check_refused(
        ExportError,
        lambda: _convert_of(replace(entry, name="layers.0.attn.wq_a.weight"), "x.hfq", True),
        tensor="layers.0.attn.wq_a.weight",
        says=["HFP4G32", "--only experts"],
    )


def test_shards_follow_the_layers_and_the_index_says_where_all_is(
    random_artifact: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = api.export(random_artifact, out, to="safetensors")
    files = {path.name: path.stat().st_size for path in out.iterdir()}
    assert {file.name: file.nbytes for file in done.plan.files} == files
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    assert shards == [f"model-{n:05}-of-00007.safetensors" for n in range(1, 8)]
    assert set(files) - set(shards) == {"config.json", "model.safetensors.index.json"}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    held = {name: shard for shard in shards for name in read(out / shard)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(len(h.data) for h in read(out).values())
    for name, shard in held.items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
        assert shard == shards[layer + 1]


def test_threads_and_runs_change_nothing(small_artifact: Path, tmp_path: Path) -> None:
    for number, threads in enumerate((1, 4)):
        out = tmp_path / str(number)
        api.export(small_artifact, out, to="safetensors", threads=threads)
    assert models.digests_below(tmp_path / "0") == models.digests_below(tmp_path / "1")


def test_each_tensor_lies_at_a_multiple_of_its_element(tiny_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.safetensors"
    api.export(tiny_artifact, out, to="safetensors")
    raw = out.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    assert start % 8 == 0
    widths = {"I64": 8, "F32": 4, "BF16": 2}
    header = json.loads(raw[8:start])
    del header["__metadata__"]
    assert {e["dtype"] for e in header.values()} >= widths.keys()
    for entry in header.values():
        assert entry["data_offsets"][0] % widths.get(entry["dtype"], 1) == 0


@pytest.mark.parametrize("recipe", ["rocmfp4", "mix2"])
def test_an_expert_that_was_encoded_again_is_refused(
    small_source: Path, tmp_path: Path, recipe: str
) -> None:
    file = small.artifact(small_source, tmp_path / "x.hfq", recipe)
    check_refused(
        ExportError,
        lambda: api.export(file, tmp_path / "out", to="safetensors", only_experts=True),
        path=file,
        tensor="layers.0.ffn.experts.0.w1.weight",
        says=["does not hold the checkpoint's bytes", "keeps experts as they are"],
    )
    with Reader(file) as reader:
        assert (recipe == "mix2") == any(e.type_id == RAW.id for e in reader.tensors.values())
    assert not (tmp_path / "out").exists()


def test_rounded_dense_tensors_are_refused_and_can_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "x.hfq"
    api.quantize(TINY, file, recipe="fp4-q8", warn=lambda line: None)
    check_refused(
        ExportError,
        lambda: api.export(file, tmp_path / "out", to="safetensors"),
        path=file,
        tensor="embed.weight",
        says=["Q8F16", "--only experts"],
    )
    done = api.export(file, tmp_path / "out", to="safetensors", only_experts=True)
    assert done.plan.left_out == {"not an expert's": 114}
    assert read(tmp_path / "out") == experts(source_tensors(TINY))


@pytest.mark.parametrize("recipe", ["mix", "budget"])
def test_what_would_be_refused_as_well_is_not_advised(tmp_path: Path, recipe: str) -> None:
    file, out = tmp_path / "x.hfq", tmp_path / "out"
    options: dict[str, Any] = {"target_bpw": 3.0} if recipe == "budget" else {}
    api.quantize(TINY, file, recipe=recipe, warn=lambda line: None, **options)
    with pytest.raises(ExportError, match="does not hold") as refused:
        api.export(file, out, to="safetensors")
    assert refused.value.tensor == "embed.weight"
    assert "--only experts" not in str(refused.value)
    with pytest.raises(ExportError, match="does not hold"):
        api.export(file, out, to="safetensors", only_experts=True)


def test_an_artifact_without_experts_has_none_to_export(tmp_path: Path) -> None:
    file = tmp_path / "x.hfq"
    api.quantize(TINY, file, exclude=["layers."], warn=lambda line: None)
    check_refused(
        ExportError,
        lambda: api.export(file, tmp_path / "out", to="safetensors", only_experts=True),
        says=["no tensor to export"],
    )
