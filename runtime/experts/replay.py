"""Owns running cache policies over a recorded trace, and the least that any policy could read.

``reproduce`` meets the outcomes of a run again, expert by expert. ``price`` and ``belady`` tell
what other policies and numbers of slots would have read; they read nothing ahead, so what a run
had read ahead is a miss there. No weight is touched.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ds4q.runtime.errors import TraceError
from ds4q.runtime.experts.header import Header
from ds4q.runtime.experts.ledger import Demand
from ds4q.runtime.experts.policy import Policy, make_policies, parameters_of
from ds4q.runtime.experts.store import Phase
from ds4q.runtime.experts.trace import (
    PHASES,
    BandRecord,
    GoneRecord,
    Outcome,
    Trace,
    WarmRecord,
)

READ = (Outcome.COMPULSORY, Outcome.MISS)
NEVER = 1 << 62


class Asked(NamedTuple):
    """A dispatch of one layer: its distinct experts in order of first appearance."""

    layer: int
    phase: Phase
    experts: tuple[int, ...]
    accesses: int


class Warmed(NamedTuple):
    """An expert that the warm start brought."""

    layer: int
    expert: int


@dataclass(slots=True)
class Tally:
    """What a cache met, by phase."""

    header: Header
    demands: dict[Phase, Demand] = field(default_factory=lambda: {p: Demand() for p in PHASES})

    def count(self, asked: Asked, met: Sequence[Outcome], evictions: int) -> None:
        """Add a band; of ``asked``, ``accesses`` are left to the caller."""
        demand = self.demands[asked.phase]
        demand.evictions += evictions
        for expert, outcome in zip(asked.experts, met, strict=True):
            demand.met[outcome] += 1
            if outcome in READ:
                demand.bytes += self.header.bytes_of(asked.layer, expert)

    def met(self, *outcomes: Outcome) -> int:
        """How many distinct experts met one of ``outcomes``, both phases together."""
        return sum(demand.met[each] for demand in self.demands.values() for each in outcomes)

    @property
    def reads(self) -> int:
        """Experts read on demand."""
        return self.met(*READ)

    @property
    def hit_rate(self) -> float:
        """Share of distinct experts that were there when asked for."""
        asked = self.met(*Outcome)
        return 1 - self.reads / asked

    @property
    def nbytes(self) -> int:
        """Bytes read on demand."""
        return sum(demand.bytes for demand in self.demands.values())

    def told(self) -> dict[str, dict[str, Any]]:
        """The counts by phase, by the names that a pager has for them."""
        spent = ("failed", "wait_s")  # what no trace tells
        return {
            phase: {name: n for name, n in demand.told().items() if name not in spent}
            for phase, demand in self.demands.items()
        }


class Cache:
    """What a pager's plans would hold, without slots to fill and without waiting."""

    def __init__(self, policies: Sequence[Policy], slots: int) -> None:
        self._policies = policies
        self._slots = slots
        self._held: list[set[int]] = [set() for _ in policies]
        self._warm: list[set[int]] = [set() for _ in policies]
        self._seen: list[set[int]] = [set() for _ in policies]

    def warm(self, layer: int, expert: int) -> bool:
        """The warm start brings an expert; whether there was a free slot."""
        held = self._held[layer]
        if expert in held or len(held) >= self._slots:
            return False
        held.add(expert)
        self._warm[layer].add(expert)
        self._policies[layer].insert(expert)
        return True

    def lose(self, layer: int, expert: int) -> None:
        """The read of an expert failed."""
        if expert in self._held[layer]:
            self._held[layer].remove(expert)
            self._policies[layer].remove(expert)

    def serve(
        self, layer: int, wanted: Sequence[int], ahead: Collection[int] = ()
    ) -> tuple[list[Outcome], int]:
        """A band of distinct experts, at most as many as slots: what each meets, and evictions.

        ``ahead``: what was read ahead of this use. The order of steps is that of the pager.
        """
        policy, held, warm = self._policies[layer], self._held[layer], self._warm[layer]
        seen = self._seen[layer]
        policy.tick()
        met, new = [], []
        for expert in wanted:
            if expert in held:
                policy.touch(expert)
                met.append(Outcome.WARM if expert in warm else Outcome.HIT)
                warm.discard(expert)
            else:
                new.append(expert)
                known = Outcome.MISS if expert in seen else Outcome.COMPULSORY
                met.append(Outcome.PREFETCHED if expert in ahead else known)
        evictions = max(0, len(held) + len(new) - self._slots)
        if evictions:
            busy = set(wanted)
            for _ in range(evictions):
                victim = policy.victim(lambda expert: expert not in busy)
                if victim is None:
                    raise TraceError("a dispatch needs more experts than there are slots")
                policy.remove(victim)
                held.remove(victim)
                warm.discard(victim)
        for expert in new:
            held.add(expert)
            policy.insert(expert)
            policy.touch(expert)
        seen.update(wanted)
        return met, evictions


@dataclass(frozen=True, slots=True)
class Workload:
    """What a trace asks for, whatever became of it. ``tokens`` by phase."""

    header: Header
    steps: tuple[Asked | Warmed, ...]
    tokens: dict[Phase, int]

    @classmethod
    def of(cls, trace: Trace) -> Workload:
        """Read a trace; bands of one dispatch are put together again.

        Without a profile there was no warm start: a run with all experts had them from the start.

        Raises ``TraceError`` where nothing was asked for.
        """
        steps: list[Asked | Warmed] = []
        tokens: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        at, counted, layer = (-1, -1), -1, -1
        for record in trace:
            if isinstance(record, WarmRecord) and trace.header.warm_start:
                steps.append(Warmed(*record))
            if not isinstance(record, BandRecord):
                continue
            if layer < 0:
                layer = record.layer  # a batch passes it once
            if record.layer == layer and record.number != counted:
                counted = record.number
                tokens[record.phase] += len(record.ids)
            asked = Asked(
                record.layer, record.phase, tuple(record.distinct.tolist()), _accesses(record)
            )
            if at == (record.number, record.layer) and isinstance(last := steps[-1], Asked):
                steps[-1] = last._replace(
                    experts=last.experts + asked.experts, accesses=last.accesses + asked.accesses
                )
            else:
                steps.append(asked)
            at = record.number, record.layer
        if layer < 0:
            raise TraceError("the trace records no dispatch", path=trace.path)
        return cls(trace.header, tuple(steps), tokens)


def _accesses(record: BandRecord) -> int:
    """Choices of tokens that the band serves; of foreign experts there may be more."""
    return int(np.isin(record.ids, record.distinct).sum())


def bands(experts: Sequence[int], slots: int) -> Iterator[tuple[int, ...]]:
    """Distinct experts in bands that fit the slots."""
    for start in range(0, len(experts), slots):
        yield tuple(experts[start : start + slots])


def reproduce(trace: Trace) -> Tally:
    """Run the trace's own policy again, and hold every outcome to the recorded one.

    A run that asked for one dispatch at a time is met exactly. Where several threads asked at once,
    what one of them held could not be evicted for another, and no trace tells that.

    Raises ``TraceError``: the first expert that meets something else, or a policy whose
    parameters are not those of this ds4q.
    """
    header = trace.header
    parameters = parameters_of(header.policy)
    if header.parameters != parameters:
        raise TraceError(
            f"recorded with other parameters of {header.policy}",
            path=trace.path,
            expected=parameters,
            found=header.parameters,
        )
    cache = Cache(
        make_policies(header.policy, header.layers, header.slots, header.experts), header.slots
    )
    tally = Tally(header)
    for record in trace:
        if isinstance(record, WarmRecord):
            if not cache.warm(*record):
                raise _deviation(trace, f"layer {record.layer}: warm start", "a free slot", "none")
        elif isinstance(record, GoneRecord):
            cache.lose(*record)
        elif isinstance(record, BandRecord):
            _repeat(trace, record, cache, tally)
    return tally


def _repeat(trace: Trace, record: BandRecord, cache: Cache, tally: Tally) -> None:
    where = f"dispatch {record.number}, layer {record.layer}"
    if len(record.distinct) > trace.header.slots:
        raise _deviation(
            trace, where, f"at most {trace.header.slots} experts", len(record.distinct)
        )
    wanted = record.distinct.tolist()
    recorded = [Outcome(outcome) for outcome in record.outcomes.tolist()]
    ahead = {e for e, o in zip(wanted, recorded, strict=True) if o is Outcome.PREFETCHED}
    met, evictions = cache.serve(record.layer, wanted, ahead)
    for expert, replayed, told in zip(wanted, met, recorded, strict=True):
        if replayed is not told:
            name = f"{where}, expert {expert}"
            raise _deviation(trace, name, told.name.lower(), replayed.name.lower())
    before = tally.nbytes
    tally.count(Asked(record.layer, record.phase, tuple(wanted), 0), met, evictions)
    tally.demands[record.phase].accesses += _accesses(record)
    if tally.nbytes - before != record.nbytes:
        raise _deviation(trace, f"{where}: bytes", record.nbytes, tally.nbytes - before)


def _deviation(trace: Trace, where: str, recorded: object, replayed: object) -> TraceError:
    return TraceError(
        f"the replay does not reproduce the run: {where}",
        path=trace.path,
        expected=recorded,
        found=replayed,
        remedy="record it again with this ds4q; if that fails, too, please report it",
    )


def price(workload: Workload, policy: str, slots: int) -> Tally:
    """What ``policy`` would have met with ``slots`` slots a layer, begun as the run began."""
    header = workload.header
    cache = Cache(make_policies(policy, header.layers, slots, header.experts), slots)
    tally = Tally(header)
    for step in workload.steps:
        if isinstance(step, Warmed):
            cache.warm(*step)
            continue
        tally.demands[step.phase].accesses += step.accesses
        for band in bands(step.experts, slots):
            met, evictions = cache.serve(step.layer, band)
            tally.count(step._replace(experts=band), met, evictions)
    return tally


def belady(workload: Workload, slots: int) -> Tally:
    """The least that any policy could have missed, had it known all that was to come.

    The experts of a band are resident together, so they are never victims of each other. Of a
    layer's others the one that is asked for last goes first, which no choice can better; in bytes
    that is the least where the layer's experts are of one size.
    """
    tally = Tally(workload.header)
    layers: list[list[Asked | Warmed]] = [[] for _ in range(workload.header.layers)]
    for step in workload.steps:
        if isinstance(step, Warmed):
            layers[step.layer].append(step)
            continue
        tally.demands[step.phase].accesses += step.accesses
        layers[step.layer] += [step._replace(experts=band) for band in bands(step.experts, slots)]
    for steps in layers:
        _belady_layer(steps, slots, tally)
    return tally


def _belady_layer(steps: Sequence[Asked | Warmed], slots: int, tally: Tally) -> None:
    uses = _next_uses(steps)
    held: dict[int, int] = {}  # and when it is asked for next
    warm: set[int] = set()
    seen: set[int] = set()
    queue: list[tuple[int, int]] = []  # an entry that ``held`` no longer agrees with is void
    for step, then in zip(steps, uses, strict=True):
        if isinstance(step, Warmed):
            if step.expert not in held and len(held) < slots:
                held[step.expert] = then[0]
                heapq.heappush(queue, (-then[0], step.expert))
                warm.add(step.expert)
            continue
        met = []
        for expert in step.experts:
            if expert in held:
                del held[expert]  # for now: no victim
                met.append(Outcome.WARM if expert in warm else Outcome.HIT)
            else:
                met.append(Outcome.MISS if expert in seen else Outcome.COMPULSORY)
        evictions = max(0, len(held) + len(step.experts) - slots)
        for _ in range(evictions):
            use, expert = heapq.heappop(queue)
            while held.get(expert) != -use:
                use, expert = heapq.heappop(queue)
            del held[expert]
            warm.discard(expert)
        for expert, use in zip(step.experts, then, strict=True):
            held[expert] = use
            heapq.heappush(queue, (-use, expert))
        warm.difference_update(step.experts)
        seen.update(step.experts)
        tally.count(step, met, evictions)


def _next_uses(steps: Sequence[Asked | Warmed]) -> list[list[int]]:
    """For every expert of every step, the number of the next dispatch that asks for it."""
    upcoming: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(steps) - 1, -1, -1):
        step = steps[number]
        experts = step.experts if isinstance(step, Asked) else (step.expert,)
        uses.append([upcoming.get(expert, NEVER) for expert in experts])
        if isinstance(step, Asked):
            upcoming |= dict.fromkeys(experts, number)
    return uses[::-1]


@dataclass(frozen=True, slots=True)
class Priced:
    """A policy at a budget, beside LRU and the bound at the same budget."""

    policy: str
    slots: int
    tally: Tally
    lru: Tally
    bound: Tally

    @property
    def gap(self) -> float | None:
        """The share of what the bound saves on LRU that this saves; None where that is nothing."""
        most = self.lru.reads - self.bound.reads
        return (self.lru.reads - self.tally.reads) / most if most else None

    def document(self, slot_bytes: int, tokens: int) -> dict[str, Any]:
        """As JSON; ``slot_bytes`` of one slot in every layer, ``tokens`` of the whole trace."""
        tally = self.tally
        return {
            "policy": self.policy,
            "slots": self.slots,
            "budget_bytes": self.slots * slot_bytes,
            "hit_rate": round(tally.hit_rate, 6),
            "reads": tally.reads,
            "compulsory": tally.met(Outcome.COMPULSORY),
            "bytes": tally.nbytes,
            "bytes_per_token": tally.nbytes // tokens if tokens else 0,
            "bytes_over_lru": round(tally.nbytes / self.lru.nbytes, 6) if self.lru.nbytes else None,
            "gap": None if self.gap is None else round(self.gap, 4),
            "phases": tally.told(),
        }


def compare(
    workload: Workload, policies: Sequence[str], slots: int, done: Callable[[int], None]
) -> list[Priced]:
    """``policies`` in order, then the bound; ``done`` hears of each cache that was run."""
    bound = belady(workload, slots)
    done(1)
    tallies: dict[str, Tally] = {}
    for policy in dict.fromkeys([*policies, "lru"]):
        tallies[policy] = price(workload, policy, slots)
        done(1)
    rows = [*((policy, tallies[policy]) for policy in policies), ("belady", bound)]
    return [Priced(name, slots, tally, tallies["lru"], bound) for name, tally in rows]
