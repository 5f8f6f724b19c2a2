"""GGUF names: every tensor of the published model has one, short enough and its own."""

from __future__ import annotations

import pytest

from ds4q.quantize.deepseek4 import LAYER_ROWS, TRUNK_ROWS
from ds4q.quantize.export import names

LAYERS, EXPERTS = 43, 256
RATIOS = [0, 0, *([4, 128] * 20), 4]
HASHED = 3


def published() -> list[str]:
    """The weights of DeepSeek-V4-Flash's trunk, by the rules of its inference code."""
    found = [
        *("embed.weight", "head.weight", "norm.weight"),
        *("hc_head_fn", "hc_head_base", "hc_head_scale"),
    ]
    for layer, ratio in enumerate(RATIOS):
        for rest in LAYER_ROWS:
            apart = (
                ("indexer" in rest and ratio != 4)
                or ("compressor" in rest and not ratio)
                or (rest == "ffn.gate.bias" and layer < HASHED)
                or (rest == "ffn.gate.tid2eid" and layer >= HASHED)
            )
            if not apart:
                found.append(f"layers.{layer}.{rest}")
        for expert in range(EXPERTS):
            found += [f"layers.{layer}.ffn.experts.{expert}.{w}.weight" for w in ("w1", "w2", "w3")]
    return found


def test_the_published_model_has_1328_tensors() -> None:
    source = published()
    assert len(source) == 43 * 768 + 1199
    found = [names.gguf_name(name) for name in source]
    assert None not in found
    assert len(set(found)) == 1328
    assert max(len(str(name)) for name in found) <= names.NAME_BYTES
    alone = [name for name in found if name and "_exps" not in name]
    assert len(alone) == len(set(alone)), "two tensors would share a name"


def test_all_that_a_model_can_have_is_named() -> None:
    assert names._LAYER.keys() == LAYER_ROWS.keys()
    assert names._TOP.keys() == TRUNK_ROWS.keys()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("embed.weight", "token_embd.weight"),
        ("hc_head_scale", "output_hc_scale.weight"),
        ("layers.7.attn.attn_sink", "blk.7.attn_sinks.weight"),
        ("layers.12.ffn.gate.bias", "blk.12.exp_probs_b.bias"),
        ("layers.2.ffn.gate.tid2eid", "blk.2.ffn_gate_tid2eid.weight"),
        ("layers.4.attn.indexer.wq_b.weight", "blk.4.indexer.attn_q_b.weight"),
        ("layers.4.attn.indexer.compressor.ape", "blk.4.indexer_compressor_ape.weight"),
        ("layers.40.ffn.experts.255.w3.weight", "blk.40.ffn_up_exps.weight"),
        ("layers.0.ffn.experts.0.w1.weight", "blk.0.ffn_gate_exps.weight"),
        ("layers.0.ffn.experts.0.w2.weight", "blk.0.ffn_down_exps.weight"),
        ("layers.0.ffn.shared_experts.w2.weight", "blk.0.ffn_down_shexp.weight"),
        ("mtp.0.attn_norm.weight", None),
        ("mtp.0.ffn.experts.2.w1.weight", None),
        ("layers.0.ffn.experts.0.w4.weight", None),
        ("layers.0.something", None),
        ("../../pwn", None),
    ],
)
def test_names(source: str, found: str | None) -> None:
    assert names.gguf_name(source) == found
