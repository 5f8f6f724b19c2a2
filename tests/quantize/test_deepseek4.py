"""Names, roles and the inventory: counted against the published tensor and byte totals."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import pytest

from ds4q.quantize.config import check_config
from ds4q.quantize.deepseek4 import (
    Draft,
    Inventory,
    Role,
    Storage,
    TensorInfo,
    classify,
    find_draft,
    refuse_foreign,
    weight_of_scale,
)
from ds4q.quantize.errors import ConfigError, UnexpectedTensorError, UnsupportedModelError
from tests.quantize.builders import FLASH, RANDOM, TINY, config_of, listing_of

PREVIEW = {k: v for k, v in FLASH.items() if not k.startswith("dspark")} | {
    "compress_ratios": FLASH["compress_ratios"][:44]
}
BYTES = {Storage.BF16: 2, Storage.F32: 4, Storage.INTEGER: 8}


def weigh(inventory: Inventory, keep: str = "") -> tuple[int, int]:
    """Tensors, scales counted, and bytes of the required weights that match ``keep``."""
    tensors = total = 0
    for name in inventory.required():
        if re.match(keep, name) is None:
            continue
        expected = inventory.expected(name)
        shape = [n for n in expected.shape if n is not None]
        assert len(shape) == len(expected.shape)
        count = math.prod(shape)
        tensors += 1
        if expected.storage is Storage.FP4:
            tensors += 1
            total += count // 2 + count // 32
        elif expected.storage is Storage.FP8:
            tensors += 1
            total += count + math.ceil(shape[0] / 128) * math.ceil(shape[1] / 128)
        else:
            total += count * BYTES[expected.storage]
    return tensors, total


@pytest.mark.parametrize(
    ("config", "draft", "stages", "tensors", "total"),
    [
        (PREVIEW, "mtp", 1, 69_187, 159_609_485_896),
        (FLASH, "dspark", 3, 72_317, 166_878_536_440),
        (FLASH, None, 0, 67_612, 156_015_698_140),
    ],
    ids=["preview", "0731", "trunk"],
)
def test_inventory_adds_up_to_the_published_totals(
    config: dict[str, object], draft: Draft | None, stages: int, tensors: int, total: int
) -> None:
    assert weigh(Inventory(check_config(config, "c"), draft, stages)) == (tensors, total)


@pytest.mark.parametrize(
    ("keep", "tensors", "total"),
    [
        (r"layers\.0\.(?!ffn\.experts)", 29, 143_596_888),
        (r"layers\.1\.(?!ffn\.experts)", 29, 143_596_888),
        (r"layers\.2\.(?!ffn\.experts)", 40, 173_503_576),
        (r"layers\.42\.(?!ffn\.experts)", 40, 167_299_160),
        (r"layers\.3\.(?!ffn\.experts)", 33, 146_044_248),
        (r"layers\.9\.ffn\.experts", 1536, 3_422_552_064),
        (r"mtp\.0\.", 1568, 3_610_287_448),
        (r"mtp\.1\.", 1565, 3_559_944_536),
        (r"mtp\.2\.", 1572, 3_692_606_316),
    ],
)
def test_every_kind_of_layer_has_its_published_size(keep: str, tensors: int, total: int) -> None:
    inventory = Inventory(check_config(FLASH, "c"), "dspark", 3)
    assert weigh(inventory, keep) == (tensors, total)


def test_plain_mtp_has_its_published_size() -> None:
    inventory = Inventory(check_config(PREVIEW, "c"), "mtp", 1)
    assert weigh(inventory, r"mtp\.") == (1575, 3_593_787_756)


@pytest.mark.parametrize("folder", [TINY, RANDOM], ids=lambda p: p.name)
def test_inventory_is_what_the_test_models_hold(folder: object) -> None:
    listing = listing_of(folder)  # type: ignore[arg-type]
    config = config_of(folder)  # type: ignore[arg-type]
    draft, stages = find_draft(listing, config)
    inventory = Inventory(check_config(config, "c"), draft, stages)
    weights = {name for name in listing if weight_of_scale(name) is None}
    assert set(inventory.required()) == weights
    for name in weights:
        dtype, shape = listing[name]
        logical = (shape[0], 2 * shape[1]) if dtype == "I8" else shape
        assert inventory.expected(name).shape == logical


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "info"),
    [
        ("embed.weight", (Role.EMBED, None, None, None, "trunk")),
        ("hc_head_fn", (Role.HYPER, None, None, None, "trunk")),
        ("layers.2.attn.wq_b.weight", (Role.ATTENTION, 2, None, None, "trunk")),
        ("layers.2.attn.indexer.wq_b.weight", (Role.INDEXER, 2, None, None, "trunk")),
        ("layers.2.attn.compressor.ape", (Role.POSITION, 2, None, None, "trunk")),
        ("layers.10.ffn.experts.255.w2.weight", (Role.EXPERT, 10, 255, "w2", "trunk")),
        ("layers.0.ffn.shared_experts.w3.weight", (Role.SHARED_EXPERT, 0, None, "w3", "trunk")),
        ("layers.0.ffn.gate.tid2eid", (Role.HASH_TABLE, 0, None, None, "trunk")),
        ("mtp.1.ffn.experts.0.w1.weight", (Role.EXPERT, 1, 0, "w1", "dspark")),
        ("mtp.2.markov_head.markov_w1.weight", (Role.MARKOV, 2, None, None, "dspark")),
        ("mtp.0.main_proj.weight", (Role.DRAFT_PROJECTION, 0, None, None, "dspark")),
    ],
)
def test_names_are_taken_apart(name: str, info: tuple[object, ...]) -> None:
    assert classify(name, "dspark") == TensorInfo(name, *info)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "embed",
        "embed.weight ",
        "model.embed.weight",
        "layers.0",
        "layers.00.attn_norm.weight",
        "layers.-1.attn_norm.weight",
        "layers.٣.attn_norm.weight",
        "layers.1234567.attn_norm.weight",
        "layers.0.attn_norm.weight\n",
        "layers.0.attn_norm.bias",
        "layers.0.ffn.experts.0.w4.weight",
        "layers.0.ffn.experts.0.w1.scale",
        "layers.0.ffn.experts.w1.weight",
        "layers.0.main_proj.weight",
        "layers.0.norm.weight",
        "mtp.0.embed.weight",
        "../../pwn",
    ],
)
def test_unknown_names_are_unknown(name: str) -> None:
    assert classify(name) is None


def test_roles_of_a_whole_model() -> None:
    found = Counter(info.role for info in map(classify, listing_of(TINY)) if info is not None)
    assert found[Role.EXPERT] == 4 * 16 * 3
    assert found[Role.ATTENTION] == 4 * 5
    assert found[Role.HASH_TABLE] == 1
    assert found[Role.GATE_BIAS] == 3
    assert found[Role.POSITION] == 3 + 2
    assert found[Role.NORM] == 1 + 4 * 4 + 3 + 2


def test_scale_names_lead_to_their_weight() -> None:
    assert weight_of_scale("layers.0.attn.wq_a.scale") == "layers.0.attn.wq_a.weight"
    assert weight_of_scale("layers.0.attn.wq_a.weight_scale_inv") == "layers.0.attn.wq_a.weight"
    for name in ("hc_head_scale", "layers.0.hc_attn_scale", "layers.0.attn.wq_a.weight"):
        assert weight_of_scale(name) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers.0.engram.table", "V4.1"),
        ("mtp.0.markov_head.embed.weight", "V4.1"),
        ("layers.0.mlp.experts.gate_up_proj", "transformers"),
        ("lm_head.weight", "transformers"),
    ],
)
def test_names_of_other_formats_say_which(name: str, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"f: {name}: .*{words}.*; use "):
        refuse_foreign(name, "f")


def test_every_transformers_name_that_differs_is_recognised() -> None:
    names = json.loads((RANDOM / "name_map.json").read_text())
    silent = set()
    for theirs in set(names.values()):
        try:
            refuse_foreign(theirs.removeprefix("model."), "f")
        except UnsupportedModelError:
            continue
        silent.add(theirs)
    assert silent == {
        "model.norm.weight",
        "model.hc_head.hc_fn",
        "model.hc_head.hc_base",
        "model.hc_head.hc_scale",
    }


def test_no_published_name_is_foreign() -> None:
    for name in Inventory(check_config(FLASH, "c"), "dspark", 3).required():
        refuse_foreign(name, "f")


# ---------------------------------------------------------------- draft


@pytest.mark.parametrize(
    ("names", "config", "found"),
    [
        ([], FLASH, (None, 0)),
        (["mtp.0.attn_norm.weight"], FLASH, ("dspark", 1)),
        (["mtp.0.attn_norm.weight"], PREVIEW, ("mtp", 1)),
        (["mtp.0.e_proj.weight"], FLASH, ("mtp", 1)),
        (["mtp.0.attn_norm.weight", "mtp.2.confidence_head.proj.weight"], {}, ("dspark", 3)),
    ],
)
def test_draft_is_counted_in_the_names(
    names: list[str], config: dict[str, object], found: tuple[Draft | None, int]
) -> None:
    assert find_draft(names, config) == found


def test_mixed_draft_is_refused() -> None:
    with pytest.raises(UnexpectedTensorError, match=r"mtp\.0\.h_proj.*mtp\.0\.main_proj"):
        find_draft(["mtp.0.main_proj.weight", "mtp.0.h_proj.weight"], FLASH)


# ---------------------------------------------------------------- what a config rules out


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("layers.43.attn_norm.weight", "the config has 43 layers"),
        ("mtp.3.attn_norm.weight", "the config has 3 stages"),
        ("layers.0.ffn.experts.256.w1.weight", "the config has 256 experts"),
        ("layers.0.attn.compressor.ape", "compress ratio is 0"),
        ("layers.3.attn.indexer.wq_b.weight", "compress ratio is 128"),
        ("mtp.0.attn.compressor.ape", "compress ratio is 0"),
        ("layers.2.ffn.gate.bias", "routes by token hash"),
        ("layers.3.ffn.gate.tid2eid", "routes by learned scores"),
        ("mtp.0.ffn.gate.tid2eid", "routes by learned scores"),
        ("mtp.1.main_proj.weight", "not a tensor of stage 1 of a dspark draft of 3"),
        ("mtp.1.norm.weight", "not a tensor of stage 1"),
        ("mtp.0.e_proj.weight", "not a tensor of stage 0 of a dspark draft"),
    ],
)
def test_ruled_out_tensor_says_why(name: str, why: str) -> None:
    inventory = Inventory(check_config(FLASH, "c"), "dspark", 3)
    with pytest.raises(UnexpectedTensorError, match=f"s: {name}: .*{why}"):
        inventory.expected(name, "s")


def test_partial_config_rules_nothing_out_and_requires_nothing() -> None:
    dims = check_config({"model_type": "deepseek_v4", "head_dim": 8}, "c", allow_partial=True)
    inventory = Inventory(dims)
    assert list(inventory.required()) == []
    assert inventory.expected("layers.99.ffn.experts.999.w1.weight").shape == (None, None)
    assert inventory.expected("layers.0.ffn.gate.bias").shape == (None,)
    assert inventory.expected("layers.0.attn.compressor.ape").shape == (None, None)
    assert inventory.expected("layers.0.attn.kv_norm.weight").shape == (8,)


def test_absurd_sizes_are_refused_before_a_list_is_made() -> None:
    most = {"num_hidden_layers": 1024, "compress_ratios": [0] * 1024, "n_routed_experts": 16384}
    dims = check_config(FLASH | most, "c")
    with pytest.raises(ConfigError, match="too many tensors"):
        Inventory(dims)
