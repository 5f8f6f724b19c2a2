"""Owns steps of several sequences at once, for a random model of Flash shapes: time and bits."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import flash_model
from benchmarks.gpu_bench import Bench
from benchmarks.gpu_step import LAYERS, RATIOS
from benchmarks.harness import Times, alternate
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.device.snapshot import DeviceSnapshot
from ds4q.runtime.device.state import DeviceState

RECIPE = "fp4"
CONTEXT = 4096
SEQUENCES = (1, 2, 4, 8, 16)
REPEATS = 21
ROOM_TOKENS = 1024  # behind the context


def steps(bench: Bench) -> None:
    """Tokens a second of a whole model by sequences, against the same sequences in turn."""
    found: list[dict[int, dict[str, Times]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (len(RATIOS), len(RATIOS) // 2):
            path = Path(folder) / f"{count}.hfq"
            flash_model.write(path, RECIPE, flash_model.flash_config(RATIOS[:count]))
            with HipEngine.load(path, max_context=CONTEXT + ROOM_TOKENS) as engine:
                state = engine.new_state()
                ids = np.random.default_rng(0).integers(0, engine.vocab_size, CONTEXT)
                engine.forward(state, ids)
                if count == len(RATIOS):
                    _copies(bench, engine, state)
                found.append(_times(engine, engine.snapshot(state)))
            path.unlink()
    for sequences in SEQUENCES:
        rates = {}
        for way in ("together", "in turn"):
            whole, half = (times[sequences][way].median for times in found)
            layer = (whole - half) / (len(RATIOS) - len(RATIOS) // 2)
            seconds = whole + (LAYERS - len(RATIOS)) * layer
            rates[way] = sequences / seconds
            name = f"{sequences} sequences {way}, {RECIPE}, context {CONTEXT}, {LAYERS} layers"
            bench.add_value(name, rates[way], "tokens/s")
        name = f"{sequences} sequences, together / in turn"
        bench.add_value(name, rates["together"] / rates["in turn"], "x")


def _times(engine: HipEngine, copy: DeviceSnapshot) -> dict[int, dict[str, Times]]:
    """Seconds of a step of each sequence, their logits on the host, by sequences and way."""
    found = {}
    for count in SEQUENCES:
        together = [engine.restore(copy) for _ in range(count)]
        alone = [engine.restore(copy) for _ in range(count)]
        parts = [(state, [7 + n]) for n, state in enumerate(together)]
        ids = [[7 + n] for n in range(count)]
        same = np.concatenate([engine.forward(s, i) for s, i in zip(alone, ids, strict=True)])
        if (engine.forward_many(parts).view(np.uint32) != same.view(np.uint32)).any():
            raise SystemExit(f"{count} sequences together have other bits than alone")

        def in_turn(states: list[DeviceState] = alone, ids: list[list[int]] = ids) -> None:
            for state, own in zip(states, ids, strict=True):
                engine.forward(state, own)

        def at_once(parts: list[tuple[DeviceState, list[int]]] = parts) -> None:
            engine.forward_many(parts)

        found[count] = alternate({"together": at_once, "in turn": in_turn}, REPEATS)
        for state in (*together, *alone):
            state.close()
    return found


def _copies(bench: Bench, engine: HipEngine, state: DeviceState) -> None:
    """Milliseconds of a copy to the host, and of a sequence made of it."""
    taken, put = Times(), Times()
    for repeat in range(REPEATS + 1):
        cpu, began = time.process_time(), time.perf_counter()
        copy = engine.snapshot(state)
        cpu_between, between = time.process_time(), time.perf_counter()
        engine.restore(copy).close()
        if repeat:
            taken.wall.append(1000 * (between - began))
            taken.cpu.append(1000 * (cpu_between - cpu))
            put.wall.append(1000 * (time.perf_counter() - between))
            put.cpu.append(1000 * (time.process_time() - cpu_between))
    name = f"of a sequence of {CONTEXT} tokens, {len(RATIOS)} layers"
    bench.add_value(f"snapshot {name}, bytes", copy.nbytes / 1e6, "MB")
    bench.record.add(f"snapshot {name}", taken, "ms")
    bench.record.add(f"restore {name}", put, "ms")
