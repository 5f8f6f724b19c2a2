"""Paging on the CPU: the same logits bit for bit, errors that leave an engine usable, few reads."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q import api
from ds4q.artifact.errors import ChangedError, ReceiptError, TruncatedError
from ds4q.runtime.collect import Collector
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import (
    CacheError,
    ExpertRangeError,
    ExpertReadError,
    TransportClosedError,
)
from ds4q.runtime.experts import cache as opening
from ds4q.runtime.experts import setup as equipping
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.paged import PagedExperts
from ds4q.runtime.experts.profile import Profile
from ds4q.runtime.experts.reading import ExpertReader
from ds4q.runtime.experts.replay import reproduce
from ds4q.runtime.experts.trace import read_trace
from tests.checks import check_refused, same_bits
from tests.runtime import mixed
from tests.runtime.artifacts import DATA, config_of, pack, write

F32 = npt.NDArray[np.float32]
RANDOM = DATA / "ds4-random"
PROMPT = np.load(RANDOM / "prompt.npy")
EXPERTS, K = 16, 4  # of both models
NEW_TOKENS = 3


@pytest.fixture(scope="module")
def mixed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ds4-random with every type among the experts of two layers, decode tables too."""
    made, _, metadata = mixed.encode(pack(RANDOM), "dual", "zero")
    path = tmp_path_factory.mktemp("mixed") / "mixed.hfq"
    return write(path, config_of(RANDOM), made, rocmfpx=metadata)


@pytest.fixture(scope="module")
def paths(tiny_path: Path, random_path: Path, mixed_path: Path) -> dict[str, Path]:
    return {"tiny": tiny_path, "random": random_path, "mixed": mixed_path}


@pytest.fixture(scope="module")
def resident(paths: dict[str, Path]) -> Callable[[str, int], F32]:
    """What an engine with all experts in memory says, by model and length of the prompt."""
    engines: dict[str, Engine] = {}
    known: dict[tuple[str, int], F32] = {}

    def say(name: str, length: int) -> F32:
        if name not in engines:
            engines[name] = Engine.load(paths[name], threads=1)
        if (name, length) not in known:
            known[name, length] = greedy(engines[name], length)
        return known[name, length]

    return say


def greedy(engine: Engine, length: int, new_tokens: int = NEW_TOKENS) -> F32:
    """Logits of the last token of a prompt and of those that follow."""
    state = engine.new_state()
    rows = [engine.forward(state, PROMPT[:length])]
    for _ in range(new_tokens):
        rows.append(engine.forward(state, [int(rows[-1][0].argmax())]))
    return np.concatenate(rows)


def paged(path: Path, **options: Any) -> Engine:
    return Engine.load(path, threads=1, cache=CacheOptions(**{"slots": K} | options))


def counts(engine: Engine) -> dict[str, Any]:
    found = engine.cache_counters()
    assert found is not None
    return found


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "auto"])
@pytest.mark.parametrize("slots", [K, 7, EXPERTS])
@pytest.mark.parametrize("name", ["tiny", "random", "mixed"])
def test_paging_changes_no_bit(
    paths: dict[str, Path],
    resident: Callable[[str, int], F32],
    name: str,
    slots: int,
    policy: str,
) -> None:
    with paged(paths[name], slots=slots, policy=policy) as engine:
        for length in (1, 7):
            same_bits(greedy(engine, length), resident(name, length))
        found = counts(engine)
    evictions = sum(found[phase]["evictions"] for phase in ("prefill", "decode"))
    assert (evictions > 0) == (slots < EXPERTS)
    assert found["leased"] == found["loading"] == 0


@pytest.mark.parametrize(("name", "slots"), [("tiny", K), ("random", K), ("mixed", 7)])
def test_bands_change_no_bit(
    paths: dict[str, Path], resident: Callable[[str, int], F32], name: str, slots: int
) -> None:
    """A batch that wants every expert comes in bands, each expert in one of them."""
    with paged(paths[name], slots=slots) as engine:
        same_bits(greedy(engine, 300), resident(name, 300))
        prefill = counts(engine)["prefill"]
    assert prefill["misses"] <= prefill["compulsory"]  # two batches: an expert is read once in each


@pytest.fixture(scope="module")
def budgets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Artifacts of the budget recipe, as ``ds4q quantize`` makes them."""
    folder = tmp_path_factory.mktemp("budget")

    @functools.cache
    def made(name: str) -> Path:
        path = folder / f"{name}.hfq"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what quantize says of the models
            api.quantize(DATA / name, path, recipe="budget", target_bpw=3.0, threads=2)
        return path

    return made


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "auto"])
@pytest.mark.parametrize("slots", [K, EXPERTS])
@pytest.mark.parametrize("name", ["tiny", "random", "mixed", "ds4-tiny", "ds4-random"])
def test_paging_changes_no_bit_of_long_answers(
    paths: dict[str, Path], budgets: Callable[[str], Path], name: str, slots: int, policy: str
) -> None:
    path = paths.get(name) or budgets(name)
    whole = Engine.load(path, threads=2)
    with paged(path, slots=slots, policy=policy, require_receipt=name not in paths) as engine:
        for length in (1, 7, 31, 32, 33, 300):
            same_bits(greedy(engine, length, 64), greedy(whole, length, 64))


def test_neither_threads_nor_batches_show(
    random_path: Path, resident: Callable[[str, int], F32]
) -> None:
    options = CacheOptions(slots=5)
    with Engine.load(random_path, threads=3, batch_tokens=2, cache=options) as engine:
        same_bits(greedy(engine, 7), resident("random", 7))


def test_calibration_sees_the_same_through_bands(random_path: Path, random_engine: Engine) -> None:
    with paged(random_path) as engine:
        sums = []
        for each in (engine, random_engine):
            collector = Collector(each.config, 1)
            each.forward(each.new_state(), PROMPT[:40], observer=collector)
            sums.append(collector.statistics())
    for found, expected in zip(*sums, strict=True):
        for name in ("tokens", "gain", "gate_up", "down"):
            same_bits(getattr(found, name), getattr(expected, name))


def test_the_cut_is_in_order_of_first_appearance(random_path: Path) -> None:
    with paged(random_path) as engine:
        store = engine_store(engine)
        assert store._cut(np.array([[5, 5, 2], [2, 5, 9]])) == [None]
        ids = np.array([[1, 2, 1], [3, 9, 2], [5, 7, 1]])
        first, second = store._cut(ids)
        assert first is not None
        assert second is not None
        assert set(ids[first].tolist()) == {1, 2, 3, 9}
        assert set(ids[second].tolist()) == {5, 7}
        assert (first ^ second).all()


def engine_store(engine: Engine) -> PagedExperts:
    assert engine._cache is not None
    store = engine._cache.store
    assert isinstance(store, PagedExperts)
    return store


@pytest.mark.parametrize("wrong", [-1, EXPERTS, 1 << 40])
def test_experts_out_of_range_are_never_clamped(random_path: Path, wrong: int) -> None:
    with paged(random_path) as engine:
        before = counts(engine)
        store = engine_store(engine)
        for ids in ([[0, wrong]], [[n] for n in (*range(9), wrong)]):
            bands = store.bands(2, np.array(ids), "decode")
            check_refused(ExpertRangeError, partial(list, bands), says=[f"found {wrong}"])
        assert counts(engine)["leased"] == before["leased"] == 0


# ---------------------------------------------------------------- what is read, and when


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the experts' gates that are read, in order."""
    seen: list[str] = []
    honest = ExpertReader.read

    def read(self: ExpertReader, record: Any, *parts: Any) -> None:
        seen.append(record.gate.name)
        honest(self, record, *parts)

    monkeypatch.setattr(ExpertReader, "read", read)
    return seen


def test_loading_reads_no_expert(random_path: Path, reads: list[str]) -> None:
    told: list[tuple[int, int]] = []
    with Engine.load(
        random_path,
        threads=1,
        cache=CacheOptions(slots=K),
        progress=lambda done, total: told.append((done, total)),
    ) as engine:
        store = engine_store(engine)
        experts_bytes = sum(r.nbytes for layer in store._packed for r in layer)
        assert told[-1][0] == told[-1][1] < random_path.stat().st_size - experts_bytes
        assert not reads
        assert list(engine.load_s) == ["open", "audit", "tables", "pools", "dense"]
        engine.forward(engine.new_state(), [1])
        assert len(reads) == len(set(reads)) == counts(engine)["reads"]["reads"] > 0
        assert "first_kernel" in engine.load_s


def test_a_budget_that_holds_everything_is_the_resident_path(
    random_path: Path, resident: Callable[[str, int], F32], reads: list[str]
) -> None:
    with Engine.load(random_path, threads=1, cache=CacheOptions(budget=1 << 30)) as engine:
        assert engine.notes[0] == "all 16 experts of every layer fit: paging is off"
        assert len(engine.notes) == 2
        assert "no receipt" in engine.notes[1]
        assert engine.cache_counters() is None
        same_bits(greedy(engine, 7), resident("random", 7))
    assert not reads


def test_hash_layers_are_read_ahead(random_path: Path, reads: list[str]) -> None:
    with paged(random_path, slots=5) as engine:
        greedy(engine, 7, 20)
        found = counts(engine)
    assert found["certain"]["used"] > 0
    assert found["speculative"]["issued"] == 0
    assert found["quarantine"] == [K, K, 0, 0, 0, 0]


def test_guesses_come_after_what_a_layer_needs_itself(random_path: Path, reads: list[str]) -> None:
    class Spy:
        def __init__(self) -> None:
            self.heard: list[tuple[int, str, int]] = []

        def begin(self, ids: npt.NDArray[np.int64], phase: str) -> None:
            assert (ids.tolist(), phase) == (list(range(40)), "prefill")

        def issue(self, layer: int, phase: str) -> None:
            self.heard.append((layer, phase, len(reads)))

    with paged(random_path) as engine:
        spy = engine_store(engine).predictor = Spy()
        engine.forward(engine.new_state(), range(40))
    whole = [sum(f"layers.{layer}." in name for name in reads) for layer in range(6)]
    assert max(whole) > K  # several bands
    assert spy.heard == [(n, "prefill", sum(whole[: n + 1])) for n in range(6)]


def test_a_profile_warms_the_cache(
    tmp_path: Path, random_path: Path, resident: Callable[[str, int], F32]
) -> None:
    trace, profile = tmp_path / "run.trace", tmp_path / "run.profile"
    with paged(random_path, trace=trace) as engine:
        greedy(engine, 7)
    profile.write_bytes(Profile.of(read_trace(trace)).encode())
    with paged(random_path, slots=EXPERTS, profile=profile) as engine:
        while counts(engine)["loading"]:
            pass
        same_bits(greedy(engine, 7), resident("random", 7))
        found = counts(engine)
    assert found["warm"]["issued"] > 0
    assert sum(found[phase]["warm_hits"] for phase in ("prefill", "decode")) > 0
    assert found["decode"]["compulsory"] == 0  # the same tokens: all had been seen


# ---------------------------------------------------------------- what goes wrong


def test_a_failed_read_ends_one_answer_only(
    random_path: Path, resident: Callable[[str, int], F32], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, left = ExpertReader.read, [30]

    def flaky(self: ExpertReader, record: Any, *parts: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise ExpertReadError(path=self.path, tensor=record.down.name, found="EIO")
        honest(self, record, *parts)

    with paged(random_path) as engine:
        monkeypatch.setattr(ExpertReader, "read", flaky)
        check_refused(
            ExpertReadError, lambda: greedy(engine, 7), path=random_path, says=["EIO", ".w2.weight"]
        )
        same_bits(greedy(engine, 7), resident("random", 7))
        found = counts(engine)
    assert sum(found[phase]["failed"] for phase in ("prefill", "decode")) == 1
    assert found["leased"] == found["loading"] == 0


def test_a_file_that_is_cut_while_it_is_used(tmp_path: Path, random_path: Path) -> None:
    path = tmp_path / "m.hfq"
    path.write_bytes(random_path.read_bytes())
    with paged(path) as engine:
        state = engine.new_state()
        engine.forward(state, [1, 2, 3])
        os.truncate(path, path.stat().st_size // 2)
        # The first expert that is read lies in front of the cut, or behind it.
        with pytest.raises((ChangedError, TruncatedError), match=str(path)):
            engine.forward(state, list(range(100)))
        assert counts(engine)["leased"] == 0


@pytest.mark.parametrize(
    ("module", "part"),
    [
        (opening, "HostSlots"),
        (opening, "HostTransport"),
        (equipping, "Pager"),
        (opening, "PagedExperts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failed_load_leaves_nothing_open(
    random_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, part: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise CacheError(part)

    monkeypatch.setattr(module, part, fail)
    before = set(os.listdir("/proc/self/fd"))
    check_refused(CacheError, lambda: paged(random_path), says=[part])
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_failed_load_leaves_an_earlier_trace_alone(
    random_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = tmp_path / "run.trace"
    with paged(random_path, trace=trace) as engine:
        greedy(engine, 1)
    before = trace.read_bytes()

    def fail(*args: Any, **options: Any) -> None:
        raise CacheError("no pager")

    monkeypatch.setattr(equipping, "Pager", fail)
    check_refused(CacheError, lambda: paged(random_path, trace=trace), says=["no pager"])
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [
        ("run.trace", before)
    ]


def test_closing_ends_every_thread_and_file(random_path: Path) -> None:
    def open_things() -> tuple[set[str], set[str]]:
        threads = {thread.name for thread in threading.enumerate()}
        return set(os.listdir("/proc/self/fd")), threads

    before = open_things()
    engine = paged(random_path)
    greedy(engine, 1)
    assert open_things() != before
    engine.close()
    for now, then in zip(open_things(), before, strict=True):
        assert now <= then  # what other tests left may have gone
    engine.close()
    check_refused(TransportClosedError, lambda: greedy(engine, 1), path=random_path)


def test_reads_are_checked_where_there_is_a_receipt(
    random_path: Path, random_artifact: Path
) -> None:
    with paged(random_artifact, require_receipt=True) as engine:
        greedy(engine, 1)
        found = counts(engine)["reads"]
        assert found["reads_checked"] == found["reads"] > 0
        assert not engine.notes
    with paged(random_artifact, check_reads=False) as engine:
        greedy(engine, 1)
        assert counts(engine)["reads"]["reads_checked"] == 0
        assert not engine.notes
    with paged(random_path) as engine:
        greedy(engine, 1)
        assert counts(engine)["reads"]["reads_checked"] == 0
        assert [note for note in engine.notes if "no receipt" in note]
    with pytest.raises(ReceiptError):
        paged(random_path, require_receipt=True)


# ---------------------------------------------------------------- owners


@pytest.mark.parametrize("name", ["random", "mixed"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_owners_share_the_sum(paths: dict[str, Path], name: str, ranks: int) -> None:
    """The first layer has one input on every rank, so its ranks' sums add up to the whole."""

    def routed(engine: Engine, layer: str) -> F32:
        seen: dict[str, Any] = {}
        engine.forward(engine.new_state(), PROMPT[:9], trace=seen.__setitem__)
        found: F32 = seen[f"{layer}.routed_out"]
        return found

    with Engine.load(paths[name], threads=1) as whole:
        expected = routed(whole, "l0")
        everything = greedy(whole, 7)
    parts = []
    for rank in range(ranks):
        options = CacheOptions(owner=(rank, ranks), cold="none")
        with Engine.load(paths[name], threads=1, cache=options) as hot:
            assert hot.cache_counters() is None
            parts.append(routed(hot, "l0"))
            alone = greedy(hot, 7)
        assert (alone != everything).any()
        with paged(paths[name], owner=(rank, ranks)) as cold:
            same_bits(greedy(cold, 7), alone)
            found = counts(cold)
            evictions = sum(found[phase]["evictions"] for phase in ("prefill", "decode"))
            assert evictions > 0
        assert np.abs(parts[-1]).max() > 0
    assert np.abs(sum(parts) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_an_owner_holds_its_experts_and_no_others(random_path: Path) -> None:
    whole: list[int] = []
    half: list[int] = []
    for told, options in ((whole, None), (half, CacheOptions(owner=(1, 2), cold="none"))):
        Engine.load(
            random_path,
            threads=1,
            cache=options,
            progress=lambda done, total, told=told: told.append(total),  # type: ignore[misc]
        )
    with paged(random_path) as engine:
        experts_bytes = sum(r.nbytes for layer in engine_store(engine)._packed for r in layer)
    assert whole[-1] - half[-1] == experts_bytes // 2


def test_owners_of_nothing_and_budgets_that_do_not_hold_them(random_path: Path) -> None:
    def load(**options: Any) -> Engine:
        return Engine.load(random_path, threads=1, cache=CacheOptions(**options))

    check_refused(
        CacheError, lambda: load(owner=(16, 17), cold="none"), says=["at most 16 ranks", "17"]
    )
    check_refused(
        CacheError,
        lambda: load(owner=(0, 2), cold="none", budget=1000),
        path=random_path,
        says=["1,000 bytes", "leave out --cold none"],
    )
    assert load(owner=(0, 2), cold="none", budget=1 << 30).cache_counters() is None
    with load(owner=(0, 8), budget=1 << 30) as engine:
        assert engine.notes[0] == "all 2 experts of every layer fit: paging is off"


# ---------------------------------------------------------------- records


@pytest.mark.parametrize("slots", [K, 9])
def test_a_replay_gives_the_runs_own_counts(tmp_path: Path, random_path: Path, slots: int) -> None:
    path = tmp_path / "run.trace"
    with paged(random_path, slots=slots, trace=path) as engine:
        greedy(engine, 7)
        greedy(engine, 300)
        found = counts(engine)
    assert read_trace(path).header.slots == slots
    check_replay(path, found)


def check_replay(path: Path, found: dict[str, Any]) -> None:
    trace = read_trace(path)
    reproduce(trace)
    distinct = {phase: 0 for phase in ("prefill", "decode")}
    nbytes = dict(distinct)
    for band in trace.bands():
        distinct[band.phase] += len(band.distinct)
        nbytes[band.phase] += band.nbytes
    for phase in distinct:
        assert distinct[phase] == found[phase]["distinct"] > 0
        assert nbytes[phase] == found[phase]["bytes"]


def test_a_resident_run_is_recorded_as_a_cache_that_holds_everything(
    tmp_path: Path, random_path: Path, resident: Callable[[str, int], F32]
) -> None:
    path = tmp_path / "run.trace"
    with Engine.load(random_path, threads=1, cache=CacheOptions(trace=path)) as engine:
        same_bits(greedy(engine, 7), resident("random", 7))
        greedy(engine, 1)
    trace = read_trace(path)
    assert trace.header.slots == EXPERTS
    bands = list(trace.bands())
    assert len(bands) == 6 * 2 * (1 + NEW_TOKENS)
    assert {(band.sequence, band.phase, band.token) for band in bands} == {
        (sequence, "decode" if n else "prefill", length + n - 1 if n else 0)
        for sequence, length in enumerate((7, 1))
        for n in range(1 + NEW_TOKENS)
    }
    assert sum(band.nbytes for band in bands) == 0
    reproduce(trace)


def test_states_are_recorded(tmp_path: Path, random_path: Path) -> None:
    path = tmp_path / "run.trace"
    options = CacheOptions(trace=path, trace_states=True)
    with Engine.load(random_path, threads=1, cache=options) as engine:
        greedy(engine, 7)
    kinds = {type(record).__name__ for record in read_trace(path)}
    assert {"BandRecord", "StatesRecord", "RouterRecord"} <= kinds
