"""Owns recording what experts a model asks for where all of them are in memory. Changes nothing.

The trace is that of a cache with a slot for every expert and all of them there from the start, so a
replay can price smaller ones.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.runtime.experts.store import Band, ExpertStore, Phase
from ds4q.runtime.experts.trace import Outcome, Recorder

I64 = npt.NDArray[np.int64]


class RecordedExperts:
    """A store that keeps all experts, with a trace of what is asked of it.

    Parameters
    ----------
    store : gives every dispatch in one band
    recorder : not closed here
    layers : how many there are
    owned : experts of a layer that the store holds
    """

    def __init__(
        self, store: ExpertStore, recorder: Recorder, *, layers: int, owned: Iterable[int]
    ) -> None:
        self._store = store
        self._recorder = recorder
        self._owned = frozenset(owned)
        self._seen: list[set[int]] = [set() for _ in range(layers)]
        self._place = (0, 0)
        self._dispatches = 0
        for layer in range(layers):
            for expert in sorted(self._owned):
                recorder.warm(layer, expert)

    def begin(self, sequence: int, position: int, ids: I64, phase: Phase) -> None:
        """A batch of token ids [T] begins at ``position`` of a sequence."""
        self._place = (sequence, position)

    def bands(
        self, layer: int, ids: npt.NDArray[np.integer[Any]], phase: Phase
    ) -> Generator[Band, None, None]:
        """Those of the store."""
        distinct = [e for e in dict.fromkeys(ids.ravel().tolist()) if e in self._owned]
        seen, sequence, token = self._seen[layer], *self._place
        met = [Outcome.HIT if expert in seen else Outcome.WARM for expert in distinct]
        seen.update(distinct)
        self._recorder.dispatch(self._dispatches, sequence, phase, token, layer, ids, distinct, met)
        self._dispatches += 1
        yield from self._store.bands(layer, ids, phase)
