"""Cache policies: each against a slow model of itself, and the default against all of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.policy import (
    DEFAULT_POLICY,
    LFU,
    LRU,
    POLICIES,
    SLRU,
    Auto,
    Policy,
    make_policies,
    parameters_of,
)
from ds4q.runtime.experts.replay import Cache, belady, price
from tests.runtime.experts import streams

EXPERTS, SLOTS = 12, 5


class SlowLRU(Policy):
    """The policy by its definition."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def touch(self, expert: int) -> None:
        self.order.remove(expert)
        self.order.append(expert)

    def insert(self, expert: int) -> None:
        self.order.insert(0, expert)

    def remove(self, expert: int) -> None:
        self.order.remove(expert)

    def victim(self, allowed: Callable[[int], bool]) -> int | None:
        return next((e for e in self.order if allowed(e)), None)


class SlowLFU(Policy):
    """Every use counted anew each time."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.now = 0
        self.uses: dict[int, list[int]] = {}
        self.order: list[int] = []  # by last use
        self.held: set[int] = set()

    def tick(self) -> None:
        self.now += 1

    def touch(self, expert: int) -> None:
        self.uses.setdefault(expert, []).append(self.now)
        self.order = [e for e in self.order if e != expert] + [expert]

    def insert(self, expert: int) -> None:
        self.held.add(expert)

    def remove(self, expert: int) -> None:
        self.held.remove(expert)

    def victim(self, allowed: Callable[[int], bool]) -> int | None:
        may = [e for e in self.order if e in self.held and allowed(e)]
        return min(may, key=self.count, default=None)

    def count(self, expert: int) -> float:
        return sum(self.decay ** (self.now - at) for at in self.uses[expert])


class SlowSLRU(Policy):
    """Two lists."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.fresh: set[int] = set()

    def insert(self, expert: int) -> None:
        self.probation.insert(0, expert)
        self.fresh.add(expert)

    def touch(self, expert: int) -> None:
        segment = self.protected if expert in self.protected else self.probation
        segment.remove(expert)
        if expert in self.fresh:
            self.fresh.remove(expert)
            self.probation.append(expert)
        else:
            self.protected.append(expert)
            if len(self.protected) > self.most:
                self.probation.append(self.protected.pop(0))

    def remove(self, expert: int) -> None:
        (self.probation if expert in self.probation else self.protected).remove(expert)
        self.fresh.discard(expert)

    def victim(self, allowed: Callable[[int], bool]) -> int | None:
        return next((e for e in self.probation + self.protected if allowed(e)), None)


PAIRS: list[tuple[str, Callable[[], Policy], Callable[[], Policy]]] = [
    ("lru", LRU, SlowLRU),
    ("lfu", lambda: LFU(EXPERTS, 0.5), lambda: SlowLFU(0.5)),  # powers of 2 are exact
    ("lfu of all time", lambda: LFU(EXPERTS, 1.0), lambda: SlowLFU(1.0)),
    ("slru", lambda: SLRU(2), lambda: SlowSLRU(2)),
]


@pytest.mark.parametrize(("fast", "slow"), [pair[1:] for pair in PAIRS], ids=[p[0] for p in PAIRS])
def test_each_policy_is_its_definition(
    fast: Callable[[], Policy], slow: Callable[[], Policy]
) -> None:
    for seed in range(4):
        rng, one, two = random.Random(seed), fast(), slow()
        held: set[int] = set()
        for _ in range(500):  # counts of lfu are scaled down on the way
            one.tick()
            two.tick()
            asked = rng.sample(range(EXPERTS), rng.randint(1, 3))
            for expert in asked:
                if expert not in held and len(held) >= SLOTS:
                    busy = set(asked) | set(rng.sample(range(EXPERTS), 2))
                    free = held - busy
                    gone = one.victim(lambda e, busy=busy: e not in busy)  # type: ignore[misc]
                    assert gone == two.victim(lambda e, busy=busy: e not in busy)  # type: ignore[misc]
                    assert (gone is None) == (not free)
                    gone = min(held - set(asked)) if gone is None else gone
                    one.remove(gone)
                    two.remove(gone)
                    held.remove(gone)
                if expert not in held:
                    one.insert(expert)
                    two.insert(expert)
                    held.add(expert)
                one.touch(expert)
                two.touch(expert)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_when_a_rule_rests_changes_nothing(name: str, chance: float) -> None:
    layers, slots, experts = 3, 8, 32
    for seed in range(3):
        rng = random.Random(seed)
        always, some = (make_policies(name, layers, slots, experts) for _ in range(2))
        held: list[set[int]] = [set() for _ in range(layers)]
        for token in range(300):
            hot = token // 60 * 5  # topics, so that rules differ and misses surge
            for layer, (one, two) in enumerate(zip(always, some, strict=True)):
                asked = {(hot + int(rng.expovariate(0.2))) % experts for _ in range(4)}
                one.tick()
                two.tick()
                for expert in asked - held[layer]:
                    if len(held[layer]) >= slots:
                        gone = one.victim(lambda e, asked=asked: e not in asked)  # type: ignore[misc]
                        assert gone == two.victim(lambda e, asked=asked: e not in asked)  # type: ignore[misc]
                        assert gone is not None
                        held[layer].discard(gone)
                        one.remove(gone)
                        two.remove(gone)
                    held[layer].add(expert)
                    one.insert(expert)
                    two.insert(expert)
                for expert in asked:
                    one.touch(expert)
                    two.touch(expert)
                one.rest()
                if rng.random() < chance:
                    two.rest()


@pytest.mark.parametrize("name", [*POLICIES, "lfu:0.9"])
def test_naming_a_victim_changes_nothing(name: str) -> None:
    (policy,) = make_policies(name, 1, SLOTS, EXPERTS)
    policy.tick()
    for expert in range(SLOTS):
        policy.insert(expert)
        policy.touch(expert)
    assert policy.victim(lambda e: False) is None
    first = policy.victim(lambda e: True)
    assert first == policy.victim(lambda e: True) == 0
    assert policy.victim(lambda e: e != 0) == 1


@pytest.mark.parametrize("name", POLICIES)
def test_a_failed_read_is_as_if_it_had_not_been(name: str) -> None:
    (policy,) = make_policies(name, 1, SLOTS, EXPERTS)
    for expert in (0, 1):
        policy.tick()
        policy.insert(expert)
        policy.touch(expert)
    policy.remove(0)
    assert policy.victim(lambda e: True) == 1
    policy.remove(1)
    assert policy.victim(lambda e: True) is None


@pytest.mark.parametrize("name", POLICIES)
def test_of_a_warm_start_the_least_used_goes_first(name: str) -> None:
    (policy,) = make_policies(name, 1, SLOTS, EXPERTS)
    for expert in (3, 7, 9):  # most used first
        policy.insert(expert)
    policy.tick()
    policy.insert(1)
    policy.touch(1)
    policy.touch(9)
    gone = []
    while (victim := policy.victim(lambda e: True)) is not None:
        policy.remove(victim)
        gone.append(victim)
    assert gone == [7, 3, 1, 9]


def test_counts_outlive_residency() -> None:
    policy = LFU(EXPERTS, 0.9)
    policy.insert(0)
    for _ in range(5):
        policy.tick()
        policy.touch(0)
    policy.remove(0)
    for expert in (1, 2, 0):
        policy.tick()
        policy.insert(expert)
        policy.touch(expert)
    assert policy.victim(lambda e: True) == 1
    policy.remove(1)
    assert policy.victim(lambda e: True) == 2


def test_forgetting_weighs_the_past_less() -> None:
    for keep, goes in ((1.0, 1), (0.1, 0)):
        policy = LFU(EXPERTS, 1.0)
        for expert, times in ((0, 4), (1, 2)):
            policy.insert(expert)
            if expert:
                policy.forget(keep)
            for _ in range(times):
                policy.tick()
                policy.touch(expert)
        assert policy.victim(lambda e: True) == goes


def test_the_heap_of_lfu_stays_small() -> None:
    policy, rng = LFU(EXPERTS, 0.9), random.Random(1)
    held: list[int] = []
    for _ in range(2000):
        policy.tick()
        expert = rng.randrange(EXPERTS)
        if expert not in held:
            if len(held) == SLOTS:
                policy.remove(held.pop(rng.randrange(SLOTS)))  # whoever it would have been
            policy.insert(expert)
            held.append(expert)
        policy.touch(expert)
    assert len(policy._heap) <= EXPERTS


@pytest.mark.parametrize("name", ["mru", "", "lfu:", "lfu:0", "lfu:1.5", "lfu:nan", "lru:0.9"])
def test_unknown_policies_are_refused_by_name(name: str) -> None:
    with pytest.raises(CacheError, match=r"policy|decay"):
        make_policies(name, 1, SLOTS, EXPERTS)


def test_parameters_are_told() -> None:
    assert parameters_of("lfu:0.9") == {"decay": 0.9}
    assert parameters_of("lru") == {}
    assert parameters_of(DEFAULT_POLICY)["surge"] > 0


# ------------------------------------------------------------------ the default


def switching(seed: int, layers: int, tokens: int, every: int) -> streams.I64:
    """[L, T, K] of 6 of 256: liking is drawn anew every so many tokens, and wanders fast."""
    rng = np.random.default_rng(seed)
    rank = -0.8 * np.log(1 + np.array([rng.permutation(256) for _ in range(layers)]))
    shape, chosen = (layers, 256), []
    wander = rng.standard_normal(shape)
    for token in range(tokens):
        if token % every == 0:
            topic = rng.standard_normal(shape)
        wander = 0.85 * wander + np.sqrt(1 - 0.85**2) * rng.standard_normal(shape)
        score = rank + 1.9 * topic + 1.6 * wander + rng.gumbel(size=shape)
        chosen.append(np.argsort(-score, axis=-1)[:, :6])
    return np.stack(chosen, axis=1)


def surges_of(ids: streams.I64, slots: int) -> int:
    policies = make_policies("auto", len(ids), slots, 256)
    cache = Cache(policies, slots)
    for token in range(ids.shape[1]):
        for layer in range(len(ids)):
            cache.serve(layer, ids[layer, token].tolist())
    assert isinstance(policies[0], Auto)
    return policies[0]._chooser.surges


def test_the_default_saves_where_use_is_skewed() -> None:
    work = streams.workload(streams.skewed(3, 12, 250, 256, 6), 256)
    for slots in (12, 25):
        lru, bound = price(work, "lru", slots).reads, belady(work, slots).reads
        assert lru - price(work, "auto", slots).reads >= 0.4 * (lru - bound)


def test_the_default_saves_where_topics_switch_and_counting_alone_loses() -> None:
    ids = switching(5, 24, 300, 90)
    work = streams.workload(ids, 256)
    lru, bound = price(work, "lru", 25).reads, belady(work, 25).reads
    assert price(work, "lfu", 25).reads > lru
    assert lru - price(work, "auto", 25).reads >= 0.1 * (lru - bound)
    assert surges_of(ids, 25) == 3  # at 90, 180 and 270


def test_no_surge_is_seen_where_nothing_changes() -> None:
    assert surges_of(streams.skewed(3, 12, 250, 256, 6), 25) == 0


def test_a_prefill_is_no_change_of_topic() -> None:
    ids = streams.skewed(3, 12, 120, 256, 6)
    policies = make_policies("auto", 12, 25, 256)
    cache = Cache(policies, 25)
    for token in range(120):
        for layer in range(12):
            cache.serve(layer, ids[layer, token].tolist())
            if token in (90, 105):  # most experts, in bands
                for start in range(0, 250, 25):
                    cache.serve(layer, list(range(start, start + 25)))
    assert isinstance(policies[0], Auto)
    assert policies[0]._chooser.surges == 0


def test_where_only_recency_tells_the_default_stays_with_lru() -> None:
    # What was used twice is never used again; what was used once comes back.
    rng = random.Random(2)
    rows: list[list[int]] = []
    waiting: list[list[int]] = []
    for token in range(300):
        fresh = [(6 * token + i) % 256 for i in range(3)]
        waiting.append(fresh)
        again = waiting.pop(0) if len(waiting) > 4 else rng.sample(range(100, 200), 3)
        rows.append(list(dict.fromkeys(fresh + again)))
    width = min(map(len, rows))
    ids = np.array([[row[:width] for row in rows]] * 4)
    work = streams.workload(ids, 256)
    assert price(work, "auto", 20).reads <= 1.01 * price(work, "lru", 20).reads
