"""Owns what a GGUF file says of the model: the keys under ``deepseek4.``. Knows no tensor.

Names as llama.cpp, antirez/ds4 and Lucebox read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds4q.artifact.codings import KEY, REPAIR
from ds4q.artifact.mixfiles import table_file
from ds4q.artifact.tables import KINDS, Table
from ds4q.quantize.config import Dims, check_config
from ds4q.quantize.export.container import (
    boolean,
    f32,
    f32_array,
    text,
    text_array,
    u8_array,
    u32,
    u32_array,
)
from ds4q.quantize.export.names import experts_name
from ds4q.quantize.export.plan import ExportError

ARCHITECTURE = "deepseek4"
QUANTIZATION_VERSION = 2  # of ggml's quantized types
SQRTSOFTPLUS = 4  # the number of this gating function

Keys = dict[str, bytes]

_NUMBERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "vocab_size": "vocab_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.output_lora_rank": "o_lora_rank",
    "attention.output_group_count": "o_groups",
    "attention.sliding_window": "sliding_window",
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
    "rope.dimension_count": "qk_rope_head_dim",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "hash_layer_count": "num_hash_layers",
    "hyper_connection.count": "hc_mult",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
}
_REALS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.compress_rope_freq_base": "compress_rope_theta",
    "rope.freq_base": "rope_theta",
    "expert_weights_scale": "routed_scaling_factor",
    "hyper_connection.epsilon": "hc_eps",
}
_ROPE_REALS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def model_keys(config: dict[str, Any], path: object) -> tuple[Keys, Dims]:
    """Keys of the architecture, in a fixed order, and the sizes that the config gives.

    Raises ``ConfigError`` for a config that lacks a key: GGUF has no partial models.
    """
    dims = check_config(config, path)
    rope = dims.rope
    context = rope["original_max_position_embeddings"]
    if context != int(context):
        what = "rope_scaling.original_max_position_embeddings"
        raise ExportError(what, path=path, expected="a whole number", found=context)
    ratios = dims.ratios or ()
    values = {name: u32(config[key]) for name, key in _NUMBERS.items()}
    values |= {name: f32((config | rope)[key]) for name, key in _REALS.items()}
    values |= {name: f32(rope[key]) for name, key in _ROPE_REALS.items()}
    values |= {
        "rope.scaling.type": text("yarn"),
        "rope.scaling.original_context_length": u32(int(context)),
        "attention.compress_ratios": u32_array(ratios),
        "expert_weights_norm": boolean(config["norm_topk_prob"]),
        "expert_gating_func": u32(SQRTSOFTPLUS),
        "swiglu_clamp_exp": f32_array([config["swiglu_limit"]] * len(ratios)),
    }
    keys = {
        "general.architecture": text(ARCHITECTURE),
        "general.quantization_version": u32(QUANTIZATION_VERSION),
    }
    return keys | {f"{ARCHITECTURE}.{name}": value for name, value in values.items()}, dims


def mix_keys(metadata: Mapping[str, Any], tables: Sequence[Table], *, only_experts: bool) -> Keys:
    """Decode tables, what is known of their books, and whether the file is a whole model.

    All tables are inside the file: none lies beside it. Empty of a whole model without tables.
    """
    mix = f"{ARCHITECTURE}.mix"
    scope = {f"{mix}.experts_only_smoke_artifact": boolean(only_experts)}
    if not tables:
        return scope if only_experts else {}
    document = metadata[KEY]
    calibration = document["calibration"]
    places = {table.name: experts_name(table.layer, table.projection) for table in tables}
    repaired = [
        f"{places[item['table']]}: {int(item['count'])} levels"
        for item in document.get("repairs", ())
        if int(item["count"])
    ]
    keys = {}
    for kind in KINDS.values():
        some = [table for table in tables if table.kind == kind.name]
        if some:
            keys[f"{ARCHITECTURE}.{kind.name}.sidecar"] = u8_array(table_file(kind, some))
    return keys | {
        f"{mix}.calibration": text(calibration),
        f"{mix}.lower_quality_absmax_only": boolean(calibration == "absmax"),
        f"{mix}.codebook_repair": text(REPAIR),
        f"{mix}.codebook_repairs": text_array(repaired),
        **scope,
    }
