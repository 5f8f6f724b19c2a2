"""The pager: what is planned, who waits, what is undone. All by hand, in a known order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ds4q.artifact.errors import TruncatedError
from ds4q.runtime.errors import (
    BandError,
    ExpertRangeError,
    ExpertReadError,
    SlotTimeoutError,
    TransportClosedError,
)
from ds4q.runtime.experts import pager as module
from ds4q.runtime.experts.catalogue import Key
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.policy import make_policies
from ds4q.runtime.experts.reading import Purpose
from tests.checks import check_refused
from tests.runtime.experts.fakes import NBYTES, Bench, bench

SHORT_S = 0.02


def counted(made: Bench, phase: str = "decode") -> dict[str, int]:
    """What of a phase is not 0, without times."""
    counts = made.pager.counters()[phase]
    return {name: n for name, n in counts.items() if n and name != "wait_s"}


# ---------------------------------------------------------------------- what is read


def test_what_is_there_is_not_read_again() -> None:
    with bench(slots=3) as made:
        assert made.use(5, 2, 5) == [5, 2]
        assert made.use(2, 7) == [7]
        assert made.use(5, 2, 7) == []
        assert counted(made) == {
            "accesses": 8,
            "distinct": 7,
            "hits": 4,
            "compulsory": 3,
            "bytes": 3 * NBYTES,
        }


def test_what_was_evicted_is_a_miss_and_no_longer_compulsory() -> None:
    with bench(slots=2) as made:
        made.use(1, 2)
        assert made.use(3) == [3]
        assert made.use(1) == [1]
        counts = counted(made)
        assert (counts["compulsory"], counts["misses"], counts["evictions"]) == (3, 1, 2)
        assert counts["bytes"] == 4 * NBYTES


def test_layers_have_slots_of_their_own() -> None:
    with bench(slots=2, layers=2) as made:
        made.use(1, 2, layer=0)
        assert made.use(1, 2, layer=1) == [1, 2]
        assert made.use(1, 2, layer=0) == []


def test_phases_are_counted_apart() -> None:
    with bench(slots=2) as made:
        made.use(1)
        made.pager.acquire(0, [1], "prefill").release()
        assert counted(made, "prefill") == {"accesses": 1, "distinct": 1, "hits": 1}
        assert "hits" not in counted(made)


def test_a_lease_names_a_slot_for_each_expert_and_nothing_once_released() -> None:
    with bench(slots=3) as made:
        with made.hold(4, 9) as lease:
            assert set(lease.slots) == {4, 9}
            assert len(set(lease.slots.values())) == 2
            assert made.pager.counters()["leased"] == 2
        assert lease.slots == {}
        lease.release()
        assert made.pager.counters()["leased"] == 0


def test_hits_are_touched_before_misses_are_placed() -> None:
    """The oldest of two is asked for again, behind a new one: the other must go."""
    with bench(slots=2) as made:
        made.use(1)
        made.use(2)
        assert made.use(3, 1) == [3]
        assert made.use(1, 3) == []


def test_nothing_that_a_list_needs_is_evicted_for_the_same_list() -> None:
    with bench(slots=3) as made:
        made.use(1, 2, 3)
        assert made.use(4, 1, 2) == [4]
        assert made.use(1, 2, 4) == []


class Listening:
    """A policy that writes down what it is told."""

    def __init__(self, inner: Any, heard: list[str]) -> None:
        self._inner, self._heard = inner, heard

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._inner, name)

        def listen(*arguments: Any) -> Any:
            said = [] if name == "victim" else [str(a) for a in arguments]
            self._heard.append(" ".join([name, *said]))
            return call(*arguments)

        return listen


def test_policies_are_asked_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that a replay repeats."""
    heard: list[str] = []
    monkeypatch.setattr(
        module, "make_policies", lambda *a: [Listening(each, heard) for each in make_policies(*a)]
    )
    with bench(slots=3, quarantine=1) as made:
        made.use(1, 2)
        made.pager.prefetch(0, [6], Purpose.SPECULATIVE)
        made.transport.serve_all()
        heard.clear()
        made.use(5, 2, 6)
    assert heard == [
        "tick",
        "touch 2",
        "victim",
        "remove 1",
        "insert 5",
        "touch 5",
        "insert 6",
        "touch 6",
        "rest",
    ]


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("expert", [-1, 16, -9223372036854775808])
def test_an_expert_out_of_range_is_an_error_and_changes_nothing(expert: int) -> None:
    with bench(slots=2) as made:
        made.use(3)
        before = made.pager.counters()
        made.pager._timeout_s = SHORT_S
        for ask in (
            lambda: made.pager.acquire(0, [3, expert], "decode"),
            lambda: made.pager.prefetch(0, [3, expert], Purpose.CERTAIN),
        ):
            check_refused(
                ExpertRangeError,
                ask,
                tensor="layers.0.ffn.experts",
                says=["expected 0 to 15", f"found {expert}"],
            )
        assert made.pager.counters() == before
        assert made.pager.acquire(0, [3], "decode").slots == {3: 0}


@pytest.mark.parametrize("layer", [-1, 1])
def test_a_layer_out_of_range_is_an_error(layer: int) -> None:
    with bench(slots=2) as made:
        check_refused(
            ExpertRangeError,
            lambda: made.pager.acquire(layer, [3], "decode"),
            says=["no such layer", f"found {layer}"],
        )


def test_more_experts_than_slots_are_an_error_and_change_nothing() -> None:
    with bench(slots=2) as made:
        made.use(1, 2)
        check_refused(
            BandError,
            lambda: made.pager.acquire(0, [1, 1, 3, 4], "decode"),
            says=["layer 0", "at most 2", "found 3"],
        )
        assert made.use(1, 2) == []


def test_nothing_asked_for_is_nothing_done() -> None:
    with bench(slots=2) as made:
        with made.pager.acquire(0, [], "decode") as lease:
            assert lease.slots == {}
        assert made.pager.prefetch(0, [], Purpose.CERTAIN) == 0
        assert counted(made) == {}


@pytest.mark.parametrize("slots", [0, -1])
def test_of_no_slots_nothing_can_be_had(slots: int) -> None:
    with bench(slots=slots) as made:
        made.pager.acquire(0, [], "decode").release()
        check_refused(BandError, lambda: made.pager.acquire(0, [1], "decode"))


def test_experts_of_other_ranks_are_left_out() -> None:
    """Of capacity, reads, counts and reads ahead; yet an id that no rank can own is an error."""
    owned = ExpertOwnership.of_rank(1, 4, 16)
    with bench(slots=2, quarantine=4, ownership=owned) as made:
        assert made.use(0, 4, 9, 15, 7, 4) == [4, 7]
        assert counted(made)["accesses"] == 3
        assert made.pager.prefetch(0, [3, 5, 8], Purpose.CERTAIN) == 1
        assert made.pager.prefetch(0, [3, 8], Purpose.WARM) == 0
        with made.pager.acquire(0, [0, 8], "decode") as lease:
            assert lease.slots == {}
        check_refused(ExpertRangeError, lambda: made.pager.acquire(0, [16], "decode"))


# ---------------------------------------------------------------------- waiting


def test_a_lease_comes_only_after_the_last_read() -> None:
    with bench(slots=2) as made:
        caller = made.ask(1, 2)
        made.transport.serve(2)
        assert made.pager.counters()["loading"] == 1
        assert made.pager.counters()["loading_bytes"] == NBYTES
        made.asleep()
        assert caller.waits()
        made.transport.serve(1)
        lease = caller.got()
        assert all(made.memory.holds(Key(0, e), slot) for e, slot in lease.slots.items())
        assert made.pager.counters()["loading_bytes"] == 0
        assert made.pager.counters()["decode"]["wait_s"] > 0


def test_two_requests_for_one_expert_share_a_read() -> None:
    with bench(slots=2) as made:
        first = made.ask(1)
        made.reach(lambda: bool(made.transport.queue))
        second = made.ask(1)
        made.asleep(2)
        assert second.waits()
        made.transport.serve(1)
        assert first.got().slots == second.got().slots
        assert [fill.key.expert for fill in made.transport.started] == [1]
        counts = counted(made)
        assert (counts["compulsory"], counts["hits"]) == (1, 1)


def test_a_slot_in_use_is_never_taken() -> None:
    """Slot 0 loading, slot 1 leased: who asks for a third expert waits until one is released."""
    with bench(slots=2, experts=64) as made:
        leased = made.hold(2)
        loading = made.ask(1)
        made.reach(lambda: bool(made.transport.queue))
        third = made.ask(9)
        made.asleep(2)
        made.transport.serve(1)
        first = loading.got()
        slot = first.slots[1]
        made.asleep()
        assert third.waits()
        assert not made.transport.queue
        assert made.memory.holds(Key(0, 1), slot)
        first.release()
        made.transport.serve(9)
        assert third.got().slots == {9: slot}
        assert made.memory.holds(Key(0, 2), leased.slots[2])


def test_a_slot_that_stays_in_use_is_an_error_that_names_the_slots() -> None:
    with bench(slots=2, experts=64) as made:
        held = made.hold(2)
        loading = made.ask(1)
        made.reach(lambda: bool(made.transport.queue))
        at = made.transport.queue[0].slot
        made.pager._timeout_s = SHORT_S
        check_refused(
            SlotTimeoutError,
            lambda: made.pager.acquire(0, [9], "decode"),
            path="model.hfq",
            says=[
                "layer 0",
                f"slot {at} is loading expert 1",
                f"slot {held.slots[2]} is leased with expert 2",
            ],
        )
        made.transport.serve(1)
        assert made.memory.holds(Key(0, 1), loading.got().slots[1])
        assert counted(made)["compulsory"] == 2


def test_who_waits_for_slots_holds_none() -> None:
    """Two callers that could each take half of what the other needs both come through."""
    with bench(slots=4) as made:
        held = made.hold(0, 1, 2)
        one, other = made.ask(3, 4, 5), made.ask(6, 7, 8)
        made.asleep(2)
        assert made.pager.counters()["leased"] == 3
        assert one.waits()
        assert other.waits()
        held.release()
        made.reach(lambda: len(made.transport.queue) == 3)
        made.transport.serve_all()
        made.reach(lambda: not (one.waits() and other.waits()))
        first, second = (one, other) if not one.waits() else (other, one)
        first.got().release()
        made.reach(lambda: len(made.transport.queue) == 3)
        made.transport.serve_all()
        assert len(second.got().slots) == 3


def test_reads_that_do_not_come_back_are_an_error() -> None:
    with bench(slots=2, timeout_s=SHORT_S) as made:
        check_refused(
            ExpertReadError,
            lambda: made.pager.acquire(0, [4, 6], "decode"),
            path="model.hfq",
            says=["layer 0", "waiting for experts 4, 6"],
        )
        assert made.pager.counters()["leased"] == 0
        made.transport.serve_all()
        assert made.use(4, 6) == []


def test_a_read_that_nobody_waits_for_keeps_its_slot() -> None:
    with bench(slots=1, timeout_s=SHORT_S) as made:
        with pytest.raises(ExpertReadError):
            made.pager.acquire(0, [1], "decode")
        check_refused(
            SlotTimeoutError,
            lambda: made.pager.acquire(0, [2], "decode"),
            says=["slot 0 is loading expert 1"],
        )
        made.transport.serve(1)
        assert made.pager.acquire(0, [1], "decode").slots == {1: 0}


class Work:
    """Kernels that end when a test says so."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


def test_a_slot_waits_for_the_kernels_that_read_it() -> None:
    with bench(slots=2) as made:
        work = Work()
        made.hold(1, 2).release(work)
        assert made.use(1) == []
        waiting = made.ask(3)
        made.asleep()
        assert made.pager.counters()["leased"] == 2
        assert waiting.waits()
        work.over = True
        made.transport.serve(3)
        assert set(waiting.got().slots) == {3}


def test_leases_end_in_the_order_of_their_kernels() -> None:
    with bench(slots=2) as made:
        first, second = Work(), Work()
        made.hold(1).release(first)
        made.hold(2).release(second)
        second.over = True
        assert made.pager.counters()["leased"] == 2
        first.over = True
        assert made.pager.counters()["leased"] == 0


def test_who_goes_does_not_depend_on_how_far_the_device_is() -> None:
    with bench(slots=3) as made:
        work = Work()
        made.hold(1).release(work)
        made.use(2, 3)
        waiting = made.ask(4)
        made.asleep()
        work.over = True
        made.transport.serve(4)
        waiting.got().release()
        assert made.use(2, 3, 4) == []


def test_closing_ends_leases_that_wait_for_kernels() -> None:
    with bench(slots=2) as made:
        made.hold(1).release(Work())
        made.pager.close()
        assert made.pager.counters()["leased"] == 0


# ---------------------------------------------------------------------- what fails


def test_a_failed_read_leaves_nothing_and_wakes_all() -> None:
    with bench(slots=2) as made:
        callers = [made.ask(1)]
        made.reach(lambda: bool(made.transport.queue))
        callers += [made.ask(1), made.ask(1)]
        made.asleep(3)
        made.transport.serve(1, error=TruncatedError("cut", path="model.hfq", tensor="w1"))
        errors = [caller.failed() for caller in callers]
        assert {type(error) for error in errors} == {TruncatedError}
        assert all(str(error).startswith("model.hfq: w1: cut") for error in errors)
        assert len({id(error) for error in errors}) == 3
        assert counted(made)["failed"] == 3
        assert made.pager.counters()["leased"] == 0
        assert made.use(1, 2) == [1, 2]


def test_of_a_band_that_fails_the_reads_that_came_are_kept() -> None:
    with bench(slots=3) as made:
        caller = made.ask(1, 2, 3)
        made.transport.serve(1)
        made.transport.serve(2, error=OSError("gone"))
        made.asleep()
        assert caller.waits()
        made.transport.serve(3)
        error = caller.failed()
        assert isinstance(error, ExpertReadError)
        assert error.tensor == "layers.0.ffn.experts.2"
        assert "gone" in str(error)
        assert made.pager.counters()["leased"] == 0
        assert made.use(1, 2, 3) == [2]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "no memory to read an expert; free memory, or give a smaller --expert"),
        (OSError("gone"), "an expert cannot be read: found OSError: gone; check the disk"),
        (ValueError(), "an expert cannot be read: found ValueError; this is a bug in ds4q"),
    ],
)
def test_what_a_read_failed_of_is_told(error: Exception, says: str) -> None:
    with bench(slots=2) as made:
        caller = made.ask(1)
        made.transport.serve(1, error=error)
        found = caller.failed()
        assert type(found) is ExpertReadError
        assert str(found).startswith(f"model.hfq: layers.0.ffn.experts.1: {says}")


def test_a_failed_read_does_not_keep_its_slot() -> None:
    with bench(slots=2) as made:
        for expert in range(5):
            caller = made.ask(expert)
            made.transport.serve(expert, error=OSError("gone"))
            caller.failed()
        assert made.use(8, 9) == [8, 9]
        assert "evictions" not in counted(made)


def test_a_transport_that_refuses_leaves_nothing() -> None:
    with bench(slots=2, quarantine=1) as made:
        made.use(7)
        made.transport.refuse = RuntimeError("no threads")
        for ask in (
            lambda: made.pager.acquire(0, [7, 1], "decode"),
            lambda: made.pager.prefetch(0, [1], Purpose.CERTAIN),
        ):
            with pytest.raises(RuntimeError, match="no threads"):
                ask()
            assert made.pager.counters()["leased"] == 0
            assert made.pager.counters()["loading_bytes"] == 0
        made.transport.refuse = None
        assert made.use(7, 1) == [1]


def test_a_trace_that_cannot_be_written_leaves_nothing() -> None:
    class Full:
        def dispatch(self, *_: Any, **__: Any) -> None:
            raise OSError("no space")

    recorder: Any = Full()
    with bench(slots=2, recorder=recorder) as made:
        with pytest.raises(OSError, match="no space"):
            made.pager.acquire(0, [1], "decode", module.Dispatch(0, 0, 0, [[1]]))
        assert made.pager.counters()["leased"] == 0
        assert made.use(1) == [1]


def test_closing_wakes_who_waits() -> None:
    with bench(slots=1) as made:
        held = made.hold(1)
        for_slot = made.ask(2)
        made.asleep()
        made.pager.close()
        assert isinstance(for_slot.failed(), TransportClosedError)
        held.release()
        check_refused(TransportClosedError, lambda: made.pager.acquire(0, [1], "decode"))
    with bench(slots=1) as made:
        for_read = made.ask(2)
        made.reach(lambda: bool(made.transport.queue))
        made.pager.close()
        assert isinstance(for_read.failed(), TransportClosedError)
        assert made.transport.closed
