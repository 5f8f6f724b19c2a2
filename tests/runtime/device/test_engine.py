"""A model on the simulated device against the same model on the CPU, and against itself."""

from __future__ import annotations

import hashlib
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.hipkern.sim.control import Control
from ds4q.hipkern.streams import Stream
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import ContextError, LogitsError, SequenceError, TokenError
from ds4q.runtime.generate import generate
from ds4q.runtime.sampling import Sampler
from tests.checks import check_refused, same_bits
from tests.runtime.device.conftest import Load
from tests.runtime.device.micro import CONFIG, tensors, write_micro

VOCAB = CONFIG["vocab_size"]
PROMPT = [int(token) for token in np.random.default_rng(3).integers(2, VOCAB, 150)]
# Sums in another order, and no term that cancels more than a few digits: logits here are below 10,
# and two layers of a hundred or so terms each round some tens of times.
TOLERANCE = 1e-4


def logits_of(engine: Any, prompt: list[int], *cuts: int) -> npt.NDArray[np.float32]:
    """All logits of ``prompt``, fed in pieces that end at ``cuts``."""
    state = engine.new_state()
    edges = [0, *cuts, len(prompt)]
    parts = [engine.forward(state, prompt[a:b], "all") for a, b in pairwise(edges)]
    return np.concatenate(parts)


def test_every_intermediate_is_that_of_the_cpu(
    load: Load, micro_path: Path, micro_engine: Engine
) -> None:
    """Through the first window of 128, and past what the indexer leaves unchosen."""
    found: dict[str, list[Any]] = {}
    wanted: dict[str, list[Any]] = {}
    pair: list[tuple[Any, Any]] = [(load(micro_path), found), (micro_engine, wanted)]
    for engine, seen in pair:
        state = engine.new_state()
        for part in (PROMPT[:130], PROMPT[130:131]):

            def trace(name: str, values: Any, seen: dict[str, list[Any]] = seen) -> None:
                seen.setdefault(name, []).append(np.array(values))

            engine.forward(state, part, trace=trace)
    names = set(wanted) - {"l0.compressed_kv", "l1.compressed_kv", "l1.index_topk"}
    assert names == set(found)
    for name in names - {"l1.streams", "hc_head_out", "final_norm"}:
        for ours, theirs in zip(found[name], wanted[name], strict=True):
            if name.endswith("index_topk"):
                theirs = theirs[:, : ours.shape[1]]
                assert [set(row) for row in ours] == [set(row) for row in theirs]
                continue
            assert ours.shape == theirs.shape, name
            assert np.abs(ours - theirs).max() < TOLERANCE, name


def test_logits_are_those_of_the_cpu(load: Load, micro_path: Path, micro_engine: Engine) -> None:
    wanted = logits_of(micro_engine, PROMPT)
    assert np.abs(wanted).max() > 1
    found = logits_of(load(micro_path), PROMPT, 140)
    assert np.abs(found - wanted).max() < TOLERANCE


def test_bits_do_not_depend_on_how_the_prompt_is_cut(load: Load, micro_path: Path) -> None:
    whole = logits_of(load(micro_path), PROMPT)
    cut = logits_of(load(micro_path, batch_tokens=7), PROMPT, 1, 2, 50, 128)
    same_bits(cut, whole)


def digests(engine: HipEngine, steps: int) -> list[str]:
    """A digest of each step's logits; every step is fed the last one's greedy id."""
    state, token, found = engine.new_state(), 2, []
    for _ in range(steps):
        logits = engine.forward(state, [token])
        token = int(logits.argmax())
        found.append(hashlib.sha256(logits.tobytes()).hexdigest())
    return found


def test_two_hundred_steps_by_replay_are_those_of_direct_dispatch(
    load: Load, micro_path: Path
) -> None:
    replayed = load(micro_path, max_context=200)
    direct = load(micro_path, max_context=200, replay=False)
    found, wanted = digests(replayed, 200), digests(direct, 200)
    assert len(set(wanted)) == 200
    assert found == wanted
    assert replayed._steps.graphs
    assert not direct._steps.graphs


def test_the_environment_turns_graphs_off(
    load: Load, micro_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS4Q_HIP_GRAPH", "0")
    engine = load(micro_path, max_context=8)
    engine.next_id(engine.new_state(), [2])
    assert not engine._steps.graphs


def test_sequences_take_turns_and_caches_grow_under_one_graph(
    load: Load, micro_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured for one sequence serves another, and one whose rows have moved."""
    alone = load(micro_path, max_context=64)
    prompts = ([2, 3, 4], [50, 40, 30, 20])

    def walk(engine: HipEngine, together: bool) -> list[bytes]:
        states = [engine.new_state() for _ in prompts]
        found: list[list[bytes]] = [[], []]
        for i, state in enumerate(states):
            engine.forward(state, prompts[i])
        order = [0, 1] * 24 if together else [0] * 24 + [1] * 24
        for i in order:
            found[i].append(engine.forward(states[i], [5 + len(found[i])]).tobytes())
        return found[0] + found[1]

    wanted = walk(alone, together=False)
    monkeypatch.setattr("ds4q.runtime.device.state.FIRST_TOKENS", 8)
    growing = load(micro_path)
    assert walk(growing, together=True) == wanted
    state = growing.new_state()
    small = state.nbytes
    growing.forward(state, [2] * 9)
    assert state.nbytes > small


def test_greedy_ids_are_those_of_the_logits(
    load: Load, micro_path: Path, micro_engine: Engine
) -> None:
    engine = load(micro_path, max_context=60)
    sampler = Sampler(temperature=0, top_p=1, seed=0)
    options: Any = {"max_tokens": 20, "context_tokens": 60, "sampler": sampler}
    found, wanted = generate(engine, [2, 3], **options), generate(micro_engine, [2, 3], **options)
    list(found)
    list(wanted)
    assert found.ids == wanted.ids
    assert len(set(found.ids)) > 2


def test_a_drawn_id_comes_from_the_same_logits(
    load: Load, micro_path: Path, micro_engine: Engine
) -> None:
    engine = load(micro_path, max_context=60)
    ids = []
    for model in (engine, micro_engine):
        sampler = Sampler(temperature=1, top_p=0.9, seed=7)
        run = generate(model, [2, 3], max_tokens=12, context_tokens=60, sampler=sampler)
        list(run)
        ids.append(run.ids)
    assert ids[0] == ids[1]


def test_a_greedy_step_brings_an_id_down_and_nothing_else(
    load: Load, micro_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations stay where they are: 4 bytes come down, a block of fixed size goes up, and the
    host waits once. numpy raises wherever the runtime would reach for it but for positions."""
    engine = load(micro_path, max_context=60)
    state = engine.new_state()
    engine.next_id(state, [2, 3, 4])
    engine.next_id(state, [5])  # the graph is captured by now
    down: list[int] = []
    up: list[int] = []
    waits: list[str] = []
    downloading, uploading, waiting = Stream.download, Stream.upload, Stream.synchronize

    def download(self: Stream, target: Any, address: int, nbytes: int | None = None) -> None:
        down.append(target.nbytes if nbytes is None else nbytes)
        downloading(self, target, address, nbytes)

    def upload(self: Stream, address: int, source: Any, nbytes: int | None = None) -> None:
        up.append(source.nbytes if nbytes is None else nbytes)
        uploading(self, address, source, nbytes)

    def synchronize(self: Stream) -> None:
        waits.append("stream")
        waiting(self)

    class NoNumpy:
        ndarray = np.ndarray  # for isinstance alone

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"numpy.{name} is asked for in a decode step")

    monkeypatch.setattr(Stream, "download", download)
    monkeypatch.setattr(Stream, "upload", upload)
    monkeypatch.setattr(Stream, "synchronize", synchronize)
    for name, module in list(sys.modules.items()):
        positions = ("ds4q.runtime.model.rope", "ds4q.runtime.engine", "ds4q.runtime.device.block")
        if name.startswith("ds4q.") and name not in positions and hasattr(module, "np"):
            monkeypatch.setattr(module, "np", NoNumpy())
    for _ in range(8):
        engine.next_id(state, [6])
    assert down == [4] * 8
    assert waits == ["stream"] * 8
    assert len(set(up)) == 1
    assert len(up) == 8
    assert up[0] < 4 * CONFIG["hidden_size"] * CONFIG["hc_mult"]  # less than one token's streams


def test_logits_that_are_not_finite_are_refused(load: Load, tmp_path: Path) -> None:
    kind, shape, payload = tensors()["head.weight"]
    wrong = payload.copy().view("<u2")
    wrong[3 * shape[1] :: 97] = 0x7F7F  # 3.4e38: sums of it overflow
    path = write_micro(tmp_path / "m.hfq", **{"head.weight": (kind, shape, wrong.view(np.uint8))})
    engine = load(path, max_context=8)
    state = engine.new_state()
    check_refused(LogitsError, lambda: engine.next_id(state, [2, 3]), says=["finite"])


def test_what_the_cpu_refuses_is_refused(load: Load, micro_path: Path) -> None:
    engine = load(micro_path, max_context=4)
    state = engine.new_state()
    check_refused(TokenError, lambda: engine.next_id(state, [VOCAB]), says=[f"0..{VOCAB - 1}"])
    check_refused(TokenError, lambda: engine.forward(state, []))
    check_refused(ContextError, lambda: engine.forward(state, [2] * 5), says=["at most 4"])
    assert state.position == 0
    check_refused(ContextError, lambda: load(micro_path, max_context=0))


def test_nothing_is_left_on_the_device(sim: Control, micro_path: Path) -> None:
    before = sim.live()
    with HipEngine.load(micro_path, max_context=16) as engine:
        state = engine.new_state()
        engine.next_id(state, [2, 3])
        engine.next_id(state, [4])
        held = sim.get("live_allocations")
        state.close()
        assert sim.get("live_allocations") == held - 2
        dropped = engine.new_state()
        del dropped
        assert sim.get("live_allocations") == held - 2
        engine.new_state()
    assert sim.live() == before


def test_a_closed_sequence_and_another_engines_are_refused(load: Load, micro_path: Path) -> None:
    engine, other = load(micro_path, max_context=8), load(micro_path, max_context=8)
    state, foreign = engine.new_state(), other.new_state()
    engine.forward(state, [1, 2])
    state.close()
    with pytest.raises(SequenceError, match="the sequence was closed"):
        engine.forward(state, [3])
    with pytest.raises(SequenceError, match="not a sequence of this engine"):
        engine.next_id(foreign, [3])
    assert state.position == 2
