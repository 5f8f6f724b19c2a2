"""Owns the contract between the model and whatever holds the routed experts."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ds4q.runtime.backend.weights import Expert

Phase = Literal["prefill", "decode"]


class Band(NamedTuple):
    """Some of the experts of a dispatch, complete in memory.

    ``where`` [T, K] tells which of the ids asked for they serve, None that they serve all. The
    mapping may hold more where they serve all, else exactly those.
    """

    experts: Mapping[int, Expert]
    where: npt.NDArray[np.bool_] | None


class ExpertStore(Protocol):
    """Gives out the experts of one layer, wherever they are kept."""

    def bands(
        self, layer: int, ids: npt.NDArray[np.integer[Any]], phase: Phase
    ) -> Generator[Band, None, None]:
        """The experts that ``ids`` [T, K] names, band after band, each expert in one of them.

        A band's experts are valid until the next is asked for or the generator is closed. Ids that
        no band serves contribute zero.
        """
