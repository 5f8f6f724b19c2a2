"""Every expert belongs to one rank, whatever does not divide."""

from __future__ import annotations

import pytest

from ds4q.runtime.errors import OwnershipError
from ds4q.runtime.experts.ownership import ExpertOwnership
from tests.checks import check_refused


@pytest.mark.parametrize("experts", [0, 1, 7, 8, 256])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7, 9])
def test_each_expert_belongs_to_exactly_one_rank(experts: int, ranks: int) -> None:
    parts = [ExpertOwnership.of_rank(rank, ranks, experts) for rank in range(ranks)]
    assert [e for part in parts for e in part.owned] == list(range(experts))
    for expert in range(experts):
        assert sum(part.owns(expert) for part in parts) == 1
    sizes = [len(part.owned) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_seven_experts_over_four_ranks() -> None:
    parts = [ExpertOwnership.of_rank(rank, 4, 7).owned for rank in range(4)]
    assert parts == [(0, 1), (2, 3), (4, 5), (6,)]


def test_one_rank_owns_all_and_nothing_else() -> None:
    everything = ExpertOwnership.all(7)
    assert everything.owned == tuple(range(7))
    assert not everything.owns(-1)
    assert not everything.owns(7)


@pytest.mark.parametrize("experts", [0, -1])
def test_of_no_experts_nothing_is_owned(experts: int) -> None:
    assert ExpertOwnership.all(experts).owned == ()
    assert not ExpertOwnership.of_rank(1, 2, experts).owns(0)


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0), (0, -1)])
def test_a_rank_that_is_not_there_is_refused(rank: int, ranks: int) -> None:
    check_refused(
        OwnershipError,
        lambda: ExpertOwnership.of_rank(rank, ranks, 8),
        says=[f"expected 0 to {ranks - 1}", f"found {rank}"],
    )
