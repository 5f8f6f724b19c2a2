"""Owns the self-test's cases of kernels that read no packed weights.

Shapes are small and awkward: no multiple of a tile, windows that wrap, ties, more keys than a
choice takes. What a kernel does not write stays as the rig filled it.
"""

from __future__ import annotations

import struct

import numpy as np

from ds4q.hipkern.matrix import sum_grid
from ds4q.hipkern.selftest.rig import Case, Rig

EPS = 1e-6
STREAMS = 4


def _argmax_parts(rig: Rig) -> None:
    tokens, n, parts = 3, 1500, 4
    logits = rig.inputs.values(tokens, n, scale=16.0)
    logits[1, 700:] = logits[1, :700].max()  # a tie over blocks: the lower id wins
    logits[2] = np.float32("nan")
    logits[2, 1400] = -np.inf
    rig.launch((parts, tokens, 1), rig.put(logits), rig.output(8 * tokens * parts), n)


def _argmax(rig: Rig) -> None:
    tokens, count = 3, 70
    keys = rig.inputs.words(tokens * count)
    rig.launch((1, tokens, 1), rig.put(keys), rig.output(4 * tokens), count)


def _route(rig: Rig) -> None:
    tokens, experts, k = 5, 80, 6
    logits = rig.inputs.values(tokens, experts, scale=32.0)
    logits[1, 10:20] = logits[1].max()
    bias = rig.inputs.values(experts, scale=0.25)
    by_token = rig.inputs.below(experts, 40, k)
    ids = rig.inputs.below(40, tokens)
    for table in (0, rig.put(by_token)):
        made = rig.output(4 * tokens * k), rig.output(4 * tokens * k)
        arguments = rig.put(logits), rig.put(bias), table, rig.put(ids), *made
        rig.launch((1, tokens, 1), *arguments, experts, k, 1.5)


def _hc_mix(rig: Rig) -> None:
    tokens, d, rows = 3, 100, (2 + STREAMS) * STREAMS
    slices = -(-d // 32)
    draw = rig.inputs.values
    streams, fn = draw(tokens, STREAMS, d, scale=4.0), draw(rows, STREAMS * d)
    parts = 9
    y, post = draw(tokens, parts, d, scale=4.0), draw(tokens, STREAMS, scale=2.0)
    comb = draw(tokens, STREAMS, STREAMS)
    for mixed, some in ((True, rows), (False, STREAMS)):
        added = (rig.put(y), rig.put(post), rig.put(comb)) if mixed else (0, 0, 0)
        partial = rig.output(4 * tokens * slices * (some + 1))
        arguments = rig.inout(streams), *added, rig.put(fn), partial, parts if mixed else 0, d, some
        rig.launch((slices, tokens, 1), *arguments)


def _hc_sum(rig: Rig) -> None:
    tokens, parts, d = 3, 4, 141
    given = rig.put(rig.inputs.values(tokens, parts, d))
    made = rig.output(4 * tokens * d), rig.output(4 * tokens * d)
    rig.launch(sum_grid(d, tokens), given, *made, parts, d)


def _collapse_inputs(rig: Rig, rows: int, scales: int) -> tuple[int, int, tuple[int, ...]]:
    """Tokens, d, and addresses of x, partial, scale, base and norm."""
    tokens, d = 2, 100
    slices = -(-d // 32)
    draw = rig.inputs.values
    partial = draw(tokens, rows + 1, slices, scale=8.0, edges=False)
    partial[:, rows] = np.abs(partial[:, rows])  # of squares
    made = draw(tokens, STREAMS, d, scale=4.0), partial, draw(scales), draw(rows), draw(d)
    return tokens, d, tuple(rig.put(array) for array in made)


def _hc_collapse(rig: Rig) -> None:
    tokens, d, given = _collapse_inputs(rig, (2 + STREAMS) * STREAMS, 3)
    sizes = tokens * d, tokens * d, tokens * STREAMS, tokens * STREAMS * STREAMS
    made = [rig.output(4 * size) for size in sizes]
    rig.launch((2, tokens, 1), *given, *made, d, -(-d // 32), 20, EPS, EPS)


def _hc_head(rig: Rig) -> None:
    tokens, d, given = _collapse_inputs(rig, STREAMS, 1)
    made = [rig.output(4 * tokens * d) for _ in range(2)]
    rig.launch((1, tokens, 1), *given, *made, d, -(-d // 32), EPS, EPS)


def _step(rig: Rig, first: int, tokens: int) -> int:
    return rig.put(struct.pack("<4i", first, tokens, 0, 0))


def _state(rig: Rig, pointers: dict[str, int], rows: tuple[int, int, int, int]) -> int:
    """A ``ds4q_layer_state``; pointers that are not given are null."""
    names = ("window", "values", "gates", "entries")
    every = (*names, "index_values", "index_gates", "index_entries")
    return rig.put(struct.pack("<7Q4i", *(pointers.get(name, 0) for name in every), *rows))


def _raw_rows(rig: Rig, tokens: int, ratio: int, width: int) -> list[int]:
    """A compressor's values, gates, place addends and norm."""
    columns = 2 * width if ratio == 4 else width
    shapes = (tokens, columns), (tokens, columns), (ratio, columns), (width,)
    return [rig.put(rig.inputs.values(*shape, scale=2.0)) for shape in shapes]


def _latents(rig: Rig) -> None:
    """At each ratio, with a window that the batch completes and one that stays open."""
    tokens, width, index_width, pairs, query_width = 6, 64, 32, 16, 72
    window_rows, capacity = 40, 6
    draw, put = rig.inputs.values, rig.put
    for ratio, first, blocks in ((0, 38, 2), (4, 5, 4), (128, 124, 3)):
        ring = 2 * ratio + tokens
        held = {"window": draw(window_rows, width)}
        raw, index_raw = [0] * 4, [0] * 4
        if ratio:
            raw = _raw_rows(rig, tokens, ratio, width)
            columns = 2 * width if ratio == 4 else width
            held |= {name: draw(ring, columns) for name in ("values", "gates")}
            held["entries"] = draw(capacity, width)
        if ratio == 4:
            index_raw = _raw_rows(rig, tokens, ratio, index_width)
            held |= {f"index_{name}": draw(ring, 2 * index_width) for name in ("values", "gates")}
            held["index_entries"] = draw(capacity, index_width)
        state = {name: rig.inout(array) for name, array in held.items()}
        turns = [put(draw(rows, pairs)) for rows in (tokens, tokens, 2, 2)]
        rig.launch(
            (blocks, tokens, 1),
            put(draw(tokens, query_width)),
            put(draw(query_width)),
            rig.output(4 * tokens * query_width),
            query_width,
            put(draw(tokens, width)),
            put(draw(width)),
            *raw,
            *index_raw,
            *turns,
            _state(rig, state, (window_rows, ring, ring, capacity)),
            _step(rig, first, tokens),
            width,
            index_width,
            pairs,
            ratio,
            EPS,
        )


def _attend(rig: Rig, width: int, output: bool) -> list[tuple[int, ...]]:
    """Run ``attend`` with a choice of entries, with all of them, and without any.

    Returns (partial, step, reach, ratio, topk, chunks) of each; ``output``: partial is looked at.
    """
    tokens, heads, pairs, reach, capacity, first = 3, 18, 16, 36, 12, 44
    draw, put = rig.inputs.values, rig.put
    made: list[tuple[int, ...]] = []
    for ratio, topk in ((4, 8), (4, 0), (0, 0)):
        entries = topk or (capacity if ratio else 0)
        chunks = -(-(reach + entries) // 16)
        held = {"window": put(draw(reach + tokens, width)), "entries": put(draw(capacity, width))}
        chosen = np.sort(np.argsort(rig.inputs.words(tokens * 11).reshape(tokens, 11))[:, :8])
        nbytes = 4 * tokens * chunks * heads * (width + 4)
        partial = rig.output(nbytes) if output else rig.room(nbytes)
        step = _step(rig, first, tokens)
        rig.launch(
            (2, 2, tokens),
            put(draw(tokens, heads, width)),
            _state(rig, held, (reach + tokens, 0, 0, capacity)),
            step,
            put(chosen.astype(np.int32)) if topk else 0,
            put(draw(tokens, pairs)),
            put(draw(tokens, pairs)),
            partial,
            heads,
            pairs,
            reach,
            ratio,
            topk,
            chunks,
            0,
            EPS,
            kernel="attend",
        )
        made.append((partial, step, reach, ratio, topk, chunks))
    return made


def _attend_alone(width: int) -> Case:
    def body(rig: Rig) -> None:
        _attend(rig, width, output=True)

    return Case("attention.hip", "attend", body, f"D={width}", {"DS4Q_HEAD_DIM": width})


def _attend_combine(width: int) -> Case:
    def body(rig: Rig) -> None:
        tokens, heads, pairs = 3, 18, 16
        for partial, step, reach, ratio, topk, chunks in _attend(rig, width, output=False):
            rig.launch(
                (-(-width // 128), heads, tokens),
                partial,
                rig.put(rig.inputs.values(heads, scale=4.0)),
                step,
                rig.put(rig.inputs.values(tokens, pairs)),
                rig.put(rig.inputs.values(tokens, pairs)),
                rig.output(4 * tokens * heads * width),
                heads,
                pairs,
                reach,
                ratio,
                topk,
                chunks,
                0,
            )

    defines = {"DS4Q_HEAD_DIM": width}
    return Case("attention.hip", "attend_combine", body, f"D={width}", defines)


def _index_scores(rig: Rig) -> None:
    tokens, heads, width, pairs, ratio, topk, capacity, first = 3, 6, 32, 8, 4, 8, 40, 150
    draw, put = rig.inputs.values, rig.put
    held = {"index_entries": put(draw(capacity, width))}
    rig.launch(
        (2, tokens, 1),
        put(draw(tokens, heads, width)),
        put(draw(tokens, heads)),
        _state(rig, held, (0, 0, 0, capacity)),
        _step(rig, first, tokens),
        put(draw(tokens, pairs)),
        put(draw(tokens, pairs)),
        rig.output(4 * tokens * capacity),
        heads,
        width,
        pairs,
        ratio,
        topk,
        capacity,
        0,
    )


def _index_select(rig: Rig) -> None:
    tokens, ratio, topk, stride = 4, 4, 200, 2200
    scores = rig.inputs.values(tokens, stride)
    scores[0] = np.sort(scores[0])[::-1]  # what is chosen lies with a few groups of lanes
    scores[1, 500:1900] = scores[1].max()  # a tie across the border of the choice
    scores[2] = 1 + scores[2] * np.float32(2.0**-12)  # few bits apart
    scores[3] = 0.5
    for first in (4 * 2150, 200):  # more entries than are chosen, and fewer
        step, chosen = _step(rig, first, tokens), rig.output(4 * tokens * topk)
        rig.launch((1, tokens, 1), rig.put(scores), step, chosen, ratio, topk, stride, 0)


def dense_cases() -> list[Case]:
    """One case a kernel, and one for each width of a head."""
    streams = {"DS4Q_STREAMS": STREAMS}
    return [
        Case("hyper.hip", "hc_mix", _hc_mix, defines=streams),
        Case("hyper.hip", "hc_sum", _hc_sum, defines=streams),
        Case("hyper.hip", "hc_collapse", _hc_collapse, defines=streams),
        Case("hyper.hip", "hc_head", _hc_head, defines=streams),
        Case("compress.hip", "latents", _latents),
        *(make(width) for make in (_attend_alone, _attend_combine) for width in (64, 512)),
        Case("index.hip", "index_scores", _index_scores),
        Case("index.hip", "index_select", _index_select),
        Case("route.hip", "route", _route),
        Case("head.hip", "argmax_parts", _argmax_parts),
        Case("head.hip", "argmax", _argmax),
    ]
