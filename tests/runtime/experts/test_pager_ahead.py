"""Reads ahead of their use: they may waste a read, and never cost a resident its place."""

from __future__ import annotations

import pytest

from ds4q.runtime.experts.catalogue import Key
from ds4q.runtime.experts.reading import Purpose
from tests.runtime.experts.fakes import NBYTES, Bench, bench

CERTAIN, SPECULATIVE, WARM = Purpose.CERTAIN, Purpose.SPECULATIVE, Purpose.WARM
GUESSES = [CERTAIN, SPECULATIVE]


def told(made: Bench, purpose: str) -> dict[str, int]:
    """Counts of a purpose that are not 0."""
    return {name: n for name, n in made.pager.counters()[purpose].items() if n}


def ahead(made: Bench, purpose: Purpose, *experts: int) -> list[int]:
    """Read ahead; which reads were begun. They have come back by then."""
    begun = len(made.transport.started)
    issued = made.pager.prefetch(0, experts, purpose)
    fills = made.transport.started[begun:]
    assert {fill.purpose for fill in fills} <= {purpose}
    if purpose is not WARM:
        assert issued == len(fills)
    made.transport.serve_all()
    return [fill.key.expert for fill in fills]


@pytest.mark.parametrize("purpose", GUESSES)
def test_what_was_read_ahead_is_used_where_it_lies(purpose: Purpose) -> None:
    with bench(slots=2, quarantine=1) as made:
        made.use(1, 2)
        assert ahead(made, purpose, 3) == [3]
        slot = made.transport.started[-1].slot
        with made.hold(3) as lease:
            assert made.read == []
            assert lease.slots == {3: slot}
        counts = made.pager.counters()
        assert counts["decode"]["prefetched"] == 1
        assert counts["decode"]["evictions"] == 1
        assert told(made, purpose.name.lower()) == {
            "issued": 1,
            "used": 1,
            "bytes": NBYTES,
            "bytes_used": NBYTES,
        }
        assert counts["prefetch"] == counts[purpose.name.lower()]
        assert made.use(2, 3) == []


@pytest.mark.parametrize("purpose", GUESSES)
def test_reads_ahead_displace_nobody(purpose: Purpose) -> None:
    with bench(slots=3, quarantine=2) as made:
        made.use(1, 2, 3)
        for guess in range(4, 12):
            ahead(made, purpose, guess)
        assert made.use(1, 2, 3) == []
        assert told(made, purpose.name.lower())["dropped"] == 6


@pytest.mark.parametrize("purpose", GUESSES)
def test_without_quarantine_nothing_is_read_ahead(purpose: Purpose) -> None:
    with bench(slots=3) as made:
        assert ahead(made, purpose, 1) == []
        assert told(made, "prefetch") == {}


def test_a_guess_is_late_when_it_is_asked_for_first() -> None:
    with bench(slots=2, quarantine=1) as made:
        made.use(1, 2)
        made.pager.prefetch(0, [3], SPECULATIVE)
        caller = made.ask(3)
        made.reach(lambda: made.transport.hurried == [Key(0, 3)])
        made.asleep()
        assert caller.waits()
        made.transport.serve(3)
        lease = caller.got()
        assert made.memory.holds(Key(0, 3), lease.slots[3])
        assert told(made, "speculative")["late"] == 1
        assert made.pager.counters()["decode"]["bytes"] == 2 * NBYTES


def test_a_guess_that_fails_under_a_demand_is_the_demands_error() -> None:
    with bench(slots=2, quarantine=1) as made:
        made.pager.prefetch(0, [3], SPECULATIVE)
        caller = made.ask(3)
        made.reach(lambda: made.transport.hurried == [Key(0, 3)])
        made.transport.serve(3, error=OSError("gone"))
        assert "gone" in str(caller.failed())
        assert made.use(3) == [3]


def test_a_guess_that_fails_alone_is_forgotten() -> None:
    with bench(slots=2, quarantine=1) as made:
        made.pager.prefetch(0, [3], CERTAIN)
        made.transport.serve(3, error=OSError("gone"))
        assert told(made, "certain") == {
            "issued": 1,
            "dropped": 1,
            "failed": 1,
            "bytes": NBYTES,
        }
        assert made.use(3) == [3]


@pytest.mark.parametrize("purpose", [*GUESSES, WARM])
def test_what_is_there_or_under_way_is_not_read_ahead(purpose: Purpose) -> None:
    with bench(slots=3, quarantine=3) as made:
        held = made.hold(1)
        made.pager.prefetch(0, [2], SPECULATIVE)
        assert ahead(made, purpose, 1, 2, 2) == []
        assert ahead(made, purpose, 2) == []
        held.release()


def test_guesses_replace_guesses_alone() -> None:
    with bench(slots=1, quarantine=2) as made:
        made.use(1)
        assert ahead(made, SPECULATIVE, 2, 3) == [2, 3]
        assert ahead(made, CERTAIN, 4) == [4]
        assert ahead(made, SPECULATIVE, 5, 6) == [5]
        assert ahead(made, SPECULATIVE, 6) == [6]
        made.use(4)
        counts = made.pager.counters()
        assert counts["certain"]["used"] == 1
        assert counts["speculative"]["dropped"] == 3


def test_certain_reads_replace_the_oldest_but_not_their_own_list() -> None:
    with bench(slots=1, quarantine=2) as made:
        made.use(1)
        assert ahead(made, CERTAIN, 2, 3) == [2, 3]
        assert ahead(made, CERTAIN, 2, 4, 5) == [4]
        made.use(2)
        made.use(4)
        assert told(made, "certain")["used"] == 2
        assert ahead(made, CERTAIN, 6, 7, 8) == [6, 7]


def test_no_more_is_under_way_than_quarantine_holds() -> None:
    """So a demand always finds a slot of its own, however many are free."""
    with bench(slots=4, quarantine=1) as made:
        assert made.pager.prefetch(0, [1, 2, 3], CERTAIN) == 1
        assert made.pager.prefetch(0, [2], SPECULATIVE) == 0
        caller = made.ask(4, 5, 6, 7)
        for expert in (7, 6, 5, 4):
            made.transport.serve(expert)
        assert len(caller.got().slots) == 4
        made.transport.serve(1)


def test_free_slots_are_lent_until_a_demand_wants_them() -> None:
    with bench(slots=3, quarantine=1) as made:
        for guess in (1, 2, 3, 4):
            ahead(made, CERTAIN, guess)
        assert made.use(3, 4) == []
        assert made.use(5) == [5]
        assert told(made, "certain")["dropped"] == 1
        assert made.use(2) == []
        assert told(made, "certain")["used"] == 3


# ---------------------------------------------------------------------- warm start


def test_a_warm_start_fills_free_slots_and_is_counted_apart() -> None:
    with bench(slots=3) as made:
        assert made.pager.prefetch(0, [1, 2, 3, 4], WARM) == 4
        assert len(made.transport.queue) == 3
        made.transport.serve_all()
        assert [fill.key.expert for fill in made.transport.started] == [1, 2, 3]
        assert made.use(2, 1) == []
        assert made.use(1) == []
        counts = made.pager.counters()
        assert (counts["decode"]["warm_hits"], counts["decode"]["hits"]) == (2, 1)
        assert made.use(8, 9) == [8, 9]
        assert told(made, "warm") == {
            "issued": 3,
            "used": 2,
            "dropped": 1,
            "bytes": 3 * NBYTES,
            "bytes_used": 2 * NBYTES,
        }


def test_a_warm_start_yields_to_demands_and_goes_on_behind_them() -> None:
    with bench(slots=8) as made:
        caller = made.ask(1)
        made.reach(lambda: bool(made.transport.queue))
        made.pager.prefetch(0, [2, 3, 4, 5, 6, 7, 8, 9], WARM)
        assert [fill.key.expert for fill in made.transport.queue] == [1]
        made.transport.serve(1)
        caller.got()
        assert [fill.key.expert for fill in made.transport.queue] == [2]
        made.transport.serve_all()
        assert told(made, "warm")["issued"] == 7


def test_demands_cancel_what_of_a_warm_start_has_no_room_any_more() -> None:
    with bench(slots=3) as made:
        caller = made.ask(1, 2)
        made.reach(lambda: len(made.transport.queue) == 2)
        made.pager.prefetch(0, [3, 4, 5], WARM)
        made.transport.serve_all()
        caller.got().release()
        assert [fill.key.expert for fill in made.transport.started] == [1, 2, 3]


def test_a_warm_read_that_demands_left_no_room_for_is_dropped() -> None:
    with bench(slots=2, quarantine=1) as made:
        made.pager.prefetch(0, [1], WARM)
        caller = made.ask(2, 3)
        made.transport.serve(2)
        made.transport.serve(3)
        caller.got().release()
        made.transport.serve(1)
        assert told(made, "warm") == {"issued": 1, "dropped": 1, "bytes": NBYTES}
        assert made.use(2, 3) == []


def test_a_warm_read_still_under_way_serves_the_demand() -> None:
    with bench(slots=2) as made:
        made.pager.prefetch(0, [1], WARM)
        caller = made.ask(1)
        made.reach(lambda: made.transport.hurried == [Key(0, 1)])
        made.transport.serve(1)
        assert set(caller.got().slots) == {1}
        assert made.pager.counters()["decode"]["prefetched"] == 1
        assert told(made, "warm")["late"] == 1


def test_closing_ends_a_warm_start() -> None:
    with bench(slots=8) as made:
        made.pager.prefetch(0, range(8), WARM)
        made.pager.close()
        assert len(made.transport.started) == 4
        assert made.pager.counters()["warm"]["failed"] == 4
