"""Owns the experts' kernels at the shapes of Flash, and what they are held against.

A step multiplies by six of many experts; steps take turns over more of them than a cache holds.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from benchmarks.gpu_bench import Bench, close
from benchmarks.gpu_torch import stacked_times
from ds4q.artifact.formats import Coding, MixRow, codec_for, hfp4g32
from ds4q.artifact.formats._fwht import rotate
from ds4q.artifact.types import (
    HFP4G32,
    MQ2_LLOYD,
    Q8F16,
    ROCMFP2_MIX,
    ROCMFP3,
    ROCMFP3_MIX,
    TensorType,
)
from ds4q.hipkern import matrix as packing
from ds4q.hipkern.handles import Buffer

U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]

HIDDEN, WIDTH, CHOSEN = 4096, 2048, 6
LIMIT = 10.0
SHAPES = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))  # gate, up, down
POOL_BYTES = 3_200_000_000  # of each of gate and up, and down, that steps take turns over
DRAWN = 12  # different experts; all others are copies of them
LAUNCHES = 64
BOUND = 1e-5  # of a float32 sum of thousands of products, and SwiGLU
KINDS = (HFP4G32, ROCMFP3, ROCMFP3_MIX, ROCMFP2_MIX, MQ2_LLOYD)
TARGET = {HFP4G32.id: 0.60, ROCMFP3.id: 0.45, ROCMFP3_MIX.id: 0.45, ROCMFP2_MIX.id: 0.45}
BOOKS = {  # two books of levels where a type has them in a table, exact in bf16
    ROCMFP3_MIX.id: ((-4, -2, -1, -0.25, 0.5, 1, 2, 4), (-3, -1.5, -0.5, 0, 0.25, 1.25, 2.5, 3.5)),
    ROCMFP2_MIX.id: ((-1.5, -0.5, 0.5, 1.5), (-1, -0.25, 0.75, 2)),
}


def coding_of(kind: TensorType) -> Coding | None:
    """The table row of a type that needs one."""
    if kind.id not in BOOKS:
        return None
    bits = np.array(BOOKS[kind.id], np.float32).view(np.uint32) >> 16
    return MixRow(1, bits.astype("<u2").tobytes())


def random_rows(kind: TensorType, rows: int, k: int, rng: np.random.Generator) -> U8:
    """Packed rows with uniform codes, and scales that keep a row's product with x near one."""
    if kind is HFP4G32:
        codes = rng.integers(0, 256, (rows, k // 2), np.uint8)
        return hfp4g32.repack(codes, rng.integers(116, 121, (rows, k // 32), np.uint8))
    units = rng.integers(0, 256, (rows, k // kind.block, kind.block_bytes), np.uint8)
    if kind is MQ2_LLOYD:
        levels = np.sort(rng.standard_normal((rows, k // kind.block, 4)) / 64).astype("<f2")
        units[:, :, :8] = levels.view(np.uint8)
        return units.reshape(rows, -1)
    scales = rng.integers(0x08, 0x18, (rows, k // 32, 2), np.uint8)
    if kind.id in BOOKS:
        scales |= rng.integers(0, 2, scales.shape, np.uint8) << 7  # which book
    units[:, :, -2:] = scales
    return units.reshape(rows, -1)


class Pool:
    """Experts of one type on the device, and which of them each step takes."""

    def __init__(self, bench: Bench, kind: TensorType) -> None:
        self.bench, self.kind = bench, kind
        rng = np.random.default_rng(kind.id)
        self.drawn = [[random_rows(kind, *s, rng) for s in SHAPES] for _ in range(DRAWN)]
        self.sizes = [rows.nbytes for rows in self.drawn[0]]
        self.count = -(-POOL_BYTES // self.sizes[2])
        order = rng.permutation(self.count)
        self.ids = np.resize(order, LAUNCHES * CHOSEN).astype(np.int32)
        self.x = rng.standard_normal(HIDDEN, np.float32)
        self.weights = rng.random(CHOSEN, np.float32)
        decoder = packing.decoder_of(kind.id, coding_of(kind))
        shared = packing.decoder_of(Q8F16.id, None)
        self._defines = dict(DS4Q_GATE=decoder, DS4Q_DOWN=decoder, DS4Q_SHARED_EXPERT=shared)
        self._owned = ExitStack()
        self._table = self._put(self._fill(decoder)).address
        self._ids = self._put(self.ids).address
        self._x = self._put(self.x).address
        self.is_rotated = decoder in packing.ROTATED
        self._rotated = self._put(rotate(self.x)).address if self.is_rotated else self._x
        self._weights = self._put(self.weights).address
        self.hidden = self._put(np.zeros((CHOSEN + 1) * WIDTH, np.float32))
        self._parts = self._put(np.zeros((CHOSEN + 1) * HIDDEN, np.float32))
        self.out = self._put(np.zeros(HIDDEN, np.float32))

    def _put(self, array: npt.NDArray[Any] | bytes) -> Buffer:
        return self._owned.enter_context(self.bench.put(array))

    def _fill(self, decoder: int) -> U8:
        """Put all experts on the device; their table."""
        bench, place = self.bench, [-(-size // 256) * 256 for size in self.sizes]
        expert_bytes = sum(place)
        data = self._owned.enter_context(bench.device.alloc(expert_bytes * self.count + 256))
        books = packing.books_of(self.kind.id, coding_of(self.kind))
        books_at = self._put(books).address if books else 0
        table = bytearray()
        for expert in range(self.count):
            at = data.address + expert * expert_bytes
            if expert >= DRAWN:
                bench.stream.move(at, data.address + expert % DRAWN * expert_bytes, expert_bytes)
            for part, (rows, k) in enumerate(SHAPES):
                if expert < DRAWN:
                    bench.stream.upload(at, self.drawn[expert][part])
                row_bytes = packing.row_bytes_of(self.kind.id, k)
                table += packing.pack_matrix(at, books_at, decoder, rows, k, row_bytes)
                at += place[part]
        return np.frombuffer(bytes(table), np.uint8)

    def gate_up(self, step: int) -> None:
        """Queue gate, up and SwiGLU of a step."""
        self.bench.kernels.launch(
            self.bench.stream, "moe.hip", "moe_gate_up", packing.gate_up_grid(WIDTH, CHOSEN, 1),
            self._table, 0, self._ids + 4 * CHOSEN * step, self._x, self._rotated,
            self.hidden.address, LIMIT, CHOSEN, 1, defines=self._defines,
        )  # fmt: skip

    def down(self, step: int) -> None:
        """Queue the weighted downs of a step; in a model hc_mix takes their sum."""
        self.bench.kernels.launch(
            self.bench.stream, "moe.hip", "moe_down", packing.down_grid(HIDDEN, CHOSEN, 1),
            self._table, 0, self._ids + 4 * CHOSEN * step, self._weights, self.hidden.address,
            self._parts.address, CHOSEN, 1, defines=self._defines,
        )  # fmt: skip

    def rotate(self, step: int) -> None:
        """Queue the rotation of what gate and up read, and of what down reads."""
        self.bench.kernels.launch(
            self.bench.stream, "rotate.hip", "rotate", packing.rotate_grid(HIDDEN, 1),
            self._x, self._rotated, HIDDEN,
        )  # fmt: skip
        self.bench.kernels.launch(
            self.bench.stream, "rotate.hip", "rotate_hidden",
            packing.rotate_hidden_grid(WIDTH, CHOSEN, 1),
            self._table, 0, self._ids + 4 * CHOSEN * step, self.hidden.address, WIDTH, CHOSEN,
        )  # fmt: skip

    def check(self) -> None:
        """Compare a step with float64."""
        self.gate_up(0)
        hidden = self.bench.take(self.hidden, CHOSEN * WIDTH)
        if self.is_rotated:
            self.rotate(0)
        self.down(0)
        self.bench.kernels.launch(
            self.bench.stream, "hyper.hip", "hc_sum", packing.sum_grid(HIDDEN, 1),
            self._parts.address, self.out.address, self.out.address, CHOSEN + 1, HIDDEN,
        )  # fmt: skip
        out = self.bench.take(self.out, HIDDEN)
        expected, total = [], np.zeros(HIDDEN)
        for slot, expert in enumerate(self.ids[:CHOSEN] % DRAWN):
            gate, up, down = (self._values(int(expert), part) for part in range(3))
            g, u = np.minimum(gate @ self.x, LIMIT), np.clip(up @ self.x, -LIMIT, LIMIT)
            expected.append(g / (1 + np.exp(-g)) * u)
            total += self.weights[slot] * (down @ hidden[slot * WIDTH : (slot + 1) * WIDTH])
        close(hidden, np.concatenate(expected), BOUND, f"{self.kind.name}: gate and up")
        close(out, total, BOUND, f"{self.kind.name}: down")

    def _values(self, expert: int, part: int) -> F64:
        codec = codec_for(self.kind.id, coding_of(self.kind))
        rows = self.drawn[expert][part]
        return codec.decode(rows.reshape(-1), SHAPES[part]).astype(np.float64)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._owned.close()


def steps(bench: Bench) -> None:
    """Packed bytes a second of both kernels in all types; torch's bf16 at the stacked shapes."""
    torch = stacked_times(bench, CHOSEN, SHAPES)
    for kind in KINDS:
        with Pool(bench, kind) as pool:
            pool.check()
            size = pool.sizes[0] + pool.sizes[1], pool.sizes[2]
            for name, queue, one in zip(
                ("gate+up", "down"), (pool.gate_up, pool.down), size, strict=True
            ):
                measure = f"{kind.name} {name}"
                times = bench.replayed(queue, LAUNCHES)
                part = bench.add_rate(measure, times, CHOSEN * one)
                told = f", target {TARGET[kind.id]:.0%}" if kind.id in TARGET else ""
                print(f"  {part:.0%} of copy{told}")
                if name in torch:
                    bench.add_value(f"torch bf16 / {measure}", torch[name] / times.median, "x")
            if pool.is_rotated:
                times = bench.replayed(pool.rotate, LAUNCHES)
                bench.add_value(f"{kind.name} both rotations", 1e6 * times.median, "us")


def once(bench: Bench) -> None:
    """One checked step of each type, for a profiler to count."""
    for kind in KINDS:
        with Pool(bench, kind) as pool:
            pool.check()
