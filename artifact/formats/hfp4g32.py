"""Owns HFP4G32: rows of a 16-byte header and K/32 blocks of (E8M0 scale byte, 16 code bytes).

The repack moves bytes and never goes through floats: code 8 (-0) and every scale byte survive.
Value of a code: row_scale * 2^(scale - 127) * E2M1[code]; low nibble = even column. The layout is
hipfire's; ``FORMAT.md`` has the table.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ds4q.artifact.errors import PayloadSizeError, PayloadValueError
from ds4q.artifact.fastpath import FastPath, jit
from ds4q.artifact.formats import U8, Codec, Values, _quad
from ds4q.artifact.numeric import E2M1, E8M0, unpack_nibbles
from ds4q.artifact.types import HFP4G32, TensorType

ROW_HEADER_BYTES = 16
BLOCK = 32
BLOCK_BYTES = 17
CODE_BYTES = 16
NAN_SCALE = 255


def row_header(k: int) -> U8:
    """The 16 header bytes of a repacked row: row scale 1.0 (f16), unrotated, K/32 blocks."""
    header = np.zeros(ROW_HEADER_BYTES, dtype=np.uint8)
    header[0:2] = (0x00, 0x3C)
    header[4:6] = (k // BLOCK & 255, k // BLOCK >> 8)
    return header


def _blocks(rows: U8) -> U8:
    """View of the blocks, ``(M, K/32, 17)``."""
    return rows[:, ROW_HEADER_BYTES:].reshape(len(rows), -1, BLOCK_BYTES)


def _repack_reference(codes: U8, scales: U8, header: U8, rows: U8) -> None:
    rows[:, :ROW_HEADER_BYTES] = header
    for b in range(scales.shape[1]):
        at = ROW_HEADER_BYTES + b * BLOCK_BYTES
        rows[:, at] = scales[:, b]
        rows[:, at + 1 : at + BLOCK_BYTES] = codes[:, b * CODE_BYTES : (b + 1) * CODE_BYTES]


@jit
def _repack_fast(codes: U8, scales: U8, header: U8, rows: U8) -> None:
    m, n = scales.shape
    quads = n // 4
    for r in range(m):
        for i in range(ROW_HEADER_BYTES):  # a slice assignment would cost as much as the row
            rows[r, i] = header[i]
        code_at = np.uintp(codes[r].ctypes.data)
        scale_at = np.uintp(scales[r].ctypes.data)
        out_at = np.uintp(rows[r].ctypes.data) + np.uintp(ROW_HEADER_BYTES)
        for _ in range(quads):
            _quad.interleave(code_at, scale_at, out_at)
            code_at += np.uintp(_quad.CODE_BYTES)
            scale_at += np.uintp(_quad.BLOCKS)
            out_at += np.uintp(_quad.PACKED_BYTES)
        for b in range(quads * 4, n):
            rows[r, 16 + 17 * b] = scales[r, b]
            for i in range(CODE_BYTES):
                rows[r, 17 + 17 * b + i] = codes[r, 16 * b + i]


_repack = FastPath(_repack_reference, _repack_fast)


def _first_bad_row_reference(codes: U8, scales: U8, header: U8, rows: U8) -> int:
    m, n = scales.shape
    blocks = _blocks(rows)
    equal = (
        (rows[:, :ROW_HEADER_BYTES] == header).all(axis=1)
        & (blocks[:, :, 0] == scales).all(axis=1)
        & (blocks[:, :, 1:] == codes.reshape(m, n, CODE_BYTES)).all(axis=(1, 2))
    )
    return -1 if equal.all() else int(np.argmin(equal))


@jit
def _first_bad_row_fast(codes: U8, scales: U8, header: U8, rows: U8) -> int:
    m, n = scales.shape
    quads = n // 4
    for r in range(m):
        delta = np.uint64(0)
        for i in range(ROW_HEADER_BYTES):
            delta |= np.uint64(rows[r, i] ^ header[i])
        code_at = np.uintp(codes[r].ctypes.data)
        scale_at = np.uintp(scales[r].ctypes.data)
        packed_at = np.uintp(rows[r].ctypes.data) + np.uintp(ROW_HEADER_BYTES)
        for _ in range(quads):
            delta |= _quad.difference(code_at, scale_at, packed_at)
            code_at += np.uintp(_quad.CODE_BYTES)
            scale_at += np.uintp(_quad.BLOCKS)
            packed_at += np.uintp(_quad.PACKED_BYTES)
        for b in range(quads * 4, n):
            delta |= np.uint64(rows[r, 16 + 17 * b] ^ scales[r, b])
            for i in range(CODE_BYTES):
                delta |= np.uint64(rows[r, 17 + 17 * b + i] ^ codes[r, 16 * b + i])
        if delta != 0:
            return r
    return -1


_first_bad_row = FastPath(_first_bad_row_reference, _first_bad_row_fast)


def _scan_reference(rows: U8) -> tuple[int, int, int]:
    """First block with a NaN scale (row * K/32 + block, or -1), and two counts of edge blocks.

    The counts tell where a careless decoder goes wrong: scale byte 0 or 1 with a nonzero code
    (subnormal in float32), and 253 with a code of magnitude >= 4 or 254 with one >= 2 (beyond it).
    """
    blocks = _blocks(rows)
    scale = blocks[:, :, 0]
    largest = (unpack_nibbles(blocks[:, :, 1:]) & 7).max(axis=2)  # magnitude code 0..7
    bad = np.flatnonzero(scale == NAN_SCALE)
    tiny = (scale <= 1) & (largest > 0)
    overflow = ((scale == 253) & (largest >= 6)) | ((scale == 254) & (largest >= 4))
    return (int(bad[0]) if bad.size else -1), int(tiny.sum()), int(overflow.sum())


@jit
def _scan_fast(rows: U8) -> tuple[int, int, int]:
    m = rows.shape[0]
    n = (rows.shape[1] - ROW_HEADER_BYTES) // BLOCK_BYTES
    first_nan, tiny, overflow = -1, 0, 0
    for r in range(m):
        for b in range(n):
            scale = rows[r, 16 + 17 * b]
            if 1 < scale < 253:
                continue
            if scale == NAN_SCALE and first_nan < 0:
                first_nan = r * n + b
            largest = 0
            for i in range(CODE_BYTES):
                byte = rows[r, 17 + 17 * b + i]
                largest = max(largest, byte & 7, (byte >> 4) & 7)
            tiny += scale <= 1 and largest > 0
            overflow += (scale == 253 and largest >= 6) or (scale == 254 and largest >= 4)
    return first_nan, tiny, overflow


scan = FastPath(_scan_reference, _scan_fast)


def _decode_reference(rows: U8, row_scales: Values, out: Values) -> None:
    blocks = _blocks(rows)
    values = E2M1[unpack_nibbles(blocks[:, :, 1:])]  # (M, K/32, 32)
    with np.errstate(over="ignore"):
        # Code times row scale is exact in float32, so the last factor rounds once or not at all.
        scaled = values * row_scales[:, None, None] * E8M0[blocks[:, :, :1]]
    out[:] = scaled.reshape(out.shape)


@jit
def _decode_fast(rows: U8, row_scales: Values, out: Values) -> None:
    m = rows.shape[0]
    n = out.shape[1] // BLOCK
    for r in range(m):
        for b in range(n):
            scale = E8M0[rows[r, 16 + 17 * b]]
            for i in range(CODE_BYTES):
                byte = rows[r, 17 + 17 * b + i]
                out[r, 32 * b + 2 * i] = E2M1[byte & 15] * row_scales[r] * scale
                out[r, 32 * b + 2 * i + 1] = E2M1[byte >> 4] * row_scales[r] * scale


_decode = FastPath(_decode_reference, _decode_fast)


def _source_values_reference(codes: U8, scales: U8, out: Values) -> None:
    blocks = E2M1[unpack_nibbles(codes)].reshape(*scales.shape, BLOCK)
    with np.errstate(over="ignore"):
        out[:] = (blocks * E8M0[scales][:, :, None]).reshape(out.shape)


@jit
def _source_values_fast(codes: U8, scales: U8, out: Values) -> None:
    for r in range(scales.shape[0]):
        for b in range(scales.shape[1]):
            scale = E8M0[scales[r, b]]
            for i in range(CODE_BYTES):
                byte = codes[r, CODE_BYTES * b + i]
                out[r, BLOCK * b + 2 * i] = E2M1[byte & 15] * scale
                out[r, BLOCK * b + 2 * i + 1] = E2M1[byte >> 4] * scale


_source_values = FastPath(_source_values_reference, _source_values_fast)


def source_values(codes: U8, scales: U8) -> Values:
    """Values float32 ``(M, K)`` of FP4 source bytes ``(M, K/2)`` and ``(M, K/32)``; exact.

    Beyond float32 (scale bytes 253, 254 with large codes) they are infinite.
    """
    _check_shapes(codes, scales, None)
    out = np.empty((len(codes), codes.shape[1] * 2), dtype=np.float32)
    _source_values(codes, scales, out)
    return out


def _check_shapes(codes: U8, scales: U8, rows: U8 | None) -> None:
    """The compiled kernels take addresses: a wrong shape would reach beyond the arrays."""
    m, n = scales.shape if scales.ndim == 2 else (len(scales), 0)
    shapes = (m, n * CODE_BYTES), (m, n), (m, HFP4G32.row_bytes(n * BLOCK))
    arrays = (codes, scales) if rows is None else (codes, scales, rows)
    for array, shape in zip(arrays, shapes, strict=False):
        if array.shape != shape or array.dtype != np.uint8 or array.strides[1] != 1:
            raise PayloadSizeError(
                "codes, scales and rows must be uint8, contiguous by row, and agree",
                expected=shape,
                found=f"{array.dtype} {array.shape}, strides {array.strides}",
            )


def repack(codes: U8, scales: U8, rows: U8 | None = None) -> U8:
    """Interleave FP4 source bytes into HFP4G32 rows.

    Parameters
    ----------
    codes : (M, K/2) uint8, two E2M1 codes a byte, low nibble = even column
    scales : (M, K/32) uint8, E8M0
    rows : (M, row_bytes) uint8 to write into; allocated where None

    Raises ``PayloadSizeError`` where the shapes disagree, or a row is not contiguous.
    """
    _check_shapes(codes, scales, rows)
    m, n = scales.shape
    k = n * BLOCK
    if rows is None:
        rows = np.empty((m, HFP4G32.row_bytes(k)), dtype=np.uint8)
    _repack(codes, scales, row_header(k), rows)
    return rows


def unpack(rows: U8) -> tuple[U8, U8]:
    """The exact inverse of ``repack``: codes (M, K/2) and scales (M, K/32)."""
    blocks = _blocks(rows)
    return blocks[:, :, 1:].reshape(len(rows), -1), blocks[:, :, 0].copy()


def first_difference(codes: U8, scales: U8, rows: U8) -> tuple[int, int] | None:
    """Row and block where ``rows`` is not the repack of the source; block -1 is the row header."""
    _check_shapes(codes, scales, rows)
    header = row_header(scales.shape[1] * BLOCK)
    row = _first_bad_row(codes, scales, header, rows)
    if row < 0:
        return None
    if (rows[row, :ROW_HEADER_BYTES] != header).any():
        return row, -1
    found_codes, found_scales = unpack(rows[row : row + 1])
    same = (found_scales[0] == scales[row]) & (
        (found_codes[0] == codes[row]).reshape(-1, CODE_BYTES).all(axis=1)
    )
    return row, int(np.argmin(same))


class Hfp4Codec(Codec):
    """Decode and validate; the encoder is ``repack``, since only FP4 sources become HFP4G32."""

    type: ClassVar[TensorType] = HFP4G32

    def decode_units(self, units: U8) -> Values:
        """Values beyond float32 (scale bytes 253, 254) become infinite, as in any f32 decoder."""
        k = (units.shape[1] - ROW_HEADER_BYTES) // BLOCK_BYTES * BLOCK
        row_scales = np.ascontiguousarray(units[:, :2]).view("<f2").astype(np.float32).reshape(-1)
        out = np.empty((len(units), k), dtype=np.float32)
        _decode(units, row_scales, out)
        return out

    def validate_units(self, units: U8, *, first: int, path: object, tensor: str | None) -> None:
        blocks = (units.shape[1] - ROW_HEADER_BYTES) // BLOCK_BYTES
        expected = row_header(blocks * BLOCK)
        headers = units[:, :ROW_HEADER_BYTES]
        scale = np.ascontiguousarray(headers[:, :2]).view("<f2").reshape(-1)
        bad = np.flatnonzero(
            (headers[:, 2:] != expected[2:]).any(axis=1) | ~np.isfinite(scale) | (scale == 0)
        )
        if bad.size:
            raise PayloadValueError(
                f"bad HFP4G32 row header in row {first + bad[0]}",
                path=path,
                tensor=tensor,
                expected=expected.tobytes().hex(),
                found=headers[bad[0]].tobytes().hex(),
            )
        at, _, _ = scan(units)
        if at >= 0:
            raise PayloadValueError(
                f"NaN scale byte in row {first + at // blocks}, block {at % blocks}",
                path=path,
                tensor=tensor,
                expected="E8M0 below 0xff",
                found="0xff",
            )


CODECS: dict[int, Codec] = {HFP4G32.id: Hfp4Codec()}
