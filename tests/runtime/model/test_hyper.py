"""Hyper-connections: published Sinkhorn vectors, eps terms that logits cannot show, the trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.runtime.model import hyper
from tests.runtime.model.conftest import Operators, Trace

F32 = np.float32
TRACE = 2e-4

SHARP = [[9, 1, 0, 0], [9, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 9]]
SHARP_RESULT = [
    [0.499883, 0.362192, 0.133924, 0.001928],
    [0.499883, 0.133924, 0.362192, 0.001928],
    [0.000230, 0.495336, 0.495336, 0.007131],
    [0.000004, 0.008547, 0.008547, 0.989012],
]
NEEDS_EPS = [[8, 0, -8, -8], [8, 0, -8, -8], [0, 0, -8, -8], [0, 0, 0, 0]]
NEEDS_EPS_ROW = [0.001051, 0.756857, 0.121046, 0.121046]


def sinkhorn(path: str, logits: Any, iterations: int = 20, eps: float = 1e-6) -> Any:
    c = np.array(logits, dtype=F32)
    if path == "reference":
        return hyper.sinkhorn_reference(c, iterations, eps)
    hyper.sinkhorn_inplace(c, iterations, F32(eps))
    return c


def test_sinkhorn_vectors(path: str) -> None:
    assert sinkhorn(path, SHARP) == pytest.approx(np.array(SHARP_RESULT), abs=1e-5)
    assert sinkhorn(path, NEEDS_EPS)[2] == pytest.approx(np.array(NEEDS_EPS_ROW), abs=1e-5)


def test_sinkhorn_vectors_see_iterations_and_eps(path: str) -> None:
    short = np.abs(sinkhorn(path, SHARP, iterations=19) - SHARP_RESULT).max()
    assert short == pytest.approx(9.1e-5, abs=1e-5)
    assert sinkhorn(path, NEEDS_EPS, eps=0)[2] == pytest.approx(
        np.array([0.0003, 0.4997, 0.25, 0.25]), abs=1e-4
    )


def constants(n: int, d: int) -> tuple[npt.NDArray[np.float32], ...]:
    """Streams whose j-th is all j + 1, no mix, unit scales, unit norm."""
    streams = np.repeat(np.arange(1, n + 1, dtype=F32)[:, None], d, axis=1)[None]
    mix = np.zeros((1, (2 + n) * n), dtype=F32)
    return streams, mix, np.ones(3, dtype=F32), np.ones(d, dtype=F32)


def test_eps_of_pre(path: str) -> None:
    """sigmoid(-20) + 1e-6 = 1.00206e-6, times the streams' sum 10."""
    streams, mix, scale, norm = constants(4, 64)
    base = np.full(24, -20, dtype=F32)
    collapsed, _, post, comb = hyper.collapse(streams, mix, scale, base, norm, 20, 1e-6, 1e-6)
    assert collapsed == pytest.approx(np.full((1, 64), 1.00206e-5), rel=1e-5)
    assert post == pytest.approx(np.full((1, 4), 2 * 2.0611537e-9), rel=1e-4)  # no eps here
    assert comb == pytest.approx(np.full((1, 4, 4), 0.25), abs=1e-5)


def test_eps_of_head(path: str) -> None:
    streams, mix, scale, norm = constants(4, 64)
    base = np.full(4, -20, dtype=F32)
    collapsed, _ = hyper.head_collapse(streams, mix[:, :4], scale[:1], base, norm, 1e-6, 1e-6)
    assert collapsed == pytest.approx(np.full((1, 64), 1.00206e-5), rel=1e-5)


def test_extreme_mixes_stay_finite(path: str) -> None:
    streams, mix, scale, norm = constants(2, 32)
    for base in (np.full(8, -200, dtype=F32), np.full(8, 200, dtype=F32)):
        parts = hyper.collapse(streams, mix, scale, base, norm, 20, 1e-6, 1e-6)
        assert all(np.isfinite(part).all() for part in parts)


def test_streams_mix_over_the_first_index(path: str) -> None:
    streams = np.array([[[1, 10], [2, 20]]], dtype=F32)  # X[0], X[1]
    y = np.array([[100, 200]], dtype=F32)
    post = np.array([[1, 3]], dtype=F32)
    comb = np.array([[[5, 7], [11, 13]]], dtype=F32)  # C[j, k]
    before = streams.copy()
    found = hyper.expand(streams, y, post, comb)
    assert found[0].tolist() == [
        [100 + 5 * 1 + 11 * 2, 200 + 5 * 10 + 11 * 20],
        [300 + 7 * 1 + 13 * 2, 600 + 7 * 10 + 13 * 20],
    ]
    assert np.array_equal(streams, before)


@pytest.mark.parametrize(("n", "d"), [(1, 32), (2, 100), (4, 256), (5, 33)])
def test_paths_agree(n: int, d: int) -> None:
    rng = np.random.default_rng(n * d)
    streams = rng.standard_normal((3, n, d), dtype=F32)
    mix = rng.standard_normal((3, (2 + n) * n), dtype=F32) * 4
    scale, norm = rng.standard_normal(3, dtype=F32), rng.standard_normal(d, dtype=F32)
    base = rng.standard_normal((2 + n) * n, dtype=F32)
    args = (streams, mix, scale, base, norm, 20, 1e-6, 1e-6)
    fast, slow = hyper.collapse.fast(*args), hyper.collapse.reference(*args)
    for a, b in zip(fast, slow, strict=True):
        assert np.abs(a - b).max() < 1e-5
    y = rng.standard_normal((3, d), dtype=F32)
    a = hyper.expand.fast(streams, y, *fast[2:])
    assert np.abs(a - hyper.expand.reference(streams, y, *fast[2:])).max() < 1e-5
    ends = (streams, mix[:, :n], scale[:1], base[:n], norm, 1e-6, 1e-6)
    pairs = zip(hyper.head_collapse.fast(*ends), hyper.head_collapse.reference(*ends), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) < 1e-5


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_trace_of_collapse(
    path: str, operators: Operators, trace: Trace, prompt: npt.NDArray[np.int64], layer: int
) -> None:
    before = trace[f"l{layer - 1}.streams"] if layer else operators.embedding.forward(prompt)
    collapsed, _, post, comb = operators.around_attention[layer].collapse(before)
    assert np.abs(collapsed - trace[f"l{layer}.attn_in"]).max() < TRACE
    assert np.abs(post - trace[f"l{layer}.attn_post"]).max() < TRACE
    assert np.abs(comb - trace[f"l{layer}.attn_comb"]).max() < TRACE


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_trace_of_expand(
    path: str, operators: Operators, trace: Trace, prompt: npt.NDArray[np.int64], layer: int
) -> None:
    """Through both sub-blocks' mixes, with their outputs taken from the trace."""
    name = f"l{layer}"
    before = trace[f"l{layer - 1}.streams"] if layer else operators.embedding.forward(prompt)
    between = hyper.expand(
        before, trace[f"{name}.attn_out"], trace[f"{name}.attn_post"], trace[f"{name}.attn_comb"]
    )
    _, _, post, comb = operators.around_experts[layer].collapse(between)
    after = hyper.expand(between, trace[f"{name}.ffn_out"], post, comb)
    assert np.abs(after - trace[f"{name}.streams"]).max() < TRACE
