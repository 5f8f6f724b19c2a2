"""Owns single products: one packed matrix and one vector in a launch, beside torch's bf16."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from benchmarks.gpu_bench import Bench, close
from benchmarks.gpu_experts import BOUND, random_rows
from benchmarks.gpu_torch import has_torch, product_times
from benchmarks.harness import Times
from ds4q.artifact.formats import codec_for
from ds4q.artifact.types import BF16, HFP4G32, Q8F16, TensorType
from ds4q.hipkern import matrix as packing

LAUNCHES = 64
POOL_BYTES = 400_000_000  # of the matrices that launches take turns over: more than a cache holds
CASES = (
    (HFP4G32, 2048, 4096),  # one expert's
    (HFP4G32, 4096, 2048),
    (Q8F16, 512, 4096),  # attention's
    (Q8F16, 1024, 4096),
    (Q8F16, 32768, 1024),
    (Q8F16, 4096, 8192),
    (BF16, 256, 4096),  # the router
    (BF16, 4096, 8192),
    (BF16, 129280, 4096),  # the head
)


def singles(bench: Bench) -> None:
    """Microseconds a launch, packed bytes a second, and torch's time for the same shape."""
    peers: dict[tuple[int, int], Times] = {}
    for kind, rows, k in CASES:
        measure = f"{kind.name} {rows} x {k} alone"
        times = _times(bench, kind, rows, k)
        bench.record.add(measure, Times([1e6 * each for each in times.wall], times.cpu), "us")
        bench.add_rate(measure, times, rows * packing.row_bytes_of(kind.id, k))
        if has_torch():
            peer = peers.get((rows, k))
            if peer is None:
                peer = peers[rows, k] = product_times(rows, k, POOL_BYTES)
                micros = Times([1e6 * each for each in peer.wall], peer.cpu)
                bench.record.add(f"torch bf16 {rows} x {k} alone", micros, "us")
            bench.add_value(f"torch bf16 / {measure}", peer.median / times.median, "x")


def _times(bench: Bench, kind: TensorType, rows: int, k: int) -> Times:
    rng = np.random.default_rng(rows + k)
    if kind is HFP4G32:
        packed = random_rows(kind, rows, k, rng)
    else:
        values = rng.standard_normal((rows, k), np.float32)
        packed = codec_for(kind.id).encode(values).reshape(rows, -1)
    x = rng.standard_normal(k, np.float32)
    count = min(LAUNCHES, 1 + POOL_BYTES // packed.nbytes)
    with ExitStack() as owned:
        vector = owned.enter_context(bench.put(x)).address
        result = owned.enter_context(bench.put(np.zeros(rows, np.float32)))
        jobs = b""
        for _ in range(count):
            matrix = owned.enter_context(bench.put(packed)).address
            row_bytes = packing.row_bytes_of(kind.id, k)
            described = packing.pack_matrix(matrix, 0, kind.id, rows, k, row_bytes)
            jobs += packing.pack_job(described, vector, result.address, k, rows, 0)
        table = owned.enter_context(bench.put(jobs)).address

        grid = packing.linear_blocks(kind.id, rows, k), 1, 1

        def launch(i: int) -> None:
            bench.kernels.launch(
                bench.stream, "linear.hip", "linear", grid,
                table + packing.JOB_BYTES * (i % count), 1, 1, defines={"DS4Q_DECODER": kind.id},
            )  # fmt: skip

        launch(0)
        close(bench.take(result, rows), _products(kind, packed, k, x), BOUND, f"{kind.name} {rows}")
        return bench.replayed(launch, LAUNCHES)


def _products(
    kind: TensorType, packed: npt.NDArray[np.uint8], k: int, x: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """In float64, some rows at a time."""
    found = [
        codec_for(kind.id).decode(part.reshape(-1), (len(part), k)).astype(np.float64) @ x
        for part in np.array_split(packed, max(1, len(packed) // 4096))
    ]
    return np.concatenate(found)
