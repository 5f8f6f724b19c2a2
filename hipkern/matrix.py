"""Owns how packed matrices are told to kernels: decoder numbers, books, structs, grids.

The structs are those of ``kernels/ds4q_unpack.h``. Addresses come from the caller; nothing here
touches a device.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from ds4q.artifact.formats import Coding, codec_for
from ds4q.artifact.formats._blocks import BlockCodec
from ds4q.artifact.formats._ue4m3 import LOW_BITS
from ds4q.artifact.types import (
    BF16,
    F16,
    F32,
    HFP4G32,
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

ALIGNMENT_BYTES = 16  # of a matrix's first byte
TAIL_BYTES = 16  # that must be readable behind its last

BOOKED = {ROCMFP3.id: 104, ROCMFP3_MIX.id: 104, ROCMFP2_MIX.id: 106, ROCMFP2.id: 106}
AFFINE = 256 + ROCMFP2.id  # an offset in place of the second scale
NEG32 = 256 + ROCMFP6.id  # another level of code 32
_PLAIN = (F16, F32, Q8F16, BF16, HFP4G32, ROCMFP4, ROCMFP4_FAST, ROCMFP6, ROCMFP8)
_OWN = {kind.id: kind.id for kind in _PLAIN}

MATRIX_BYTES = 40
BOOKS_BYTES = 40
JOB_BYTES = 72
ABSENT = bytes(MATRIX_BYTES)
"""The struct of a matrix that is not there."""

LINEAR_ROWS = 8  # rows of a job that a block of ``linear`` takes
MOE_ROWS = 8  # rows that a block of the experts' kernels takes
_DECODE_THREADS = 128
_BLOCK = 32  # columns that a thread decodes


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


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed matrix in device memory.

    Parameters
    ----------
    address : of its first byte, a multiple of 16
    books : address of what ``books_of`` gives, or 0
    """

    address: int
    books: int
    decoder: int
    rows: int
    cols: int
    row_bytes: int

    @classmethod
    def of(
        cls, type_id: int, coding: Coding | None, rows: int, cols: int, address: int, books: int = 0
    ) -> Matrix:
        """The matrix of a tensor.

        Raises
        ------
        HipUsageError, PayloadSizeError : kernels cannot read such a tensor, or not there
        """
        decoder = decoder_of(type_id, coding)
        if address % ALIGNMENT_BYTES or not address:
            raise HipUsageError(
                "a matrix lies at a wrong address",
                expected=f"a multiple of {ALIGNMENT_BYTES}",
                found=hex(address),
            )
        if bool(books) != (decoder in BOOKED.values()):
            word = "needs books" if not books else "takes no books"
            raise HipUsageError(f"a matrix of type {type_of(type_id).name} {word}")
        return cls(address, books, decoder, rows, cols, row_bytes_of(type_id, cols))

    def packed(self) -> bytes:
        """``ds4q_matrix``."""
        return struct.pack(
            "<2Q6i",
            self.address,
            self.books,
            self.decoder,
            self.rows,
            self.cols,
            self.row_bytes,
            0,
            0,
        )


@dataclass(frozen=True, slots=True)
class Job:
    """A product for ``linear``: ``y[t * y_stride + row] = row . x[t * x_stride ...]``, in floats."""

    matrix: Matrix
    x: int
    y: int
    x_stride: int
    y_stride: int


def pack_jobs(jobs: list[Job]) -> tuple[bytes, int]:
    """``ds4q_job`` of each, one decoder for all, and the number of blocks of the launch."""
    if len({job.matrix.decoder for job in jobs}) > 1:
        raise HipUsageError("the jobs of a launch have matrices of several decoders")
    packed, first_block = bytearray(), 0
    for job in jobs:
        packed += job.matrix.packed()
        packed += struct.pack("<2Q4i", job.x, job.y, job.x_stride, job.y_stride, first_block, 0)
        first_block += -(-job.matrix.rows // LINEAR_ROWS)
    return bytes(packed), first_block


def gate_up_grid(width: int, k: int, tokens: int, shared: bool) -> tuple[int, int, int]:
    """Grid of ``moe_gate_up``: ``width`` rows of ``k`` routed experts, and of the shared one."""
    return -(-width // MOE_ROWS), k + shared, tokens


def down_grid(rows: int, tokens: int) -> tuple[int, int, int]:
    """Grid of ``moe_down``."""
    return -(-rows // MOE_ROWS), tokens, 1


def decode_grid(rows: int, cols: int) -> tuple[int, int, int]:
    """Grid of ``decode_f32`` and ``decode_f16``."""
    return -(-rows * cols // (_BLOCK * _DECODE_THREADS)), 1, 1


def embed_grid(cols: int, tokens: int) -> tuple[int, int, int]:
    """Grid of ``embed``."""
    return -(-cols // (_BLOCK * _DECODE_THREADS)), tokens, 1
