"""Builds checkpoints for the tests of this room: sparse shards from a listing, and edited copies.

Knows the safetensors layout by itself, so that reader and builder cannot share a mistake.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data"
TINY, RANDOM = DATA / "ds4-tiny", DATA / "ds4-random"

BITS = {"F4": 4, "BF16": 16, "F16": 16, "F32": 32, "F64": 64, "I32": 32, "I64": 64}  # all others: 8

Entry = tuple[str, tuple[int, ...]]  # dtype, shape
Listing = Mapping[str, Entry]

# config.json of DeepSeek-V4-Flash as published, with the DSpark keys of the 0731 release.
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 1048576,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "expert_dtype": "fp4",
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
}


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    count = 1
    for n in shape:
        count *= n
    return count * BITS.get(dtype, 8) // 8


def shard_bytes(text: str | bytes, data: bytes = b"", claimed: int | None = None) -> bytes:
    """A safetensors file with the header ``text``; ``claimed`` forges its length field."""
    raw = text.encode() if isinstance(text, str) else text
    length = len(raw) if claimed is None else claimed
    return length.to_bytes(8, "little") + raw + data


def header_text(listing: Listing) -> str:
    """Header of ``listing``, laid out in the given order."""
    at, entries = 0, {}
    for name, (dtype, shape) in listing.items():
        end = at + tensor_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return json.dumps(entries, separators=(",", ":"))


def write_shard(path: Path, listing: Listing) -> None:
    """A shard whose data is a hole in the file: zeros that take no space."""
    front = shard_bytes(header_text(listing))
    path.write_bytes(front)
    os.truncate(path, len(front) + sum(tensor_bytes(*entry) for entry in listing.values()))


def write_model(
    folder: Path, listing: Listing, config: dict[str, Any] | None, *, shards: int = 1
) -> Path:
    """A folder with ``listing`` spread over sparse shards, an index where there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(listing)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: listing[name] for name in names[i::shards]}
        write_shard(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        total = sum(tensor_bytes(*entry) for entry in listing.values())
        write_index(folder, weight_map, total)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_index(folder: Path, weight_map: dict[str, Any], total_size: Any = None) -> None:
    """model.safetensors.index.json."""
    metadata = {} if total_size is None else {"total_size": total_size}
    text = json.dumps({"metadata": metadata, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def listing_of(folder: Path) -> dict[str, Entry]:
    """Names, dtypes and shapes of a checkpoint of the test data."""
    listing: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        listing |= {name: (e["dtype"], tuple(e["shape"])) for name, e in header.items()}
    return listing


def config_of(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint of the test data."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def record(patch: pytest.MonkeyPatch, name: str, pick: Callable[..., Any]) -> list[Any]:
    """What ``pick`` makes of the arguments of every call of ``os.<name>`` from here on."""
    calls: list[Any] = []
    real = getattr(os, name)

    def wrapper(*args: Any) -> Any:
        calls.append(pick(*args))
        return real(*args)

    patch.setattr(os, name, wrapper)
    return calls
