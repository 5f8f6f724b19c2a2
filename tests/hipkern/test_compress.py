"""Latents: query norm, window rows, compressed entries; whatever way the tokens are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from ds4q.hipkern.kernels import KV_TYPES
from ds4q.runtime.kvtable import Held, Table
from ds4q.runtime.kvtype import STORED, KvType, narrow, widen
from ds4q.runtime.model import attention, compressor
from ds4q.runtime.model.norm import rms_norm_reference
from tests.hipkern.dense import F32, F64, Rig, U, check_same, check_within, open_rig, turns

EPS = 1e-6
D, INDEX, PAIRS, QUERY = 64, 32, 8, 96
REACH = 12


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with open_rig() as rig:
        yield rig


@dataclass
class Inputs:
    """Projections of N tokens, and the weights that latents takes; rows by name."""

    ratio: int
    rows: dict[str, F32]
    weights: dict[str, F32]

    @staticmethod
    def of(ratio: int, tokens: int, width: int = D) -> Inputs:
        rng = np.random.default_rng(ratio + tokens)
        columns = {name: c * (2 if ratio == 4 else 1) for name, c in (("a", width), ("b", INDEX))}

        def normal(*shape: int) -> F32:
            return (rng.normal(size=shape) * 2).astype(np.float32)

        rows = {
            "query": normal(tokens, QUERY),
            "kv": normal(tokens, width),
            "values": normal(tokens, columns["a"]),
            "gates": normal(tokens, columns["a"]),
            "index_values": normal(tokens, columns["b"]),
            "index_gates": normal(tokens, columns["b"]),
        }
        weights = {
            "query_norm": normal(QUERY),
            "kv_norm": normal(width),
            "ape": normal(max(ratio, 1), columns["a"]),
            "entry_norm": normal(width),
            "index_ape": normal(max(ratio, 1), columns["b"]),
            "index_norm": normal(INDEX),
        }
        return Inputs(ratio, rows, weights)

    @property
    def tokens(self) -> int:
        return len(self.rows["kv"])

    @property
    def width(self) -> int:
        return self.rows["kv"].shape[1]


@dataclass
class Left:
    """What the tokens left behind."""

    query: F32
    window: F32
    entries: F32
    index_entries: F32


def _feed(
    rig: Rig, inputs: Inputs, cuts: Sequence[int], slack: int = 0, kind: KvType = "f32"
) -> Left:
    """Feed all tokens in pieces of ``cuts``; rings are as long as they must be, and ``slack``.

    Window rows and entries are kept as ``kind``, and given back widened.
    """
    ratio, batch, width = inputs.ratio, max(cuts), inputs.width
    ring = (2 if ratio == 4 else 1) * ratio + batch + slack
    count = inputs.tokens // ratio if ratio else 0
    sizes = {
        "window": (REACH - 1 + batch + slack, width),
        "values": (ring, inputs.rows["values"].shape[1]),
        "gates": (ring, inputs.rows["gates"].shape[1]),
        "entries": (count + 1, width),
        "index_values": (ring, inputs.rows["index_values"].shape[1]),
        "index_gates": (ring, inputs.rows["index_gates"].shape[1]),
        "index_entries": (count + 1, INDEX),
    }
    places = {name: rig.room(*shape) for name, shape in sizes.items()}
    state = rig.state(
        **places,
        window_rows=sizes["window"][0],
        ring_rows=ring,
        index_ring_rows=ring,
        capacity=count + 1,
    )
    weights = {name: rig.put(value) for name, value in inputs.weights.items()}
    queries, first = [], 0
    for tokens in cuts:
        rows = {n: rig.put(v[first : first + tokens]) for n, v in inputs.rows.items()}
        cos, sin = turns(first, tokens, PAIRS)
        window_cos, window_sin = turns(first + 1 - ratio, tokens, PAIRS)  # as if each completed one
        out = rig.room(tokens, QUERY)
        rig.run(
            "compress.hip", "latents", ({0: 2, 4: 4, 128: 3}[ratio], tokens, 1),
            rows["query"], weights["query_norm"], out, QUERY, rows["kv"], weights["kv_norm"],
            rows["values"], rows["gates"], weights["ape"], weights["entry_norm"],
            rows["index_values"], rows["index_gates"], weights["index_ape"], weights["index_norm"],
            rig.put(cos), rig.put(sin), rig.put(window_cos), rig.put(window_sin), state,
            rig.tokens((first, tokens)), width, INDEX, PAIRS, ratio, EPS,
            DS4Q_KV_TYPE=KV_TYPES[kind],
        )  # fmt: skip
        queries.append(rig.get(out, tokens, QUERY))
        first += tokens
    assert first == inputs.tokens
    seen = np.arange(max(0, first - REACH), first) % sizes["window"][0]
    return Left(
        np.concatenate(queries),
        widen(rig.get(places["window"], *sizes["window"], dtype=STORED[kind])[seen]),
        widen(rig.get(places["entries"], *sizes["entries"], dtype=STORED[kind])),
        rig.get(places["index_entries"], *sizes["index_entries"]),
    )


def _normed(x: F64, error: F64, weight: F32) -> tuple[F64, F64]:
    """RMSNorm in float64 and its bound, for inputs that are off by ``error``."""
    squares = (x**2).sum(-1, keepdims=True)
    r = 1 / np.sqrt(squares / x.shape[-1] + EPS)
    # The sum of squares: inherited, and 2 + 5 + 16 rounded steps; half of it for the root.
    relative = ((2 * np.abs(x) * error).sum(-1, keepdims=True) / squares + 23 * U) / 2 + 3 * U
    target = weight * x * r
    return target, np.abs(weight) * r * error + np.abs(target) * (relative + 2 * U)


def _turned(x: F64, error: F64, cos: F32, sin: F32) -> tuple[F64, F64]:
    """Turned in float64, and the bound: both parts' errors and three roundings."""
    out, bound = x.copy(), error.copy()
    a, b = x[..., -2 * PAIRS :: 2], x[..., -2 * PAIRS + 1 :: 2]
    spread = error[..., -2 * PAIRS :: 2] + error[..., -2 * PAIRS + 1 :: 2]
    spread = spread + 3 * U * (np.abs(a) + np.abs(b))
    out[..., -2 * PAIRS :: 2], out[..., -2 * PAIRS + 1 :: 2] = (
        a * cos - b * sin,
        a * sin + b * cos,
    )
    bound[..., -2 * PAIRS :: 2] = bound[..., -2 * PAIRS + 1 :: 2] = spread
    return out, bound


def _entries(inputs: Inputs, index: bool) -> tuple[F64, F64]:
    """All complete entries in float64, and their bounds."""
    part = "index_" if index else ""
    ratio, width = inputs.ratio, INDEX if index else inputs.width
    value = inputs.rows[part + "values"].astype(np.float64)
    ape = inputs.weights[part + "ape"]
    # The gate's sum is rounded once: take it as it is stored.
    gate = inputs.rows[part + "gates"] + ape[np.arange(inputs.tokens) % ratio]
    gate = gate.astype(np.float64)
    means, errors = [], []
    for w in range(inputs.tokens // ratio):
        own = slice(w * ratio, (w + 1) * ratio)
        v, g = value[own, -width:], gate[own, -width:]
        if ratio == 4 and w > 0:
            before = slice((w - 1) * ratio, w * ratio)
            v = np.concatenate([value[before, :width], v])
            g = np.concatenate([gate[before, :width], g])
        share = np.exp(g - g.max(axis=0))
        share = share / share.sum(axis=0)
        means.append((share * v).sum(axis=0))
        # exp: 2u and u (of its argument, at most |g - max|); sums: one step for each slot, twice;
        # the division.
        spread = 2 * (2 + np.ptp(g, axis=0)) + 2 * len(g) + 1
        errors.append(spread * U * (share * np.abs(v)).sum(axis=0))
    norm = inputs.weights["index_norm" if index else "entry_norm"]
    cos, sin = turns(0, len(means), PAIRS, ratio)
    return _turned(*_normed(np.array(means), np.array(errors), norm), cos, sin)


def test_queries_and_window_rows(rig: Rig) -> None:
    inputs = Inputs.of(0, 20)
    left = _feed(rig, inputs, [20])
    query = inputs.rows["query"].astype(np.float64)
    target, bound = _normed(query, np.zeros_like(query), inputs.weights["query_norm"])
    check_within(left.query, target, bound)
    expected = rms_norm_reference(inputs.rows["query"], inputs.weights["query_norm"], EPS)
    np.testing.assert_allclose(left.query, expected, rtol=0, atol=1e-5)
    kv = inputs.rows["kv"].astype(np.float64)
    cos, sin = turns(0, 20, PAIRS)
    rows = _turned(*_normed(kv, np.zeros_like(kv), inputs.weights["kv_norm"]), cos, sin)
    check_within(left.window, rows[0][-REACH:], rows[1][-REACH:])
    turned = attention.turned_reference(inputs.rows["kv"], inputs.weights["kv_norm"], EPS, cos, sin)
    np.testing.assert_allclose(left.window, turned[20 - REACH : 20], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("ratio", "tokens", "width", "gain"),
    [(4, 23, D, 1), (4, 23, D, 100), (128, 300, D, 1), (4, 9, 516, 1)],
)
def test_entries(rig: Rig, ratio: int, tokens: int, width: int, gain: float) -> None:
    inputs = Inputs.of(ratio, tokens, width)
    inputs.rows["gates"] *= np.float32(gain)  # 100: far beyond what exp takes
    left = _feed(rig, inputs, [tokens])
    count = tokens // ratio
    target, bound = _entries(inputs, index=False)
    check_within(left.entries[:count], target, bound)
    assert np.isnan(left.entries[count:]).all()  # an incomplete tail emits nothing
    places = np.arange(tokens) % ratio
    gates = inputs.rows["gates"] + inputs.weights["ape"][places]
    cos, sin = turns(0, count, PAIRS, ratio)
    expected = np.zeros((count, width), np.float32)
    norm = inputs.weights["entry_norm"]
    raw = Table([Held(np.stack([inputs.rows["values"], gates]))])
    windows, owners = np.arange(count), np.zeros(count, np.int64)
    compressor.pool_reference(raw, ratio, norm, EPS, cos, sin, windows, owners, expected)
    np.testing.assert_allclose(left.entries[:count], expected, rtol=0, atol=1e-4)
    if ratio == 4:
        target, bound = _entries(inputs, index=True)
        check_within(left.index_entries[:count], target, bound)
        assert np.isnan(left.index_entries[count:]).all()
    else:
        assert np.isnan(left.index_entries).all()


@pytest.mark.parametrize(
    ("ratio", "tokens", "cuts"),
    [
        (0, 30, [[1] * 30, [7, 9, 14]]),
        (4, 30, [[1] * 30, [9, 9, 9, 3], [3, 1, 4, 8, 14], [30]]),
        (128, 261, [[1] * 261, [127, 2, 127, 5], [100, 100, 61]]),
    ],
)
def test_what_is_left_does_not_depend_on_cuts(
    rig: Rig, ratio: int, tokens: int, cuts: list[list[int]]
) -> None:
    inputs = Inputs.of(ratio, tokens)
    want = _feed(rig, inputs, [tokens])
    for i, pieces in enumerate(cuts):
        found = _feed(rig, inputs, pieces, slack=3 * i)
        for name in ("query", "window", "entries", "index_entries"):
            check_same(getattr(found, name), getattr(want, name))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_rows_are_rounded_once_as_they_are_kept(rig: Rig, ratio: int, kind: KvType) -> None:
    inputs = Inputs.of(ratio, 130)
    inputs.weights["kv_norm"][:4] = 0, 1e-6, -1e-30, 1e6  # subnormal in f16, and beyond its range
    want, found = (_feed(rig, inputs, [126, 4], kind=each) for each in ("f32", kind))
    for name in ("window", "entries"):
        count = getattr(want, name).shape[0] - (name == "entries")  # one past the last, unwritten
        rounded = widen(narrow(getattr(want, name)[:count], STORED[kind]))
        check_same(getattr(found, name)[:count], rounded)
    assert np.isinf(found.window).any() == (kind == "f16")
    check_same(found.query, want.query)
    check_same(found.index_entries, want.index_entries)  # never anything but f32
