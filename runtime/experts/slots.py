"""Owns the slots of experts: what each holds, who may take it, and their memory on the host.

It neither reads nor waits nor locks: the pager does. An expert's way is
free -> loading -> ready -> leased, any number of times -> evicted -> free.

A layer has ``slots + quarantine`` slots. At most ``slots`` experts are *resident*: these are
what was asked for, and the policy knows them alone. What was read ahead of its use stands
*aside*, in slots that residents leave over, and never costs a resident its place; it becomes
resident at its first use, where it lies. So the residents are at any time those that they would be
had nothing been read ahead.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.catalogue import Geometry, Record
from ds4q.runtime.experts.ledger import Ahead
from ds4q.runtime.experts.policy import Policy
from ds4q.runtime.experts.reading import Purpose

U8 = npt.NDArray[np.uint8]

_TOLD = 8  # slots that a message names
_TOUCHERS = 4  # threads: the kernel clears some GB/s in each


class HostSlots:
    """The slots of all layers in host memory, allocated and touched once.

    Parameters
    ----------
    geometry : by layer
    counts : slots by layer, those in quarantine included; none for 0 or less

    Raises
    ------
    CacheError : the memory cannot be had
    """

    def __init__(self, geometry: Sequence[Geometry], counts: Sequence[int]) -> None:
        self._geometry = tuple(geometry)
        layers = [(max(n, 0), layer) for n, layer in zip(counts, geometry, strict=True)]
        try:
            self._gate_up = [_pool(n * layer.gate_up_stride) for n, layer in layers]
            self._down = [_pool(n * layer.down_stride) for n, layer in layers]
        except (OSError, OverflowError) as error:
            nbytes = sum(n * layer.nbytes for n, layer in layers)
            raise CacheError(
                f"no memory for {nbytes:,} bytes of expert slots",
                found=error,
                remedy="give a smaller --expert-cache",
            ) from None
        with ThreadPoolExecutor(_TOUCHERS) as threads:
            list(threads.map(_touch, (*self._gate_up, *self._down)))

    def views(self, record: Record, slot: int) -> tuple[U8, U8, U8]:
        """Gate, up and down of ``record`` in ``slot``: (nbytes,) u8 each, valid under a lease."""
        layer = record.key.layer
        geometry = self._geometry[layer]
        gate_at = slot * geometry.gate_up_stride
        up_at, down_at = gate_at + geometry.up_at, slot * geometry.down_stride
        gate_up, down = self._gate_up[layer], self._down[layer]
        return (
            gate_up[gate_at : gate_at + record.gate.nbytes],
            gate_up[up_at : up_at + record.up.nbytes],
            down[down_at : down_at + record.down.nbytes],
        )


def _pool(nbytes: int) -> U8:
    """(nbytes,) u8 that begins at a page: in large pages, which are had and looked up sooner."""
    if not nbytes:
        return np.empty(0, dtype=np.uint8)
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them has small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def _touch(pool: U8) -> None:
    """Have the memory now, and not at the first read of each slot."""
    pool[:: mmap.PAGESIZE] = 0


class Entry:
    """An expert that has a slot.

    Attributes
    ----------
    purpose : what it was read for, until its first use makes that a demand
    pins : leases that hold it
    error : why its read failed; it has no slot any more
    """

    __slots__ = ("error", "expert", "loading", "pins", "purpose", "slot")

    def __init__(self, expert: int, slot: int, purpose: Purpose) -> None:
        self.expert = expert
        self.slot = slot
        self.purpose = purpose
        self.loading = True
        self.pins = 0
        self.error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether its slot cannot be taken."""
        return self.loading or self.pins > 0


class Survey(NamedTuple):
    """What a list of distinct experts meets, each part in order of first appearance."""

    resident: list[Entry]
    aside: list[Entry]
    missing: list[int]
    evictions: int  # residents that must go
    fits: bool  # it can be done now


class LayerSlots:
    """The slots of one layer.

    Parameters
    ----------
    slots, quarantine : see the module
    nbytes : bytes of each expert in the file
    ahead : counts by purpose, of all layers together

    Attributes
    ----------
    pins : leases of experts, summed
    """

    def __init__(
        self,
        slots: int,
        quarantine: int,
        policy: Policy,
        nbytes: Sequence[int],
        ahead: Mapping[Purpose, Ahead],
    ) -> None:
        self.slots = slots
        self.quarantine = quarantine
        self._policy = policy
        self._nbytes = nbytes
        self._ahead = ahead
        self._free = list(range(slots + quarantine))[::-1]
        self._residents: dict[int, Entry] = {}
        self._aside: dict[int, Entry] = {}  # oldest first
        self._busy = 0  # of the residents
        self.pins = 0
        self._aside_loading = 0

    @property
    def filled(self) -> list[int]:
        """Experts that are here, read to the end."""
        entries = (*self._residents.values(), *self._aside.values())
        return [entry.expert for entry in entries if not entry.loading]

    def survey(self, wanted: Collection[int]) -> Survey:
        """How ``wanted``, distinct experts, stand; changes nothing."""
        resident: list[Entry] = []
        aside: list[Entry] = []
        missing: list[int] = []
        for expert in wanted:
            if (entry := self._residents.get(expert)) is not None:
                resident.append(entry)
            elif (entry := self._aside.get(expert)) is not None:
                aside.append(entry)
            else:
                missing.append(expert)
        if len(resident) == len(wanted):
            return Survey(resident, aside, missing, 0, True)
        new = len(aside) + len(missing)
        evictions = max(0, len(self._residents) + new - self.slots)
        idle = len(self._residents) - self._busy - sum(not entry.busy for entry in resident)
        droppable = (
            len(self._aside) - self._aside_loading - sum(not entry.loading for entry in aside)
        )
        fits = evictions <= idle and len(missing) <= len(self._free) + evictions + droppable
        return Survey(resident, aside, missing, evictions, fits)

    def admit(self, survey: Survey, wanted: Collection[int], pinned: list[Entry]) -> None:
        """Make all of ``wanted`` resident and append their entries, held, to ``pinned``.

        The survey must be of now, and fit. Hits are touched and held first, so that no miss evicts
        what the same list needs. On an error ``pinned`` says what is to be undone.
        """
        self._policy.tick()
        for entry in survey.resident:
            self._use(entry)
            self._policy.touch(entry.expert)
            self._pin(entry, pinned)
        for _ in range(survey.evictions):
            self._evict()
        promoted = {entry.expert: self._leave_aside(entry) for entry in survey.aside}
        for expert in wanted:
            if expert in self._residents:
                continue
            entry = promoted.get(expert) or Entry(expert, self._take(), Purpose.DEMAND)
            self._settle_in(entry)
            self._policy.touch(expert)
            self._use(entry)
            self._pin(entry, pinned)

    def place_ahead(self, expert: int, purpose: Purpose, keep: Collection[int]) -> Entry | None:
        """A slot to read ``expert`` into ahead of its use; None where there is none to spare.

        Residents stay. What stands aside may go, ``keep`` excepted: for a certain use whatever is
        oldest, for a guess an older guess only. A warm start takes free slots only.
        """
        if expert in self._residents or expert in self._aside:
            return None
        if purpose is Purpose.WARM:
            room = bool(self._free) and len(self._residents) + self._aside_loading < self.slots
        else:  # of more reads than quarantine slots, a demand would have to wait for one
            room = self._aside_loading < self.quarantine
            room = room and (bool(self._free) or self._drop_oldest(purpose, keep))
        if not room:
            return None
        entry = self._aside[expert] = Entry(expert, self._free.pop(), purpose)
        self._aside_loading += 1
        count = self._ahead[purpose]
        count.issued += 1
        count.bytes += self._nbytes[expert]
        return entry

    def finish(self, expert: int, error: BaseException | None) -> bool | None:
        """A read is over: the expert is complete, or it has no slot any more.

        Returns
        -------
        True if it became resident, False if it was; None: the residents are the same
        """
        entry = self._residents.get(expert)
        if entry is None:
            return self._finish_aside(self._aside[expert], error)
        entry.loading = False
        if error is not None:
            entry.error = error
            del self._residents[expert]
            self._policy.remove(expert)
            self._free.append(entry.slot)
        if error is not None or not entry.pins:
            self._busy -= 1
        return None if error is None else False

    def unpin(self, entry: Entry) -> None:
        """End a lease's hold."""
        entry.pins -= 1
        self.pins -= 1
        if entry.error is None and not entry.busy:
            self._busy -= 1

    def rest(self) -> None:
        """A dispatch has been served, and nobody waits."""
        self._policy.rest()

    def describe(self) -> str:
        """What keeps the slots, in words."""
        held = sorted(
            (entry for entry in (*self._residents.values(), *self._aside.values()) if entry.busy),
            key=lambda entry: entry.slot,
        )
        told = [
            f"slot {e.slot} is {'loading' if e.loading else 'leased with'} expert {e.expert}"
            for e in held[:_TOLD]
        ]
        if len(held) > _TOLD:
            told.append(f"and {len(held) - _TOLD} more")
        return ", ".join(told)

    # ------------------------------------------------------------------ one step each

    def _pin(self, entry: Entry, pinned: list[Entry]) -> None:
        if not entry.busy:
            self._busy += 1
        entry.pins += 1
        self.pins += 1
        pinned.append(entry)

    def _use(self, entry: Entry) -> None:
        """What was read ahead has been of use, once."""
        if entry.purpose is not Purpose.DEMAND:
            count = self._ahead[entry.purpose]
            count.used += 1
            count.late += entry.loading
            count.bytes_used += self._nbytes[entry.expert]
            entry.purpose = Purpose.DEMAND

    def _settle_in(self, entry: Entry) -> None:
        self._residents[entry.expert] = entry
        self._busy += entry.loading
        self._policy.insert(entry.expert)

    def _evict(self) -> None:
        victim = self._policy.victim(self._evictable)
        if victim is None:
            raise CacheError("the cache policy names nothing to evict; this is a bug in ds4q")
        self._policy.remove(victim)
        entry = self._residents.pop(victim)
        self._free.append(entry.slot)
        if entry.purpose is not Purpose.DEMAND:
            self._ahead[entry.purpose].dropped += 1

    def _evictable(self, expert: int) -> bool:
        return not self._residents[expert].busy

    def _take(self) -> int:
        if not self._free:
            self._drop_oldest(Purpose.CERTAIN, ())
        return self._free.pop()

    def _drop_oldest(self, purpose: Purpose, keep: Collection[int]) -> bool:
        """Give up what stands aside, complete and unused, for ``purpose``. Whether any did."""
        for entry in self._aside.values():
            sparable = purpose is Purpose.CERTAIN or entry.purpose is Purpose.SPECULATIVE
            if sparable and not entry.loading and entry.expert not in keep:
                self._drop(entry)
                return True
        return False

    def _drop(self, entry: Entry) -> None:
        del self._aside[entry.expert]
        self._free.append(entry.slot)
        self._ahead[entry.purpose].dropped += 1

    def _leave_aside(self, entry: Entry) -> Entry:
        del self._aside[entry.expert]
        self._aside_loading -= entry.loading
        return entry

    def _finish_aside(self, entry: Entry, error: BaseException | None) -> bool | None:
        self._aside_loading -= 1
        entry.loading = False
        if error is not None:
            entry.error = error
            self._ahead[entry.purpose].failed += 1
            self._drop(entry)
        elif entry.purpose is Purpose.WARM:
            if len(self._residents) < self.slots:
                self._settle_in(self._leave_aside(entry))
                return True
            self._drop(entry)
        return None
