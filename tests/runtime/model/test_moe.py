"""Routing: the bias steers the choice only, hash layers follow the token, ties, the trace."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.runtime.errors import RouterError
from ds4q.runtime.model import hyper, moe
from tests.checks import check_refused
from tests.runtime.model.conftest import Operators, Trace

F32 = np.float32
TRACE = 2e-4


def scores(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return np.sqrt(np.logaddexp(0, logits.astype(np.float64)))


@pytest.mark.parametrize("experts", [4, 16, 256])
def test_routing_by_the_formula(path: str, experts: int) -> None:
    rng = np.random.default_rng(experts)
    logits = rng.standard_normal((20, experts), dtype=F32) * 5
    bias = rng.standard_normal(experts, dtype=F32)
    ids = moe.route(logits, bias, 4)
    weights = moe.weigh(logits, ids, 1.5)
    for t in range(20):
        expected = np.argsort(-(scores(logits[t]) + bias))[:4]
        assert ids[t].tolist() == expected.tolist()
        chosen = scores(logits[t])[expected]
        assert weights[t] == pytest.approx(chosen / chosen.sum() * 1.5, rel=1e-5)


def test_ties_go_to_the_lower_expert(path: str) -> None:
    logits = np.array([[1, 2, 2, 1, 2, 1]], dtype=F32)
    zero = np.zeros(6, dtype=F32)
    assert moe.route(logits, zero, 4).tolist() == [[1, 2, 4, 0]]


def test_far_logits(path: str) -> None:
    """Far below zero every score vanishes; far above, softplus is the identity."""
    logits = np.array([[-200, -200, -200], [100, 400, 0]], dtype=F32)
    weights = moe.weigh(logits, np.array([[0, 2], [0, 1]]), 1.5)
    assert np.isfinite(weights).all()
    assert weights[1] == pytest.approx(np.array([0.5, 1.0]), rel=1e-6)


def test_experts_add_up_in_order(path: str) -> None:
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((3, 4, 50), dtype=F32)
    weights, shared = rng.standard_normal((3, 4), dtype=F32), rng.standard_normal((3, 50), F32)
    routed, total = moe.combine(rows, weights, shared)
    expected = np.zeros((3, 50), dtype=F32)
    for k in range(4):
        expected += weights[:, k, None] * rows[:, k]
    assert np.array_equal(routed, expected)
    assert np.array_equal(total, expected + shared)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_trace_of_experts(
    path: str, operators: Operators, trace: Trace, prompt: npt.NDArray[np.int64], layer: int
) -> None:
    """Two hash layers and a learned one."""
    name, seen = f"l{layer}", dict[str, Any]()
    before = trace[f"l{layer - 1}.streams"] if layer else operators.embedding.forward(prompt)
    between = hyper.expand(
        before, trace[f"{name}.attn_out"], trace[f"{name}.attn_post"], trace[f"{name}.attn_comb"]
    )
    x = operators.around_experts[layer].collapse(between)[1]
    found = operators.experts[layer].forward(x, operators.step(prompt, seen.__setitem__))
    assert np.abs(found - trace[f"{name}.ffn_out"]).max() < TRACE
    assert np.abs(seen[f"{name}.routed_out"] - trace[f"{name}.routed_out"]).max() < TRACE
    order = np.argsort(seen[f"{name}.route_idx"], axis=1)
    expected = np.argsort(trace[f"{name}.route_idx"], axis=1)
    ids, weights = (
        np.take_along_axis(seen[f"{name}.{key}"], order, 1) for key in ("route_idx", "route_w")
    )
    assert np.array_equal(ids, np.take_along_axis(trace[f"{name}.route_idx"], expected, 1))
    known = np.take_along_axis(trace[f"{name}.route_w"], expected, 1)
    assert np.abs(weights - known).max() < TRACE


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_router_of_numbers_that_are_none_is_refused(
    path: str, operators: Operators, prompt: npt.NDArray[np.int64], wrong: float
) -> None:
    """One expert's logit alone: it would only never be chosen."""
    layer = operators.experts[3]
    weight = dataclasses.replace(layer._gate, data=layer._gate.data.copy())
    values = weight.data.view("<u2").reshape(weight.rows, weight.cols)
    values[7] = np.float32(wrong).view(np.uint32) >> 16  # BF16
    x = np.ones((2, weight.cols), dtype=F32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "_gate", weight)
        check_refused(
            RouterError, lambda: layer.forward(x, operators.step(prompt[:2])), says=["layer 3"]
        )
