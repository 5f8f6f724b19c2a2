"""Owns spending bytes: one option for each item, least loss within a budget. Knows no types.

Items are experts' parts and options are types, but only losses and bytes are looked at. Items of
one group share a choice that opens some options, closes others and may cost bytes of its own: which
mixed type has a table there. A family is a choice for every group. Within a family the answer is
the greedy one on lower convex hulls: steps in the order of loss saved per byte until the budget is
spent; a step that does not fit is left out, with the later ones of its item. The families tried are
those that a price per byte would choose, at any price, and the best answer of all is taken: more
bytes never give more loss, and nothing depends on chance or on threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

Family = tuple[int, ...]
Hull = list[tuple[int, float, int]]  # (bytes, loss, option): bytes rising, savings per byte falling


@dataclass(frozen=True, slots=True)
class Choice:
    """What a group may be: the options that its items can have, and what the choice costs."""

    options: tuple[int, ...]
    fixed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """From one option of an item to its next: what it costs and what it saves."""

    group: int
    item: int
    option: int
    nbytes: int
    saved: float

    @property
    def rate(self) -> float:
        """Loss saved per byte."""
        return self.saved / self.nbytes


@dataclass(frozen=True, slots=True)
class Spent:
    """A choice for every item.

    Attributes
    ----------
    options : (groups, items), the option of each; -1 for an item that has none
    nbytes : of all items and of their groups' choices
    loss : of all items
    last_step : the least profitable step that was taken; None where none was
    next_step : the most profitable one that did not fit; None where all were taken
    """

    options: I64
    nbytes: int
    loss: float
    last_step: Step | None
    next_step: Step | None


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps in a fixed order: ``places`` are (group, item, place in the item's hull)."""

    rates: F64
    nbytes: I64
    savings: F64
    places: I64

    @classmethod
    def join(cls, some: Sequence[_Steps]) -> _Steps:
        """All steps, best rate first; of equal ones the first of ``some`` and of its items."""
        rates = np.concatenate([steps.rates for steps in some])
        order = np.argsort(-rates, kind="stable")
        nbytes, savings, places = (
            np.concatenate([getattr(steps, name) for steps in some])[order]
            for name in ("nbytes", "savings", "places")
        )
        return cls(rates[order], nbytes, savings, places)


class _Group:
    """Hulls and steps of one group under one choice."""

    def __init__(self, number: int, losses: F64, nbytes: I64, choice: Choice) -> None:
        self.hulls = [_hull(*item, choice.options) for item in zip(losses, nbytes, strict=True)]
        firsts = [hull[0] for hull in self.hulls if hull]
        self.nbytes = choice.fixed_bytes + sum(first[0] for first in firsts)
        self.loss = sum(first[1] for first in firsts)
        rows = []
        for item, hull in enumerate(self.hulls):
            rate = np.inf
            for at, (a, b) in enumerate(pairwise(hull), 1):
                saved = a[1] - b[1]
                # Rounding must not put an item's later step before an earlier one.
                rate = min(rate, saved / (b[0] - a[0]))
                rows.append((rate, saved, b[0] - a[0], item, at))
        rates = np.array([row[0] for row in rows], np.float64)
        savings = np.array([row[1] for row in rows], np.float64)
        sizes = np.array([row[2] for row in rows], np.int64)
        places = np.array([(number, *row[3:]) for row in rows], np.int64).reshape(-1, 3)
        self.steps = _Steps.join([_Steps(rates, sizes, savings, places)])

    def values(self, prices: F64) -> F64:
        """The least loss plus price times bytes, at each of ``prices``."""
        taken = np.searchsorted(-self.steps.rates, -prices, side="right")
        nbytes = np.concatenate(([0], np.cumsum(self.steps.nbytes)))[taken]
        savings = np.concatenate(([0.0], np.cumsum(self.steps.savings)))[taken]
        found: F64 = self.loss - savings + prices * (self.nbytes + nbytes)
        return found


def _hull(losses: F64, nbytes: I64, options: Sequence[int]) -> Hull:
    """The options on the lower convex hull of loss over bytes.

    One that costs more and saves nothing is the last resort of a budget that is to be spent.
    """
    hull: Hull = []
    for size, loss, option in sorted((int(nbytes[o]), float(losses[o]), o) for o in options):
        if not np.isfinite(loss) or (hull and (loss > hull[-1][1] or size == hull[-1][0])):
            continue
        while len(hull) > 1:
            (a_size, a_loss, _), (b_size, b_loss, _) = hull[-2:]
            if (a_loss - b_loss) * (size - b_size) >= (b_loss - loss) * (b_size - a_size):
                break
            hull.pop()
        hull.append((size, loss, option))
    return hull


class Spender:
    """Answers for any budget.

    Parameters
    ----------
    losses, nbytes : (groups, items, options); a loss that is infinite rules an option out
    choices : of each group
    """

    def __init__(self, losses: F64, nbytes: I64, choices: Sequence[Sequence[Choice]]) -> None:
        self._shape = losses.shape[:2]
        self._groups = [
            [_Group(number, losses[number], nbytes[number], choice) for choice in some]
            for number, some in enumerate(choices)
        ]
        self._families = self._enumerate()

    @property
    def smallest(self) -> int:
        """Bytes below which there is no answer."""
        return sum(min(group.nbytes for group in some) for some in self._groups)

    @property
    def largest(self) -> int:
        """Bytes above which no answer gets better."""
        return max(
            sum(group.nbytes + int(group.steps.nbytes.sum()) for group in self._members(family))
            for family in self._families
        )

    def _enumerate(self) -> list[Family]:
        """The smallest family, then what each group prefers at falling prices, down to nothing."""
        smallest = tuple(
            int(np.lexsort(([g.loss for g in some], [g.nbytes for g in some]))[0])
            for some in self._groups
        )
        changes = {0.0}
        for some in self._groups:
            if len(some) > 1:
                prices = np.unique(np.concatenate([group.steps.rates for group in some]))[::-1]
                best = _preferred(some, prices)
                changes.update(prices[:1].tolist())
                changes.update(prices[1:][best[1:] != best[:-1]].tolist())
        prices = np.array(sorted(changes, reverse=True))
        table = np.array([_preferred(some, prices) for some in self._groups])
        return list(dict.fromkeys([smallest, *map(tuple, table.T.tolist())]))

    def _members(self, family: Family) -> list[_Group]:
        return [some[at] for some, at in zip(self._groups, family, strict=True)]

    def spend(self, budget: int) -> Spent:
        """The least loss found within ``budget`` bytes, which must be ``smallest`` at least."""
        best: tuple[float, int, Family] | None = None
        for family in self._families:
            members = self._members(family)
            left = budget - sum(group.nbytes for group in members)
            if left < 0:
                continue
            steps = _Steps.join([group.steps for group in members])
            taken = _greedy(steps, left)[0]
            loss = sum(group.loss for group in members) - float(steps.savings[taken].sum())
            answer = loss, budget - left + int(steps.nbytes[taken].sum()), family
            best = answer if best is None else min(best, answer)
        if best is None:
            raise ValueError(f"{budget} bytes are fewer than {self.smallest}")
        return self._spent(best[2], best[1], budget)

    def _spent(self, family: Family, nbytes: int, budget: int) -> Spent:
        members = self._members(family)
        steps = _Steps.join([group.steps for group in members])
        taken, missed = _greedy(steps, budget - sum(group.nbytes for group in members))
        reached = np.zeros(self._shape, np.int64)
        group, item, at = steps.places[taken].T
        np.maximum.at(reached, (group, item), at)
        options = np.full(self._shape, -1, np.int64)
        losses = []
        for number, member in enumerate(members):
            for item_number, hull in enumerate(member.hulls):
                if hull:
                    _, loss, option = hull[reached[number, item_number]]
                    options[number, item_number] = option
                    losses.append(loss)

        def told(step: int) -> Step:
            group, item, at = steps.places[step].tolist()
            option = members[group].hulls[item][at][2]
            return Step(group, item, option, int(steps.nbytes[step]), float(steps.savings[step]))

        last = told(taken[-1]) if taken else None
        return Spent(
            options, nbytes, math.fsum(losses), last, None if missed is None else told(missed)
        )


def _preferred(some: Sequence[_Group], prices: F64) -> I64:
    """Which of a group's choices is the best at each price; the first of equals."""
    found: I64 = np.argmin([group.values(prices) for group in some], axis=0)
    return found


def _greedy(steps: _Steps, left: int) -> tuple[list[int], int | None]:
    """Numbers of the steps that fit, in their order, and of the first that did not."""
    prefix = int(np.searchsorted(np.cumsum(steps.nbytes), left, side="right"))
    left -= int(steps.nbytes[:prefix].sum())
    taken = list(range(prefix))
    if prefix == len(steps.nbytes):
        return taken, None
    cheapest = np.minimum.accumulate(steps.nbytes[prefix:][::-1])[::-1]  # from here on
    blocked: set[tuple[int, int]] = set()
    for step in range(prefix, len(steps.nbytes)):
        if cheapest[step - prefix] > left:
            break
        group, item, _ = steps.places[step].tolist()
        if steps.nbytes[step] > left or (group, item) in blocked:
            blocked.add((group, item))
        else:
            taken.append(step)
            left -= int(steps.nbytes[step])
    return taken, prefix
