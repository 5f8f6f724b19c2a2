"""Attention over window rows and entries against float64, whatever the batch, slice or grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.hipkern.kernels import KV_TYPES
from ds4q.runtime.kvtable import Held, Table
from ds4q.runtime.kvtype import STORED, KvType, narrow, widen
from ds4q.runtime.model import attention
from tests.hipkern.dense import F32, F64, Rig, U, check_same, check_within, open_rig, turns

EPS = 1e-6
KEYS = 16  # of a chunk


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with open_rig() as rig:
        yield rig


@dataclass
class Case:
    """T tokens at positions first on; window and entries hold more rows than they may see."""

    first: int
    reach: int
    ratio: int
    pairs: int
    q: F32  # [T, H, D]
    sink: F32
    window: F32
    entries: F32
    chosen: npt.NDArray[np.int32] | None

    @staticmethod
    def of(
        first: int,
        tokens: int,
        ratio: int,
        *,
        heads: int = 6,
        width: int = 128,
        reach: int = 20,
        pairs: int = 16,
        topk: int = 0,
    ) -> Case:
        rng = np.random.default_rng(first + 7 * ratio + tokens)

        def normal(*shape: int) -> F32:
            return rng.normal(size=shape).astype(np.float32)

        most = (first + tokens) // ratio if ratio else 0
        chosen = None
        if topk:
            chosen = np.full((tokens, topk), -1, np.int32)
            for t in range(tokens):
                count = (first + t + 1) // ratio
                best = np.sort(rng.permutation(count)[:topk])
                chosen[t, : len(best)] = best
        return Case(
            first, reach, ratio, pairs, normal(tokens, heads, width) * 3, normal(heads),
            normal(reach - 1 + tokens + 2, width), normal(most + 3, width), chosen,
        )  # fmt: skip

    @property
    def topk(self) -> int:
        return 0 if self.chosen is None else self.chosen.shape[1]

    def counts(self) -> npt.NDArray[np.int64]:
        """Entries that each token sees."""
        positions = self.first + np.arange(len(self.q))
        counts = (positions + 1) // self.ratio if self.ratio else np.zeros_like(positions)
        return np.minimum(counts, self.topk) if self.topk else counts

    def keys(self, t: int) -> F32:
        position = self.first + t
        seen = np.arange(max(0, position - self.reach + 1), position + 1) % len(self.window)
        count = self.counts()[t]
        picked = np.arange(count) if self.chosen is None else self.chosen[t, :count]
        return np.concatenate([self.window[seen], self.entries[picked]])


def _attend(
    rig: Rig, case: Case, blocks: int = 3, slices: int | None = None, kind: KvType = "f32"
) -> F32:
    """Output [T, H, D], ``slices`` tokens a launch, of keys that are kept as ``kind``."""
    tokens, heads, width = case.q.shape
    cos, sin = turns(case.first, tokens, case.pairs)
    chunks = -(-(case.reach + int(case.counts().max())) // KEYS)
    state = rig.state(
        window=rig.keep(case.window, kind),
        entries=rig.keep(case.entries, kind),
        window_rows=len(case.window),
        capacity=len(case.entries),
    )
    sink = rig.put(case.sink)
    parts = []
    for at in range(0, tokens, slices or tokens):
        part = slice(at, at + (slices or tokens))
        count = len(case.q[part])
        partial = rig.room(count, chunks, heads, width + 4)
        chosen = 0 if case.chosen is None else rig.put(case.chosen[part], np.int32)
        at_cos, at_sin = rig.put(cos[part]), rig.put(sin[part])
        stand = rig.tokens((case.first + at, count))
        shape = (case.pairs, case.reach, case.ratio, case.topk, chunks)
        rig.run(
            "attention.hip", "attend", (blocks, -(-heads // 16), count),
            rig.put(case.q[part]), state, stand, chosen, at_cos, at_sin, partial, heads, *shape,
            EPS, DS4Q_HEAD_DIM=width, DS4Q_KV_TYPE=KV_TYPES[kind],
        )  # fmt: skip
        out = rig.room(count, heads, width)
        rig.run(
            "attention.hip", "attend_combine", (-(-width // 128), heads, count),
            partial, sink, stand, at_cos, at_sin, out, heads, *shape,
            DS4Q_HEAD_DIM=width, DS4Q_KV_TYPE=KV_TYPES[kind],
        )  # fmt: skip
        parts.append(rig.get(out, count, heads, width))
    return np.concatenate(parts)


def _turned(x: F64, cos: F32, sin: F32, pairs: int) -> F64:
    out = x.copy()
    a, b = x[..., -2 * pairs :: 2], x[..., -2 * pairs + 1 :: 2]
    out[..., -2 * pairs :: 2] = a * cos - b * sin
    out[..., -2 * pairs + 1 :: 2] = a * sin + b * cos
    return out


def _exact(case: Case) -> tuple[F64, F64]:
    """The output in float64, and its bound."""
    tokens, heads, width = case.q.shape
    cos, sin = turns(case.first, tokens, case.pairs)
    out, bound = np.empty((2, tokens, heads, width))
    for t in range(tokens):
        keys = case.keys(t).astype(np.float64)
        q = case.q[t].astype(np.float64)
        q = q / np.sqrt((q**2).mean(-1, keepdims=True) + EPS)
        q = _turned(q, cos[t], sin[t], case.pairs)
        scores = q @ keys.T * width**-0.5
        top = np.maximum(scores.max(-1), case.sink)[:, None]
        weights = np.exp(scores - top)
        shares = weights / (weights.sum(-1, keepdims=True) + np.exp(case.sink[:, None] - top))
        mixed = shares @ keys
        # A query: its norm ((D / 32 + 5) / 2 + 4) and turn (6, as a pair's larger part); a score:
        # D / 32 fused steps, 5 levels, the scale 3; all on the sum of magnitudes.
        steps = 1.5 * (width / 32 + 5) + 13
        size = np.sqrt(2) * np.abs(q).max(-1, keepdims=True)
        error = steps * U * (size * np.abs(keys).sum(-1)) * width**-0.5
        # exp of a difference rounded twice: its own 2u, twice, and |difference| u, twice.
        error = error + (4 + 2 * np.ptp(np.append(scores, case.sink[:, None], 1), 1)[:, None]) * U
        # A share: its numerator's error and at most the same of all others; sums over keys: one
        # step each, of 16 in a chunk and then of chunks, twice; division 1, turn 3.
        spread = 2 * error.max(-1, keepdims=True) + (2 * (KEYS + len(keys) / KEYS) + 4) * U
        mixed_bound = spread * (shares @ np.abs(keys))
        out[t] = _turned(mixed, cos[t], -sin[t], case.pairs)
        # A turned channel takes both of its pair's errors.
        both = mixed_bound.copy()
        both[:, -2 * case.pairs :: 2] += mixed_bound[:, -2 * case.pairs + 1 :: 2]
        both[:, -2 * case.pairs + 1 :: 2] = both[:, -2 * case.pairs :: 2]
        bound[t] = both
    return out, bound


def _cpu(case: Case) -> F32:
    tokens, heads, _ = case.q.shape
    cos, sin = turns(case.first, tokens, case.pairs)
    out = np.empty_like(case.q)
    chosen = np.empty((tokens, 0), np.int64) if case.chosen is None else case.chosen.astype(int)
    units = tokens * -(-heads // 16)
    positions, owners = np.arange(case.first, case.first + tokens), np.zeros(tokens, np.int64)
    attention.attend_reference(
        case.q, case.sink, Table([Held(case.window)]), case.reach, Table([Held(case.entries)]),
        chosen, case.counts(), cos, sin, positions, owners, EPS, out, 0, units,
    )  # fmt: skip
    return out


CASES = {
    "first token, no entries": Case.of(0, 1, 0),
    "window fills": Case.of(0, 26, 0),
    "ratio 4, all entries": Case.of(30, 6, 4, topk=64),
    "ratio 4, chosen entries": Case.of(300, 5, 4, topk=24),
    "ratio 128, boundaries": Case.of(125, 5, 128),
    "ratio 128, many entries": Case.of(2555, 6, 128),
    "heads past one group": Case.of(60, 2, 4, topk=8, heads=20),
    "narrow heads": Case.of(33, 3, 4, topk=8, width=72, pairs=6),
    "Flash": Case.of(1030, 1, 4, heads=64, width=512, reach=128, pairs=32, topk=64),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(rig: Rig, name: str) -> None:
    case = CASES[name]
    found = _attend(rig, case)
    check_within(found, *_exact(case))
    np.testing.assert_allclose(found, _cpu(case), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["window fills", "ratio 4, chosen entries", "ratio 128, boundaries"]
)
def test_no_bit_depends_on_batch_slices_or_grid(rig: Rig, name: str) -> None:
    case = CASES[name]
    want = _attend(rig, case)
    check_same(_attend(rig, case, blocks=1), want)
    check_same(_attend(rig, case, blocks=9, slices=2), want)
    for t in range(0, len(case.q), 4):
        chosen = None if case.chosen is None else case.chosen[t : t + 1]
        alone = replace(case, first=case.first + t, q=case.q[t : t + 1], chosen=chosen)
        check_same(_attend(rig, alone), want[t : t + 1])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["ratio 4, chosen entries", "ratio 128, boundaries", "Flash"])
def test_keys_are_widened_exactly(rig: Rig, name: str, kind: KvType) -> None:
    case = CASES[name]

    def rounded(rows: F32) -> F32:
        return widen(narrow(rows, STORED[kind]))

    seen = replace(case, window=rounded(case.window), entries=rounded(case.entries))
    found = _attend(rig, case, kind=kind)
    check_same(found, _attend(rig, seen))
    assert (found != _attend(rig, case)).any()


def test_a_token_sees_its_own_sequence(rig: Rig) -> None:
    """Two sequences in one launch, which give what each gives alone."""
    one, other = CASES["ratio 4, chosen entries"], Case.of(70, 3, 4, topk=24)
    cases, width, heads = (one, other), one.q.shape[2], one.q.shape[1]
    assert one.chosen is not None
    assert other.chosen is not None
    tokens = sum(len(case.q) for case in cases)
    cos, sin = (
        rig.put(np.concatenate(each))
        for each in zip(*(turns(c.first, len(c.q), c.pairs) for c in cases), strict=True)
    )
    chunks = -(-(one.reach + one.topk) // KEYS)
    states = rig.states(
        *(
            {
                "window": rig.put(case.window),
                "entries": rig.put(case.entries),
                "window_rows": len(case.window),
            }
            for case in cases
        )
    )
    stand = rig.tokens(*((case.first, len(case.q)) for case in cases))
    partial, out = rig.room(tokens, chunks, heads, width + 4), rig.room(tokens, heads, width)
    shape = (one.pairs, one.reach, one.ratio, one.topk, chunks)
    rig.run(
        "attention.hip", "attend", (2, 1, tokens), rig.put(np.concatenate([one.q, other.q])),
        states, stand, rig.put(np.concatenate([one.chosen, other.chosen]), np.int32), cos, sin,
        partial, heads, *shape, EPS, DS4Q_HEAD_DIM=width, DS4Q_KV_TYPE=0,
    )  # fmt: skip
    rig.run(
        "attention.hip", "attend_combine", (1, heads, tokens), partial, rig.put(one.sink), stand,
        cos, sin, out, heads, *shape, DS4Q_HEAD_DIM=width, DS4Q_KV_TYPE=0,
    )  # fmt: skip
    found = rig.get(out, tokens, heads, width)
    check_same(found[: len(one.q)], _attend(rig, one))
    check_same(found[len(one.q) :], _attend(rig, replace(other, sink=one.sink)))


def test_no_bit_depends_on_capacities(rig: Rig) -> None:
    case = CASES["ratio 4, chosen entries"]
    rows = len(case.window)
    longer = np.full((rows + 11, case.window.shape[1]), np.nan, np.float32)
    live = np.arange(case.first - case.reach + 1, case.first + len(case.q))
    longer[live % len(longer)] = case.window[live % rows]
    entries = np.concatenate([case.entries, np.full((50, 128), np.nan, np.float32)])
    check_same(_attend(rig, replace(case, window=longer, entries=entries)), _attend(rig, case))


def test_rows_out_of_sight_do_not_matter(rig: Rig) -> None:
    case = CASES["ratio 128, boundaries"]
    assert case.counts().tolist() == [0, 0, 1, 1, 1]
    hidden = case.entries.copy()
    hidden[1:] = np.nan
    check_same(_attend(rig, replace(case, entries=hidden)), _attend(rig, case))


def test_a_great_sink_takes_all_weight(rig: Rig) -> None:
    case = replace(CASES["window fills"], sink=np.full(6, 300.0, np.float32))
    np.testing.assert_array_equal(_attend(rig, case), np.zeros_like(case.q))


def test_a_great_score_in_any_chunk_does_not_overflow(rig: Rig) -> None:
    case = CASES["window fills"]
    tokens, seen = len(case.q), case.reach
    assert seen > KEYS  # two chunks: the first holds the oldest row, the last one the newest
    for position in (tokens - 1, tokens - seen):
        window = case.window.copy()
        window[position % len(window)] *= 1000
        loud = replace(case, window=window)
        found = _attend(rig, loud)[-1]
        np.testing.assert_allclose(found, _cpu(loud)[-1], rtol=1e-3, atol=1e-3)
