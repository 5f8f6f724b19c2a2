"""Owns two vector instructions for 17-byte blocks, as LLVM shuffles that every target can lower.

Four blocks (68 bytes) are one 64-byte vector of codes and four scale bytes. One shuffle interleaves
them and one takes them apart, which moves 64 bytes per step where scalar code moves 17.
Addresses are plain integers: the caller guarantees the bounds.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

BLOCKS = 4
CODE_BYTES = 64
PACKED_BYTES = 68

_I8 = ir.IntType(8)
_I32 = ir.IntType(32)
_V64 = ir.VectorType(_I8, CODE_BYTES)
_V4 = ir.VectorType(_I8, BLOCKS)


def _mask(lanes: list[int]) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    at = builder.add(address, ir.Constant(address.type, offset))
    value = builder.load(builder.inttoptr(at, kind.as_pointer()))
    value.align = 1
    return value


def _store(builder: Any, value: Any, address: Any, offset: int) -> None:
    at = builder.add(address, ir.Constant(address.type, offset))
    builder.store(value, builder.inttoptr(at, value.type.as_pointer())).align = 1


def _widen(builder: Any, four: Any) -> Any:
    return builder.shuffle_vector(
        four, ir.Constant(_V4, ir.Undefined), _mask([0, 1, 2, 3] + [0] * (CODE_BYTES - BLOCKS))
    )


def _source_lane(byte: int) -> int:
    """Lane of concat(codes[64], scales[64]) that becomes ``byte`` of the 68 packed bytes."""
    block, position = divmod(byte, 17)
    return CODE_BYTES + block if position == 0 else 16 * block + position - 1


@intrinsic
def _interleave(typingctx: Any, codes: Any, scales: Any, packed: Any) -> Any:
    """Write 68 packed bytes from 64 code bytes and 4 scale bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = _load(builder, args[0], 0, _V64)
        scale = _widen(builder, _load(builder, args[1], 0, _V4))
        lanes = [_source_lane(byte) for byte in range(PACKED_BYTES)]
        head = builder.shuffle_vector(vector, scale, _mask(lanes[:CODE_BYTES]))
        tail = builder.shuffle_vector(vector, scale, _mask(lanes[CODE_BYTES:]))
        _store(builder, head, args[2], 0)
        _store(builder, tail, args[2], CODE_BYTES)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.uintp), generate


@intrinsic
def _difference(typingctx: Any, codes: Any, scales: Any, packed: Any) -> Any:
    """Nonzero where 68 packed bytes are not the 64 code bytes and 4 scale bytes interleaved."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        head = _load(builder, args[2], 0, _V64)
        tail = _widen(builder, _load(builder, args[2], CODE_BYTES, _V4))
        where = {_source_lane(byte): byte for byte in range(PACKED_BYTES)}
        unpacked = builder.shuffle_vector(head, tail, _mask([where[i] for i in range(CODE_BYTES)]))
        scale = builder.shuffle_vector(
            head, tail, _mask([where[CODE_BYTES + i] for i in range(BLOCKS)])
        )
        delta = builder.xor(unpacked, _load(builder, args[0], 0, _V64))
        words = builder.bitcast(delta, ir.VectorType(ir.IntType(64), 8))
        total = builder.extract_element(words, ir.Constant(_I32, 0))
        for lane in range(1, 8):
            total = builder.or_(total, builder.extract_element(words, ir.Constant(_I32, lane)))
        scale_delta = builder.bitcast(
            builder.xor(scale, _load(builder, args[1], 0, _V4)), ir.IntType(32)
        )
        return builder.or_(total, builder.zext(scale_delta, ir.IntType(64)))

    return types.uint64(types.uintp, types.uintp, types.uintp), generate


# numba supplies the typing context, which type checkers cannot know.
interleave: Any = _interleave
difference: Any = _difference
