"""Experts paged on the simulated device against all of them on it, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q import api
from ds4q.artifact.errors import ReceiptError
from ds4q.artifact.formats import codec_for
from ds4q.artifact.hfq import Reader
from ds4q.artifact.types import BF16, F16, HFP4G32, Q8F16
from ds4q.hipkern.driver import Device
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.device.expert_cache import ExpertCache
from ds4q.runtime.device.paging import bands
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import CacheError, SpreadError
from ds4q.runtime.experts.adapter import (
    NORMALISATION,
    STATE,
    TARGET,
    About,
    Adapter,
    Entry,
)
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.predict import Prefetcher
from ds4q.runtime.experts.profile import Profile
from ds4q.runtime.experts.trace import artifact_identity, read_trace
from ds4q.runtime.model.moe import route
from ds4q.runtime.source import Tensors
from ds4q.runtime.spread import Spread
from tests.checks import check_refused, same_bits
from tests.runtime.artifacts import DATA
from tests.runtime.device.conftest import Load
from tests.runtime.device.micro import CONFIG, tensors, write_micro
from tests.runtime.device.paged import (
    CHOSEN,
    EXPERTS,
    F32,
    LAYERS,
    PROMPT,
    THRASH,
    TOLERANCE,
    Logits,
    counts_of,
    resident,
    walk,
)

__all__ = ["resident"]  # a fixture


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


@pytest.mark.parametrize("slots", [CHOSEN, EXPERTS])
def test_every_choice_is_an_access(load: Load, micro_path: Path, slots: int) -> None:
    engine = load(micro_path, max_context=64, batch_tokens=8, cache=CacheOptions(slots=slots))
    state = engine.new_state()
    engine.forward(state, PROMPT)
    engine.next_id(state, [3])
    counts = counts_of(engine)
    assert counts["prefill"]["accesses"] == len(PROMPT) * CHOSEN * LAYERS
    assert counts["decode"]["accesses"] == CHOSEN * LAYERS
    assert counts["decode"]["distinct"] <= counts["decode"]["accesses"]


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


@pytest.mark.parametrize("layers", [(0,), (1,)])
def test_chosen_layers_alone(load: Load, micro_path: Path, layers: tuple[int, ...]) -> None:
    short = [
        load(micro_path, max_context=8, layers=layers, cache=cache) for cache in (None, THRASH)
    ]
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
    large = CacheOptions(budget=1 << 50)  # more than an integrated GPU reports: tried
    assert load(micro_path, cache=large).cache_counters() is None


def test_what_a_device_cannot_do_is_refused(load: Load, micro_path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t"
    states = CacheOptions(slots=CHOSEN, trace=trace, trace_states=True)
    check_refused(CacheError, lambda: load(micro_path, cache=states), says=["router states"])
    held = CacheOptions(trace=trace)
    check_refused(CacheError, lambda: load(micro_path, cache=held), says=["--expert-cache"])
    fits = CacheOptions(budget="auto", trace=trace)
    check_refused(CacheError, lambda: load(micro_path, cache=fits), says=["all of them fit"])
    crowd = CacheOptions(budget="auto", owner=(EXPERTS + 1, EXPERTS + 2))
    check_refused(CacheError, lambda: load(micro_path, cache=crowd), says=["owns no expert"])
    ranks = Spread(tensor_parallel=2)
    check_refused(SpreadError, lambda: load(micro_path, cache=THRASH, spread=ranks))
    for asked in ({"slots": CHOSEN}, {"budget": "auto"}, {}):  # paged or not
        receipt = CacheOptions(require_receipt=True, **asked)
        with pytest.raises(ReceiptError):
            load(micro_path, cache=receipt)
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


# ------------------------------------------------------------------ reading ahead


@pytest.fixture
def adapter(micro_path: Path, tmp_path: Path) -> Path:
    """A predictor of the learned layer that knows nothing: its guesses are arbitrary."""
    random, d = np.random.default_rng(8), CONFIG["hidden_size"]
    parts = random.standard_normal((4, d)), random.standard_normal((EXPERTS, 4)), np.zeros(EXPERTS)
    entry = Entry(*(part.astype(np.float32) for part in parts))
    with Reader(micro_path) as reader:
        about = About(artifact_identity(reader), STATE, TARGET, NORMALISATION, 0.1, 1, ("",))
    (tmp_path / "adapter").write_bytes(Adapter({0: entry}, about).encode())
    return tmp_path / "adapter"


def test_guesses_are_made_from_what_routers_see_and_change_no_bit(
    load: Load, micro_path: Path, resident: Logits, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[tuple[int, int], F32] = {}
    see = Prefetcher.see

    def remembering(self: Prefetcher, layer: int, ids: Any, logits: Any, x: F32) -> None:
        seen[layer, len(x)] = x
        see(self, layer, ids, logits, x)

    monkeypatch.setattr(Prefetcher, "see", remembering)
    cache = CacheOptions(slots=CHOSEN, adapter=adapter, prefetch_top=2)
    engine = load(micro_path, max_context=64, batch_tokens=8, cache=cache)
    same_bits(walk(engine), resident)
    counts = counts_of(engine)
    assert counts["speculative"]["issued"] > 0
    # A router's products are those of what it saw: the gate's rows times x.
    state = engine.new_state()
    shown: dict[str, Any] = {}
    engine.forward(state, PROMPT[:5], trace=lambda name, values: shown.update({name: values}))
    with Reader(micro_path) as reader:
        gate = Tensors(reader).values("layers.1.ffn.gate.weight", EXPERTS, CONFIG["hidden_size"])
        bias = Tensors(reader).values("layers.1.ffn.gate.bias", EXPERTS)
    chosen = route(seen[1, 5] @ gate.T, bias, CHOSEN)
    np.testing.assert_array_equal(chosen, shown["l1.route_idx"])


def test_a_profile_warms_the_cache(
    load: Load, micro_path: Path, resident: Logits, tmp_path: Path
) -> None:
    trace, profile = tmp_path / "run.trace", tmp_path / "profile"
    cold = load(micro_path, max_context=64, cache=CacheOptions(slots=CHOSEN, trace=trace))
    walk(cold)
    cold.close()
    profile.write_bytes(Profile.of(read_trace(trace)).encode())
    cache = CacheOptions(slots=CHOSEN, profile=profile)
    warm = load(micro_path, max_context=64, batch_tokens=8, cache=cache)
    deadline = time.monotonic() + 300
    while counts_of(warm)["loading"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert counts_of(warm)["warm"]["issued"] == LAYERS * CHOSEN
    same_bits(walk(warm), resident)
    assert counts_of(warm)["prefill"]["warm_hits"] > 0


def test_slots_leave_room_for_the_sequences_that_are_named(
    load: Load, micro_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    size = ExpertCache.size

    def note(self: ExpertCache, device: Device, needed: int) -> bool:
        asked.append(needed)
        return size(self, device, needed)

    monkeypatch.setattr(ExpertCache, "size", note)
    options: dict[str, Any] = {"max_context": 64, "cache": CacheOptions(budget="auto")}
    engine = load(micro_path, **options)
    one = engine.new_state().nbytes
    load(micro_path, **options, sequences=4, beside_bytes=1000)
    assert engine.backend.device.unified  # or what lies in the host's memory would not count
    assert asked[1] - asked[0] == 3 * one + 1000


# ------------------------------------------------------------------ what a watcher sees


def test_every_choice_is_counted_and_residents_are_told(load: Load, micro_path: Path) -> None:
    engine = load(micro_path, max_context=64, batch_tokens=8, cache=CacheOptions(slots=CHOSEN + 1))
    chosen = np.zeros((LAYERS, EXPERTS), np.int64)

    def see(name: str, values: Any) -> None:
        if name.endswith(".route_idx"):
            chosen[int(name[1 : name.index(".")])] += np.bincount(values.ravel(), minlength=EXPERTS)

    state, other = engine.new_state(), engine.new_state()
    for ids in (PROMPT, [7], [8]):
        engine.forward(state, ids, trace=see)
    before = engine.experts_view()
    assert before is not None
    assert (before.routed == chosen).all()
    assert before.routed.sum() == (len(PROMPT) + 2) * CHOSEN * LAYERS
    assert before.resident.dtype == bool
    assert (before.resident.sum(axis=1) == CHOSEN + 1).all()
    assert not (before.resident & (before.routed == 0)).any()
    engine.forward_many([(state, [9]), (other, [3, 4])])
    after = engine.experts_view()
    assert after is not None
    assert (after.routed - before.routed).sum() == 3 * CHOSEN * LAYERS


def test_a_device_that_holds_all_experts_tells_nothing_of_them(
    load: Load, micro_path: Path
) -> None:
    assert load(micro_path, max_context=16).experts_view() is None
