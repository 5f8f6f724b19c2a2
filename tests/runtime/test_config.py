"""config.json: what both test models mean, and that nothing is defaulted or passed over."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ds4q.runtime.config import ModelConfig, Yarn, parse_config
from ds4q.runtime.errors import ConfigError
from tests.checks import check_refused
from tests.runtime.artifacts import DATA, config_of

RANDOM = config_of(DATA / "ds4-random")

NEEDED = [
    *(name for name in ModelConfig.__annotations__ if name != "run_layers"),
    "model_type",
    "bos_token_id",
    "eos_token_id",
    "num_key_value_heads",
    "n_shared_experts",
    "tie_word_embeddings",
    "hidden_act",
    "scoring_func",
    "topk_method",
    "norm_topk_prob",
]


def changed(**values: Any) -> dict[str, Any]:
    return copy.deepcopy(RANDOM) | values


def test_values_of_a_config() -> None:
    config = parse_config(RANDOM)
    assert config.compress_ratios == (0, 4, 128, 4, 128, 0)  # without the draft stages' three
    assert config.rope_scaling == Yarn(16.0, 32.0, 1.0, 65536)
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (256, 4, 128)
    assert (config.index_topk, config.swiglu_limit, config.hc_eps) == (8, 2.0, 1e-6)
    assert [config.is_hash_layer(layer) for layer in range(3)] == [True, True, False]


def test_ds4_tiny_parses() -> None:
    config = parse_config(config_of(DATA / "ds4-tiny"))
    assert config.compress_ratios == (0, 4, 128, 4)


@pytest.mark.parametrize("key", NEEDED)
def test_missing_key_is_named(key: str) -> None:
    config = changed()
    del config[key]
    check_refused(
        ConfigError, lambda: parse_config(config, path="m.hfq"), path="m.hfq", says=[key, "missing"]
    )


@pytest.mark.parametrize(
    "key", ["type", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings"]
)
def test_missing_yarn_key_is_named(key: str) -> None:
    config = changed()
    del config["rope_scaling"][key]
    check_refused(ConfigError, lambda: parse_config(config), says=[f"rope_scaling.{key}"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "deepseek_v41"),
        ("num_key_value_heads", 2),
        ("n_shared_experts", 2),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("scoring_func", "sigmoid"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("norm_topk_prob", 1),
        ("expert_dtype", "fp8"),
        ("rope_scaling", None),
        ("rope_scaling", {"type": "linear", "factor": 4}),
        ("compress_ratios", [0, 4, 128, 4, 128]),
        ("compress_ratios", [0, 4, 64, 4, 128, 0]),
        ("compress_ratios", [0, 4.0, 128, 4, 128, 0]),
        ("compress_ratios", "0,4"),
        ("hidden_size", 0),
        ("hidden_size", 256.0),
        ("hidden_size", True),
        ("vocab_size", "512"),
        ("num_hash_layers", -1),
        ("rms_norm_eps", 0),
        ("hc_eps", float("nan")),
        ("rope_theta", 1),
        ("swiglu_limit", None),
        ("qk_rope_head_dim", 63),
        ("head_dim", 32),
        ("index_head_dim", 32),
        ("o_groups", 3),
        ("num_experts_per_tok", 17),
        ("eos_token_id", 512),
    ],
)
def test_other_arithmetic_is_refused(key: str, value: Any) -> None:
    error = check_refused(ConfigError, lambda: parse_config(changed(**{key: value})), says=[key])
    assert error.found is not None


def test_nested_config_is_refused() -> None:
    config = {"text_config": RANDOM | {"model_type": "deepseek_v41"}}
    check_refused(ConfigError, lambda: parse_config(config), says=["text_config", "deepseek_v41"])


def test_unused_ratios_and_unknown_keys_are_free() -> None:
    config = changed(compress_ratios=[0, 4, 128, 4, 128, 0, 7, 7], something_new=1)
    del config["attention_bias"]
    del config["expert_dtype"]
    assert parse_config(config) == parse_config(RANDOM)


def test_pruned_experts_are_accepted() -> None:
    assert parse_config(changed(n_routed_experts=4)).n_routed_experts == 4
