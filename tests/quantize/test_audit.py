"""The audit: sound models pass, and each fault is one line that names its tensor."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.quantize.audit import Audit, audit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.deepseek4 import Role
from ds4q.quantize.errors import (
    ConfigError,
    MissingTensorError,
    ScalePairError,
    ScaleValueError,
    SourceError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
    UnsupportedModelError,
)
from tests.quantize.builders import (
    RANDOM,
    TINY,
    Entry,
    Listing,
    config_of,
    header_text,
    listing_of,
    shard_bytes,
    write_model,
)

W1 = "layers.1.ffn.experts.3.w1.weight"
S1 = "layers.1.ffn.experts.3.w1.scale"
WQ_B = "layers.1.attn.wq_b.weight"
WQ_B_SCALE = "layers.1.attn.wq_b.scale"
TID = "layers.0.ffn.gate.tid2eid"


def judge(path: Path, *, allow_partial: bool = False) -> Audit:
    with Checkpoint.open(path, allow_partial=allow_partial) as checkpoint:
        return audit(checkpoint, allow_partial=allow_partial)


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """A sparse copy of ds4-tiny (or another) with some entries replaced, None removing them."""

    def build(
        edits: dict[str, Entry | None] | None = None,
        *,
        source: Path = TINY,
        config: dict[str, Any] | None = None,
    ) -> Path:
        listing: Listing = {
            name: entry
            for name, entry in (listing_of(source) | (edits or {})).items()
            if entry is not None
        }
        whole = config_of(source) | (config or {})
        return write_model(tmp_path / "model", listing, whole)

    return build


# ---------------------------------------------------------------- sound models


def test_tiny_model_is_sound() -> None:
    found = judge(TINY)
    assert Counter(unit.kind for unit in found.units) == {
        "fp4": 192,
        "bf16": 40,
        "f32": 39,
        "fp8": 34,
        "i64": 1,
    }
    assert [u.name for u in found.units] == sorted(u.name for u in found.units)
    assert sum(1 if u.scale is None else 2 for u in found.units) == 532
    assert (found.missing, found.missing_keys, found.extra, found.warnings) == ([], [], [], [])
    assert (found.partial, found.draft, found.stages) == (False, None, 0)


def test_random_model_has_a_draft_of_three_stages() -> None:
    found = judge(RANDOM)
    assert (found.draft, found.stages, found.partial) == ("dspark", 3, False)
    assert sum(1 if u.scale is None else 2 for u in found.units) == 1171
    assert {u.info.part for u in found.units} == {"trunk", "dspark"}


def test_units_pair_weight_and_scale_and_count_elements() -> None:
    units = {unit.name: unit for unit in judge(TINY).units}
    unit = units[W1]
    assert unit.scale is not None
    assert (unit.weight.name, unit.scale.name) == (W1, S1)
    assert (unit.info.role, unit.info.layer) == (Role.EXPERT, 1)
    assert (unit.info.expert, unit.info.projection) == (3, "w1")
    assert unit.weight.shape == (256, 128)
    assert unit.info.logical_shape == (256, 256)
    assert units[TID].info.logical_shape == (512, 4)
    assert units["norm.weight"].scale is None


def test_prefix_on_every_name_is_legal(tmp_path: Path) -> None:
    listing = {"model." + name: entry for name, entry in listing_of(TINY).items()}
    found = judge(write_model(tmp_path / "m", listing, config_of(TINY)))
    assert [u.name for u in found.units] == [u.name for u in judge(TINY).units]


@pytest.mark.parametrize("allow_partial", [False, True])
def test_pruned_experts_are_sound_when_all_agree(
    model: Callable[..., Path], allow_partial: bool
) -> None:
    edits: dict[str, Entry | None] = {
        name: None for name in listing_of(TINY) if re.search(r"\.experts\.1\d\.", name)
    }
    for layer in range(4):
        edits[f"layers.{layer}.ffn.gate.weight"] = ("BF16", (10, 256))
        if layer:
            edits[f"layers.{layer}.ffn.gate.bias"] = ("F32", (10,))
    found = judge(model(edits, config={"n_routed_experts": 10}), allow_partial=allow_partial)
    assert sum(u.kind == "fp4" for u in found.units) == 4 * 10 * 3
    assert not found.partial


def test_experts_may_be_stored_as_fp4(model: Callable[..., Path]) -> None:
    found = judge(model({W1: ("F4", (256, 256))}))
    unit = next(u for u in found.units if u.name == W1)
    assert (unit.kind, unit.info.logical_shape) == ("fp4", (256, 256))


def test_hash_table_may_be_int32(model: Callable[..., Path]) -> None:
    found = judge(model({TID: ("I32", (512, 4))}))
    assert next(u for u in found.units if u.name == TID).kind == "i32"


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_plain_floats_may_stand_for_fp8_and_are_mentioned(
    model: Callable[..., Path], dtype: str
) -> None:
    found = judge(model({WQ_B: (dtype, (512, 128)), WQ_B_SCALE: None}))
    unit = next(u for u in found.units if u.name == WQ_B)
    assert (unit.kind, unit.scale) == (dtype.lower(), None)
    assert [w for w in found.warnings if WQ_B in w and "where the release has fp8" in w]


@pytest.mark.parametrize("suffix", [".scale", ".weight_scale_inv"])
@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8"])
def test_dense_scales_have_two_spellings(
    model: Callable[..., Path], dtype: str, suffix: str
) -> None:
    name = WQ_B.removesuffix(".weight") + suffix
    found = judge(model({WQ_B_SCALE: None, name: (dtype, (4, 1))}))
    unit = next(u for u in found.units if u.name == WQ_B)
    assert unit.scale is not None
    assert (unit.scale.name, unit.scale.dtype) == (name, dtype)


def test_pro_is_said_to_be_untested(model: Callable[..., Path]) -> None:
    listing = {"norm.weight": ("BF16", (7168,))}
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
    }
    folder = write_model(model().parent / "pro", listing, config)
    assert any("Pro" in text for text in judge(folder, allow_partial=True).warnings)


def test_described_but_absent_draft_is_mentioned(model: Callable[..., Path]) -> None:
    names = [name for name in listing_of(RANDOM) if name.startswith("mtp.")]
    found = judge(model(dict.fromkeys(names), source=RANDOM))
    assert (found.draft, found.partial) == (None, False)
    assert any("no mtp.* tensors" in text for text in found.warnings)


# ---------------------------------------------------------------- config


def test_other_model_is_refused_before_its_tensors(tmp_path: Path) -> None:
    config = config_of(TINY) | {"model_type": "deepseek_v41"}
    folder = write_model(tmp_path / "m", {"x.engram.w": ("U8", (4,))}, config)
    for allow_partial in (False, True):
        with pytest.raises(UnsupportedModelError, match=r"config\.json: model_type.*deepseek_v41"):
            judge(folder, allow_partial=allow_partial)


def test_dspark_draft_needs_its_keys(model: Callable[..., Path]) -> None:
    folder = model(source=RANDOM)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("dspark_noise_token_id", "other"))
    with pytest.raises(ConfigError, match="dspark_noise_token_id"):
        judge(folder)
    assert judge(folder, allow_partial=True).draft == "dspark"


def test_checkpoint_opened_as_a_part_is_still_audited_as_a_whole(cases_dir: Path) -> None:
    with (
        Checkpoint.open(cases_dir / "c06_nibble.safetensors", allow_partial=True) as checkpoint,
        pytest.raises(ConfigError, match="model_type"),
    ):
        audit(checkpoint)


# ---------------------------------------------------------------- names


def test_unknown_tensor_is_never_dropped(model: Callable[..., Path]) -> None:
    folder = model({"layers.1.attn.rotary.inv_freq": ("F32", (32,))})
    for allow_partial in (False, True):
        with pytest.raises(UnexpectedTensorError, match=r"model-.*layers\.1\.attn\.rotary"):
            judge(folder, allow_partial=allow_partial)


def test_unknown_integers_are_skipped_and_listed(model: Callable[..., Path]) -> None:
    found = judge(model({"step": ("I64", (1,))}))
    assert [t.name for t in found.extra] == ["step"]
    assert any(text.startswith("step is skipped") for text in found.warnings)
    assert not found.partial


def test_tensor_that_the_config_rules_out_is_refused(model: Callable[..., Path]) -> None:
    folder = model({"layers.0.ffn.gate.bias": ("F32", (16,))})
    with pytest.raises(UnexpectedTensorError, match=r"layers\.0\.ffn\.gate\.bias.*token hash"):
        judge(folder, allow_partial=True)


def test_mixed_prefixes_are_refused(model: Callable[..., Path]) -> None:
    folder = model({W1: None, "model." + W1: ("I8", (256, 128))})
    with pytest.raises(UnexpectedTensorError, match=f"model.{W1}: some names begin with 'model.'"):
        judge(folder)


def test_stacked_experts_are_recognised_by_name(tmp_path: Path) -> None:
    listing: Listing = {
        "model.embed_tokens.weight": ("BF16", (512, 256)),
        "model.layers.0.mlp.experts.gate_up_proj": ("BF16", (16, 512, 256)),
        "lm_head.weight": ("BF16", (512, 256)),
    }
    folder = write_model(tmp_path / "m", listing, config_of(TINY))
    for allow_partial in (False, True):
        with pytest.raises(UnsupportedModelError, match=r"as transformers saves them.*; use the"):
            judge(folder, allow_partial=allow_partial)


@pytest.mark.parametrize("name", ["layers.0.engram.table", "mtp.2.markov_head.head.weight"])
def test_tensors_of_v41_are_recognised(model: Callable[..., Path], name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name}: a tensor of DeepSeek-V4.1"):
        judge(model({name: ("I64", (8,))}))


# ---------------------------------------------------------------- missing


def test_missing_tensors_are_listed_and_counted(model: Callable[..., Path]) -> None:
    gone = [f"layers.1.ffn.experts.{e}.w2.{s}" for e in range(16) for s in ("weight", "scale")]
    folder = model({"norm.weight": None, **dict.fromkeys(gone)})
    with pytest.raises(MissingTensorError) as caught:
        judge(folder)
    assert caught.value.tensor == "norm.weight"
    assert "17 in all" in str(caught.value)
    assert str(caught.value).count("layers.1.ffn.experts.") == 4
    found = judge(folder, allow_partial=True)
    assert found.partial
    assert found.missing == ["norm.weight", *(n for n in gone if n.endswith("weight"))]


def test_one_missing_tensor_is_named(model: Callable[..., Path]) -> None:
    with pytest.raises(MissingTensorError, match=r"head\.weight: tensor is missing, 1 in all; "):
        judge(model({"head.weight": None}))


def test_lost_stage_of_a_draft_is_missed(model: Callable[..., Path]) -> None:
    names = [name for name in listing_of(RANDOM) if name.startswith("mtp.2.")]
    with pytest.raises(MissingTensorError, match=r"mtp\.1\.norm\.weight"):
        judge(model(dict.fromkeys(names), source=RANDOM))


def test_part_of_a_layer_is_accepted_as_a_part(cases_dir: Path) -> None:
    found = judge(cases_dir / "good", allow_partial=True)
    assert found.partial
    assert Counter(unit.kind for unit in found.units) == {"fp4": 6, "fp8": 1, "bf16": 1}
    assert "hidden_size" in found.missing_keys
    assert "layers.0.ffn.gate.weight" in found.missing
    assert any("(128, 128)" in text for text in found.warnings)
    with pytest.raises(ConfigError, match="required key is missing"):
        judge(cases_dir / "good")


def test_absent_config_key_makes_a_part(model: Callable[..., Path]) -> None:
    folder = model()
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("rms_norm_eps", "other"))
    found = judge(folder, allow_partial=True)
    assert (found.partial, found.missing, found.missing_keys) == (True, [], ["rms_norm_eps"])


def test_whole_model_is_not_partial_even_if_allowed() -> None:
    assert not judge(TINY, allow_partial=True).partial


def test_part_must_be_sound_where_the_config_speaks(cases_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cases_dir / "good", tmp_path / "good"))
    (folder / "config.json").write_text('{"model_type":"deepseek_v4","n_routed_experts":1}')
    with pytest.raises(UnexpectedTensorError, match=r"experts\.1\.w1.*the config has 1 experts"):
        judge(folder, allow_partial=True)
    (folder / "config.json").write_text('{"model_type":"deepseek_v4","moe_intermediate_size":8}')
    with pytest.raises(TensorShapeError, match=r"w1\.weight.*expected \[8, any\]"):
        judge(folder, allow_partial=True)


# ---------------------------------------------------------------- pairs


@pytest.mark.parametrize("name", [S1, WQ_B_SCALE])
@pytest.mark.parametrize("allow_partial", [False, True])
def test_weight_without_its_scale(
    model: Callable[..., Path], name: str, allow_partial: bool
) -> None:
    weight = name.replace("scale", "weight")
    with pytest.raises(ScalePairError, match=f"{weight}: .* weight without its scale"):
        judge(model({name: None}), allow_partial=allow_partial)


@pytest.mark.parametrize("name", [W1, WQ_B])
@pytest.mark.parametrize("allow_partial", [False, True])
def test_scale_without_its_weight(
    model: Callable[..., Path], name: str, allow_partial: bool
) -> None:
    scale = name.replace("weight", "scale")
    with pytest.raises(ScalePairError, match=f"{scale}: scale without its weight"):
        judge(model({name: None}), allow_partial=allow_partial)


def test_two_scales_for_one_weight(model: Callable[..., Path]) -> None:
    name = WQ_B.removesuffix("weight") + "weight_scale_inv"
    with pytest.raises(ScalePairError, match=f"{name}: two scales.*found {WQ_B_SCALE}"):
        judge(model({name: ("F8_E8M0", (4, 1))}))


def test_scale_beside_a_plain_weight(model: Callable[..., Path]) -> None:
    with pytest.raises(ScalePairError, match=f"{WQ_B_SCALE}: scale beside .* BF16"):
        judge(model({WQ_B: ("BF16", (512, 128))}))


def test_scale_of_an_unknown_tensor(model: Callable[..., Path]) -> None:
    with pytest.raises(UnexpectedTensorError, match=r"layers\.1\.attn\.wx\.scale"):
        judge(model({"layers.1.attn.wx.scale": ("F8_E8M0", (4, 1))}))


def test_expert_scale_has_one_spelling(model: Callable[..., Path]) -> None:
    name = W1.removesuffix("weight") + "weight_scale_inv"
    with pytest.raises(ScalePairError, match=f"{name}: scale of an expert must be named .scale"):
        judge(model({S1: None, name: ("F8_E8M0", (256, 8))}))


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "U8"])
def test_experts_that_are_not_fp4_are_refused(model: Callable[..., Path], dtype: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{W1}: experts are not packed FP4.*{dtype}"):
        judge(model({W1: (dtype, (256, 256))}), allow_partial=True)


@pytest.mark.parametrize(
    ("name", "entry", "words"),
    [
        (S1, ("U8", (256, 8)), "expected F8_E8M0, found U8"),
        (S1, ("F32", (256, 8)), "expected F8_E8M0, found F32"),
        (WQ_B, ("F8_E5M2", (512, 128)), "found F8_E5M2"),
        (WQ_B, ("F8_E4M3FNUZ", (512, 128)), "found F8_E4M3FNUZ"),
        (WQ_B, ("I8", (512, 128)), "found I8"),
        (WQ_B_SCALE, ("BF16", (4, 1)), "F8_E8M0 or U8 or F32, found BF16"),
        (TID, ("F32", (512, 4)), "expected I64 or I32, found F32"),
        ("norm.weight", ("F64", (256,)), "expected BF16 or F16 or F32, found F64"),
        ("layers.1.ffn.gate.bias", ("I64", (16,)), "found I64"),
    ],
)
def test_dtype_that_a_tensor_cannot_have(
    model: Callable[..., Path], name: str, entry: Entry, words: str
) -> None:
    with pytest.raises(TensorDtypeError, match=f"{name}: dtype does not fit.*{words}"):
        judge(model({name: entry}))


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("name", "entry", "words"),
    [
        (W1, ("I8", (128, 256)), r"expected \[256, 256\], found \[128, 512\]"),
        (W1, ("I8", (256, 256)), r"found \[256, 512\] \(I8 \[256, 256\]\)"),
        (W1, ("F4", (256, 128)), r"found \[256, 128\]"),
        (W1, ("I8", (256, 128, 1)), r"found \[256, 128, 1\]"),
        (W1, ("I8", (32768,)), r"found \[32768\]"),
        (S1, ("F8_E8M0", (8, 256)), r"scale grid.*expected \[256, 8\], found \[8, 256\]"),
        (S1, ("F8_E8M0", (2048,)), r"found \[2048\]"),
        (WQ_B, ("F8_E4M3", (128, 512)), r"expected \[512, 128\]"),
        (WQ_B_SCALE, ("F8_E8M0", (1, 4)), r"scale grid.*expected \[4, 1\], found \[1, 4\]"),
        (WQ_B_SCALE, ("F8_E8M0", (512, 4)), r"expected \[4, 1\]"),
        (TID, ("I64", (512, 6)), r"expected \[512, 4\]"),
        ("norm.weight", ("BF16", (1, 256)), r"expected \[256\]"),
        ("layers.1.attn.attn_sink", ("F32", ()), r"expected \[4\], found \[\]"),
    ],
)
def test_shape_that_the_config_contradicts(
    model: Callable[..., Path], name: str, entry: Entry, words: str
) -> None:
    with pytest.raises(TensorShapeError, match=f"{name}: .*{words}"):
        judge(model({name: entry}))


def test_block_size_comes_from_the_config(model: Callable[..., Path]) -> None:
    listing = listing_of(TINY)
    config = config_of(TINY)["quantization_config"] | {"weight_block_size": [64, 32]}
    edits: dict[str, Entry | None] = {}
    for name, (dtype, shape) in listing.items():
        if dtype == "F8_E4M3":
            grid = (shape[0] // 64, shape[1] // 32)
            edits[name.replace("weight", "scale")] = ("F8_E8M0", grid)
    found = judge(model(edits, config={"quantization_config": config}))
    assert found.dims.fp8_block == (64, 32)
    edits[WQ_B_SCALE] = ("F8_E8M0", (4, 1))
    with pytest.raises(TensorShapeError, match=r"expected \[8, 4\], found \[4, 1\]"):
        judge(model(edits, config={"quantization_config": config}))


def test_grid_is_rounded_up_for_the_last_block_only(cases_dir: Path) -> None:
    found = judge(cases_dir / "c07_fp8_200x300.safetensors", allow_partial=True)
    assert found.units[0].kind == "fp8"
    with pytest.raises(TensorShapeError, match=r"wq_a\.scale.*expected \[2, 3\], found \[3, 2\]"):
        judge(cases_dir / "c07_fp8_grid_3x2.safetensors", allow_partial=True)


@pytest.mark.parametrize("cols", [32, 64, 192, 288, 704, 2304])
def test_row_length_in_whole_blocks_is_sound(cases_dir: Path, cols: int) -> None:
    found = judge(cases_dir / f"c11_K{cols}.safetensors", allow_partial=True)
    assert found.units[0].info.logical_shape == (3, cols)


def test_row_length_of_half_a_block_is_refused(cases_dir: Path) -> None:
    with pytest.raises(TensorShapeError, match=r"w1\.weight.*multiple of 32: found 48"):
        judge(cases_dir / "c11_K48.safetensors", allow_partial=True)


def test_empty_tensor_is_refused(tmp_path: Path) -> None:
    listing: Listing = {"layers.0.attn.wkv.weight": ("BF16", (0, 8))}
    folder = write_model(tmp_path / "m", listing, None)
    with pytest.raises(TensorShapeError, match=r"found \[0, 8\]"):
        judge(folder, allow_partial=True)


# ---------------------------------------------------------------- F32 scales


def f32_scaled(tmp_path: Path, scales: list[list[float]]) -> Path:
    values = np.array(scales, "<f4")
    rows, cols = 128 * values.shape[0], 128 * values.shape[1]
    listing: Listing = {
        "layers.0.attn.wq_a.weight": ("F8_E4M3", (rows, cols)),
        "layers.0.attn.wq_a.weight_scale_inv": ("F32", values.shape),
    }
    path = tmp_path / "f.safetensors"
    path.write_bytes(shard_bytes(header_text(listing), bytes(rows * cols) + values.tobytes()))
    return path


def test_positive_f32_scales_are_sound(tmp_path: Path) -> None:
    found = judge(f32_scaled(tmp_path, [[0.5, 2.0**-100], [3.0, 1e-40]]), allow_partial=True)
    assert found.units[0].scale is not None
    assert found.units[0].scale.dtype == "F32"


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, float("inf"), float("nan")])
def test_impossible_f32_scale_is_refused_with_its_place(tmp_path: Path, bad: float) -> None:
    path = f32_scaled(tmp_path, [[1.0, 2.0, 4.0], [1.0, bad, bad]])
    with pytest.raises(ScaleValueError, match=rf"weight_scale_inv: .*found {bad} at \[1, 1\]"):
        judge(path, allow_partial=True)


# ---------------------------------------------------------------- every case file


def test_no_case_file_gives_anything_but_a_verdict(cases_dir: Path) -> None:
    sound, verdicts = set(), []
    paths = [*cases_dir.glob("*.safetensors"), *(p for p in cases_dir.iterdir() if p.is_dir())]
    for path in paths:
        try:
            judge(path, allow_partial=True)
        except SourceError as error:
            verdicts.append((path, str(error)))
        else:
            sound.add(path.name.removesuffix(".safetensors"))
    assert [text for path, text in verdicts if str(path) not in text or "\n" in text] == []
    assert sound == {
        "good",
        "c04_full",
        "c05_wrong_total",
        "c06_nibble",
        "c07_scale2x2",
        "c07_fp8_200x300",
        "c08_scale120",
        "c09_edge_scales",
        "c09_scale_nan",  # a NaN scale byte is refused where the block is packed
        *(f"c11_K{cols}" for cols in (32, 64, 192, 288, 704, 2304)),
    }
