"""Owns routing and the sum over experts. Expert products belong to the backend.

Scores are ``sqrt(softplus(z))``. A learned layer picks the K best of score plus bias, where the
bias steers the choice only; a hash layer looks its experts up by token id. Weights are the chosen
scores over their sum, times the routed scaling factor. Ties go to the lower expert id.

T tokens, E experts, K experts per token, d hidden size.
"""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.runtime.backend.weights import Expert, Weight
from ds4q.runtime.errors import RouterError
from ds4q.runtime.model.parts import Parts, Step

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

_TINY = np.float32(1e-20)  # as in transformers: keeps a sum of vanished scores from being 0


class Router(NamedTuple):
    """How a layer chooses: ``gate`` [E, d], and ``bias`` [E] or, by token id, ids [V, K]."""

    gate: Weight
    bias: F32 | None
    by_token: npt.NDArray[np.int32] | None


def scores(logits: F32) -> F32:
    """What experts are chosen and weighed by, of gate logits of any shape; no bias."""
    softplus = np.maximum(logits, 0) + np.log1p(np.exp(-np.abs(logits)))
    return np.sqrt(softplus).astype(np.float32)


def weigh_reference(logits: F32, ids: I64, factor: float) -> F32:
    """Weights f32 [T, K] of the experts ``ids`` [T, K], from gate logits [T, E]."""
    chosen = np.take_along_axis(scores(logits), ids, axis=1)
    total = chosen.sum(axis=1, keepdims=True) + _TINY
    return (chosen / total * np.float32(factor)).astype(np.float32)


@jit
def _score(z: np.float32) -> np.float32:
    one, zero = np.float32(1.0), np.float32(0.0)
    tail = np.exp(-z) if z > zero else np.exp(z)
    return np.sqrt((z if z > zero else zero) + np.log1p(tail * one))


@jit
def _weigh_fast(logits: F32, ids: I64, factor: float) -> F32:
    weights = np.empty(ids.shape, dtype=np.float32)
    for t in range(ids.shape[0]):
        total = _TINY
        for k in range(ids.shape[1]):
            weights[t, k] = _score(logits[t, ids[t, k]])
            total += weights[t, k]
        for k in range(ids.shape[1]):
            weights[t, k] = weights[t, k] / total * np.float32(factor)
    return weights


def route_reference(logits: F32, bias: F32, k: int) -> I64:
    """The ``k`` best experts of each token, best first, int64 [T, k]; bias f32 [E]."""
    return np.argsort(-(scores(logits) + bias), axis=1, kind="stable")[:, :k].copy()


@jit
def _route_fast(logits: F32, bias: F32, k: int) -> I64:
    tokens, experts = logits.shape
    ids = np.empty((tokens, k), dtype=np.int64)
    merit = np.empty(experts, dtype=np.float32)
    for t in range(tokens):
        for e in range(experts):
            merit[e] = _score(logits[t, e]) + bias[e]
        for i in range(k):
            best = 0
            for e in range(1, experts):
                if merit[e] > merit[best]:
                    best = e
            ids[t, i] = best
            merit[best] = -np.inf
    return ids


def combine_reference(rows: F32, weights: F32, shared: F32) -> tuple[F32, F32]:
    """(routed, routed + shared), each [T, d], from expert rows [T, K, d] in the order of K."""
    routed = np.zeros_like(shared)
    for k in range(rows.shape[1]):
        routed += weights[:, k, None] * rows[:, k]
    return routed, routed + shared


@jit
def _combine_fast(rows: F32, weights: F32, shared: F32) -> tuple[F32, F32]:
    tokens, k, d = rows.shape
    routed = np.zeros((tokens, d), dtype=np.float32)
    total = np.empty((tokens, d), dtype=np.float32)
    for t in range(tokens):
        target = routed[t]
        for j in range(k):
            weight, row = weights[t, j], rows[t, j]
            for i in range(d):
                target[i] += weight * row[i]
        out, added = total[t], shared[t]
        for i in range(d):
            out[i] = target[i] + added[i]
    return routed, total


weigh = FastPath(weigh_reference, _weigh_fast)
route = FastPath(route_reference, _route_fast)
combine = FastPath(combine_reference, _combine_fast)


class MoE:
    """``layers.N.ffn.*``: the router, the routed experts and the one that every token uses."""

    def __init__(self, parts: Parts, layer: int) -> None:
        c, source = parts.config, parts.source
        name = f"layers.{c.number(layer)}.ffn"
        d, width, experts = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
        self._config = c
        self._backend = parts.backend
        self._experts = parts.experts
        self._layer = layer
        self._gate = source.matrix(f"{name}.gate.weight", experts, d)
        self._by_token: npt.NDArray[np.int32] | None = None
        if c.is_hash_layer(layer):
            self._by_token = source.ids(
                f"{name}.gate.tid2eid", c.vocab_size, c.num_experts_per_tok, below=experts
            )
            self.router = Router(self._gate, None, self._by_token)
        else:
            self._bias = source.values(f"{name}.gate.bias", experts)
            self.router = Router(self._gate, self._bias, None)
        shared = f"{name}.shared_experts"
        self._shared = {
            0: Expert(
                source.matrix(f"{shared}.w1.weight", width, d),
                source.matrix(f"{shared}.w3.weight", width, d),
                source.matrix(f"{shared}.w2.weight", d, width),
            )
        }

    def forward(self, x: F32, step: Step) -> F32:
        """The sub-block's output [T, d] of its normed input ``x`` [T, d]."""
        ids, weights = self.choose(x, step)
        rows = np.zeros((*ids.shape, x.shape[1]), np.float32)  # where nobody serves a route: zero
        with closing(self._experts.bands(self._layer, ids, step.phase)) as bands:
            for experts, where in bands:
                if step.observer is not None:
                    step.observer(self._layer, ids, weights, x, experts)
                self._backend.experts(
                    x, ids, experts, self._config.swiglu_limit, where=where, out=rows
                )
        routed, out = self.join(x, rows, weights)
        if step.trace is not None:
            step.trace(f"l{self._layer}.route_idx", ids)
            step.trace(f"l{self._layer}.route_w", weights)
            step.trace(f"l{self._layer}.routed_out", routed)
        return out

    def choose(self, x: F32, step: Step) -> tuple[I64, F32]:
        """Ids [T, K] of the experts that each token takes, and their weights [T, K]."""
        logits, ids = self._choose(x, step)
        if step.routed is not None:
            step.routed(self._layer, ids, logits, x)
        return ids, weigh(logits, ids, self._config.routed_scaling_factor)

    def join(self, x: F32, rows: F32, weights: F32) -> tuple[F32, F32]:
        """Sums [T, d] without and with the shared expert, of the experts' ``rows`` [T, K, d]."""
        everyone = np.zeros((len(x), 1), dtype=np.int64)
        limit = self._config.swiglu_limit
        shared = self._backend.experts(x, everyone, self._shared, limit)[:, 0]
        return combine(rows, weights, shared)

    def _choose(self, x: F32, step: Step) -> tuple[F32, I64]:
        """Gate logits [T, E] and the ids [T, K] of the chosen experts."""
        logits = self._backend.linear(self._gate, x)
        if self._by_token is not None:
            return logits, self._by_token[step.ids].astype(np.int64)
        if not np.isfinite(logits).all():  # else NaN would only never be chosen
            raise RouterError(found=f"layer {self._layer}")
        return logits, route(logits, self._bias, self._config.num_experts_per_tok)
