"""Owns the contract between the model and whatever holds the routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ds4q.runtime.backend.weights import Expert


class ExpertStore(Protocol):
    """Gives out the experts of one layer, wherever they are kept."""

    def get(self, layer: int, ids: npt.NDArray[np.integer[Any]]) -> Mapping[int, Expert]:
        """The experts that ``ids`` names (any shape, duplicates allowed), complete in memory.

        The mapping may hold more. It is valid until the next call for the same layer.
        """
