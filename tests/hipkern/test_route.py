"""Routing: choice and weights against float64 and the CPU's, ties, NaN, hash layers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.runtime.model.moe import route_reference
from tests.hipkern.dense import F32, F64, Rig, U, check_same, check_within, open_rig

I32 = npt.NDArray[np.int32]
FACTOR = 1.5


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with open_rig() as rig:
        yield rig


def _route(
    rig: Rig,
    logits: F32,
    k: int,
    bias: F32 | None = None,
    table: I32 | None = None,
    tokens: I32 | None = None,
) -> tuple[I32, F32]:
    count, experts = logits.shape
    ids, weights = rig.room(count, k), rig.room(count, k)
    at_bias = 0 if bias is None else rig.put(bias)
    at_table = 0 if table is None else rig.put(table, np.int32)
    at_tokens = 0 if tokens is None else rig.put(tokens, np.int32)
    rig.run(
        "route.hip", "route", (1, count, 1),
        rig.put(logits), at_bias, at_table, at_tokens, ids, weights, experts, k, FACTOR,
    )  # fmt: skip
    return rig.get(ids, count, k, dtype=np.int32), rig.get(weights, count, k)


def _weights(logits: F32, ids: I32) -> F64:
    z = np.take_along_axis(logits.astype(np.float64), ids.astype(np.int64), axis=1)
    scores = np.sqrt(np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))))
    return scores / scores.sum(axis=1, keepdims=True) * FACTOR


@pytest.mark.parametrize(("experts", "k"), [(256, 6), (16, 4), (40, 7), (384, 8)])
def test_the_best_of_score_plus_bias(rig: Rig, experts: int, k: int) -> None:
    rng = np.random.default_rng(experts)
    logits = (rng.normal(size=(4, experts)) * 8).astype(np.float32)
    bias = rng.normal(size=experts).astype(np.float32)
    ids, weights = _route(rig, logits, k, bias)
    np.testing.assert_array_equal(ids, route_reference(logits, bias, k))
    # exp 2u (0.88 ulp), log1p 2u on it, their sum u, the root halves and adds u: a score is within
    # 4u. A sum of k adds (k - 1)u at most, division and factor 2u: (4 + 4 + k + 1)u in all.
    want = _weights(logits, ids)
    check_within(weights, want, (9 + k) * U * want)


def test_a_layer_without_bias_takes_the_best_scores(rig: Rig) -> None:
    logits = np.random.default_rng(3).normal(size=(2, 32)).astype(np.float32)
    ids, _ = _route(rig, logits, 4)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1, kind="stable")[:, :4])


def test_ties_go_to_the_lower_id(rig: Rig) -> None:
    logits = np.zeros((2, 64), np.float32)
    logits[1, [3, 35, 34, 63]] = 1.0
    ids, weights = _route(rig, logits, 6, np.zeros(64, np.float32))
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [3, 34, 35, 63, 0, 1]]
    check_within(weights[0], np.full(6, 0.25), 2 * U)


def test_nan_ranks_below_every_number(rig: Rig) -> None:
    logits = np.full((3, 40), np.nan, np.float32)
    logits[0, [7, 33]] = -5.0, 2.0
    logits[2] = 1.0
    bias = np.zeros(40, np.float32)
    bias[1], bias[2] = np.nan, -np.inf
    ids, _ = _route(rig, logits, 4, bias)
    assert ids.tolist() == [[33, 7, 0, 1], [0, 1, 2, 3], [0, 3, 4, 5]]


def test_hash_layers_look_their_experts_up_by_token(rig: Rig) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(3, 16)).astype(np.float32)
    table = np.array([rng.permutation(16)[:4] for _ in range(50)], np.int32)
    tokens = np.array([49, 0, 17], np.int32)
    ids, weights = _route(rig, logits, 4, table=table, tokens=tokens)
    np.testing.assert_array_equal(ids, table[tokens])
    want = _weights(logits, ids)
    check_within(weights, want, 13 * U * want)


def test_vanished_scores_give_finite_weights(rig: Rig) -> None:
    _, weights = _route(rig, np.full((1, 16), -300.0, np.float32), 4, np.zeros(16, np.float32))
    np.testing.assert_array_equal(weights, np.zeros((1, 4)))


def test_a_token_does_not_depend_on_its_batch(rig: Rig) -> None:
    logits = np.random.default_rng(6).normal(size=(9, 256)).astype(np.float32)
    bias = np.zeros(256, np.float32)
    ids, weights = _route(rig, logits, 6, bias)
    for t in range(9):
        one = _route(rig, logits[t : t + 1], 6, bias)
        np.testing.assert_array_equal(one[0], ids[t : t + 1])
        check_same(one[1], weights[t : t + 1])
