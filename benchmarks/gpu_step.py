"""Owns a whole decode step and the load of a random model of true Flash shapes."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import flash_model
from benchmarks.gpu_bench import REPEATS, Bench
from benchmarks.harness import Times
from ds4q.hipkern.driver import Device
from ds4q.quantize.plan import Output
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.device.state import DeviceState

RECIPES = ("fp4", "fp4-q8")
RATIOS = (4, 128, 4, 128)
LAYERS = 43
CONTEXTS = (1, 4096)
STEPS = 20  # of one timing
LOADS = 3
SHORT_CONTEXT = 256
PIECE_BYTES = 8 << 20  # of a plain read and copy
TARGET = 2.0


def steps(bench: Bench) -> None:
    """Milliseconds a layer and tokens a second, against what reading every byte would take."""
    for recipe in RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.hfq"
            begin = time.perf_counter()
            output = flash_model.write(path, recipe, flash_model.flash_config(RATIOS))
            gigabytes = output.layout.file_bytes / 1e9
            print(f"{recipe}: wrote {gigabytes:.1f} GB in {time.perf_counter() - begin:.1f} s")
            half = Path(folder) / "half.hfq"
            flash_model.write(half, recipe, flash_model.flash_config(RATIOS[: len(RATIOS) // 2]))
            _load(bench, recipe, path)
            whole, short = _times(path), _times(half)
        for context in CONTEXTS:
            _report(bench, recipe, context, output, whole[context], short[context])


def _times(path: Path) -> dict[int, Times]:
    """Device seconds of one decode step, its upload and its sampled id included, by context."""
    found = {}
    with HipEngine.load(path, max_context=max(CONTEXTS) + REPEATS * STEPS + 64) as engine:
        rng = np.random.default_rng(0)
        for context in CONTEXTS:
            state = engine.new_state()
            engine.next_id(state, rng.integers(0, engine.vocab_size, context))
            found[context] = _decode(engine, state)
            state.close()
    return found


def _decode(engine: HipEngine, state: DeviceState) -> Times:
    stream, times = engine.backend.stream, Times()
    token = 1
    for repeat in range(REPEATS + 1):
        with stream.record() as first:
            cpu = time.process_time()
            for _ in range(STEPS):
                token = engine.next_id(state, [token])
            with stream.record() as last:
                last.synchronize()
                if repeat:
                    times.wall.append(first.elapsed_ms(last) / 1000 / STEPS)
                    times.cpu.append((time.process_time() - cpu) / STEPS)
    return times


def _report(
    bench: Bench, recipe: str, context: int, output: Output, whole: Times, short: Times
) -> None:
    """Rows of one recipe and context.

    The time of a layer is the difference to a model of half the layers, so that the head is not
    part of it; what is left is the rest, which 43 layers need once, too.
    """
    name = f"step {recipe}, context {context}"
    layers = len(RATIOS)
    millis = Times([1000 * each for each in whole.wall], whole.cpu)
    bench.record.add(f"{name}, {layers} layers", millis, "ms")
    layer = (whole.median - short.median) / (layers - layers // 2)
    rest = whole.median - layers * layer
    bench.add_value(f"{name}, a layer", 1000 * layer, "ms")
    bench.add_value(f"{name}, the rest", 1000 * rest, "ms")
    bench.add_value(f"{name}, {LAYERS} layers", 1 / (rest + LAYERS * layer), "tokens/s")
    in_layers, once = step_bytes(output, context)
    floor_layer, floor_rest = in_layers / layers / bench.copy_rate, once / bench.copy_rate
    bench.add_value(f"{name}, {layers} layers, bytes", (in_layers + once) / 1e6, "MB")
    over = whole.median / (floor_rest + layers * floor_layer)
    bench.add_value(f"{name}, {layers} layers, over the floor", over, "x")
    over = (rest + LAYERS * layer) / (floor_rest + LAYERS * floor_layer)
    bench.add_value(f"{name}, {LAYERS} layers, over the floor", over, "x")
    print(f"  {over:.2f} x the floor, target {TARGET:g}")


def step_bytes(output: Output, context: int) -> tuple[int, int]:
    """Bytes that a step at ``context`` has to read: of all layers, and besides them.

    Every weight but the embedding, of the routed experts the chosen ones; of the caches the window,
    the compressed entries that attention sees and those that the indexer scores.
    """
    config = output.metadata["config"]
    chosen, experts = config["num_experts_per_tok"], config["n_routed_experts"]
    layers = besides = 0
    for tensor in output.tensors:
        name, nbytes = tensor.unit.name, tensor.entry.nbytes
        if tensor.is_routed_expert:
            layers += nbytes * chosen // experts
        elif name.endswith("tid2eid"):
            layers += nbytes // tensor.rows
        elif name.startswith("layers."):
            layers += nbytes
        elif name != "embed.weight":
            besides += nbytes
    for ratio in config["compress_ratios"]:
        rows = min(context, config["sliding_window"])
        entries = context // ratio if ratio else 0
        if ratio == 4:
            layers += 4 * entries * config["index_head_dim"]
            entries = min(entries, config["index_topk"])
        layers += 4 * (rows + entries) * config["head_dim"]
    return layers, besides


def _load(bench: Bench, recipe: str, path: Path) -> None:
    """Bytes a second from the page cache to the device: ours, and a plain loop over the file."""
    nbytes = path.stat().st_size
    ours, plain = Times(), Times()
    for _ in range(LOADS):
        _plain_load(plain, bench.device, path, nbytes)
        _our_load(ours, path)
    bench.record.add(f"load {recipe}, ours", ours, "GB/s", nbytes / 1e9)
    bench.record.add(f"load {recipe}, pread + copy", plain, "GB/s", nbytes / 1e9)
    bench.add_value(f"load {recipe}, ours / pread + copy", plain.median / ours.median, "x")


def _our_load(times: Times, path: Path) -> None:
    """From the first bytes read to a model that can be used."""
    began: list[float] = []

    def progress(done: int, total: int) -> None:
        began.append(time.perf_counter())

    cpu = time.process_time()
    with HipEngine.load(path, max_context=SHORT_CONTEXT, progress=progress):
        times.wall.append(time.perf_counter() - began[0])
        times.cpu.append(time.process_time() - cpu)


def _plain_load(times: Times, device: Device, path: Path, nbytes: int) -> None:
    """Read into one pinned buffer and copy it, piece by piece."""
    fd = os.open(path, os.O_RDONLY)
    with (
        device.alloc(nbytes) as target,
        device.pinned(PIECE_BYTES) as pinned,
        device.stream() as stream,
    ):
        cpu, wall, at = time.process_time(), time.perf_counter(), 0
        while at < nbytes:
            count = os.preadv(fd, [pinned.array.data], at)
            stream.upload(target.address + at, pinned, count)
            stream.synchronize()
            at += count
        times.wall.append(time.perf_counter() - wall)
        times.cpu.append(time.process_time() - cpu)
    os.close(fd)
