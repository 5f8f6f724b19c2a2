"""Replays: equal to what a pager counted, exact to the expert, and bounded by what is best."""

from __future__ import annotations

import contextlib
import functools
import random
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.artifact.errors import TruncatedError
from ds4q.artifact.newfile import NewFile
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import TraceError
from ds4q.runtime.experts.ledger import Dispatch
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.policy import POLICIES
from ds4q.runtime.experts.reading import Purpose
from ds4q.runtime.experts.replay import (
    Asked,
    Warmed,
    Workload,
    belady,
    compare,
    price,
    reproduce,
)
from ds4q.runtime.experts.trace import BandRecord, Recorder, WarmRecord, read_trace
from tests.runtime.experts import fakes, streams

LAYERS, EXPERTS, K, SLOTS = 2, 16, 3, 5


def told(counters: dict[str, Any], like: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What a pager counted, by the names of a replay."""
    return {phase: {name: counters[phase][name] for name in names} for phase, names in like.items()}


class Rig:
    """A pager with a recorder, on experts that lie nowhere."""

    def __init__(self, path: Path, policy: str, **transport: Any) -> None:
        catalogue: Any = fakes.Numbered(EXPERTS, LAYERS)
        made = streams.header(policy=policy, slots=SLOTS, warm_start="ab")
        made = type(made)(**{**asdict(made), "expert_bytes": ((fakes.NBYTES,),) * LAYERS})
        self.recorder = Recorder(NewFile(path), made)
        self.transport = fakes.ByThread(fakes.Memory(catalogue, SLOTS + K), **transport)
        self.pager = Pager(
            catalogue,
            SLOTS,
            self.transport,
            policy=policy,
            quarantine=[K] * LAYERS,
            recorder=self.recorder,
        )

    def ask(self, number: int, layer: int, ids: list[int]) -> None:
        dispatch = Dispatch(number, 0, number, np.array([ids]))
        with contextlib.suppress(TruncatedError):
            self.pager.acquire(layer, ids, "decode", dispatch).release()

    def close(self) -> dict[str, Any]:
        self.transport.settle()
        counters = self.pager.counters()
        self.pager.close()
        self.recorder.close()
        return counters


def asdict(header: Any) -> dict[str, Any]:
    return {name: getattr(header, name) for name in header.__dataclass_fields__}


@pytest.mark.parametrize("policy", [*POLICIES, "lfu:0.9"])
def test_a_pagers_own_counters_come_out_again(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    rig, rng = Rig(path, policy, errors=0.05, seed=3), random.Random(policy)
    rig.pager.prefetch(0, [1, 2, 3], Purpose.WARM)
    rig.transport.settle()
    ids = streams.skewed(7, LAYERS, 300, EXPERTS, K)
    for token in range(300):
        for layer in range(LAYERS):
            chosen = ids[layer, token].tolist()
            if rng.random() < 0.3:
                rig.pager.prefetch(layer, chosen[:2], Purpose.CERTAIN)
            if rng.random() < 0.3:
                guesses = rng.sample(range(EXPERTS), 2)
                rig.pager.prefetch(layer, guesses, Purpose.SPECULATIVE)
            rig.ask(token * LAYERS + layer, layer, chosen)
    counters = rig.close()
    replayed = reproduce(read_trace(path)).told()
    assert replayed == told(counters, replayed)
    decode = counters["decode"]
    assert min(decode[name] for name in ("hits", "prefetched", "misses", "evictions")) > 20
    assert decode["failed"] > 5
    assert decode["warm_hits"] > 0


@pytest.mark.parametrize(("policy", "slots"), [("auto", 5), ("lru", 4), ("slru", 7)])
def test_a_models_own_counters_come_out_again(
    policy: str, slots: int, tiny_path: Path, tmp_path: Path
) -> None:
    cache = CacheOptions(slots=slots, policy=policy, trace=tmp_path / "t")
    with Engine.load(tiny_path, threads=2, cache=cache) as engine:
        state = engine.new_state()
        logits = engine.forward(state, list(range(30, 60)))  # more experts than slots: bands
        for _ in range(20):
            logits = engine.forward(state, [int(np.argmax(logits[-1]))])
        counters = engine.cache_counters()
    assert counters is not None
    replayed = reproduce(read_trace(tmp_path / "t")).told()
    assert replayed == told(counters, replayed)
    assert counters["prefill"]["evictions"] > 0
    assert counters["decode"]["misses"] > 0
    trace = read_trace(tmp_path / "t")
    assert trace.header.limits == {"quarantine_slots": 4}  # the hash layer's next token
    work = Workload.of(trace)
    assert work.tokens == {"prefill": 30, "decode": 20}
    # Certain reads ahead are misses here; nothing else differs.
    priced = price(work, policy, slots).told()
    for phase, counts in replayed.items():
        ahead = counts["prefetched"]
        assert (
            priced[phase]["compulsory"] + priced[phase]["misses"]
            == counts["compulsory"] + counts["misses"] + ahead
        )
        assert priced[phase]["accesses"] == counts["accesses"]


def test_a_resident_run_is_reproduced_and_priced_cold(tiny_path: Path, tmp_path: Path) -> None:
    with Engine.load(tiny_path, threads=2, cache=CacheOptions(trace=tmp_path / "t")) as engine:
        state = engine.new_state()
        engine.forward(state, list(range(30, 60)))
        engine.forward(state, [5])
    trace = read_trace(tmp_path / "t")
    assert reproduce(trace).reads == 0
    cold = price(Workload.of(trace), "lru", trace.header.slots)
    assert cold.reads == sum(counts["compulsory"] for counts in cold.told().values()) > 0


# ------------------------------------------------------------------ what a replay notices


def rewritten(path: Path, change: Any) -> Path:
    """The trace with one record changed by ``change(record) -> record``, the others as they are."""
    trace = read_trace(path)
    target = path.with_name("changed")
    recorder = Recorder(NewFile(target), trace.header)
    for record in trace:
        assert isinstance(record, BandRecord)
        r = change(record)
        recorder.dispatch(
            r.number, r.sequence, r.phase, r.token, r.layer, r.ids, r.distinct, r.outcomes,
            nbytes=r.nbytes,
        )  # fmt: skip
    recorder.close()
    return target


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ids = streams.skewed(1, LAYERS, 60, EXPERTS, K)
    return streams.record(tmp_path / "run.trace", ids, streams.header(), prompt=10)


def test_the_unchanged_trace_is_reproduced(path: Path) -> None:
    again = rewritten(path, lambda record: record)
    assert reproduce(read_trace(again)).told() == reproduce(read_trace(path)).told()


@pytest.mark.parametrize("outcome", [0, 1, 2, 3])
def test_any_other_outcome_is_noticed(path: Path, outcome: int) -> None:
    target = next(r for r in read_trace(path).bands() if r.number > 20 and r.outcomes[1] != outcome)

    def change(record: BandRecord) -> BandRecord:
        if (record.number, record.layer) != (target.number, target.layer):
            return record
        outcomes = record.outcomes.copy()
        outcomes[1] = outcome
        return record._replace(outcomes=outcomes)

    expert = int(target.distinct[1])
    with pytest.raises(
        TraceError, match=rf"dispatch {target.number}, layer {target.layer}, expert {expert}: "
    ):
        reproduce(read_trace(rewritten(path, change)))


def test_other_bytes_are_noticed(path: Path) -> None:
    def change(record: BandRecord) -> BandRecord:
        return record._replace(nbytes=record.nbytes + (record.number == 30))

    with pytest.raises(TraceError, match="dispatch 30, layer 0: bytes"):
        reproduce(read_trace(rewritten(path, change)))


def test_a_band_of_more_experts_than_slots_is_refused(tmp_path: Path) -> None:
    recorder = Recorder(NewFile(tmp_path / "t"), streams.header(slots=2))
    recorder.dispatch(0, 0, "decode", 0, 0, [[1, 2, 3]], [1, 2, 3], [1, 1, 1], nbytes=30)
    recorder.close()
    with pytest.raises(TraceError, match="expected at most 2 experts, found 3"):
        reproduce(read_trace(tmp_path / "t"))


def test_a_warm_start_beyond_the_slots_is_refused(tmp_path: Path) -> None:
    recorder = Recorder(NewFile(tmp_path / "t"), streams.header(slots=2))
    for expert in range(3):
        recorder.warm(0, expert)
    recorder.dispatch(0, 0, "decode", 0, 0, [[0, 1, 2]], [0, 1], [3, 3])
    recorder.close()
    with pytest.raises(TraceError, match="a free slot"):
        reproduce(read_trace(tmp_path / "t"))


def test_other_parameters_are_refused(tmp_path: Path) -> None:
    made = streams.header(policy="lfu")
    made.parameters["decay"] = 0.5
    recorder = Recorder(NewFile(tmp_path / "t"), made)
    recorder.dispatch(0, 0, "decode", 0, 0, [[1, 2, 3]], [1, 2, 3], [1, 1, 1])
    recorder.close()
    with pytest.raises(TraceError, match="other parameters of lfu"):
        reproduce(read_trace(tmp_path / "t"))


def test_an_empty_trace_has_no_price(path: Path) -> None:
    with pytest.raises(TraceError, match="records no dispatch"):
        Workload.of(read_trace(streams.altered(path, streams.end(0))))


# ------------------------------------------------------------------ prices


def test_the_runs_own_policy_and_slots_cost_what_the_run_cost(path: Path) -> None:
    trace = read_trace(path)
    assert price(Workload.of(trace), "lru", SLOTS).told() == reproduce(trace).told()


def test_a_warm_start_is_one_for_other_policies_too(tmp_path: Path) -> None:
    recorder = Recorder(NewFile(tmp_path / "t"), streams.header(slots=5, warm_start="ab"))
    for expert in (1, 2, 3, 4):
        recorder.warm(0, expert)
    recorder.dispatch(0, 0, "decode", 0, 0, [[1, 3, 9]], [1, 3, 9], [3, 3, 1], nbytes=10)
    recorder.close()
    trace = read_trace(tmp_path / "t")
    assert sum(isinstance(record, WarmRecord) for record in trace) == 4
    assert reproduce(trace).told()["decode"]["warm_hits"] == 2
    work = Workload.of(trace)
    for slots, warm in ((3, 2), (4, 2)):  # the first three, then all
        for tally in (price(work, "lru", slots), belady(work, slots)):
            assert tally.told()["decode"]["warm_hits"] == warm
            assert tally.reads == 1


def best(steps: list[set[int]], slots: int) -> int:
    """The fewest reads that serve ``steps``, by trying every eviction."""

    @functools.cache
    def from_here(at: int, held: frozenset[int]) -> int:
        if at == len(steps):
            return 0
        wanted = steps[at]
        reads = len(wanted - held)
        spare = held - wanted
        keep = min(len(spare), slots - len(wanted))
        # Keeping more is never worse.
        return reads + min(
            from_here(at + 1, frozenset(wanted | set(kept))) for kept in combinations(spare, keep)
        )

    return from_here(0, frozenset())


def test_belady_is_the_best_there_is_also_for_sets() -> None:
    rng = random.Random(5)
    for _ in range(60):
        experts, slots = rng.randint(4, 7), rng.randint(3, 4)
        steps = [set(rng.sample(range(experts), rng.randint(1, 3))) for _ in range(9)]
        made = streams.header(layers=1, experts=experts)
        asked = tuple(Asked(0, "decode", tuple(step), len(step)) for step in steps)
        work = Workload(made, asked, {"prefill": 0, "decode": 9})
        assert belady(work, slots).reads == best(steps, slots)


def test_no_policy_reads_less_than_the_bound_and_more_slots_never_cost() -> None:
    work = streams.workload(streams.skewed(2, LAYERS, 80, EXPERTS, K), EXPERTS)
    reads = {}
    for slots in (5, 8, 16):
        rows = compare(work, ["auto", "lru", "lfu", "slru"], slots, lambda done: None)
        assert [row.policy for row in rows] == ["auto", "lru", "lfu", "slru", "belady"]
        bound = rows[-1].tally.reads
        assert all(row.tally.reads >= bound for row in rows)
        reads[slots] = bound
        gaps = {row.policy: row.gap for row in rows}
        if slots < EXPERTS:
            assert (gaps["lru"], gaps["belady"]) == (0, 1)
        else:  # all fit: each is read once, whatever the policy
            assert set(gaps.values()) == {None}
            assert {row.tally.reads for row in rows} == {rows[0].lru.reads}
    assert all(a >= b for a, b in pairwise(reads.values()))


def test_a_batch_is_cut_into_bands_that_fit_the_slots_asked_for() -> None:
    made = streams.header(layers=1)
    work = Workload(
        made,
        (Asked(0, "prefill", tuple(range(7)), 21), Asked(0, "decode", (6, 0, 1), 3)),
        {"prefill": 7, "decode": 1},
    )
    tally = price(work, "lru", 3)  # 012 345 6, then 4 and 5 go
    assert tally.told()["prefill"] == {
        "accesses": 21, "distinct": 7, "hits": 0, "warm_hits": 0, "prefetched": 0,
        "compulsory": 7, "misses": 0, "evictions": 4, "bytes": 70,
    }  # fmt: skip
    assert tally.told()["decode"]["misses"] == 2
    assert belady(work, 3).told()["decode"]["misses"] == 0 + 2
    assert price(work, "lru", 7).reads == 7


def test_bands_of_a_batch_are_one_again_in_a_workload(path: Path) -> None:
    ids = streams.skewed(1, LAYERS, 60, EXPERTS, K)
    work = Workload.of(read_trace(path))
    assert len(work.steps) == LAYERS * (1 + 50)
    batch = work.steps[0]
    assert isinstance(batch, Asked)
    assert len(batch.experts) > SLOTS
    assert batch.experts == tuple(dict.fromkeys(ids[0, :10].ravel().tolist()))
    assert batch.accesses == 10 * K


def test_a_warm_step_is_no_demand() -> None:
    work = Workload(
        streams.header(layers=1),
        (Warmed(0, 3), Asked(0, "decode", (3, 4, 5), 3)),
        {"prefill": 0, "decode": 1},
    )
    assert price(work, "auto", 4).reads == belady(work, 4).reads == 2
