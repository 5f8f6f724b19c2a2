"""Owns how the CPU's kernels read each packed type: decoders of one block, written out for LLVM.

Not: sums and loops (``kernels.py``). What a ROCmFPX code is worth is not told here but looked up in
the weight's level table (``levels.py``), which comes from the codec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from ds4q.artifact.numeric import E2M1, E8M0
from ds4q.artifact.types import (
    BF16,
    F16,
    F32,
    HFP4G32,
    MQ2_LLOYD,
    Q8F16,
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
from ds4q.runtime.backend.levels import AFFINE, NEG32
from ds4q.runtime.backend.vectors import (
    BYTES,
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VECTOR,
    WORDS,
    Cpu,
    broadcast,
    bytes_to_float,
    call,
    every,
    half_to_float,
    load,
    offset,
    pick,
)

STEP = 32  # columns that one decoder call gives

# A decoder returns two vectors of 16 weights and the block's scale, or None for weights that need
# none. In a "paired" type the first vector holds the even columns and the second the odd ones. No
# decoder reads a byte outside its block: a payload may end where memory does.
Block = tuple[Any, Any, Any]
Decoder = Callable[[Any, Cpu, Any, Any], Block]  # (builder, cpu, block, levels): addresses


def _doubled_e2m1(builder: Any, cpu: Cpu, nibbles: Any) -> Any:
    """Twice the E2M1 values of 16 codes, as int8."""
    if cpu.shuffle:
        table = ir.Constant(BYTES, [int(2 * value) & 255 for value in E2M1])
        return call(builder, "llvm.x86.ssse3.pshuf.b.128", BYTES, table, nibbles)
    magnitude = builder.and_(nibbles, every(BYTES, 7))
    above4, above6 = (
        call(builder, "llvm.usub.sat.v16i8", BYTES, magnitude, every(BYTES, floor))
        for floor in (4, 6)
    )
    # 0 1 2 3 4 6 8 12 = m + (m beyond 4) + 2 (m beyond 6)
    value = builder.add(builder.add(magnitude, above4), builder.shl(above6, every(BYTES, 1)))
    negative = builder.icmp_unsigned(">", nibbles, every(BYTES, 7))
    return builder.select(negative, builder.neg(value), value)


def _permute(builder: Any, table: Any, codes: Any) -> Any:
    """Entries of a 16-entry table; only the 4 low bits of a code select."""
    return call(builder, "llvm.x86.avx512.permvar.sf.512", VECTOR, table, codes)


def _e2m1_pairs(builder: Any, cpu: Cpu, codes: Any) -> tuple[Any, Any]:
    """16 code bytes -> the values of their low nibbles and of their high nibbles."""
    if cpu.permute:
        table = ir.Constant(VECTOR, [FLOAT(float(value)) for value in E2M1])
        low, high = (_permute(builder, table, half) for half in _nibbles(builder, codes))
        return low, high
    nibbles = builder.and_(codes, every(BYTES, 15)), builder.lshr(codes, every(BYTES, 4))
    doubled = (bytes_to_float(builder, _doubled_e2m1(builder, cpu, part)) for part in nibbles)
    low, high = (builder.fmul(part, every(VECTOR, 0.5)) for part in doubled)
    return low, high


def _nibbles(builder: Any, codes: Any) -> tuple[Any, Any]:
    """The low nibbles of 16 bytes, with more bits above them, and the high nibbles."""
    low = builder.zext(codes, WORDS)
    return low, builder.lshr(low, every(WORDS, 4))


def _e8m0(builder: Any, byte: Any) -> Any:
    """2^(byte - 127) by table: byte 0 is a subnormal, which shifting bits would turn into zero."""
    table = ir.Constant(ir.ArrayType(FLOAT, 256), [FLOAT(float(value)) for value in E8M0])
    at = cgutils.global_constant(builder, "e8m0", table)
    return builder.load(builder.gep(at, [I64(0), builder.zext(byte, I64)]))


def _hfp4g32_block(builder: Any, cpu: Cpu, at: Any, levels: Any) -> Block:
    low, high = _e2m1_pairs(builder, cpu, load(builder, offset(builder, at, 1), BYTES))
    return low, high, _e8m0(builder, load(builder, at, I8))


def _q8f16_block(builder: Any, cpu: Cpu, at: Any, levels: Any) -> Block:
    first = bytes_to_float(builder, load(builder, offset(builder, at, 2), BYTES))
    second = bytes_to_float(builder, load(builder, offset(builder, at, 18), BYTES))
    return first, second, half_to_float(builder, cpu, load(builder, at, I16))


def _bf16_block(builder: Any, cpu: Cpu, at: Any, levels: Any) -> Block:
    words = load(builder, at, WORDS)
    even = builder.bitcast(builder.shl(words, every(WORDS, 16)), VECTOR)
    odd = builder.bitcast(builder.and_(words, every(WORDS, 0xFFFF0000)), VECTOR)
    return even, odd, None


def _f16_block(builder: Any, cpu: Cpu, at: Any, levels: Any) -> Block:
    lanes = ir.VectorType(I16, LANES)
    first = half_to_float(builder, cpu, load(builder, at, lanes))
    second = half_to_float(builder, cpu, load(builder, offset(builder, at, 32), lanes))
    return first, second, None


def _f32_block(builder: Any, cpu: Cpu, at: Any, levels: Any) -> Block:
    return load(builder, at, VECTOR), load(builder, offset(builder, at, 64), VECTOR), None


# ROCmFPX. A level table has a row for each scale byte, with the value of each code under it.

Codes = Callable[[Any, Any], tuple[Any, Any]]  # (builder, block) -> 16 codes, 16 codes


def _stream(builder: Any, window: Any, nbytes: int, bits: int, first_bit: int = 0) -> Any:
    """16 codes of a bit stream, each in the low bits of a lane with other bits above it.

    Reads ``nbytes`` bytes at the address ``window``; code j begins at bit ``first_bit + bits * j``.
    """
    source = load(builder, window, ir.VectorType(I8, nbytes))
    lanes: list[int] = []
    shifts = []
    for bit in range(first_bit, first_bit + bits * LANES, bits):
        start = min(bit // 8, nbytes - 4)
        lanes += range(start, start + 4)
        shifts.append(bit - 8 * start)
    words = builder.bitcast(pick(builder, source, lanes), WORDS)
    return builder.lshr(words, ir.Constant(WORDS, shifts))


def _nibble_codes(builder: Any, at: Any) -> tuple[Any, Any]:
    return _nibbles(builder, load(builder, at, BYTES))


def _two_bit_codes(builder: Any, at: Any) -> tuple[Any, Any]:
    return _stream(builder, at, 4, 2), _stream(builder, offset(builder, at, 4), 4, 2)


def _three_bit_codes(builder: Any, at: Any) -> tuple[Any, Any]:
    return _stream(builder, at, 8, 3), _stream(builder, offset(builder, at, 6), 8, 3)


def _six_bit_codes(builder: Any, at: Any) -> tuple[Any, Any]:
    return _stream(builder, at, 16, 6), _stream(builder, offset(builder, at, 10), 16, 6, 16)


def _row(builder: Any, levels: Any, at: Any, scale: int, entries: int) -> Any:
    """Address of the table row for the scale byte number ``scale`` of a block."""
    number = builder.zext(load(builder, offset(builder, at, scale), I8), I64)
    return builder.add(levels, builder.mul(number, I64(4 * entries)))


def _entry(builder: Any, row: Any, number: int, kind: Any = VECTOR) -> Any:
    """One value of a table row, in all lanes."""
    return broadcast(builder, load(builder, offset(builder, row, 4 * number), FLOAT, 4), kind)


def _entries(builder: Any, row: Any, first: int, count: int, lanes: int) -> Any:
    """Values of a table row from ``first`` on, repeated until they fill the lanes."""
    table = load(builder, offset(builder, row, 4 * first), ir.VectorType(FLOAT, count), 4)
    return pick(builder, table, [i % count for i in range(lanes)])


def _table(builder: Any, cpu: Cpu, row: Any, entries: int) -> list[Any]:
    """A row of 4, 8 or 16 levels as ``_look_up`` takes it."""
    if cpu.permute:
        return [_entries(builder, row, 0, entries, LANES)]
    if cpu.octets:
        return [_entries(builder, row, i, min(entries, 8), 8) for i in range(0, entries, 8)]
    return [_entry(builder, row, number) for number in range(entries)]


def _look_up(builder: Any, cpu: Cpu, table: list[Any], codes: Any) -> Any:
    """The levels that the low bits of 16 codes select; bits above them may be anything."""
    if cpu.permute:
        return _permute(builder, table[0], codes)
    found, bit = table, 1
    if cpu.octets:
        found, bit = [_permute_octets(builder, part, codes) for part in table], 8
    while len(found) > 1:
        masked = builder.and_(codes, every(WORDS, bit))
        is_set = builder.icmp_unsigned("!=", masked, every(WORDS, 0))
        pairs = zip(found[0::2], found[1::2], strict=True)
        found = [builder.select(is_set, odd, even) for even, odd in pairs]
        bit *= 2
    return found[0]


def _permute_octets(builder: Any, table: Any, codes: Any) -> Any:
    """Entries of an 8-entry table; only the 3 low bits of a code select."""
    low, high = (
        call(builder, "llvm.x86.avx2.permps", table.type, table, pick(builder, codes, lanes))
        for lanes in (list(range(8)), list(range(8, LANES)))
    )
    return builder.shuffle_vector(low, high, ir.Constant(WORDS, list(range(LANES))))


def _table_block(entries: int, codes: Codes, scales: tuple[int, int]) -> Decoder:
    """A type whose weights are levels alone; the halves' scale bytes lie at ``scales``."""

    def block(builder: Any, cpu: Cpu, at: Any, levels: Any) -> Block:
        rows = (_row(builder, levels, at, scale, entries) for scale in scales)
        tables = [_table(builder, cpu, row, entries) for row in rows]
        first, second = (
            _look_up(builder, cpu, table, half)
            for table, half in zip(tables, codes(builder, at), strict=True)
        )
        return first, second, None

    return block


def _affine_block(builder: Any, cpu: Cpu, at: Any, levels: Any) -> Block:
    """Both bytes are of the whole block; an offset is code 1 under its byte."""
    table = _table(builder, cpu, _row(builder, levels, at, 8, 4), 4)
    row = _row(builder, levels, at, 9, 4)
    table = [builder.fsub(part, _entry(builder, row, 1, part.type)) for part in table]
    first, second = (_look_up(builder, cpu, table, half) for half in _two_bit_codes(builder, at))
    return first, second, None


def _rocmfp6_half(builder: Any, cpu: Cpu, row: Any, codes: Any, neg32: bool) -> Any:
    """Sign and magnitude."""
    if cpu.permute:
        low, high = (_entries(builder, row, first, LANES, LANES) for first in (0, LANES))
        name = "llvm.x86.avx512.vpermi2var.ps.512"  # only the 5 low bits of a code select
        magnitude = call(builder, name, VECTOR, low, codes, high)
    else:
        number = builder.uitofp(builder.and_(codes, every(WORDS, 31)), VECTOR)
        magnitude = builder.fmul(number, _entry(builder, row, 1))
    sign = builder.and_(builder.shl(codes, every(WORDS, 26)), every(WORDS, 1 << 31))
    value = builder.or_(builder.bitcast(magnitude, WORDS), sign)
    found = builder.bitcast(value, VECTOR)
    if not neg32:
        return found
    is_code_32 = builder.icmp_unsigned("==", value, every(WORDS, 1 << 31))  # -0 so far
    return builder.select(is_code_32, _entry(builder, row, 32), found)


def _rocmfp6_block(neg32: bool) -> Decoder:
    """Of the variant whose code 32 is -32, or of the one where it is zero."""

    def block(builder: Any, cpu: Cpu, at: Any, levels: Any) -> Block:
        first, second = (
            _rocmfp6_half(builder, cpu, _row(builder, levels, at, scale, 64), half, neg32)
            for half, scale in zip(_six_bit_codes(builder, at), (24, 25), strict=True)
        )
        return first, second, None

    return block


def _rocmfp8_block(builder: Any, cpu: Cpu, at: Any, levels: Any) -> Block:
    first = bytes_to_float(builder, load(builder, at, BYTES))
    second = bytes_to_float(builder, load(builder, offset(builder, at, 16), BYTES))
    return first, second, load(builder, _row(builder, levels, at, 32, 1), FLOAT, 4)


def _mq2lloyd_block(builder: Any, cpu: Cpu, at: Any, levels: Any) -> Block:
    """The block is a step's codes; ``levels`` are the four f16 that begin its group."""
    halves = load(builder, levels, ir.VectorType(I16, 4))
    repeated = pick(builder, halves, [i % 4 for i in range(LANES)])
    wide = half_to_float(builder, cpu, repeated)
    if cpu.permute:
        table = [wide]
    elif cpu.octets:
        table = [pick(builder, wide, list(range(8)))]
    else:
        table = [broadcast(builder, builder.extract_element(wide, I32(i))) for i in range(4)]
    first, second = (_look_up(builder, cpu, table, half) for half in _two_bit_codes(builder, at))
    return first, second, None


class Format(NamedTuple):
    """How the kernels read one tensor type.

    ``split``: the two vectors of a step are summed apart, one operation less. Not for older types,
    whose results would change in the last bit. ``head_bytes``: levels in front of each block, which
    is several steps long. ``rotated``: the weights are, so that activations must be.
    """

    kind: TensorType
    block: Decoder
    paired: bool = False
    split: bool = False
    head_bytes: int = 0
    rotated: bool = False

    @property
    def step_bytes(self) -> int:
        return (self.kind.block_bytes - self.head_bytes) * STEP // self.kind.block


_three_bit = _table_block(8, _three_bit_codes, (12, 13))
_two_bit = _table_block(4, _two_bit_codes, (8, 9))

FORMATS = {
    HFP4G32.id: Format(HFP4G32, _hfp4g32_block, paired=True),
    Q8F16.id: Format(Q8F16, _q8f16_block),
    BF16.id: Format(BF16, _bf16_block, paired=True),
    F16.id: Format(F16, _f16_block),
    F32.id: Format(F32, _f32_block),
    ROCMFP4.id: Format(ROCMFP4, _table_block(16, _nibble_codes, (16, 17)), split=True),
    ROCMFP4_FAST.id: Format(ROCMFP4_FAST, _table_block(16, _nibble_codes, (16, 16)), split=True),
    ROCMFP6.id: Format(ROCMFP6, _rocmfp6_block(neg32=False), split=True),
    NEG32: Format(ROCMFP6, _rocmfp6_block(neg32=True), split=True),
    ROCMFP8.id: Format(ROCMFP8, _rocmfp8_block),
    ROCMFP3.id: Format(ROCMFP3, _three_bit, split=True),
    ROCMFP3_MIX.id: Format(ROCMFP3_MIX, _three_bit, split=True),
    ROCMFP2_MIX.id: Format(ROCMFP2_MIX, _two_bit, split=True),
    ROCMFP2.id: Format(ROCMFP2, _two_bit, split=True),
    AFFINE: Format(ROCMFP2, _affine_block, split=True),
    MQ2_LLOYD.id: Format(MQ2_LLOYD, _mq2lloyd_block, split=True, head_bytes=8, rotated=True),
}
