"""Owns the CPU's compiled kernels: dot products of packed rows with float32 activations.

Not: validation, threads, sizes of a call (``cpu.py``), the numpy paths (``reference.py``).

numba vectorises no sum over floats, since that would reorder it, so the dot product of one row is
written out with llvmlite: 16 lanes, 32 columns a step, weights decoded in registers. The order of
operations for one (row, token) is the same for any number of tokens, rows and threads:

    lanes:  acc = acc + scale * (w0 * x0 + w1 * x1)   over steps of 32 columns, in order
    row:    the 16 lanes folded 16 -> 8 -> 4 -> 2 -> 1, times the row scale where there is one

Kernels take addresses, so experts stay where they are; the caller guarantees every bound. The code
generator and the loops share this file because numba's cache watches only the file of the loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ds4q.artifact.fastpath import jit
from ds4q.artifact.numeric import E2M1, E8M0
from ds4q.artifact.types import BF16, F16, F32, HFP4G32, Q8F16, TensorType

Array = npt.NDArray[Any]

_intrinsic: Any = intrinsic  # to mypy, callers would owe the typing context too

LANES = 16
STEP = 32  # columns
ROWS, TOKENS = 2, 4  # one tile: rows that share activations, tokens that share a decoded row
ROW_TILE = 32  # rows that stay in the second-level cache while the tokens pass by
ZERO: Any = np.int64(0)  # numba would compile a kernel once more for a literal argument
PREFETCH_BYTES = 4352  # beyond the page that is being read, where hardware prefetchers stop

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_BYTES = ir.VectorType(_I8, LANES)
_WORDS = ir.VectorType(_I32, LANES)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _all(kind: Any, value: float) -> Any:
    """``value`` as a constant of ``kind``, in every lane where it is a vector."""
    return ir.Constant(kind, [value] * LANES if isinstance(kind, ir.VectorType) else value)


def _load(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def _offset(builder: Any, address: Any, nbytes: int) -> Any:
    return builder.add(address, _I64(nbytes))


def _call(builder: Any, name: str, kind: Any, *args: Any) -> Any:
    function = ir.FunctionType(kind, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), args)


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for a line that is read soon; an address past the end is no fault."""
    pointer = builder.inttoptr(address, _I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
    builder.call(function, [pointer, _I32(0), _I32(3), _I32(1)])  # read, keep, data cache


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once where the CPU has such an instruction, the same for each use."""
    return _call(builder, "llvm.fmuladd.v16f32", _VECTOR, a, b, c)


def _broadcast(builder: Any, scalar: Any) -> Any:
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(first, first, _all(_WORDS, 0))


class Cpu(NamedTuple):
    """What the code generator may use."""

    permute: bool  # a 16-entry float table in one AVX-512 register
    shuffle: bool  # a 16-entry byte table in one SSSE3 register
    half: bool  # half -> float in hardware


def cpu_of(context: Any) -> Cpu:
    """The features that numba compiles for: the host's, or ``NUMBA_CPU_FEATURES``."""
    triple, _, features = context.codegen().magic_tuple()
    on = set(features.split(","))
    return Cpu(
        permute="+avx512f" in on,
        shuffle="+ssse3" in on,
        half="+f16c" in on or triple.startswith(("aarch64", "arm64")),
    )


def _half_to_float(builder: Any, cpu: Cpu, bits: Any) -> Any:
    """f16 bits (i16, scalar or 16 lanes) -> f32, exact: subnormals, infinities and NaN too."""
    lanes = isinstance(bits.type, ir.VectorType)
    if cpu.half:
        half = ir.VectorType(ir.HalfType(), LANES) if lanes else ir.HalfType()
        return builder.fpext(builder.bitcast(bits, half), _VECTOR if lanes else _FLOAT)
    word, real = (_WORDS, _VECTOR) if lanes else (_I32, _FLOAT)
    wide = builder.zext(bits, word)
    sign = builder.shl(builder.and_(wide, _all(word, 0x8000)), _all(word, 16))
    magnitude = builder.shl(builder.and_(wide, _all(word, 0x7FFF)), _all(word, 13))
    # The exponent is read with f32's bias (127), 2^112 puts f16's (15) right.
    finite = builder.fmul(builder.bitcast(magnitude, real), _all(real, 2.0**112))
    special = builder.or_(magnitude, _all(word, 0x7F800000))
    is_finite = builder.icmp_unsigned("<", magnitude, _all(word, 0x7C00 << 13))
    chosen = builder.select(is_finite, builder.bitcast(finite, word), special)
    return builder.bitcast(builder.or_(chosen, sign), real)


def _bytes_to_float(builder: Any, lanes: Any) -> Any:
    return builder.sitofp(builder.sext(lanes, _WORDS), _VECTOR)


def _doubled_e2m1(builder: Any, cpu: Cpu, nibbles: Any) -> Any:
    """Twice the E2M1 values of 16 codes, as int8."""
    if cpu.shuffle:
        table = ir.Constant(_BYTES, [int(2 * value) & 255 for value in E2M1])
        return _call(builder, "llvm.x86.ssse3.pshuf.b.128", _BYTES, table, nibbles)
    magnitude = builder.and_(nibbles, _all(_BYTES, 7))
    above4, above6 = (
        _call(builder, "llvm.usub.sat.v16i8", _BYTES, magnitude, _all(_BYTES, floor))
        for floor in (4, 6)
    )
    # 0 1 2 3 4 6 8 12 = m + (m beyond 4) + 2 (m beyond 6)
    value = builder.add(builder.add(magnitude, above4), builder.shl(above6, _all(_BYTES, 1)))
    negative = builder.icmp_unsigned(">", nibbles, _all(_BYTES, 7))
    return builder.select(negative, builder.neg(value), value)


def _e2m1_pairs(builder: Any, cpu: Cpu, codes: Any) -> tuple[Any, Any]:
    """16 code bytes -> the values of their low nibbles and of their high nibbles."""
    if cpu.permute:
        table = ir.Constant(_VECTOR, [_FLOAT(float(value)) for value in E2M1])
        low = builder.zext(codes, _WORDS)  # only the 4 low bits of a lane select
        halves = low, builder.lshr(low, _all(_WORDS, 4))
        permute = "llvm.x86.avx512.permvar.sf.512"
        low, high = (_call(builder, permute, _VECTOR, table, half) for half in halves)
        return low, high
    nibbles = builder.and_(codes, _all(_BYTES, 15)), builder.lshr(codes, _all(_BYTES, 4))
    doubled = (_bytes_to_float(builder, _doubled_e2m1(builder, cpu, part)) for part in nibbles)
    low, high = (builder.fmul(part, _all(_VECTOR, 0.5)) for part in doubled)
    return low, high


def _e8m0(builder: Any, byte: Any) -> Any:
    """2^(byte - 127) by table: byte 0 is a subnormal, which shifting bits would turn into zero."""
    table = ir.Constant(ir.ArrayType(_FLOAT, 256), [_FLOAT(float(value)) for value in E8M0])
    at = cgutils.global_constant(builder, "e8m0", table)
    return builder.load(builder.gep(at, [_I64(0), builder.zext(byte, _I64)]))


# A block decoder returns two vectors of 16 weights and the block's scale (None: 1). In a "paired"
# type the first vector holds the even columns and the second the odd ones.
Block = tuple[Any, Any, Any]


def _hfp4g32_block(builder: Any, cpu: Cpu, at: Any) -> Block:
    low, high = _e2m1_pairs(builder, cpu, _load(builder, _offset(builder, at, 1), _BYTES))
    return low, high, _e8m0(builder, _load(builder, at, _I8))


def _q8f16_block(builder: Any, cpu: Cpu, at: Any) -> Block:
    first = _bytes_to_float(builder, _load(builder, _offset(builder, at, 2), _BYTES))
    second = _bytes_to_float(builder, _load(builder, _offset(builder, at, 18), _BYTES))
    return first, second, _half_to_float(builder, cpu, _load(builder, at, _I16))


def _bf16_block(builder: Any, cpu: Cpu, at: Any) -> Block:
    words = _load(builder, at, _WORDS)
    even = builder.bitcast(builder.shl(words, _all(_WORDS, 16)), _VECTOR)
    odd = builder.bitcast(builder.and_(words, _all(_WORDS, 0xFFFF0000)), _VECTOR)
    return even, odd, None


def _f16_block(builder: Any, cpu: Cpu, at: Any) -> Block:
    lanes = ir.VectorType(_I16, LANES)
    first = _half_to_float(builder, cpu, _load(builder, at, lanes))
    second = _half_to_float(builder, cpu, _load(builder, _offset(builder, at, 32), lanes))
    return first, second, None


def _f32_block(builder: Any, cpu: Cpu, at: Any) -> Block:
    return _load(builder, at, _VECTOR), _load(builder, _offset(builder, at, 64), _VECTOR), None


class Format(NamedTuple):
    """How the kernels read one tensor type."""

    kind: TensorType
    paired: bool
    block: Callable[[Any, Cpu, Any], Block]

    @property
    def step_bytes(self) -> int:
        return self.kind.block_bytes * STEP // self.kind.block


FORMATS = {
    HFP4G32.id: Format(HFP4G32, True, _hfp4g32_block),
    Q8F16.id: Format(Q8F16, False, _q8f16_block),
    BF16.id: Format(BF16, True, _bf16_block),
    F16.id: Format(F16, False, _f16_block),
    F32.id: Format(F32, False, _f32_block),
}
_PAIRED = tuple(form.kind.id for form in FORMATS.values() if form.paired)


def _fold(builder: Any, vector: Any) -> Any:
    """Sum of 16 lanes: the upper half onto the lower half, four times."""
    for half in (8, 4, 2, 1):
        lanes = ir.VectorType(_I32, half)
        low = builder.shuffle_vector(vector, vector, ir.Constant(lanes, list(range(half))))
        upper = ir.Constant(lanes, list(range(half, 2 * half)))
        vector = builder.fadd(low, builder.shuffle_vector(vector, vector, upper))
    return builder.extract_element(vector, _I32(0))


def _emit_tile(
    builder: Any, cpu: Cpu, form: Format, rows: list[Any], row_bytes: Any, xs: list[Any]
) -> list[Any]:
    """Dot products of packed rows with the activations at the addresses ``xs``, row by row."""
    zero = _all(_VECTOR, 0.0)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in xs] for _ in rows]

    def step(sources: list[Any], number: Any) -> None:
        blocks = []
        for at in sources:
            w0, w1, scale = form.block(builder, cpu, at)
            blocks.append((w0, w1, None if scale is None else _broadcast(builder, scale)))
        for t, x in enumerate(xs):
            at = builder.add(x, builder.mul(number, _I64(STEP * 4)))
            x0 = _load(builder, at, _VECTOR, 4)
            x1 = _load(builder, _offset(builder, at, 64), _VECTOR, 4)
            for (w0, w1, factor), totals in zip(blocks, sums, strict=True):
                term = _multiply_add(builder, w1, x1, builder.fmul(w0, x0))
                acc = builder.load(totals[t])
                if factor is not None:
                    builder.store(_multiply_add(builder, factor, term, acc), totals[t])
                else:
                    builder.store(builder.fadd(acc, term), totals[t])

    firsts = [_offset(builder, row, form.kind.row_header_bytes) for row in rows]
    nbytes = _offset(builder, row_bytes, -form.kind.row_header_bytes)
    steps = builder.udiv(nbytes, _I64(form.step_bytes))
    with cgutils.for_range(builder, steps) as loop:
        done = builder.mul(loop.index, _I64(form.step_bytes))
        sources = [builder.add(first, done) for first in firsts]
        for at in sources:
            _prefetch(builder, _offset(builder, at, PREFETCH_BYTES))
        step(sources, loop.index)
    if form.kind.block < STEP:
        done = builder.mul(steps, _I64(form.step_bytes))
        rest = builder.sub(nbytes, done)
        with builder.if_then(builder.icmp_unsigned("!=", rest, _I64(0)), likely=False):
            sources = [builder.add(first, done) for first in firsts]
            step([_padded(builder, at, rest, form.step_bytes) for at in sources], steps)

    results = [[_fold(builder, builder.load(total)) for total in totals] for totals in sums]
    if form.kind.row_header_bytes:
        scales = [_half_to_float(builder, cpu, _load(builder, row, _I16)) for row in rows]
        return [builder.fmul(y, s) for ys, s in zip(results, scales, strict=True) for y in ys]
    return [y for ys in results for y in ys]


def _padded(builder: Any, at: Any, nbytes: Any, size: int) -> Any:
    """Address of ``size`` bytes on the stack: ``nbytes`` from ``at``, then zeros."""
    buffer = cgutils.alloca_once(builder, ir.ArrayType(_I8, size))
    start = builder.bitcast(buffer, _I8.as_pointer())
    cgutils.memset(builder, start, _I64(size), 0)
    cgutils.raw_memcpy(builder, start, builder.inttoptr(at, _I8.as_pointer()), nbytes, 1)
    return builder.ptrtoint(start, _I64)


def _emit_dots(
    context: Any, builder: Any, type_id: Any, rows: list[Any], row_bytes: Any, xs: list[Any]
) -> list[Any]:
    """One branch per tile picks the format, so all types share one compiled loop."""
    cpu = cpu_of(context)
    # Two rows at once need 32 vector registers.
    tiles = [rows] if cpu.permute else [[row] for row in rows]
    # A type that no case names gives NaN, which no caller can miss.
    results = [cgutils.alloca_once_value(builder, _FLOAT(math.nan)) for _ in rows for _ in xs]
    done = builder.append_basic_block("dot.done")
    switch = builder.switch(type_id, done)
    for form in FORMATS.values():
        case = builder.append_basic_block(f"dot.{form.kind.name}")
        switch.add_case(_I64(form.kind.id), case)
        builder.position_at_end(case)
        sums = [y for tile in tiles for y in _emit_tile(builder, cpu, form, tile, row_bytes, xs)]
        for value, result in zip(sums, results, strict=True):
            builder.store(value, result)
        builder.branch(done)
    builder.position_at_end(done)
    return [builder.load(result) for result in results]


@_intrinsic
def dot(typingctx: Any, type_id: Any, row: Any, row_bytes: Any, x: Any) -> Any:
    """Dot product of the packed row at address ``row`` with the spread floats at address ``x``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_id, row, row_bytes, x = args
        return _emit_dots(context, builder, type_id, [row], row_bytes, [x])[0]

    return types.float32(*[types.int64] * 4), generate


@_intrinsic
def dot2x4(
    typingctx: Any, type_id: Any, row: Any, row_bytes: Any, x0: Any, x1: Any, x2: Any, x3: Any
) -> Any:
    """Eight of ``dot``, bit for bit: ``row`` with each x, then the row after it with each x."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type_id, row, row_bytes, *xs = args
        rows = [row, builder.add(row, row_bytes)]
        values = _emit_dots(context, builder, type_id, rows, row_bytes, xs)
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(types.float32, ROWS * TOKENS)(*[types.int64] * 7), generate


# Below: K columns of a weight, T tokens, S slots. A slot is one (token, expert) product with an
# output row of its own. Several matrices of one shape are multiplied together: matrix e has the
# items starts[e] to starts[e + 1], and item i reads activation row reads[i] and writes output row
# writes[i]. Rows are numbered through all matrices (row r of matrix e is e * rows + r), so any
# range of numbers is a piece of work.


@jit
def spread(x: Array, type_id: int) -> Array:
    """Activations (T, K) f32 in the order that a type's vectors of weights need.

    Rows are padded with zeros to whole steps, and the first begins on a cache line: 64-byte loads
    that straddle two lines cost twice.
    """
    tokens, columns = x.shape
    steps = (columns + STEP - 1) // STEP
    size = tokens * steps * STEP
    raw = np.zeros(size + LANES, dtype=np.float32)
    first = (64 - np.int64(raw.ctypes.data) % 64) // 4
    out = raw[first : first + size].reshape(tokens, steps * STEP)
    paired = type_id in _PAIRED
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
def multiply_rows(
    type_id: int,
    addresses: Array,
    starts: Array,
    reads: Array,
    writes: Array,
    lo: int,
    hi: int,
    rows: int,
    row_bytes: int,
    xs: Array,
    out: Array,
) -> None:
    """Products of the rows numbered ``lo`` to ``hi`` with every activation of their matrix."""
    x = np.int64(xs.ctypes.data)
    x_bytes = 4 * xs.shape[1]
    at = lo
    while at < hi:
        e = at // rows
        first = at - e * rows
        last = min(rows, first + hi - at, first + ROW_TILE)
        pairs = first + (last - first) // ROWS * ROWS
        start, end = starts[e], starts[e + 1]
        fours = start + (end - start) // TOKENS * TOKENS
        for i in range(start, fours, TOKENS):
            x0, x1 = x + reads[i] * x_bytes, x + reads[i + 1] * x_bytes
            x2, x3 = x + reads[i + 2] * x_bytes, x + reads[i + 3] * x_bytes
            y0, y1, y2, y3 = writes[i], writes[i + 1], writes[i + 2], writes[i + 3]
            for r in range(first, pairs, ROWS):
                row = addresses[e] + r * row_bytes
                y = dot2x4(type_id, row, row_bytes, x0, x1, x2, x3)
                out[y0, r], out[y1, r], out[y2, r], out[y3, r] = y[:4]
                out[y0, r + 1], out[y1, r + 1], out[y2, r + 1], out[y3, r + 1] = y[4:]
        for i in range(start, end):  # what the tiles leave: last tokens, a last odd row
            for r in range(pairs if i < fours else first, last):
                row = addresses[e] + r * row_bytes
                out[writes[i], r] = dot(type_id, row, row_bytes, x + reads[i] * x_bytes)
        at += last - first


@jit
def multiply(type_id: int, address: int, rows: int, row_bytes: int, x: Array, out: Array) -> None:
    """``out = x W^T`` for one matrix, in one call."""
    tokens = x.shape[0]
    items = np.empty(tokens, dtype=np.int64)
    for t in range(tokens):
        items[t] = t
    starts = np.empty(2, dtype=np.int64)
    starts[0], starts[1] = 0, tokens
    addresses = np.empty(1, dtype=np.int64)
    addresses[0] = address
    xs = spread(x, type_id)
    multiply_rows(type_id, addresses, starts, items, items, ZERO, rows, rows, row_bytes, xs, out)


@jit
def plan_gate_up(
    table: Array, starts: Array, slots: Array, share: int
) -> tuple[Array, Array, Array, Array]:
    """Addresses, starts, reads and writes that make all gates, then all ups, one product.

    ``table`` (E, 3) holds the addresses of gate, up and down; slot s belongs to token s // share.
    Gate results get row s, up results row S + s.
    """
    experts, n = len(table), len(slots)
    addresses = np.empty(2 * experts, dtype=np.int64)
    both = np.empty(2 * experts + 1, dtype=np.int64)
    both[0] = 0
    for e in range(experts):
        addresses[e], addresses[experts + e] = table[e, 0], table[e, 1]
        both[e + 1], both[experts + e + 1] = starts[e + 1], n + starts[e + 1]
    reads = np.empty(2 * n, dtype=np.int64)
    writes = np.empty(2 * n, dtype=np.int64)
    for i in range(n):
        reads[i] = reads[n + i] = slots[i] // share
        writes[i], writes[n + i] = slots[i], n + slots[i]
    return addresses, both, reads, writes


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
    layout: tuple[int, ...],
    table: Array,
    starts: Array,
    slots: Array,
    share: int,
    limit: float,
    x: Array,
    out: Array,
) -> None:
    """Gate, up, SwiGLU and down of all slots in one call; ``layout`` is ``Expert.layout``."""
    gate_type, width, gate_bytes, down_type, rows, down_bytes = layout
    addresses, both, reads, writes = plan_gate_up(table, starts, slots, share)
    xs = spread(x, gate_type)
    gate_up = np.empty((len(writes), width), dtype=np.float32)
    n = len(addresses) * width
    multiply_rows(
        gate_type, addresses, both, reads, writes, ZERO, n, width, gate_bytes, xs, gate_up
    )
    hidden = spread(activate(gate_up, limit), down_type)
    downs = table[:, 2].copy()
    n = len(downs) * rows
    multiply_rows(down_type, downs, starts, slots, slots, ZERO, n, rows, down_bytes, hidden, out)
