"""Owns the launches of a step through the whole model.

The same list runs directly or is recorded as a graph.
"""

from __future__ import annotations

from collections.abc import Iterator

from ds4q.hipkern import matrix as packing
from ds4q.runtime.backend.hip import Launch, Shown
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.device.block import StepBlock
from ds4q.runtime.device.layer import LayerProgram
from ds4q.runtime.device.linear import Job, linear, linear_groups
from ds4q.runtime.device.model import ModelWeights
from ds4q.runtime.device.scratch import ARGMAX_IDS, ARGMAX_PARTS, Scratch
from ds4q.runtime.device.weights import DeviceSource
from ds4q.runtime.kvtype import KvType


class Program:
    """The launches of a model.

    Parameters
    ----------
    source : gets the tables that launches refer to
    kv_type : how sequences keep window rows and entries

    Attributes
    ----------
    layers : the launches of each
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        source: DeviceSource,
        scratch: Scratch,
        kv_type: KvType,
    ) -> None:
        self._config = config
        self._weights = weights
        self._scratch = s = scratch
        self.layers = [
            LayerProgram(config, layer, number, source, scratch, kv_type)
            for number, layer in enumerate(weights.layers)
        ]
        self._embedding = source.table(packing.MATRIX_BYTES, weights.embedding.packed)
        d = config.hidden_size
        self._head = linear_groups(source, [Job(weights.head, s.normed, d, s.logits)], s)

    def body(
        self, block: StepBlock, tokens: int, end: int, *, traced: bool = False
    ) -> Iterator[Launch]:
        """Up to the last layer's output.

        ``end`` is the position behind the last token, or anything more: partial results get room
        for as many entries as there may be then.
        """
        for number, layer in enumerate(self.layers):
            yield from self.until_route(block, number, tokens, end, traced=traced)
            yield from layer.experts(self._scratch.experts, tokens, shared=True)
            if traced:
                yield layer.sums(tokens)

    def until_route(
        self, block: StepBlock, number: int, tokens: int, end: int, *, traced: bool = False
    ) -> Iterator[Launch]:
        """From the output of the layer before, or from the token ids, to a layer's experts' ids."""
        c, s = self._config, self._scratch
        if number == 0:
            yield Launch(
                "decode.hip",
                "embed",
                packing.embed_grid(c.hidden_size, tokens),
                (self._embedding.address, block.ids, s.streams.address, c.hc_mult),
                {"DS4Q_DECODER": self._weights.embedding.decoder},
            )
        before = None if number == 0 else number - 1
        yield from self.layers[number].until_route(block, tokens, end, before, traced)

    def head(self, first: int, tokens: int, *, traced: bool = False) -> Iterator[Launch]:
        """Logits of ``tokens`` tokens of the step from its ``first`` on; at most HEAD_TOKENS.

        Of a single one also the id of the largest.
        """
        c, s, w = self._config, self._scratch, self._weights.around_head
        n, d, parts = c.hc_mult, c.hidden_size, c.num_experts_per_tok + 1
        streams = s.streams.address + 4 * first * n * d
        last = len(self.layers) - 1
        yield Launch(
            "hyper.hip",
            "hc_mix",
            (s.slices, tokens, 1),
            (
                streams,
                s.downs.address + 4 * first * parts * d,
                s.post.address + 4 * first * n,
                s.comb.address + 4 * first * n * n,
                w.fn.address,
                s.mix.address,
                parts,
                d,
                n,
            ),
            {"DS4Q_STREAMS": n},
            (Shown(f"l{last}.streams", s.streams, (tokens, n, d)),) if traced and not first else (),
        )
        yield Launch(
            "hyper.hip",
            "hc_head",
            (1, tokens, 1),
            (
                streams,
                s.mix.address,
                w.scale.address,
                w.base.address,
                w.norm.address,
                s.collapsed.address if traced else 0,
                s.normed.address,
                d,
                s.slices,
                c.hc_eps,
                c.rms_norm_eps,
            ),
            {"DS4Q_STREAMS": n},
            (
                Shown("hc_head_out", s.collapsed, (tokens, d)),
                Shown("final_norm", s.normed, (tokens, d)),
            )
            if traced
            else (),
        )
        yield from linear(self._head, tokens)
        if tokens == 1:
            yield from self._argmax()

    def _argmax(self) -> Iterator[Launch]:
        s, vocab = self._scratch, self._config.vocab_size
        parts = min(ARGMAX_PARTS, -(-vocab // ARGMAX_IDS))
        yield Launch(
            "head.hip", "argmax_parts", (parts, 1, 1), (s.logits.address, s.parts.address, vocab)
        )
        yield Launch("head.hip", "argmax", (1, 1, 1), (s.parts.address, s.id.address, parts))
