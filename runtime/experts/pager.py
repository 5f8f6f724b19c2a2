"""Owns the planning of expert reads: leases, waiting, rollback and counters, under one lock.

What a slot holds is told in ``slots``; the transport moves the bytes, the policy picks who goes.
A dispatch is planned whole or not at all: a caller that waits holds nothing, so callers cannot
wait for each other in a circle. Token ids never depend on what is counted or read ahead here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import Ds4qError
from ds4q.runtime.errors import (
    BandError,
    ExpertRangeError,
    ExpertReadError,
    SlotTimeoutError,
    TransportClosedError,
)
from ds4q.runtime.experts.catalogue import Catalogue, Key
from ds4q.runtime.experts.ledger import Dispatch, Ledger
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.policy import make_policies
from ds4q.runtime.experts.reading import Fill, Purpose
from ds4q.runtime.experts.slots import Entry, LayerSlots, Survey
from ds4q.runtime.experts.store import Phase
from ds4q.runtime.experts.trace import Outcome, Recorder
from ds4q.runtime.experts.transport import Transport

_POLL_S = 0.0002  # between looks at events, which nobody announces
_WARM_AT_ONCE = 4  # reads of a warm start; once there are demands, one, which they may wait for


class Event(Protocol):
    """A point in a device's work."""

    def query(self) -> bool:
        """Whether the work before it is done."""


class Lease:
    """The right to read experts where they lie, until it is released.

    Attributes
    ----------
    slots : slot by expert; empty once released
    """

    __slots__ = ("_entries", "_layer", "_pager", "slots")

    def __init__(self, pager: Pager, layer: int) -> None:
        self._pager = pager
        self._layer = layer
        self._entries: list[Entry] = []
        self.slots: dict[int, int] = {}

    def release(self, event: Event | None = None) -> None:
        """Give the slots back: now, or when ``event`` has come. A second call does nothing."""
        entries, self._entries, self.slots = self._entries, [], {}
        if entries:
            self._pager._release(self._layer, entries, event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.release()


class Pager:
    """Gives out routed experts of which only some are in memory. Any thread may ask.

    Parameters
    ----------
    slots : experts of a layer that are resident at a time
    transport : fills slots; closed with the pager
    policy : name of the rule that picks who goes
    ownership : experts of other ranks are left out everywhere
    quarantine : by layer, further slots for reads ahead of their use; None or 0: there are none
    recorder : gets every dispatch that is described; the caller closes it
    timeout_s : longest wait for a slot, and for the next read to come back
    """

    def __init__(
        self,
        catalogue: Catalogue,
        slots: int,
        transport: Transport,
        *,
        policy: str,
        ownership: ExpertOwnership | None = None,
        quarantine: Sequence[int] | None = None,
        recorder: Recorder | None = None,
        timeout_s: float = 120,
    ) -> None:
        self._catalogue = catalogue
        self._slots = slots
        self._quarantine = list(quarantine or [0] * len(catalogue.records))
        self._transport = transport
        self._ownership = ownership or ExpertOwnership.all(catalogue.experts)
        self._owns_all = len(self._ownership.owned) == catalogue.experts
        self._timeout_s = timeout_s
        self._change = threading.Condition()
        self._ledger = Ledger(recorder)
        self._layers = [
            LayerSlots(
                slots,
                spare,
                rule,
                [record.nbytes for record in records],
                self._ledger.ahead,
            )
            for records, spare, rule in zip(
                catalogue.records,
                self._quarantine,
                make_policies(policy, len(catalogue.records), slots, catalogue.experts),
                strict=True,
            )
        ]
        self._seen: list[set[int]] = [set() for _ in self._layers]
        self._retiring: list[deque[tuple[Event, list[Entry]]]] = [deque() for _ in self._layers]
        self._warm: deque[Key] = deque()
        self._loading = dict.fromkeys(Purpose, 0)
        self._loading_bytes = 0
        self._finished = 0
        self._closed = False

    # ------------------------------------------------------------------ what others call

    def acquire(
        self, layer: int, ids: Sequence[int], phase: Phase, dispatch: Dispatch | None = None
    ) -> Lease:
        """Lease the experts ``ids`` of a band, complete in their slots; waits for them.

        Parameters
        ----------
        ids : in order of first appearance; of duplicates the first counts
        dispatch : what the record of it says; None: it is not recorded

        Raises
        ------
        ExpertRangeError, BandError : nothing was changed
        SlotTimeoutError : all slots stayed in use; nothing was changed
        the error of the transport : a read failed; its expert is nowhere, others of the band that
            came are kept, and the lease is not given
        """
        lease = Lease(self, layer)
        wanted = self._wanted(layer, ids)
        if not wanted:
            return lease
        if len(wanted) > self._slots:
            raise BandError(
                f"layer {layer}: more distinct experts in a band than slots",
                expected=f"at most {self._slots}",
                found=len(wanted),
            )
        try:
            fills, in_line = self._plan(lease, wanted, ids, phase, dispatch)
            self._start(fills)
            if in_line:
                self._transport.hurry(in_line)
            self._await_reads(lease, phase)
        except BaseException:
            lease.release()
            raise
        return lease

    def prefetch(
        self, layer: int, ids: Sequence[int], purpose: Purpose, *, most_bytes: int | None = None
    ) -> int:
        """Begin to read experts ahead of their use, as far as slots can be spared; never waits.

        Parameters
        ----------
        purpose : CERTAIN and SPECULATIVE use slots that residents leave over, in the order of
            ``ids``; WARM fills free slots in the background while no demand reads, and residents
            are what comes of it
        most_bytes : CERTAIN and SPECULATIVE begin no read that brings the bytes under way above it

        Returns
        -------
        how many reads were begun, or for WARM put in line
        """
        wanted = self._wanted(layer, ids)
        if not wanted:
            return 0
        if purpose is Purpose.WARM:
            with self._change:
                self._warm.extend(Key(layer, expert) for expert in wanted)
            self._warm_up()
            return len(wanted)
        with self._change:
            fills = self._place_ahead(layer, wanted, purpose, most_bytes)
        self._start(fills)
        return len(fills)

    def counters(self) -> dict[str, Any]:
        """What happened so far, by phase and by purpose, and the slots; times in seconds."""
        with self._change:
            for layer in range(len(self._layers)):
                self._retire(layer)
            return {
                **self._ledger.told(),
                "loading": sum(self._loading.values()),
                "loading_bytes": self._loading_bytes,
                "leased": sum(slots.pins for slots in self._layers),
                "slots": self._slots,
                "quarantine": list(self._quarantine),
                "slot_bytes": [layer.nbytes for layer in self._catalogue.geometry],
            }

    def resident(self) -> npt.NDArray[np.bool_]:
        """Which experts are in memory now, [layers, experts]."""
        found = np.zeros((len(self._layers), self._catalogue.experts), np.bool_)
        with self._change:
            for layer, slots in enumerate(self._layers):
                found[layer, slots.filled] = True
        return found

    def close(self) -> None:
        """End all reading; who waits gets an error. May be called again.

        Events of released leases are not asked any more: the device's work must be over.
        """
        with self._change:
            self._closed = True
            self._warm.clear()
            for layer, retiring in enumerate(self._retiring):
                while retiring:
                    self._unpin(layer, retiring.popleft()[1])
            self._change.notify_all()
        self._transport.close()

    # ------------------------------------------------------------------ planning

    def _wanted(self, layer: int, ids: Sequence[int]) -> dict[int, None]:
        """The distinct experts of ``ids`` that this rank owns, in order; all are in range."""
        if not 0 <= layer < len(self._layers):
            raise ExpertRangeError(
                "no such layer", expected=f"0 to {len(self._layers) - 1}", found=layer
            )
        distinct = dict.fromkeys(map(int, ids))
        experts = self._catalogue.experts
        for expert in distinct:
            if not 0 <= expert < experts:
                raise ExpertRangeError(
                    tensor=f"layers.{self._catalogue.number(layer)}.ffn.experts",
                    expected=f"0 to {experts - 1}",
                    found=expert,
                )
        if self._owns_all:
            return distinct
        return {expert: None for expert in distinct if self._ownership.owns(expert)}

    def _plan(
        self,
        lease: Lease,
        wanted: Mapping[int, None],
        ids: Sequence[int],
        phase: Phase,
        dispatch: Dispatch | None,
    ) -> tuple[list[Fill], list[Key]]:
        """Give ``lease`` its slots. What is to be read, and what stands in line already."""
        layer = lease._layer
        slots = self._layers[layer]
        with self._change:
            survey = self._await_slots(layer, wanted, phase)
            outcomes = self._outcomes(layer, survey, wanted)
            in_line = [Key(layer, entry.expert) for entry in survey.aside if entry.loading]
            slots.admit(survey, wanted, lease._entries)
            lease.slots = {entry.expert: entry.slot for entry in lease._entries}
            fills = [
                Fill(Key(layer, expert), lease.slots[expert], Purpose.DEMAND, phase)
                for expert in survey.missing
            ]
            nbytes = self._begin(fills)
            try:
                self._ledger.enter(
                    layer,
                    phase,
                    outcomes,
                    accesses=len(ids) if self._owns_all else sum(map(self._ownership.owns, ids)),
                    evictions=survey.evictions,
                    nbytes=nbytes,
                    dispatch=dispatch,
                )
            except BaseException as error:  # of a trace that cannot be written
                self._abandon(fills, error)
                raise
            return fills, in_line

    def _outcomes(
        self, layer: int, survey: Survey, wanted: Mapping[int, None]
    ) -> dict[int, Outcome]:
        """What each of ``wanted`` meets, in order; they are known from now on."""
        seen = self._seen[layer]
        met = {entry.expert: Outcome.PREFETCHED for entry in survey.aside}
        for entry in survey.resident:
            warm = entry.purpose is Purpose.WARM
            met[entry.expert] = Outcome.WARM if warm else Outcome.HIT
        for expert in survey.missing:
            met[expert] = Outcome.MISS if expert in seen else Outcome.COMPULSORY
        seen.update(wanted)
        return {expert: met[expert] for expert in wanted}

    def _place_ahead(
        self,
        layer: int,
        wanted: Mapping[int, None],
        purpose: Purpose,
        most_bytes: int | None = None,
    ) -> list[Fill]:
        slots = self._layers[layer]
        fills: list[Fill] = []
        for expert in wanted:
            key = Key(layer, expert)
            after = self._loading_bytes + self._catalogue[key].nbytes
            if most_bytes is not None and after > most_bytes:
                break
            entry = slots.place_ahead(expert, purpose, wanted)
            if entry is not None:
                fills.append(Fill(key, entry.slot, purpose))
                self._begin(fills[-1:])
        return fills

    # ------------------------------------------------------------------ waiting

    def _await_slots(self, layer: int, wanted: Mapping[int, None], phase: Phase) -> Survey:
        """A survey that fits; holds nothing while it waits."""
        slots = self._layers[layer]
        survey: Survey

        def ready() -> bool:
            nonlocal survey
            if self._closed:
                raise TransportClosedError(path=self._catalogue.path)
            self._retire(layer)
            survey = slots.survey(wanted)
            # Who goes must not depend on how far a device is: a replay could not tell.
            return survey.fits and not (survey.evictions and self._retiring[layer])

        def overdue() -> Ds4qError:
            return SlotTimeoutError(
                f"layer {layer}: no slot for {len(wanted)} experts within {self._timeout_s:g} s",
                path=self._catalogue.path,
                found=slots.describe(),
            )

        self._wait(phase, ready, overdue, layer=layer)
        return survey

    def _await_reads(self, lease: Lease, phase: Phase) -> None:
        """Wait until every read that ``lease`` needs is over, and raise what the first met."""
        entries = lease._entries

        def overdue() -> Ds4qError:
            slow = ", ".join(str(entry.expert) for entry in entries if entry.loading)
            return ExpertReadError(
                f"layer {lease._layer}: no read has come back for {self._timeout_s:g} s",
                path=self._catalogue.path,
                found=f"waiting for experts {slow}",
            )

        with self._change:
            self._wait(phase, lambda: not any(entry.loading for entry in entries), overdue)
            failed = next((entry for entry in entries if entry.error is not None), None)
            if failed is None:
                return
            self._ledger.demands[phase].failed += 1
        error = failed.error
        if isinstance(error, Ds4qError):
            raise error.located() from error  # each waiter raises one of its own
        number = self._catalogue.number(lease._layer)
        where = f"layers.{number}.ffn.experts.{failed.expert}"
        if isinstance(error, MemoryError):
            raise ExpertReadError(
                "no memory to read an expert",
                path=self._catalogue.path,
                tensor=where,
                remedy="free memory, or give a smaller --expert-cache",
            ) from error
        raise ExpertReadError(
            path=self._catalogue.path,
            tensor=where,
            found=f"{type(error).__name__}: {error}".removesuffix(": "),
            remedy=None if isinstance(error, OSError) else "this is a bug in ds4q",
        ) from error

    def _wait(
        self,
        phase: Phase,
        ready: Callable[[], bool],
        overdue: Callable[[], Ds4qError],
        *,
        layer: int | None = None,
    ) -> None:
        """Wait for ``ready``: for a slot of ``layer``, or for reads as long as some come back."""
        if ready():
            return
        began = moved = time.monotonic()
        finished = self._finished
        try:
            while True:
                if layer is None and finished != self._finished:
                    finished, moved = self._finished, time.monotonic()
                left = moved + self._timeout_s - time.monotonic()
                if left <= 0:
                    raise overdue()
                polled = layer is not None and self._retiring[layer]
                self._change.wait(min(left, _POLL_S) if polled else left)
                if ready():
                    return
        finally:
            self._ledger.demands[phase].wait_s += time.monotonic() - began

    # ------------------------------------------------------------------ leases and reads that end

    def _release(self, layer: int, entries: list[Entry], event: Event | None) -> None:
        with self._change:
            if event is None:
                self._unpin(layer, entries)
            else:
                self._retiring[layer].append((event, entries))
            self._change.notify_all()
            self._layers[layer].rest()

    def _unpin(self, layer: int, entries: list[Entry]) -> None:
        for entry in entries:
            self._layers[layer].unpin(entry)

    def _retire(self, layer: int) -> None:
        """End the leases whose events have come, oldest first."""
        retiring = self._retiring[layer]
        while retiring and retiring[0][0].query():
            self._unpin(layer, retiring.popleft()[1])

    def _begin(self, fills: Sequence[Fill]) -> int:
        nbytes = sum(self._catalogue[fill.key].nbytes for fill in fills)
        self._loading_bytes += nbytes
        for fill in fills:
            self._loading[fill.purpose] += 1
        return nbytes

    def _start(self, fills: Sequence[Fill]) -> None:
        if not fills:
            return
        try:
            self._transport.start(fills, self._done)
        except Exception as error:  # not an interrupt: what it left queued will come
            self._abandon(fills, error)
            raise

    def _abandon(self, fills: Sequence[Fill], error: BaseException) -> None:
        for fill in fills:
            self._finish(fill, error)

    def _done(self, fill: Fill, error: BaseException | None) -> None:
        self._finish(fill, error)
        with suppress(TransportClosedError):  # it closed meanwhile: nothing is to be warmed
            self._warm_up()

    def _finish(self, fill: Fill, error: BaseException | None) -> None:
        with self._change:
            self._finished += 1
            self._loading[fill.purpose] -= 1
            self._loading_bytes -= self._catalogue[fill.key].nbytes
            came = self._layers[fill.key.layer].finish(fill.key.expert, error)
            if came is not None:
                self._ledger.changed(fill.key, came)
            self._change.notify_all()

    def _warm_up(self) -> None:
        """Begin what is next in line of the warm start, unless demands are being read."""
        fills: list[Fill] = []
        with self._change:
            most = 1 if self._ledger.demanded else _WARM_AT_ONCE
            while (
                self._warm
                and not self._loading[Purpose.DEMAND]
                and self._loading[Purpose.WARM] < most
            ):
                layer, expert = self._warm.popleft()
                fills += self._place_ahead(layer, {expert: None}, Purpose.WARM)
        self._start(fills)
