"""Paging on the simulated device when something fails, and with mistakes made on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.artifact.errors import TruncatedError
from ds4q.hipkern.errors import HipError
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.device import expert_cache, transport
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.device.paging import DevicePaging
from ds4q.runtime.device.pointers import PointerTables
from ds4q.runtime.errors import ExpertReadError
from ds4q.runtime.experts.pager import Lease, Pager
from ds4q.runtime.experts.reading import ExpertReader
from tests.checks import same_bits
from tests.runtime.device.conftest import Load
from tests.runtime.device.paged import (
    CHOSEN,
    DELAY_US,
    PROMPT,
    THRASH,
    Logits,
    counts_of,
    many_steps,
    resident,
    walk,
)

__all__ = ["resident"]  # a fixture


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

    def failing(self: ExpertReader, *asked: Any) -> Any:
        if broken[0]:
            raise OSError(5, "Input/output error")
        return stage(self, *asked)

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


def test_a_failed_load_leaves_an_earlier_trace_alone(
    sim: Control, micro_path: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "run.trace"
    cache = replace(THRASH, trace=trace)
    with HipEngine.load(micro_path, max_context=16, cache=cache) as engine:
        engine.forward(engine.new_state(), PROMPT)
    before = trace.read_bytes()
    sim.set(fail="hipStreamCreateWithFlags:3:2")  # of the transport
    with pytest.raises(HipError):
        HipEngine.load(micro_path, max_context=16, cache=cache)
    sim.set(fail="")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [
        ("run.trace", before)
    ]


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
    patch.setattr(transport._Lane, "_await_copy", lambda self: 0.0)
    acquire = Pager.acquire

    def acquired(self: Pager, *rest: Any) -> Lease:
        lease = acquire(self, *rest)
        self._transport._stream.synchronize()  # type: ignore[attr-defined]
        return lease

    patch.setattr(Pager, "acquire", acquired)


def resident_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transport._Lane, "_await_copy", lambda self: 0.0)
    patch.setattr(expert_cache, "FILLERS", 1)  # so that no other read comes in between


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
