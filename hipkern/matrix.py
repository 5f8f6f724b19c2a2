"""Owns how packed matrices are told to kernels: decoder numbers, books, structs, grids.

The structs are those of ``kernels/ds4q_unpack.h``. Addresses come from the caller; nothing here
touches a device.
"""

from __future__ import annotations

import struct

import numpy as np

from ds4q.artifact.formats import Coding, codec_for
from ds4q.artifact.formats._blocks import BlockCodec
from ds4q.artifact.formats._ue4m3 import LOW_BITS
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
    type_of,
)
from ds4q.hipkern.errors import HipUsageError

BOOKED = {ROCMFP3.id: 104, ROCMFP3_MIX.id: 104, ROCMFP2_MIX.id: 106, ROCMFP2.id: 106}
AFFINE = 256 + ROCMFP2.id  # an offset in place of the second scale
NEG32 = 256 + ROCMFP6.id  # another level of code 32
_PLAIN = (F16, F32, Q8F16, BF16, MQ2_LLOYD, HFP4G32, ROCMFP4, ROCMFP4_FAST, ROCMFP6, ROCMFP8)
_OWN = {kind.id: kind.id for kind in _PLAIN}
ROTATED = (MQ2_LLOYD.id,)
"""Decoders of matrices that multiply what ``rotate.hip`` has made of activations."""

MATRIX_BYTES = 40
BOOKS_BYTES = 40
JOB_BYTES = 72
ABSENT = bytes(MATRIX_BYTES)
"""The struct of a matrix that is not there."""

GROUPS = 6  # of 32 lanes, in a block that multiplies
MOE_HIDDEN_ROWS = 4 * GROUPS  # of ``moe_gate_up``'s result that a block gives
MOE_OUT_ROWS = 8 * GROUPS  # of ``moe_down``'s
MOE_EXPERTS = 32  # of a token at most, the shared one included
_DECODE_THREADS = 128
_SUM_THREADS = 128
_WIDE = (F16.id, F32.id, BF16.id)
_PART = 4096  # columns that a group takes at once of packed rows
_ENOUGH_BLOCKS = 256  # to fill a device
_BLOCK = 32  # columns that a thread decodes
_TURN = 256  # columns that are rotated together


def decoder_of(type_id: int, coding: Coding | None) -> int:
    """Number of the decoder that reads a matrix.

    Raises
    ------
    HipUsageError : no kernel reads the type
    """
    if type_id == ROCMFP2.id and coding == "affine":
        return AFFINE
    if type_id == ROCMFP6.id and coding == "neg32":
        return NEG32
    found = BOOKED.get(type_id, _OWN.get(type_id))
    if found is None:
        raise HipUsageError(f"no kernel reads tensor type {type_of(type_id).name}")
    return found


def books_of(type_id: int, coding: Coding | None) -> bytes | None:
    """``ds4q_books`` of a matrix, or None where its decoder takes none.

    Raises
    ------
    CodingError : the coding that the type needs is absent or unknown
    """
    codec = codec_for(type_id, coding)
    if decoder_of(type_id, coding) not in BOOKED.values():
        return None
    if not isinstance(codec, BlockCodec):
        raise HipUsageError(f"{codec.type.name} has no levels")
    bits = codec.levels.view(np.uint32)
    if (bits & 0xFFFF).any():
        raise HipUsageError(f"a level of {codec.type.name} is not a bf16")
    levels = np.zeros((2, 8), dtype="<u2")
    levels[:, : bits.shape[1]] = bits >> 16
    select = codec.scale_bits == LOW_BITS
    return struct.pack("<2I", select, 0) + levels.tobytes()


def row_bytes_of(type_id: int, cols: int) -> int:
    """Bytes of one row.

    Raises
    ------
    PayloadSizeError, HipUsageError : rows of this length are not whole blocks
    """
    kind = type_of(type_id)
    if cols <= 0 or cols % _BLOCK:
        raise HipUsageError(
            f"kernels read {kind.name} in blocks", expected=f"a multiple of {_BLOCK}", found=cols
        )
    return kind.row_bytes(cols)


def pack_matrix(
    address: int, books: int, decoder: int, rows: int, cols: int, row_bytes: int
) -> bytes:
    """``ds4q_matrix`` of rows at ``address``, with what ``books_of`` gives at ``books`` or 0."""
    return struct.pack("<2Q6i", address, books, decoder, rows, cols, row_bytes, 0, 0)


def pack_job(
    matrix: bytes,
    x: int,
    y: int,
    x_stride: int,
    y_stride: int,
    first_block: int,
    block_rows: int = 0,
) -> bytes:
    """``ds4q_job``: ``y[t * y_stride + row] = row . x[t * x_stride ...]``; strides in floats.

    ``first_block`` is the sum of blocks over the jobs before, ``block_rows`` the rows of a block, a
    multiple of ``GROUPS``; 0 takes ``linear_rows``.
    """
    decoder, rows, cols = struct.unpack_from("<2Q6i", matrix)[2:5]
    block_rows = block_rows or linear_rows(decoder, rows, cols)
    return matrix + struct.pack("<2Q4i", x, y, x_stride, y_stride, first_block, block_rows)


def linear_rows(decoder: int, rows: int, cols: int) -> int:
    """Rows of a matrix that a block of ``linear`` takes.

    Two of a group where weights go straight to registers. Else two or four windows of a group (see
    ``ds4q_rows.h``): many, so that what a block begins with is spread over them; few where there
    would be too few blocks to fill a device.
    """
    if decoder in _WIDE:
        return 2 * GROUPS
    window = max(1, min(8, _PART // cols))
    many = rows >= 4 * window * GROUPS * _ENOUGH_BLOCKS
    return (4 if many else 2) * window * GROUPS


def linear_blocks(decoder: int, rows: int, cols: int) -> int:
    """Blocks of ``linear`` that a job takes."""
    return -(-rows // linear_rows(decoder, rows, cols))


def linear_kernel(tokens: int) -> str:
    """The kernel of ``linear.hip`` for so many tokens; both give the same bits."""
    return "linear" if tokens == 1 else "linear_batch"


def gate_up_grid(width: int, k: int, tokens: int) -> tuple[int, int, int]:
    """Grid of ``moe_gate_up``: ``width`` rows of ``k`` routed experts and of the shared one."""
    _check_experts(k)
    return -(-width // MOE_HIDDEN_ROWS), k + 1, tokens


def down_grid(rows: int, k: int, tokens: int) -> tuple[int, int, int]:
    """Grid of ``moe_down``."""
    _check_experts(k)
    return -(-rows // MOE_OUT_ROWS), k + 1, tokens


def sum_grid(rows: int, tokens: int) -> tuple[int, int, int]:
    """Grid of ``hc_sum``."""
    return -(-rows // _SUM_THREADS), tokens, 1


def rotate_grid(cols: int, tokens: int) -> tuple[int, int, int]:
    """Grid of ``rotate``."""
    return cols // _TURN, tokens, 1


def rotate_hidden_grid(width: int, k: int, tokens: int) -> tuple[int, int, int]:
    """Grid of ``rotate_hidden``: what ``gate_up_grid`` has made."""
    return width // _TURN, k + 1, tokens


def _check_experts(k: int) -> None:
    if not 0 < k < MOE_EXPERTS:
        raise HipUsageError(
            "kernels cannot take so many experts of a token",
            expected=f"1 to {MOE_EXPERTS - 1}",
            found=k,
        )


def decode_grid(rows: int, cols: int) -> tuple[int, int, int]:
    """Grid of ``decode_f32`` and ``decode_f16``."""
    return -(-rows * cols // (_BLOCK * _DECODE_THREADS)), 1, 1


def embed_grid(cols: int, tokens: int) -> tuple[int, int, int]:
    """Grid of ``embed``."""
    return -(-cols // (_BLOCK * _DECODE_THREADS)), tokens, 1
