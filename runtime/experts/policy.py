"""Owns the rules that pick which expert leaves a full layer. Knows neither slots nor leases.

A rule hears of every dispatch (``tick``), of every expert asked for (``touch``) and of what becomes
resident and leaves. All of it is O(1), or O(log n) amortised; nothing looks ahead. What a rule can
put off it does in ``rest``, while a device computes.

``auto`` runs LRU and decayed LFUs of several memories side by side, in shadow caches of a few
layers, and follows whichever missed least of late. Experts of one topic stay in use while it
lasts, and the next topic has others: when misses of all layers surge together, counts of before
lose their weight.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection

from ds4q.runtime.errors import CacheError

DEFAULT_POLICY = "auto"
POLICIES = ("auto", "lru", "lfu", "slru")
LFU_DECAY = 0.98
PROTECTED = 0.5

AUTO_DECAYS = (0.90, 0.96, 0.99)  # beside LRU
AUTO_MEMORY = 0.97  # a round (token) weighs this much less with each that follows
AUTO_MARGIN = 0.02  # by which another rule must miss less before it is followed
SHADOWED_LAYERS = 8
SURGE = 5.0  # standard deviations
SURGE_MEMORY = 0.9
SURGE_APART = 8  # rounds
FORGET = 0.1  # what counts weigh after a surge

_HEAVY = 1e100  # a weight that makes counts be scaled down

Allowed = Callable[[int], bool]


class Policy(ABC):
    """Ranks the resident experts of one layer."""

    def tick(self) -> None:  # noqa: B027 (most age by others' use)
        """A dispatch of the layer begins."""

    def rest(self) -> None:  # noqa: B027 (most put nothing off)
        """Nobody waits: do what a dispatch left to be done. Decides nothing that skipping it
        would not."""

    @abstractmethod
    def touch(self, expert: int) -> None:
        """``expert`` is asked for: once a dispatch, after ``insert`` if it was not resident."""

    @abstractmethod
    def insert(self, expert: int) -> None:
        """``expert`` became resident. Until it is touched it goes first, the latest foremost: a
        warm start brings what was used most before what was used less."""

    @abstractmethod
    def remove(self, expert: int) -> None:
        """``expert`` is resident no longer."""

    @abstractmethod
    def victim(self, allowed: Allowed) -> int | None:
        """The first to go of those that may; None: none may. Nothing changes but by ``remove``."""


class LRU(Policy):
    """Least recently used."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def touch(self, expert: int) -> None:
        self._order.move_to_end(expert)

    def insert(self, expert: int) -> None:
        self._order[expert] = None
        self._order.move_to_end(expert, last=False)

    def remove(self, expert: int) -> None:
        del self._order[expert]

    def victim(self, allowed: Allowed) -> int | None:
        return next(filter(allowed, self._order), None)


class LFU(Policy):
    """Least frequently used, where a use counts ``decay`` times less with every dispatch since.

    Counts outlive residency. Of equal counts the one not used for longer goes first.

    Counts are kept in units that grow with time in place of shrinking themselves, so that their
    order changes by use alone. An entry of the heap may be behind its expert's count, never ahead:
    the top, brought up to date until it stays on top, is the least.
    """

    def __init__(self, experts: int, decay: float) -> None:
        self._growth = 1 / decay
        self._weight = 1.0
        self._clock = self._arrivals = 0
        self._count = [0.0] * experts
        self._used = [0] * experts
        self._resident = [False] * experts
        self._queued = [False] * experts
        self._heap: list[tuple[float, int, int]] = []

    def tick(self) -> None:
        self._weight *= self._growth
        if self._weight > _HEAVY:
            scale = 1 / self._weight
            self._count = [count * scale for count in self._count]
            self._heap = [(count * scale, used, expert) for count, used, expert in self._heap]
            heapq.heapify(self._heap)  # tiny counts may have become equal
            self._weight = 1.0

    def touch(self, expert: int) -> None:
        self._clock += 1
        self._count[expert] += self._weight
        self._used[expert] = self._clock

    def insert(self, expert: int) -> None:
        self._resident[expert] = True
        if not self._queued[expert]:
            if not self._count[expert]:
                self._arrivals += 1
                self._used[expert] = -self._arrivals
            self._queued[expert] = True
            heapq.heappush(self._heap, self._entry(expert))

    def remove(self, expert: int) -> None:
        self._resident[expert] = False

    def victim(self, allowed: Allowed) -> int | None:
        heap, passed, found = self._heap, [], None
        while heap and found is None:
            expert = heap[0][2]
            entry = self._entry(expert)
            if not self._resident[expert]:
                heapq.heappop(heap)
                self._queued[expert] = False
            elif heap[0] != entry:
                heapq.heapreplace(heap, entry)
            elif allowed(expert):
                found = expert
            else:
                passed.append(heapq.heappop(heap))
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def forget(self, keep: float) -> None:
        """Make what was counted so far weigh ``keep`` times as much against what comes."""
        self._weight /= keep

    def _entry(self, expert: int) -> tuple[float, int, int]:
        return self._count[expert], self._used[expert], expert


class SLRU(Policy):
    """Segmented LRU: a second use protects, and the least recent of too many protected steps back.

    Parameters
    ----------
    protected : most experts that are
    """

    def __init__(self, protected: int) -> None:
        self._most = protected
        self._new: set[int] = set()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def touch(self, expert: int) -> None:
        if expert in self._protected:
            self._protected.move_to_end(expert)
        elif expert in self._new:  # the use that it was loaded for
            self._new.discard(expert)
            self._probation.move_to_end(expert)
        else:
            del self._probation[expert]
            self._protected[expert] = None
            if len(self._protected) > self._most:
                oldest, _ = self._protected.popitem(last=False)
                self._probation[oldest] = None

    def insert(self, expert: int) -> None:
        self._probation[expert] = None
        self._probation.move_to_end(expert, last=False)
        self._new.add(expert)

    def remove(self, expert: int) -> None:
        self._new.discard(expert)
        if expert in self._probation:
            del self._probation[expert]
        else:
            del self._protected[expert]

    def victim(self, allowed: Allowed) -> int | None:
        for segment in (self._probation, self._protected):
            for expert in segment:
                if allowed(expert):
                    return expert
        return None


class Shadow:
    """What a layer would hold, had it followed ``rule`` from the start."""

    def __init__(self, rule: Policy, slots: int) -> None:
        self._rule = rule
        self._slots = slots
        self._held: set[int] = set()

    def settle(self, asked: Collection[int]) -> int:
        """Serve a dispatch of distinct experts, at most as many as slots; how many were missing."""
        self._rule.tick()
        missing = []
        for expert in asked:
            if expert in self._held:
                self._rule.touch(expert)
            else:
                missing.append(expert)
        wanted = set(asked)
        for expert in missing:
            if len(self._held) >= self._slots:
                gone = self._rule.victim(lambda e: e not in wanted)
                if gone is not None:
                    self._rule.remove(gone)
                    self._held.discard(gone)
            self._held.add(expert)
            self._rule.insert(expert)
            self._rule.touch(expert)
        return len(missing)


class Chooser:
    """Which rule all layers of ``auto`` follow at present.

    A round is one dispatch of each layer: the first layer to come again begins the next.

    Attributes
    ----------
    choice : number of the rule; 0 is LRU
    round : counts rounds
    surges : counts surges
    """

    def __init__(self) -> None:
        self.choice = 0
        self.round = 0
        self.surges = 0
        self._costs = [0.0] * (1 + len(AUTO_DECAYS))
        self._asked = self._missed = 0
        self._rate = self._spread = -1.0
        self._calm = 0  # rounds since a surge

    def charge(self, costs: Collection[int]) -> None:
        """Add the misses of a shadowed layer, by rule."""
        self._costs = [cost + more for cost, more in zip(self._costs, costs, strict=True)]

    def observe(self, asked: int, missed: int) -> None:
        """Add what a full layer was asked for and did not have."""
        self._asked += asked
        self._missed += missed

    def next_round(self) -> None:
        """Judge the round that ends."""
        self.round += 1
        best = min(range(len(self._costs)), key=self._costs.__getitem__)
        if self._costs[best] < self._costs[self.choice] * (1 - AUTO_MARGIN):
            self.choice = best
        self._costs = [cost * AUTO_MEMORY for cost in self._costs]
        if self._asked:
            self._watch(self._missed / self._asked, self._asked)
        self._asked = self._missed = 0

    def _watch(self, rate: float, asked: int) -> None:
        if self._rate < 0:
            self._rate, self._spread = rate, 0.0
        # Misses of a round are at least about as uneven as so many throws of a coin.
        deviation = math.sqrt(max(self._spread, self._rate / (2 * asked)))
        self._calm += 1
        if self._calm > SURGE_APART and rate > self._rate + SURGE * deviation:
            self.surges += 1
            self._calm = 0
        off = rate - self._rate
        self._rate += (1 - SURGE_MEMORY) * off
        self._spread = SURGE_MEMORY * (self._spread + (1 - SURGE_MEMORY) * off * off)


class Auto(Policy):
    """The shipped default; see the module.

    Parameters
    ----------
    chooser : of all layers
    shadowed : whether this layer is one of those that rules are compared in
    """

    def __init__(self, chooser: Chooser, slots: int, experts: int, *, shadowed: bool) -> None:
        self._chooser = chooser
        self._slots = slots
        self._counting = [LFU(experts, decay) for decay in AUTO_DECAYS]
        self._rules: list[Policy] = [LRU(), *self._counting]
        self._shadow_counting = [LFU(experts, decay) for decay in AUTO_DECAYS if shadowed]
        followed: list[Policy] = [LRU(), *self._shadow_counting]
        self._shadows = [Shadow(rule, slots) for rule in followed if shadowed]
        self._followed = self._rules[chooser.choice]
        self._put_off: list[tuple[str, tuple[int, ...]]] = []  # what other rules are to hear
        self._round = self._surges = self._residents = 0
        self._full = False
        self._asked: list[int] = []
        self._came: set[int] = set()
        self._costs: list[int] = []  # of the dispatch before, by rule
        self._missed = 0, 0  # asked, missing

    def tick(self) -> None:
        self.rest()
        chooser = self._chooser
        if self._costs:
            chooser.charge(self._costs)
        chooser.observe(*self._missed)
        self._costs, self._missed = [], (0, 0)
        self._came.clear()
        if self._round == chooser.round:
            chooser.next_round()
        self._round = chooser.round
        if self._surges != chooser.surges:
            self._surges = chooser.surges
            for rule in (*self._counting, *self._shadow_counting):
                rule.forget(FORGET)
        self._full = self._residents == self._slots
        self._followed = self._rules[chooser.choice]
        self._tell("tick")

    def rest(self) -> None:
        put_off, self._put_off = self._put_off, []
        for rule in self._rules:
            if rule is not self._followed:
                for name, told in put_off:
                    getattr(rule, name)(*told)
        asked, self._asked = self._asked, []
        if asked:
            self._costs = [shadow.settle(asked) for shadow in self._shadows]
        # Of a prefill, which asks for most of what there is, much is missing on any topic.
        if asked and self._full and 2 * len(asked) <= self._slots:
            self._missed = len(asked), sum(expert in self._came for expert in asked)

    def touch(self, expert: int) -> None:
        self._asked.append(expert)
        self._tell("touch", expert)

    def insert(self, expert: int) -> None:
        self._residents += 1
        self._came.add(expert)
        self._tell("insert", expert)

    def remove(self, expert: int) -> None:
        self._residents -= 1
        self._tell("remove", expert)

    def victim(self, allowed: Allowed) -> int | None:
        return self._followed.victim(allowed)

    def _tell(self, name: str, *what: int) -> None:
        """Tell the rule that is followed now, and the others in ``rest``."""
        getattr(self._followed, name)(*what)
        self._put_off.append((name, what))


def decay_of(name: str) -> float:
    """The decay of ``lfu`` or ``lfu:DECAY``; CacheError names what is wrong."""
    _, colon, text = name.partition(":")
    if not colon:
        return LFU_DECAY
    try:
        decay = float(text)
    except ValueError:
        decay = math.nan
    if not 0 < decay <= 1:
        raise CacheError("bad decay of lfu", expected="lfu:D with 0 < D <= 1", found=name)
    return decay


def parameters_of(name: str) -> dict[str, float]:
    """What ``name`` is run with, by name."""
    kind = name.partition(":")[0]
    if kind == "lfu":
        return {"decay": decay_of(name)}
    if name == "slru":
        return {"protected": PROTECTED}
    if name == "lru":
        return {}
    if name == "auto":
        told = {f"decay_{i}": decay for i, decay in enumerate(AUTO_DECAYS, 1)}
        told |= {"memory": AUTO_MEMORY, "margin": AUTO_MARGIN, "forget": FORGET}
        return told | {"surge": SURGE, "surge_memory": SURGE_MEMORY, "surge_apart": SURGE_APART}
    raise CacheError(
        "no such cache policy", expected=f"one of {', '.join(POLICIES)}, lfu:DECAY", found=name
    )


def make_policies(name: str, layers: int, slots: int, experts: int) -> list[Policy]:
    """A rule for each layer; those of ``auto`` decide together.

    Raises ``CacheError`` where there is no such policy.
    """
    parameters = parameters_of(name)
    if name == "lru":
        return [LRU() for _ in range(layers)]
    if name == "slru":
        return [SLRU(max(1, int(slots * PROTECTED))) for _ in range(layers)]
    if name == "auto":
        chooser, every = Chooser(), -(-layers // SHADOWED_LAYERS)
        return [
            Auto(chooser, slots, experts, shadowed=layer % every == 0) for layer in range(layers)
        ]
    return [LFU(experts, parameters["decay"]) for _ in range(layers)]
