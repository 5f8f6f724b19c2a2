"""Owns the hyper-connections (mHC): n streams collapse before a sub-block and mix after it.

After "mHC: Manifold-Constrained Hyper-Connections" (arXiv 2512.24880) as DeepSeek-V4's inference
code runs it. The product ``fn v`` of the flattened streams goes through the backend and comes in
as ``mix``; nothing here crosses tokens.

T tokens, n streams, d hidden size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.runtime.model.norm import inverse_rms, norm_row, rms_norm_reference
from ds4q.runtime.model.parts import Parts

F32 = npt.NDArray[np.float32]


def sinkhorn_reference(logits: F32, iterations: int, eps: float) -> F32:
    """Make ``logits`` [..., n, n] (first index the source stream) nearly doubly stochastic.

    One softmax over each row, then columns and rows in turn; a column pass comes last.
    """
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    c = shifted / shifted.sum(axis=-1, keepdims=True) + np.float32(eps)
    c = c / (c.sum(axis=-2, keepdims=True) + np.float32(eps))
    for _ in range(iterations - 1):
        c = c / (c.sum(axis=-1, keepdims=True) + np.float32(eps))
        c = c / (c.sum(axis=-2, keepdims=True) + np.float32(eps))
    return c.astype(np.float32)


@jit
def _scale_rows(c: F32, eps: np.float32) -> None:
    for j in range(c.shape[0]):
        total = eps
        for k in range(c.shape[1]):
            total += c[j, k]
        for k in range(c.shape[1]):
            c[j, k] /= total


@jit
def _scale_columns(c: F32, eps: np.float32) -> None:
    for k in range(c.shape[1]):
        total = eps
        for j in range(c.shape[0]):
            total += c[j, k]
        for j in range(c.shape[0]):
            c[j, k] /= total


@jit
def sinkhorn_inplace(c: F32, iterations: int, eps: np.float32) -> None:
    """``sinkhorn_reference`` of one [n, n] matrix, in place."""
    for j in range(c.shape[0]):
        top = c[j, 0]
        for k in range(c.shape[1]):
            top = max(top, c[j, k])
        for k in range(c.shape[1]):
            c[j, k] = np.exp(c[j, k] - top)
    _scale_rows(c, np.float32(0.0))
    for j in range(c.shape[0]):
        for k in range(c.shape[1]):
            c[j, k] += eps
    _scale_columns(c, eps)
    for _ in range(iterations - 1):
        _scale_rows(c, eps)
        _scale_columns(c, eps)


def _sigmoid(x: F32) -> F32:
    return (0.5 + 0.5 * np.tanh(0.5 * x.astype(np.float64))).astype(np.float32)


def _normalised_mix(streams: F32, mix: F32, norm_eps: float) -> F32:
    """``mix`` over the root mean square of all n d values of a token, f32 like ``mix``."""
    flat = streams.reshape(len(streams), -1).astype(np.float64)
    return (mix / np.sqrt(np.mean(flat**2, axis=-1, keepdims=True) + norm_eps)).astype(np.float32)


def collapse_reference(
    streams: F32,
    mix: F32,
    scale: F32,
    base: F32,
    norm_weight: F32,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[F32, F32, F32, F32]:
    """Collapse the streams to a sub-block's input, and say how its output goes back.

    Parameters
    ----------
    streams : f32 [T, n, d]
    mix : f32 [T, (2 + n) n], ``fn`` times the flattened streams
    scale, base : f32 [3] and [(2 + n) n]: pre, post, comb
    norm_weight : f32 [d], the sub-block's RMSNorm

    Returns
    -------
    collapsed [T, d] before the norm, normed [T, d], post [T, n], comb [T, n, n]
    """
    t, n, _ = streams.shape
    m = _normalised_mix(streams, mix, norm_eps)
    pre = _sigmoid(m[:, :n] * scale[0] + base[:n]) + np.float32(hc_eps)
    post = 2 * _sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(t, n, n)
    comb = sinkhorn_reference(logits, iterations, hc_eps)
    collapsed = np.einsum("tj,tjd->td", pre, streams).astype(np.float32)
    return collapsed, rms_norm_reference(collapsed, norm_weight, norm_eps), post, comb


@jit
def _weigh_streams(
    streams: F32, mix: F32, scale: np.float32, base: F32, eps: np.float32, out: F32
) -> None:
    """Add ``sum_j (sigmoid(mix[j] scale + base[j]) + eps) streams[j]`` of one token to ``out``."""
    one = np.float32(1.0)
    for j in range(streams.shape[0]):
        pre = one / (one + np.exp(-(mix[j] * scale + base[j]))) + eps
        x = streams[j]
        for i in range(x.shape[0]):
            out[i] += pre * x[i]


@jit
def _collapse_fast(
    streams: F32,
    mix: F32,
    scale: F32,
    base: F32,
    norm_weight: F32,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[F32, F32, F32, F32]:
    tokens, n, d = streams.shape
    eps = np.float32(hc_eps)
    collapsed = np.zeros((tokens, d), dtype=np.float32)
    normed = np.empty((tokens, d), dtype=np.float32)
    post = np.empty((tokens, n), dtype=np.float32)
    comb = np.empty((tokens, n, n), dtype=np.float32)
    for t in range(tokens):
        r = inverse_rms(streams[t].reshape(n * d), norm_eps)
        m = mix[t] * r
        _weigh_streams(streams[t], m, scale[0], base, eps, collapsed[t])
        for j in range(n):
            gate = m[n + j] * scale[1] + base[n + j]
            post[t, j] = np.float32(2.0) / (np.float32(1.0) + np.exp(-gate))
            for k in range(n):
                at = (2 + j) * n + k
                comb[t, j, k] = m[at] * scale[2] + base[at]
        sinkhorn_inplace(comb[t], iterations, eps)
        norm_row(collapsed[t], norm_weight, norm_eps, normed[t])
    return collapsed, normed, post, comb


def expand_reference(streams: F32, y: F32, post: F32, comb: F32) -> F32:
    """New streams ``X'[k] = post[k] y + sum_j comb[j, k] X[j]``, f32 [T, n, d].

    The sum runs over the first index of ``comb``. ``y`` [T, d] is the sub-block's output.
    """
    mixed = np.einsum("tjk,tjd->tkd", comb, streams)
    return (post[:, :, None] * y[:, None, :] + mixed).astype(np.float32)


@jit
def _expand_fast(streams: F32, y: F32, post: F32, comb: F32) -> F32:
    tokens, n, d = streams.shape
    out = np.empty_like(streams)
    for t in range(tokens):
        for k in range(n):
            row, gain, added = out[t, k], post[t, k], y[t]
            for i in range(d):
                row[i] = gain * added[i]
            for j in range(n):
                c, x = comb[t, j, k], streams[t, j]
                for i in range(d):
                    row[i] += c * x[i]
    return out


def head_collapse_reference(
    streams: F32,
    mix: F32,
    scale: F32,
    base: F32,
    norm_weight: F32,
    hc_eps: float,
    norm_eps: float,
) -> tuple[F32, F32]:
    """Collapse the final streams [T, n, d] to (collapsed, normed), each [T, d].

    ``mix`` [T, n], ``scale`` [1], ``base`` [n]: sigmoid weights, neither mixed nor normalised.
    """
    m = _normalised_mix(streams, mix, norm_eps)
    pre = _sigmoid(m * scale[0] + base) + np.float32(hc_eps)
    collapsed = np.einsum("tj,tjd->td", pre, streams).astype(np.float32)
    return collapsed, rms_norm_reference(collapsed, norm_weight, norm_eps)


@jit
def _head_collapse_fast(
    streams: F32,
    mix: F32,
    scale: F32,
    base: F32,
    norm_weight: F32,
    hc_eps: float,
    norm_eps: float,
) -> tuple[F32, F32]:
    tokens, n, d = streams.shape
    eps = np.float32(hc_eps)
    collapsed = np.zeros((tokens, d), dtype=np.float32)
    normed = np.empty((tokens, d), dtype=np.float32)
    for t in range(tokens):
        r = inverse_rms(streams[t].reshape(n * d), norm_eps)
        _weigh_streams(streams[t], mix[t] * r, scale[0], base, eps, collapsed[t])
        norm_row(collapsed[t], norm_weight, norm_eps, normed[t])
    return collapsed, normed


collapse = FastPath(collapse_reference, _collapse_fast)
expand = FastPath(expand_reference, _expand_fast)
head_collapse = FastPath(head_collapse_reference, _head_collapse_fast)


class HyperConnection:
    """The wrapper of one sub-block: ``layers.N.hc_attn_*`` or ``hc_ffn_*`` and the norm it feeds.

    Parameters
    ----------
    name : tensor name up to the final ``_fn``, ``_base``, ``_scale``
    norm : tensor name of the sub-block's RMSNorm
    """

    def __init__(self, parts: Parts, name: str, norm: str) -> None:
        c = parts.config
        rows = (2 + c.hc_mult) * c.hc_mult
        self._config = c
        self._backend = parts.backend
        self._fn = parts.source.matrix(f"{name}_fn", rows, c.hc_mult * c.hidden_size)
        self._base = parts.source.values(f"{name}_base", rows)
        self._scale = parts.source.values(f"{name}_scale", 3)
        self._norm = parts.source.values(norm, c.hidden_size)

    def collapse(self, streams: F32) -> tuple[F32, F32, F32, F32]:
        """``collapse_reference`` of streams [T, n, d] with this wrapper's weights."""
        c = self._config
        mix = self._backend.linear(self._fn, streams.reshape(len(streams), -1))
        return collapse(
            streams,
            mix,
            self._scale,
            self._base,
            self._norm,
            c.hc_sinkhorn_iters,
            c.hc_eps,
            c.rms_norm_eps,
        )
