"""Mistakes made on purpose in the pager: each turns a test red that is green without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ds4q.runtime.errors import RunError
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.reading import Purpose
from ds4q.runtime.experts.slots import Entry, LayerSlots
from tests.runtime.experts import fakes
from tests.runtime.experts import test_pager as plan
from tests.runtime.experts import test_pager_ahead as ahead

Patch = pytest.MonkeyPatch
RED = (AssertionError, pytest.fail.Exception, RunError)
PATIENCE_S = 0.3


def resident_before_the_read(patch: Patch) -> None:
    """Leases are given while bytes are still to come."""
    patch.setattr(Pager, "_await_reads", lambda *_: None)


def evicted_lease(patch: Patch) -> None:
    """A lease does not keep its slot."""
    patch.setattr(Entry, "busy", property(lambda self: self.loading))


def evicted_read(patch: Patch) -> None:
    """A read under way does not keep its slot."""
    patch.setattr(Entry, "busy", property(lambda self: self.pins > 0))


def hits_after_misses(patch: Patch) -> None:
    """Room is made before what the same list needs is touched and held."""
    admit = LayerSlots.admit

    def misses_first(self: LayerSlots, survey: Any, wanted: Any, pinned: Any) -> None:
        for _ in range(survey.evictions):
            self._evict()
        admit(self, self.survey(wanted), wanted, pinned)

    patch.setattr(LayerSlots, "admit", misses_first)


def failed_read_leaves_its_key(patch: Patch) -> None:
    """Who waits hears of the error, and the expert seems to be there."""
    finish = LayerSlots.finish

    def keep(self: LayerSlots, expert: int, error: BaseException | None) -> None:
        entry = self._residents[expert]
        finish(self, expert, None)
        entry.error = error

    patch.setattr(LayerSlots, "finish", keep)


def failed_read_is_not_told(patch: Patch) -> None:
    """What failed counts as read."""
    finish = LayerSlots.finish
    patch.setattr(LayerSlots, "finish", lambda self, expert, error: finish(self, expert, None))


def waiters_left_asleep(patch: Patch) -> None:
    """A lease that ends wakes nobody."""
    patch.setattr(Pager, "_release", lambda self, layer, held, event: self._unpin(layer, held))


def kernels_are_not_waited_for(patch: Patch) -> None:
    """A lease ends when it is given back, not when its event comes."""
    release = Pager._release
    patch.setattr(
        Pager, "_release", lambda self, layer, held, event: release(self, layer, held, None)
    )


def guesses_evict_residents(patch: Patch) -> None:
    """Reads ahead take what slot they want."""
    place = LayerSlots.place_ahead

    def greedy(self: LayerSlots, expert: int, purpose: Purpose, keep: Any) -> Entry | None:
        if not self._free:
            self._evict()
        return place(self, expert, purpose, keep)

    patch.setattr(LayerSlots, "place_ahead", greedy)


def quarantine_has_no_bound(patch: Patch) -> None:
    """More reads ahead are under way than demands leave slots for."""
    place = LayerSlots.place_ahead

    def unbounded(self: LayerSlots, expert: int, purpose: Purpose, keep: Any) -> Entry | None:
        self.quarantine = self.slots
        return place(self, expert, purpose, keep)

    patch.setattr(LayerSlots, "place_ahead", unbounded)


def everything_is_owned(patch: Patch) -> None:
    """A rank pages what others own."""
    patch.setattr(ExpertOwnership, "owns", lambda self, expert: True)


def ids_are_clamped(patch: Patch) -> None:
    """A router's nonsense becomes an expert."""
    wanted = Pager._wanted

    def clamp(self: Pager, layer: int, ids: Any) -> Any:
        return wanted(self, layer, [min(max(expert, 0), 15) for expert in ids])

    patch.setattr(Pager, "_wanted", clamp)


MUTANTS: list[tuple[Callable[[Patch], None], Callable[..., None], tuple[Any, ...]]] = [
    (resident_before_the_read, plan.test_reads_that_do_not_come_back_are_an_error, ()),
    (evicted_lease, plan.test_a_slot_that_stays_in_use_is_an_error_that_names_the_slots, ()),
    (evicted_read, plan.test_a_read_that_nobody_waits_for_keeps_its_slot, ()),
    (hits_after_misses, plan.test_hits_are_touched_before_misses_are_placed, ()),
    (failed_read_leaves_its_key, plan.test_a_failed_read_leaves_nothing_and_wakes_all, ()),
    (failed_read_is_not_told, plan.test_a_failed_read_leaves_nothing_and_wakes_all, ()),
    (waiters_left_asleep, plan.test_a_slot_in_use_is_never_taken, ()),
    (kernels_are_not_waited_for, plan.test_a_slot_waits_for_the_kernels_that_read_it, ()),
    (guesses_evict_residents, ahead.test_reads_ahead_displace_nobody, (Purpose.SPECULATIVE,)),
    (quarantine_has_no_bound, ahead.test_no_more_is_under_way_than_quarantine_holds, ()),
    (everything_is_owned, plan.test_experts_of_other_ranks_are_left_out, ()),
    (ids_are_clamped, plan.test_an_expert_out_of_range_is_an_error_and_changes_nothing, (-1,)),
]


@pytest.mark.parametrize(
    ("mutate", "walk", "given"), MUTANTS, ids=lambda v: getattr(v, "__name__", "")
)
def test_mistakes_show(
    mutate: Callable[[Patch], None],
    walk: Callable[..., None],
    given: tuple[Any, ...],
    monkeypatch: Patch,
) -> None:
    walk(*given)
    monkeypatch.setattr(fakes, "PATIENCE_S", PATIENCE_S)
    mutate(monkeypatch)
    with pytest.raises(RED):
        walk(*given)
