"""Owns the store that pages experts on the host: dispatches cut into bands, each under a lease.

A batch may need more distinct experts than a layer has slots. They are cut into bands in order of
first appearance, so that every expert is read once a batch at most.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ds4q.artifact.formats import Coding
from ds4q.artifact.hfq import TensorEntry
from ds4q.artifact.types import ROCMFPX, type_of
from ds4q.runtime.backend.levels import level_table
from ds4q.runtime.backend.weights import Expert, Weight
from ds4q.runtime.experts.catalogue import Catalogue, Record
from ds4q.runtime.experts.ledger import Dispatch
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.slots import HostSlots
from ds4q.runtime.experts.store import Band, Phase
from ds4q.runtime.experts.transport import Transport
from ds4q.runtime.source import Tensors

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
Codings = tuple[Coding | None, Coding | None, Coding | None]  # gate, up, down


class Predictor(Protocol):
    """Asks the pager for experts ahead of their use; what it asks for changes no result."""

    def begin(self, ids: I64, phase: Phase) -> None:
        """A batch of token ids [T] begins: what follows from them alone is certain."""

    def issue(self, layer: int, phase: Phase) -> None:
        """The reads that ``layer`` itself needs are through; they come before any guess."""


class PagedExperts:
    """Experts of which only some are in memory, as the CPU multiplies them.

    Parameters
    ----------
    pager, transport, slots : of the same catalogue; whoever made them closes them
    tensors : tell how the experts that are owned are decoded; their tables are bound
    band : most experts that a band may have

    Attributes
    ----------
    predictor : asks for experts ahead of their use
    """

    def __init__(
        self,
        pager: Pager,
        transport: Transport,
        slots: HostSlots,
        catalogue: Catalogue,
        tensors: Tensors,
        ownership: ExpertOwnership,
        *,
        band: int,
    ) -> None:
        self.predictor: Predictor | None = None
        self.pager = pager
        self._transport = transport
        self._slots = slots
        self._packed = catalogue.packed
        self._ownership = ownership
        self._experts = catalogue.experts
        self._band = band
        # By expert, never by slot: the bytes of a slot change hands, what decodes them does not.
        self._codings = [
            {
                record.key.expert: _codings(record, tensors)
                for record in layer
                if ownership.owns(record.key.expert)
            }
            for layer in catalogue.records
        ]
        self._levels = _levels(catalogue, self._codings)
        self._made: list[dict[int, tuple[int, Expert]]] = [{} for _ in catalogue.records]
        self._place = (0, 0)
        self._dispatches = 0
        self._io_s: dict[Phase, float] = {"prefill": 0.0, "decode": 0.0}
        self._compute_s: dict[Phase, float] = {"prefill": 0.0, "decode": 0.0}

    def begin(self, sequence: int, position: int, ids: I64, phase: Phase) -> None:
        """A batch of token ids [T] begins at ``position`` of a sequence."""
        self._place = (sequence, position)
        if self.predictor is not None:
            self.predictor.begin(ids, phase)

    def bands(
        self, layer: int, ids: npt.NDArray[np.integer[Any]], phase: Phase
    ) -> Generator[Band, None, None]:
        """See ``ExpertStore``; reads what is missing, and waits for it.

        Raises
        ------
        ExpertRangeError : an id that no expert has
        RunError, ArtifactError : a read failed; the next dispatch may ask again
        """
        dispatch = Dispatch(self._dispatches, *self._place, ids)
        self._dispatches += 1
        cuts = self._cut(ids)
        for number, where in enumerate(cuts):
            started = time.perf_counter()
            asked = (ids if where is None else ids[where]).ravel().tolist()
            with self.pager.acquire(layer, asked, phase, dispatch) as lease:
                if self.predictor is not None and number == len(cuts) - 1:
                    self.predictor.issue(layer, phase)
                experts = {e: self._expert(layer, e, slot) for e, slot in lease.slots.items()}
                ready = time.perf_counter()
                self._io_s[phase] += ready - started
                try:
                    yield Band(experts, where)
                finally:
                    self._compute_s[phase] += time.perf_counter() - ready

    def counters(self) -> dict[str, Any]:
        """Those of the pager, and of the transport as ``reads``.

        By phase also ``io_s`` and ``compute_s``: seconds of getting experts and of using them.
        """
        counts = self.pager.counters()
        for phase in self._io_s:
            counts[phase] |= {"io_s": self._io_s[phase], "compute_s": self._compute_s[phase]}
        return counts | {"reads": self._transport.counters()}

    def _cut(self, ids: npt.NDArray[np.integer[Any]]) -> list[npt.NDArray[np.bool_] | None]:
        """Which of ``ids`` each band serves; None: all. Ids out of range go with the first."""
        distinct = dict.fromkeys(ids.ravel().tolist())
        mine = [e for e in distinct if self._ownership.owns(e) or not 0 <= e < self._experts]
        if len(mine) == len(distinct) <= self._band:
            return [None]
        firsts = range(0, len(mine), self._band)
        return [np.isin(ids, mine[first : first + self._band]) for first in firsts]

    def _expert(self, layer: int, expert: int, slot: int) -> Expert:
        held = self._made[layer].get(expert)
        if held is None or held[0] != slot:
            record = self._packed[layer][expert]
            views, codings = self._slots.views(record, slot), self._codings[layer][expert]
            made = Expert(*map(_weight, record.entries, views, codings))
            held = self._made[layer][expert] = slot, made
        return held[1]


def _weight(entry: TensorEntry, data: npt.NDArray[np.uint8], coding: Coding | None) -> Weight:
    rows, cols = entry.shape
    return Weight(entry.type_id, rows, cols, data, coding)


def _codings(record: Record, tensors: Tensors) -> Codings:
    return (
        tensors.coding(record.gate),
        tensors.coding(record.up),
        tensors.coding(record.down),
    )


def _levels(catalogue: Catalogue, codings: Sequence[Mapping[int, Codings]]) -> list[F32]:
    """The level tables of all experts: held, they are there when an expert comes back."""
    return [
        level_table(type_of(entry.type_id), coding)
        for layer, by_expert in zip(catalogue.packed, codings, strict=True)
        for expert, how in by_expert.items()
        for entry, coding in zip(layer[expert].entries, how, strict=True)
        if type_of(entry.type_id) in ROCMFPX
    ]
