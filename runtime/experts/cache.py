"""Owns opening a store of routed experts as options ask for, and what an engine tells it.

Refusals come before the first large allocation, and nothing stays open after a failed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact.hfq import Reader
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.adapter import Adapter, read_adapter
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.experts.digests import Digests
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.paged import PagedExperts
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.plan import Plan, limits_of, plan_slots
from ds4q.runtime.experts.policy import DEFAULT_POLICY, parameters_of
from ds4q.runtime.experts.predict import AdapterGuess, Prefetcher
from ds4q.runtime.experts.profile import Profile, read_profile
from ds4q.runtime.experts.reading import ExpertReader, Purpose
from ds4q.runtime.experts.recorded import RecordedExperts
from ds4q.runtime.experts.resident import OwnedExperts, ResidentExperts
from ds4q.runtime.experts.slots import HostSlots
from ds4q.runtime.experts.states import StateRecorder
from ds4q.runtime.experts.store import ExpertStore, Phase
from ds4q.runtime.experts.trace import Header, Recorder, artifact_identity
from ds4q.runtime.experts.transport import HostTransport
from ds4q.runtime.laps import Laps
from ds4q.runtime.model.moe import Router
from ds4q.runtime.model.parts import Routed
from ds4q.runtime.source import ArtifactSource

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

READ_THREADS = 4  # more were slower on every disk tried upstream (hipfire)


class ExpertCache:
    """A store of routed experts, and what goes with it while an engine runs.

    Attributes
    ----------
    store : what the model asks
    notes : what a user should hear, one line each; may grow
    """

    def __init__(self, opened: _Opening, store: ExpertStore) -> None:
        self.store = store
        self.notes = opened.notes
        self._options = opened.options
        self._plan = opened.plan
        self._recorder = opened.recorder
        self._adapter = opened.adapter
        self._profile = opened.profile
        self._memory = opened.memory
        self._digests = opened.digests
        self._stack = opened.stack.pop_all()
        self._states: StateRecorder | None = None
        self._listeners: list[Routed] = []

    @property
    def routed(self) -> Routed | None:
        """What hears of every router's choice; None where nobody wants to."""
        return self._hear if self._listeners else None

    def attach(self, routers: Sequence[Router]) -> None:
        """Begin what needs the routers of all layers; their weights have been read."""
        if self._digests is not None:
            self._digests.settle()
        if self._options.trace_states and self._recorder is not None:
            self._states = StateRecorder(self._recorder, routers)
            self._listeners.append(self._states.see)
        if isinstance(self.store, PagedExperts) and self._plan is not None:
            self._look_ahead(self.store, self._plan, routers)
            if self._profile is not None:
                for layer, experts in enumerate(self._profile.experts):
                    self.store.pager.prefetch(layer, experts[: self._plan.slots], Purpose.WARM)

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
            "policy": self._options.policy or DEFAULT_POLICY,
            "memory": self._memory,
            **self.store.counters(),
        }

    def close(self) -> None:
        """End all reading and finish the trace; a second call does nothing."""
        self._stack.close()

    def _look_ahead(self, store: PagedExperts, plan: Plan, routers: Sequence[Router]) -> None:
        tables = {
            layer: router.by_token
            for layer, router in enumerate(routers)
            if router.by_token is not None and plan.quarantine[layer]
        }
        guess = None
        if self._adapter is not None:
            biases = {n: r.bias for n, r in enumerate(routers) if r.bias is not None}
            guess = AdapterGuess(self._adapter, biases, self._options.prefetch_top)
        if not tables and guess is None:
            return
        store.predictor = Prefetcher(store.pager, tables, guess, say=self.notes.append)
        if store.predictor.needs_state:
            self._listeners.append(store.predictor.see)

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
) -> ExpertCache:
    """The store that ``options`` ask for; what is resident is read with ``source.fill``.

    Parameters
    ----------
    state_bytes : of the sequences that will run beside it
    laps : gets the time of planning and of the receipt as "audit", of decode tables as "tables", of
        slots and threads as "pools"

    Raises
    ------
    CacheError, AdapterError, ProfileError, ReceiptError : what is asked for cannot be
    """
    with ExitStack() as stack:
        opening = _Opening(
            reader, config, source, options, _ownership(config, options), laps, stack
        )
        opening.refuse(state_bytes)
        return ExpertCache(opening, opening.store())


def _ownership(config: ModelConfig, options: CacheOptions) -> ExpertOwnership:
    experts = config.n_routed_experts
    if options.owner is None:
        return ExpertOwnership.all(experts)
    rank, ranks = options.owner
    ownership = ExpertOwnership.of_rank(rank, ranks, experts)
    if not ownership.owned:
        raise CacheError(
            "this rank owns no expert", expected=f"at most {experts} ranks", found=f"{ranks} ranks"
        )
    return ownership


class _Opening:
    """A store in the making; ``stack`` undoes it."""

    def __init__(
        self,
        reader: Reader,
        config: ModelConfig,
        source: ArtifactSource,
        options: CacheOptions,
        ownership: ExpertOwnership,
        laps: Laps,
        stack: ExitStack,
    ) -> None:
        self.reader = reader
        self.config = config
        self.source = source
        self.options = options
        self.ownership = ownership
        self.laps = laps
        self.stack = stack
        self.notes: list[str] = []
        self.plan: Plan | None = None
        self.adapter: Adapter | None = None
        self.profile: Profile | None = None
        self.recorder: Recorder | None = None
        self.memory: dict[str, int] = {}
        self.digests: Digests | None = None
        self.catalogue = Catalogue(config, source, path=reader.path, bind=False)

    def refuse(self, state_bytes: int) -> None:
        """Check what is asked for against the artifact and against memory."""
        options, catalogue = self.options, self.catalogue
        if options.adapter is not None:
            self.adapter = read_adapter(options.adapter)
            self.adapter.check_model(self.config, artifact_identity(self.reader))
        if options.profile is not None:
            self.profile = read_profile(
                options.profile,
                artifact_identity(self.reader),
                self.config.num_hidden_layers,
                self.config.n_routed_experts,
            )
        if options.paged:
            dense_bytes = sum(e.nbytes for e in self.reader.tensors.values()) - catalogue.file_bytes
            staging_bytes = READ_THREADS * max(record.nbytes for record in catalogue)
            self.plan = plan_slots(
                catalogue,
                self.config,
                options,
                owned=len(self.ownership.owned),
                needed=dense_bytes + state_bytes + staging_bytes,
            )
        elif isinstance(options.budget, int):
            self._check_owned(options.budget)
        self.laps.lap("audit")

    def store(self) -> ExpertStore:
        """Make the store, and the trace that goes with it."""
        plan = self.plan
        if self.options.trace is not None:
            self._record(self.options.trace)
        store: ExpertStore
        if plan is not None and not plan.resident:
            store = self._paged(plan)
        else:
            if self.options.require_receipt:  # there is nothing to check, but it was asked for
                self.digests = Digests.of(self.reader, self.notes, require=True)
            store = self._resident()
            if plan is not None:
                self.notes.append(f"all {plan.slots} experts of every layer fit: paging is off")
        self.laps.lap("pools")
        return store

    def _check_owned(self, budget: int) -> None:
        owns = self.ownership.owns
        wanted = sum(record.nbytes for record in self.catalogue if owns(record.key.expert))
        if wanted > budget:
            raise CacheError(
                "this rank's experts do not fit, and no others may stand in for them",
                path=self.reader.path,
                expected=f"at least {wanted:,} bytes",
                found=f"{budget:,} bytes",
                remedy="give more, or page them: leave out --cold none",
            )

    def _record(self, path: Path) -> None:
        policy = self.options.policy or DEFAULT_POLICY
        owned = len(self.ownership.owned)
        header = Header.of(
            artifact_identity(self.reader),
            self.config,
            self.catalogue,
            owned if self.plan is None else self.plan.slots,
            policy=policy,
            parameters=parameters_of(policy),
            warm_start="" if self.profile is None else self.profile.digest,
            limits=limits_of(self.options, self.plan),
        )
        self.recorder = Recorder(path, header)
        self.stack.callback(self.recorder.close)

    def _resident(self) -> ExpertStore:
        store: ExpertStore
        if self.options.owner is None:
            store = ResidentExperts(self.config, self.source, path=self.reader.path)
        else:
            store = OwnedExperts(self.config, self.source, self.ownership, path=self.reader.path)
        if self.recorder is None:
            return store
        layers = self.config.num_hidden_layers
        return RecordedExperts(store, self.recorder, layers=layers, owned=self.ownership.owned)

    def _paged(self, plan: Plan) -> PagedExperts:
        options, catalogue, notes = self.options, self.catalogue, self.notes
        if options.check_reads:
            self.digests = Digests.of(self.reader, notes, require=options.require_receipt)
        self.laps.lap("audit")
        catalogue.bind(self.source)
        self.laps.lap("tables")
        slots = HostSlots(catalogue.geometry, plan.counts)
        files = ExpertReader(self.reader, catalogue, digests=self.digests, bounces=READ_THREADS)
        self.stack.callback(files.close)
        by_layer = zip(plan.counts, catalogue.geometry, strict=True)
        self.memory = {
            "slots_bytes": sum(count * layer.nbytes for count, layer in by_layer),
            "wasted_bytes": catalogue.wasted_bytes(plan.slots),
            "staging_bytes": READ_THREADS * files.staging_bytes,
        }
        notes += files.notes
        transport = HostTransport(catalogue, files, slots, threads=READ_THREADS)
        pager = Pager(
            catalogue,
            plan.slots,
            transport,
            policy=options.policy or DEFAULT_POLICY,
            ownership=self.ownership,
            quarantine=plan.quarantine,
            recorder=self.recorder,
        )
        self.stack.callback(pager.close)
        self.laps.lap("pools")
        store = PagedExperts(
            pager, transport, slots, catalogue, self.source, self.ownership, band=plan.slots
        )
        self.laps.lap("tables")
        return store
