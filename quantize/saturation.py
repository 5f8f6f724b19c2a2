"""Counts the blocks of an FP4 source that lie outside the range of a ROCmFPX type.

A ROCmFPX scale is one UE4M3 byte, from 2^-10 to 224, while the E8M0 scale of an FP4 block reaches
from 2^-127 to 2^127. A block whose largest value needs a scale above 224 is clamped. One that needs
a scale below 2^-9, where scales are a factor of two apart and then end, loses its low bits or
becomes zero. Such a block is *saturated*: its loss comes from the range of the type, not from the
type's precision.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import TensorTypeError
from ds4q.artifact.formats import Coding, codec_for, hfp4g32
from ds4q.artifact.formats._blocks import BlockCodec
from ds4q.artifact.formats._ue4m3 import LAST, UE4M3
from ds4q.artifact.numeric import E8M0
from ds4q.artifact.types import TensorType

U8 = npt.NDArray[np.uint8]

FINEST = 2 * float(UE4M3[1])  # below, one step of the scale doubles or halves it
LARGEST = float(UE4M3[LAST])
FP4_LARGEST = 6.0
GRID_REACHED = 118  # from this E8M0 byte on, every value of an FP4 block is a multiple of 2^-10


def saturated_blocks(
    codes: U8, scales: U8, packed: U8, target: TensorType, coding: Coding | None
) -> int:
    """How many blocks of 32 weights the range of ``target`` clamps or flushes.

    Parameters
    ----------
    codes : uint8 (M, K/2), two E2M1 codes a byte
    scales : uint8 (M, K/32), E8M0
    packed : uint8 (M, row bytes), these rows encoded as ``target``
    coding : variant or books that ``packed`` is read with

    A block below the range counts only if it is not reproduced exactly.
    """
    codec = codec_for(target.id, coding)
    if not isinstance(codec, BlockCodec):
        raise TensorTypeError(f"{target.name} has no blocks of 32 weights")
    affine = coding == "affine"
    tops = np.abs(codec.levels).max(axis=1)
    floor_limit = FINEST * float(tops.min())
    limit = LARGEST * float(tops.max())
    ceiling = LARGEST if affine else limit  # no block whose values stay below it is clamped
    if int(scales.min()) >= GRID_REACHED and FP4_LARGEST * E8M0[scales.max()] <= ceiling:
        return 0
    values = hfp4g32.source_values(codes, scales).reshape(-1, hfp4g32.BLOCK)
    if affine:  # value = code * scale - offset: the span of a block needs a scale
        offsets = np.maximum(-values.min(axis=1), np.float32(0))
        spans = (np.maximum(values.max(axis=1), np.float32(0)) + offsets)[:, None]
        clamped = (offsets > LARGEST) | (spans[:, 0] > limit)
    else:
        spans = np.abs(values).reshape(len(values), -1, codec.group).max(axis=2)
        clamped = (spans > limit).any(axis=1)
    small = ((spans > 0) & (spans < floor_limit)).any(axis=1)
    small &= scales.reshape(-1) < GRID_REACHED
    if small.any():
        decoded = codec.decode(packed.reshape(-1), (len(codes), 2 * codes.shape[1]))
        small &= (decoded.reshape(values.shape) != values).any(axis=1)
    return int(np.count_nonzero(clamped | small))
