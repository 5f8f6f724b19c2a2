"""Owns opening a store of routed experts as options ask for, and what an engine tells it.

Refusals come before the first large allocation, and nothing stays open after a failed one.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact.hfq import Reader
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.experts.digests import Digests
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.paged import PagedExperts
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.plan import Plan, plan_slots
from ds4q.runtime.experts.policy import DEFAULT_POLICY
from ds4q.runtime.experts.reading import ExpertReader
from ds4q.runtime.experts.recorded import RecordedExperts
from ds4q.runtime.experts.resident import OwnedExperts, ResidentExperts
from ds4q.runtime.experts.slots import HostSlots
from ds4q.runtime.experts.store import ExpertStore, Phase
from ds4q.runtime.experts.trace import Header, Recorder, artifact_identity
from ds4q.runtime.experts.transport import HostTransport
from ds4q.runtime.laps import Laps
from ds4q.runtime.model.parts import Routed
from ds4q.runtime.source import ArtifactSource

I64 = npt.NDArray[np.int64]

READ_THREADS = 4  # more were slower on every disk tried upstream (hipfire)


class ExpertCache:
    """A store of routed experts, and what goes with it while an engine runs.

    Attributes
    ----------
    store : what the model asks
    notes : what a user should hear, one line each
    """

    def __init__(self, store: ExpertStore, notes: list[str], stack: ExitStack) -> None:
        self.store = store
        self.notes = notes
        self._stack = stack

    @property
    def routed(self) -> Routed | None:
        """What hears of every router's choice."""
        paged = self.store if isinstance(self.store, PagedExperts) else None
        return None if paged is None or paged.predictor is None else paged.predictor.see

    def begin(self, sequence: int, position: int, ids: I64, phase: Phase) -> None:
        """A batch of token ids [T] begins at ``position`` of a sequence."""
        if isinstance(self.store, PagedExperts | RecordedExperts):
            self.store.begin(sequence, position, ids, phase)

    def counters(self) -> dict[str, Any] | None:
        """What the pager counted; None where nothing is paged."""
        return self.store.counters() if isinstance(self.store, PagedExperts) else None

    def close(self) -> None:
        """End all reading and finish the trace; a second call does nothing."""
        self._stack.close()


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
    laps : gets the time of planning as "audit", of slots and threads as "pools"

    Raises
    ------
    CacheError : what is asked for cannot be
    """
    ownership = _ownership(config, options)
    owned = len(ownership.owned)
    catalogue = plan = None
    if options.paged or options.budget is not None or options.trace is not None:
        catalogue = Catalogue(config, source, path=reader.path, bind=False)
    if catalogue is not None and options.paged:
        needed = _dense_bytes(reader, catalogue) + state_bytes
        plan = plan_slots(catalogue, config, options, owned=owned, needed=needed)
    laps.lap("audit")
    notes: list[str] = []
    with ExitStack() as stack:
        recorder = None
        if catalogue is not None and options.trace is not None:
            slots = owned if plan is None or plan.resident else plan.slots
            header = Header.of(
                artifact_identity(reader),
                config,
                catalogue,
                slots,
                policy=options.policy or DEFAULT_POLICY,
            )
            recorder = Recorder(options.trace, header)
            stack.callback(recorder.close)
        store: ExpertStore
        if catalogue is not None and plan is not None and not plan.resident:
            store = _paged(
                reader, config, source, options, catalogue, plan, ownership, recorder, notes, stack
            )
        else:
            store = _resident(reader, config, source, options, catalogue, ownership, recorder)
            if plan is not None:
                notes.append(
                    f"all {owned} experts of every layer fit into the expert cache: paging is off"
                )
        laps.lap("pools")
        return ExpertCache(store, notes, stack.pop_all())


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


def _dense_bytes(reader: Reader, catalogue: Catalogue) -> int:
    return sum(entry.nbytes for entry in reader.tensors.values()) - catalogue.file_bytes


def _resident(
    reader: Reader,
    config: ModelConfig,
    source: ArtifactSource,
    options: CacheOptions,
    catalogue: Catalogue | None,
    ownership: ExpertOwnership,
    recorder: Recorder | None,
) -> ExpertStore:
    store: ExpertStore
    if options.owner is None:
        store = ResidentExperts(config, source, path=reader.path)
    else:
        if catalogue is not None and isinstance(options.budget, int):
            _check_owned(catalogue, ownership, options.budget)
        store = OwnedExperts(config, source, ownership, path=reader.path)
    if recorder is None:
        return store
    return RecordedExperts(store, recorder, layers=config.num_hidden_layers, owned=ownership.owned)


def _check_owned(catalogue: Catalogue, ownership: ExpertOwnership, budget: int) -> None:
    wanted = sum(record.nbytes for record in catalogue if ownership.owns(record.key.expert))
    if wanted > budget:
        raise CacheError(
            "this rank's experts do not fit, and no others may stand in for them",
            path=catalogue.path,
            expected=f"at least {wanted:,} bytes",
            found=f"{budget:,} bytes",
            remedy="give more, or page them: leave out --cold none",
        )


def _paged(
    reader: Reader,
    config: ModelConfig,
    source: ArtifactSource,
    options: CacheOptions,
    catalogue: Catalogue,
    plan: Plan,
    ownership: ExpertOwnership,
    recorder: Recorder | None,
    notes: list[str],
    stack: ExitStack,
) -> PagedExperts:
    digests = None
    if options.check_reads:
        digests = Digests.of(reader, notes, require=options.require_receipt)
    catalogue.bind(source)
    slots = HostSlots(catalogue.geometry, plan.counts)
    files = ExpertReader(reader, catalogue, digests=digests, bounces=READ_THREADS)
    stack.callback(files.close)
    notes += files.notes
    transport = HostTransport(catalogue, files, slots, threads=READ_THREADS)
    pager = Pager(
        catalogue,
        plan.slots,
        transport,
        policy=options.policy or DEFAULT_POLICY,
        ownership=ownership,
        quarantine=plan.quarantine,
        recorder=recorder,
    )
    store = PagedExperts(pager, slots, catalogue, source, ownership, band=plan.slots)
    stack.callback(store.close)
    return store
