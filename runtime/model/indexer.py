"""Owns the choice of compressed entries at ratio 4: the best ``topk`` by the indexer's score.

The score of entry w is ``sum_h g_h * (D H)^-0.5 * max(0, q_h . k_w)``. It stays in float32: gaps
between a chosen and a rejected entry are too small for less. Ties go to the lower index. DeepSeek's
Hadamard transform of q and k is orthogonal and serves only their rounding to FP4; it is left out.

T tokens, H index heads, D index head width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.runtime.backend.workers import Workers
from ds4q.runtime.kv import CompressorCache
from ds4q.runtime.kvtable import Table, rows_at
from ds4q.runtime.model.compressor import Compressor
from ds4q.runtime.model.parts import Parts, Step, share
from ds4q.runtime.model.rope import rotate_reference, rotate_row
from ds4q.runtime.model.tile import LANES, ROWS, tile

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

_CHUNK = 1024  # keys of one unit of work
_SCORES_HELD = 1 << 22  # scores of one slice of tokens: bounds memory at long contexts


def score_reference(
    q: F32,
    gates: F32,
    keys: Table,
    cos: F32,
    sin: F32,
    seen: I64,
    owners: I64,
    topk: int,
    scores: F32,
    begin: int,
    end: int,
) -> None:
    """Score keys for some (token, chunk of keys) units.

    Parameters
    ----------
    q : f32 [T, H, D], not rotated
    gates : f32 [T, H]
    keys : f32 [capacity, D] each, the index entries of sequences
    cos, sin : f32 [T, pairs] at the tokens' positions
    seen, owners : int64 [T], how many keys of which sequence a token sees
    topk : no scores are due to a token that sees no more keys
    scores : f32 [T, n], written where they are due and a token sees the key
    begin, end : units; unit ``t * chunks + c`` is the c-th 1024 keys of token t
    """
    _, heads, width = q.shape
    chunks = -(-scores.shape[1] // _CHUNK)
    for unit in range(begin, end):
        t, low = unit // chunks, unit % chunks * _CHUNK
        if seen[t] <= topk:
            continue
        high = min(seen[t], low + _CHUNK)
        own = keys.arrays[owners[t]][low:high]
        dots = rotate_reference(q[t], cos[t], sin[t]) @ own.T  # [H, keys]
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
def _score_units(
    q: F32,
    gates: F32,
    like: F32,
    addresses: I64,
    cos: F32,
    sin: F32,
    seen: I64,
    owners: I64,
    topk: int,
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
        if seen[t] <= topk:
            continue
        if t != held:
            _load_heads(q[t], gates[t], cos[t], sin[t], row, queries, gains)
            held = t
        high = min(seen[t], low + _CHUNK)
        keys = rows_at(like, addresses[owners[t]], high + ROWS)  # whole tiles are there
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


def _score_fast(
    q: F32,
    gates: F32,
    keys: Table,
    cos: F32,
    sin: F32,
    seen: I64,
    owners: I64,
    topk: int,
    scores: F32,
    begin: int,
    end: int,
) -> None:
    where = keys.like, keys.addresses
    _score_units(q, gates, *where, cos, sin, seen, owners, topk, scores, begin, end)


def select_reference(scores: F32, seen: I64, topk: int, chosen: I64, counts: I64) -> None:
    """Write each token's best entries, ascending, to ``chosen`` [T, topk], their number to
    ``counts`` [T]. ``scores`` f32 [T, n] as ``score`` left them, ``seen`` [T] of them; all entries
    are chosen where there are no more than topk."""
    for t in range(len(scores)):
        order = np.arange(seen[t])
        if seen[t] > topk:
            order = np.argsort(-scores[t, : seen[t]], kind="stable")[:topk]
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
def _select_fast(scores: F32, seen: I64, topk: int, chosen: I64, counts: I64) -> None:
    for t in range(scores.shape[0]):
        if seen[t] <= topk:
            for i in range(seen[t]):
                chosen[t, i] = i
            counts[t] = seen[t]
            continue
        row = scores[t, : seen[t]]
        least = _ascending_at(row.copy(), seen[t] - topk)
        ties = topk
        for i in range(seen[t]):
            if row[i] > least:
                ties -= 1
        taken = 0
        for i in range(seen[t]):
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
    keys: Table,
    cos: F32,
    sin: F32,
    seen: I64,
    owners: I64,
    topk: int,
) -> tuple[I64, I64]:
    """Chosen entries [T, topk] and their counts [T]; arguments as ``score_reference`` names them.

    Chosen entries of a token are ascending; columns past its count mean nothing.
    """
    tokens, heads, width = q.shape
    most = int(seen.max())
    chosen = np.zeros((tokens, topk), dtype=np.int64)
    counts = np.zeros(tokens, dtype=np.int64)
    slice_tokens = max(1, _SCORES_HELD // most)
    chunks = -(-most // _CHUNK)
    for start in range(0, tokens, slice_tokens):
        part = slice(start, min(tokens, start + slice_tokens))
        scores = np.empty((part.stop - start, most), dtype=np.float32)
        of = q[part], gates[part], keys, cos[part], sin[part], seen[part], owners[part], topk
        score = functools.partial(score_units, *of, scores)
        share(workers, score, len(scores) * chunks, heads * width * min(most, _CHUNK))
        select(scores, seen[part], topk, chosen[part], counts[part])
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
    ) -> tuple[I64, I64] | None:
        """Chosen entries [T, topk] and counts [T]; None while all tokens see all of theirs.

        ``x`` [T, d] is the attention input after its norm, ``qr`` [T, q_lora_rank] the normed
        low-rank query that attention uses too.
        """
        c, places = self._config, step.places[self._ratio]
        keys = self._compressor.append(x, step, caches)
        if places.most <= c.index_topk:
            return None
        q = self._backend.linear(self._wq_b, qr).reshape(len(x), c.index_n_heads, c.index_head_dim)
        gates = self._backend.linear(self._weights_proj, x)
        turned = places.cos, places.sin
        return choose(
            self._workers, q, gates, keys, *turned, places.counts, step.owners, c.index_topk
        )
