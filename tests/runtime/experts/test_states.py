"""Router states in a trace: what was computed, bit for bit where it can be, and nothing changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from ds4q.artifact.newfile import NewFile
from ds4q.artifact.types import F32
from ds4q.runtime.backend.weights import Weight
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import TraceError
from ds4q.runtime.experts.fit import pairs, train
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.states import StateRecorder
from ds4q.runtime.experts.trace import (
    BandRecord,
    Recorder,
    RouterRecord,
    StatesRecord,
    read_trace,
)
from ds4q.runtime.model.moe import Router, scores
from tests.checks import check_refused, same_bits
from tests.runtime.experts.statetraces import header

PROMPT = [256, *b"def main(argv):\n    return"]
STEPS = 3


@contextmanager
def recorded(path: Path, trace: Path, slots: int | None) -> Iterator[Engine]:
    options = CacheOptions(trace=trace, trace_states=True, slots=slots)
    with Engine.load(path, threads=2, cache=options) as engine:
        yield engine


def say(engine: Engine, prompt: list[int]) -> list[int]:
    """The prompt and ``STEPS`` tokens, each the most likely."""
    state, ids = engine.new_state(), list(prompt)
    logits = engine.forward(state, prompt)
    for _ in range(STEPS):
        ids.append(int(logits[-1].argmax()))
        logits = engine.forward(state, ids[-1:])
    return ids


@pytest.mark.parametrize("slots", [None, 5])
def test_states_are_what_routers_saw(
    tiny_path: Path, tiny_engine: Engine, tmp_path: Path, slots: int | None
) -> None:
    trace = tmp_path / "t.trace"
    with recorded(tiny_path, trace, slots) as engine:
        ids = say(engine, PROMPT)
        routers = [block.router for block in engine._blocks]
    assert ids == say(tiny_engine, PROMPT)
    records = list(read_trace(trace))
    states = [record for record in records if isinstance(record, StatesRecord)]
    assert [s.layer for s in states] == [0, 1, 2, 3] * (1 + STEPS)
    assert [s.token for s in states[::4]] == [0, *range(len(PROMPT), len(PROMPT) + STEPS)]
    assert [s.phase for s in states[::4]] == ["prefill"] + ["decode"] * STEPS
    for layer in range(4):
        of_layer = [s for s in states if s.layer == layer]
        assert [n for s in of_layer for n in s.tokens.tolist()] == ids
    gates = {r.layer: r for r in records if isinstance(r, RouterRecord)}
    assert sorted(gates) == [1, 2, 3]  # layer 0 looks its experts up
    for s in states:
        router = gates.get(s.layer)
        if router is None:
            table = routers[s.layer].by_token
            assert table is not None
            assert (table[s.tokens] == s.ids).all()
            continue
        best = np.argsort(-(s.scores + router.bias), axis=1, kind="stable")[:, : s.ids.shape[1]]
        assert (best == s.ids).all()
        again = scores(s.hidden.astype(np.float32) @ router.gate.T)
        np.testing.assert_allclose(again, s.scores, atol=0.01)  # hidden is float16
    bands = [record for record in records if isinstance(record, BandRecord)]
    first = {(b.layer, b.token): b.ids for b in bands}
    for s in states:
        same_bits(first[s.layer, s.token], s.ids)


def test_traces_of_both_kinds_fit_the_same_predictor(tiny_path: Path, tmp_path: Path) -> None:
    found = []
    for slots in (None, 5):
        trace = tmp_path / f"{slots}.trace"
        with recorded(tiny_path, trace, slots) as engine:
            say(engine, PROMPT)
            say(engine, PROMPT[:7])
        assert {p.source.sequence for p in pairs(read_trace(trace))} == {0, 1}
        found.append(train([trace]))
    assert found[0].about == found[1].about
    for layer, entry in found[0].entries.items():
        for part, other in zip(entry, found[1].entries[layer], strict=True):
            same_bits(part, other)


def test_layers_that_neither_predict_nor_are_predicted_are_left_out(
    random_path: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "t.trace"
    with recorded(random_path, trace, None) as engine:
        engine.forward(engine.new_state(), [1, 2, 3])
        hash_layers = engine.config.num_hash_layers
    records = list(read_trace(trace))
    layers = {record.layer for record in records if isinstance(record, StatesRecord)}
    assert hash_layers == 2
    assert layers == {1, 2, 3, 4, 5}
    assert {r.layer for r in records if isinstance(r, RouterRecord)} == {2, 3, 4, 5}


def learned() -> Router:
    gate = Weight(F32.id, 10, 12, np.zeros(10 * 12 * 4, np.uint8))
    return Router(gate, np.zeros(10, np.float32), None)


@pytest.mark.parametrize("value", [1e6, np.nan, -np.inf])
def test_an_input_that_float16_cannot_hold_is_refused(tmp_path: Path, value: float) -> None:
    x = np.full((1, 12), value, np.float32)
    ids, logits = np.zeros((1, 3), np.int64), np.zeros((1, 10), np.float32)
    with closing(Recorder(NewFile(tmp_path / "t"), header())) as recorder:
        states = StateRecorder(recorder, [learned()])
        states.begin(0, 0, np.zeros(1, np.int64), "decode")
        check_refused(TraceError, lambda: states.see(0, ids, logits, x), says=["too large", "0"])


def test_hash_layers_alone_have_nothing_to_record(tmp_path: Path) -> None:
    by_token = Router(learned().gate, None, np.zeros((4, 3), np.int32))
    with closing(Recorder(NewFile(tmp_path / "t"), header(hash_layers=4))) as recorder:
        states = StateRecorder(recorder, [by_token] * 4)
        states.begin(0, 0, np.zeros(1, np.int64), "decode")
        for layer in range(4):
            ids, logits, x = (np.zeros((1, n)) for n in (3, 10, 12))
            states.see(layer, ids.astype(np.int64), logits.astype(np.float32), x.astype("f4"))
        recorder.dispatch(0, 0, "decode", 0, 0, [[0, 1, 2]], [0, 1, 2], [1, 1, 1])
    assert len(list(read_trace(tmp_path / "t"))) == 1
