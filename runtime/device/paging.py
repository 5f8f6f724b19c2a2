"""Owns how a step on a device gets its routed experts when only some have a slot there.

A layer's launches end at its router. The chosen ids come down, their experts are leased in bands
of as many as there are slots, tables are pointed at them, and each band's products are queued; what
a band has no expert for, it leaves alone. The shared expert's products are queued before the host
waits. Hash layers need no wait: the host looks their experts up itself.

T tokens, K experts of a token, V vocabulary, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds4q.hipkern.handles import Pinned
from ds4q.runtime.backend.hip import HipBackend, Launch
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.device.clock import Clock, Point
from ds4q.runtime.device.layer import LayerProgram
from ds4q.runtime.device.layout import Layout, Place
from ds4q.runtime.device.pointers import PointerTables
from ds4q.runtime.device.pools import ExpertPools
from ds4q.runtime.device.scratch import Scratch
from ds4q.runtime.device.transport import DeviceTransport
from ds4q.runtime.device.weights import DeviceSource
from ds4q.runtime.experts.ledger import Dispatch
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.predict import Prefetcher
from ds4q.runtime.experts.store import Phase
from ds4q.runtime.experts.view import Choices, ExpertsView

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

_NO_LOGITS = np.empty((0, 0), np.float32)  # they stay on the device

ABSENT = -1  # an id whose row is zeros
ELSEWHERE = -2  # an id whose row other launches make


class BandIds:
    """Where ids of bands lie on a device, for steps of at most ``batch`` tokens.

    Attributes
    ----------
    chosen : experts of a token
    experts : of a layer
    row_bytes : of what a router sees of a token
    place : ids [batch, chosen] of a band
    none : ids that leave every row alone
    """

    def __init__(self, layout: Layout, source: DeviceSource, c: ModelConfig, batch: int) -> None:
        self.batch = batch
        self.chosen = c.num_experts_per_tok
        self.experts = c.n_routed_experts
        self.row_bytes = 4 * c.hidden_size
        count = batch * c.num_experts_per_tok
        self.place = layout.floats(count)
        self.none = source.table(4 * count, lambda: np.full(count, ELSEWHERE, np.int32))


class Step(NamedTuple):
    """Tokens that go through the layers together: their ids [T], and where they stand."""

    ids: I64
    phase: Phase
    sequence: int
    first: int


class DevicePaging:
    """The routed experts of a step, layer by layer.

    Parameters
    ----------
    tables : of every layer
    clock : of the backend's stream
    by_token : i32 [V, K] of every hash layer
    predictor : asks for experts ahead of their use
    slots : most experts of a band
    policy, memory : its name, and bytes by what they are for, as counters tell them
    """

    def __init__(
        self,
        backend: HipBackend,
        layers: Sequence[LayerProgram],
        scratch: Scratch,
        ids: BandIds,
        pools: ExpertPools,
        pager: Pager,
        transport: DeviceTransport,
        ownership: ExpertOwnership,
        tables: PointerTables,
        clock: Clock,
        by_token: Mapping[int, I32],
        predictor: Prefetcher | None,
        *,
        slots: int,
        policy: str,
        memory: Mapping[str, int],
    ) -> None:
        self._pager = pager
        self._transport = transport
        self._backend = backend
        self._layers = layers
        self._scratch = scratch
        self._ids = ids
        self._pools = pools
        self._ownership = ownership
        self._tables = tables
        self._clock = clock
        self._by_token = by_token
        self._predictor = predictor
        self._slots = slots
        self._told = {"policy": policy, "memory": dict(memory)}
        self._experts = ids.experts
        nbytes = 4 * ids.batch * ids.chosen
        self._down = backend.device.pinned(nbytes)
        self._up = backend.device.pinned(nbytes)
        self._seen: Pinned | None = None
        if predictor is not None and predictor.needs_state:
            self._seen = backend.device.pinned(scratch.normed.nbytes)
        self._sent: Point | None = None
        self._dispatches = 0
        self._owns_all = len(ownership.owned) == ids.experts
        self._choices = Choices(len(layers), ids.experts)
        self._made: dict[tuple[int, int, int, bool], list[Launch]] = {}
        self._readbacks = 0
        self._io_s: dict[Phase, float] = {"prefill": 0.0, "decode": 0.0}
        self._compute_s: dict[Phase, float] = {"prefill": 0.0, "decode": 0.0}

    def begin(self, step: Step) -> None:
        """A step begins: what follows from its ids alone is asked for."""
        if self._predictor is not None:
            self._predictor.begin(step.ids, step.phase)

    def serve(self, layer: int, step: Step) -> None:
        """Queue the experts of ``layer``, whose router is queued; waits for what it must read."""
        ids, phase, sequence, first = step
        chosen = self._chosen(layer, ids, phase)
        dispatch = Dispatch(self._dispatches, sequence, first, chosen)
        self._dispatches += 1
        cut = bands(chosen, self._slots, self._ownership, self._experts)
        flat = chosen.reshape(-1).tolist()
        for number, experts in enumerate(cut):
            began = time.perf_counter()
            asked = flat if len(cut) == 1 else list(filter(set(experts).__contains__, flat))
            with self._pager.acquire(layer, asked, phase, dispatch) as lease:
                self._io_s[phase] += time.perf_counter() - began
                if self._predictor is not None and number == len(cut) - 1:
                    self._predictor.issue(layer, phase)
                addresses = {e: self._pools.addresses(layer, s) for e, s in lease.slots.items()}
                self._tables.point(layer, addresses)
                place = self._scratch.experts
                band = self._band(chosen, experts, first=number == 0, alone=len(cut) == 1)
                if band is not None:
                    self._send(band)
                    place = self._ids.place
                self._backend.run(self._launches(layer, place, len(ids), shared=False))
                lease.release(self._clock.mark())
        self._choices.add(layer, chosen)

    def view(self) -> ExpertsView:
        """How often each expert was chosen, and which are resident now; from any thread."""
        return self._choices.view(self._pager.resident())

    def counters(self) -> dict[str, Any]:
        """Those of the pager, and of the transport as ``reads``.

        By phase also ``io_s``, seconds of getting experts, and ``compute_s``, of waiting for what
        the device had to compute before it could tell which; ``readbacks``: how often it told;
        ``table_uploads``: how often a table went up.
        """
        counts = self._pager.counters()
        for phase in self._io_s:
            counts[phase] |= {"io_s": self._io_s[phase], "compute_s": self._compute_s[phase]}
        return counts | {
            **self._told,
            "reads": self._transport.counters(),
            "readbacks": self._readbacks,
            "table_uploads": self._tables.uploads,
        }

    # ------------------------------------------------------------------ one step each

    def _chosen(self, layer: int, tokens: I64, phase: Phase) -> I32:
        """The ids [T, K] of a layer's experts; the shared one's products are queued meanwhile."""
        stream, count = self._backend.stream, len(tokens)
        shared = self._launches(layer, self._ids.none, count, shared=True)
        known, seen = self._by_token.get(layer), self._seen
        if known is not None and seen is None:
            self._backend.run(shared)
            return known[tokens]
        shape = count, self._ids.chosen
        held = self._down.array.view(np.int32)[: shape[0] * shape[1]]
        stream.download(held, self._scratch.experts.address)
        if seen is not None:
            stream.download(seen, self._scratch.normed.address, count * self._ids.row_bytes)
        there = self._clock.mark()
        self._backend.run(shared)
        began = time.perf_counter()
        there.wait()
        self._compute_s[phase] += time.perf_counter() - began
        self._readbacks += 1
        chosen: I32 = held.reshape(shape).copy()
        if seen is not None and self._predictor is not None:
            rows = seen.array[: count * self._ids.row_bytes].view(np.float32)
            state = rows.reshape(count, -1).copy()
            self._predictor.see(layer, chosen.astype(np.int64), _NO_LOGITS, state)
        return chosen

    def _band(self, chosen: I32, experts: Sequence[int], *, first: bool, alone: bool) -> I32 | None:
        """Ids of a band [T, K]; None where they are those that were chosen.

        The rows of other ranks' experts are the first band's: zeros.
        """
        if alone and self._owns_all:
            return None
        lookup = np.full(self._experts, ELSEWHERE, np.int32)
        if first:
            lookup[: self._ownership.start] = ABSENT
            lookup[self._ownership.stop :] = ABSENT
        lookup[experts] = experts
        band: I32 = lookup[chosen]
        return band

    def _launches(self, layer: int, ids: Place, count: int, *, shared: bool) -> list[Launch]:
        """A layer's experts' launches; they are the same in every step."""
        key = layer, id(ids), count, shared
        if key not in self._made:
            self._made[key] = list(self._layers[layer].experts(ids, count, shared=shared))
        return self._made[key]

    def _send(self, band: I32) -> None:
        """Bring a band's ids up."""
        self._await_ids()
        held = self._up.array.view(np.int32)[: band.size]
        held[:] = band.reshape(-1)
        self._backend.stream.upload(self._ids.place.address, held)
        self._sent = self._clock.mark()

    def _await_ids(self) -> None:
        """The last band's copy reads the host's ids until it has been made."""
        if self._sent is not None:
            self._sent.wait()


def bands(
    chosen: npt.NDArray[np.integer[Any]], slots: int, ownership: ExpertOwnership, experts: int
) -> list[list[int]]:
    """The distinct experts of ``chosen`` in order of first appearance, ``slots`` at a time.

    Other ranks' are left out; what is no expert at all is kept, so that it is refused. At least one
    band, empty where nothing is left.
    """
    wanted = [
        expert
        for expert in dict.fromkeys(chosen.reshape(-1).tolist())
        if ownership.owns(expert) or not 0 <= expert < experts
    ]
    return [wanted[first : first + slots] for first in range(0, max(1, len(wanted)), slots)]
