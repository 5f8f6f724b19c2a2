"""Experts paged on the simulated device against all of them on it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q import api
from ds4q.artifact.errors import ReceiptError, TruncatedError
from ds4q.artifact.formats import codec_for
from ds4q.artifact.types import BF16, F16, HFP4G32, Q8F16
from ds4q.hipkern.errors import HipError
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.device import expert_cache, transport
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.device.paging import DevicePaging, bands
from ds4q.runtime.device.pointers import PointerTables
from ds4q.runtime.device.state import DeviceState
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import CacheError, ExpertReadError, SpreadError
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.pager import Lease, Pager
from ds4q.runtime.experts.reading import ExpertReader
from ds4q.runtime.experts.trace import read_trace
from ds4q.runtime.spread import Spread
from tests.checks import check_refused, same_bits
from tests.runtime.artifacts import DATA
from tests.runtime.device.conftest import Load
from tests.runtime.device.micro import CONFIG, tensors, write_micro

Logits = npt.NDArray[np.float32]

EXPERTS, CHOSEN = CONFIG["n_routed_experts"], CONFIG["num_experts_per_tok"]
LAYERS, VOCAB = CONFIG["num_hidden_layers"], CONFIG["vocab_size"]
PROMPT = [int(token) for token in np.random.default_rng(3).integers(2, VOCAB, 12)]
STEPS = 12
THRASH = CacheOptions(slots=CHOSEN)
TOLERANCE = 1e-4  # as in test_engine
DELAY_US = 3000


def walk(engine: Any) -> Logits:
    """Logits of a prompt, and of a few steps of which each is fed the last one's greedy id."""
    state = engine.new_state()
    found = [engine.forward(state, PROMPT, "all")]
    for _ in range(STEPS):
        found.append(engine.forward(state, [int(found[-1][-1].argmax())]))
    return np.concatenate(found)


def many_steps(engine: HipEngine, state: DeviceState) -> None:
    """So many that an expert must be read."""
    for token in range(2, 40):
        engine.next_id(state, [token])


@pytest.fixture(scope="module")
def resident(micro_path: Path) -> Logits:
    """Logits of the walk with all experts on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS4Q_HIP", "sim")
        with HipEngine.load(micro_path, max_context=64, batch_tokens=8) as engine:
            return walk(engine)


def counts_of(engine: HipEngine) -> dict[str, Any]:
    """What paging counted."""
    found = engine.cache_counters()
    assert found is not None
    return found


# ------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("slots", [CHOSEN, EXPERTS - 1, EXPERTS])
@pytest.mark.parametrize("replay", [True, False])
def test_bits_are_those_of_a_resident_model(
    load: Load, micro_path: Path, resident: Logits, slots: int, replay: bool
) -> None:
    engine = load(
        micro_path,
        max_context=64,
        batch_tokens=8,
        replay=replay,
        cache=CacheOptions(slots=slots),
    )
    same_bits(walk(engine), resident)
    counts = counts_of(engine)
    evictions = counts["prefill"]["evictions"] + counts["decode"]["evictions"]
    assert (evictions > 0) == (slots < EXPERTS)
    assert counts["certain"]["used"] > 0
    assert counts["leased"] == counts["loading"] == 0


def test_a_router_is_waited_for_once_a_layer_and_a_hash_layer_never(
    load: Load, micro_path: Path
) -> None:
    engine = load(micro_path, max_context=64, cache=CacheOptions(slots=EXPERTS))
    state = engine.new_state()
    engine.next_id(state, PROMPT)
    before = counts_of(engine)
    for token in range(2, 7):
        engine.next_id(state, [token])
    after = counts_of(engine)
    assert after["readbacks"] - before["readbacks"] == 5 * (LAYERS - CONFIG["num_hash_layers"])
    # All experts have been met by now: nothing is read any more, and no table goes up.
    assert after["reads"]["reads"] == before["reads"]["reads"] == LAYERS * EXPERTS
    assert after["table_uploads"] == before["table_uploads"]


def test_intermediates_are_those_of_a_resident_model(load: Load, micro_path: Path) -> None:
    found: list[dict[str, Any]] = [{}, {}]
    for seen, options in zip(found, ({}, {"cache": THRASH}), strict=True):
        engine = load(micro_path, max_context=64, **options)
        state = engine.new_state()
        for part in (PROMPT, [7]):
            step = len(part)

            def trace(name: str, values: Any, seen: Any = seen, step: int = step) -> None:
                seen[name, step] = np.array(values)

            engine.forward(state, part, trace=trace)
    assert ("l1.routed_out", 1) in found[0]
    assert found[0].keys() == found[1].keys()
    for name, values in found[0].items():
        np.testing.assert_array_equal(found[1][name], values, str(name))


def test_experts_of_different_types_share_slots(load: Load, tmp_path: Path) -> None:
    """What decodes an expert is its own, wherever its bytes are."""
    random, made = np.random.default_rng(4), tensors()
    kinds = (HFP4G32, BF16, F16, Q8F16)
    changed = {}
    for name, (_, shape, _) in made.items():
        if ".experts." in name:
            kind = kinds[(int(name.split(".")[4]) + ("w2" in name)) % len(kinds)]
            values = random.standard_normal(shape, dtype=np.float32) / 8
            if kind is not HFP4G32:
                changed[name] = kind, shape, codec_for(kind.id).encode(values)
    for name in list(changed):  # gate and up are of one type
        if "w3" in name:
            gate = changed[name.replace("w3", "w1")]
            changed[name] = gate[0], gate[1], np.roll(gate[2], gate[2].size // gate[1][0])
    path = write_micro(tmp_path / "mixed.hfq", **changed)
    wanted, found = (
        walk(load(path, max_context=64, batch_tokens=8, cache=cache)) for cache in (None, THRASH)
    )
    same_bits(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ds4-tiny", "ds4-random"])
@pytest.mark.parametrize("recipe", ["fp4", "budget"])
def test_both_test_models_give_the_same_ids(
    load: Load, tmp_path: Path, name: str, recipe: str
) -> None:
    path = tmp_path / "model.hfq"
    bits = 3.0 if recipe == "budget" else None
    api.quantize(
        DATA / name, path, recipe=recipe, target_bpw=bits, threads=2, warn=lambda line: None
    )
    prompt = np.random.default_rng(7).integers(2, 500, 40).tolist()
    found = []
    for slots in (None, 16, 4):
        cache = None if slots is None else CacheOptions(slots=slots)
        with load(path, max_context=80, cache=cache) as engine:
            state = engine.new_state()
            logits = [engine.forward(state, prompt)]
            for _ in range(32):
                logits.append(engine.forward(state, [int(logits[-1].argmax())]))
            found.append(np.concatenate(logits))
            if slots is not None:
                evictions = counts_of(engine)["decode"]["evictions"]
                assert (evictions > 0) == (slots == 4)
    same_bits(found[1], found[0])
    same_bits(found[2], found[0])


def test_the_first_layers_alone(load: Load, micro_path: Path) -> None:
    short = [load(micro_path, max_context=8, layers=1, cache=cache) for cache in (None, THRASH)]
    wanted, found = (engine.forward(engine.new_state(), [5, 6, 7]) for engine in short)
    same_bits(found, wanted)
    whole = load(micro_path, max_context=8)
    assert not np.array_equal(whole.forward(whole.new_state(), [5, 6, 7]), wanted)


# ------------------------------------------------------------------ who owns what


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_experts_contribute_zero(load: Load, micro_path: Path, rank: int) -> None:
    """The same as the CPU's, however a rank keeps its own."""
    owner = (rank, 2)
    held = CacheOptions(owner=owner, cold="none")
    wanted = walk(Engine.load(micro_path, threads=1, cache=held))
    hot = load(micro_path, max_context=64, cache=held)
    found = walk(hot)
    assert np.abs(found - wanted).max() < TOLERANCE
    paged = load(micro_path, max_context=64, cache=CacheOptions(slots=CHOSEN, owner=owner))
    same_bits(walk(paged), found)
    owned = len(ExpertOwnership.of_rank(rank, 2, EXPERTS).owned)
    assert counts_of(hot)["reads"]["reads"] == LAYERS * owned


def test_bands_are_cut_in_order_of_first_appearance() -> None:
    everyone = ExpertOwnership.all(10)
    chosen = np.array([[5, 2], [2, 9], [7, 5], [1, 0]])
    assert bands(chosen, 3, everyone, 10) == [[5, 2, 9], [7, 1, 0]]
    assert bands(chosen, 9, everyone, 10) == [[5, 2, 9, 7, 1, 0]]
    assert bands(chosen, 3, ExpertOwnership(0, 2), 10) == [[1, 0]]
    assert bands(chosen, 3, ExpertOwnership(3, 4), 10) == [[]]
    # What is no expert is nobody's, and must be seen by whoever refuses it.
    assert bands(np.array([[1, 10]]), 3, ExpertOwnership(0, 2), 10) == [[1, 10]]


# ------------------------------------------------------------------ how many slots


def test_a_budget_buys_slots_and_all_that_fit_are_resident(
    sim: Control, load: Load, micro_path: Path, resident: Logits
) -> None:
    engine = load(micro_path, max_context=64, batch_tokens=8, cache=CacheOptions(budget="auto"))
    assert engine.cache_counters() is None
    assert any("paging is off" in note for note in engine.notes)
    same_bits(walk(engine), resident)
    paged = load(micro_path, max_context=64, cache=CacheOptions(slots=EXPERTS))
    slot_bytes = sum(counts_of(paged)["slot_bytes"])
    sized = load(micro_path, max_context=64, cache=CacheOptions(budget=3 * slot_bytes + 1))
    assert counts_of(sized)["slots"] == 3
    small = CacheOptions(budget=(CHOSEN - 1) * slot_bytes)
    check_refused(CacheError, lambda: load(micro_path, cache=small), says=[f"{CHOSEN} slots"])
    large = CacheOptions(budget=1 << 50)
    check_refused(CacheError, lambda: load(micro_path, cache=large), says=["larger than memory"])


def test_what_a_device_cannot_do_is_refused(load: Load, micro_path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t"
    states = CacheOptions(slots=CHOSEN, trace=trace, trace_states=True)
    check_refused(CacheError, lambda: load(micro_path, cache=states), says=["router states"])
    held = CacheOptions(trace=trace)
    check_refused(CacheError, lambda: load(micro_path, cache=held), says=["--expert-cache"])
    ranks = Spread(tensor_parallel=2)
    check_refused(SpreadError, lambda: load(micro_path, cache=THRASH, spread=ranks))
    receipt = CacheOptions(slots=CHOSEN, require_receipt=True)
    check_refused(ReceiptError, lambda: load(micro_path, cache=receipt))
    assert not list(tmp_path.iterdir())


def test_a_trace_tells_what_was_asked_for(load: Load, micro_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    cache = CacheOptions(slots=CHOSEN, trace=path)
    engine = load(micro_path, max_context=64, cache=cache)
    walk(engine)
    counts = counts_of(engine)
    engine.close()
    records = list(read_trace(path).bands())
    assert {record.layer for record in records} == set(range(LAYERS))
    for phase in ("prefill", "decode"):
        distinct = sum(len(record.distinct) for record in records if record.phase == phase)
        assert distinct == counts[phase]["distinct"] > 0


# ------------------------------------------------------------------ what goes wrong


def test_nothing_is_left_and_nothing_is_copied_from_pageable_memory(
    sim: Control, micro_path: Path
) -> None:
    before = sim.live()
    copies = sim.get("pageable_copies")
    with HipEngine.load(micro_path, max_context=64, batch_tokens=8, cache=THRASH) as engine:
        walk(engine)
        engine.next_id(engine.new_state(), PROMPT)
        assert sim.live()["pinned"] > 0
    assert sim.live() == before
    assert sim.get("pageable_copies") == copies


def test_a_read_error_in_mid_run_is_one_error_and_the_run_can_go_on(
    sim: Control, micro_path: Path, resident: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, stage, broken = sim.live(), ExpertReader.stage, [False]

    def failing(self: ExpertReader, record: Any, staging: Any) -> Any:
        if broken[0]:
            raise OSError(5, "Input/output error")
        return stage(self, record, staging)

    monkeypatch.setattr(ExpertReader, "stage", failing)
    with HipEngine.load(micro_path, max_context=64, batch_tokens=8, cache=THRASH) as engine:
        state = engine.new_state()
        engine.forward(state, PROMPT)
        broken[0] = True
        with pytest.raises(ExpertReadError, match="experts"):
            many_steps(engine, state)
        position = state.position
        with pytest.raises(ExpertReadError):
            walk(engine)
        assert state.position == position
        broken[0] = False
        same_bits(walk(engine), resident)
        assert counts_of(engine)["leased"] == counts_of(engine)["loading"] == 0
    assert sim.live() == before


def test_a_file_that_is_cut_while_it_runs_is_told(
    sim: Control, micro_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "cut.hfq"
    path.write_bytes(micro_path.read_bytes())
    with HipEngine.load(path, max_context=64, cache=THRASH) as engine:
        state = engine.new_state()
        engine.forward(state, PROMPT)
        with path.open("r+b") as file:
            file.truncate(4096)
        with pytest.raises(TruncatedError):
            many_steps(engine, state)


@pytest.mark.parametrize(
    "fault",
    [
        "hipHostMalloc:{n}:2",
        "hipMalloc:{n}:2",
        "hipStreamCreateWithFlags:3:2",
        "hipMemcpyAsync:{n}:1",
    ],
)
@pytest.mark.parametrize("n", [3, 7])
def test_a_failed_load_leaves_nothing(sim: Control, micro_path: Path, fault: str, n: int) -> None:
    before = sim.live()
    sim.set(fail=fault.format(n=n))
    with pytest.raises(HipError):
        HipEngine.load(micro_path, max_context=16, cache=THRASH)
    sim.set(fail="")
    assert sim.live() == before


def test_a_failed_copy_of_an_expert_is_told_and_leaves_nothing(
    sim: Control, micro_path: Path
) -> None:
    before = sim.live()
    with HipEngine.load(micro_path, max_context=64, batch_tokens=8, cache=THRASH) as engine:
        state = engine.new_state()
        engine.forward(state, PROMPT)
        sim.set(fail="hipMemcpyAsync:9:1")
        with pytest.raises(HipError):
            many_steps(engine, state)
        sim.set(fail="")
    assert sim.live() == before


def test_an_engine_that_is_closed_while_it_reads_leaves_nothing(
    sim: Control, micro_path: Path
) -> None:
    before = sim.live()
    engine = HipEngine.load(micro_path, max_context=64, cache=THRASH)
    engine.forward(engine.new_state(), PROMPT)
    sim.set(delay_us=DELAY_US)
    engine._paging._predictor.begin(np.arange(2, 40), "prefill")  # type: ignore[union-attr]
    engine.close()
    sim.set(delay_us=0)
    assert sim.live() == before


# ------------------------------------------------------------------ mistakes made on purpose


def stale_pointers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PointerTables, "_upload", lambda self, layer: None)


def staging_reused_early(patch: pytest.MonkeyPatch) -> None:
    """The next expert is read where the copy of this one still reads; then all wait."""
    patch.setattr(transport._Lane, "_await_copy", lambda self: None)
    acquire = Pager.acquire

    def acquired(self: Pager, *rest: Any) -> Lease:
        lease = acquire(self, *rest)
        self._transport._stream.synchronize()  # type: ignore[attr-defined]
        return lease

    patch.setattr(Pager, "acquire", acquired)


def resident_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transport._Lane, "_await_copy", lambda self: None)
    patch.setattr(expert_cache, "THREADS", 1)  # so that no other read comes in between


def slots_given_back_early(patch: pytest.MonkeyPatch) -> None:
    """Kernels still read the slots that the next band's experts are written to."""
    release = Lease.release
    patch.setattr(Lease, "release", lambda self, event=None: release(self))


MUTANTS = [
    stale_pointers,
    staging_reused_early,
    resident_before_the_copy,
    slots_given_back_early,
]


@pytest.fixture
def differs(sim: Control, micro_path: Path, load: Load) -> Callable[[], bool]:
    """Whether a slow device that thrashes gives other logits than one that holds all experts.

    The host does not wait between the batches of a prompt.
    """
    whole = load(micro_path, max_context=64, batch_tokens=4)
    wanted = whole.forward(whole.new_state(), 2 * PROMPT)

    def differs() -> bool:
        engine = load(micro_path, max_context=64, batch_tokens=4, cache=THRASH)
        for seed in range(1, 7):
            sim.set(delay_us=DELAY_US, delay_seed=seed)
            found = engine.forward(engine.new_state(), 2 * PROMPT)
            sim.set(delay_us=0)
            if not np.array_equal(found, wanted):
                return True
        return False

    return differs


def test_a_slow_device_gives_the_same_bits(differs: Callable[[], bool]) -> None:
    assert not differs()


@pytest.mark.parametrize("mutate", MUTANTS)
def test_mutants_are_caught(
    mutate: Callable[[pytest.MonkeyPatch], None],
    differs: Callable[[], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    assert differs()


@pytest.mark.parametrize("waits", [True, False])
def test_ids_of_a_band_go_up_before_the_next_are_written(
    sim: Control, micro_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Where a step is all hits and hash layers, nothing else makes the host wait for the copy."""
    engine = load(micro_path, max_context=64, batch_tokens=4, cache=THRASH)
    paging, stream = engine._paging, engine.backend.stream
    assert paging is not None
    if not waits:
        monkeypatch.setattr(DevicePaging, "_await_ids", lambda self: None)
    first, second = (np.full((4, CHOSEN), fill, np.int32) for fill in (1, 2))
    kept = engine.backend.device.alloc(first.nbytes)
    stream.synchronize()
    sim.set(delay_us=50_000, delay_seed=3)
    paging._send(first)
    stream.move(kept.address, paging._ids.place.address, first.nbytes)
    paging._send(second)
    sim.set(delay_us=0)
    found = np.empty_like(first)
    stream.download(found, kept.address)
    np.testing.assert_array_equal(found, first if waits else second)
