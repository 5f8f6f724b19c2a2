"""Owns what is told of routed experts to somebody who watches. Counts choices, decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ExpertsView:
    """The routed experts at one moment.

    Attributes
    ----------
    routed : i64 [layers, experts], how often a token chose each since the model was loaded
    resident : bool [layers, experts], those that are in memory now, read to the end
    """

    routed: I64
    resident: Bool


class Choices:
    """How often each expert was chosen; one thread counts, any may look."""

    def __init__(self, layers: int, experts: int) -> None:
        self._counts: I64 = np.zeros((layers, experts), np.int64)

    def add(self, layer: int, ids: npt.NDArray[np.integer[Any]]) -> None:
        """Count the experts ``ids`` [T, K] that tokens chose in a layer."""
        self._counts[layer] += np.bincount(ids.ravel(), minlength=self._counts.shape[1])

    def view(self, resident: Bool) -> ExpertsView:
        """The counts of now, beside what is resident [layers, experts]."""
        return ExpertsView(self._counts.copy(), resident)
