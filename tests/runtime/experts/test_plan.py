"""Slots from bytes: published figures, what is left for reads ahead, and every refusal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.catalogue import Geometry
from ds4q.runtime.experts.plan import Plan, plan_slots
from tests.checks import check_refused

GIB = 1 << 30
MQ2 = Geometry(2359296, 4718592, 2359296)  # of 4096 x 2048, as MQ2Lloyd
HFP4 = Geometry(4489216, 8978432, 4521984)
FLASH = SimpleNamespace(
    num_hidden_layers=43,
    n_routed_experts=256,
    num_experts_per_tok=6,
    is_hash_layer=lambda layer: layer < 3,
)


def catalogue(geometry: Geometry) -> Any:
    return SimpleNamespace(
        path="m.hfq", geometry=(geometry,) * 43, slot_bytes=43 * geometry.nbytes, experts=256
    )


def planned(
    geometry: Geometry,
    *,
    owned: int = 256,
    needed: int = 0,
    free: int | None = 1 << 50,
    **asked: Any,
) -> Plan:
    def available() -> int:
        if free is None:
            raise CacheError("cannot tell")
        return free

    options: Any = SimpleNamespace(
        **{"budget": None, "slots": None, "adapter": None, "prefetch_top": None} | asked
    )
    config: Any = FLASH
    return plan_slots(
        catalogue(geometry), config, options, owned=owned, needed=needed, available=available
    )


@pytest.mark.parametrize(
    ("gib", "mq2", "hfp4"),
    [
        (4, 14, 7),
        (8, 28, 14),
        (16, 56, 29),
        (24, 84, 44),
        (32, 112, 59),
        (64, 225, 118),
        (70, 246, 129),
    ],
)
def test_published_numbers_of_slots(gib: int, mq2: int, hfp4: int) -> None:
    assert planned(MQ2, budget=gib * GIB).slots == mq2
    assert planned(HFP4, budget=gib * GIB).slots == hfp4


def test_everything_fits_exactly() -> None:
    whole = 43 * 256 * HFP4.nbytes
    assert planned(HFP4, budget=whole).resident
    short = planned(HFP4, budget=whole - 1)
    assert (short.slots, short.resident) == (255, False)
    assert planned(HFP4, budget=whole // 2, owned=128).resident


def test_hash_layers_read_ahead_into_what_no_whole_slot_fills() -> None:
    per_slot = 43 * MQ2.nbytes
    assert planned(MQ2, budget=10 * per_slot).counts == (10,) * 43
    assert planned(MQ2, budget=10 * per_slot + 3 * MQ2.nbytes - 1).counts == (10,) * 43
    assert planned(MQ2, budget=10 * per_slot + 6 * MQ2.nbytes).counts == (12,) * 3 + (10,) * 40
    assert planned(MQ2, budget=11 * per_slot - 1).counts == (16,) * 3 + (10,) * 40


@pytest.mark.parametrize(("top", "aside"), [(None, 1), (1, 1), (2, 1), (9, 5)])
def test_a_predictor_takes_its_slots_of_the_budget(top: int | None, aside: int) -> None:
    budget = 20 * GIB
    plan = planned(MQ2, budget=budget, adapter=Path("a"), prefetch_top=top)
    assert plan.quarantine == (6,) * 3 + (aside,) * 40
    used = sum(plan.counts) * MQ2.nbytes
    assert used <= budget < used + 43 * MQ2.nbytes


def test_a_number_of_slots_pages_even_where_all_fit() -> None:
    plan = planned(MQ2, slots=256)
    assert (plan.slots, plan.resident, plan.quarantine[:4]) == (256, False, (6, 6, 6, 0))
    for slots in (5, 257):
        check_refused(
            CacheError, partial(planned, MQ2, slots=slots), path="m.hfq", says=["6 to 256"]
        )
    assert planned(MQ2, slots=3, owned=3).slots == 3


@pytest.mark.parametrize("budget", [0, 1, 6 * 43 * MQ2.nbytes - 1])
def test_below_the_minimum_names_it(budget: int) -> None:
    least = 6 * 43 * MQ2.nbytes
    check_refused(
        CacheError,
        lambda: planned(MQ2, budget=budget),
        path="m.hfq",
        says=[
            "6 slots",
            f"{least:,} bytes",
            f"{budget:,} bytes",
            f"--expert-cache {least} or more",
        ],
    )
    assert planned(MQ2, budget=least).slots == 6


def test_a_predictor_needs_more_than_the_minimum() -> None:
    least = 6 * 43 * MQ2.nbytes
    ahead = (3 * 6 + 40 * 1) * MQ2.nbytes
    check_refused(
        CacheError,
        lambda: planned(MQ2, budget=least, adapter=Path("a")),
        path="m.hfq",
        says=[f"prefetch {ahead:,} bytes", f"--expert-cache {least + ahead} or more"],
    )
    assert planned(MQ2, budget=least + ahead, adapter=Path("a")).slots == 6


def test_more_guesses_than_experts_are_refused() -> None:
    plan = planned(MQ2, budget=64 * GIB, adapter=Path("a"), prefetch_top=256)
    assert plan.quarantine[3:] == (128,) * 40
    for asked in ({"budget": 64 * GIB}, {"slots": 200}, {"budget": "auto"}):
        check_refused(
            CacheError,
            partial(planned, MQ2, adapter=Path("a"), prefetch_top=257, **asked),
            path="m.hfq",
            says=["at most 256", "257"],
        )


def test_larger_than_memory_names_both() -> None:
    check_refused(
        CacheError,
        lambda: planned(MQ2, budget=9 * GIB, free=10 * GIB, needed=2 * GIB),
        says=[f"{8 * GIB:,}", f"{9 * GIB:,}"],
    )
    assert planned(MQ2, budget=9 * GIB, free=None).slots == 31  # nobody can tell: as it is given


def test_auto_leaves_the_rest_of_the_model_and_a_reserve() -> None:
    plan = planned(MQ2, budget="auto", free=100 * GIB, needed=20 * GIB)
    assert plan.slots == (100 - 20 - 8) * GIB // (43 * MQ2.nbytes)
    small = planned(MQ2, budget="auto", free=16 * GIB, needed=2 * GIB)
    assert small.slots == (16 - 2 - 2) * GIB // (43 * MQ2.nbytes)
    assert planned(MQ2, budget="auto", free=200 * GIB).resident
    check_refused(
        CacheError,
        lambda: planned(MQ2, budget="auto", free=10 * GIB, needed=8 * GIB),
        says=[f"{8 * GIB:,} for the rest", f"{6 * 43 * MQ2.nbytes:,} for experts"],
    )
    check_refused(CacheError, lambda: planned(MQ2, budget="auto", free=None), says=["cannot tell"])


def test_a_predictor_and_little_memory_end_in_one_answer() -> None:
    """The size that one refusal names is not refused by the next."""
    least = (6 * 43 + 3 * 6 + 40) * MQ2.nbytes
    room: dict[str, Any] = {"adapter": Path("a"), "free": least + GIB, "needed": GIB}
    error = check_refused(CacheError, lambda: planned(MQ2, budget="auto", **room))
    size = int(str(error.remedy).split("--expert-cache ")[1].rstrip(")"))
    assert size == least
    assert planned(MQ2, budget=size, **room).slots == 6
