"""Owns the reading of a DeepSeek-V4 ``config.json``: every constant of the forward pass.

Knows no tensor and no file. Source of keys and meanings: the config and inference code that
DeepSeek publishes with DeepSeek-V4-Flash. A missing key is refused by name: a default would change
the arithmetic silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds4q.runtime.errors import ConfigError

MODEL_TYPE = "deepseek_v4"
RATIOS = (0, 4, 128)

# Keys whose other values mean different arithmetic; the value is the only one that runs here.
_FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
_FIXED_IF_PRESENT: dict[str, Any] = {"attention_bias": False, "expert_dtype": "fp4"}


@dataclass(frozen=True, slots=True)
class Yarn:
    """The ``rope_scaling`` object."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The constants of the forward pass, named as in config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    hc_mult: int
    hc_sinkhorn_iters: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    hc_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: Yarn
    compress_ratios: tuple[int, ...]  # one per hidden layer

    def is_hash_layer(self, layer: int) -> bool:
        """Whether the experts of ``layer`` follow from the token id alone."""
        return layer < self.num_hash_layers


_INTS_FROM_ZERO = ("num_hash_layers", "bos_token_id", "eos_token_id")
_FLOATS = (
    "routed_scaling_factor",
    "swiglu_limit",
    "rms_norm_eps",
    "hc_eps",
    "rope_theta",
    "compress_rope_theta",
)
_INTS = tuple(
    name
    for name, kind in ModelConfig.__annotations__.items()
    if kind == "int" and name not in _INTS_FROM_ZERO
)


class _Keys:
    """Typed access to the config object; every refusal names the key and the value found."""

    def __init__(self, values: Mapping[str, Any], path: object, prefix: str = "") -> None:
        self.values, self.path, self.prefix = values, path, prefix

    def refuse(self, key: str, expected: object, found: object) -> ConfigError:
        return ConfigError(
            f"config key {self.prefix}{key}", path=self.path, expected=expected, found=repr(found)
        )

    def take(self, key: str) -> Any:
        if key not in self.values:
            raise ConfigError(f"config key {self.prefix}{key} is missing", path=self.path)
        return self.values[key]

    def integer(self, key: str, least: int = 1) -> int:
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise self.refuse(key, f"an integer from {least} on", value)
        return value

    def positive(self, key: str) -> float:
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, "a positive number", value)
        if not (value > 0 and math.isfinite(value)):
            raise self.refuse(key, "a positive number", value)
        return float(value)

    def fixed(self, key: str, only: Any) -> None:
        value = self.take(key)
        # 1 == True in Python; the types must agree as well.
        if value != only or isinstance(value, bool) != isinstance(only, bool):
            raise self.refuse(key, repr(only), value)


def parse_config(config: Mapping[str, Any], *, path: object = None) -> ModelConfig:
    """Check a parsed config.json and return its constants.

    Parameters
    ----------
    config : the object of ``config.json``
    path : named in errors

    Raises
    ------
    ConfigError
        A key is missing, has the wrong type, or its value means other arithmetic.
    """
    keys = _Keys(config, path)
    if "text_config" in config:
        raise ConfigError(
            "config nests its keys in text_config, which no DeepSeek-V4 does",
            path=path,
            found=repr(config.get("model_type")),
        )
    keys.fixed("model_type", MODEL_TYPE)
    for key, only in _FIXED.items():
        keys.fixed(key, only)
    for key, only in _FIXED_IF_PRESENT.items():
        if key in config:
            keys.fixed(key, only)
    values: dict[str, Any] = {key: keys.integer(key) for key in _INTS}
    values |= {key: keys.integer(key, least=0) for key in _INTS_FROM_ZERO}
    values |= {key: keys.positive(key) for key in _FLOATS}
    values["rope_scaling"] = _yarn(keys)
    values["compress_ratios"] = _ratios(keys, values["num_hidden_layers"])
    parsed = ModelConfig(**values)
    _check_relations(parsed, keys)
    return parsed


def _yarn(keys: _Keys) -> Yarn:
    scaling = keys.take("rope_scaling")
    if not isinstance(scaling, Mapping):
        raise keys.refuse("rope_scaling", "an object", scaling)
    inner = _Keys(scaling, keys.path, "rope_scaling.")
    inner.fixed("type", "yarn")
    return Yarn(
        factor=inner.positive("factor"),
        beta_fast=inner.positive("beta_fast"),
        beta_slow=inner.positive("beta_slow"),
        original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
    )


def _ratios(keys: _Keys, layers: int) -> tuple[int, ...]:
    found = keys.take("compress_ratios")
    if not isinstance(found, list) or len(found) < layers:
        raise keys.refuse("compress_ratios", f"a list of at least {layers} ratios", found)
    # Entries past the hidden layers belong to draft stages.
    for layer, ratio in enumerate(found[:layers]):
        if type(ratio) is not int or ratio not in RATIOS:
            raise keys.refuse(f"compress_ratios[{layer}]", "0, 4 or 128", ratio)
    return tuple(found[:layers])


def _check_relations(c: ModelConfig, keys: _Keys) -> None:
    def check(key: str, holds: bool, expected: str) -> None:
        if not holds:
            raise keys.refuse(key, expected, getattr(c, key))

    rope, heads = c.qk_rope_head_dim, c.num_attention_heads
    check("qk_rope_head_dim", rope % 2 == 0, "an even number")
    check("head_dim", c.head_dim >= rope, f"at least qk_rope_head_dim {rope}")
    check("index_head_dim", c.index_head_dim >= rope, f"at least qk_rope_head_dim {rope}")
    check("o_groups", heads % c.o_groups == 0, f"a divisor of num_attention_heads {heads}")
    check(
        "num_experts_per_tok",
        c.num_experts_per_tok <= c.n_routed_experts,
        f"at most n_routed_experts {c.n_routed_experts}",
    )
    for key in ("bos_token_id", "eos_token_id"):
        check(key, getattr(c, key) < c.vocab_size, f"below vocab_size {c.vocab_size}")
    for key in ("rope_theta", "compress_rope_theta"):
        check(key, getattr(c, key) > 1, "more than 1")
