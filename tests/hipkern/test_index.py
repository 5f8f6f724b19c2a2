"""The indexer: scores against float64, choice against the CPU's, ties, NaN, early positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.runtime.kvtable import Held, Table
from ds4q.runtime.model import indexer
from tests.hipkern.dense import F32, F64, Rig, U, check_same, check_within, open_rig, turns

I32 = npt.NDArray[np.int32]
RATIO = 4


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with open_rig() as rig:
        yield rig


@dataclass
class Case:
    first: int
    topk: int
    pairs: int
    q: F32  # [T, H, D]
    gates: F32  # [T, H]
    keys: F32

    @staticmethod
    def of(
        first: int, tokens: int, topk: int, heads: int = 16, width: int = 128, pairs: int = 32
    ) -> Case:
        rng = np.random.default_rng(first + heads)

        def normal(*shape: int) -> F32:
            return rng.normal(size=shape).astype(np.float32)

        keys = normal((first + tokens) // RATIO + 2, width)
        return Case(first, topk, pairs, normal(tokens, heads, width), normal(tokens, heads), keys)

    def counts(self) -> list[int]:
        return [(self.first + t + 1) // RATIO for t in range(len(self.q))]


def _scores(rig: Rig, case: Case, blocks: int = 3, spare: int = 5) -> F32:
    """Scores [T, stride]."""
    tokens, heads, width = case.q.shape
    cos, sin = turns(case.first, tokens, case.pairs)
    stride = len(case.keys) + spare
    scores = rig.room(tokens, stride)
    rig.run(
        "index.hip", "index_scores", (blocks, tokens, 1),
        rig.put(case.q), rig.put(case.gates), rig.state(index_entries=rig.put(case.keys)),
        rig.tokens((case.first, tokens)), rig.put(cos), rig.put(sin), scores, heads, width,
        case.pairs, RATIO, case.topk, stride,
    )  # fmt: skip
    return rig.get(scores, tokens, stride)


def _select(rig: Rig, scores: F32, first: int, topk: int) -> I32:
    tokens, stride = scores.shape
    chosen = rig.room(tokens + 1, topk)
    rig.run(
        "index.hip", "index_select", (1, tokens, 1),
        rig.put(scores), rig.tokens((first, tokens)), chosen, RATIO, topk, stride,
    )  # fmt: skip
    found = rig.get(chosen, tokens + 1, topk, dtype=np.int32)
    assert (found[tokens:] == -1).all()  # as it was filled: nothing is written past the last
    return found[:tokens]


def _best(scores: F32, first: int, topk: int) -> I32:
    """What the CPU chooses, -1 past the count."""
    chosen = np.full((len(scores), topk), -1, np.int64)
    seen = (np.arange(first, first + len(scores)) + 1) // RATIO
    indexer.select_reference(scores, seen, topk, chosen, np.empty(len(scores), np.int64))
    return chosen.astype(np.int32)


def _exact(case: Case) -> tuple[F64, F64]:
    """Scores in float64, and their bound; garbage where a token does not see a key."""
    tokens, heads, width = case.q.shape
    cos, sin = (a[:, None].astype(np.float64) for a in turns(case.first, tokens, case.pairs))
    q = case.q.astype(np.float64)
    a, b = q[..., -2 * case.pairs :: 2], q[..., -2 * case.pairs + 1 :: 2]
    size = np.abs(q)
    size[..., -2 * case.pairs :: 2] = size[..., -2 * case.pairs + 1 :: 2] = np.abs(a) + np.abs(b)
    q[..., -2 * case.pairs :: 2], q[..., -2 * case.pairs + 1 :: 2] = (
        a * cos - b * sin,
        a * sin + b * cos,
    )
    gain = (case.gates * (width * heads) ** -0.5)[:, :, None]
    dots, spread = q @ case.keys.T.astype(np.float64), size @ np.abs(case.keys).T
    # The turn 3, a dot's 4 fused steps and 5 levels, the gain 4, the product 1, heads 3 and 8.
    bound = 28 * U * (np.abs(gain) * spread).sum(axis=1)
    return (gain * np.maximum(dots, 0)).sum(axis=1), bound


CASES = {
    "Flash": Case.of(600, 1, 20, heads=64),
    "16 heads": Case.of(290, 5, 30),
    "32 heads": Case.of(97, 4, 8, heads=32),
    "odd heads, narrow": Case.of(70, 2, 3, heads=5, width=36, pairs=6),
}


@pytest.mark.parametrize("name", CASES)
def test_scores(rig: Rig, name: str) -> None:
    case = CASES[name]
    found, (want, bound) = _scores(rig, case), _exact(case)
    for t, count in enumerate(case.counts()):
        check_within(found[t, :count], want[t, :count], bound[t, :count])
        assert np.isnan(found[t, count:]).all()  # no other place was written
    cos, sin = turns(case.first, len(case.q), case.pairs)
    expected = np.zeros_like(found)
    keys, counts = Table([Held(case.keys)]), np.array(case.counts())
    owners = np.zeros(len(case.q), np.int64)
    indexer.score_reference(
        case.q, case.gates, keys, cos, sin, counts, owners, 0, expected, 0, len(case.q)
    )
    seen = ~np.isnan(found)
    np.testing.assert_allclose(found[seen], expected[seen], rtol=0, atol=2e-6)


def test_scores_do_not_depend_on_batch_slice_grid_or_capacity(rig: Rig) -> None:
    case = CASES["16 heads"]
    want = _scores(rig, case)
    seen = ~np.isnan(want)
    check_same(_scores(rig, case, blocks=1), want)
    check_same(_scores(rig, case, blocks=20), want)
    check_same(_scores(rig, case, spare=40)[:, : want.shape[1]][seen], want[seen])
    for t in range(len(case.q)):
        alone = replace(
            case, first=case.first + t, q=case.q[t : t + 1], gates=case.gates[t : t + 1]
        )
        check_same(_scores(rig, alone), want[t : t + 1])


def test_nothing_is_scored_while_all_are_chosen(rig: Rig) -> None:
    case = Case.of(39, 6, 10)  # counts 10, 10, 10, 10, 11, 11
    found = _scores(rig, case)
    assert (~np.isnan(found)).sum(axis=1).tolist() == [0, 0, 0, 0, 11, 11]


@pytest.mark.parametrize(
    ("first", "tokens", "topk"), [(0, 9, 3), (4090, 3, 512), (5999, 1, 32), (12_000, 2, 512)]
)
def test_the_best_are_chosen(rig: Rig, first: int, tokens: int, topk: int) -> None:
    rng = np.random.default_rng(first)
    scores = rng.normal(size=(tokens, (first + tokens) // RATIO + 3)).astype(np.float32)
    scores *= np.exp(rng.normal(size=scores.shape) * 20).astype(np.float32)  # all magnitudes
    want = _best(scores, first, topk)
    np.testing.assert_array_equal(_select(rig, scores, first, topk), want)


def test_ties_go_to_the_lower_index(rig: Rig) -> None:
    rng = np.random.default_rng(4)
    scores = rng.integers(-2, 3, size=(6, 300)).astype(np.float32)
    scores[1] = 0.25
    scores[2] = np.where(np.arange(300) % 2, 0.0, -0.0)  # equal
    scores[3, :250] = np.inf
    scores[4] = np.where(np.arange(300) < 290, -np.inf, np.inf)
    scores[5] = np.where(np.arange(300) % 5, -np.inf, np.inf)  # the whole range of keys
    found = _select(rig, scores, 1190, 40)
    np.testing.assert_array_equal(found, _best(scores, 1190, 40))
    assert found[1].tolist() == found[2].tolist() == list(range(40))


def test_nan_is_chosen_last_and_breaks_nothing(rig: Rig) -> None:
    scores = np.random.default_rng(5).normal(size=(3, 100)).astype(np.float32)
    scores[0, ::2] = np.nan
    scores[1, :] = np.nan
    scores[2, 10:] = np.nan
    scores[2, 3] = -np.inf
    found = _select(rig, scores, 396, 30)
    order = np.argsort(-scores[0, :99], kind="stable")[:30]  # numpy sorts NaN last
    assert found[0].tolist() == sorted(order.tolist())
    assert found[1].tolist() == list(range(30))
    assert found[2].tolist() == list(range(30))


def test_few_entries_are_all_chosen(rig: Rig) -> None:
    scores = np.full((6, 20), np.nan, np.float32)
    found = _select(rig, scores, 0, 4)
    assert found.tolist() == [[-1] * 4] * 3 + [[0, -1, -1, -1]] * 3
    assert _select(rig, scores[:1], 15, 4).tolist() == [[0, 1, 2, 3]]


def test_scores_choose_the_entries_of_the_cpu(rig: Rig) -> None:
    case = Case.of(400, 4, 25, heads=32)
    found = _select(rig, _scores(rig, case, spare=0), case.first, case.topk)
    want, _ = _exact(case)
    np.testing.assert_array_equal(found, _best(want.astype(np.float32), case.first, case.topk))
