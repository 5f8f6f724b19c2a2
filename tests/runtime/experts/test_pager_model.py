"""The pager against a list that is kept in the order of use, whatever is read ahead beside it."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.runtime.experts.catalogue import Key
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.reading import Purpose
from tests.runtime.experts.fakes import PATIENCE_S, ByThread, Memory, Numbered

EXPERTS = 12
SLOTS = 4
QUARANTINE = 2

Step = tuple[Purpose, list[int]]

steps = st.lists(
    st.tuples(
        st.sampled_from([Purpose.DEMAND, Purpose.DEMAND, Purpose.CERTAIN, Purpose.SPECULATIVE]),
        st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=SLOTS),
    ),
    max_size=30,
)


class Recent:
    """Least recently used, as simple as can be."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def ask(self, ids: list[int]) -> set[int]:
        """Which of ``ids`` were not there."""
        wanted = list(dict.fromkeys(ids))
        hits = [e for e in wanted if e in self.kept]
        new = [e for e in wanted if e not in self.kept]
        self.kept = [e for e in self.kept if e not in hits] + hits
        self.kept = self.kept[max(0, len(self.kept) + len(new) - SLOTS) :] + new
        return set(new)


def run(walk: list[Step]) -> None:
    catalogue: Any = Numbered(EXPERTS)
    memory = Memory(catalogue, SLOTS + QUARANTINE)
    transport = ByThread(memory)
    pager = Pager(
        catalogue, SLOTS, transport, policy="lru", quarantine=[QUARANTINE], timeout_s=PATIENCE_S
    )
    model, asked, new = Recent(), 0, 0
    try:
        for purpose, ids in walk:
            if purpose is not Purpose.DEMAND:
                pager.prefetch(0, ids, purpose)
                continue
            asked += len(set(ids))
            new += len(model.ask(ids))
            with pager.acquire(0, ids, "decode") as lease:
                assert set(lease.slots) == set(ids)
                assert all(memory.holds(Key(0, e), slot) for e, slot in lease.slots.items())
        counts = pager.counters()
        demand, ahead = counts["decode"], counts["prefetch"]
        assert demand["hits"] == asked - new
        assert demand["compulsory"] + demand["misses"] == new - ahead["used"]
        assert demand["prefetched"] == ahead["used"] <= ahead["issued"]
    finally:
        pager.close()


@settings(max_examples=60)
@given(steps)
def test_reads_ahead_save_demands_and_change_nothing_else(walk: list[Step]) -> None:
    """Demand reads are those of a cache without reads ahead, less those that were of use."""
    run(walk)
