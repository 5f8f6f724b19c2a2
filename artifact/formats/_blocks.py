"""Owns blocks of 32 weights: where codes and scale bytes lie, decoding, validation, packing.

A block is 32 codes, then one scale byte, or two (weights 0..15 and 16..31). Codes of 4 bits lie as
nibbles: byte j has weight j low and weight j + 16 high. All others are a bit stream, least
significant bit first. The layouts are Lucebox's (github.com/Luce-Org/lucebox); ``FORMAT.md`` has
the table. Which scale and codes a block gets is decided elsewhere (``_search.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import CodingError, PayloadSizeError, PayloadValueError
from ds4q.artifact.fastpath import FastPath, jit
from ds4q.artifact.formats import U8, Coding, RowCodec, Values
from ds4q.artifact.formats._rules import LEVELS
from ds4q.artifact.formats._search import search
from ds4q.artifact.formats._ue4m3 import LAST, LOW_BITS, UE4M3, UE4M3_LOW
from ds4q.artifact.types import TensorType, matrix_shape

F32Array = npt.NDArray[np.float32]

BLOCK = 32
HALF = 16


def unpack_reference(units: U8, bits: int) -> U8:
    """Codes ``(n, 32)`` of blocks ``(n, unit_bytes)``."""
    code_bytes = units[:, : 4 * bits]
    if bits == 4:
        return np.concatenate([code_bytes & 15, code_bytes >> 4], axis=1)
    stream = np.unpackbits(code_bytes, axis=1, bitorder="little").reshape(-1, BLOCK, bits)
    return np.packbits(stream, axis=2, bitorder="little").reshape(-1, BLOCK)


@jit
def unpack_block(unit: U8, bits: int, codes: U8) -> None:
    """The 32 codes of one block."""
    if bits == 4:
        for j in range(HALF):
            codes[j] = unit[j] & 15
            codes[j + HALF] = unit[j] >> 4
    elif bits == 2:
        for j in range(8):
            for i in range(4):
                codes[4 * j + i] = (unit[j] >> (2 * i)) & 3
    elif bits == 3:
        for j in range(4):
            word = unit[3 * j] | unit[3 * j + 1] << 8 | unit[3 * j + 2] << 16
            for i in range(8):
                codes[8 * j + i] = (word >> (3 * i)) & 7
    elif bits == 6:
        for j in range(8):
            word = unit[3 * j] | unit[3 * j + 1] << 8 | unit[3 * j + 2] << 16
            for i in range(4):
                codes[4 * j + i] = (word >> (6 * i)) & 63
    else:
        for j in range(BLOCK):
            codes[j] = unit[j]


def _pack_reference(codes: U8, scales: U8, bits: int, units: U8) -> None:
    """Blocks ``(n, unit_bytes)`` of codes ``(n, 32)`` and scale bytes ``(n, 1 or 2)``."""
    if bits == 4:
        units[:, :HALF] = codes[:, :HALF] | codes[:, HALF:] << 4
    else:
        stream = np.unpackbits(codes[..., None], axis=2, bitorder="little")[..., :bits]
        units[:, : 4 * bits] = np.packbits(
            stream.reshape(len(codes), -1), axis=1, bitorder="little"
        )
    units[:, 4 * bits :] = scales


@jit
def _pack_fast(codes: U8, scales: U8, bits: int, units: U8) -> None:
    for b in range(codes.shape[0]):
        if bits == 4:
            for j in range(HALF):
                units[b, j] = codes[b, j] | codes[b, j + HALF] << 4
        elif bits == 2:
            for j in range(8):
                byte = 0
                for i in range(4):
                    byte |= codes[b, 4 * j + i] << (2 * i)
                units[b, j] = byte
        elif bits == 8:
            for j in range(BLOCK):
                units[b, j] = codes[b, j]
        else:
            per_word = 24 // bits
            for j in range(BLOCK // per_word):
                word = 0
                for i in range(per_word):
                    word |= codes[b, per_word * j + i] << (bits * i)
                for i in range(3):
                    units[b, 3 * j + i] = word >> (8 * i) & 255
        for i in range(scales.shape[1]):
            units[b, 4 * bits + i] = scales[b, i]


pack = FastPath(_pack_reference, _pack_fast)


def _decode_reference(
    units: U8, bits: int, levels: F32Array, scales: F32Array, out: F32Array
) -> None:
    """Level times scale. ``levels`` ``(2, 2^bits)`` and ``scales`` ``(256,)`` go by scale byte.

    Bit 7 of a half's scale byte chooses the row of ``levels``.
    """
    codes = unpack_reference(units, bits)
    bytes_ = units[:, 4 * bits :]
    each = np.repeat(bytes_, BLOCK // bytes_.shape[1], axis=1)
    with np.errstate(over="ignore"):
        out[:] = levels[each >> 7, codes] * scales[each]


@jit
def _decode_fast(units: U8, bits: int, levels: F32Array, scales: F32Array, out: F32Array) -> None:
    codes = np.empty(BLOCK, dtype=np.uint8)
    groups = units.shape[1] - 4 * bits
    size = BLOCK // groups
    for b in range(units.shape[0]):
        unpack_block(units[b], bits, codes)
        for g in range(groups):
            byte = units[b, 4 * bits + g]
            book = levels[byte >> 7]
            scale = scales[byte]
            for i in range(size):
                out[b, size * g + i] = book[codes[size * g + i]] * scale


_decode = FastPath(_decode_reference, _decode_fast)


def known_variant(kind: TensorType, coding: Coding, codecs: Mapping[str, RowCodec]) -> RowCodec:
    """The codec that ``coding`` names; another word is a ``CodingError``."""
    found = codecs.get(coding) if isinstance(coding, str) else None
    if found is None:
        raise CodingError.of(
            "variant-unknown",
            f"unknown variant of {kind.name}",
            expected=" or ".join(codecs),
            found=coding,
        )
    return found


class BlockCodec(RowCodec):
    """A type whose value is one of 2^``bits`` levels times the scale.

    Parameters
    ----------
    levels : float32 ``(2^bits,)``, the level of each code
    upper : levels of a half whose scale byte has bit 7 set; None where such a byte is invalid
    """

    bits: ClassVar[int]
    group: ClassVar[int] = HALF  # weights that share a scale

    def __init__(self, levels: F32Array, upper: F32Array | None = None) -> None:
        self.levels = np.stack([levels, levels if upper is None else upper])
        self.scales = UE4M3 if upper is None else UE4M3_LOW
        self.scale_bits = 0xFF if upper is None else LOW_BITS

    def decode_units(self, units: U8) -> F32Array:
        out = np.empty((len(units), BLOCK), dtype=np.float32)
        _decode(units, self.bits, self.levels, self.scales, out)
        return out

    def search(
        self, values: F32Array, importance: F32Array, scales: U8, codes: U8
    ) -> tuple[int, int]:
        """Fill scale bytes ``(M, K / 32 * scale bytes of a block)`` and codes ``(M, K)``.

        ``importance`` is ``(K,)``, or ``(0,)`` for none. Returns the number of groups without
        weight, and the first group that has no finite error, or -1.
        """
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def encode_rows(self, values: Values, importance: Values | None = None) -> tuple[U8, int]:
        self.type.row_bytes(values.shape[1])
        return self._encode(values, importance)

    def encode_units(self, values: Values) -> U8:
        return self._encode(values, None)[0]

    def encode(self, values: Values) -> U8:
        self.type.payload_bytes(values.shape)
        return super().encode(values)

    def _encode(self, values: Values, importance: Values | None) -> tuple[U8, int]:
        with np.errstate(over="ignore"):  # of float64 input: refused below
            x = np.ascontiguousarray(values, dtype=np.float32)
        rows, k = x.shape
        self._refuse_non_finite(x)
        per_block = self.type.block_bytes - 4 * self.bits
        scales = np.empty((rows, k // BLOCK * per_block), dtype=np.uint8)
        codes = np.empty((rows, k), dtype=np.uint8)
        lost, failed = self.search(x, self._weights(importance, k), scales, codes)
        if failed >= 0:
            row, first = divmod(failed * self.group, k)
            raise PayloadValueError(
                f"{self.type.name} cannot hold weights this large: the error of row {row} from "
                f"weight {first} on overflows float32 at every scale",
                found=f"{np.abs(x[row]).max():g} in that row",
            )
        units = np.empty((rows * (k // BLOCK), self.type.block_bytes), dtype=np.uint8)
        pack(codes.reshape(-1, BLOCK), scales.reshape(-1, per_block), self.bits, units)
        return units.reshape(rows, -1), lost

    def _refuse_non_finite(self, x: F32Array) -> None:
        finite = np.isfinite(x)
        if not finite.all():
            row, column = divmod(int(np.argmin(finite)), x.shape[1])
            raise PayloadValueError(
                f"{self.type.name} cannot hold a value that is not finite",
                found=f"{x[row, column]} in row {row}, weight {column}",
            )

    def _weights(self, importance: Values | None, k: int) -> F32Array:
        if importance is None:
            return np.empty(0, dtype=np.float32)
        weights = np.ascontiguousarray(importance, dtype=np.float32)
        if weights.shape != (k,):
            raise PayloadSizeError(
                "importance is one number a column", expected=(k,), found=weights.shape
            )
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if bad.size:
            raise PayloadValueError(
                "importance is negative or not finite",
                found=f"{weights[bad[0]]} in column {bad[0]}",
            )
        return weights

    def validate_units(self, units: U8, *, first: int, path: object, tensor: str | None) -> None:
        self._check(units, lambda at: f"block {first + at}", path, tensor)

    def validate(
        self,
        payload: U8,
        shape: tuple[int, ...],
        *,
        first_row: int = 0,
        path: object = None,
        tensor: str | None = None,
    ) -> None:
        """As the base class; the message names the row and the block within it."""
        blocks = matrix_shape(shape)[1] // BLOCK

        def name(at: int) -> str:
            return f"row {first_row + at // blocks}, block {at % blocks}"

        self._check(self.units(payload, shape), name, path, tensor)

    def _check(
        self, units: U8, name: Callable[[int], str], path: object, tensor: str | None
    ) -> None:
        """Only a scale byte can be invalid: every code has a level."""
        scales = units[:, 4 * self.bits :]
        bad = np.flatnonzero((scales & self.scale_bits) > LAST)
        if bad.size:
            raise PayloadValueError(
                f"scale-byte: invalid scale byte in {name(int(bad[0]) // scales.shape[1])}",
                path=path,
                tensor=tensor,
                expected=f"at most {LAST:#04x}{' below bit 7' if self.scale_bits < 255 else ''}",
                found=f"{scales.reshape(-1)[bad[0]]:#04x}",
            )


class RuleCodec(BlockCodec):
    """A type whose encoder rounds by a ``rule`` of ``_rules.py``; ``upper`` as in the base."""

    def __init__(self, rule: int, upper: F32Array | None = None) -> None:
        super().__init__(LEVELS[rule], upper)
        self.rule = rule

    def search(
        self, values: F32Array, importance: F32Array, scales: U8, codes: U8
    ) -> tuple[int, int]:
        return search(values, importance, self.rule, scales, codes)
