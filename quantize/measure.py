"""Owns the error of re-encoded weights: sums over runs of rows, and the two figures made of them.

All sums are float64 and added in index order, so figures do not depend on threads or run lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath, jit

F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]


def _add_reference(x: F32Array, y: F32Array, weights: F32Array, sums: F64Array) -> None:
    a, b = x.astype(np.float64), y.astype(np.float64)
    w = np.broadcast_to(weights.astype(np.float64), a.shape)
    terms = (w * ((a - b) * (a - b)), w * (a * a), w * (b * b), w * (a * b))
    for i, term in enumerate(terms):
        # cumsum adds in index order; sum would add in pairs.
        sums[i] = np.cumsum(np.concatenate(([sums[i]], term.ravel())))[-1]


@jit
def _add_fast(x: F32Array, y: F32Array, weights: F32Array, sums: F64Array) -> None:
    error, source, packed, product = sums[0], sums[1], sums[2], sums[3]
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            a, b, w = np.float64(x[r, c]), np.float64(y[r, c]), np.float64(weights[c])
            error += w * ((a - b) * (a - b))
            source += w * (a * a)
            packed += w * (b * b)
            product += w * (a * b)
    sums[0], sums[1], sums[2], sums[3] = error, source, packed, product


_add = FastPath(_add_reference, _add_fast)


@dataclass(slots=True)
class ErrorSums:
    """Sums over weights x of the source and y of the artifact, each times its column's weight.

    ``saturated_blocks`` counts blocks outside the range of their type (``saturation.py``).
    """

    sums: F64Array
    saturated_blocks: int = 0

    @classmethod
    def zero(cls) -> ErrorSums:
        """No weights yet."""
        return cls(np.zeros(4))

    def add(self, x: F32Array, y: F32Array, importance: F32Array | None = None) -> None:
        """Rows ``(M, K)`` of both sides; ``importance`` ``(K,)``, else 1; of zeros as none."""
        # Encoders weigh nothing where nothing has a weight, and zeros would call any loss none.
        some = importance if importance is not None and importance.any() else None
        weights = np.ones(x.shape[1], np.float32) if some is None else some
        _add(x, y, weights, self.sums)

    @property
    def squared_error(self) -> float:
        """Sum of w (x - y)^2."""
        return float(self.sums[0])

    @property
    def squared_source(self) -> float:
        """Sum of w x^2."""
        return float(self.sums[1])

    @property
    def nrmse(self) -> float:
        """Root of the squared error over the squared source; 0 where both are 0."""
        error, source = self.sums[:2]
        return math.sqrt(error / source) if source > 0 else (math.inf if error > 0 else 0.0)

    @property
    def cosine(self) -> float:
        """Cosine between both sides; 1 where both are 0."""
        _, source, packed, product = self.sums
        if source == 0 or packed == 0:
            return 1.0 if source == packed else 0.0
        return float(product / math.sqrt(source * packed))
