"""Owns the CPU's compiled kernels: dot products of packed rows with float32 activations.

Not: how a type is read (``decoders.py``), validation, threads, sizes of a call (``cpu.py``), the
numpy paths (``reference.py``).

numba vectorises no sum over floats, since that would reorder it, so the dot product of one row is
written out with llvmlite: 16 lanes, 32 columns a step, weights decoded in registers. The order of
operations for one (row, token) is the same for any number of tokens, rows and threads:

    lanes:  acc = acc + scale * (w0 * x0 + w1 * x1)   over steps of 32 columns, in order
    split:  a = a + w0 * x0 and b = b + w1 * x1       likewise, then acc = a + b
    row:    the 16 lanes folded 16 -> 8 -> 4 -> 2 -> 1, times the row scale where there is one

Where a type's weights are rotated, activations are rotated first, each row by itself.

Kernels take addresses, so experts stay where they are; the caller guarantees every bound.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ds4q.artifact.fastpath import jit
from ds4q.artifact.formats import _fwht
from ds4q.runtime.backend.decoders import FORMATS, STEP, Decoder, Format
from ds4q.runtime.backend.vectors import (
    FLOAT,
    I8,
    I16,
    I64,
    LANES,
    VECTOR,
    Cpu,
    broadcast,
    cpu_of,
    every,
    fold,
    half_to_float,
    load,
    multiply_add,
    offset,
    prefetch,
)

Array = npt.NDArray[Any]

_intrinsic: Any = intrinsic  # to mypy, callers would owe the typing context too

ROWS, TOKENS = 2, 4  # one tile: rows that share activations, tokens that share a decoded row
ROW_TILE = 32  # rows that stay in the second-level cache while the tokens pass by
ZERO: Any = np.int64(0)  # numba would compile a kernel once more for a literal argument
PREFETCH_BYTES = 4352  # beyond the page that is being read, where hardware prefetchers stop

_PAIRED = tuple(number for number, form in FORMATS.items() if form.paired)
_ROTATED = tuple(number for number, form in FORMATS.items() if form.rotated)


def _emit_tile(
    builder: Any,
    cpu: Cpu,
    form: Format,
    rows: list[Any],
    row_bytes: Any,
    levels: Any,
    xs: list[Any],
) -> list[Any]:
    """Dot products of packed rows with the activations at the addresses ``xs``, row by row."""
    zero = every(VECTOR, 0.0)
    parts = 2 if form.split else 1
    sums = [
        [[cgutils.alloca_once_value(builder, zero) for _ in range(parts)] for _ in xs] for _ in rows
    ]

    def add(to: Any, a: Any, b: Any) -> None:
        builder.store(multiply_add(builder, a, b, builder.load(to)), to)

    def step(sources: list[Any], number: Any, tables: list[Any]) -> None:
        blocks = []
        for at, table in zip(sources, tables, strict=True):
            w0, w1, scale = form.block(builder, cpu, at, table)
            blocks.append((w0, w1, None if scale is None else broadcast(builder, scale)))
        for t, x in enumerate(xs):
            at = builder.add(x, builder.mul(number, I64(STEP * 4)))
            x0 = load(builder, at, VECTOR, 4)
            x1 = load(builder, offset(builder, at, 64), VECTOR, 4)
            for (w0, w1, factor), totals in zip(blocks, sums, strict=True):
                if form.split:
                    add(totals[t][0], w0, x0)
                    add(totals[t][1], w1, x1)
                    continue
                term = multiply_add(builder, w1, x1, builder.fmul(w0, x0))
                if factor is not None:
                    add(totals[t][0], factor, term)
                else:
                    acc = builder.load(totals[t][0])
                    builder.store(builder.fadd(acc, term), totals[t][0])

    firsts = [offset(builder, row, form.kind.row_header_bytes) for row in rows]
    nbytes = offset(builder, row_bytes, -form.kind.row_header_bytes)
    stride = form.kind.block_bytes if form.head_bytes else form.step_bytes
    steps = builder.udiv(nbytes, I64(stride))
    # Rows of a tile are read side by side: what comes next lies beyond the last of them.
    ahead = offset(builder, builder.mul(row_bytes, I64(len(rows) - 1)), PREFETCH_BYTES)
    with cgutils.for_range(builder, steps) as loop:
        done = builder.mul(loop.index, I64(stride))
        sources = [builder.add(first, done) for first in firsts]
        for at in sources:
            prefetch(builder, builder.add(at, ahead))
        if form.head_bytes:
            per_block = I64(form.kind.block // STEP)
            with cgutils.for_range(builder, per_block) as inner:
                into = offset(
                    builder, builder.mul(inner.index, I64(form.step_bytes)), form.head_bytes
                )
                number = builder.add(builder.mul(loop.index, per_block), inner.index)
                step([builder.add(at, into) for at in sources], number, sources)
        else:
            step(sources, loop.index, [levels] * len(rows))
    if form.kind.block < STEP:
        done = builder.mul(steps, I64(form.step_bytes))
        rest = builder.sub(nbytes, done)
        with builder.if_then(builder.icmp_unsigned("!=", rest, I64(0)), likely=False):
            sources = [builder.add(first, done) for first in firsts]
            padded = [_padded(builder, at, rest, form.step_bytes) for at in sources]
            step(padded, steps, [levels] * len(rows))

    lanes = [[builder.load(part) for part in total] for totals in sums for total in totals]
    whole = [builder.fadd(*parts) if form.split else parts[0] for parts in lanes]
    results = fold(builder, whole)
    if form.kind.row_header_bytes:
        scales = [half_to_float(builder, cpu, load(builder, row, I16)) for row in rows]
        return [builder.fmul(y, scales[i // len(xs)]) for i, y in enumerate(results)]
    return results


def _padded(builder: Any, at: Any, nbytes: Any, size: int) -> Any:
    """Address of ``size`` bytes on the stack: ``nbytes`` from ``at``, then zeros."""
    buffer = cgutils.alloca_once(builder, ir.ArrayType(I8, size))
    start = builder.bitcast(buffer, I8.as_pointer())
    cgutils.memset(builder, start, I64(size), 0)
    cgutils.raw_memcpy(builder, start, builder.inttoptr(at, I8.as_pointer()), nbytes, 1)
    return builder.ptrtoint(start, I64)


def _emit_dots(
    context: Any,
    builder: Any,
    decoder: Any,
    rows: list[Any],
    row_bytes: Any,
    levels: Any,
    xs: list[Any],
) -> list[Any]:
    """One branch per tile picks the decoder, so all types share one compiled loop."""
    cpu = cpu_of(context)
    # Two rows at once need 32 vector registers.
    tiles = [rows] if cpu.permute else [[row] for row in rows]
    # A number that no case has gives NaN, which no caller can miss.
    results = [cgutils.alloca_once_value(builder, FLOAT(math.nan)) for _ in rows for _ in xs]
    done = builder.append_basic_block("dot.done")
    switch = builder.switch(decoder, done)
    cases: dict[Decoder, Any] = {}
    for number, form in FORMATS.items():
        if form.block not in cases:
            cases[form.block] = builder.append_basic_block(f"dot.{number}")
            builder.position_at_end(cases[form.block])
            sums = []
            for tile in tiles:
                sums += _emit_tile(builder, cpu, form, tile, row_bytes, levels, xs)
            for value, result in zip(sums, results, strict=True):
                builder.store(value, result)
            builder.branch(done)
        switch.add_case(I64(number), cases[form.block])
    builder.position_at_end(done)
    return [builder.load(result) for result in results]


@_intrinsic
def dots(
    typingctx: Any, decoder: Any, row: Any, other: Any, row_bytes: Any, levels: Any, xs: Any
) -> Any:
    """Dot products of a packed row with each of ``xs``, then of another row of the matrix.

    All are addresses but ``decoder`` and ``row_bytes``; ``xs`` is a tuple of spread activations.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        decoder, row, other, row_bytes, levels, packed = args
        at = cgutils.unpack_tuple(builder, packed)
        values = _emit_dots(context, builder, decoder, [row, other], row_bytes, levels, at)
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(types.float32, ROWS * len(xs))(*[types.int64] * 5, xs), generate


# Below: K columns of a weight, T tokens, S slots. A slot is one (token, expert) product with an
# output row of its own. Several matrices of one shape, each of any type, are multiplied together:
# line e of ``matrices`` is ``Weight.matrix``, matrix e has the items starts[e] to starts[e + 1],
# and item i reads activation row reads[i] and writes output row writes[i]. Rows are numbered
# through all matrices (row r of matrix e is e * rows + r), so any range of numbers is a piece of
# work.


@jit
def _ordered(x: Array, paired: bool) -> Array:
    """Activations in one order.

    Rows are padded with zeros to whole steps, and the first begins on a cache line: 64-byte loads
    that straddle two lines cost twice.
    """
    tokens, columns = x.shape
    steps = (columns + STEP - 1) // STEP
    size = tokens * steps * STEP
    raw = np.zeros(size + LANES, dtype=np.float32)
    first = (64 - np.int64(raw.ctypes.data) % 64) // 4
    out = raw[first : first + size].reshape(tokens, steps * STEP)
    for t in range(tokens):
        whole = columns // STEP if paired else 0
        for b in range(whole):
            for i in range(LANES):
                out[t, STEP * b + i] = x[t, STEP * b + 2 * i]
                out[t, STEP * b + LANES + i] = x[t, STEP * b + 2 * i + 1]
        for i in range(columns - STEP * whole):
            to = i % 2 * LANES + i // 2 if paired else i
            out[t, STEP * whole + to] = x[t, STEP * whole + i]
    return out


@jit
def _rotated(x: Array) -> Array:
    """Activations in their order, rotated as weights are; K is whole groups."""
    out = _ordered(x, False)
    for t in range(len(out)):
        _fwht.transform_fast(out[t].reshape(-1, _fwht.GROUP), _fwht.BEFORE, _fwht.AFTER)
    return out


@jit
def spread(x: Array, matrices: Array) -> tuple[Array, Array, Array]:
    """Activations (T, K) f32 as they come, paired, and rotated; no rows that none needs."""
    pairs, turns = 0, 0
    for e in range(len(matrices)):
        pairs += matrices[e, 2] in _PAIRED
        turns += matrices[e, 2] in _ROTATED
    natural, paired, rotated = x[:0], x[:0], x[:0]
    if pairs + turns < len(matrices):
        natural = _ordered(x, False)
    if pairs > 0:
        paired = _ordered(x, True)
    if turns > 0:
        rotated = _rotated(x)
    return natural, paired, rotated


@jit
def multiply_rows(
    matrices: Array,
    starts: Array,
    reads: Array,
    writes: Array,
    lo: int,
    hi: int,
    rows: int,
    xs: tuple[Array, Array, Array],
    out: Array,
) -> None:
    """Products of the rows numbered ``lo`` to ``hi`` with every activation of their matrix.

    ``xs`` comes from ``spread`` with these matrices.
    """
    natural, paired, rotated = xs
    x_bytes = 4 * max(natural.shape[1], paired.shape[1], rotated.shape[1])
    at = lo
    while at < hi:
        e = at // rows
        address, levels, decoder, row_bytes = matrices[e]
        x = np.int64(natural.ctypes.data)
        if decoder in _PAIRED:
            x = np.int64(paired.ctypes.data)
        elif decoder in _ROTATED:
            x = np.int64(rotated.ctypes.data)
        first = at - e * rows
        last = min(rows, first + hi - at, first + ROW_TILE)
        pairs = first + (last - first) // ROWS * ROWS
        start, end = starts[e], starts[e + 1]
        fours = start + (end - start) // TOKENS * TOKENS
        twos = fours + (end - fours) // 2 * 2
        for i in range(start, fours, TOKENS):
            x0, x1 = x + reads[i] * x_bytes, x + reads[i + 1] * x_bytes
            x2, x3 = x + reads[i + 2] * x_bytes, x + reads[i + 3] * x_bytes
            y0, y1, y2, y3 = writes[i], writes[i + 1], writes[i + 2], writes[i + 3]
            for r in range(first, pairs, ROWS):
                row = address + r * row_bytes
                y = dots(decoder, row, row + row_bytes, row_bytes, levels, (x0, x1, x2, x3))
                out[y0, r], out[y1, r], out[y2, r], out[y3, r] = y[:4]
                out[y0, r + 1], out[y1, r + 1], out[y2, r + 1], out[y3, r + 1] = y[4:]
        for i in range(fours, twos, 2):  # in a batch of a few tokens, most experts have one or two
            x0, x1 = x + reads[i] * x_bytes, x + reads[i + 1] * x_bytes
            y0, y1 = writes[i], writes[i + 1]
            for r in range(first, pairs, ROWS):
                row = address + r * row_bytes
                z = dots(decoder, row, row + row_bytes, row_bytes, levels, (x0, x1))
                out[y0, r], out[y1, r] = z[:2]
                out[y0, r + 1], out[y1, r + 1] = z[2:]
        for i in range(start, end):  # what the tiles leave: a last token, a last odd row
            x0, y0 = x + reads[i] * x_bytes, writes[i]
            for r in range(pairs if i < twos else first, last, ROWS):
                row, more = address + r * row_bytes, r < pairs
                other = row + row_bytes if more else row
                y = dots(decoder, row, other, row_bytes, levels, (x0,))
                out[y0, r] = y[0]
                if more:
                    out[y0, r + 1] = y[1]
        at += last - first


@jit
def multiply(matrix: tuple[int, ...], rows: int, x: Array, out: Array) -> None:
    """``out = x W^T`` for one matrix of ``rows`` rows, in one call."""
    tokens = x.shape[0]
    matrices = np.empty((1, 4), dtype=np.int64)
    for i in range(4):
        matrices[0, i] = matrix[i]
    items = np.empty(tokens, dtype=np.int64)
    for t in range(tokens):
        items[t] = t
    starts = np.empty(2, dtype=np.int64)
    starts[0], starts[1] = 0, tokens
    multiply_rows(matrices, starts, items, items, ZERO, rows, rows, spread(x, matrices), out)


@jit
def plan(
    experts: Array, starts: Array, slots: Array, share: int
) -> tuple[Array, Array, Array, Array, Array]:
    """What makes all gates, then all ups, one product, and all downs another.

    A line of ``experts`` is ``Expert.matrices``; slot s belongs to token s // share. Gate results
    get row i, up results row S + i for the slot slots[i].

    Returns
    -------
    matrices and starts of gates and ups, the activation rows that these read, the rows 0 .. 2S
    that they write, and the matrices of the downs, which read the rows 0 .. S
    """
    count, n = len(experts), len(slots)
    gate_up = np.empty((2 * count, 4), dtype=np.int64)
    downs = np.empty((count, 4), dtype=np.int64)
    both = np.empty(2 * count + 1, dtype=np.int64)
    both[0] = 0
    for e in range(count):
        for i in range(4):
            gate_up[e, i], gate_up[count + e, i] = experts[e, i], experts[e, 4 + i]
            downs[e, i] = experts[e, 8 + i]
        both[e + 1], both[count + e + 1] = starts[e + 1], n + starts[e + 1]
    reads = np.empty(2 * n, dtype=np.int64)
    writes = np.empty(2 * n, dtype=np.int64)
    for i in range(n):
        reads[i] = reads[n + i] = slots[i] // share
        writes[i], writes[n + i] = i, n + i
    return gate_up, both, reads, writes, downs


@jit
def activate(gate_up: Array, limit: float) -> Array:
    """SwiGLU of the rows S (gate) and S (up) of ``gate_up`` (2S, N), all in f32: (S, N).

    silu(min(g, limit)) * clamp(u, -limit, limit) with silu(g) = g / (1 + exp(-g)); the clamp is
    DeepSeek-V4's ``swiglu_limit``, applied before silu. NaN stays NaN.
    """
    slots = len(gate_up) // 2
    top = np.float32(limit)
    hidden = np.empty((slots, gate_up.shape[1]), dtype=np.float32)
    for s in range(slots):
        for c in range(gate_up.shape[1]):
            gate = gate_up[s, c]
            up = gate_up[slots + s, c]
            if gate > top:
                gate = top
            if up > top:
                up = top
            if up < -top:
                up = -top
            hidden[s, c] = gate / (np.float32(1) + np.exp(-gate)) * up
    return hidden


@jit
def feed_forward(
    experts: Array,
    starts: Array,
    slots: Array,
    share: int,
    width: int,
    limit: float,
    x: Array,
    out: Array,
) -> None:
    """Gate, up, SwiGLU and down of all slots in one call; ``width`` is that of gate and up."""
    matrices, both, reads, writes, downs = plan(experts, starts, slots, share)
    gate_up = np.empty((len(writes), width), dtype=np.float32)
    n = len(matrices) * width
    multiply_rows(matrices, both, reads, writes, ZERO, n, width, spread(x, matrices), gate_up)
    hidden = activate(gate_up, limit)
    rows = out.shape[1]
    n = len(downs) * rows
    multiply_rows(downs, starts, writes, slots, ZERO, n, rows, spread(hidden, downs), out)
