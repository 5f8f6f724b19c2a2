"""The one check of a DeepSeek-V4 config.json: keys, kinds, bounds, refusals, sizes.

Quantize, verify, inspect, export, run and serve all use it. It names no tensor. Source: config.json
of huggingface.co/deepseek-ai/DeepSeek-V4-Flash. A missing key is refused, never defaulted: a
default would change the arithmetic silently.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds4q.quantize.errors import ConfigError, UnsupportedModelError
from ds4q.quantize.generation import sampling
from ds4q.quantize.rope import read_rope

MODEL_TYPE = "deepseek_v4"
RATIOS = (0, 4, 128)
KEYS_LISTED = 8

# The one table of bounds, for every command that reads a config. The lowest value is the least that
# the arithmetic is defined for. The highest is far above every published model (at least 8 times
# Flash or Pro), and low enough that a damaged or hostile config can neither hang a step nor ask for
# memory that no machine has; offsets, ids and row lengths stay within 32 bits.
_WHOLE: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 1 << 22),
    "hidden_size": (1, 1 << 16),
    "num_hidden_layers": (1, 1 << 10),
    "num_attention_heads": (1, 1 << 12),
    "num_key_value_heads": (1, 1),
    "head_dim": (1, 1 << 13),
    "qk_rope_head_dim": (1, 1 << 13),
    "q_lora_rank": (1, 1 << 16),
    "o_lora_rank": (1, 1 << 16),
    "o_groups": (1, 1 << 12),
    "n_routed_experts": (1, 1 << 14),
    "n_shared_experts": (1, 1),
    "num_experts_per_tok": (1, 1 << 10),
    "num_hash_layers": (0, 1 << 10),
    "moe_intermediate_size": (1, 1 << 17),
    "hc_mult": (1, 64),  # a layer mixes (2 + n) n values of n d: it grows with the cube
    "hc_sinkhorn_iters": (1, 1000),  # passes over a matrix of n x n, twice a layer and token
    "sliding_window": (1, 1 << 17),  # rows that every layer of every sequence keeps
    "index_n_heads": (1, 1 << 12),
    "index_head_dim": (1, 1 << 13),
    "index_topk": (1, 1 << 20),
    "max_position_embeddings": (1, 1 << 27),  # positions are 32-bit on a device
}
_REAL: dict[str, tuple[float, float]] = {
    "rms_norm_eps": (1e-38, 0.1),  # less is zero in float32, or subnormal
    "hc_eps": (1e-38, 0.1),
    "swiglu_limit": (1e-6, 1e6),
    "routed_scaling_factor": (1e-6, 1e6),
}
_THETA = (1.0, 1e12)  # rotations divide by its logarithm: above 1
_YARN: dict[str, tuple[float, float]] = {
    "factor": (1.0, 1e6),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "original_max_position_embeddings": (1, 1 << 27),
}
_DSPARK_WHOLE: dict[str, tuple[int, int]] = {
    "dspark_block_size": (1, 256),
    "dspark_markov_rank": (1, 1 << 16),
}
_WINDOW_VALUES = 1 << 34  # of all layers of one sequence; 64 GiB of float32. Flash has 2.8 million
_TOKENS = ("bos_token_id", "eos_token_id")
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
_MOST_BLOCK = 1 << 16  # rows or columns that share a scale
_FP8_FIXED = {"quant_method": "fp8", "fmt": "e4m3"}
_DSPARK_KEYS = (*_DSPARK_WHOLE, "dspark_noise_token_id", "dspark_target_layer_ids")


@dataclass(frozen=True, slots=True)
class Dims:
    """The sizes of one config; None where a partial config is silent.

    ``sizes`` holds products of config values under the short names of ``deepseek4.py``;
    ``ratios`` is one compress ratio per trunk layer; ``lacking`` are the absent keys; ``rope`` is
    what ``rope.py`` makes of the spellings of rotations.
    """

    sizes: dict[str, int | None]
    layers: int | None
    experts: int | None
    hash_layers: int | None
    ratios: tuple[int, ...] | None
    fp8_block: tuple[int, int] | None
    lacking: tuple[str, ...]
    rope: dict[str, Any]


def check_config(config: dict[str, Any], path: object, *, allow_partial: bool = False) -> Dims:
    """Refuse a config that is not DeepSeek-V4 as built here; return its sizes.

    Raises
    ------
    UnsupportedModelError : a value that changes format or arithmetic, naming key and value
    ConfigError : a missing key (model_type even if ``allow_partial``), or a value of a wrong kind
    """
    _check_family(config, path)
    for key, (low, high) in (_WHOLE | _DSPARK_WHOLE).items():  # first: others are made of these
        if key in config:
            _whole(key, config[key], low, high, path)
    rope, lacking = read_rope(config, path)
    lacking += _check_fp8(config, path)
    required = {*_WHOLE, *_REAL, *_TOKENS, *_FIXED, "compress_ratios"}
    lacking += [key for key in required if key not in config]
    if "torch_dtype" not in config and "dtype" not in config:  # renamed in newer re-saves
        lacking.append("torch_dtype")
    lacking.sort()
    if lacking and not allow_partial:
        _refuse_lacking(lacking, path)
    for key, bounds in _REAL.items():
        if key in config:
            _real(key, config[key], bounds, path)
    for key in ("rope_theta", "compress_rope_theta"):
        if key in rope:
            _real(key, rope[key], _THETA, path)
            if rope[key] == 1:
                raise ConfigError(key, path=path, expected="more than 1", found=rope[key])
    for key, bounds in _YARN.items():
        if key in rope:
            _real(f"rope_scaling.{key}", rope[key], bounds, path)
    _check_relations(config, rope, path)
    _check_dspark(config, path)
    check_token_ids(config, config.get("vocab_size"), path)
    return _dims(config, path, tuple(lacking), rope)


def check_token_ids(
    values: Mapping[str, Any], vocab_size: object, path: object, prefix: str = ""
) -> None:
    """Refuse special tokens of a config, or of a generation_config, that no token can be.

    ``eos_token_id`` may be a list; the padding token, which nothing here uses, may be none (null or
    -1). ``vocab_size`` is None where it is not known.
    """
    below = vocab_size if type(vocab_size) is int else _WHOLE["vocab_size"][1]
    for key in (*_TOKENS, "pad_token_id", "dspark_noise_token_id"):
        if key not in values or (key == "pad_token_id" and values[key] in (None, -1)):
            continue
        given = values[key]
        listed = given if key == "eos_token_id" and isinstance(given, list) else [given]
        if not listed or not all(type(n) is int and 0 <= n < below for n in listed):
            raise ConfigError(
                prefix + key,
                path=path,
                expected=f"a token id from 0 to {below - 1}"
                + (", or a list of them" if key == "eos_token_id" else ""),
                found=repr(given)[:80],
            )


def check_generation(
    generation: Mapping[str, Any], config: Mapping[str, Any], path: object, prefix: str = ""
) -> None:
    """Refuse what ``run`` could not take from a generation_config.

    That are special tokens that the model of ``config`` does not have, and settings that no sampler
    takes.
    """
    given = {key: value for key, value in generation.items() if value is not None}
    check_token_ids(given, config.get("vocab_size"), path, prefix)
    sampling(given, path, prefix)


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


def _check_relations(config: dict[str, Any], rope: Mapping[str, float], path: object) -> None:
    """What values demand of each other; those that are absent demand nothing."""

    def check(key: str, other: str, holds: Callable[[Any, Any], bool], expected: str) -> None:
        if key in config and other in config and not holds(config[key], config[other]):
            expected = f"{expected} {other} = {config[other]}"
            raise ConfigError(key, path=path, expected=expected, found=config[key])

    if config.get("qk_rope_head_dim", 0) % 2:
        found = config["qk_rope_head_dim"]
        raise ConfigError("qk_rope_head_dim", path=path, expected="an even number", found=found)
    check("head_dim", "qk_rope_head_dim", operator.ge, "at least")
    check("index_head_dim", "qk_rope_head_dim", operator.ge, "at least")
    check("o_groups", "num_attention_heads", lambda groups, heads: heads % groups == 0, "a part of")
    check("n_routed_experts", "num_experts_per_tok", operator.ge, "at least")
    check("num_hash_layers", "num_hidden_layers", operator.le, "at most")
    if rope.get("beta_slow", 0) > rope.get("beta_fast", math.inf):
        raise ConfigError(
            "rope_scaling.beta_fast",
            path=path,
            expected=f"at least beta_slow = {rope['beta_slow']}",
            found=rope["beta_fast"],
        )
    keys = ("num_hidden_layers", "sliding_window", "head_dim")
    if all(key in config for key in keys):
        values = math.prod(config[key] for key in keys)
        if values > _WINDOW_VALUES:
            raise ConfigError(
                "num_hidden_layers * sliding_window * head_dim",
                path=path,
                expected=f"at most {_WINDOW_VALUES}",
                found=values,
            )


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
        isinstance(block, list)
        and len(block) == 2
        and all(_whole_in(n, 1, _MOST_BLOCK) for n in block)
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
    key = "dspark_target_layer_ids"
    if key in config:
        ids, layers = config[key], config.get("num_hidden_layers", math.inf)
        whole = isinstance(ids, list) and ids and all(_whole_in(n, 0, layers - 1) for n in ids)
        if not whole or len(set(ids)) != len(ids):
            raise ConfigError(
                key, path=path, expected="distinct layers of the model", found=repr(ids)[:80]
            )


def _dims(
    config: dict[str, Any], path: object, lacking: tuple[str, ...], rope: dict[str, Any]
) -> Dims:
    def size(*keys: str) -> int | None:
        values = [config.get(key) for key in keys]
        return None if None in values else math.prod(v for v in values if v is not None)

    heads, groups = size("num_attention_heads", "head_dim"), size("o_groups")
    n, d, rank = size("hc_mult"), size("hidden_size"), size("dspark_markov_rank")
    index = size("index_head_dim")
    experts, chosen = size("n_routed_experts"), size("num_experts_per_tok")
    layers, hash_layers = size("num_hidden_layers"), size("num_hash_layers")
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
        rope=rope,
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


def _whole_in(value: Any, low: int, high: float) -> bool:
    return type(value) is int and low <= value <= high


def _whole(key: str, value: Any, low: int, high: int, path: object) -> None:
    if not _whole_in(value, low, high):
        raise ConfigError(
            key,
            path=path,
            expected=f"a whole number from {low} to {high}" if low < high else low,
            found=repr(value)[:80],
        )


def _real(key: str, value: Any, bounds: tuple[float, float], path: object) -> None:
    if type(value) not in (int, float) or not bounds[0] <= value <= bounds[1]:  # NaN is neither
        raise ConfigError(
            key,
            path=path,
            expected=f"a positive number from {bounds[0]:g} to {bounds[1]:g}",
            found=repr(value)[:80],
        )


def _refuse_lacking(keys: list[str], path: object) -> None:
    more = len(keys) - KEYS_LISTED
    found = f"no {', '.join(keys[:KEYS_LISTED])}" + (f" and {more} more" if more > 0 else "")
    raise ConfigError("required key is missing", path=path, found=found)
