"""Owns what config.json of a DeepSeek-V4 checkpoint must say: keys, kinds, refusals, sizes.

Names no tensor. Source: config.json of huggingface.co/deepseek-ai/DeepSeek-V4-Flash. A missing key
is refused, never defaulted: a default would change the arithmetic silently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ds4q.quantize.errors import ConfigError, UnsupportedModelError

MODEL_TYPE = "deepseek_v4"
RATIOS = (0, 4, 128)
MAX_SIZE = 2**31 - 1
KEYS_LISTED = 8

_INTEGERS = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "max_position_embeddings",
]
_MAY_BE_ZERO = ["num_hash_layers", "bos_token_id", "eos_token_id"]
_REALS = [
    "rms_norm_eps",
    "hc_eps",
    "swiglu_limit",
    "rope_theta",
    "compress_rope_theta",
    "routed_scaling_factor",
]
# Any other value would change the arithmetic without changing a shape.
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
_YARN_REALS = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
_FP8_FIXED = {"quant_method": "fp8", "fmt": "e4m3"}
_DSPARK_INTEGERS = ("dspark_block_size", "dspark_markov_rank")
_DSPARK_KEYS = (*_DSPARK_INTEGERS, "dspark_noise_token_id", "dspark_target_layer_ids")


@dataclass(frozen=True, slots=True)
class Dims:
    """The sizes of one config; None where a partial config is silent.

    ``sizes`` holds products of config values under the short names of ``deepseek4.py``;
    ``ratios`` is one compress ratio per trunk layer; ``lacking`` are the absent keys.
    """

    sizes: dict[str, int | None]
    layers: int | None
    experts: int | None
    hash_layers: int | None
    ratios: tuple[int, ...] | None
    fp8_block: tuple[int, int] | None
    lacking: tuple[str, ...]


def check_config(config: dict[str, Any], path: object, *, allow_partial: bool = False) -> Dims:
    """Refuse a config that is not DeepSeek-V4 as built here; return its sizes.

    Raises
    ------
    UnsupportedModelError : a value that changes format or arithmetic, naming key and value
    ConfigError : a missing key (model_type even if ``allow_partial``), or a value of a wrong kind
    """
    _check_family(config, path)
    lacking = _check_rope(config, path) + _check_fp8(config, path)
    required = {*_INTEGERS, *_MAY_BE_ZERO, *_REALS, *_FIXED, "compress_ratios"}
    lacking += [key for key in required if key not in config]
    if "torch_dtype" not in config and "dtype" not in config:  # renamed in newer re-saves
        lacking.append("torch_dtype")
    lacking.sort()
    if lacking and not allow_partial:
        _refuse_lacking(lacking, path)
    for key in _INTEGERS:
        _integer(config, key, path, at_least=1)
    for key in _MAY_BE_ZERO:
        _integer(config, key, path, at_least=0)
    for key in _REALS:
        _positive(config, key, path)
    _check_dspark(config, path)
    return _dims(config, path, tuple(lacking))


def require_dspark_keys(config: dict[str, Any], path: object) -> None:
    """Refuse a config without the keys that a DSpark draft needs."""
    lacking = [key for key in _DSPARK_KEYS if key not in config]
    if lacking:
        _refuse_lacking(lacking, path)


def has_dspark_keys(config: dict[str, Any]) -> bool:
    """Whether the config describes a DSpark draft."""
    return any(key in config for key in _DSPARK_KEYS)


def _check_family(config: dict[str, Any], path: object) -> None:
    if "text_config" in config:
        inner = config["text_config"]
        found = inner.get("model_type") if isinstance(inner, dict) else inner
        raise UnsupportedModelError("keys nested in text_config", path=path, found=repr(found))
    if "model_type" not in config:
        _refuse_lacking(["model_type"], path)
    _fixed(config, {"model_type": MODEL_TYPE} | _FIXED | _FIXED_IF_PRESENT, path)


def _check_rope(config: dict[str, Any], path: object) -> list[str]:
    """Refuse other scaling than YaRN; returns the absent keys."""
    if "rope_scaling" not in config:
        return ["rope_scaling"]
    scaling = config["rope_scaling"]
    if not isinstance(scaling, dict):
        raise UnsupportedModelError("rope_scaling", path=path, expected="yarn", found=repr(scaling))
    _fixed(scaling, {"type": "yarn", "rope_type": "yarn"}, path, "rope_scaling.")
    for key in _YARN_REALS:
        _positive(scaling, key, path, "rope_scaling.")
    return [f"rope_scaling.{key}" for key in ("type", *_YARN_REALS) if key not in scaling]


def _check_fp8(config: dict[str, Any], path: object) -> list[str]:
    """Refuse other dense formats than block-scaled E4M3; returns the absent keys."""
    if "quantization_config" not in config:
        return ["quantization_config"]
    fp8 = config["quantization_config"]
    if not isinstance(fp8, dict):
        raise UnsupportedModelError(
            "quantization_config", path=path, expected="fp8", found=repr(fp8)
        )
    # scale_fmt is not required: checkpoints with F32 scales have none.
    _fixed(fp8, _FP8_FIXED | {"scale_fmt": "ue8m0"}, path, "quantization_config.")
    block = fp8.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(_is_int(n, 1) for n in block)
    ):
        raise ConfigError(
            "quantization_config.weight_block_size",
            path=path,
            expected="two whole numbers",
            found=repr(block)[:80],
        )
    keys = [*_FP8_FIXED, "weight_block_size"]
    return [f"quantization_config.{key}" for key in keys if fp8.get(key) is None]


def _check_dspark(config: dict[str, Any], path: object) -> None:
    for key in _DSPARK_INTEGERS:
        _integer(config, key, path, at_least=1)
    _integer(config, "dspark_noise_token_id", path, at_least=0)
    key = "dspark_target_layer_ids"
    if key in config:
        ids, layers = config[key], config.get("num_hidden_layers", MAX_SIZE)
        whole = isinstance(ids, list) and ids and all(_is_int(n, 0) and n < layers for n in ids)
        if not whole or len(set(ids)) != len(ids):
            raise ConfigError(
                key, path=path, expected="distinct layers of the model", found=repr(ids)[:80]
            )


def _dims(config: dict[str, Any], path: object, lacking: tuple[str, ...]) -> Dims:
    def size(*keys: str) -> int | None:
        values = [config.get(key) for key in keys]
        return None if None in values else math.prod(v for v in values if v is not None)

    heads, groups = size("num_attention_heads", "head_dim"), size("o_groups")
    if heads is not None and groups is not None and heads % groups:
        raise ConfigError(
            "o_groups must divide num_attention_heads * head_dim",
            path=path,
            found=f"{heads} / {groups}",
        )
    n, d, rank = size("hc_mult"), size("hidden_size"), size("dspark_markov_rank")
    index = size("index_head_dim")
    experts, chosen = size("n_routed_experts"), size("num_experts_per_tok")
    if experts is not None and chosen is not None and experts < chosen:
        raise ConfigError(
            "n_routed_experts",
            path=path,
            expected=f"at least num_experts_per_tok = {chosen}",
            found=experts,
        )
    layers, hash_layers = size("num_hidden_layers"), size("num_hash_layers")
    if layers is not None and hash_layers is not None and hash_layers > layers:
        raise ConfigError(
            "num_hash_layers", path=path, expected=f"at most {layers}", found=hash_layers
        )
    targets = config.get("dspark_target_layer_ids")
    sizes = {
        "V": size("vocab_size"),
        "d": d,
        "D": size("head_dim"),
        "H": size("num_attention_heads"),
        "H*D": heads,
        "H*D/G": None if heads is None or groups is None else heads // groups,
        "G*o": size("o_groups", "o_lora_rank"),
        "q": size("q_lora_rank"),
        "n": n,
        "n*d": size("hc_mult", "hidden_size"),
        "(2+n)*n": None if n is None else (2 + n) * n,
        "E": experts,
        "K": chosen,
        "I": size("moe_intermediate_size"),
        "x": size("index_n_heads"),
        "y": index,
        "x*y": size("index_n_heads", "index_head_dim"),
        "2*y": None if index is None else 2 * index,
        "rank": rank,
        "d+rank": None if d is None or rank is None else d + rank,
        "targets*d": None if d is None or targets is None else d * len(targets),
        "1": 1,
        "3": 3,
    }
    block = config.get("quantization_config", {}).get("weight_block_size")
    return Dims(
        sizes=sizes,
        layers=layers,
        experts=experts,
        hash_layers=hash_layers,
        ratios=_ratios(config, layers, path),
        fp8_block=None if block is None else (block[0], block[1]),
        lacking=lacking,
    )


def _ratios(config: dict[str, Any], layers: int | None, path: object) -> tuple[int, ...] | None:
    """The trunk's compress ratios; entries after them belong to draft stages."""
    if "compress_ratios" not in config:
        return None
    ratios = config["compress_ratios"]
    if not isinstance(ratios, list):
        raise ConfigError("compress_ratios", path=path, expected="a list", found=repr(ratios)[:80])
    if layers is not None and len(ratios) < layers:
        raise UnsupportedModelError(
            "compress_ratios", path=path, expected=f"at least {layers} entries", found=len(ratios)
        )
    for number, ratio in enumerate(ratios[:layers]):
        if type(ratio) is not int or ratio not in RATIOS:
            raise UnsupportedModelError(
                f"compress_ratios[{number}]", path=path, expected="0, 4 or 128", found=repr(ratio)
            )
    return None if layers is None else tuple(ratios[:layers])


def _fixed(config: dict[str, Any], values: dict[str, Any], path: object, prefix: str = "") -> None:
    for key, value in values.items():
        # type too: 1 == True in Python
        if key in config and (type(config[key]) is not type(value) or config[key] != value):
            raise UnsupportedModelError(
                prefix + key, path=path, expected=repr(value), found=repr(config[key])[:80]
            )


def _is_int(value: Any, at_least: int) -> bool:
    return type(value) is int and at_least <= value <= MAX_SIZE


def _integer(config: dict[str, Any], key: str, path: object, *, at_least: int) -> None:
    if key in config and not _is_int(config[key], at_least):
        raise ConfigError(
            key,
            path=path,
            expected=f"a whole number from {at_least} to {MAX_SIZE}",
            found=repr(config[key])[:80],
        )


def _positive(config: dict[str, Any], key: str, path: object, prefix: str = "") -> None:
    value = config.get(key, 1)
    if type(value) not in (int, float) or not value > 0:
        raise ConfigError(
            prefix + key, path=path, expected="a positive number", found=repr(value)[:80]
        )


def _refuse_lacking(keys: list[str], path: object) -> None:
    more = len(keys) - KEYS_LISTED
    found = f"no {', '.join(keys[:KEYS_LISTED])}" + (f" and {more} more" if more > 0 else "")
    raise ConfigError("required key is missing", path=path, found=found)
