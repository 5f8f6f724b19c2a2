"""What a trace hears of a run: every band, in order, with what its experts met."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ds4q.runtime.experts.ledger import Dispatch
from ds4q.runtime.experts.reading import Purpose
from ds4q.runtime.experts.trace import (
    BandRecord,
    GoneRecord,
    Header,
    Outcome,
    Recorder,
    WarmRecord,
    read_trace,
)
from tests.runtime.experts.fakes import NBYTES, Bench, bench

HEADER = Header(
    artifact="a" * 32,
    layers=1,
    hash_layers=0,
    experts=16,
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
    recorder = Recorder(path, HEADER)
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
    recorder = Recorder(path, HEADER)
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
