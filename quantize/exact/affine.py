"""Owns the compiled loops of the exact encoder for ``affine`` of type 107, a scale and an offset.

The scale is searched for with the first offset, then the offset, then the scale again, as the
general encoder does. Arguments are those of ``kernel.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ds4q.artifact.fastpath import jit
from ds4q.artifact.numeric import E2M1, E8M0
from ds4q.quantize.exact.kernel import (
    BLOCK,
    INFINITE,
    NOT_SERVED,
    TILE,
    Address,
    Array,
    Word,
    search,
    weigh,
)
from ds4q.quantize.exact.rules import nearest
from ds4q.quantize.exact.tables import (
    AFFINE_OFFSETS,
    AFFINE_PLACES,
    AFFINE_ZERO,
    MAGNITUDES,
    PLACE_BYTES,
)
from ds4q.quantize.exact.vectors import (
    HALF,
    largest,
    load64,
    lowest,
    lowest_weighted,
    pack2,
    store8,
    weightless,
)

CODE_BYTES = 8  # of a target block, before scale and offset
BLOCK_BYTES = CODE_BYTES + 2
DIRECTORY_BYTES = AFFINE_PLACES * PLACE_BYTES  # of one e

with np.errstate(over="ignore", invalid="ignore"):
    # The first offset byte, by e and the magnitude code of the most negative weight.
    _FIRST_OFFSETS = np.array(
        [[nearest(m * scale) for m in E2M1[:MAGNITUDES]] for scale in E8M0], dtype=np.int64
    )


@jit
def _encode_block(
    plain: Address, weighted: Address, codes: Address, e: Any, weights: Address, out: Address
) -> tuple[Word, int]:
    """Encode a block; the largest key met, and 1 if there was no weight."""
    word0, word1 = load64(codes), load64(codes + 8)
    live = largest(word0) > 0 or largest(word1) > 0
    lost, pages = 0, plain
    if weights != 0:
        if weightless(weights) and weightless(weights + 4 * HALF):
            lost, weights = (1 if live else 0), 0
        else:
            pages = weighted
    if not live:
        place = pages + PLACE_BYTES * AFFINE_ZERO
        key, codes_of, byte = search(place, word0, word1, True, weights)
        pack2(codes_of, word0, codes_of, word1, out)
        store8(out + CODE_BYTES, byte)
        store8(out + CODE_BYTES + 1, byte)
        return key, lost
    if weights == 0:
        low = max(lowest(word0), lowest(word1))
    else:
        low = max(lowest_weighted(word0, weights), lowest_weighted(word1, weights + 4 * HALF))
    offset = _FIRST_OFFSETS[e, low]
    place = pages + PLACE_BYTES * offset
    key0, _, scale = search(place, word0, word1, True, weights)
    place = pages + PLACE_BYTES * (AFFINE_OFFSETS + np.int64(scale))
    key1, _, shift = search(place, word0, word1, True, weights)
    place = pages + PLACE_BYTES * np.int64(shift)
    key2, codes_of, scale = search(place, word0, word1, True, weights)
    pack2(codes_of, word0, codes_of, word1, out)
    store8(out + CODE_BYTES, scale)
    store8(out + CODE_BYTES + 1, shift)
    return max(key0, max(key1, key2)), lost


@jit
def encode(
    codes: Array, scales: Array, plain: Array, weighted: Array, importance: Array, out: Array
) -> int:
    """As ``kernel.encode``."""
    rows, blocks = scales.shape
    some = importance.size > 0
    source, target = np.int64(codes.ctypes.data), np.int64(out.ctypes.data)
    near, far = np.int64(plain.ctypes.data), np.int64(weighted.ctypes.data)
    tile = np.zeros((TILE if some else 0, BLOCK * blocks), dtype=np.float32)
    lost = 0
    worst: Word = np.uint64(0)
    for first in range(0, rows, TILE):
        count = min(TILE, rows - first)
        if some and not weigh(codes, scales, first, count, importance, tile):
            return NOT_SERVED
        for r in range(first, first + count):
            weights: Any = np.int64(tile.ctypes.data) + (r - first) * 4 * BLOCK * blocks
            for b in range(blocks):
                e: Any = np.int64(scales[r, b])
                at = r * blocks + b
                key, less = _encode_block(
                    near + DIRECTORY_BYTES * e,
                    far + DIRECTORY_BYTES * e,
                    source + HALF * at,
                    e,
                    weights + 4 * BLOCK * b if some else 0,
                    target + BLOCK_BYTES * at,
                )
                worst = max(worst, key)
                lost += less
    return lost if worst < INFINITE else NOT_SERVED
