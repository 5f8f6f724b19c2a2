"""GGUF files as gguf-py reads them: each tensor's bytes, each key, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q import api
from ds4q.artifact.codings import Codings
from ds4q.artifact.formats import codec_for, hfp4g32
from ds4q.artifact.hfq import Reader
from ds4q.artifact.mixfiles import read_gumix, read_p4mix
from ds4q.artifact.tables import expert_of
from ds4q.artifact.types import HFP4G32, RAW, TIDI32, TYPES
from ds4q.quantize.errors import ConfigError
from ds4q.quantize.export.gguf import _tensor
from ds4q.quantize.export.keys import mix_keys
from ds4q.quantize.export.names import gguf_name
from ds4q.quantize.export.plan import ExportError
from tests.checks import check_refused
from tests.quantize import models, routed
from tests.quantize.builders import RANDOM, TINY, config_of
from tests.quantize.export import small
from tests.quantize.export.gguf_files import Gguf

NAMES = {"F16": "F16", "F32": "F32", "BF16": "BF16", "Q8F16": "Q8_0", "TidI32": "I32"}


def ours(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What a GGUF file of this artifact must hold: type, shape and bytes of each tensor."""
    stacked: dict[str, dict[int, tuple[str, tuple[int, ...], bytes]]] = {}
    with Reader(file) as reader:
        for entry in reader.tensors.values():
            name = gguf_name(entry.name)
            if name is None:
                assert entry.type_id == RAW.id or entry.name.startswith("mtp.")
                continue
            kind, payload = TYPES[entry.type_id], reader.read(entry.name)
            if kind is HFP4G32:
                payload = mxfp4(payload.reshape(entry.shape[0], -1))
            place = expert_of(entry.name)
            word = "MXFP4" if kind is HFP4G32 else NAMES.get(kind.name, kind.name)
            expert = -1 if place is None else place[1]
            held = stacked.setdefault(name, {})
            assert expert not in held
            held[expert] = word, entry.shape, payload.tobytes()
    found = {}
    for name, held in stacked.items():
        word, shape, _ = held[min(held)]
        if -1 not in held:
            shape = (len(held), *shape)
        found[name] = word, shape, b"".join(held[expert][2] for expert in sorted(held))
    return found


def mxfp4(rows: Any) -> Any:
    """Blocks of GGML, made code by code from the values' columns."""
    codes, scales = hfp4g32.unpack(rows)
    columns = np.stack((codes & 15, codes >> 4), axis=2).reshape(*scales.shape, 32)
    packed = columns[..., :16] | columns[..., 16:] << 4
    return np.concatenate((scales[..., None], packed), axis=2)


def check_tensors(found: Gguf, file: Path, *, only: str = "") -> None:
    wanted = {name: held for name, held in ours(file).items() if only in name}
    assert found.types == {name: held[0] for name, held in wanted.items()}
    assert found.shapes == {name: held[1] for name, held in wanted.items()}
    for name, (_, _, data) in wanted.items():
        assert found.data[name] == data, name
    assert all(offset % 32 == 0 for offset in found.offsets.values())


@pytest.mark.parametrize("model", ["tiny", "random"])
def test_every_tensor_of_a_lossless_artifact(
    model: str, tiny_artifact: Path, random_artifact: Path, tmp_path: Path
) -> None:
    file = {"tiny": tiny_artifact, "random": random_artifact}[model]
    out = tmp_path / "x.gguf"
    done = api.export(file, out, to="gguf", threads=2)
    found = Gguf(out)
    check_tensors(found, file)
    assert set(found.types.values()) == {"MXFP4", "BF16", "F32", "I32"}
    layers = config_of(RANDOM if model == "random" else TINY)["num_hidden_layers"]
    assert [name for name, kind in found.types.items() if kind == "MXFP4"] == [
        f"blk.{n}.ffn_{part}_exps.weight" for n in range(layers) for part in ("down", "gate", "up")
    ]
    assert done.plan.nbytes == out.stat().st_size
    assert not done.plan.left_out


@pytest.mark.parametrize("recipe", ["fp4", "fp4-q8"])
def test_gguf_py_decodes_the_values_that_the_artifact_has(recipe: str, tmp_path: Path) -> None:
    file, out = tmp_path / "x.hfq", tmp_path / "x.gguf"
    api.quantize(TINY, file, recipe=recipe, warn=lambda line: None)
    api.export(file, out, to="gguf")
    found = Gguf(out)
    decoded = {name: found.values(name) for name, kind in found.types.items() if kind != "I32"}
    with Reader(file) as reader:
        for entry in reader.tensors.values():
            if entry.type_id == TIDI32.id:
                continue
            name, place = str(gguf_name(entry.name)), expert_of(entry.name)
            values = decoded[name]
            expected = codec_for(entry.type_id).decode(reader.read(entry.name), entry.shape)
            # As values: of code 8, which is -0, gguf-py makes +0.
            assert np.array_equal(values if place is None else values[place[1]], expected), name


def test_a_draft_in_the_file_is_left_out_and_told(tmp_path: Path) -> None:
    file, out = tmp_path / "x.hfq", tmp_path / "x.gguf"
    api.quantize(RANDOM, file, draft="keep", warn=lambda line: None)
    done = api.export(file, out, to="gguf")
    check_tensors(Gguf(out), file)
    ((why, count),) = done.plan.left_out.items()
    with Reader(file) as reader:
        assert count == sum(name.startswith("mtp.") for name in reader.tensors) > 0
    assert "draft" in why


def test_dense_tensors_of_eight_bits(tmp_path: Path) -> None:
    file, out = tmp_path / "x.hfq", tmp_path / "x.gguf"
    api.quantize(TINY, file, recipe="fp4-q8", warn=lambda line: None)
    api.export(file, out, to="gguf")
    found = Gguf(out)
    check_tensors(found, file)
    assert set(found.types.values()) == {"MXFP4", "Q8_0", "F16", "I32"}


def test_keys_say_what_the_config_says(tiny_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    done = api.export(tiny_artifact, out, to="gguf")
    keys, config = Gguf(out).keys, config_of(TINY)
    told = {name: keys.pop(name) for name in list(keys) if name.startswith("tokenizer.")}
    assert told["tokenizer.ggml.model"] == "gpt2"
    assert len(told["tokenizer.ggml.tokens"]) == config["vocab_size"]
    assert told["tokenizer.ggml.tokens"][256] == "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    assert "tokenizer.ggml.pre" in done.warnings[0]
    rope = config["rope_scaling"]
    expected: dict[str, Any] = {
        "general.alignment": 32,
        "general.architecture": "deepseek4",
        "general.quantization_version": 2,
    } | {
        f"deepseek4.{name}": value
        for name, value in {
            "block_count": 4,
            "context_length": config["max_position_embeddings"],
            "embedding_length": 256,
            "vocab_size": 512,
            "attention.head_count": 4,
            "attention.head_count_kv": 1,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "attention.q_lora_rank": 128,
            "attention.output_lora_rank": 128,
            "attention.output_group_count": 2,
            "attention.sliding_window": 64,
            "attention.compress_ratios": [0, 4, 128, 4],
            "attention.compress_rope_freq_base": 160000,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.indexer.head_count": 16,
            "attention.indexer.key_length": 128,
            "attention.indexer.top_k": 32,
            "rope.dimension_count": 64,
            "rope.freq_base": 10000,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": 65536,
            "rope.scaling.yarn_beta_fast": 32,
            "rope.scaling.yarn_beta_slow": 1,
            "expert_count": 16,
            "expert_used_count": 4,
            "expert_shared_count": 1,
            "expert_feed_forward_length": 256,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_gating_func": 4,
            "hash_layer_count": 1,
            "swiglu_clamp_exp": [10.0] * 4,
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 20,
            "hyper_connection.epsilon": 1e-6,
        }.items()
    }
    assert keys.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, float):
            assert math.isclose(keys[name], value, rel_tol=1e-7), name
        else:
            assert keys[name] == value, name


def test_ratios_of_draft_stages_are_no_layers(random_artifact: Path, tmp_path: Path) -> None:
    done = api.export(random_artifact, tmp_path / "x.gguf", to="gguf")
    keys = Gguf(tmp_path / "x.gguf").keys
    assert keys["deepseek4.attention.compress_ratios"] == [0, 4, 128, 4, 128, 0]
    assert len(keys["deepseek4.swiglu_clamp_exp"]) == 6
    assert keys["tokenizer.ggml.model"] == "none"
    assert any("no tokenizer" in warning for warning in done.warnings)


def test_threads_and_runs_change_nothing(small_artifact: Path, tmp_path: Path) -> None:
    for threads in (1, 4):
        out = tmp_path / f"{threads}.gguf"
        api.export(small_artifact, out, to="gguf", only_experts=True, threads=threads)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "4.gguf").read_bytes()


# ---------------------------------------------------------------- ROCmFPX types

UNIFORM = ["rocmfp4", "rocmfp4-fast", "rocmfp3", "rocmfp8"]
CODED = {
    "rocmfp6-zero": {"fp6_code32": "zero"},
    "rocmfp6-neg32": {"fp6_code32": "neg32"},
    "rocmfp2-affine": {"variant_107": "affine"},
    "rocmfp23": {"variant_107": "dual"},
}


@pytest.mark.parametrize("recipe", [*UNIFORM, *CODED, "mix", "mix2"])
def test_rocmfpx_types_keep_number_and_bytes(
    small_source: Path, tmp_path: Path, recipe: str
) -> None:
    file, out = small.artifact(small_source, tmp_path / "x.hfq", recipe), tmp_path / "x.gguf"
    options: dict[str, Any] = CODED.get(recipe, {})
    done = api.export(file, out, to="gguf", only_experts=True, **options)
    found = Gguf(out)
    check_tensors(found, file, only="_exps")
    assert len(found.types) == small.LAYERS * 3
    with Reader(file) as reader:
        used = {TYPES[e.type_id].name for e in reader.tensors.values()} - {RAW.name}
    assert set(found.types.values()) == used == {written.type for written in done.plan.tensors}
    assert found.keys["deepseek4.mix.experts_only_smoke_artifact"] is True
    assert ("deepseek4.mix.calibration" in found.keys) == recipe.startswith("mix")


@pytest.mark.parametrize("recipe", ["mix", "mix2"])
def test_decode_tables_are_embedded_as_lucebox_reads_them(
    small_source: Path, tmp_path: Path, recipe: str
) -> None:
    file, out = small.artifact(small_source, tmp_path / "x.hfq", recipe), tmp_path / "x.gguf"
    api.export(file, out, to="gguf", only_experts=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.gguf", "x.hfq", "x.hfq.receipt"]
    keys = Gguf(out).keys
    with Reader(file) as reader:
        payloads = {
            entry.name: reader.read(entry.name).tobytes()
            for entry in reader.tensors.values()
            if entry.type_id == RAW.id
        }
        counts = [int(item["count"]) for item in reader.metadata["rocmfpx"]["repairs"]]
    gumix = bytes(keys["deepseek4.gumix.sidecar"])
    tables = read_gumix(gumix, small.LAYERS)
    if recipe == "mix":
        p4mix = bytes(keys["deepseek4.p4mix.sidecar"])
        assert p4mix[:16] == b"P4MIXv1\0" + bytes([small.LAYERS, 0, 0, 0, 0, 0, 0, 0])
        tables += read_p4mix(p4mix, small.LAYERS)
    else:
        assert "deepseek4.p4mix.sidecar" not in keys
    assert {table.name: table.encode() for table in tables} == payloads
    surfaces = [gumix.find(payloads[name]) for name in order(recipe)]
    assert surfaces == sorted(surfaces)
    assert surfaces[0] == 16
    assert keys["deepseek4.mix.calibration"] == "absmax"
    assert keys["deepseek4.mix.lower_quality_absmax_only"] is True
    assert keys["deepseek4.mix.codebook_repair"] == "bf16-epsilon-v1"
    told = [int(line.split()[-2]) for line in keys["deepseek4.mix.codebook_repairs"]]
    assert told == [count for count in counts if count]


def order(recipe: str) -> list[str]:
    """Tables of type 106: layer by layer gate, up, down."""
    parts = ("w1", "w3") if recipe == "mix" else ("w1", "w3", "w2")
    return [
        f"layers.{layer}.ffn.experts.{part}.mix_table"
        for layer in range(small.LAYERS)
        for part in parts
    ]


def test_repaired_levels_are_told(small_source: Path, tmp_path: Path) -> None:
    file = small.artifact(small_source, tmp_path / "x.hfq", "mix2")
    with Reader(file) as reader:
        tables, document = Codings.of(reader).tables, reader.metadata["rocmfpx"]
    document["repairs"][2]["count"] = "0007"
    document["calibration"] = "imatrix"
    keys = mix_keys({"rocmfpx": document}, tables, only_experts=False)
    assert b"blk.0.ffn_up_exps.weight: 7 levels" in keys["deepseek4.mix.codebook_repairs"]
    assert keys["deepseek4.mix.lower_quality_absmax_only"][-1] == 0
    assert keys["deepseek4.mix.experts_only_smoke_artifact"][-1] == 0


@pytest.mark.parametrize(
    ("recipe", "options", "says"),
    [
        ("rocmfp2-affine", {}, ["takes them as affine, give --variant-107 affine", "ROCmFP2"]),
        ("rocmfp2-affine", {"variant_107": "dual"}, ["expected dual", "found affine", "relabel"]),
        ("rocmfp6-neg32", {}, ["give --fp6-code32 neg32"]),
        ("rocmfp6-neg32", {"fp6_code32": "zero"}, ["expected zero, found neg32"]),
        ("rocmfp3", {"variant_107": "dual"}, ["no ROCmFP2 tensor", "leave out --variant-107"]),
        ("rocmfp3", {"fp6_code32": "zero"}, ["no ROCmFP6 tensor", "leave out --fp6-code32"]),
    ],
)
def test_a_variant_is_named_and_must_be_the_artifacts(
    small_source: Path, tmp_path: Path, recipe: str, options: dict[str, Any], says: list[str]
) -> None:
    file = small.artifact(small_source, tmp_path / "x.hfq", recipe)
    check_refused(
        ExportError,
        lambda: api.export(file, tmp_path / "x.gguf", to="gguf", only_experts=True, **options),
        path=file,
        says=says,
    )
    assert not (tmp_path / "x.gguf").exists()


# ---------------------------------------------------------------- refusals

RULES = """
default = "rocmfp4"
[[rule]]
type = "rocmfp3"
layers = 1
part = "down"
"""


def test_a_layer_may_differ_from_layer_to_layer_and_part_to_part(
    small_source: Path, tmp_path: Path
) -> None:
    file, out = small.artifact(small_source, tmp_path / "x.hfq", RULES), tmp_path / "x.gguf"
    api.export(file, out, to="gguf", only_experts=True)
    found = Gguf(out)
    check_tensors(found, file, only="_exps")
    odd = [name for name, kind in found.types.items() if kind != "ROCmFP4"]
    assert odd == ["blk.1.ffn_down_exps.weight"]


def test_experts_of_a_layer_that_differ_in_type_are_refused(
    small_source: Path, tmp_path: Path
) -> None:
    file = small.artifact(small_source, tmp_path / "x.hfq", RULES + "experts = [0, 2]\n")
    check_refused(
        ExportError,
        lambda: api.export(file, tmp_path / "x.gguf", to="gguf", only_experts=True),
        path=file,
        says=["layer 1", "w2", "found 2 ROCmFP3, 1 ROCmFP4", "--recipe budget --per-projection"],
    )


def test_a_budget_by_projection_can_be_exported(small_source: Path, tmp_path: Path) -> None:
    free, file, out = (tmp_path / name for name in ("free.hfq", "x.hfq", "x.gguf"))
    budget: dict[str, Any] = {"recipe": "budget", "target_bpw": 3.0, "variant_107": "affine"}
    models.run(small_source, free, **budget)
    with pytest.raises(ExportError, match=r"layer [01]: .* differ in type"):
        api.export(free, out, to="gguf", only_experts=True, variant_107="affine")
    models.run(small_source, file, **budget, per_projection=True)
    api.export(file, out, to="gguf", only_experts=True, variant_107="affine")
    found = Gguf(out)
    check_tensors(found, file, only="_exps")
    assert len(set(found.types.values())) > 1


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.hfq"
    api.quantize(TINY, file, exclude=["layers.3.attn."], warn=lambda line: None)
    check_refused(
        ExportError,
        lambda: api.export(file, tmp_path / "x.gguf", to="gguf"),
        path=file,
        says=["only a part of a model", "--only experts"],
    )
    api.export(file, tmp_path / "x.gguf", to="gguf", only_experts=True)
    check_tensors(Gguf(tmp_path / "x.gguf"), file, only="_exps")


def test_what_would_be_refused_as_well_is_not_advised(small_source: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.hfq"
    models.run(small_source, file, recipe="budget", target_bpw=3.0, variant_107="affine")
    with pytest.raises(ExportError, match="only a part of a model") as refused:
        api.export(file, tmp_path / "x.gguf", to="gguf", variant_107="affine")
    assert "--only experts" not in str(refused.value)
    with pytest.raises(ExportError, match="differ in type"):
        api.export(file, tmp_path / "x.gguf", to="gguf", only_experts=True, variant_107="affine")


def test_experts_that_are_not_all_there_are_refused(tmp_path: Path) -> None:
    without = ("layers.1.ffn.experts.0.w2", "layers.1.ffn.experts.2.w2")
    source = small.write(tmp_path / "m", without=without)
    file = small.artifact(source, tmp_path / "x.hfq")
    check_refused(
        ExportError,
        lambda: api.export(file, tmp_path / "x.gguf", to="gguf", only_experts=True),
        path=file,
        tensor="layers.1.ffn.experts.w2.weight",
        says=["layer 1 lacks 2 of 3 experts, 0 for one"],
    )


def test_a_config_that_lacks_keys_is_refused(tmp_path: Path) -> None:
    file = small.artifact(routed.write(tmp_path / "m"), tmp_path / "x.hfq")
    check_refused(
        ConfigError,
        lambda: api.export(file, tmp_path / "x.gguf", to="gguf", only_experts=True),
        path=file,
        says=["required key is missing"],
    )


def test_a_draft_is_refused(random_artifact: Path, tmp_path: Path) -> None:
    file = random_artifact.with_name("ds4-random-dspark.hfq")
    check_refused(
        ExportError,
        lambda: api.export(file, tmp_path / "x.gguf", to="gguf"),
        path=file,
        says=["draft part of a model"],
    )


def test_a_row_that_is_no_whole_block_is_refused(tiny_artifact: Path) -> None:
    with Reader(tiny_artifact) as reader:
        entry = reader.entry("layers.0.ffn.gate.weight")
    odd = replace(entry, type_id=3, shape=(16, 40))
    check_refused(
        ExportError,
        lambda: _tensor(odd, "blk.0.ffn_gate_inp.weight", "x.hfq"),
        tensor=entry.name,
        says=["Q8_0", "multiple of 32", "[16, 40]"],
    )
    check_refused(
        ExportError,
        lambda: _tensor(replace(entry, type_id=24), "a", "x.hfq"),
        tensor=entry.name,
        says=["no type for MFP4G32"],
    )
