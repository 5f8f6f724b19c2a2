"""Owns opening a store of routed experts as options ask for, and what an engine tells it.

Refusals come before the first large allocation, and nothing stays open after a failed one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact.hfq import Reader
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.experts.budget import available_bytes
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.paged import PagedExperts
from ds4q.runtime.experts.plan import Plan, plan_slots
from ds4q.runtime.experts.reading import FILLERS, READS, ExpertReader, helpers_for
from ds4q.runtime.experts.recorded import RecordedExperts
from ds4q.runtime.experts.resident import OwnedExperts, ResidentExperts
from ds4q.runtime.experts.setup import Setup
from ds4q.runtime.experts.slots import HostSlots
from ds4q.runtime.experts.states import StateRecorder
from ds4q.runtime.experts.store import ExpertStore, Phase
from ds4q.runtime.experts.transport import HostTransport
from ds4q.runtime.laps import Laps
from ds4q.runtime.model.moe import Router
from ds4q.runtime.model.parts import Routed
from ds4q.runtime.source import ArtifactSource

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class ExpertCache:
    """A store of routed experts, and what goes with it while an engine runs.

    Attributes
    ----------
    store : what the model asks
    plan : its slots; None where nothing was asked to be paged
    notes : what a user should hear, one line each; may grow
    """

    def __init__(self, opened: _Opening, store: ExpertStore) -> None:
        self.store = store
        self.notes = opened.notes
        self._setup = opened.setup
        self._files = opened.files
        self.plan = opened.plan
        self._memory = opened.memory
        self._shape = opened.config.num_hidden_layers, opened.config.n_routed_experts
        self._stack = opened.stack.pop_all()
        self._states: StateRecorder | None = None
        self._listeners: list[Routed] = []

    @property
    def routed(self) -> Routed | None:
        """What hears of every router's choice; None where nobody wants to."""
        return self._hear if self._listeners else None

    def attach(self, routers: Sequence[Router]) -> None:
        """Begin what needs the routers of all layers; their weights have been read."""
        recorder = self._setup.recorder
        if self._setup.options.trace_states and recorder is not None:
            self._states = StateRecorder(recorder, routers)
            self._listeners.append(self._states.see)
        if isinstance(self.store, PagedExperts) and self.plan is not None:
            self._look_ahead(self.store, self.plan, routers)
            self._setup.warm(self.store.pager, self.plan.slots)

    def begin(self, sequence: int, position: int, ids: I64, phase: Phase) -> None:
        """A batch of token ids [T] begins at ``position`` of a sequence."""
        if isinstance(self.store, PagedExperts | RecordedExperts):
            self.store.begin(sequence, position, ids, phase)
        if self._states is not None:
            self._states.begin(sequence, position, ids, phase)

    def counters(self) -> dict[str, Any] | None:
        """What pager and transport counted; None where nothing is paged."""
        if not isinstance(self.store, PagedExperts):
            return None
        return {
            "policy": self._setup.policy,
            "memory": self._memory,
            **self.store.counters(),
        }

    def resident(self) -> npt.NDArray[np.bool_]:
        """Which experts are in memory now, [layers, experts]."""
        if isinstance(self.store, PagedExperts):
            return self.store.pager.resident()
        found = np.zeros(self._shape, np.bool_)
        found[:, self._setup.ownership.owned] = True
        return found

    def check_file(self) -> None:
        """Raise ``ChangedError`` if experts can no longer be read: the file was written to."""
        if self._files is not None:
            self._files.check_unwritten()

    def drop_trace(self) -> None:
        """Leave no trace, of a run that failed; what stood at its place stays."""
        self._setup.drop_trace()

    def close(self) -> None:
        """End all reading and finish the trace; a second call does nothing."""
        self._stack.close()

    def _look_ahead(self, store: PagedExperts, plan: Plan, routers: Sequence[Router]) -> None:
        by_token = {n: r.by_token for n, r in enumerate(routers) if r.by_token is not None}
        biases = {n: r.bias for n, r in enumerate(routers) if r.bias is not None}
        prefetcher = self._setup.prefetcher(
            store.pager, plan, by_token, biases.__getitem__, self.notes.append
        )
        store.predictor = prefetcher
        if prefetcher is not None and prefetcher.needs_state:
            self._listeners.append(prefetcher.see)

    def _hear(self, layer: int, ids: I64, logits: F32, x: F32) -> None:
        for listener in self._listeners:
            listener(layer, ids, logits, x)


def open_cache(
    reader: Reader,
    config: ModelConfig,
    source: ArtifactSource,
    options: CacheOptions,
    *,
    state_bytes: int,
    laps: Laps,
    notes: list[str],
) -> ExpertCache:
    """The store that ``options`` ask for; what is resident is read with ``source.fill``.

    Parameters
    ----------
    source : its digests are compared with experts that are read later, too
    notes : gets what a user should hear, one line each
    state_bytes : of the sequences that will run beside it
    laps : gets the time of planning and of the receipt as "audit", of decode tables as "tables", of
        slots and threads as "pools"

    Raises
    ------
    CacheError, AdapterError, ProfileError : what is asked for cannot be
    WriteError : the trace cannot be written, or another process writes it
    """
    with ExitStack() as stack:
        opening = _Opening(reader, config, source, options, laps, stack, notes)
        opening.refuse(state_bytes)
        return ExpertCache(opening, opening.store())


def check_cache(
    reader: Reader,
    config: ModelConfig,
    options: CacheOptions,
    *,
    state_bytes: int,
    available: Callable[[], int] = available_bytes,
) -> Plan | None:
    """Refuse what ``open_cache`` would, by index and small files alone: nothing stays open.

    The plan is None where ``options`` do not page. ``available`` is as in ``plan_slots``.
    """
    with ExitStack() as stack:
        opening = _Opening(reader, config, ArtifactSource(reader), options, Laps(), stack, [])
        opening.refuse(state_bytes, available)
        return opening.plan


class _Opening:
    """A store in the making; ``stack`` undoes it."""

    def __init__(
        self,
        reader: Reader,
        config: ModelConfig,
        source: ArtifactSource,
        options: CacheOptions,
        laps: Laps,
        stack: ExitStack,
        notes: list[str],
    ) -> None:
        self.reader = reader
        self.config = config
        self.source = source
        self.options = options
        self.laps = laps
        self.stack = stack
        self.setup = Setup(reader, config, options, stack, notes)
        self.notes = notes
        self.plan: Plan | None = None
        self.files: ExpertReader | None = None
        self.memory: dict[str, int] = {}
        self.catalogue = Catalogue(config, source, path=reader.path, bind=False)

    def refuse(self, state_bytes: int, available: Callable[[], int] = available_bytes) -> None:
        """Check what is asked for against the artifact and against memory."""
        options, catalogue, ownership = self.options, self.catalogue, self.setup.ownership
        if options.paged:
            dense_bytes = sum(e.nbytes for e in self.reader.tensors.values()) - catalogue.file_bytes
            staging_bytes = FILLERS * max(record.nbytes for record in catalogue)
            self.plan = plan_slots(
                catalogue,
                self.config,
                options,
                owned=len(ownership.owned),
                needed=dense_bytes + state_bytes + staging_bytes,
                available=available,
            )
        else:
            self.setup.check_owned(sum(r.nbytes for r in catalogue if ownership.owns(r.key.expert)))
        self.laps.lap("audit")

    def store(self) -> ExpertStore:
        """Make the store, and the trace that goes with it."""
        plan = self.plan
        self.setup.record(self.catalogue, plan)
        store: ExpertStore
        if plan is not None and not plan.resident:
            store = self._paged(plan)
        else:
            store = self._resident()
            if plan is not None:
                self.notes.append(f"all {plan.slots} experts of every layer fit: paging is off")
        self.laps.lap("pools")
        return store

    def _resident(self) -> ExpertStore:
        store: ExpertStore
        ownership = self.setup.ownership
        if self.options.owner is None:
            store = ResidentExperts(self.config, self.source, path=self.reader.path)
        else:
            store = OwnedExperts(self.config, self.source, ownership, path=self.reader.path)
        if self.setup.recorder is None:
            return store
        layers = self.config.num_hidden_layers
        return RecordedExperts(store, self.setup.recorder, layers=layers, owned=ownership.owned)

    def _paged(self, plan: Plan) -> PagedExperts:
        options, catalogue = self.options, self.catalogue
        catalogue.bind(self.source)
        self.laps.lap("tables")
        slots = HostSlots(catalogue.geometry, plan.counts)
        self.files = files = ExpertReader(
            self.reader,
            catalogue,
            digests=self.source.digests,
            legal=self.source.check_whole if options.check_reads else None,
            notes=self.notes,
            bounces=FILLERS,
            helpers=helpers_for(READS),
        )
        self.stack.callback(files.close)
        by_layer = zip(plan.counts, catalogue.geometry, strict=True)
        self.memory = {
            "slots_bytes": sum(count * layer.nbytes for count, layer in by_layer),
            "wasted_bytes": catalogue.wasted_bytes(plan.slots),
            "staging_bytes": FILLERS * files.staging_bytes,
        }
        transport = HostTransport(catalogue, files, slots, threads=FILLERS)
        pager = self.setup.pager(catalogue, plan, transport)
        self.laps.lap("pools")
        store = PagedExperts(
            pager, transport, slots, catalogue, self.source, self.setup.ownership, band=plan.slots
        )
        self.laps.lap("tables")
        return store
