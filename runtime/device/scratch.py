"""Owns where a step keeps what it computes: one place each, whatever the sequence. No launches."""

from __future__ import annotations

from functools import cached_property

from ds4q.runtime.config import ModelConfig
from ds4q.runtime.device.layout import Layout, Place

HEAD_TOKENS = 16  # whose logits are held at a time
KEYS = 16  # of a chunk of attention
MIX_COLUMNS = 32  # of a slice of a hyper-connection
ARGMAX_PARTS = 128  # at most
ARGMAX_IDS = 1024  # that are worth a part of their own
HELD_BYTES = 128 << 20  # of partial results of attention, and of scores, in a batch


class Scratch:
    """Places of everything that a step computes, for steps of at most ``batch`` tokens."""

    def __init__(self, layout: Layout, c: ModelConfig, batch: int, context: int) -> None:
        self._layout = layout
        d, heads, k = c.hidden_size, c.num_attention_heads, c.num_experts_per_tok
        floats = layout.floats
        columns = 2 * c.head_dim
        self.streams = floats(batch, c.hc_mult, d)
        self.slices = -(-d // MIX_COLUMNS)
        self.mix = floats(batch, self.slices, (2 + c.hc_mult) * c.hc_mult + 1)
        self.post = floats(batch, c.hc_mult)
        self.comb = floats(batch, c.hc_mult, c.hc_mult)
        self.collapsed = floats(batch, d)
        self.normed = floats(batch, d)
        self.query_low = floats(batch, c.q_lora_rank)
        self.query = floats(batch, heads, c.head_dim)
        self.kv = floats(batch, c.head_dim)
        self.values = floats(batch, columns)
        self.gates = floats(batch, columns)
        self.index_values = floats(batch, 2 * c.index_head_dim)
        self.index_gates = floats(batch, 2 * c.index_head_dim)
        self.index_query = floats(batch, c.index_n_heads, c.index_head_dim)
        self.index_weights = floats(batch, c.index_n_heads)
        self.chosen = floats(batch, c.index_topk)
        self.attended = floats(batch, heads, c.head_dim)
        self.low = floats(batch, c.o_groups * c.o_lora_rank)
        self.y = floats(batch, d)
        self.router = floats(batch, c.n_routed_experts)
        self.experts = floats(batch, k)
        self.weights = floats(batch, k)
        self.hidden = floats(batch, k + 1, c.moe_intermediate_size)
        self.downs = floats(batch, k + 1, d)
        self.routed = floats(batch, d)
        self.logits = floats(HEAD_TOKENS, c.vocab_size)
        self.parts = layout.reserve(8 * ARGMAX_PARTS)
        self.id = layout.reserve(4)
        self.chunk_bytes = 4 * heads * (c.head_dim + 4)
        most = max(chunks_of(c, ratio, context) for ratio in c.compress_ratios)
        widest = max(d, c.q_lora_rank, heads * c.head_dim, c.o_groups * c.o_lora_rank)
        self._rotated_bytes = 4 * batch * widest
        self.partial = layout.reserve(_held(batch, most * self.chunk_bytes))
        self.scores = layout.reserve(_held(batch, 4 * max(1, context // 4)))

    @cached_property
    def rotated(self) -> Place:
        """Of rotated activations, whichever a matrix multiplies; reserved where one needs it."""
        return self._layout.reserve(self._rotated_bytes)


def _held(batch: int, token_bytes: int) -> int:
    """Bytes for what a batch needs only a few tokens at a time: one at least."""
    return max(token_bytes, min(HELD_BYTES, batch * token_bytes))


def chunks_of(c: ModelConfig, ratio: int, end: int) -> int:
    """Chunks of keys that a token before position ``end`` may see."""
    entries = end // ratio if ratio else 0
    if ratio == 4:
        entries = min(entries, c.index_topk)
    return -(-(c.sliding_window + entries) // KEYS)
