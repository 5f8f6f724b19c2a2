"""Owns a random model so small that a step of it takes milliseconds on the simulated device.

One hash layer of ratio 4 with an indexer, one learned layer of ratio 128: every kernel of a step
runs, rings come round and indexers choose within a few dozen tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ds4q.artifact.formats import codec_for
from ds4q.artifact.formats.hfp4g32 import repack
from ds4q.artifact.types import BF16, F32, HFP4G32, TIDI32
from tests.runtime.artifacts import DATA, Array, Packed, config_of, write

CONFIG: dict[str, Any] = config_of(DATA / "ds4-tiny") | {
    "compress_ratios": [4, 128],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 32,
    "hidden_size": 64,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": 2,
    "o_groups": 2,
    "o_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "sliding_window": 8,
    "vocab_size": 96,
}


def shapes(c: dict[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model but ``tid2eid``."""
    d, n, width = c["hidden_size"], c["hc_mult"], c["moe_intermediate_size"]
    mixed, ranks = (2 + n) * n, c["o_groups"] * c["o_lora_rank"]
    queries = c["num_attention_heads"] * c["head_dim"]
    found: dict[str, tuple[int, ...]] = {
        "embed.weight": (c["vocab_size"], d),
        "head.weight": (c["vocab_size"], d),
        "norm.weight": (d,),
        "hc_head_fn": (n, n * d),
        "hc_head_base": (n,),
        "hc_head_scale": (1,),
    }

    def compressor(name: str, ratio: int, own: int) -> None:
        columns = (2 if ratio == 4 else 1) * own
        found[f"{name}.wkv.weight"] = found[f"{name}.wgate.weight"] = (columns, d)
        found[f"{name}.ape"], found[f"{name}.norm.weight"] = (ratio, columns), (own,)

    for layer, ratio in enumerate(c["compress_ratios"]):
        name = f"layers.{layer}"
        for part in ("attn", "ffn"):
            found[f"{name}.{part}_norm.weight"] = (d,)
            found[f"{name}.hc_{part}_fn"] = (mixed, n * d)
            found[f"{name}.hc_{part}_base"], found[f"{name}.hc_{part}_scale"] = (mixed,), (3,)
        attn, ffn = f"{name}.attn", f"{name}.ffn"
        found[f"{attn}.attn_sink"] = (c["num_attention_heads"],)
        found[f"{attn}.q_norm.weight"] = (c["q_lora_rank"],)
        found[f"{attn}.kv_norm.weight"] = (c["head_dim"],)
        found[f"{attn}.wq_a.weight"] = (c["q_lora_rank"], d)
        found[f"{attn}.wq_b.weight"] = (queries, c["q_lora_rank"])
        found[f"{attn}.wkv.weight"] = (c["head_dim"], d)
        found[f"{attn}.wo_a.weight"] = (ranks, queries // c["o_groups"])
        found[f"{attn}.wo_b.weight"] = (d, ranks)
        if ratio:
            compressor(f"{attn}.compressor", ratio, c["head_dim"])
        if ratio == 4:
            heads, own = c["index_n_heads"], c["index_head_dim"]
            found[f"{attn}.indexer.wq_b.weight"] = (heads * own, c["q_lora_rank"])
            found[f"{attn}.indexer.weights_proj.weight"] = (heads, d)
            compressor(f"{attn}.indexer.compressor", ratio, own)
        found[f"{ffn}.gate.weight"] = (c["n_routed_experts"], d)
        if layer >= c["num_hash_layers"]:
            found[f"{ffn}.gate.bias"] = (c["n_routed_experts"],)
        for expert in (*(f"experts.{e}" for e in range(c["n_routed_experts"])), "shared_experts"):
            found[f"{ffn}.{expert}.w1.weight"] = found[f"{ffn}.{expert}.w3.weight"] = (width, d)
            found[f"{ffn}.{expert}.w2.weight"] = (d, width)
    return found


def tensors(seed: int = 1, c: dict[str, Any] = CONFIG) -> dict[str, Packed]:
    """Random weights, experts in HFP4G32, as ``artifacts.write`` takes them."""
    random = np.random.default_rng(seed)
    made: dict[str, Packed] = {}
    for name, shape in shapes(c).items():
        if ".experts." in name:
            codes = random.integers(0, 256, (shape[0], shape[1] // 2), dtype=np.uint8)
            scales = random.integers(122, 125, (shape[0], shape[1] // 32), dtype=np.uint8)
            made[name] = (HFP4G32, shape, repack(codes, scales).reshape(-1))
            continue
        values: Array = random.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            values = values / 10 + 1
        elif len(shape) == 2:
            values *= np.float32(2 / shape[1] ** 0.5)
        kind = BF16 if name.endswith(".weight") and len(shape) == 2 else F32
        made[name] = (kind, shape, codec_for(kind.id).encode(values))
    for layer in range(c["num_hash_layers"]):
        rows = [random.permutation(c["n_routed_experts"]) for _ in range(c["vocab_size"])]
        table = np.array(rows)[:, : c["num_experts_per_tok"]]
        name = f"layers.{layer}.ffn.gate.tid2eid"
        made[name] = (TIDI32, table.shape, codec_for(TIDI32.id).encode(table))
    return made


def write_micro(path: Path, **changed: Packed) -> Path:
    """The model as an artifact; ``changed`` tensors in place of its own."""
    return write(path, CONFIG, tensors() | changed)
