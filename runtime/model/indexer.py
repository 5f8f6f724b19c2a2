"""Owns the choice of compressed entries at ratio 4: the best ``topk`` by the indexer's score.

The score of entry w is ``sum_h g_h * (D H)^-0.5 * max(0, q_h . k_w)``. It stays in float32: gaps
between a chosen and a rejected entry are too small for less. Ties go to the lower index. DeepSeek's
Hadamard transform of q and k is orthogonal and serves only their rounding to FP4; it is left out.

T tokens, H index heads, D index head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.runtime.backend.workers import Workers
from ds4q.runtime.kv import CompressorCache
from ds4q.runtime.model.compressor import Compressor
from ds4q.runtime.model.parts import Parts, Span, Step, share
from ds4q.runtime.model.rope import rotate_reference, rotate_row
from ds4q.runtime.model.tile import LANES, ROWS, tile

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

_CHUNK = 1024  # keys of one unit of work
_SCORES_HELD = 1 << 22  # scores of one slice of tokens: bounds memory at long contexts


def score_reference(
    q: F32,
    gates: F32,
    keys: F32,
    cos: F32,
    sin: F32,
    first: int,
    ratio: int,
    scores: F32,
    begin: int,
    end: int,
) -> None:
    """Score keys for some (token, chunk of keys) units.

    Parameters
    ----------
    q : f32 [T, H, D], not rotated
    gates : f32 [T, H]
    keys : f32 [capacity, D], the index entries
    cos, sin : f32 [T, pairs] at the tokens' positions
    first : position of token 0; token t sees the first (first + t + 1) // ratio keys
    scores : f32 [T, n], written where a token sees the key
    begin, end : units; unit ``t * chunks + c`` is the c-th 1024 keys of token t
    """
    _, heads, width = q.shape
    chunks = -(-scores.shape[1] // _CHUNK)
    for unit in range(begin, end):
        t, low = unit // chunks, unit % chunks * _CHUNK
        high = min((first + t + 1) // ratio, low + _CHUNK)
        dots = rotate_reference(q[t], cos[t], sin[t]) @ keys[low:high].T  # [H, keys]
        gain = gates[t] * np.float32((width * heads) ** -0.5)
        scores[t, low:high] = gain @ np.maximum(dots, 0)


@jit
def _load_heads(q: F32, gates: F32, cos: F32, sin: F32, row: F32, queries: F32, gains: F32) -> None:
    """Rotate heads [H, D] into ``queries`` [blocks, D, 16]; scale gates [H] into ``gains``."""
    heads, width = q.shape
    scale = np.float32((width * heads) ** -0.5)
    for h in range(heads):
        for i in range(width):
            row[i] = q[h, i]
        rotate_row(row, cos, sin)
        block = queries[h // LANES]
        for i in range(width):
            block[i, h % LANES] = row[i]
        gains[h // LANES, h % LANES] = gates[h] * scale


@jit
def _score_fast(
    q: F32,
    gates: F32,
    keys: F32,
    cos: F32,
    sin: F32,
    first: int,
    ratio: int,
    scores: F32,
    begin: int,
    end: int,
) -> None:
    heads, width = q.shape[1:]
    blocks = (heads + LANES - 1) // LANES
    chunks = (scores.shape[1] + _CHUNK - 1) // _CHUNK
    queries = np.zeros((blocks, width, LANES), dtype=np.float32)
    gains = np.zeros((blocks, LANES), dtype=np.float32)
    row = np.empty(width, dtype=np.float32)
    dots = np.empty((ROWS, LANES), dtype=np.float32)
    totals = np.empty((ROWS, LANES), dtype=np.float32)
    held = -1
    for unit in range(begin, end):
        t, low = unit // chunks, unit % chunks * _CHUNK
        if t != held:
            _load_heads(q[t], gates[t], cos[t], sin[t], row, queries, gains)
            held = t
        high = min((first + t + 1) // ratio, low + _CHUNK)
        for i in range(low, high, ROWS):
            totals[:] = 0.0
            for b in range(blocks):
                tile(keys[i : i + ROWS], queries[b], dots)
                for r in range(ROWS):
                    for j in range(LANES):
                        dot = dots[r, j]
                        totals[r, j] += gains[b, j] * (dot if dot > 0 else np.float32(0.0))
            for r in range(min(ROWS, high - i)):
                total = np.float32(0.0)
                for j in range(LANES):
                    total += totals[r, j]
                scores[t, i + r] = total


def select_reference(
    scores: F32, first: int, ratio: int, topk: int, chosen: I64, counts: I64
) -> None:
    """Write each token's best entries, ascending, to ``chosen`` [T, topk], their number to
    ``counts`` [T]. ``scores`` f32 [T, n] as ``score`` left them; columns unseen are ignored."""
    for t in range(len(scores)):
        seen = (first + t + 1) // ratio
        order = np.argsort(-scores[t, :seen], kind="stable")[:topk]
        counts[t] = len(order)
        chosen[t, : len(order)] = np.sort(order)


@jit
def _ascending_at(values: F32, rank: int) -> np.float32:
    """``values`` sorted, at ``rank``, by Hoare's selection; reorders ``values``."""
    # numba's own partition and sort would do, for eight seconds of compilation.
    low, high = 0, values.shape[0] - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if rank <= j:
            high = j
        elif rank >= i:
            low = i
        else:
            break
    return values[rank]


@jit
def _select_fast(scores: F32, first: int, ratio: int, topk: int, chosen: I64, counts: I64) -> None:
    for t in range(scores.shape[0]):
        seen = (first + t + 1) // ratio
        if seen <= topk:
            for i in range(seen):
                chosen[t, i] = i
            counts[t] = seen
            continue
        row = scores[t, :seen]
        least = _ascending_at(row.copy(), seen - topk)
        ties = topk
        for i in range(seen):
            if row[i] > least:
                ties -= 1
        taken = 0
        for i in range(seen):
            if row[i] > least or (row[i] == least and ties > 0):
                ties -= row[i] == least
                chosen[t, taken] = i
                taken += 1
        counts[t] = taken


score_units = FastPath(score_reference, _score_fast)
select = FastPath(select_reference, _select_fast)


def choose(
    workers: Workers,
    q: F32,
    gates: F32,
    keys: F32,
    cos: F32,
    sin: F32,
    first: int,
    ratio: int,
    topk: int,
) -> tuple[I64, I64]:
    """Chosen entries [T, topk] and their counts [T]; arguments as ``score_reference`` names them.

    Chosen entries of a token are ascending; columns past its count mean nothing.
    """
    tokens, heads, width = q.shape
    most = (first + tokens) // ratio
    chosen = np.zeros((tokens, topk), dtype=np.int64)
    counts = np.zeros(tokens, dtype=np.int64)
    slice_tokens = max(1, _SCORES_HELD // most)
    chunks = -(-most // _CHUNK)
    for start in range(0, tokens, slice_tokens):
        part = slice(start, min(tokens, start + slice_tokens))
        scores = np.empty((part.stop - start, most), dtype=np.float32)

        def score(
            begin: int, end: int, part: slice = part, at: int = first + start, scores: F32 = scores
        ) -> None:
            score_units(
                q[part], gates[part], keys, cos[part], sin[part], at, ratio, scores, begin, end
            )

        share(workers, score, len(scores) * chunks, heads * width * min(most, _CHUNK))
        select(scores, first + start, ratio, topk, chosen[part], counts[part])
    return chosen, counts


class Indexer:
    """``layers.N.attn.indexer.*``: its compressor's state advances with every token."""

    def __init__(self, parts: Parts, name: str, ratio: int) -> None:
        c = parts.config
        self._config = c
        self._backend = parts.backend
        self._workers = parts.workers
        self._ratio = ratio
        heads, width = c.index_n_heads, c.index_head_dim
        self._wq_b = parts.source.matrix(f"{name}.wq_b.weight", heads * width, c.q_lora_rank)
        self._weights_proj = parts.source.matrix(
            f"{name}.weights_proj.weight", heads, c.hidden_size
        )
        self._compressor = Compressor(parts, f"{name}.compressor", ratio, width)

    def choose(
        self, x: F32, qr: F32, step: Step, caches: Sequence[CompressorCache]
    ) -> list[tuple[I64, I64] | None]:
        """By span, chosen entries [T, topk] and counts [T]; None while its tokens see all of them.

        ``x`` [T, d] is the attention input after its norm, ``qr`` [T, q_lora_rank] the normed
        low-rank query that attention uses too.
        """
        c, places = self._config, step.places[self._ratio]
        held = self._compressor.append(x, step, caches)
        choosing = [span.end // self._ratio > c.index_topk for span in step.spans]
        if not any(choosing):
            return [None] * len(held)
        q = self._backend.linear(self._wq_b, qr).reshape(len(x), c.index_n_heads, c.index_head_dim)
        gates = self._backend.linear(self._weights_proj, x)

        def of(span: Span, keys: F32) -> tuple[I64, I64]:
            at, first = span.rows, span.first
            turned = places.cos[at], places.sin[at]
            return choose(
                self._workers, q[at], gates[at], keys, *turned, first, self._ratio, c.index_topk
            )

        return [
            of(span, keys) if chooses else None
            for span, keys, chooses in zip(step.spans, held, choosing, strict=True)
        ]
