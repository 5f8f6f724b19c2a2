"""Owns how a step on a device gets its routed experts when only some have a slot there.

A layer's launches end at its router. The chosen ids come down, their experts are leased in bands
of as many as there are slots, tables are pointed at them, and each band's products are queued; what
a band has no expert for, it leaves alone. The shared expert's products are queued before the host
waits. Hash layers need no wait: the host looks their experts up itself.

T tokens, K experts of a token, V vocabulary, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.runtime.backend.hip import HipBackend
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.device.clock import Clock, Point
from ds4q.runtime.device.layer import LayerProgram
from ds4q.runtime.device.layout import Layout
from ds4q.runtime.device.pointers import PointerTables
from ds4q.runtime.device.pools import ExpertPools
from ds4q.runtime.device.scratch import Scratch
from ds4q.runtime.device.weights import DeviceSource
from ds4q.runtime.experts.ledger import Dispatch
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.store import Phase

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

ABSENT = -1  # an id whose row is zeros
ELSEWHERE = -2  # an id whose row other launches make


class BandIds:
    """Where ids of bands lie on a device, for steps of at most ``batch`` tokens."""

    def __init__(self, layout: Layout, source: DeviceSource, c: ModelConfig, batch: int) -> None:
        self.shape = batch, c.num_experts_per_tok
        count = batch * c.num_experts_per_tok
        self.place = layout.floats(count)
        self.none = source.table(4 * count, lambda: np.full(count, ELSEWHERE, np.int32))


class DevicePaging:
    """The routed experts of a step, layer by layer.

    Parameters
    ----------
    pager : closed with this
    tables : of every layer
    clock : of the backend's stream
    by_token : i32 [V, K] of every hash layer
    """

    def __init__(
        self,
        backend: HipBackend,
        layers: Sequence[LayerProgram],
        scratch: Scratch,
        ids: BandIds,
        pools: ExpertPools,
        pager: Pager,
        ownership: ExpertOwnership,
        tables: PointerTables,
        clock: Clock,
        by_token: Mapping[int, I32],
        *,
        slots: int,
        experts: int,
    ) -> None:
        self.pager = pager
        self._backend = backend
        self._layers = layers
        self._scratch = scratch
        self._ids = ids
        self._pools = pools
        self._ownership = ownership
        self._tables = tables
        self._clock = clock
        self._by_token = by_token
        self._slots = slots
        self._experts = experts
        nbytes = 4 * ids.shape[0] * ids.shape[1]
        self._down = backend.device.pinned(nbytes)
        self._up = backend.device.pinned(nbytes)
        self._sent: Point | None = None
        self._step: tuple[I64, Phase, int, int] | None = None
        self._readbacks = 0
        self._readback_s = 0.0

    def begin(self, ids: I64, phase: Phase, sequence: int, first: int) -> None:
        """A step of tokens ``ids`` at position ``first`` of a sequence begins."""
        self._step = ids, phase, sequence, first

    def serve(self, layer: int) -> None:
        """Queue the experts of ``layer``, whose router is queued; waits for what it must read."""
        if self._step is None:
            raise RuntimeError("no step has begun")
        tokens, phase, sequence, first = self._step
        program, count = self._layers[layer], len(tokens)
        chosen = self._chosen(layer, tokens)
        dispatch = Dispatch(layer, sequence, first, chosen)
        for number, experts in enumerate(
            bands(chosen, self._slots, self._ownership, self._experts)
        ):
            with self.pager.acquire(layer, experts, phase, dispatch) as lease:
                self._tables.point(
                    layer,
                    {e: self._pools.addresses(layer, slot) for e, slot in lease.slots.items()},
                )
                place = self._scratch.experts
                if (band := self._band(chosen, experts, first=number == 0)) is not None:
                    self._send(band)
                    place = self._ids.place
                self._backend.run(program.experts(place, count, shared=False))
                lease.release(self._clock.mark())

    def counters(self) -> dict[str, Any]:
        """The pager's, and what the host waited for routers and sent up because of them."""
        return self.pager.counters() | {
            "readbacks": self._readbacks,
            "readback_s": self._readback_s,
            "table_uploads": self._tables.uploads,
        }

    # ------------------------------------------------------------------ one step each

    def _chosen(self, layer: int, tokens: I64) -> I32:
        """The ids [T, K] of a layer's experts; the shared one's products are queued meanwhile."""
        stream, count = self._backend.stream, len(tokens)
        shared = self._layers[layer].experts(self._ids.none, count, shared=True)
        if layer in self._by_token:
            self._backend.run(shared)
            return self._by_token[layer][tokens]
        shape = count, self._ids.shape[1]
        held = self._down.array.view(np.int32)[: shape[0] * shape[1]]
        stream.download(held, self._scratch.experts.address)
        there = self._clock.mark()
        self._backend.run(shared)
        began = time.perf_counter()
        there.wait()
        self._readback_s += time.perf_counter() - began
        self._readbacks += 1
        return held.reshape(shape).copy()

    def _band(self, chosen: I32, experts: Sequence[int], *, first: bool) -> I32 | None:
        """Ids of a band [T, K]; None where they are all that were chosen.

        The rows of other ranks' experts are the first band's: zeros.
        """
        lookup = np.full(self._experts, ELSEWHERE, np.int32)
        if first:
            lookup[: self._ownership.start] = ABSENT
            lookup[self._ownership.stop :] = ABSENT
        lookup[experts] = experts
        band: I32 = lookup[chosen]
        return None if np.array_equal(band, chosen) else band

    def _send(self, band: I32) -> None:
        """Bring a band's ids up; the copy before reads the host's until it has been made."""
        if self._sent is not None:
            self._sent.wait()
        held = self._up.array.view(np.int32)[: band.size]
        held[:] = band.reshape(-1)
        self._backend.stream.upload(self._ids.place.address, held)
        self._sent = self._clock.mark()


def bands(
    chosen: npt.NDArray[np.integer[Any]], slots: int, ownership: ExpertOwnership, experts: int
) -> Iterator[list[int]]:
    """The distinct experts of ``chosen`` in order of first appearance, ``slots`` at a time.

    Other ranks' are left out; what is no expert at all is kept, so that it is refused. At least one
    band, empty where nothing is left.
    """
    wanted = [
        expert
        for expert in dict.fromkeys(chosen.reshape(-1).tolist())
        if ownership.owns(expert) or not 0 <= expert < experts
    ]
    for first in range(0, max(1, len(wanted)), slots):
        yield wanted[first : first + slots]
