"""Owns the peer: torch's bf16 matrix-vector products on the same GPU, where torch is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_bench import REPEATS, Bench
from benchmarks.harness import Times

LAUNCHES = 64
POOL_BYTES = 3_200_000_000  # of the stacked matrices that launches take turns over


def has_torch() -> bool:
    """Whether there is a peer."""
    return importlib.util.find_spec("torch") is not None


def stacked_times(bench: Bench, chosen: int, shapes: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Seconds of gate and up, and of down, stacked to one matrix each; empty without torch."""
    if not has_torch():
        print("torch is not installed: no peer")
        return {}
    (width, hidden), _, down = shapes
    found = {}
    for name, rows, k in (
        ("gate+up", 2 * chosen * width, hidden),
        ("down", chosen * down[0], down[1]),
    ):
        times = product_times(rows, k, POOL_BYTES)
        bench.add_rate(f"torch bf16 {rows} x {k} ({name})", times, 2 * rows * k)
        found[name] = times.median
    return found


def product_times(rows: int, k: int, pool_bytes: int) -> Times:
    """Seconds of one product of a [rows, k] matrix with a vector, the faster of torch's two ways.

    Products take turns over matrices of ``pool_bytes`` in all; a graph of them is replayed.
    """
    torch = _torch()
    count = min(LAUNCHES, 1 + pool_bytes // (2 * rows * k))
    device = torch.device("cuda")
    pool = [torch.randn(rows, k, device=device, dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(k, device=device, dtype=torch.bfloat16)
    ways = (
        lambda matrix: torch.mv(matrix, x),
        lambda matrix: torch.nn.functional.linear(x[None], matrix),
    )
    times = [_replayed(way, pool) for way in ways]
    del pool
    torch.cuda.empty_cache()
    return min(times, key=lambda each: each.median)


def _torch() -> Any:
    return importlib.import_module("torch")  # not among what ds4q needs


def _replayed(way: Any, pool: list[Any]) -> Times:
    torch = _torch()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        way(pool[0])
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            way(pool[i % len(pool)])
    graph.replay()
    torch.cuda.synchronize()
    times = Times()
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.wall.append(first.elapsed_time(last) / 1000 / LAUNCHES)
        times.cpu.append(0.0)
    return times
