"""Owns the LLVM building blocks of the CPU's kernels: vectors of 16 lanes, loads, conversions.

Not: packed types (``decoders.py``) and sums (``kernels.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

LANES = 16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
BYTES = ir.VectorType(I8, LANES)
WORDS = ir.VectorType(I32, LANES)
VECTOR = ir.VectorType(FLOAT, LANES)


class Cpu(NamedTuple):
    """What the code generator may use."""

    permute: bool  # a 16-entry float table in one AVX-512 register
    octets: bool  # an 8-entry float table in one AVX2 register
    shuffle: bool  # a 16-entry byte table in one SSSE3 register
    half: bool  # half -> float in hardware


def cpu_of(context: Any) -> Cpu:
    """The features that numba compiles for: the host's, or ``NUMBA_CPU_FEATURES``."""
    triple, _, features = context.codegen().magic_tuple()
    on = set(features.split(","))
    return Cpu(
        permute="+avx512f" in on,
        octets="+avx2" in on,
        shuffle="+ssse3" in on,
        half="+f16c" in on or triple.startswith(("aarch64", "arm64")),
    )


def every(kind: Any, value: float) -> Any:
    """``value`` as a constant of ``kind``, in every lane where it is a vector."""
    lanes = [value] * kind.count if isinstance(kind, ir.VectorType) else value
    return ir.Constant(kind, lanes)


def load(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def offset(builder: Any, address: Any, nbytes: int) -> Any:
    return builder.add(address, I64(nbytes))


def call(builder: Any, name: str, kind: Any, *args: Any) -> Any:
    function = ir.FunctionType(kind, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), args)


def prefetch(builder: Any, address: Any) -> None:
    """Ask for a line that is read soon; an address past the end is no fault."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
    builder.call(function, [pointer, I32(0), I32(3), I32(1)])  # read, keep, data cache


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once where the CPU has such an instruction, the same for each use."""
    return call(builder, "llvm.fmuladd.v16f32", VECTOR, a, b, c)


def broadcast(builder: Any, scalar: Any, kind: Any = VECTOR) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return pick(builder, first, [0] * kind.count)


def pick(builder: Any, vector: Any, lanes: list[int], other: Any = None) -> Any:
    """The given lanes of a vector, in this order; lanes past its end are those of ``other``."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.shuffle_vector(vector, vector if other is None else other, mask)


def fold(builder: Any, vectors: list[Any]) -> list[Any]:
    """Sum of 16 lanes of each of 2^n vectors: the upper half onto the lower half, four times.

    Halves of two vectors share one, so that a step adds them together.
    """
    n = len(vectors)
    for half in (8, 4, 2, 1):
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else []
        lanes = range(vectors[0].type.count * (2 if pairs else 1))
        low = [lane for lane in lanes if lane % (2 * half) < half]
        high = [lane + half for lane in low]
        vectors = [
            builder.fadd(pick(builder, a, low, b), pick(builder, a, high, b))
            for a, b in pairs or [(vectors[0], vectors[0])]
        ]
    return [builder.extract_element(vectors[0], I32(i)) for i in range(n)]


def half_to_float(builder: Any, cpu: Cpu, bits: Any) -> Any:
    """f16 bits (i16, scalar or 16 lanes) -> f32, exact: subnormals, infinities and NaN too."""
    lanes = isinstance(bits.type, ir.VectorType)
    if cpu.half:
        half = ir.VectorType(ir.HalfType(), LANES) if lanes else ir.HalfType()
        return builder.fpext(builder.bitcast(bits, half), VECTOR if lanes else FLOAT)
    word, real = (WORDS, VECTOR) if lanes else (I32, FLOAT)
    wide = builder.zext(bits, word)
    sign = builder.shl(builder.and_(wide, every(word, 0x8000)), every(word, 16))
    magnitude = builder.shl(builder.and_(wide, every(word, 0x7FFF)), every(word, 13))
    # The exponent is read with f32's bias (127), 2^112 puts f16's (15) right.
    finite = builder.fmul(builder.bitcast(magnitude, real), every(real, 2.0**112))
    special = builder.or_(magnitude, every(word, 0x7F800000))
    is_finite = builder.icmp_unsigned("<", magnitude, every(word, 0x7C00 << 13))
    chosen = builder.select(is_finite, builder.bitcast(finite, word), special)
    return builder.bitcast(builder.or_(chosen, sign), real)


def bytes_to_float(builder: Any, lanes: Any) -> Any:
    """16 int8 -> f32."""
    return builder.sitofp(builder.sext(lanes, WORDS), VECTOR)
