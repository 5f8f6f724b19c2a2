"""What a trace hears of a run: every band, in order, with what its experts met."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.artifact.errors import TruncatedError
from ds4q.artifact.newfile import NewFile
from ds4q.runtime.experts.header import Header
from ds4q.runtime.experts.ledger import Dispatch
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.policy import POLICIES, parameters_of
from ds4q.runtime.experts.reading import Purpose
from ds4q.runtime.experts.replay import reproduce
from ds4q.runtime.experts.store import Phase
from ds4q.runtime.experts.trace import (
    BandRecord,
    GoneRecord,
    Outcome,
    Recorder,
    WarmRecord,
    read_trace,
)
from tests.runtime.experts.fakes import NBYTES, Bench, ByThread, Memory, Numbered, bench

HEADER = Header(
    artifact="a" * 32,
    layers=1,
    hash_layers=0,
    experts=16,
    owned=(0, 16),
    top_k=3,
    hidden=8,
    slots=3,
    slot_bytes=(NBYTES,),
    expert_bytes=((NBYTES,),),
    policy="lru",
)


def band(made: Bench, number: int, *ids: int) -> None:
    """Ask as a described dispatch, for one token."""
    described = Dispatch(number, 5, number + 10, np.array([ids]))
    made.hold(*ids, dispatch=described).release()


def test_a_trace_tells_what_each_expert_met(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    recorder = Recorder(NewFile(path), HEADER)
    with bench(slots=3, quarantine=2, recorder=recorder) as made:
        made.pager.prefetch(0, [7, 8], Purpose.WARM)
        made.transport.serve_all()
        band(made, 0, 1, 7, 2)
        made.pager.prefetch(0, [4, 5], Purpose.SPECULATIVE)
        made.transport.serve_all()
        band(made, 1, 8, 2, 4)
        made.use(1)  # not described: not recorded
    recorder.close()
    warm, *rest = read_trace(path)
    assert warm == WarmRecord(0, 7)
    second, first, last = rest
    assert second == WarmRecord(0, 8)
    assert isinstance(first, BandRecord)
    assert isinstance(last, BandRecord)
    assert first.distinct.tolist() == [1, 7, 2]
    assert first.outcomes.tolist() == [Outcome.COMPULSORY, Outcome.WARM, Outcome.COMPULSORY]
    assert (first.number, first.sequence, first.phase, first.token) == (0, 5, "decode", 10)
    assert (first.issued, first.used, first.dropped, first.nbytes) == (0, 0, 0, 2 * NBYTES)
    assert last.outcomes.tolist() == [Outcome.COMPULSORY, Outcome.HIT, Outcome.PREFETCHED]
    assert (last.issued, last.used, last.dropped, last.nbytes) == (2, 1, 0, NBYTES)
    assert last.ids.tolist() == [[8, 2, 4]]


def test_a_trace_tells_which_reads_failed(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    recorder = Recorder(NewFile(path), HEADER)
    with bench(slots=3, recorder=recorder) as made:
        caller = made.ask(1, 2, dispatch=Dispatch(0, 0, 0, np.array([[1, 2]])))
        made.transport.serve(1)
        made.transport.serve(2, error=OSError("gone"))
        caller.failed()
        band(made, 1, 2, 1)
    recorder.close()
    first, gone, second = read_trace(path)
    assert isinstance(first, BandRecord)
    assert gone == GoneRecord(0, 2)
    assert isinstance(second, BandRecord)
    assert second.outcomes.tolist() == [Outcome.MISS, Outcome.HIT]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_meets_what_the_run_met(tmp_path: Path, policy: str) -> None:
    """Whatever was read ahead, warmed, or failed between the dispatches."""
    layers, experts, slots, quarantine = 3, 16, 5, 2
    header = replace(
        HEADER,
        layers=layers,
        slots=slots,
        slot_bytes=(NBYTES,) * layers,
        expert_bytes=((NBYTES,),) * layers,
        policy=policy,
        parameters=parameters_of(policy),
        warm_start="a profile",
    )
    recorder = Recorder(NewFile(tmp_path / "run.trace"), header)
    catalogue: Any = Numbered(experts, layers)
    transport = ByThread(Memory(catalogue, slots + quarantine), errors=0.03, delay_s=0.0005)
    pager = Pager(
        catalogue, slots, transport, policy=policy, quarantine=[2] * layers, recorder=recorder
    )
    draw = random.Random(5)
    failed = 0
    for layer in range(layers):
        pager.prefetch(layer, draw.sample(range(experts), 4), Purpose.WARM)
    for number in range(150):
        phase: Phase = "prefill" if number < 20 else "decode"
        for layer in range(layers):
            guess = draw.choice((Purpose.CERTAIN, Purpose.SPECULATIVE))
            pager.prefetch(draw.randrange(layers), draw.sample(range(experts), 2), guess)
            ids = np.array([draw.sample(range(experts), 3)])
            try:
                pager.acquire(
                    layer, ids[0].tolist(), phase, Dispatch(number, 0, number, ids)
                ).release()
            except TruncatedError:
                failed += 1
    transport.settle()
    pager.close()
    recorder.close()
    told = reproduce(read_trace(tmp_path / "run.trace")).told()
    counted = pager.counters()
    assert failed
    assert counted["decode"]["prefetched"]
    for each, counts in told.items():
        assert counts == {name: counted[each][name] for name in counts}
