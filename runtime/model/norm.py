"""Owns RMSNorm. The weightless per-head norm of queries uses its row helper too.

RMSNorm(x; w) = w * x / sqrt(mean(x^2) + eps), all in float32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath, jit

F32 = npt.NDArray[np.float32]

LANES = 32


@jit
def inverse_rms(row: F32, eps: float) -> np.float32:
    """``1 / sqrt(mean(row^2) + eps)`` of one contiguous row.

    Sums run in 32 lanes, then over the lanes: a fixed order that the compiler can vectorise, which
    a strict running sum is not, and shorter chains round less.
    """
    n = row.shape[0]
    lanes = np.zeros(LANES, dtype=np.float32)
    whole = row[: n // LANES * LANES].reshape(n // LANES, LANES)
    for i in range(whole.shape[0]):
        for j in range(LANES):
            lanes[j] += whole[i, j] * whole[i, j]
    rest = row[n // LANES * LANES :]
    for j in range(rest.shape[0]):
        lanes[j] += rest[j] * rest[j]
    total = np.float32(0.0)
    for j in range(LANES):
        total += lanes[j]
    return np.float32(1.0) / np.sqrt(total / np.float32(n) + np.float32(eps))


@jit
def norm_row(row: F32, weight: F32, eps: float, out: F32) -> None:
    """RMSNorm of one contiguous row into ``out``, which may be ``row``."""
    r = inverse_rms(row, eps)
    for i in range(row.shape[0]):
        out[i] = weight[i] * (row[i] * r)


def rms_norm_reference(x: F32, weight: F32, eps: float) -> F32:
    """RMSNorm over the last axis of ``x`` [T, K] with ``weight`` [K]; a new array."""
    mean = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
    return (weight * (x / np.sqrt(mean + eps))).astype(np.float32)


@jit
def _rms_norm_fast(x: F32, weight: F32, eps: float) -> F32:
    out = np.empty_like(x)
    for t in range(x.shape[0]):
        norm_row(x[t], weight, eps, out[t])
    return out


rms_norm = FastPath(rms_norm_reference, _rms_norm_fast)
