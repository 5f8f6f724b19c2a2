"""Owns the vector instructions of the exact encoder, written out with llvmlite for every target.

Sums over candidates go lane by lane, so that each lane adds its terms in index order: the rounding
is that of a scalar loop. Nothing is contracted to a fused multiply-add. Addresses are plain
integers and the caller guarantees the bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


def _intrinsic(function: Callable[..., Any]) -> Any:
    """``intrinsic``; to a type checker, callers would owe the typing context too."""
    return intrinsic(function)


LANES = 16  # candidates of one vector
HALF = 16  # weights of half a block
TERM_BYTES = 4 * LANES  # the terms of one source code, one for each candidate
CHUNK_BYTES = 16 * TERM_BYTES  # the terms of the 16 source codes

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_BYTES = ir.VectorType(_I8, HALF)
_EIGHT = ir.VectorType(_I8, 8)
_WORDS = ir.VectorType(_I32, LANES)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_FLAGS = ir.VectorType(_I1, HALF)
_PAIR = ir.VectorType(_I64, 2)


def _all(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _load(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def _store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    at = builder.add(address, _I64(offset))
    builder.store(value, builder.inttoptr(at, value.type.as_pointer())).align = 1


def _call(builder: Any, name: str, kind: Any, *args: Any) -> Any:
    function = ir.FunctionType(kind, [arg.type for arg in args])
    insert: Any = cgutils.get_or_insert_function
    return builder.call(insert(builder.module, function, name), args)


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
    lanes = ir.VectorType(_I32, kind.count)
    return builder.shuffle_vector(first, first, _all(lanes, 0))


def _nibbles(builder: Any, word: Any) -> Any:
    """The 16 codes of eight bytes, in the order of the weights: the low nibble comes first."""
    packed = builder.bitcast(word, _EIGHT)
    low = builder.and_(packed, _all(_EIGHT, 15))
    high = builder.lshr(packed, _all(_EIGHT, 4))
    order = [lane // 2 + lane % 2 * 8 for lane in range(HALF)]
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, HALF), order))


@_intrinsic
def load8(typingctx: Any, address: Any) -> Any:
    """The byte at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(_load(builder, args[0], _I8), _I64)

    return types.uint64(types.int64), generate


@_intrinsic
def load64(typingctx: Any, address: Any) -> Any:
    """The eight bytes at ``address``: half a block of source codes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(builder, args[0], _I64)

    return types.uint64(types.int64), generate


@_intrinsic
def store8(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the low byte of ``value``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(builder, builder.trunc(args[1], _I8), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


def _largest(builder: Any, codes: Any, chosen: Any) -> Any:
    magnitudes = builder.and_(codes, _all(_BYTES, 7))
    magnitudes = builder.select(chosen, magnitudes, _all(_BYTES, 0))
    return builder.zext(_call(builder, "llvm.vector.reduce.umax.v16i8", _I8, magnitudes), _I64)


@_intrinsic
def largest(typingctx: Any, word: Any) -> Any:
    """The largest magnitude code, 0..7, of 16 source codes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _largest(builder, _nibbles(builder, args[0]), _all(_FLAGS, 1))

    return types.int64(types.uint64), generate


@_intrinsic
def lowest(typingctx: Any, word: Any) -> Any:
    """The largest magnitude code of the negative ones among 16 source codes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes = _nibbles(builder, args[0])
        negative = builder.icmp_unsigned(">=", codes, _all(_BYTES, 8))
        return _largest(builder, codes, negative)

    return types.int64(types.uint64), generate


@_intrinsic
def lowest_weighted(typingctx: Any, word: Any, weights: Any) -> Any:
    """As ``lowest`` of the codes that have a weight at address ``weights``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes = _nibbles(builder, args[0])
        negative = builder.icmp_unsigned(">=", codes, _all(_BYTES, 8))
        weights = _load(builder, args[1], _VECTOR, 4)
        some = builder.fcmp_ordered("!=", weights, ir.Constant(_VECTOR, [0.0] * LANES))
        return _largest(builder, codes, builder.and_(negative, some))

    return types.int64(types.uint64, types.int64), generate


def _terms(builder: Any, table: Any, word: Any, i: int) -> Any:
    """The terms of weight ``i``: row ``code`` of a chunk, at a multiple of 64 bytes."""
    shift = 4 * i - 6
    moved = builder.lshr(word, _I64(shift)) if shift > 0 else builder.shl(word, _I64(-shift))
    offset = builder.and_(moved, _I64(15 * TERM_BYTES))
    return _load(builder, builder.add(table, offset), _VECTOR, TERM_BYTES)


def _smallest(builder: Any, sums: Any) -> Any:
    """Key of the smallest of 16 sums: its f32 bits, then the lane, the first of equal ones.

    Sums are not negative and no NaN, so that their bits order as integers.
    """
    bits = builder.bitcast(sums, _WORDS)
    least = _call(builder, "llvm.vector.reduce.umin.v16i32", _I32, bits)
    equal = builder.icmp_unsigned("==", bits, _splat(builder, least, _WORDS))
    mask = builder.bitcast(equal, _I16)
    lane = _call(builder, "llvm.cttz.i16", _I16, mask, _I1(1))
    high = builder.shl(builder.zext(least, _I64), _I64(32))
    return builder.or_(high, builder.zext(lane, _I64))


@_intrinsic
def scan(typingctx: Any, table: Any, word: Any) -> Any:
    """Key of the best of the 16 candidates at ``table`` (squared errors) for 16 source codes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = ir.Constant(_VECTOR, [0.0] * LANES)
        for i in range(HALF):
            sums = builder.fadd(sums, _terms(builder, args[0], args[1], i))
        return _smallest(builder, sums)

    return types.uint64(types.int64, types.uint64), generate


@_intrinsic
def scan2(typingctx: Any, table: Any, word0: Any, word1: Any) -> Any:
    """As ``scan`` for 32 source codes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = ir.Constant(_VECTOR, [0.0] * LANES)
        for word in args[1:]:
            for i in range(HALF):
                sums = builder.fadd(sums, _terms(builder, args[0], word, i))
        return _smallest(builder, sums)

    return types.uint64(types.int64, types.uint64, types.uint64), generate


def _weighted(builder: Any, sums: Any, table: Any, word: Any, weights: Any) -> Any:
    for i in range(HALF):
        weight = _load(builder, builder.add(weights, _I64(4 * i)), ir.FloatType(), 4)
        d = _terms(builder, table, word, i)
        term = builder.fmul(builder.fmul(_splat(builder, weight, _VECTOR), d), d)
        sums = builder.fadd(sums, term)
    return sums


@_intrinsic
def scan_weighted(typingctx: Any, table: Any, word: Any, weights: Any) -> Any:
    """As ``scan`` with a table of signed errors and the 16 weights at address ``weights``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        return _smallest(builder, _weighted(builder, zero, *args))

    return types.uint64(types.int64, types.uint64, types.int64), generate


@_intrinsic
def scan2_weighted(typingctx: Any, table: Any, word0: Any, word1: Any, weights: Any) -> Any:
    """As ``scan_weighted`` for 32 source codes and weights."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        table, word0, word1, weights = args
        sums = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = _weighted(builder, sums, table, word0, weights)
        second = builder.add(weights, _I64(4 * HALF))
        return _smallest(builder, _weighted(builder, sums, table, word1, second))

    return types.uint64(types.int64, types.uint64, types.uint64, types.int64), generate


@_intrinsic
def weightless(typingctx: Any, weights: Any) -> Any:
    """Whether the 16 weights at address ``weights``, none of them -0, are all zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = _load(builder, args[0], _WORDS, 4)
        return builder.icmp_unsigned(
            "==", _call(builder, "llvm.vector.reduce.or.v16i32", _I32, bits), _I32(0)
        )

    return types.boolean(types.int64), generate


def _look_up(context: Any, builder: Any, codes: Any, word: Any) -> Any:
    """The target codes of 16 source codes, by the 16 bytes at address ``codes``."""
    table, nibbles = _load(builder, codes, _BYTES), _nibbles(builder, word)
    if "+ssse3" in context.codegen().magic_tuple()[2].split(","):
        return _call(builder, "llvm.x86.ssse3.pshuf.b.128", _BYTES, table, nibbles)
    found = ir.Constant(_BYTES, ir.Undefined)
    for lane in range(HALF):
        code = builder.zext(builder.extract_element(nibbles, _I32(lane)), _I32)
        found = builder.insert_element(found, builder.extract_element(table, code), _I32(lane))
    return found


def _squeeze(builder: Any, codes: Any, bits: int) -> list[Any]:
    """Two i64 of 8 codes each, ``bits`` bits apart, from 16 bytes."""
    pair = builder.bitcast(codes, _PAIR)
    lane, held = 8, bits
    while lane < 64:
        # Of two lanes, the upper one's bits come down to those that the lower one holds.
        mask = sum((1 << held) - 1 << at for at in range(0, 64, 2 * lane))
        low = builder.and_(pair, _all(_PAIR, mask))
        moved = builder.lshr(pair, _all(_PAIR, lane - held))
        pair = builder.or_(low, builder.and_(moved, _all(_PAIR, mask << held)))
        lane, held = 2 * lane, 2 * held
    return [builder.extract_element(pair, _I32(i)) for i in range(2)]


def _store96(builder: Any, pieces: list[Any], address: Any, offset: int) -> None:
    """Write two pieces of 48 bits."""
    low, high = pieces
    _store(builder, builder.or_(low, builder.shl(high, _I64(48))), address, offset)
    rest = builder.trunc(builder.lshr(high, _I64(16)), _I32)
    _store(builder, rest, address, offset + 8)


def _pack2(builder: Any, first: Any, second: Any, out: Any) -> None:
    for half, codes in enumerate((first, second)):
        low, high = _squeeze(builder, codes, 2)
        word = builder.or_(low, builder.shl(high, _I64(16)))
        _store(builder, builder.trunc(word, _I32), out, 4 * half)


def _pack3(builder: Any, first: Any, second: Any, out: Any) -> None:
    pieces = []
    for codes in (first, second):
        low, high = _squeeze(builder, codes, 3)
        pieces.append(builder.or_(low, builder.shl(high, _I64(24))))
    _store96(builder, pieces, out, 0)


def _pack4(builder: Any, first: Any, second: Any, out: Any) -> None:
    _store(builder, builder.or_(first, builder.shl(second, _all(_BYTES, 4))), out)


def _pack6(builder: Any, first: Any, second: Any, out: Any) -> None:
    for half, codes in enumerate((first, second)):
        _store96(builder, _squeeze(builder, codes, 6), out, 12 * half)


def _pack8(builder: Any, first: Any, second: Any, out: Any) -> None:
    _store(builder, first, out)
    _store(builder, second, out, HALF)


def _packer(pack: Callable[[Any, Any, Any, Any], None]) -> Any:
    """An intrinsic (code map 0, word 0, code map 1, word 1, out): writes the codes of a block."""

    @_intrinsic
    def packer(typingctx: Any, map0: Any, word0: Any, map1: Any, word1: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            map0, word0, map1, word1, out = args
            first = _look_up(context, builder, map0, word0)
            pack(builder, first, _look_up(context, builder, map1, word1), out)
            return context.get_dummy_value()

        kinds = types.int64, types.uint64, types.int64, types.uint64, types.int64
        return types.void(*kinds), generate

    return packer


pack2, pack3, pack4, pack6, pack8 = map(_packer, (_pack2, _pack3, _pack4, _pack6, _pack8))
