"""Owns attention over window rows and compressed entries, and the layer that feeds it.

One kv row per token is key and value at once, shared by all heads. Values carry their key's
rotation, so the output is rotated back by the query's position. A learned sink per head enters the
softmax's denominator only.

T tokens, H heads, D head width, S chosen entries per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.runtime.backend.weights import Weight
from ds4q.runtime.backend.workers import Workers
from ds4q.runtime.kv import LayerCache
from ds4q.runtime.kvtable import Table, put, rows_at
from ds4q.runtime.kvtype import Rows, narrow, widen, widened
from ds4q.runtime.model.compressor import Compressor
from ds4q.runtime.model.indexer import Indexer
from ds4q.runtime.model.norm import inverse_rms, norm_row, rms_norm, rms_norm_reference
from ds4q.runtime.model.parts import Parts, Step, share
from ds4q.runtime.model.rope import rotate_reference, rotate_row
from ds4q.runtime.model.tile import LANES, ROWS, tile

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


def turned_reference(kv: F32, norm_weight: F32, eps: float, cos: F32, sin: F32) -> F32:
    """``kv`` [T, D] normed, and rotated by cos, sin [T, pairs]."""
    return rotate_reference(rms_norm_reference(kv, norm_weight, eps), cos, sin)


@jit
def _turned_fast(kv: F32, norm_weight: F32, eps: float, cos: F32, sin: F32) -> F32:
    rows = np.empty_like(kv)
    for t in range(kv.shape[0]):
        norm_row(kv[t], norm_weight, eps, rows[t])
        rotate_row(rows[t], cos[t], sin[t])
    return rows


def attend_reference(
    q: F32,
    sink: F32,
    windows: Table,
    reach: int,
    entries: Table,
    chosen: I64,
    counts: I64,
    cos: F32,
    sin: F32,
    positions: I64,
    owners: I64,
    eps: float,
    out: F32,
    begin: int,
    end: int,
) -> None:
    """Attend for some (token, block of heads) units; write ``out`` [T, H, D].

    Parameters
    ----------
    q : f32 [T, H, D], projected queries, neither normed nor rotated
    sink : f32 [H]
    windows : [capacity, D] rings as they are stored; a token at position p sees p - reach + 1 .. p
    entries : [capacity, D] each, as they are stored; token t sees ``chosen[t, :counts[t]]``, or the
        first ``counts[t]`` where ``chosen`` has no columns
    cos, sin : f32 [T, pairs] at the tokens' positions
    positions, owners : int64 [T], where a token stands in which of the sequences
    begin, end : units; unit ``t * blocks + b`` is 16 heads of token t
    """
    _, heads, width = q.shape
    blocks = -(-heads // LANES)
    for unit in range(begin, end):
        t, low = unit // blocks, unit % blocks * LANES
        window, own = windows.arrays[owners[t]], entries.arrays[owners[t]]
        seen = np.arange(max(0, positions[t] - reach + 1), positions[t] + 1) % len(window)
        picked = chosen[t, : counts[t]] if chosen.shape[1] else np.arange(counts[t])
        keys = np.concatenate([widen(window[seen]), widen(own[picked])])  # [n, D]
        head = q[t, low : low + LANES]  # [h, D]
        head = head / np.sqrt(np.mean(head**2, axis=-1, keepdims=True) + np.float32(eps))
        scores = rotate_reference(head, cos[t], sin[t]) @ keys.T * np.float32(width**-0.5)
        extra = sink[low : low + LANES, None]
        top = np.maximum(scores.max(axis=-1, keepdims=True), extra)
        weights = np.exp(scores - top)
        mixed = weights @ keys / (weights.sum(axis=-1, keepdims=True) + np.exp(extra - top))
        out[t, low : low + LANES] = rotate_reference(mixed, cos[t], -sin[t])


@jit
def _gather(
    window: Rows, position: int, reach: int, entries: Rows, chosen: I64, count: int, keys: F32
) -> int:
    """Copy the rows that one token sees to ``keys``, window rows first; return their number."""
    oldest = max(0, position - reach + 1)
    seen = position + 1 - oldest
    # Plain loops: a slice assignment costs several times as much, a call blocks vectorising.
    for i in range(seen):
        source, target = window[(oldest + i) % window.shape[0]], keys[i]
        for c in range(source.shape[0]):
            target[c] = widened(source[c])
    for i in range(count):
        source, target = entries[chosen[i] if chosen.shape[0] else i], keys[seen + i]
        for c in range(source.shape[0]):
            target[c] = widened(source[c])
    for i in range(seen + count, min(seen + count + ROWS, keys.shape[0])):
        keys[i] = 0.0
    for c in range(window.shape[1], keys.shape[1]):
        keys[:, c] = 0.0
    return seen + count


@jit
def _weigh(scores: F32, scale: np.float32, sink: F32, weights: F32, totals: F32) -> None:
    """Softmax numerators of ``scores`` [n, 16] to ``weights`` [16, n], denominators aside."""
    top = np.empty(LANES, dtype=np.float32)
    for j in range(LANES):
        top[j] = sink[min(j, sink.shape[0] - 1)]
    for i in range(scores.shape[0]):
        for j in range(LANES):
            value = scores[i, j] * scale
            scores[i, j] = value
            top[j] = value if value > top[j] else top[j]
    for j in range(sink.shape[0]):
        total = np.exp(sink[j] - top[j])
        for i in range(scores.shape[0]):
            weight = np.exp(scores[i, j] - top[j])
            weights[j, i] = weight
            total += weight
        totals[j] = total


@jit
def _load_queries(q: F32, cos: F32, sin: F32, eps: float, row: F32, queries: F32) -> None:
    """Norm and rotate heads ``q`` [h <= 16, D] into the columns of ``queries`` [D, 16]."""
    for j in range(q.shape[0]):
        r = inverse_rms(q[j], eps)
        for i in range(q.shape[1]):
            row[i] = q[j, i] * r
        rotate_row(row, cos, sin)
        for i in range(q.shape[1]):
            queries[i, j] = row[i]


@jit
def _attend_units(
    q: F32,
    sink: F32,
    window: Rows,
    windows: I64,
    reach: int,
    entry: Rows,
    entries: I64,
    chosen: I64,
    counts: I64,
    cos: F32,
    sin: F32,
    positions: I64,
    owners: I64,
    eps: float,
    out: F32,
    begin: int,
    end: int,
) -> None:
    heads, width = q.shape[1:]
    blocks = (heads + LANES - 1) // LANES
    padded = (width + LANES - 1) // LANES * LANES
    most = 0
    for t in range(counts.shape[0]):
        most = max(most, counts[t])
    groups = (reach + most + ROWS - 1) // ROWS
    scale = np.float32(width**-0.5)
    # Rows, columns and lanes past the live ones never mix with these; zeros keep out denormals,
    # which would slow down their tiles.
    keys = np.empty((groups * ROWS, padded), dtype=np.float32)
    scores = np.empty((groups * ROWS, LANES), dtype=np.float32)
    queries = np.zeros((width, LANES), dtype=np.float32)
    weights = np.zeros((LANES, groups * ROWS), dtype=np.float32)
    mixed = np.empty((LANES, padded), dtype=np.float32)
    totals = np.empty(LANES, dtype=np.float32)
    row = np.empty(width, dtype=np.float32)
    held, n = -1, 0
    for unit in range(begin, end):
        t, low = unit // blocks, unit % blocks * LANES
        if t != held:
            ring = rows_at(window, windows[owners[t]], window.shape[0])
            own = rows_at(entry, entries[owners[t]], entry.shape[0])
            n = _gather(ring, positions[t], reach, own, chosen[t], counts[t], keys)
            held = t
        high = min(heads, low + LANES)
        _load_queries(q[t, low:high], cos[t], sin[t], eps, row, queries)
        for i in range(0, n, ROWS):
            tile(keys[i : i + ROWS, :width], queries, scores[i : i + ROWS])
        _weigh(scores[:n], scale, sink[low:high], weights, totals)
        for j in range(0, high - low, ROWS):
            for c in range(0, padded, LANES):
                tile(
                    weights[j : j + ROWS, :n],
                    keys[:, c : c + LANES],
                    mixed[j : j + ROWS, c : c + LANES],
                )
        for j in range(high - low):
            target = out[t, low + j]
            for i in range(width):
                target[i] = mixed[j, i] / totals[j]
            rotate_row(target, cos[t], -sin[t])


def _attend_fast(
    q: F32,
    sink: F32,
    windows: Table,
    reach: int,
    entries: Table,
    chosen: I64,
    counts: I64,
    cos: F32,
    sin: F32,
    positions: I64,
    owners: I64,
    eps: float,
    out: F32,
    begin: int,
    end: int,
) -> None:
    _attend_units(
        q,
        sink,
        windows.like,
        windows.addresses,
        reach,
        entries.like,
        entries.addresses,
        chosen,
        counts,
        cos,
        sin,
        positions,
        owners,
        eps,
        out,
        begin,
        end,
    )


turned = FastPath(turned_reference, _turned_fast)
attend_units = FastPath(attend_reference, _attend_fast)


def attend(
    workers: Workers,
    q: F32,
    sink: F32,
    windows: Table,
    reach: int,
    entries: Table,
    chosen: I64,
    counts: I64,
    cos: F32,
    sin: F32,
    positions: I64,
    owners: I64,
    eps: float,
) -> F32:
    """``attend_reference`` for all tokens and heads, on the workers' threads; [T, H, D]."""
    tokens, heads, width = q.shape
    out = np.empty_like(q)
    seen = windows, reach, entries, chosen, counts, cos, sin, positions, owners

    def part(begin: int, end: int) -> None:
        attend_units(q, sink, *seen, eps, out, begin, end)

    rows = reach + int(counts[-1])  # of one of the tokens: enough to tell what sharing is worth
    share(workers, part, tokens * -(-heads // LANES), 2 * width * LANES * rows)
    return out


def row_groups(weight: Weight, groups: int) -> list[Weight]:
    """``weight`` cut into ``groups`` runs of rows, over the same bytes."""
    rows = weight.rows // groups
    nbytes = rows * weight.row_bytes
    parts = (weight.data[g * nbytes : (g + 1) * nbytes] for g in range(groups))
    return [Weight(weight.type_id, rows, weight.cols, part, weight.coding) for part in parts]


class Attention:
    """``layers.N.attn.*``: low-rank queries, one shared kv head, grouped low-rank output."""

    def __init__(self, parts: Parts, layer: int) -> None:
        c, source = parts.config, parts.source
        name = f"layers.{c.number(layer)}.attn"
        heads, width = c.num_attention_heads, c.head_dim
        self._config = c
        self._backend = parts.backend
        self._workers = parts.workers
        self._layer = layer
        self._ratio = ratio = c.compress_ratios[layer]
        self._sink = source.values(f"{name}.attn_sink", heads)
        self._wq_a = source.matrix(f"{name}.wq_a.weight", c.q_lora_rank, c.hidden_size)
        self._q_norm = source.values(f"{name}.q_norm.weight", c.q_lora_rank)
        self._wq_b = source.matrix(f"{name}.wq_b.weight", heads * width, c.q_lora_rank)
        self._wkv = source.matrix(f"{name}.wkv.weight", width, c.hidden_size)
        self._kv_norm = source.values(f"{name}.kv_norm.weight", width)
        ranks, grouped = c.o_groups * c.o_lora_rank, heads * width // c.o_groups
        self._wo_a = row_groups(source.matrix(f"{name}.wo_a.weight", ranks, grouped), c.o_groups)
        self._wo_b = source.matrix(f"{name}.wo_b.weight", c.hidden_size, ranks)
        self._compressor = Compressor(parts, f"{name}.compressor", ratio, width) if ratio else None
        self._indexer = Indexer(parts, f"{name}.indexer", ratio) if ratio == 4 else None

    def forward(self, x: F32, step: Step) -> F32:
        """The sub-block's output [T, d] of its normed input ``x`` [T, d]; advances the caches."""
        c, linear, places = self._config, self._backend.linear, step.places[self._ratio]
        tokens = len(x)
        qr = rms_norm(linear(self._wq_a, x), self._q_norm, c.rms_norm_eps)
        q = linear(self._wq_b, qr).reshape(tokens, c.num_attention_heads, c.head_dim)
        kv = linear(self._wkv, x)
        rows = turned(kv, self._kv_norm, c.rms_norm_eps, places.cos, places.sin)
        caches = [span.layers[self._layer] for span in step.spans]
        windows = Table([cache.window for cache in caches])
        at = step.positions % len(windows.like)
        put(narrow(rows, windows.like.dtype), at, step.owners, windows)
        entries, chosen, counts = self._seen(x, qr, step, caches)
        heads = attend(
            self._workers,
            q,
            self._sink,
            windows,
            c.sliding_window,
            entries or windows,
            chosen,
            counts,
            places.cos,
            places.sin,
            step.positions,
            step.owners,
            c.rms_norm_eps,
        )
        grouped = heads.reshape(tokens, c.o_groups, -1)
        low = [linear(weight, grouped[:, g]) for g, weight in enumerate(self._wo_a)]
        return linear(self._wo_b, np.concatenate(low, axis=1))

    def _seen(
        self, x: F32, qr: F32, step: Step, caches: Sequence[LayerCache]
    ) -> tuple[Table | None, I64, I64]:
        """Entries, if there are any, and which of them each token sees; these advance."""
        if self._compressor is None:
            return None, _everything(step), step.places[self._ratio].counts
        held = [cache.compressor for cache in caches if cache.compressor is not None]
        entries = self._compressor.append(x, step, held)
        choice = None
        if self._indexer is not None:
            held = [cache.index for cache in caches if cache.index is not None]
            choice = self._indexer.choose(x, qr, step, held)
        chosen, counts = choice or (_everything(step), step.places[self._ratio].counts)
        if step.trace is not None:
            for span, rows in zip(step.spans, entries.arrays, strict=True):
                own = widen(rows[: span.end // self._ratio])
                step.trace(f"l{self._layer}.compressed_kv", own)
                listed = _listed(chosen[span.rows], counts[span.rows])
                step.trace(f"l{self._layer}.index_topk", listed)
        return entries, chosen, counts


def _everything(step: Step) -> I64:
    """No choice: a token sees all the entries that there are for it."""
    return np.empty((len(step.ids), 0), dtype=np.int64)


def _listed(chosen: I64, counts: I64) -> I64:
    """``chosen`` written out, with -1 past each token's count."""
    columns = chosen if chosen.shape[1] else np.arange(counts.max())[None]
    return np.where(np.arange(columns.shape[1]) < counts[:, None], columns, -1)
