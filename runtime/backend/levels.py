"""Owns the level tables of ROCmFPX weights: what each code is worth under each scale byte.

The codec itself decodes the table's entries, so kernels that look weights up agree with it bit for
bit, and fixed levels, learned books, mirrored halves and invalid bytes are told in one place.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from ds4q.artifact.formats import Coding, codec_for
from ds4q.artifact.types import (
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

F32 = npt.NDArray[np.float32]

ENTRIES = {  # codes of a row; of 103 only code 1, which is the scale
    ROCMFP4.id: 16,
    ROCMFP4_FAST.id: 16,
    ROCMFP6.id: 64,
    ROCMFP8.id: 1,
    ROCMFP3.id: 8,
    ROCMFP3_MIX.id: 8,
    ROCMFP2_MIX.id: 4,
    ROCMFP2.id: 4,
}
# Decoders are numbered as the types are, but for two variants that are read in another way. The
# numbers go into the code that numba compiles.
AFFINE = 256 + ROCMFP2.id  # an offset in place of the second scale
NEG32 = 256 + ROCMFP6.id  # a level of code 32 that no sign and magnitude give

_LINE = 64  # bytes; no row of 16 entries or fewer then straddles two cache lines
_tables: WeakValueDictionary[tuple[int, Coding | None], Any] = WeakValueDictionary()


def decoder_of(type_id: int, coding: Coding | None) -> int:
    """Number of the decoder that reads a weight."""
    if type_id == ROCMFP2.id and coding == "affine":
        return AFFINE
    if type_id == ROCMFP6.id and coding == "neg32":
        return NEG32
    return type_id


def level_table(kind: TensorType, coding: Coding | None) -> F32:
    """f32 (256, entries) by scale byte and code, shared by all weights of one type and coding.

    The row of an affine scale s is (0, s, 2s, 3s): offsets are subtracted afterwards.

    Raises
    ------
    CodingError : the coding that the type needs is absent or unknown
    """
    key = kind.id, coding if kind.coding else None
    table = _tables.get(key)
    if table is None:
        table = _tables[key] = _decoded_table(kind, key[1])
    return table


def _decoded_table(kind: TensorType, coding: Coding | None) -> F32:
    codes = _code_bytes(kind)
    blocks = np.zeros((256, len(codes), kind.block_bytes), dtype=np.uint8)
    blocks[:, :, : codes.shape[1]] = codes
    scales = blocks[:, :, codes.shape[1] :]
    scales[:] = np.arange(256, dtype=np.uint8)[:, None, None]
    if decoder_of(kind.id, coding) == AFFINE:
        scales[:, :, 1] = 0  # the offset
    values = codec_for(kind.id, coding).decode_units(blocks.reshape(-1, kind.block_bytes))
    rows = values.reshape(256, -1)[:, : ENTRIES[kind.id]]
    raw = np.empty(rows.size + _LINE // 4, dtype=np.float32)
    first = -raw.ctypes.data % _LINE // 4
    table = raw[first : first + rows.size].reshape(rows.shape)
    table[:] = rows
    return table


def _code_bytes(kind: TensorType) -> npt.NDArray[np.uint8]:
    """Code bytes of one or two blocks whose first weights are code 0, code 1 and so on."""
    entries = ENTRIES[kind.id]
    if entries == 1:
        return np.ones((1, 32), dtype=np.uint8)
    if entries == 16:
        return np.arange(16, dtype=np.uint8)[None]  # low nibbles come first
    bits = entries.bit_length() - 1
    codes = np.arange(max(32, entries)) % entries
    stream = codes[:, None] >> np.arange(bits) & 1
    return np.packbits(stream, bitorder="little").reshape(-1, 4 * bits)
