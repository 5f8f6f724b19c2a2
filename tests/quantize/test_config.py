"""What config.json must say, and what is refused by key and value."""

from __future__ import annotations

from typing import Any

import pytest

from ds4q.quantize.config import check_config, require_dspark_keys
from ds4q.quantize.errors import ConfigError, SourceError, UnsupportedModelError
from tests.quantize.builders import FLASH, RANDOM, TINY, config_of

PRO = FLASH | {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "routed_scaling_factor": 2.5,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "dspark_target_layer_ids": [58, 59, 60],
}


def edited(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of ``config`` with a dotted ``key`` set, or removed where ``value`` is ``...``."""
    head, _, rest = key.partition(".")
    out = dict(config)
    if rest:
        out[head] = edited(config[head], rest, value)
    elif value is ...:
        del out[head]
    else:
        out[head] = value
    return out


@pytest.mark.parametrize(
    "config",
    [FLASH, PRO, config_of(TINY), config_of(RANDOM)],
    ids=["flash", "pro", "tiny", "random"],
)
def test_published_configs_pass(config: dict[str, Any]) -> None:
    assert check_config(config, "c").lacking == ()


def test_sizes_of_flash() -> None:
    dims = check_config(FLASH, "c")
    assert dims.sizes["H*D"] == 32768
    assert dims.sizes["G*o"] == 8192
    assert dims.sizes["H*D/G"] == 4096
    assert dims.sizes["(2+n)*n"] == 24
    assert dims.sizes["n*d"] == 16384
    assert dims.sizes["targets*d"] == 12288
    assert dims.ratios is not None
    assert (len(dims.ratios), dims.ratios[:4], dims.ratios[42]) == (43, (0, 0, 4, 128), 4)
    assert (dims.layers, dims.experts, dims.hash_layers) == (43, 256, 3)
    assert dims.fp8_block == (128, 128)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("model_type", "deepseek_v41", "'deepseek_v41'"),
        ("model_type", "deepseek_v3", "'deepseek_v3'"),
        ("model_type", None, "None"),
        ("text_config", {"model_type": "deepseek_v41"}, "'deepseek_v41'"),
        ("text_config", {}, "None"),
        ("num_key_value_heads", 2, "2"),
        ("num_key_value_heads", True, "True"),
        ("n_shared_experts", 2, "2"),
        ("tie_word_embeddings", True, "True"),
        ("tie_word_embeddings", 0, "0"),
        ("attention_bias", True, "True"),
        ("hidden_act", "gelu", "'gelu'"),
        ("scoring_func", "sigmoid", "'sigmoid'"),
        ("topk_method", "greedy", "'greedy'"),
        ("norm_topk_prob", False, "False"),
        ("expert_dtype", "fp8", "'fp8'"),
        ("rope_scaling", None, "None"),
        ("rope_scaling.type", "linear", "'linear'"),
        ("rope_scaling.rope_type", "llama3", "'llama3'"),
        ("quantization_config", None, "None"),
        ("quantization_config.quant_method", "awq", "'awq'"),
        ("quantization_config.fmt", "e5m2", "'e5m2'"),
        ("quantization_config.scale_fmt", "float", "'float'"),
        ("compress_ratios", [0, 0, 2] + [4] * 40, "2"),
        ("compress_ratios", [0, 0, 4.0] + [4] * 40, "4.0"),
        ("compress_ratios", [0] * 42, "42"),
    ],
)
def test_other_arithmetic_is_refused_by_key_and_value(key: str, value: Any, found: str) -> None:
    for allow_partial in (False, True):
        with pytest.raises(UnsupportedModelError) as caught:
            check_config(edited(FLASH, key, value), "c", allow_partial=allow_partial)
        message = str(caught.value)
        assert message.startswith("c: ")
        assert key.split(".")[-1] in message
        assert f"found {found}" in message


@pytest.mark.parametrize(
    "key",
    [
        *(
            k
            for k in FLASH
            if not k.startswith(("dspark", "expert_dtype", "architectures", "num_nex"))
        ),
        "rope_scaling.type",
        "rope_scaling.factor",
        "rope_scaling.beta_fast",
        "rope_scaling.beta_slow",
        "rope_scaling.original_max_position_embeddings",
        "quantization_config.quant_method",
        "quantization_config.fmt",
        "quantization_config.weight_block_size",
    ],
)
def test_missing_key_is_refused_and_never_defaulted(key: str) -> None:
    config = edited(FLASH, key, ...)
    with pytest.raises(ConfigError, match=f"c: required key is missing: found no {key};"):
        check_config(config, "c")
    if key == "model_type":
        with pytest.raises(ConfigError, match="model_type"):
            check_config(config, "c", allow_partial=True)
    else:
        assert check_config(config, "c", allow_partial=True).lacking == (key,)


@pytest.mark.parametrize(
    "key",
    ["expert_dtype", "architectures", "num_nextn_predict_layers", "quantization_config.scale_fmt"],
)
def test_keys_that_published_configs_lack_may_be_absent(key: str) -> None:
    assert check_config(edited(FLASH, key, ...), "c").lacking == ()


def test_torch_dtype_may_have_its_newer_name() -> None:
    config = edited(FLASH, "torch_dtype", ...) | {"dtype": "bfloat16"}
    assert check_config(config, "c").lacking == ()


def test_many_missing_keys_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"found no bos_token_id, .* and 31 more;"):
        check_config({"model_type": "deepseek_v4"}, "c")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "4096"),
        ("hidden_size", 4096.0),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("hidden_size", -1),
        ("hidden_size", None),
        ("hidden_size", float("nan")),
        ("hidden_size", [4096]),
        ("hidden_size", 10**400),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", True),
        ("rms_norm_eps", 1e-60),
        ("hc_eps", 1),
        ("rope_theta", 1),
        ("rope_theta", float("inf")),
        ("rope_theta", 1e300),
        ("rope_theta", "10000"),
        ("compress_rope_theta", 0.5),
        ("qk_rope_head_dim", 63),
        ("head_dim", 32),
        ("index_head_dim", 32),
        ("sliding_window", 131072 * 2),
        ("hc_sinkhorn_iters", 2**31 - 1),
        ("vocab_size", 2**31 - 1),
        ("bos_token_id", 129280),
        ("bos_token_id", [0]),
        ("eos_token_id", 129280),
        ("eos_token_id", -1),
        ("eos_token_id", True),
        ("eos_token_id", []),
        ("eos_token_id", [1, 129280]),
        ("eos_token_id", None),
        ("pad_token_id", 129280),
        ("pad_token_id", -2),
        ("dspark_noise_token_id", 129280),
        ("dspark_block_size", 257),
        ("rope_scaling.beta_fast", 0.5),
        ("rope_scaling.beta_slow", float("nan")),
        ("rope_scaling.factor", 0.5),
        ("rope_scaling.factor", 1e7),
        ("rope_scaling.original_max_position_embeddings", 2**31 - 1),
        ("num_hash_layers", -1),
        ("num_hash_layers", 44),
        ("n_routed_experts", 5),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "1e-6"),
        ("swiglu_limit", None),
        ("rope_scaling.factor", -16),
        ("o_groups", 7),
        ("compress_ratios", 4),
        ("quantization_config.weight_block_size", [128]),
        ("quantization_config.weight_block_size", [128, 0]),
        ("dspark_target_layer_ids", []),
        ("dspark_target_layer_ids", [40, 40]),
        ("dspark_target_layer_ids", [43]),
        ("dspark_target_layer_ids", [[40]]),
        ("dspark_block_size", 0),
    ],
)
def test_value_of_the_wrong_kind_is_refused(key: str, value: Any) -> None:
    for allow_partial in (False, True):
        with pytest.raises(SourceError, match=f"c: .*{key.split('.')[-1]}"):
            check_config(edited(FLASH, key, value), "c", allow_partial=allow_partial)


def test_pruned_experts_are_accepted_down_to_the_number_chosen() -> None:
    assert check_config(FLASH | {"n_routed_experts": 160}, "c").experts == 160
    assert check_config(FLASH | {"n_routed_experts": 6}, "c").experts == 6


def test_no_hash_layers_is_legal() -> None:
    assert check_config(FLASH | {"num_hash_layers": 0}, "c").hash_layers == 0


def test_entries_of_draft_stages_are_not_the_trunks() -> None:
    config = FLASH | {"num_hidden_layers": 3, "num_hash_layers": 1, "dspark_target_layer_ids": [2]}
    assert check_config(config, "c").ratios == (0, 0, 4)


def test_partial_config_leaves_sizes_open() -> None:
    dims = check_config({"model_type": "deepseek_v4", "hidden_size": 64}, "c", allow_partial=True)
    assert dims.sizes["d"] == 64
    assert dims.sizes["n*d"] is None
    assert (dims.layers, dims.experts, dims.ratios, dims.fp8_block) == (None,) * 4


@pytest.mark.parametrize("key", [k for k in FLASH if k.startswith("dspark")])
def test_dspark_needs_all_of_its_keys(key: str) -> None:
    require_dspark_keys(FLASH, "c")
    with pytest.raises(ConfigError, match=f"no {key}"):
        require_dspark_keys(edited(FLASH, key, ...), "c")


def test_every_number_has_an_upper_bound() -> None:
    """What no model has is refused, not tried: it would hang a step, or ask for all memory."""
    numbers = [key for key, value in FLASH.items() if type(value) in (int, float)]
    free = {"num_nextn_predict_layers"}  # not used: draft stages are counted by their tensors
    for key in (k for k in numbers if k not in free):
        with pytest.raises(SourceError, match=key):
            check_config(FLASH | {key: 10**18 if type(FLASH[key]) is int else 1e38}, "c")


def test_windows_that_no_memory_holds() -> None:
    config = FLASH | {"sliding_window": 1 << 17, "head_dim": 8192}
    with pytest.raises(ConfigError, match=r"sliding_window \* head_dim: expected at most"):
        check_config(config, "c")


@pytest.mark.parametrize("pad", [None, -1, 2])
def test_special_tokens_may_be_a_list_or_none(pad: int | None) -> None:
    check_config(FLASH | {"eos_token_id": [1, 128803], "pad_token_id": pad}, "c")


# ---------------------------------------------------------------- spellings of rotations

YARN = {
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}
BARE = {k: v for k, v in FLASH.items() if k not in ("rope_scaling", "rope_theta")}
BARER = {k: v for k, v in BARE.items() if k != "compress_rope_theta"}
PARTS = {
    "main": {"rope_type": "default", "rope_theta": 10000},
    "compress": {"rope_type": "yarn", "rope_theta": 160000} | YARN,
}


@pytest.mark.parametrize(
    "config",
    [
        FLASH | {"rope_scaling": {"rope_type": "yarn"} | YARN},
        FLASH | {"rope_scaling": {"type": "yarn", "rope_type": "yarn"} | YARN},
        BARE | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000} | YARN},
        BARE | {"rope_scaling": None, "rope_theta": 10000, "rope_parameters": PARTS},
        BARER | {"rope_parameters": PARTS},
        FLASH | {"rope_parameters": PARTS},
        FLASH | {"rope_parameters": None},
        FLASH | {"rope_scaling": {"type": "yarn", "attention_factor": 1.0, "mscale": 0} | YARN},
        FLASH | {"rope_scaling": {"type": "yarn", "partial_rotary_factor": 0.125} | YARN},
    ],
    ids=[
        "rope_type",
        "both types",
        "parameters",
        "null scaling",
        "parts",
        "agreeing",
        "null parameters",
        "neutral extras",
        "partial rotary",
    ],
)
def test_rotations_in_every_spelling(config: dict[str, Any]) -> None:
    expected = {"rope_theta": 10000, "compress_rope_theta": 160000} | YARN
    assert check_config(config, "c").rope == expected


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"main": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters.main.rope_theta"),
        ({"compress": PARTS["compress"] | {"factor": 4}}, "rope_parameters.compress.factor"),
        ({"compress": PARTS["compress"] | {"rope_theta": 10000}}, "compress_rope_theta and rope_"),
        ({"rope_type": "yarn", "rope_theta": 5e5}, "rope_theta and rope_parameters.rope_theta"),
    ],
    ids=["main", "factor", "compress", "flat"],
)
def test_spellings_that_disagree(parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"{says}.* disagree"):
        check_config(FLASH | {"rope_parameters": parameters}, "c")


def test_sizes_are_held_to_their_bounds_before_one_is_divided_by_another() -> None:
    scaling = {"type": "yarn", "partial_rotary_factor": 0.125} | YARN
    config = FLASH | {"rope_scaling": scaling, "qk_rope_head_dim": 10**400, "head_dim": 1}
    with pytest.raises(ConfigError, match="qk_rope_head_dim: expected a whole number"):
        check_config(config, "c")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"attention_factor": 2.0}, "rope_scaling.attention_factor: expected 1"),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, "rope_scaling.mscale: expected 0"),
        ({"truncate": False}, "rope_scaling.truncate: expected True"),
        ({"partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor"),
        ({"long_factor": [1, 2]}, "rope_scaling.long_factor: expected no such key"),
        ({"rope_type": "linear"}, "rope_scaling.rope_type: expected 'yarn'"),
    ],
)
def test_keys_that_change_rotations_are_refused(extra: dict[str, Any], says: str) -> None:
    config = FLASH | {"rope_scaling": {"type": "yarn"} | YARN | extra}
    with pytest.raises(UnsupportedModelError, match=says):
        check_config(config, "c")
