"""Owns turning packed rows into the bytes of other formats. Moves codes, never goes through floats.

Each result is compared with what it was made from before anybody gets it.
"""

from __future__ import annotations

import numpy as np

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.artifact.formats import hfp4g32
from ds4q.artifact.numeric import unpack_nibbles
from ds4q.quantize.export.plan import U8, ExportError

HALF = hfp4g32.BLOCK // 2


def as_it_is(packed: U8, first: int, count: int, k: int) -> tuple[U8, ...]:
    """The artifact's own bytes."""
    return (packed,)


def fp4_source(packed: U8, first: int, count: int, k: int) -> tuple[U8, ...]:
    """HFP4G32 rows -> the checkpoint's codes ``(count, k/2)`` and scale bytes ``(count, k/32)``.

    Raises ``ExportError`` for a row header that holds more than the checkpoint could say.
    """
    rows = packed.reshape(count, -1)
    codes, scales = hfp4g32.unpack(rows)
    at = hfp4g32.first_difference(codes, scales, rows)
    if at is not None:
        _refuse_row(rows, first, k)
    return codes, scales


def mxfp4_blocks(packed: U8, first: int, count: int, k: int) -> tuple[U8, ...]:
    """HFP4G32 rows -> MXFP4 rows of GGML: the same scale bytes and codes, otherwise paired.

    A block is an E8M0 byte and 16 bytes; byte j holds code j low and code j + 16 high, where ours
    has codes 2j and 2j + 1. Raises ``ExportError`` as ``fp4_source``.
    """
    rows = packed.reshape(count, -1)
    if (rows[:, : hfp4g32.ROW_HEADER_BYTES] != hfp4g32.row_header(k)).any():
        _refuse_row(rows, first, k)
    out = np.empty((count, k // hfp4g32.BLOCK * hfp4g32.BLOCK_BYTES), np.uint8)
    _pair_halves(rows, out)
    bad = _first_other_code(rows, out)
    if bad >= 0:
        where = f"row {first + bad}"
        remedy = "this is a bug in ds4q, or bad memory: please report it"
        raise ExportError("MXFP4 codes differ from the artifact's", found=where, remedy=remedy)
    return (out,)


def wide_ids(packed: U8, first: int, count: int, k: int) -> tuple[U8, ...]:
    """32-bit ids as the 64-bit ones of the checkpoint."""
    return (packed.view("<u4").astype("<i8").view(np.uint8),)


def _refuse_row(rows: U8, first: int, k: int) -> None:
    wanted = hfp4g32.row_header(k)
    row = int(np.argmax((rows[:, : hfp4g32.ROW_HEADER_BYTES] != wanted).any(axis=1)))
    raise ExportError(
        f"row {first + row} has a row scale or flags for which the other format has no place",
        expected=wanted.tobytes().hex(),
        found=rows[row, : hfp4g32.ROW_HEADER_BYTES].tobytes().hex(),
    )


def _pair_halves_reference(rows: U8, out: U8) -> None:
    blocks = rows[:, hfp4g32.ROW_HEADER_BYTES :].reshape(-1, hfp4g32.BLOCK_BYTES)
    codes = unpack_nibbles(blocks[:, 1:])
    found = out.reshape(-1, hfp4g32.BLOCK_BYTES)
    found[:, 0] = blocks[:, 0]
    found[:, 1:] = codes[:, :HALF] | codes[:, HALF:] << 4


@jit
def _pair_halves_fast(rows: U8, out: U8) -> None:
    u8 = np.uint8
    for r in range(rows.shape[0]):
        for b in range(out.shape[1] // 17):
            at, to = 16 + 17 * b, 17 * b
            out[r, to] = rows[r, at]
            for i in range(8):
                low, high = rows[r, at + 1 + i], rows[r, at + 9 + i]
                out[r, to + 1 + 2 * i] = (low & u8(15)) | u8((high & u8(15)) << u8(4))
                out[r, to + 2 + 2 * i] = (low >> u8(4)) | (high & u8(240))


_pair_halves = FastPath(_pair_halves_reference, _pair_halves_fast)


def _first_other_code_reference(rows: U8, out: U8) -> int:
    blocks = rows[:, hfp4g32.ROW_HEADER_BYTES :].reshape(len(rows), -1, hfp4g32.BLOCK_BYTES)
    found = out.reshape(blocks.shape)
    codes = np.concatenate((found[:, :, 1:] & 15, found[:, :, 1:] >> 4), axis=2)
    same = (codes == unpack_nibbles(blocks[:, :, 1:])).all(axis=(1, 2))
    same &= (found[:, :, 0] == blocks[:, :, 0]).all(axis=1)
    return -1 if same.all() else int(np.argmin(same))


@jit
def _first_other_code_fast(rows: U8, out: U8) -> int:
    u8 = np.uint8
    for r in range(rows.shape[0]):
        delta = u8(0)
        for b in range(out.shape[1] // 17):
            at, to = 16 + 17 * b, 17 * b
            delta |= rows[r, at] ^ out[r, to]
            for i in range(8):
                # The way back: codes i and i + 16 of their pairs, put together as ours are.
                even, odd = out[r, to + 1 + 2 * i], out[r, to + 2 + 2 * i]
                low = (even & u8(15)) | u8((odd & u8(15)) << u8(4))
                high = (even >> u8(4)) | (odd & u8(240))
                delta |= (rows[r, at + 1 + i] ^ low) | (rows[r, at + 9 + i] ^ high)
        if delta != 0:
            return r
    return -1


_first_other_code = FastPath(_first_other_code_reference, _first_other_code_fast)
