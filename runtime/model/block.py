"""Owns one layer: attention and experts, each inside its hyper-connection."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds4q.runtime.model.attention import Attention
from ds4q.runtime.model.hyper import HyperConnection, expand
from ds4q.runtime.model.moe import MoE, Router
from ds4q.runtime.model.parts import Parts, Step

F32 = npt.NDArray[np.float32]


class Block:
    """``layers.N.*``."""

    def __init__(self, parts: Parts, layer: int) -> None:
        name = f"layers.{parts.config.number(layer)}"
        self._layer = layer
        self._around_attention = HyperConnection(
            parts, f"{name}.hc_attn", f"{name}.attn_norm.weight"
        )
        self._attention = Attention(parts, layer)
        self._around_experts = HyperConnection(parts, f"{name}.hc_ffn", f"{name}.ffn_norm.weight")
        self._experts = MoE(parts, layer)

    @property
    def experts(self) -> MoE:
        """The second sub-block."""
        return self._experts

    @property
    def router(self) -> Router:
        """How the layer chooses experts."""
        return self._experts.router

    def forward(self, streams: F32, step: Step) -> F32:
        """Streams [T, n, d] after the layer; advances the spans' caches, changes no input."""
        streams = self.attend(streams, step)
        collapsed, x, post, comb = self.enter_experts(streams)
        y = self._experts.forward(x, step)
        streams = expand(streams, y, post, comb)
        if step.trace is not None:
            step.trace(f"l{self._layer}.ffn_in", collapsed)
            step.trace(f"l{self._layer}.ffn_out", y)
            step.trace(f"l{self._layer}.streams", streams)
        return streams

    def attend(self, streams: F32, step: Step) -> F32:
        """Streams after the first sub-block, attention; advances the spans' caches."""
        collapsed, x, post, comb = self._around_attention.collapse(streams)
        y = self._attention.forward(x, step)
        if step.trace is not None:
            step.trace(f"l{self._layer}.attn_in", collapsed)
            step.trace(f"l{self._layer}.attn_post", post)
            step.trace(f"l{self._layer}.attn_comb", comb)
            step.trace(f"l{self._layer}.attn_out", y)
        return expand(streams, y, post, comb)

    def enter_experts(self, streams: F32) -> tuple[F32, F32, F32, F32]:
        """What ``HyperConnection.collapse`` gives before the experts; the second is their input."""
        return self._around_experts.collapse(streams)
