"""Encode FP4 experts of true Flash shapes into every lossy type, against the general encoders.

    python -m benchmarks.encode [--experts N] [--repeats N]

One core, CPU time. Sources are gaussian weights cast to FP4 as OCP MX does it. For each type, with
and without importance: both encoders must write the same bytes; then they take turns on the rows
of one tensor; then the exact encoder alone does the routed experts of one layer (256, from eight
distinct ones). Types 105 and 106 run as the recipe ``mix``: each expert's books are fitted to its
own weights, and no table outlives an expert. The last column scales the layer to the 43 of Flash.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.flash_layer import HIDDEN, WIDTH
from benchmarks.harness import Recorder, Times, alternate
from ds4q.artifact.formats import Coding, RowCodec, codec_for, hfp4g32
from ds4q.artifact.numeric import E2M1
from ds4q.artifact.types import (
    ROCMFP2,
    ROCMFP2_MIX,
    ROCMFP3,
    ROCMFP3_MIX,
    ROCMFP4,
    ROCMFP4_FAST,
    ROCMFP6,
    ROCMFP8,
    TensorType,
)
from ds4q.quantize.books import BookFit
from ds4q.quantize.exact import encode_fp4
from ds4q.quantize.exact.encode import tables_of

Array = npt.NDArray[Any]

LAYERS, EXPERTS, DISTINCT = 43, 256, 8
GENERAL_ROWS = 128  # of one w1: what the general encoder does in a tenth of a second
RATE_TARGET, RATIO_TARGET, MIX_TARGET = 100.0, 20.0, 25.0  # M weights per CPU-second; a factor
TARGETED = ("ROCmFP2 dual", "ROCmFP3", "ROCmFP4")
TARGETS: dict[str, tuple[TensorType, Coding | None]] = {
    "ROCmFP2 dual": (ROCMFP2, "dual"),
    "ROCmFP2 s40": (ROCMFP2, "s40"),
    "ROCmFP2 sign": (ROCMFP2, "sign"),
    "ROCmFP2 affine": (ROCMFP2, "affine"),
    "ROCmFP3": (ROCMFP3, None),
    "ROCmFP4": (ROCMFP4, None),
    "ROCmFP4Fast": (ROCMFP4_FAST, None),
    "ROCmFP6 zero": (ROCMFP6, "zero"),
    "ROCmFP6 neg32": (ROCMFP6, "neg32"),
    "ROCmFP8": (ROCMFP8, None),
}


class Matrix(NamedTuple):
    """FP4 source: codes ``(M, K/2)`` and scales ``(M, K/32)``."""

    codes: Array
    scales: Array

    @property
    def weights(self) -> int:
        return 2 * self.codes.size

    def rows(self, count: int) -> Matrix:
        return Matrix(self.codes[:count], self.scales[:count])


class Expert(NamedTuple):
    w1: Matrix
    w2: Matrix
    w3: Matrix


def gaussian(rng: np.random.Generator, rows: int, k: int) -> Matrix:
    """Normal weights cast to FP4: the scale is that of the largest weight of 32, less 2."""
    x = rng.standard_normal((rows, k // 32, 32), dtype=np.float32) * np.float32(0.02)
    exponent = np.floor(np.log2(np.abs(x).max(axis=2, keepdims=True))) - 2
    q = np.abs(x) / np.exp2(exponent)
    levels = E2M1[:8]
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, q).astype(np.uint8)
    codes |= np.signbit(x).astype(np.uint8) << 3
    codes = codes.reshape(rows, k)
    scales = (exponent[..., 0] + 127).astype(np.uint8)
    return Matrix(codes[:, 0::2] | codes[:, 1::2] << 4, scales)


def experts(count: int) -> list[Expert]:
    made = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        shapes = (WIDTH, HIDDEN), (HIDDEN, WIDTH), (WIDTH, HIDDEN)
        made.append(Expert(*(gaussian(rng, *shape) for shape in shapes)))
    return made


@functools.cache
def importance_of(k: int) -> Array:
    rng = np.random.default_rng(k)
    return (np.abs(rng.standard_normal(k, dtype=np.float32)) + np.float32(0.05)) ** 2


class Side:
    """One type, weighted or not, with the output that it writes again and again."""

    def __init__(self, target: tuple[TensorType, Coding | None], weighted: bool) -> None:
        self.kind, self.coding = target
        self.weighted = weighted
        self._out = np.empty(WIDTH * self.kind.row_bytes(HIDDEN), np.uint8)

    def importance(self, matrix: Matrix) -> Array | None:
        return importance_of(2 * matrix.codes.shape[1]) if self.weighted else None

    def exact(self, matrix: Matrix) -> Array:
        row_bytes = self.kind.row_bytes(2 * matrix.codes.shape[1])
        out = self._out[: len(matrix.codes) * row_bytes].reshape(-1, row_bytes)
        importance = self.importance(matrix)
        encode_fp4(matrix.codes, matrix.scales, self.kind, self.coding, importance, out)
        return out

    def general(self, matrix: Matrix) -> Array:
        codec = codec_for(self.kind.id, self.coding)
        if not isinstance(codec, RowCodec):
            raise SystemExit(f"{self.kind.name} has no encoder of rows")
        return codec.encode_rows(hfp4g32.source_values(*matrix), self.importance(matrix))[0]

    def check(self, matrix: Matrix) -> None:
        if not np.array_equal(self.exact(matrix), self.general(matrix)):
            raise SystemExit(f"the encoders of {self.kind.name} disagree")


def fitted(levels: int, matrices: list[Matrix], weighted: bool) -> Coding:
    """A table row for the matrices, which share their books."""
    fit = BookFit(levels)
    for matrix in matrices:
        fit.add(*matrix, importance_of(2 * matrix.codes.shape[1]) if weighted else None)
    return fit.fit().row


def uniform(side: Side, expert: Expert) -> None:
    for matrix in expert:
        side.exact(matrix)


def mix(weighted: bool, expert: Expert) -> None:
    """Fit and encode an expert: 106 for gate and up, which share their books, 105 for down."""
    tables_of.cache_clear()
    gate_up = Side((ROCMFP2_MIX, fitted(4, [expert.w1, expert.w3], weighted)), weighted)
    gate_up.exact(expert.w1)
    gate_up.exact(expert.w3)
    Side((ROCMFP3_MIX, fitted(8, [expert.w2], weighted)), weighted).exact(expert.w2)


def cpu_seconds(run: Callable[[], object]) -> Times:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return Times([time.perf_counter() - wall], [time.process_time() - cpu])


def layer(encode_expert: Callable[[Expert], None], source: list[Expert], count: int) -> Times:
    def run() -> None:
        for number in range(count):
            encode_expert(source[number % len(source)])

    return cpu_seconds(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--experts", type=int, default=EXPERTS, help="of the layer (default: 256)")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    recorder = Recorder("encode", sys.argv[1:])
    source = experts(min(DISTINCT, given.experts))
    total = given.experts * sum(matrix.weights for matrix in source[0])
    table = []
    for weighted in (False, True):
        word = ", imatrix" if weighted else ""
        books = fitted(4, [source[0].w1, source[0].w3], weighted)
        down = fitted(8, [source[0].w2], weighted)
        sides = {name: Side(target, weighted) for name, target in TARGETS.items()}
        mixed = {
            "ROCmFP2Mix": Side((ROCMFP2_MIX, books), weighted),
            "ROCmFP3Mix": Side((ROCMFP3_MIX, down), weighted),
        }
        for name, side in (sides | mixed).items():
            some = source[0].w1.rows(GENERAL_ROWS)
            side.check(some)
            many = source[0].w1
            runs = {"exact": partial(side.exact, many), "general": partial(side.general, some)}
            times = alternate(runs, given.repeats)
            rates = {}
            for path, matrix in (("exact", many), ("general", some)):
                amount = matrix.weights / 1e6
                recorder.add(f"{name}{word}, {path}", times[path], "M/CPU-s", amount, per_cpu=True)
                rates[path] = amount / float(np.median(times[path].cpu))
            whole = None
            if name in sides:
                whole = layer(partial(uniform, side), source, given.experts)
                recorder.add(f"{name}{word}, layer", whole, "M/CPU-s", total / 1e6, per_cpu=True)
            table.append((name + word, rates, whole))
        mix(weighted, source[0])
        whole = layer(partial(mix, weighted), source, given.experts)
        recorder.add(f"mix with fit{word}, layer", whole, "M/CPU-s", total / 1e6, per_cpu=True)
        table.append(("mix with fit" + word, {}, whole))
    recorder.write()
    report(table, given.experts, total)


def report(table: list[tuple[str, dict[str, float], Times | None]], count: int, total: int) -> None:
    """The table, then the targets."""
    print(f"{'':26} {'general':>8} {'exact':>8} {'factor':>7} {'layer':>8} {'Flash':>7}")
    for name, rates, whole in table:
        cells = [f"{rates[path]:8.1f}" if rates else " " * 8 for path in ("general", "exact")]
        cells.append(f"{rates['exact'] / rates['general']:7.1f}" if rates else " " * 7)
        if whole is not None:
            seconds = whole.cpu[0] * EXPERTS / count
            cells += [f"{seconds:8.1f}", f"{seconds * LAYERS / 3600:7.2f}"]
        print(f"{name:26} " + " ".join(cells))
    for name, rates, whole in table:
        if name in TARGETED:
            verdict(name, rates["exact"], RATE_TARGET)
            verdict(
                f"{name}, times the general path", rates["exact"] / rates["general"], RATIO_TARGET
            )
        if name.startswith("mix") and whole is not None:
            verdict(f"{name}, M/CPU-s", total / 1e6 / whole.cpu[0], MIX_TARGET)


def verdict(name: str, value: float, target: float) -> None:
    print(f"{name}: {value:.1f} (target >= {target:g}): {'met' if value >= target else 'MISSED'}")


if __name__ == "__main__":
    main()
