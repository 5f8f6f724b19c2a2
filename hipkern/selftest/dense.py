"""Owns the self-test's cases of kernels that read no packed weights.

Shapes are small and awkward: no multiple of a tile, windows that wrap, ties, more keys than a
choice takes. What a kernel does not write stays as the rig filled it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from ds4q.hipkern.kernels import KV_TYPES
from ds4q.hipkern.matrix import sum_grid
from ds4q.hipkern.selftest.rig import Array, Case, Rig

EPS = 1e-6
STREAMS = 4
F32, F16, BF16 = KV_TYPES.values()
KEPT = {F32: "", F16: "F16", BF16: "BF16"}


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


def _tokens(rig: Rig, *runs: tuple[int, int]) -> int:
    """``ds4q_token`` of each token of ``runs``: (first position, tokens) of each sequence."""
    packed, row = b"", 0
    for number, (first, count) in enumerate(runs):
        packed += b"".join(struct.pack("<4i", first + t, row, number, 0) for t in range(count))
        row += count
    return rig.put(packed)


def _states(rig: Rig, rows: tuple[int, int, int, int], *each: dict[str, int]) -> int:
    """A ``ds4q_layer_state`` of each sequence; pointers that are not given are null."""
    names = ("window", "values", "gates", "entries")
    every = (*names, "index_values", "index_gates", "index_entries")
    packed = (struct.pack("<7Q4i", *(p.get(name, 0) for name in every), *rows) for p in each)
    return rig.put(b"".join(packed))


def _kept(rig: Rig, kind: int, rows: int, width: int) -> Array:
    """Rows [rows, width] as a sequence keeps them."""
    drawn = rig.inputs.values(rows, width)
    if kind == F16:
        return drawn.astype(np.float16)
    return (drawn.view(np.uint32) >> 16).astype(np.uint16) if kind == BF16 else drawn


def _raw_rows(rig: Rig, tokens: int, ratio: int, width: int) -> list[int]:
    """A compressor's values, gates, place addends and norm."""
    columns = 2 * width if ratio == 4 else width
    shapes = (tokens, columns), (tokens, columns), (ratio, columns), (width,)
    return [rig.put(rig.inputs.values(*shape, scale=2.0)) for shape in shapes]


def _latents(kind: int) -> Case:
    """At each ratio, two sequences: each completes a window and leaves one open."""
    width, index_width, pairs, query_width = 64, 32, 16, 72
    window_rows, capacity = 40, 6

    def held(rig: Rig, ratio: int, ring: int) -> dict[str, int]:
        """What a sequence has: addresses by name."""
        draw, columns = rig.inputs.values, 2 * width if ratio == 4 else width
        rows: dict[str, Array] = {"window": _kept(rig, kind, window_rows, width)}
        if ratio:
            rows |= {name: draw(ring, columns) for name in ("values", "gates")}
            rows["entries"] = _kept(rig, kind, capacity, width)
        if ratio == 4:
            rows |= {f"index_{name}": draw(ring, 2 * index_width) for name in ("values", "gates")}
            rows["index_entries"] = draw(capacity, index_width)
        return {name: rig.inout(array) for name, array in rows.items()}

    def body(rig: Rig) -> None:
        draw, put = rig.inputs.values, rig.put
        for ratio, runs, blocks in (
            (0, ((38, 6), (0, 2)), 2),
            (4, ((5, 6), (2, 3)), 4),
            (128, ((124, 6), (255, 2)), 3),
        ):
            tokens = sum(count for _, count in runs)
            ring, raw, index_raw = 2 * ratio + tokens, [0] * 4, [0] * 4
            if ratio:
                raw = _raw_rows(rig, tokens, ratio, width)
            if ratio == 4:
                index_raw = _raw_rows(rig, tokens, ratio, index_width)
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
                *(put(draw(tokens, pairs)) for _ in range(4)),
                _states(
                    rig,
                    (window_rows, ring, ring, capacity),
                    *(held(rig, ratio, ring) for _ in runs),
                ),
                _tokens(rig, *runs),
                width,
                index_width,
                pairs,
                ratio,
                EPS,
            )

    return Case("compress.hip", "latents", body, KEPT[kind], {"DS4Q_KV_TYPE": kind})


def _attend(rig: Rig, width: int, kind: int, output: bool) -> list[tuple[int, ...]]:
    """Run ``attend`` with a choice of entries, with all of them, and without any.

    Of two sequences. Returns (partial, tokens, reach, ratio, topk, chunks) of each; ``output``:
    partial is looked at.
    """
    runs, heads, pairs, reach, capacity = ((44, 3), (20, 2)), 18, 16, 36, 12
    tokens = sum(count for _, count in runs)
    draw, put = rig.inputs.values, rig.put
    made: list[tuple[int, ...]] = []
    for ratio, topk in ((4, 8), (4, 0), (0, 0)):
        entries = topk or (capacity if ratio else 0)
        chunks = -(-(reach + entries) // 16)
        held = [
            {
                "window": put(_kept(rig, kind, reach + tokens, width)),
                "entries": put(_kept(rig, kind, capacity, width)),
            }
            for _ in runs
        ]
        chosen = np.sort(np.argsort(rig.inputs.words(tokens * 11).reshape(tokens, 11))[:, :8])
        nbytes = 4 * tokens * chunks * heads * (width + 4)
        partial = rig.output(nbytes) if output else rig.room(nbytes)
        stand = _tokens(rig, *runs)
        rig.launch(
            (2, 2, tokens),
            put(draw(tokens, heads, width)),
            _states(rig, (reach + tokens, 0, 0, capacity), *held),
            stand,
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
            EPS,
            kernel="attend",
        )
        made.append((partial, stand, reach, ratio, topk, chunks))
    return made


def _attention(name: str, body: Callable[[Rig], None], width: int, kind: int) -> Case:
    label = f"D={width} {KEPT[kind]}".rstrip()
    defines = {"DS4Q_HEAD_DIM": width, "DS4Q_KV_TYPE": kind}
    return Case("attention.hip", name, body, label, defines)


def _attend_alone(width: int, kind: int) -> Case:
    def body(rig: Rig) -> None:
        _attend(rig, width, kind, output=True)

    return _attention("attend", body, width, kind)


def _attend_combine(width: int) -> Case:
    def body(rig: Rig) -> None:
        tokens, heads, pairs = 5, 18, 16
        for partial, stand, reach, ratio, topk, chunks in _attend(rig, width, F32, output=False):
            rig.launch(
                (-(-width // 128), heads, tokens),
                partial,
                rig.put(rig.inputs.values(heads, scale=4.0)),
                stand,
                rig.put(rig.inputs.values(tokens, pairs)),
                rig.put(rig.inputs.values(tokens, pairs)),
                rig.output(4 * tokens * heads * width),
                heads,
                pairs,
                reach,
                ratio,
                topk,
                chunks,
            )

    return _attention("attend_combine", body, width, F32)


def _index_scores(rig: Rig) -> None:
    heads, width, pairs, ratio, topk, capacity = 6, 32, 8, 4, 8, 40
    runs, tokens = ((150, 3), (61, 2)), 5
    draw, put = rig.inputs.values, rig.put
    held = [{"index_entries": put(draw(capacity, width))} for _ in runs]
    rig.launch(
        (2, tokens, 1),
        put(draw(tokens, heads, width)),
        put(draw(tokens, heads)),
        _states(rig, (0, 0, 0, capacity), *held),
        _tokens(rig, *runs),
        put(draw(tokens, pairs)),
        put(draw(tokens, pairs)),
        rig.output(4 * tokens * capacity),
        heads,
        width,
        pairs,
        ratio,
        topk,
        capacity,
    )


def _index_select(rig: Rig) -> None:
    tokens, ratio, topk, stride = 4, 4, 200, 2200
    scores = rig.inputs.values(tokens, stride)
    scores[0] = np.sort(scores[0])[::-1]  # what is chosen lies with a few groups of lanes
    scores[1, 500:1900] = scores[1].max()  # a tie across the border of the choice
    scores[2] = 1 + scores[2] * np.float32(2.0**-12)  # few bits apart
    scores[3] = 0.5
    for first in (4 * 2150, 200):  # more entries than are chosen, and fewer
        stand, chosen = _tokens(rig, (first, tokens)), rig.output(4 * tokens * topk)
        rig.launch((1, tokens, 1), rig.put(scores), stand, chosen, ratio, topk, stride)


def dense_cases() -> list[Case]:
    """One case a kernel, and one for each width of a head."""
    streams = {"DS4Q_STREAMS": STREAMS}
    return [
        Case("hyper.hip", "hc_mix", _hc_mix, defines=streams),
        Case("hyper.hip", "hc_sum", _hc_sum, defines=streams),
        Case("hyper.hip", "hc_collapse", _hc_collapse, defines=streams),
        Case("hyper.hip", "hc_head", _hc_head, defines=streams),
        *(_latents(kind) for kind in KEPT),
        *(_attend_alone(width, kind) for width in (64, 512) for kind in KEPT),
        *(_attend_combine(width) for width in (64, 512)),
        Case("index.hip", "index_scores", _index_scores),
        Case("index.hip", "index_select", _index_select),
        Case("route.hip", "route", _route),
        Case("head.hip", "argmax_parts", _argmax_parts),
        Case("head.hip", "argmax", _argmax),
    ]
