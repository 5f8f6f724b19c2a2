"""Spending bytes: against every choice there is, within the budget, monotone, deterministic."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.quantize.spend import Choice, Spender, Spent

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
SIZES = np.array([10, 10, 14, 14, 17])  # as 107, 106, 104, 105 and FP4 have them
PLAIN = Choice((0, 2, 4))
MIXED = [PLAIN, Choice((0, 1, 2, 4), 1), Choice((0, 2, 3, 4), 2)]


def instance(
    seed: int, groups: int = 3, items: int = 3, *, mixed: bool = True
) -> tuple[F64, I64, list[list[Choice]]]:
    """Losses that fall with bytes, groups of very different weight, uneven sizes by group."""
    rng = np.random.default_rng(seed)
    losses = -np.sort(-rng.random((groups, items, len(SIZES))), axis=2)
    losses[:, :, 4] = 0
    losses *= rng.random((groups, 1, 1)) * 3
    nbytes = np.tile(SIZES, (groups, items, 1)) * rng.integers(1, 3, (groups, 1, 1))
    return losses, nbytes, [MIXED if mixed else [PLAIN] for _ in range(groups)]


def optimum(losses: F64, nbytes: I64, choices: list[list[Choice]], budget: int) -> float:
    """The least loss of all combinations, by dynamic programming over each family."""
    best = np.inf
    for family in itertools.product(*choices):
        reach = {sum(choice.fixed_bytes for choice in family): 0.0}
        for (group, item), _ in np.ndenumerate(losses[:, :, 0]):
            step: dict[int, float] = {}
            for used, loss in reach.items():
                for option in family[group].options:
                    size = used + int(nbytes[group, item, option])
                    total = loss + float(losses[group, item, option])
                    if size <= budget and total < step.get(size, np.inf):
                        step[size] = total
            reach = step
        best = min(best, min(reach.values(), default=np.inf))
    return best


def check_sound(
    spent: Spent, losses: F64, nbytes: I64, choices: list[list[Choice]], budget: int
) -> None:
    """Loss and bytes are those of the options, which one choice for each group allows."""
    loss = np.take_along_axis(losses, spent.options[..., None], 2).sum()
    size = np.take_along_axis(nbytes, spent.options[..., None], 2).sum()
    fixed = []
    for group, some in zip(spent.options, choices, strict=True):
        allowing = [c.fixed_bytes for c in some if set(group.tolist()) <= set(c.options)]
        assert allowing, f"no choice allows {group}"
        fixed.append((min(allowing), max(allowing)))
    assert spent.loss == pytest.approx(loss)
    assert sum(low for low, _ in fixed) <= spent.nbytes - size <= sum(high for _, high in fixed)
    assert spent.nbytes <= budget


@pytest.mark.parametrize("seed", range(40))
def test_close_to_the_best_of_all_combinations(seed: int) -> None:
    losses, nbytes, choices = instance(seed)
    spender = Spender(losses, nbytes, choices)
    for share in (0.0, 0.1, 0.3, 0.6, 0.9, 1.0):
        budget = round(spender.smallest + share * (spender.largest - spender.smallest))
        spent = spender.spend(budget)
        check_sound(spent, losses, nbytes, choices, budget)
        best = optimum(losses, nbytes, choices, budget)
        assert best <= spent.loss + 1e-12
        # What it lacks to the optimum is less than what the step that did not fit would save.
        slack = 0.0 if spent.next_step is None else spent.next_step.saved
        assert spent.loss <= best + slack + 1e-12


@given(st.integers(0, 10_000), st.floats(0, 1))
def test_within_one_step_of_the_best_where_nothing_is_mixed(seed: int, share: float) -> None:
    losses, nbytes, choices = instance(seed, mixed=False)
    spender = Spender(losses, nbytes, choices)
    budget = round(spender.smallest + share * (spender.largest - spender.smallest))
    spent = spender.spend(budget)
    check_sound(spent, losses, nbytes, choices, budget)
    slack = 0.0 if spent.next_step is None else spent.next_step.saved
    assert spent.loss <= optimum(losses, nbytes, choices, budget) + slack + 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_more_bytes_never_give_more_loss(seed: int) -> None:
    losses, nbytes, choices = instance(seed, items=5)
    spender = Spender(losses, nbytes, choices)
    found = [spender.spend(b).loss for b in range(spender.smallest, spender.largest + 2)]
    assert (np.diff(found) < 1e-12).all()
    assert found[-1] == 0


def test_steps_go_by_loss_saved_per_byte() -> None:
    losses = np.array([[[8.0, 4.0, 0.0], [6.0, 1.0, 0.0]]])
    nbytes = np.array([[[10, 14, 16], [10, 14, 16]]])
    spender = Spender(losses, nbytes, [[Choice((0, 1, 2))]])
    # By byte: item 0 saves 8/6 (its middle lies above the hull), item 1 first 5/4, then 1/2.
    assert (spender.smallest, spender.largest) == (20, 32)
    assert spender.spend(26).options.tolist() == [[2, 0]]
    assert spender.spend(30).options.tolist() == [[2, 1]]
    spent = spender.spend(25)
    assert spent.options.tolist() == [[0, 1]], "what fits is taken where the best step does not"
    assert spent.next_step is not None
    assert (spent.next_step.item, spent.next_step.option, spent.next_step.nbytes) == (0, 2, 6)
    assert spent.next_step.saved == 8
    assert spent.last_step is not None
    assert spent.last_step.rate == 5 / 4


def test_equal_steps_go_by_group_and_item() -> None:
    losses = np.tile([2.0, 1.0], (2, 3, 1))
    nbytes = np.tile([1, 2], (2, 3, 1))
    spender = Spender(losses, nbytes, [[Choice((0, 1))]] * 2)
    assert spender.spend(8).options.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert spender.spend(10).options.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_group_has_one_mixed_option() -> None:
    """Option 1 is good for item 0 and option 3 for item 1, but they exclude each other."""
    losses = np.array([[[9, 5, 8, 8, 0], [9, 9, 8, 1, 0]]], np.float64)
    nbytes = np.tile(SIZES, (1, 2, 1))
    spender = Spender(losses, nbytes, [[PLAIN, Choice((0, 1, 2, 4)), Choice((0, 2, 3, 4))]])
    spent = spender.spend(24)
    assert spent.options.tolist() == [[0, 3]]
    assert spent.loss == 10


def test_a_table_must_be_worth_its_bytes() -> None:
    losses = np.array([[[4.0, 3.5, 1.0]]])
    nbytes = np.array([[[10, 10, 12]]])
    dear = Spender(losses, nbytes, [[Choice((0, 2)), Choice((0, 1, 2), 2)]])
    assert dear.smallest == 10
    assert dear.spend(12).options.tolist() == [[2]]
    cheap = Spender(losses, nbytes, [[Choice((0, 2)), Choice((0, 1, 2), 0)]])
    assert cheap.spend(10).options.tolist() == [[1]]


def test_bytes_are_spent_where_nothing_is_saved_either() -> None:
    losses = np.zeros((1, 4, 3))
    nbytes = np.tile([10, 14, 17], (1, 4, 1))
    spender = Spender(losses, nbytes, [[Choice((0, 1, 2))]])
    assert spender.spend(40).nbytes == 40
    assert spender.spend(55).nbytes >= 52
    assert spender.spend(1000).nbytes == 68


def test_items_without_options_are_left_out() -> None:
    losses = np.array([[[np.inf, np.inf], [1.0, 0.0]]])
    nbytes = np.array([[[0, 0], [3, 5]]])
    spent = Spender(losses, nbytes, [[Choice((0, 1))]]).spend(5)
    assert spent.options.tolist() == [[-1, 1]]
    assert (spent.nbytes, spent.loss, spent.next_step) == (5, 0.0, None)


def test_a_budget_below_the_smallest_is_the_callers_mistake() -> None:
    losses, nbytes, choices = instance(0)
    spender = Spender(losses, nbytes, choices)
    with pytest.raises(ValueError, match="fewer than"):
        spender.spend(spender.smallest - 1)


@given(st.integers(0, 10_000))
def test_nearly_collinear_hulls_keep_their_order(seed: int) -> None:
    """Rounding of rates must not take an item's second step without its first."""
    rng = np.random.default_rng(seed)
    start = rng.random((1, 6, 1))
    losses = start * (1 - np.array([0, 1, 2, 3]) / 3) + rng.random((1, 6, 4)) * 1e-16
    nbytes = np.tile([10, 13, 16, 19], (1, 6, 1))
    spender = Spender(losses, nbytes, [[Choice((0, 1, 2, 3))]])
    for budget in range(60, 115, 3):
        check_sound(spender.spend(budget), losses, nbytes, [[Choice((0, 1, 2, 3))]], budget)
