"""Several sequences in one step, and copies of sequences: the bits of each alone, always."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.hipkern.errors import DeviceMemoryError
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.device import snapshot
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.device.scratch import HEAD_TOKENS
from ds4q.runtime.device.snapshot import DeviceSnapshot
from ds4q.runtime.device.state import DeviceState
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import ContextError, RunError, SequenceError, TokenError
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.trace import read_trace
from ds4q.runtime.kvtype import KvType
from tests.checks import check_refused, same_bits
from tests.runtime.device.conftest import Load
from tests.runtime.device.micro import CONFIG
from tests.runtime.device.paged import THRASH, VOCAB

F32 = npt.NDArray[np.float32]
Logits = dict[int, list[F32]]  # of each turn, by sequence
Shared = tuple[HipEngine, dict[int, DeviceSnapshot], Logits]
BATCH, CONTEXT = 12, 160
# Sequences' first tokens: rings come round in the first, which is about to complete a window of
# 128; in the second the indexer is about to leave entries out; the third has seen nothing.
PROMPTS = [
    [int(token) for token in np.random.default_rng(seed).integers(2, VOCAB, count)]
    for seed, count in enumerate((125, 18, 0))
]
# Tokens of each sequence in each step: one for all, one for some, runs that differ, some of each.
TURNS = [(1, 1, 1), (1, 0, 1), (5, 4, 3), (1, 1, 1), (1, 9, 2), (0, 1, 1), (2, 1, 0)]
SHORT = (1, 2)  # the sequences without the long prompt


def tokens_of(sequence: int, turn: int) -> list[int]:
    """What a sequence gets in a turn."""
    first = 7 * sequence + 11 * turn
    return [2 + (first + i) % (VOCAB - 2) for i in range(TURNS[turn][sequence])]


def prompted(engine: HipEngine, sequences: Sequence[int]) -> dict[int, DeviceState]:
    """Sequences behind their prompts."""
    states = {n: engine.new_state() for n in sequences}
    for n, state in states.items():
        if PROMPTS[n]:
            engine.forward(state, PROMPTS[n])
    return states


def together(engine: HipEngine, states: dict[int, DeviceState], turns: Sequence[int]) -> Logits:
    """Logits of each sequence's ``turns``, all sequences that have one in one step."""
    found: Logits = {n: [] for n in states}
    for turn in turns:
        some = [n for n in states if TURNS[turn][n]]
        logits = engine.forward_many([(states[n], tokens_of(n, turn)) for n in some])
        for n, row in zip(some, logits, strict=True):
            found[n].append(row)
    return found


@pytest.fixture(scope="module")
def shared(micro_path: Path) -> Iterator[Shared]:
    """An engine, its sequences behind their prompts, and what each then gives alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS4Q_HIP", "sim")
        with HipEngine.load(micro_path, max_context=CONTEXT, batch_tokens=BATCH) as engine:
            states = prompted(engine, range(len(PROMPTS)))
            copies = {n: engine.snapshot(state) for n, state in states.items()}
            alone = {
                n: [
                    engine.forward(state, tokens)[0]
                    for turn in range(len(TURNS))
                    if (tokens := tokens_of(n, turn))
                ]
                for n, state in states.items()
            }
            yield engine, copies, alone


def check_alike(found: Logits, wanted: Logits) -> None:
    """The same bits, of the sequences that were found."""
    for n, rows in found.items():
        same_bits(np.array(rows), np.array(wanted[n]))


def test_any_mix_of_sequences_gives_the_bits_of_each_alone(shared: Shared) -> None:
    """And a sequence that was put back goes on as one that never stopped."""
    engine, copies, alone = shared
    states = {n: engine.restore(copy) for n, copy in copies.items()}
    check_alike(together(engine, states, range(len(TURNS))), alone)
    assert {2, 3} <= set(engine._steps.graphs)


@pytest.mark.parametrize(
    "way", [{"replay": False, "max_context": None}, {"cache": THRASH}], ids=["direct", "paged"]
)
def test_any_way_to_run_gives_the_same_bits(
    load: Load,
    micro_path: Path,
    shared: Shared,
    way: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By replay and without, paged, in caches that grow, copied in small pieces in between."""
    monkeypatch.setattr("ds4q.runtime.device.state.FIRST_TOKENS", 16)
    monkeypatch.setattr(snapshot, "HELD_BYTES", 1000)
    engine = load(micro_path, **{"max_context": CONTEXT, "batch_tokens": BATCH} | way)
    states = prompted(engine, SHORT)
    found = together(engine, states, range(4))
    copies = {n: engine.snapshot(state) for n, state in states.items()}
    engine.forward_many([(state, [90, 91, 92, 93]) for state in states.values()])
    for state in states.values():
        state.close()
    for _ in range(2):  # a copy can be put back more than once
        again = {n: engine.restore(copy) for n, copy in copies.items()}
        rest = together(engine, again, range(4, len(TURNS)))
        check_alike({n: found[n] + rest[n] for n in SHORT}, shared[2])
    assert bool(engine._steps.graphs) == way.get("replay", True)


def test_a_graph_serves_any_sequences(load: Load, micro_path: Path) -> None:
    engine = load(micro_path, max_context=16, batch_tokens=BATCH)
    first, second = ([engine.new_state() for _ in range(2)] for _ in range(2))
    wanted = engine.forward_many([(first[0], [4]), (first[1], [9])])
    kept = engine._steps.graphs[2]
    swapped = engine.forward_many([(second[1], [9]), (second[0], [4])])
    same_bits(swapped[::-1], wanted)
    assert engine._steps.graphs[2] is kept
    assert len(np.unique(wanted, axis=0)) == 2


def test_more_sequences_than_logits_are_held_of(load: Load, micro_path: Path) -> None:
    count = HEAD_TOKENS + 1
    engine = load(micro_path, max_context=8, batch_tokens=count)
    states = [engine.new_state() for _ in range(count)]
    found = engine.forward_many([(state, [3 + n]) for n, state in enumerate(states)])
    for n in (0, HEAD_TOKENS - 1, HEAD_TOKENS):
        same_bits(found[n : n + 1], engine.forward(engine.new_state(), [3 + n]))
    assert [state.position for state in states] == [1] * count


def test_what_cannot_be_one_step_moves_no_sequence(
    load: Load, micro_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(micro_path, max_context=8, batch_tokens=6)
    one, other = engine.new_state(), engine.new_state()
    engine.forward(one, [2, 3])
    closed, foreign = engine.new_state(), load(micro_path, max_context=8).new_state()
    closed.close()
    cases: list[tuple[type[RunError], list[Any], str]] = [
        (RunError, [], "one or more"),
        (RunError, [(one, [4] * 3), (other, [5] * 4)], "at most 6"),
        (SequenceError, [(one, [4]), (other, [5]), (one, [6])], "twice"),
        (SequenceError, [(one, [4]), (closed, [5])], "closed"),
        (SequenceError, [(one, [4]), (foreign, [5])], "not a sequence of this engine"),
        (TokenError, [(one, [4]), (other, [VOCAB])], f"0..{VOCAB - 1}"),
        (TokenError, [(one, [4]), (other, [])], "one or more integers"),
        (ContextError, [(other, [4]), (one, [5] * 7)], "at most 8"),
    ]
    for error, parts, says in cases:
        check_refused(error, partial(engine.forward_many, parts), says=[says])
    download, broken = HipEngine._download, RuntimeError("broken")

    def fail(*_: Any) -> None:
        raise broken

    monkeypatch.setattr(HipEngine, "_download", fail)
    with pytest.raises(RuntimeError, match="broken"):
        engine.forward_many([(one, [60, 61]), (other, [62])])
    monkeypatch.setattr(HipEngine, "_download", download)
    assert (one.position, other.position) == (2, 0)
    fresh = engine.new_state()
    engine.forward(fresh, [2, 3])
    same_bits(engine.forward(one, [7]), engine.forward(fresh, [7]))


def test_a_step_of_several_sequences_is_one_of_its_own_to_a_trace(
    load: Load, micro_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "t.trace"
    engine = load(
        micro_path, max_context=16, batch_tokens=8, cache=CacheOptions(slots=4, trace=path)
    )
    one, other = engine.new_state(), engine.new_state()
    engine.forward(one, [2, 3])
    engine.forward_many([(other, [5]), (one, [4])])
    engine.forward(one, [6])
    engine.close()
    bands = read_trace(path).bands()
    told = [(band.sequence, band.token, len(band.ids), band.phase) for band in bands]
    joint = (2, 0, 2, "prefill")  # ``other`` begins with it
    assert told[::2] == [(0, 0, 2, "prefill"), joint, (0, 3, 1, "decode")]


# ------------------------------------------------------------------ rows of 16 bits


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_rows_of_16_bits_follow_the_cpu_and_go_together(
    load: Load, micro_path: Path, shared: Shared, kind: KvType
) -> None:
    engine = load(micro_path, max_context=40, batch_tokens=BATCH, kv_type=kind)
    cpu = Engine.load(micro_path, threads=1, max_context=40, kv_type=kind)
    own, theirs = engine.new_state(), cpu.new_state()
    prompt = PROMPTS[1]
    found = engine.forward(own, prompt, "all")
    wanted = cpu.forward(theirs, prompt, "all")
    # A row between two values may be rounded either way, once sums differ: few are. All are rounded
    # by up to half a step, relative to logits of up to 8.
    step = 2.0**-8 if kind == "bf16" else 2.0**-11
    assert np.abs(found - wanted).max() < step
    full = load(micro_path, max_context=40, batch_tokens=BATCH)
    exact = full.forward(full.new_state(), prompt, "all")
    assert 2 * step < np.abs(found - exact).max() < 20 * step
    copy, other = engine.snapshot(own), engine.new_state()
    assert copy.nbytes < full_bytes(full, prompt)
    again = engine.restore(copy)
    last = engine.forward(own, [5])
    same_bits(engine.forward_many([(other, [7, 8]), (again, [5])])[1:], last)


def full_bytes(engine: HipEngine, prompt: list[int]) -> int:
    """Bytes of a copy of a sequence behind ``prompt``."""
    state = engine.new_state()
    engine.forward(state, prompt)
    return engine.snapshot(state).nbytes


def test_an_unknown_kv_type_is_refused(load: Load, micro_path: Path) -> None:
    wrong: Any = "q8"
    check_refused(RunError, lambda: load(micro_path, kv_type=wrong), says=["f32, f16, bf16", "q8"])


# ------------------------------------------------------------------ copies


def test_a_copy_holds_what_later_steps_read_and_no_more(load: Load, micro_path: Path) -> None:
    engine = load(micro_path, max_context=CONTEXT, batch_tokens=BATCH)
    state, width, index = engine.new_state(), CONFIG["head_dim"], CONFIG["index_head_dim"]
    assert engine.snapshot(state).nbytes == 0
    engine.forward(state, [2] * 10)
    windows = 2 * 7 * width  # the next token's own row comes with it
    raw = 2 * 6 * 2 * (width + index) + 2 * 10 * width  # 4 .. 9 at ratio 4, all at 128
    entries = 2 * (width + index)
    copy = engine.snapshot(state)
    assert copy.nbytes == 4 * (windows + raw + entries) < state.nbytes / 4
    with pytest.raises(ValueError, match="read-only"):
        copy.rows[0] = 1


def test_copies_leave_no_memory_on_the_device(sim: Control, load: Load, micro_path: Path) -> None:
    engine = load(micro_path, max_context=CONTEXT, batch_tokens=BATCH)
    state = engine.new_state()
    engine.forward(state, [2] * 5)
    copy = engine.snapshot(state)
    before = sim.get("live_allocations")
    with engine.restore(copy) as again:
        engine.forward_many([(state, [3]), (again, [3, 4])])
        engine.snapshot(again)
        assert sim.get("live_allocations") == before + 2
    assert sim.get("live_allocations") == before
    other = load(micro_path, max_context=CONTEXT, batch_tokens=BATCH)
    before = sim.get("live_allocations")
    check_refused(SequenceError, lambda: other.restore(copy), says=["snapshot of this engine"])
    state.close()
    check_refused(SequenceError, lambda: engine.snapshot(state), says=["closed"])
    device = engine.backend.device
    sim.set(memory_bytes=device.total_bytes - device.free_bytes() + 1000)
    check_refused(DeviceMemoryError, lambda: engine.restore(copy), says=["bytes free"])
    assert sim.get("live_allocations") == before - 2
