"""Several sequences in one step, and copies of them: each gets the bits that it gets alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.artifact.fastpath import reference_wanted
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import (
    ContextError,
    ExpertReadError,
    RouterError,
    RunError,
    SequenceError,
    TokenError,
)
from ds4q.runtime.experts.fit import pairs
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.reading import ExpertReader
from ds4q.runtime.experts.replay import reproduce
from ds4q.runtime.experts.trace import read_trace
from ds4q.runtime.kv import Snapshot, State
from ds4q.runtime.kvtype import STORED, KvType, narrow
from tests.checks import check_refused, same_bits
from tests.runtime.artifacts import DATA

F32 = npt.NDArray[np.float32]
PROMPT = np.load(DATA / "ds4-random" / "prompt.npy")
TOKENS = 150  # past the window, several ratio-4 windows over topk, one ratio-128 window
BATCH = 48
TEXTS = [(PROMPT[:TOKENS] + shift) % 512 for shift in (0, 7, 100, 311)]


@pytest.fixture(scope="module")
def alone(random_engine: Engine) -> list[F32]:
    """Logits of every id of each text, asked for by itself."""
    return [random_engine.forward(random_engine.new_state(), ids, "all") for ids in TEXTS]


@pytest.fixture(scope="module")
def engines(random_path: Path) -> Iterator[dict[str, Engine]]:
    """All experts in memory, and a cache that thrashes."""
    with ExitStack() as stack:
        load = lambda **options: stack.enter_context(  # noqa: E731
            Engine.load(random_path, batch_tokens=BATCH, **options)
        )
        yield {
            "resident": load(threads=2),
            "paged": load(threads=1, cache=CacheOptions(slots=4)),
        }


def check_same(found: F32, expected: F32) -> None:
    """Bit for bit, where the compiled kernels run; numpy's products depend on the batch's shape."""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= (1e-4 if reference_wanted() else 0.0)


class Conversation:
    """One text on its way through an engine, with what it was at earlier places."""

    def __init__(self, engine: Engine, text: int) -> None:
        self.engine, self.text = engine, text
        self.state = engine.new_state()
        self.kept: list[Snapshot] = []

    def ids(self, count: int) -> npt.NDArray[Any]:
        """The next ``count`` of its text, fewer at the end."""
        at: int = self.state.position
        return TEXTS[self.text][at : at + count]

    def go_back(self, which: int) -> None:
        """Go on from an earlier place, in a sequence of its own."""
        if self.kept:
            self.state = self.engine.restore(self.kept[which % len(self.kept)])


def run(engine: Engine, steps: list[list[tuple[int, int, int]]], alone: list[F32]) -> int:
    """Each step: (text, ids, keep or return) each; the number of parts that were compared."""
    talks = [Conversation(engine, text) for text in range(len(TEXTS))]
    compared = 0
    for step in steps:
        parts = []
        for text, count, back in {text: (text, count, back) for text, count, back in step}.values():
            talk = talks[text]
            if back == 0:
                talk.kept.append(engine.snapshot(talk.state))
            elif back > 0:
                talk.go_back(back)
            if len(ids := talk.ids(count)):
                parts.append((talk, ids))
        if not parts:
            continue
        logits = engine.forward_many([(talk.state, ids) for talk, ids in parts])
        for row, (talk, _) in zip(logits, parts, strict=True):
            check_same(row, alone[talk.text][talk.state.position - 1])
        compared += len(parts)
    return compared


STEP = st.lists(
    st.tuples(
        st.integers(0, len(TEXTS) - 1),
        st.one_of(st.just(1), st.integers(1, BATCH // len(TEXTS))),
        st.integers(-6, 3),
    ),
    min_size=1,
    max_size=len(TEXTS),
)


@pytest.mark.parametrize("kind", ["resident", "paged"])
@settings(max_examples=12)
@given(steps=st.lists(STEP, min_size=5, max_size=25))
def test_any_mix_gives_the_bits_of_each_alone(
    engines: dict[str, Engine], alone: list[F32], kind: str, steps: list[list[tuple[int, int, int]]]
) -> None:
    assert run(engines[kind], steps, alone) > 0


@pytest.mark.parametrize("kind", ["resident", "paged"])
def test_long_texts_side_by_side(engines: dict[str, Engine], alone: list[F32], kind: str) -> None:
    """Past every window; the first at last an id a step, as in decoding."""
    steps = [
        [(0, 12 if n < 9 else 1, -1), (1, 12, -1), (2, 5, -1), (3, 1 + n % 12, n % 4)]
        for n in range(50)
    ]
    assert run(engines[kind], steps, alone) > 120


# ---------------------------------------------------------------- KV types


@pytest.mark.parametrize("kv_type", ["f16", "bf16"])
def test_rows_of_16_bits_are_rounded_once(
    random_path: Path, alone: list[F32], kv_type: KvType
) -> None:
    """Neither pieces, company, threads nor copies show; and logits move, but little."""
    engine = Engine.load(random_path, threads=2, batch_tokens=BATCH, kv_type=kv_type)
    known = [engine.forward(engine.new_state(), ids, "all") for ids in TEXTS]
    moved = np.median(np.abs(np.concatenate(known) - np.concatenate(alone)))
    assert 1e-4 < moved < 0.05  # not the largest: some choices of experts fall otherwise
    steps = [[(n % 4, 11, -1), ((n + 1) % 4, 1, n % 3), ((n + 2) % 4, 7, -1)] for n in range(24)]
    assert run(engine, steps, known) > 48


@pytest.mark.parametrize("kv_type", ["f16", "bf16"])
def test_rows_are_the_nearest_to_those_of_float32(
    random_path: Path, engines: dict[str, Engine], kv_type: KvType
) -> None:
    """In the first layer, whose input no rounding has touched."""
    engine = Engine.load(random_path, threads=1, kv_type=kv_type, layers=range(1))
    state, plain = engine.new_state(), engines["resident"].new_state()
    engine.forward(state, TEXTS[0][:20])
    engines["resident"].forward(plain, TEXTS[0][:20])
    rows = narrow(plain.layers[0].window.rows[:20], STORED[kv_type])
    same_bits(state.layers[0].window.rows[:20], rows)
    assert engine.snapshot(state).nbytes == 20 * 2 * engine.config.head_dim


def test_an_unknown_type_is_refused(random_path: Path) -> None:
    wrong: Any = "q8"
    check_refused(
        RunError,
        lambda: Engine.load(random_path, threads=1, kv_type=wrong),
        says=["KV type", "f32, f16, bf16", "q8"],
    )


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("position", [0, 1, 3, 4, 31, 127, 128, 150])
def test_a_copy_outlives_its_sequence(
    engines: dict[str, Engine], alone: list[F32], position: int
) -> None:
    engine, state = engines["resident"], engines["resident"].new_state()
    if position:
        engine.forward(state, TEXTS[0][:position])
    copy = engine.snapshot(state)
    assert copy.position == position
    assert (copy.nbytes == 0) == (position == 0)
    assert all(rows.base is None for rows in copy.arrays)  # else it would hold the whole sequence
    engine.forward(state, 511 - TEXTS[0])  # rings are overwritten
    state.close()
    for _ in range(2):
        again = engine.restore(copy)
        assert again.number != state.number
        assert again.position == position
        if position < TOKENS:
            rest = engine.forward(again, TEXTS[0][position:], "all")
            check_same(rest, alone[0][position:])
    with pytest.raises(ValueError, match="read-only"):
        copy.layers[0][0][0][:] = 0


def test_a_copy_is_compact(engines: dict[str, Engine]) -> None:
    """130 tokens: in six layers 31 window rows; of ratio 4, twice two compressors with 32 entries
    and 6 raw rows in two parts; of ratio 128, two with an entry and 2 raw rows."""
    engine = engines["resident"]
    state = engine.new_state()
    engine.forward(state, TEXTS[0][:130])
    rows = 6 * 31 + 2 * 2 * (32 + 2 * 6 * 2) + 2 * (1 + 2 * 2)
    assert engine.snapshot(state).nbytes == 4 * engine.config.head_dim * rows < state.nbytes / 3


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("stop", ["attention", "last", "head"])
def test_a_step_that_fails_moves_nobody(
    engines: dict[str, Engine], alone: list[F32], monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    engine = engines["resident"]
    states = [engine.new_state() for _ in TEXTS]
    places = [0, 60, 3, 127]
    for state, place, text in zip(states, places, TEXTS, strict=True):
        if place:
            engine.forward(state, text[:place])

    def fail(*args: Any) -> None:
        raise RouterError(found="layer 5")

    block = engine._blocks[-1]
    owner = {"attention": block._attention, "last": block._experts, "head": engine._head}[stop]
    other = [(state, 511 - text[:12]) for state, text in zip(states, TEXTS, strict=True)]
    with monkeypatch.context() as patch:
        patch.setattr(type(owner), "forward", fail)
        check_refused(RouterError, lambda: engine.forward_many(other))
    assert [state.position for state in states] == places
    parts = [
        (state, text[place : place + 12])
        for state, place, text in zip(states, places, TEXTS, strict=True)
    ]
    for row, place, known in zip(engine.forward_many(parts), places, alone, strict=True):
        check_same(row, known[place + 11])


def test_a_failed_read_moves_nobody(
    engines: dict[str, Engine], alone: list[F32], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines["paged"]
    states = [engine.new_state() for _ in TEXTS]
    honest, left = ExpertReader.read, [20]

    def flaky(self: ExpertReader, record: Any, *parts: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise ExpertReadError(path=self.path, tensor=record.down.name, found="EIO")
        honest(self, record, *parts)

    monkeypatch.setattr(ExpertReader, "read", flaky)
    parts = [(state, text[:9]) for state, text in zip(states, TEXTS, strict=True)]
    check_refused(ExpertReadError, lambda: engine.forward_many(parts), says=["EIO"])
    assert [state.position for state in states] == [0] * len(TEXTS)
    for row, known in zip(engine.forward_many(parts), alone, strict=True):
        check_same(row, known[8])
    counters = engine.cache_counters()
    assert counters is not None
    assert counters["leased"] == 0


def test_bad_steps_are_refused_before_anything_moves(
    engines: dict[str, Engine], random_path: Path
) -> None:
    engine = engines["resident"]
    one, two = engine.new_state(), engine.new_state()
    ask = engine.forward_many
    check_refused(RunError, lambda: ask([]), says=["no sequences"])
    check_refused(SequenceError, lambda: ask([(one, [1]), (two, [2]), (one, [3])]), says=["twice"])
    check_refused(TokenError, lambda: ask([(one, [1]), (two, [512])]), says=["512"])
    check_refused(TokenError, lambda: ask([(one, [1]), (two, [])]))
    many = [(one, [1] * BATCH), (two, [1])]
    check_refused(RunError, lambda: ask(many), says=[f"at most {BATCH}", f"found {BATCH + 1}"])
    short = Engine.load(random_path, threads=1, max_context=4)
    pair = [(short.new_state(), [1, 2]), (short.new_state(), [1, 2, 3, 4, 5])]
    check_refused(ContextError, lambda: short.forward_many(pair), says=["4", "5"])
    assert one.position == two.position == pair[0][0].position == 0


# ---------------------------------------------------------------- records


@pytest.mark.parametrize("slots", [None, 4])
def test_a_trace_of_steps_together_is_a_trace(
    tmp_path: Path, random_path: Path, slots: int | None
) -> None:
    """A replay meets what the run met; no record pretends to follow a sequence that it mixes."""
    path = tmp_path / "run.trace"
    options = CacheOptions(slots=slots, trace=path, trace_states=True)
    with Engine.load(random_path, threads=1, batch_tokens=BATCH, cache=options) as engine:
        states = [engine.new_state() for _ in range(3)]
        engine.forward_many([(state, TEXTS[n][: 5 * n + 4]) for n, state in enumerate(states)])
        for n in range(3):
            engine.forward_many([(state, [n]) for state in states])
        engine.forward_many([(states[1], [5])])
        found = engine.cache_counters()
    trace = read_trace(path)
    reproduce(trace)
    bands = [band for band in trace.bands() if band.layer == 3]
    steps = [list(group) for _, group in itertools.groupby(bands, lambda band: band.number)]
    assert [len(step[0].ids) for step in steps] == [27, 3, 3, 3, 1]
    assert [step[0].phase for step in steps] == ["prefill", *["decode"] * 4]
    assert [(step[0].sequence, step[0].token) for step in steps] == [
        *((3 + n, 0) for n in range(4)),
        (1, 12),
    ]
    if found is not None:
        for phase in ("prefill", "decode"):
            distinct = sum(len(b.distinct) for b in trace.bands() if b.phase == phase)
            assert distinct == found[phase]["distinct"] > 0
    assert sum(len(pair.source.ids) for pair in pairs(trace)) == 4 * (27 + 3 * 3 + 1)


def test_states_of_one_engine_are_numbered_apart(engines: dict[str, Engine]) -> None:
    engine = engines["resident"]
    first: State = engine.new_state()
    engine.forward(first, [1, 2])
    made = [engine.new_state(), engine.restore(engine.snapshot(first)), engine.new_state()]
    assert len({state.number for state in (first, *made)}) == 4
