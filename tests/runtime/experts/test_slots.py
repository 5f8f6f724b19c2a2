"""Slots: their memory, and their life cycle against a model that keeps plain sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.catalogue import ALIGN, Geometry, Key
from ds4q.runtime.experts.ledger import Ledger
from ds4q.runtime.experts.policy import make_policies
from ds4q.runtime.experts.reading import Purpose
from ds4q.runtime.experts.slots import Entry, HostSlots, LayerSlots
from tests.checks import check_refused

EXPERTS = 9
SLOTS = 4
QUARANTINE = 2


class Part:
    """A tensor of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Sized:
    """A record of three lengths."""

    def __init__(self, layer: int, gate: int, up: int, down: int) -> None:
        self.key = Key(layer, 0)
        self.gate, self.up, self.down = Part(gate), Part(up), Part(down)


# ---------------------------------------------------------------------- memory


def test_slots_lie_where_geometry_says_and_do_not_overlap() -> None:
    geometry = [Geometry(512, 1024, 256), Geometry(256, 512, 768)]
    slots = HostSlots(geometry, [3, 2])
    records: list[Any] = [Sized(0, 500, 512, 200), Sized(1, 256, 100, 700)]
    placed = [
        (record, slot) for record, n in zip(records, (3, 2), strict=True) for slot in range(n)
    ]
    for value, (record, slot) in enumerate(placed, 1):
        for part in slots.views(record, slot):
            part[:] = value
    for value, (record, slot) in enumerate(placed, 1):
        views = slots.views(record, slot)
        assert [len(v) for v in views] == [record.gate.nbytes, record.up.nbytes, record.down.nbytes]
        assert all(np.all(view == value) for view in views)
        assert all(view.ctypes.data % ALIGN == 0 for view in views)
        gate, up, _ = views
        layer = geometry[record.key.layer]
        assert up.ctypes.data - gate.ctypes.data == layer.up_at


@pytest.mark.parametrize("count", [0, -3])
def test_no_slots_are_no_memory(count: int) -> None:
    slots = HostSlots([Geometry(256, 512, 256)], [count])
    record: Any = Sized(0, 256, 256, 256)
    assert [len(view) for view in slots.views(record, 0)] == [0, 0, 0]


def test_memory_that_cannot_be_had_is_an_error() -> None:
    slots = 1 << 40
    check_refused(
        CacheError,
        lambda: HostSlots([Geometry(256, 512, 256)], [slots]),
        says=[f"{slots * 768:,} bytes", "--expert-cache"],
    )


def test_a_policy_that_names_nothing_is_an_error() -> None:
    class Mute:
        def victim(self, allowed: object) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    policy: Any = Mute()
    layer = LayerSlots(1, 0, policy, [1] * 4, Ledger(None).ahead)
    layer.admit(layer.survey([0]), [0], [])
    layer.finish(0, None)
    layer.unpin(layer.survey([0]).resident[0])
    with pytest.raises(CacheError, match="names nothing to evict"):
        layer.admit(layer.survey([1]), [1], [])


# ---------------------------------------------------------------------- life cycle


class Life(RuleBasedStateMachine):
    """Random lives. The model: who is resident, aside, loading, and how often held."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(None)
        self.layer = LayerSlots(
            SLOTS,
            QUARANTINE,
            make_policies("lru", 1, SLOTS, EXPERTS)[0],
            [10] * EXPERTS,
            self.ledger.ahead,
        )
        self.resident: set[int] = set()
        self.aside: dict[int, Purpose] = {}
        self.loading: set[int] = set()
        self.leases: list[list[Entry]] = []

    @property
    def held(self) -> set[int]:
        return {e.expert for lease in self.leases for e in lease if e.error is None}

    @rule(wanted=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=SLOTS, unique=True))
    def acquire(self, wanted: list[int]) -> None:
        busy = self.resident & (self.held | self.loading)
        new = set(wanted) - self.resident
        must_go = max(0, len(self.resident) + len(new) - SLOTS)
        may_go = self.resident - busy - set(wanted)
        missing = new - set(self.aside)
        droppable = set(self.aside) - self.loading - set(wanted)
        free = SLOTS + QUARANTINE - len(self.resident) - len(self.aside)
        survey = self.layer.survey(wanted)
        assert survey.fits == (
            must_go <= len(may_go) and len(missing) <= free + must_go + len(droppable)
        )
        assert set(survey.missing) == missing
        if not survey.fits:
            return
        lease: list[Entry] = []
        self.layer.admit(survey, wanted, lease)
        assert {entry.expert for entry in lease} == set(wanted)
        assert {entry.expert for entry in lease if entry.loading} == missing | (
            self.loading & set(wanted)
        )
        gone = {e for e in self.resident if e not in self.layer._residents}
        assert len(gone) == must_go
        assert gone <= may_go
        self.resident = self.resident - gone | set(wanted)
        lost = {e for e in self.aside if e not in self.layer._aside and e not in wanted}
        assert lost <= droppable
        self.aside = {e: p for e, p in self.aside.items() if e not in lost | set(wanted)}
        self.loading |= missing
        self.leases.append(lease)

    @rule(
        wanted=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3, unique=True),
        purpose=st.sampled_from([Purpose.CERTAIN, Purpose.SPECULATIVE, Purpose.WARM]),
    )
    def read_ahead(self, wanted: list[int], purpose: Purpose) -> None:
        known = self.resident | set(self.aside)
        for expert in wanted:
            before = dict(self.aside)
            entry = self.layer.place_ahead(expert, purpose, wanted)
            lost = {e for e in before if e not in self.layer._aside}
            assert not lost & self.loading
            assert not lost & set(wanted)
            assert purpose is Purpose.CERTAIN or all(
                before[e] is Purpose.SPECULATIVE and purpose is Purpose.SPECULATIVE for e in lost
            )
            self.aside = {e: p for e, p in self.aside.items() if e not in lost}
            if entry is not None:
                assert expert not in known
                self.aside[expert] = purpose
                self.loading.add(expert)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), fails=st.booleans())
    def read_ends(self, data: st.DataObject, fails: bool) -> None:
        expert = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.remove(expert)
        purpose = self.aside.get(expert)
        came = self.layer.finish(expert, OSError() if fails else None)
        stays = purpose is Purpose.WARM and not fails and len(self.resident) < SLOTS
        assert came is (True if stays else False if fails and expert in self.resident else None)
        if stays:
            self.resident.add(expert)
        if fails or purpose is Purpose.WARM:
            self.aside.pop(expert, None)
        if fails:
            self.resident.discard(expert)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.leases) - 1))
        for entry in self.leases.pop(number):
            self.layer.unpin(entry)

    @invariant()
    def books_are_right(self) -> None:
        layer = self.layer
        assert set(layer._residents) == self.resident
        assert set(layer._aside) == set(self.aside)
        entries = [*layer._residents.values(), *layer._aside.values()]
        assert {entry.expert for entry in entries if entry.loading} == self.loading
        assert set(layer.filled) == (self.resident | set(self.aside)) - self.loading
        places = [entry.slot for entry in entries] + layer._free
        assert sorted(places) == list(range(SLOTS + QUARANTINE))
        assert layer._busy == len(self.resident & (self.held | self.loading))
        assert layer.pins == sum(len(lease) for lease in self.leases)
        assert len(self.resident) <= SLOTS

    @invariant()
    def leased_experts_stay(self) -> None:
        assert self.held <= self.resident
        for entry in (e for lease in self.leases for e in lease if e.error is None):
            assert self.layer._residents[entry.expert] is entry

    @invariant()
    def reads_ahead_add_up(self) -> None:
        unused = sum(
            entry.purpose is not Purpose.DEMAND
            for entry in (*self.layer._residents.values(), *self.layer._aside.values())
        )
        counts = self.ledger.ahead.values()
        assert sum(c.issued - c.used - c.dropped for c in counts) == unused
        assert all(0 <= c.late <= c.used and 0 <= c.failed <= c.dropped for c in counts)

    @invariant()
    def messages_name_what_is_held(self) -> None:
        told = self.layer.describe()
        for expert in self.held | self.loading:
            assert f"expert {expert}" in told


Life.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestLife = Life.TestCase
