"""Owns setting up routed experts that are paged on a device: slots, their memory, what fills them.

Planned from the artifact's index, sized by what memory leaves, opened once there is memory. Serves
no step.
"""

from __future__ import annotations

from contextlib import ExitStack

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
from ds4q.runtime.experts.budget import available_bytes
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.plan import Plan, plan_slots
from ds4q.runtime.experts.reading import FILLERS, READS, ExpertReader, helpers_for
from ds4q.runtime.experts.setup import Setup


def untraceable(remedy: str) -> CacheError:
    """For a trace of experts that a device chooses among without telling the host."""
    return CacheError(
        "a device that holds all experts cannot be traced: the host does not hear of their choice",
        remedy=remedy,
    )


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
    WriteError : the trace cannot be written, or another process writes it
    """

    def __init__(
        self,
        config: ModelConfig,
        source: DeviceSource,
        reader: Reader,
        options: CacheOptions,
        notes: list[str],
    ) -> None:
        self._config = config
        self._options = options
        self._reader = reader
        self._tensors = source.tensors
        self._plan: Plan | None = None
        self._files: ExpertReader | None = None
        self._stack = ExitStack()
        try:
            self._setup = Setup(reader, config, options, self._stack, notes)
            self.notes = notes
            self.catalogue = Catalogue(config, source.tensors, path=reader.path)
            self.pools = ExpertPools(self.catalogue.geometry)
        except BaseException:
            self._stack.close()
            raise

    def size(self, device: Device, needed: int) -> bool:
        """Settle the number of slots, given the bytes of all else; whether all experts fit.

        Raises
        ------
        CacheError : too few slots for a token, or more memory than there is
        """

        def free() -> int:
            on_device = device.free_bytes()
            return min(on_device, available_bytes()) if device.unified else on_device

        options, owned = self._options, len(self._setup.ownership.owned)
        if options.cold is None:
            self._plan = plan = plan_slots(
                self.catalogue,
                self._config,
                options,
                owned=owned,
                needed=needed,
                available=free,
                advice=device.unified,
            )
        else:
            self._setup.check_owned(owned * self.catalogue.slot_bytes)
            none = (0,) * self._config.num_hidden_layers
            self._plan = plan = Plan(owned, none, resident=False)
        resident = plan.resident and options.owner is None
        if resident:
            if options.trace is not None:
                raise untraceable("all of them fit: give a smaller --expert-cache")
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
        if self._plan is None:
            raise RuntimeError("the slots were not sized")
        by_token = {
            layer: source.id_table(by_token_name(self._config.number(layer)))
            for layer in range(self._config.num_hidden_layers)
            if self._config.is_hash_layer(layer)
        }
        plan = self._plan

        def bias(layer: int) -> npt.NDArray[np.float32]:
            name = bias_name(self._config.number(layer))
            return source.tensors.values(name, self._config.n_routed_experts)

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
            self._setup.ownership,
            tables,
            clock,
            by_token,
            self._setup.prefetcher(pager, plan, by_token, bias, self.notes.append),
            slots=plan.slots,
            policy=self._setup.policy,
            memory={
                "slots_bytes": sum(layout.nbytes for layout in self.pools.layouts),
                "wasted_bytes": self.catalogue.wasted_bytes(plan.slots),
                "staging_bytes": transport.staging_bytes,
                "table_bytes": tables.nbytes,
            },
        )
        self._warm(pager, plan.slots)
        return paging

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

    # ------------------------------------------------------------------ one part each

    def _reading(self, plan: Plan, device: Device) -> tuple[DeviceTransport, Pager]:
        self._setup.record(self.catalogue, plan)
        self._files = files = ExpertReader(
            self._reader,
            self.catalogue,
            digests=self._tensors.digests,
            notes=self.notes,
            helpers=helpers_for(READS),
            legal=self._tensors.check_whole if self._options.check_reads else None,
        )
        self._stack.callback(files.close)
        transport = DeviceTransport(self.catalogue, files, self.pools, device, threads=FILLERS)
        self._stack.callback(transport.close)
        return transport, self._setup.pager(self.catalogue, plan, transport)

    def _warm(self, pager: Pager, slots: int) -> None:
        """Read what a profile names, behind whatever is demanded; or all that is owned, at once."""
        if self._options.cold is None:
            self._setup.warm(pager, slots)
            return
        for layer in range(self._config.num_hidden_layers):
            pager.acquire(layer, self._setup.ownership.owned, "prefill").release()
