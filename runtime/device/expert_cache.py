"""Owns setting up routed experts that are paged on a device: slots, their memory, what fills them.

Planned from the artifact's index, sized by what memory leaves, opened once there is memory. Serves
no step.
"""

from __future__ import annotations

from dataclasses import replace

from ds4q.artifact.hfq import Reader
from ds4q.hipkern.driver import Device
from ds4q.runtime.backend.hip import HipBackend
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.device.clock import Clock
from ds4q.runtime.device.model import by_token_name
from ds4q.runtime.device.paging import BandIds, DevicePaging
from ds4q.runtime.device.pointers import PointerTables
from ds4q.runtime.device.pools import ExpertPools
from ds4q.runtime.device.program import Program
from ds4q.runtime.device.scratch import Scratch
from ds4q.runtime.device.transport import DeviceTransport
from ds4q.runtime.device.weights import DeviceSource
from ds4q.runtime.experts.budget import available_bytes
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.experts.digests import Digests
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.plan import Plan, plan_slots
from ds4q.runtime.experts.policy import DEFAULT_POLICY
from ds4q.runtime.experts.reading import ExpertReader

THREADS = 4  # that read and copy


class ExpertCache:
    """The slots of an artifact's routed experts.

    Parameters
    ----------
    source : of the same artifact; binds the experts' decode tables

    Attributes
    ----------
    catalogue, pools : what the model's weights are planned with
    notes : what a user should hear, one line each
    """

    def __init__(
        self, config: ModelConfig, source: DeviceSource, reader: Reader, options: CacheOptions
    ) -> None:
        experts, owner = config.n_routed_experts, options.owner
        self.notes: list[str] = []
        self.catalogue = Catalogue(config, source.tensors, path=reader.path)
        self.pools = ExpertPools(self.catalogue.geometry)
        self._ownership = (
            ExpertOwnership.all(experts)
            if owner is None
            else ExpertOwnership.of_rank(*owner, experts)
        )
        self._config = config
        self._options = options
        self._plan: Plan | None = None

    def size(self, device: Device, needed: int) -> bool:
        """Settle the number of slots, given the bytes of all else; whether all experts fit.

        Raises
        ------
        CacheError : too few slots for a token, or more memory than there is
        """

        def free() -> int:
            on_device = device.free_bytes()
            return min(on_device, available_bytes()) if device.unified else on_device

        options, owned = self._options, len(self._ownership.owned)
        if options.cold is not None:
            options = replace(options, budget=None, slots=owned, cold=None)
        self._plan = plan = plan_slots(
            self.catalogue, self._config, options, owned=owned, needed=needed, available=free
        )
        if plan.resident and options.owner is None:
            return True
        self.pools.size(plan.counts)
        return False

    def open(
        self,
        backend: HipBackend,
        reader: Reader,
        source: DeviceSource,
        program: Program,
        scratch: Scratch,
        ids: BandIds,
    ) -> DevicePaging:
        """Begin to serve; everything has memory, and ``source`` has been filled.

        Raises
        ------
        ReceiptError : one is required, and there is none of this artifact
        """
        config, options, plan = self._config, self._options, self._plan
        if plan is None:
            raise RuntimeError("the slots were not sized")
        digests = None
        if options.check_reads:
            digests = Digests.of(reader, self.notes, require=options.require_receipt)
        experts = ExpertReader(reader, self.catalogue, digests=digests)
        try:
            transport = DeviceTransport(
                self.catalogue, experts, self.pools, backend.device, threads=THREADS
            )
        except BaseException:
            experts.close()
            raise
        try:
            clock = Clock(backend.stream)
            paging = DevicePaging(
                backend,
                program.layers,
                scratch,
                ids,
                self.pools,
                Pager(
                    self.catalogue,
                    plan.slots,
                    transport,
                    policy=options.policy or DEFAULT_POLICY,
                    ownership=self._ownership,
                    quarantine=plan.quarantine,
                ),
                self._ownership,
                PointerTables(
                    backend.device,
                    backend.stream,
                    clock,
                    [layer.table() for layer in program.layers],
                ),
                clock,
                {
                    layer: source.id_table(by_token_name(layer))
                    for layer in range(config.num_hidden_layers)
                    if config.is_hash_layer(layer)
                },
                slots=plan.slots,
                experts=config.n_routed_experts,
            )
        except BaseException:
            transport.close()
            raise
        self.notes += experts.notes
        return paging
