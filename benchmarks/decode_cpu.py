"""Measures the CPU backend at the shapes of DeepSeek-V4-Flash: one matrix, one token's MoE step.

Weights are gaussian values quantised to FP4, in working sets beyond the caches. What is timed is
``CpuBackend.linear`` and ``CpuBackend.experts``, the calls that the model makes. Both are checked
against float64 before anything is timed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import ROOT, Recorder, Times, alternate
from ds4q.api import quantize
from ds4q.artifact.formats.hfp4g32 import repack
from ds4q.artifact.numeric import E2M1
from ds4q.artifact.types import HFP4G32
from ds4q.runtime.backend import reference
from ds4q.runtime.backend.cpu import CpuBackend, Expert, Weight
from ds4q.runtime.engine import Engine

Array = npt.NDArray[Any]

WIDTH, HIDDEN = 2048, 4096  # moe_intermediate_size and hidden_size of Flash
TOP_K = 6
LIMIT = 10.0  # swiglu_limit
TINY_TOKENS = 128  # beyond the window and one ratio-128 entry
TOLERANCE = 1e-6  # of sum |w x|; f32 lane sums stay an order of magnitude below


class Blocks:
    """A stock of gaussian FP4 blocks from which distinct matrices are drawn."""

    def __init__(self, seed: int, count: int = 1 << 16) -> None:
        self._rng = np.random.default_rng(seed)
        values = self._rng.standard_normal((count, 32)).astype(np.float32) * 0.02
        exponent = np.ceil(np.log2(np.abs(values).max(axis=1) / 6))
        scaled = values / np.exp2(exponent)[:, None]
        halfway = (E2M1[1:8] + E2M1[:7]) / 2
        codes = np.searchsorted(halfway, np.abs(scaled)).astype(np.uint8)
        codes |= (scaled < 0).astype(np.uint8) << 3
        self._codes = codes[:, 0::2] | codes[:, 1::2] << 4
        self._scales = (exponent + 127).astype(np.uint8)

    def weight(self, rows: int, cols: int) -> Weight:
        pick = self._rng.integers(0, len(self._scales), rows * cols // 32)
        codes = self._codes[pick].reshape(rows, cols // 2)
        packed = repack(codes, self._scales[pick].reshape(rows, cols // 32))
        return Weight(HFP4G32.id, rows, cols, packed.reshape(-1))

    def activations(self, tokens: int, cols: int) -> Array:
        return self._rng.standard_normal((tokens, cols)).astype(np.float32)


def check_product(weight: Weight, x: Array, y: Array) -> None:
    """Raise unless ``y`` is ``x W^T`` to within ``TOLERANCE`` of the sum of magnitudes."""
    matrix = reference.decode(weight)
    error = np.abs(y - x.astype(np.float64) @ matrix.T)
    bound = TOLERANCE * (np.abs(x).astype(np.float64) @ np.abs(matrix).T)
    if not (error <= bound).all():
        raise SystemExit(f"wrong product: error {(error / bound).max():.2g} x the tolerance")


def check_experts(experts: list[Expert], backend: CpuBackend, x: Array, ids: Array) -> None:
    """Raise unless each expert's output is that of the numpy path."""
    found = backend.experts(x, ids, experts, LIMIT)
    for k, expert_id in enumerate(ids[0]):
        expected = reference.feed_forward(experts[expert_id], x, LIMIT)[0]
        if not np.abs(found[0, k] - expected).max() <= 1e-5 * np.abs(expected).max():
            raise SystemExit(f"wrong output of expert {expert_id}")


def matrix_side(backend: CpuBackend, weights: list[Weight], x: Array) -> Callable[[], None]:
    """One product with each of the matrices."""

    def run() -> None:
        for weight in weights:
            backend.linear(weight, x)

    return run


def moe_side(backend: CpuBackend, experts: list[Expert], x: Array) -> Callable[[], None]:
    """As many tokens as it takes to visit each expert once, ``TOP_K`` experts a token."""
    tokens = [np.arange(first, first + TOP_K)[None] for first in range(0, len(experts), TOP_K)]

    def run() -> None:
        for ids in tokens:
            backend.experts(x, ids, experts, LIMIT)

    return run


def tiny_decode(repeats: int) -> Times:
    """Seconds of ``TINY_TOKENS`` greedy steps of ds4-tiny after a short prompt, one thread."""
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "ds4-tiny.hfq"
        quantize(ROOT / "tests" / "data" / "ds4-tiny", artifact)
        engine = Engine.load(artifact, threads=1)

    def generate(count: int) -> float:
        state = engine.new_state()
        logits = engine.forward(state, [256, 258, 97, 259, 261])
        begin = time.perf_counter()
        for _ in range(count):
            logits = engine.forward(state, [int(logits[0].argmax())])
        return time.perf_counter() - begin

    generate(TINY_TOKENS)  # compiles what is not in the cache
    walls, cpus = [], []
    for _ in range(repeats):
        cpu = time.process_time()
        walls.append(generate(TINY_TOKENS))
        cpus.append(time.process_time() - cpu)
    return Times(walls, cpus)


def packed_bytes(weights: list[Weight]) -> int:
    return sum(weight.data.nbytes for weight in weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--matrices", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=6, help="MoE steps, each of 6 other experts")
    options = parser.parse_args()
    record = Recorder("decode_cpu", sys.argv[1:])

    stock = Blocks(seed=4)
    one, two = CpuBackend(threads=1), CpuBackend(threads=2)
    weights = [stock.weight(WIDTH, HIDDEN) for _ in range(options.matrices)]
    experts = [
        Expert(
            stock.weight(WIDTH, HIDDEN), stock.weight(WIDTH, HIDDEN), stock.weight(HIDDEN, WIDTH)
        )
        for _ in range(options.tokens * TOP_K)
    ]
    x = stock.activations(1, HIDDEN)
    for weight in (weights[0], weights[-1]):
        check_product(weight, x, one.linear(weight, x))
    check_experts(experts, two, x, np.arange(TOP_K)[None])

    source = np.concatenate([weight.data for weight in weights])
    target = np.empty_like(source)
    times = alternate(
        {
            "memcpy": lambda: np.copyto(target, source),
            "matrix": matrix_side(one, weights, x),
            "moe1": moe_side(one, experts, x),
            "moe2": moe_side(two, experts, x),
        },
        options.repeats,
    )
    gigabytes = packed_bytes(weights) / 1e9
    token = packed_bytes([w for e in experts[:TOP_K] for w in (e.gate, e.up, e.down)]) / 1e9
    moved = token * options.tokens
    record.add("memcpy of the packed bytes, 1 thread", times["memcpy"], "GB/s", gigabytes)
    record.add("HFP4G32 matrix-vector, 1 thread", times["matrix"], "GB/s packed", gigabytes)
    record.add("MoE step, 1 thread", times["moe1"], "GB/s packed", moved)
    record.add("MoE step, 2 threads", times["moe2"], "GB/s packed", moved)
    tiny = tiny_decode(options.repeats)
    record.add("ds4-tiny decode, 1 thread", tiny, "tokens/s", TINY_TOKENS)
    record.write()

    copy, rate = gigabytes / times["memcpy"].median, gigabytes / times["matrix"].median
    step = times["moe2"].median / options.tokens
    print(f"matrix-vector / memcpy: {rate / copy:.2f}")
    print(
        f"MoE step of one token, 2 threads: {step * 1e3:.1f} ms for {token * 1e3:.1f} MB,"
        f" {step / (token / rate):.2f} x its bytes over the matrix-vector rate"
    )


if __name__ == "__main__":
    main()
