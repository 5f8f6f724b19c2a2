"""Owns the launches of one layer: which kernels run in which order, on which places.

What a later step changes (position, ids, rotations, where caches lie) stands in the step block and
nowhere in a launch.

T tokens, d hidden size, n streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ds4q.hipkern import matrix as packing
from ds4q.hipkern.kernels import KV_TYPES
from ds4q.runtime.backend.hip import Launch, Shown
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.device.block import StepBlock
from ds4q.runtime.device.layout import Place
from ds4q.runtime.device.linear import Job, Rotation, linear, linear_groups
from ds4q.runtime.device.model import HyperWeights, LayerWeights
from ds4q.runtime.device.scratch import KEYS, Scratch, chunks_of
from ds4q.runtime.device.weights import DeviceSource, Matrix
from ds4q.runtime.kvtype import KvType

SCORE_BLOCKS = 128  # at most: blocks stride over chunks of keys
ATTEND_BLOCKS = 40  # as many as there are chunks in a full Flash layer of ratio 4


class LayerProgram:
    """The launches of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        number: int,
        source: DeviceSource,
        scratch: Scratch,
        kv_type: KvType,
    ) -> None:
        self._config = c = config
        self._weights = w = weights
        self._number = number
        self._kept = {"DS4Q_KV_TYPE": KV_TYPES[kv_type]}
        self._scratch = s = scratch
        d, low = c.hidden_size, c.q_lora_rank
        first = [Job(w.query_low, s.normed, d, s.query_low), Job(w.kv, s.normed, d, s.kv)]
        second = [Job(w.query, s.query_low, low, s.query)]
        if w.compressor is not None:
            first.append(Job(w.compressor.values, s.normed, d, s.values))
            first.append(Job(w.compressor.gates, s.normed, d, s.gates))
        if w.indexer is not None:
            own = w.indexer.compressor
            first.append(Job(own.values, s.normed, d, s.index_values))
            first.append(Job(own.gates, s.normed, d, s.index_gates))
            first.append(Job(w.indexer.weights, s.normed, d, s.index_weights))
            second.append(Job(w.indexer.query, s.query_low, low, s.index_query))
        self._first = linear_groups(source, first, s)
        self._second = linear_groups(source, second, s)
        ranks, heads = c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim
        grouped = [
            Job(part, s.attended, heads, s.low, g * part.cols, g * part.rows, ranks)
            for g, part in enumerate(w.out_low)
        ]
        self._out_low = linear_groups(source, grouped, s)
        self._out = linear_groups(source, [Job(w.out, s.low, ranks, s.y)], s)
        self._gate = linear_groups(source, [Job(w.gate, s.normed, d, s.router)], s)
        self._matrices = matrices = [part for expert in w.experts for part in expert]
        self._experts = source.table(
            packing.MATRIX_BYTES * len(matrices), partial(_packed, matrices)
        )
        self._shared = source.table(packing.MATRIX_BYTES * 3, partial(_packed, w.shared))
        every = matrices + w.shared
        rotated = _has_rotated(every[0::3] + every[1::3])
        self._rotation = Rotation(s.normed, s.rotated, d) if rotated else None
        self._rotates_hidden = _has_rotated(every[2::3])
        gate, down = _one_decoder(matrices[0::3] + matrices[1::3]), _one_decoder(matrices[2::3])
        if not gate or not down:  # one build for all mixed layers, not one for each combination
            gate = down = 0
        self._moe = {
            "DS4Q_GATE": gate,
            "DS4Q_DOWN": down,
            "DS4Q_SHARED_EXPERT": _one_decoder(w.shared),
        }

    def table(self) -> tuple[Place, bytes]:
        """Where kernels look up the routed experts, and what is there once weights are filled."""
        return self._experts, _packed(self._matrices)

    def until_route(
        self, block: StepBlock, tokens: int, end: int, before: int | None, traced: bool
    ) -> Iterator[Launch]:
        """The layer up to its choice of experts, for tokens that end before position ``end``.

        ``before`` is the layer whose output still has to be mixed into the streams.
        """
        c, w, s = self._config, self._weights, self._scratch
        turns = block.turns(w.ratio)
        shows: tuple[Shown, ...] = ()
        if traced and before is not None:
            shows = (Shown(f"l{before}.streams", s.streams, (tokens, c.hc_mult, c.hidden_size)),)
        parts = 0 if before is None else c.num_experts_per_tok + 1
        yield self._mix(w.around_attention, tokens, s.downs, parts, shows)
        yield self._collapse(w.around_attention, tokens, "attn", traced)
        yield from linear(self._first, tokens)
        yield self._latents(block, tokens)
        yield from linear(self._second, tokens)
        chosen = w.indexer is not None
        if chosen:
            yield from self._choose(block, tokens, end, traced)
        chunks = chunks_of(c, w.ratio, end)
        step = max(1, s.partial.nbytes // (chunks * s.chunk_bytes))
        topk = c.index_topk if chosen else 0
        heads, width, pairs = c.num_attention_heads, c.head_dim, c.qk_rope_head_dim // 2
        for at in range(0, tokens, step):
            count = min(step, tokens - at)
            rows, turned = 4 * at * heads * width, 4 * at * pairs
            yield Launch(
                "attention.hip",
                "attend",
                (min(chunks, ATTEND_BLOCKS), -(-heads // 16), count),
                (
                    s.query.address + rows,
                    block.layer(self._number),
                    block.stand(at),
                    s.chosen.address + 4 * at * topk if chosen else 0,
                    turns.cos + turned,
                    turns.sin + turned,
                    s.partial.address,
                    heads,
                    pairs,
                    c.sliding_window,
                    w.ratio,
                    topk,
                    chunks,
                    c.rms_norm_eps,
                ),
                self._kept | {"DS4Q_HEAD_DIM": width},
            )
            yield Launch(
                "attention.hip",
                "attend_combine",
                (-(-width // 128), heads, count),
                (
                    s.partial.address,
                    w.sink.address,
                    block.stand(at),
                    turns.cos + turned,
                    turns.sin + turned,
                    s.attended.address + rows,
                    heads,
                    pairs,
                    c.sliding_window,
                    w.ratio,
                    topk,
                    chunks,
                ),
                self._kept | {"DS4Q_HEAD_DIM": width},
            )
        yield from linear(self._out_low, tokens)
        out = Shown(f"l{self._number}.attn_out", s.y, (tokens, c.hidden_size))
        yield from linear(self._out, tokens, (out,) if traced else ())
        yield self._mix(w.around_experts, tokens, s.y, 1)
        yield self._collapse(w.around_experts, tokens, "ffn", traced)
        yield from linear(self._gate, tokens)
        if self._rotation is not None:  # once, however many bands of experts multiply it
            yield self._rotation.launch(tokens)
        yield self._route(block, tokens, traced)

    def _mix(
        self,
        w: HyperWeights,
        tokens: int,
        added: Place,
        parts: int,
        shows: tuple[Shown, ...] = (),
    ) -> Launch:
        """Mix a sub-block's output, the sum of ``parts`` [tokens, parts, d], into the streams.

        Without parts the streams stay. Either way the sums for the next collapse are taken.
        """
        c, s = self._config, self._scratch
        n, d, rows = c.hc_mult, c.hidden_size, (2 + c.hc_mult) * c.hc_mult
        return Launch(
            "hyper.hip",
            "hc_mix",
            (s.slices, tokens, 1),
            (
                s.streams.address,
                added.address,
                s.post.address,
                s.comb.address,
                w.fn.address,
                s.mix.address,
                parts,
                d,
                rows,
            ),
            {"DS4Q_STREAMS": n},
            shows,
        )

    def _collapse(self, w: HyperWeights, tokens: int, part: str, traced: bool) -> Launch:
        """Collapse the streams to a sub-block's input."""
        c, s = self._config, self._scratch
        n, d = c.hc_mult, c.hidden_size
        name = f"l{self._number}.{part}"
        shows = [Shown(f"{name}_in", s.collapsed, (tokens, d))]
        if part == "attn":
            shows.append(Shown(f"{name}_post", s.post, (tokens, n)))
            shows.append(Shown(f"{name}_comb", s.comb, (tokens, n, n)))
        return Launch(
            "hyper.hip",
            "hc_collapse",
            (2, tokens, 1),
            (
                s.streams.address,
                s.mix.address,
                w.scale.address,
                w.base.address,
                w.norm.address,
                s.collapsed.address if traced else 0,
                s.normed.address,
                s.post.address,
                s.comb.address,
                d,
                s.slices,
                c.hc_sinkhorn_iters,
                c.hc_eps,
                c.rms_norm_eps,
            ),
            {"DS4Q_STREAMS": n},
            tuple(shows) if traced else (),
        )

    def _latents(self, block: StepBlock, tokens: int) -> Launch:
        """Norms of query and kv, window rows, raw rows and the entries that they complete."""
        c, w, s = self._config, self._weights, self._scratch
        turns, compressor = block.turns(w.ratio), w.compressor
        index = None if w.indexer is None else w.indexer.compressor
        return Launch(
            "compress.hip",
            "latents",
            (2 + (compressor is not None) + (index is not None), tokens, 1),
            (
                s.query_low.address,
                w.query_norm.address,
                s.query_low.address,
                c.q_lora_rank,
                s.kv.address,
                w.kv_norm.address,
                s.values.address,
                s.gates.address,
                compressor.ape.address if compressor else 0,
                compressor.norm.address if compressor else 0,
                s.index_values.address,
                s.index_gates.address,
                index.ape.address if index else 0,
                index.norm.address if index else 0,
                turns.cos,
                turns.sin,
                turns.window_cos,
                turns.window_sin,
                block.layer(self._number),
                block.stand(),
                c.head_dim,
                c.index_head_dim,
                c.qk_rope_head_dim // 2,
                w.ratio,
                c.rms_norm_eps,
            ),
            self._kept,
        )

    def _choose(self, block: StepBlock, tokens: int, end: int, traced: bool) -> Iterator[Launch]:
        """Scores of index entries, and the best of them."""
        c, s, ratio = self._config, self._scratch, self._weights.ratio
        turns, pairs = block.turns(ratio), c.qk_rope_head_dim // 2
        heads, width, topk = c.index_n_heads, c.index_head_dim, c.index_topk
        stride = max(1, end // ratio)
        step = max(1, s.scores.nbytes // (4 * stride))
        for at in range(0, tokens, step):
            count = min(step, tokens - at)
            yield Launch(
                "index.hip",
                "index_scores",
                (min(SCORE_BLOCKS, -(-stride // KEYS)), count, 1),
                (
                    s.index_query.address + 4 * at * heads * width,
                    s.index_weights.address + 4 * at * heads,
                    block.layer(self._number),
                    block.stand(at),
                    turns.cos + 4 * at * pairs,
                    turns.sin + 4 * at * pairs,
                    s.scores.address,
                    heads,
                    width,
                    pairs,
                    ratio,
                    topk,
                    stride,
                ),
            )
            chosen = Shown(f"l{self._number}.index_topk", s.chosen, (tokens, topk), "i4")
            yield Launch(
                "index.hip",
                "index_select",
                (1, count, 1),
                (
                    s.scores.address,
                    block.stand(at),
                    s.chosen.address + 4 * at * topk,
                    ratio,
                    topk,
                    stride,
                ),
                shows=(chosen,) if traced and at + count == tokens else (),
            )

    def _route(self, block: StepBlock, tokens: int, traced: bool) -> Launch:
        c, w, s = self._config, self._weights, self._scratch
        name, k = f"l{self._number}", c.num_experts_per_tok
        return Launch(
            "route.hip",
            "route",
            (1, tokens, 1),
            (
                s.router.address,
                w.bias.address if w.bias else 0,
                w.by_token.address if w.by_token else 0,
                block.ids,
                s.experts.address,
                s.weights.address,
                c.n_routed_experts,
                k,
                c.routed_scaling_factor,
            ),
            shows=(
                Shown(f"{name}.route_idx", s.experts, (tokens, k), "i4"),
                Shown(f"{name}.route_w", s.weights, (tokens, k)),
            )
            if traced
            else (),
        )

    def experts(self, ids: Place, tokens: int, *, shared: bool) -> Iterator[Launch]:
        """Downs of the experts ``ids`` i32 [tokens, k], and of the shared one.

        -1 gives zeros; less leaves a row alone, and so does not ``shared``.
        """
        c, s = self._config, self._scratch
        k, slots = c.num_experts_per_tok, c.num_experts_per_tok + shared
        yield Launch(
            "moe.hip",
            "moe_gate_up",
            (packing.gate_up_grid(c.moe_intermediate_size, k, tokens)[0], slots, tokens),
            (
                self._experts.address,
                self._shared.address,
                ids.address,
                s.normed.address,
                (s.normed if self._rotation is None else self._rotation.to).address,
                s.hidden.address,
                c.swiglu_limit,
                k,
                tokens,
            ),
            self._moe,
        )
        if self._rotates_hidden:
            width = c.moe_intermediate_size
            yield Launch(
                "rotate.hip",
                "rotate_hidden",
                (packing.rotate_hidden_grid(width, k, tokens)[0], slots, tokens),
                (
                    self._experts.address,
                    self._shared.address,
                    ids.address,
                    s.hidden.address,
                    width,
                    k,
                ),
            )
        yield Launch(
            "moe.hip",
            "moe_down",
            (packing.down_grid(c.hidden_size, k, tokens)[0], slots, tokens),
            (
                self._experts.address,
                self._shared.address,
                ids.address,
                s.weights.address,
                s.hidden.address,
                s.downs.address,
                k,
                tokens,
            ),
            self._moe,
        )

    def mixed(self, tokens: int) -> Launch:
        """Mixes the layer's downs into the streams, as else the next layer or the head does."""
        c, w, s = self._config, self._weights, self._scratch
        return self._mix(w.around_experts, tokens, s.downs, c.num_experts_per_tok + 1)

    def sums(self, tokens: int) -> Launch:
        """Shows the layer's downs as they will be summed."""
        c, s = self._config, self._scratch
        name, d = f"l{self._number}", c.hidden_size
        return Launch(
            "hyper.hip",
            "hc_sum",
            packing.sum_grid(d, tokens),
            (s.downs.address, s.routed.address, s.y.address, c.num_experts_per_tok + 1, d),
            {"DS4Q_STREAMS": c.hc_mult},
            (
                Shown(f"{name}.routed_out", s.routed, (tokens, d)),
                Shown(f"{name}.ffn_out", s.y, (tokens, d)),
            ),
        )


def _packed(matrices: Sequence[Matrix]) -> bytes:
    return b"".join(matrix.packed() for matrix in matrices)


def _has_rotated(matrices: Sequence[Matrix]) -> bool:
    return any(matrix.decoder in packing.ROTATED for matrix in matrices)


def _one_decoder(matrices: Sequence[Matrix]) -> int:
    """The decoder that all share, or 0: each matrix then says its own."""
    decoders = {matrix.decoder for matrix in matrices}
    return decoders.pop() if len(decoders) == 1 else 0
