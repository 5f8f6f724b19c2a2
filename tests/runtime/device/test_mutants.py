"""Mistakes of order and of lifetime, made on purpose: each must show where the sound code passes.

The simulated device runs streams apart, poisons fresh memory and delays copies and launches, so a
wait that is missing, memory that is reused too early and an address that went stale give other
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.hfq import Reader
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.backend.hip import HipBackend
from ds4q.runtime.device import state, weights
from ds4q.runtime.device.block import StepBlock
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.device.layout import Layout
from ds4q.runtime.device.staging import Staging
from ds4q.runtime.engine import Engine

Walk = Callable[[Any], npt.NDArray[np.float32]]
PROMPT = [2, 3, 4, 5, 6, 7, 8]
TOLERANCE = 1e-4  # as in test_engine
DELAY_US = 2000
BUSY_BYTES = 16 << 20
PIECE_BYTES = 4096


def no_wait(*_: Any) -> None:
    """In place of whatever waits."""


def prefilled(engine: Any) -> npt.NDArray[np.float32]:
    """Logits of a prompt that goes through in several batches."""
    logits: npt.NDArray[np.float32] = engine.forward(engine.new_state(), PROMPT)
    return logits


def one_step(engine: Any) -> npt.NDArray[np.float32]:
    """Logits of a first token."""
    logits: npt.NDArray[np.float32] = engine.forward(engine.new_state(), [7])
    return logits


def grown(engine: Any) -> npt.NDArray[np.float32]:
    """Logits of a step that sees an entry which only its sequence's new buffer holds."""
    sequence = engine.new_state()
    engine.forward(sequence, PROMPT[:5])
    engine.forward(sequence, [7])  # by the graph, captured at the last of these by now
    engine.forward(sequence, [8, 9])  # entries move; the second is completed there
    logits: npt.NDArray[np.float32] = engine.forward(sequence, [11])
    return logits


def changed_hands(engine: Any) -> npt.NDArray[np.float32]:
    """Logits of one sequence after a step of another."""
    one, other = engine.new_state(), engine.new_state()
    for token in (2, 3, 4):
        engine.forward(one, [token])
    engine.forward(other, [50])
    logits: npt.NDArray[np.float32] = engine.forward(one, [5])
    return logits


def drop_the_wait_for_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HipEngine, "_await_weights", no_wait)
    patch.setattr(Staging, "free", no_wait)  # copies are still under way: the device frees it


def overwrite_staging_in_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staging, "_await", no_wait)


def overwrite_the_block_in_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepBlock, "_wait", no_wait)


def bake_the_first_table(patch: pytest.MonkeyPatch) -> None:
    """Layers' addresses as they were when the graph was captured; what lay there stays readable."""
    send, first = StepBlock.send, dict[int, bytes]()

    def stale(self: StepBlock, stream: Any, runs: Any, ids: Any, tables: list[bytes]) -> None:
        captured = len(ids) == 1  # prefill's launches are made anew each time
        send(self, stream, runs, ids, [first.setdefault(0, tables[0])] if captured else tables)

    patch.setattr(StepBlock, "send", stale)
    patch.setattr(Layout, "free", no_wait)


WALKS: list[Walk] = [one_step, prefilled, grown, changed_hands]
MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Walk]] = [
    (drop_the_wait_for_weights, one_step),
    (overwrite_staging_in_use, one_step),
    (overwrite_the_block_in_use, prefilled),
    (bake_the_first_table, grown),
    (bake_the_first_table, changed_hands),
]


@pytest.fixture
def error(
    sim: Control, micro_path: Path, micro_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Walk], float]:
    """Runs a walk on a device whose copies are slow; the largest difference to the CPU."""
    monkeypatch.setattr(state, "FIRST_TOKENS", 6)
    monkeypatch.setattr(weights, "PIECE_BYTES", PIECE_BYTES)  # so that buffers come round often

    def error(walk: Walk) -> float:
        with HipBackend.open() as backend, Reader(micro_path) as reader:
            busy = backend.device.stream()
            room = backend.device.alloc(BUSY_BYTES)

            def hold(done: int, total: int) -> None:
                """Let the first and the last copies of weights queue behind something long."""
                if min(done, total - done) < 4 * PIECE_BYTES:
                    busy.fill(room.address, 0, BUSY_BYTES)
                    backend.copies.wait(busy.record())

            engine = HipEngine(backend, reader, batch_tokens=2, progress=hold)
            sim.set(delay_us=DELAY_US, delay_seed=5)
            difference = float(np.abs(walk(engine) - walk(micro_engine)).max())
        return difference if np.isfinite(difference) else np.inf

    return error


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.__name__)
def test_sound_code_passes(walk: Walk, error: Callable[[Walk], float]) -> None:
    assert error(walk) < TOLERANCE


@pytest.mark.parametrize(("mutate", "walk"), MUTANTS, ids=lambda made: made.__name__)
def test_mutants_are_caught(
    mutate: Callable[[pytest.MonkeyPatch], None],
    walk: Walk,
    error: Callable[[Walk], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    assert error(walk) > 10 * TOLERANCE
