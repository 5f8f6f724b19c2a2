"""Owns the numpy paths of the CPU backend: decode a matrix, multiply in float64, round once.

Slow and simple. A row's result does not depend on how many tokens are asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact.formats import codec_for
from ds4q.runtime.backend.weights import Expert, Weight

Array = npt.NDArray[Any]


def decode(weight: Weight) -> Array:
    """All values of a matrix, f64 [rows, cols]."""
    codec = codec_for(weight.type_id, weight.coding)
    values = codec.decode(weight.data, (weight.rows, weight.cols))
    return values.astype(np.float64)


def multiply(weight: Weight, x: Array) -> Array:
    """``x W^T``: f32 (T, M) of f32 (T, K)."""
    matrix = decode(weight)
    out = np.empty((len(x), weight.rows), dtype=np.float32)
    for t, row in enumerate(x):  # BLAS would pick its order by the number of tokens
        out[t] = (matrix * row).sum(axis=1)
    return out


def activate(gate: Array, up: Array, limit: float) -> Array:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), f32."""
    top = np.float32(limit)
    gate = np.minimum(gate, top)
    with np.errstate(over="ignore"):  # exp(-g) = inf gives silu(g) = -0
        return gate / (np.float32(1) + np.exp(-gate)) * np.clip(up, -top, top)


def feed_forward(expert: Expert, x: Array, limit: float) -> Array:
    """One expert's output, f32 (T, d) of f32 (T, d)."""
    hidden = activate(multiply(expert.gate, x), multiply(expert.up, x), limit)
    return multiply(expert.down, hidden)
