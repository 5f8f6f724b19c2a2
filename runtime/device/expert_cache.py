"""Owns setting up routed experts that are paged on a device: slots, their memory, what fills them.

Planned from the artifact's index, sized by what memory leaves, opened once there is memory. Serves
no step.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds4q.artifact.hfq import Reader
from ds4q.hipkern.driver import Device
from ds4q.runtime.backend.hip import HipBackend
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.device.clock import Clock
from ds4q.runtime.device.model import bias_name, by_token_name
from ds4q.runtime.device.paging import BandIds, DevicePaging
from ds4q.runtime.device.pointers import PointerTables
from ds4q.runtime.device.pools import ExpertPools
from ds4q.runtime.device.program import Program
from ds4q.runtime.device.scratch import Scratch
from ds4q.runtime.device.transport import DeviceTransport
from ds4q.runtime.device.weights import DeviceSource
from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.adapter import Adapter, read_adapter
from ds4q.runtime.experts.budget import available_bytes
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.experts.digests import Digests
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.plan import Plan, limits_of, plan_slots
from ds4q.runtime.experts.policy import DEFAULT_POLICY, parameters_of
from ds4q.runtime.experts.predict import AdapterGuess, Prefetcher
from ds4q.runtime.experts.profile import Profile, read_profile
from ds4q.runtime.experts.reading import ExpertReader, Purpose
from ds4q.runtime.experts.trace import Header, Recorder, artifact_identity

THREADS = 4  # that read and copy


class ExpertCache:
    """The slots of an artifact's routed experts, closed with the engine.

    Parameters
    ----------
    source : of the same artifact; binds the experts' decode tables
    reader : stays open until ``open`` has returned

    Attributes
    ----------
    catalogue, pools : what the model's weights are planned with
    notes : what a user should hear, one line each; may grow

    Raises
    ------
    CacheError, AdapterError, ProfileError : what is asked for cannot be
    """

    def __init__(
        self, config: ModelConfig, source: DeviceSource, reader: Reader, options: CacheOptions
    ) -> None:
        experts, owner = config.n_routed_experts, options.owner
        self.notes: list[str] = []
        self._config = config
        self._options = options
        self._reader = reader
        self._policy = options.policy or DEFAULT_POLICY
        self._digests: Digests | None = None
        self._identity = artifact_identity(reader)
        self._adapter: Adapter | None = None
        if options.adapter is not None:
            self._adapter = read_adapter(options.adapter)
            self._adapter.check_model(config, self._identity)
        self._profile: Profile | None = None
        if options.profile is not None:
            layers = config.num_hidden_layers
            self._profile = read_profile(options.profile, self._identity, layers, experts)
        self.catalogue = Catalogue(config, source.tensors, path=reader.path)
        self.pools = ExpertPools(self.catalogue.geometry)
        self._ownership = (
            ExpertOwnership.all(experts)
            if owner is None
            else ExpertOwnership.of_rank(*owner, experts)
        )
        self._plan: Plan | None = None
        self._stack = ExitStack()

    def size(self, device: Device, needed: int) -> bool:
        """Settle the number of slots, given the bytes of all else; whether all experts fit.

        Raises
        ------
        CacheError : too few slots for a token, or more memory than there is
        ReceiptError : one is required, and there is none of this artifact
        """

        def free() -> int:
            on_device = device.free_bytes()
            return min(on_device, available_bytes()) if device.unified else on_device

        options, owned = self._options, len(self._ownership.owned)
        if options.cold is None:
            self._plan = plan = plan_slots(
                self.catalogue, self._config, options, owned=owned, needed=needed, available=free
            )
        else:
            self._plan = plan = self._owned_alone(owned)
        resident = plan.resident and options.owner is None
        if options.require_receipt or (options.check_reads and not resident):
            self._digests = Digests.of(self._reader, self.notes, require=options.require_receipt)
        if resident:
            self.notes.append(f"all {plan.slots} experts of every layer fit: paging is off")
            return True
        self.pools.size(plan.counts)
        return False

    def open(
        self,
        backend: HipBackend,
        source: DeviceSource,
        program: Program,
        scratch: Scratch,
        ids: BandIds,
    ) -> DevicePaging:
        """Begin to serve; everything has memory, and ``source`` has been filled."""
        if self._digests is not None:
            self._digests.settle()
        if self._plan is None:
            raise RuntimeError("the slots were not sized")
        by_token = {
            layer: source.id_table(by_token_name(layer))
            for layer in range(self._config.num_hidden_layers)
            if self._config.is_hash_layer(layer)
        }
        plan = self._plan
        transport, pager = self._reading(plan, backend.device)
        clock = Clock(backend.stream)
        tables = PointerTables(
            backend.device, backend.stream, [layer.table() for layer in program.layers]
        )
        paging = DevicePaging(
            backend,
            program.layers,
            scratch,
            ids,
            self.pools,
            pager,
            transport,
            self._ownership,
            tables,
            clock,
            by_token,
            self._prefetcher(pager, plan, source, by_token),
            slots=plan.slots,
            policy=self._policy,
            memory={
                "slots_bytes": sum(layout.nbytes for layout in self.pools.layouts),
                "wasted_bytes": self.catalogue.wasted_bytes(plan.slots),
                "staging_bytes": transport.staging_bytes,
                "table_bytes": tables.nbytes,
            },
        )
        self._warm(pager, plan.slots)
        return paging

    def close(self) -> None:
        """End all reading and finish the trace; a second call does nothing."""
        self._stack.close()

    # ------------------------------------------------------------------ one part each

    def _owned_alone(self, owned: int) -> Plan:
        """Slots for all of a rank's experts and nothing else."""
        wanted, budget = owned * self.catalogue.slot_bytes, self._options.budget
        if isinstance(budget, int) and wanted > budget:
            raise CacheError(
                "this rank's experts do not fit, and no others may stand in for them",
                path=self._reader.path,
                expected=f"at least {wanted:,} bytes",
                found=f"{budget:,} bytes",
                remedy="give more, or page them: leave out --cold none",
            )
        return Plan(owned, (0,) * self._config.num_hidden_layers, resident=False)

    def _reading(self, plan: Plan, device: Device) -> tuple[DeviceTransport, Pager]:
        options, policy = self._options, self._policy
        recorder = None
        if options.trace is not None:
            recorder = self._recorder(options.trace, plan, policy)
            self._stack.callback(recorder.close)
        files = ExpertReader(self._reader, self.catalogue, digests=self._digests)
        self._stack.callback(files.close)
        self.notes += files.notes
        transport = DeviceTransport(self.catalogue, files, self.pools, device, threads=THREADS)
        self._stack.callback(transport.close)
        pager = Pager(
            self.catalogue,
            plan.slots,
            transport,
            policy=policy,
            ownership=self._ownership,
            quarantine=plan.quarantine,
            recorder=recorder,
        )
        self._stack.callback(pager.close)
        return transport, pager

    def _recorder(self, path: Path, plan: Plan, policy: str) -> Recorder:
        header = Header.of(
            self._identity,
            self._config,
            self.catalogue,
            plan.slots,
            policy=policy,
            parameters=parameters_of(policy),
            warm_start="" if self._profile is None else self._profile.digest,
            limits=limits_of(self._options, plan),
        )
        return Recorder(path, header)

    def _prefetcher(
        self,
        pager: Pager,
        plan: Plan,
        source: DeviceSource,
        by_token: Mapping[int, npt.NDArray[np.int32]],
    ) -> Prefetcher | None:
        certain = {layer: table for layer, table in by_token.items() if plan.quarantine[layer]}
        guess = None
        if self._adapter is not None:
            biases = {
                layer: source.tensors.values(bias_name(layer), self._config.n_routed_experts)
                for layer in range(self._config.num_hidden_layers)
                if layer not in by_token
            }
            guess = AdapterGuess(self._adapter, biases, self._options.prefetch_top)
        if not certain and guess is None:
            return None
        return Prefetcher(pager, certain, guess, say=self.notes.append)

    def _warm(self, pager: Pager, slots: int) -> None:
        """Read what a profile names, behind whatever is demanded; or all that is owned, at once."""
        for layer in range(self._config.num_hidden_layers):
            if self._options.cold is not None:
                pager.acquire(layer, self._ownership.owned, "prefill").release()
            elif self._profile is not None:
                pager.prefetch(layer, self._profile.experts[layer][:slots], Purpose.WARM)
