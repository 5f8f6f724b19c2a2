"""Owns the compiled loops of the exact encoder over rows and blocks. Knows no type: pages do.

Importance arrays are ``(K,)``, or ``(0,)`` for none. Addresses go to the vector instructions; the
caller has checked all shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import jit
from ds4q.artifact.numeric import E2M1, E8M0
from ds4q.quantize.exact.tables import MAGNITUDES, MAP_BYTES, PLACE_BYTES
from ds4q.quantize.exact.vectors import (
    CHUNK_BYTES,
    HALF,
    LANES,
    largest,
    load8,
    load64,
    pack2,
    pack3,
    pack4,
    pack6,
    pack8,
    scan,
    scan2,
    scan2_weighted,
    scan_weighted,
    store8,
    weightless,
)

Array = npt.NDArray[Any]
Word = Any  # compiled: uint64, as source codes and keys; to Python an int
Address = Any  # compiled: int64

BLOCK = 2 * HALF
TILE = 8  # rows whose squares are added side by side: each sum waits for its last addition
INFINITE_BITS = 0x7F800000
INFINITE: Word = np.uint64(INFINITE_BITS << 32)  # as a key: no finite sum is as large
NOT_SERVED = -1
DIRECTORY_BYTES = MAGNITUDES * PLACE_BYTES  # of one e

with np.errstate(over="ignore", invalid="ignore"):
    _VALUES = E2M1 * E8M0[:, None]
    SQUARES = _VALUES * _VALUES  # by scale byte and code


@jit
def weigh(
    codes: Array, scales: Array, first: int, count: int, importance: Array, weights: Array
) -> bool:
    """Weights of rows ``first`` .. ``first + count``; False where one is not finite.

    As the general encoder: importance times sqrt(mean square of the row + x^2), the mean from a
    float32 sum in index order.
    """
    blocks = scales.shape[1]
    for r in range(count):
        for b in range(blocks):
            squares = SQUARES[scales[first + r, b]]
            for i in range(HALF):
                byte = codes[first + r, HALF * b + i]
                weights[r, BLOCK * b + 2 * i] = squares[byte & 15]
                weights[r, BLOCK * b + 2 * i + 1] = squares[byte >> 4]
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    for c in range(BLOCK * blocks):  # rows from ``count`` on are an earlier tile's, or zeros
        s0 += weights[0, c]
        s1 += weights[1, c]
        s2 += weights[2, c]
        s3 += weights[3, c]
        s4 += weights[4, c]
        s5 += weights[5, c]
        s6 += weights[6, c]
        s7 += weights[7, c]
    sums = (s0, s1, s2, s3, s4, s5, s6, s7)
    top = np.uint32(0)
    words = weights.view(np.uint32)
    for r in range(count):
        mean = sums[r] / np.float32(BLOCK * blocks)
        for c in range(BLOCK * blocks):
            weight = importance[c] * np.sqrt(mean + weights[r, c])
            weights[r, c] = weight if importance[c] > 0 else np.float32(0)
        for c in range(BLOCK * blocks):
            top = max(top, words[r, c])
    return bool(top < INFINITE_BITS)


@jit
def search(
    place: Address, word0: Word, word1: Word, wide: bool, weights: Address
) -> tuple[Word, Address, Word]:
    """Key of the best candidate of a page, address of its code map, its scale byte.

    ``place`` is the address of the page's place in a directory, ``weights`` that of the group's
    weights, or 0.
    """
    page, chunks = np.int64(load64(place)), np.int64(load64(place + 8))
    maps = page + CHUNK_BYTES * chunks
    best: Word = np.uint64(0xFFFFFFFFFFFFFFFF)
    for c in range(chunks):
        if weights == 0:
            key = scan2(page, word0, word1) if wide else scan(page, word0)
        elif wide:
            key = scan2_weighted(page, word0, word1, weights)
        else:
            key = scan_weighted(page, word0, weights)
        best = min(best, key + np.uint64(LANES * c))
        page += CHUNK_BYTES
    lane = np.int64(best & np.uint64(0xFFFFFFFF))
    return best, maps + MAP_BYTES * lane, load8(maps + MAP_BYTES * LANES * chunks + lane)


@jit
def _best(
    plain: Address, weighted: Address, word0: Word, word1: Word, wide: bool, weights: Address
) -> tuple[Word, Address, Word, int]:
    """As ``search``, and 1 for a group without weights.

    ``plain`` and ``weighted`` are the addresses of one scale byte's places.
    """
    m = max(largest(word0), largest(word1)) if wide else largest(word0)
    lost, places = 0, plain
    if weights != 0:
        if weightless(weights) and (not wide or weightless(weights + 4 * HALF)):
            lost, weights = (1 if m > 0 else 0), 0
        else:
            places = weighted
    key, codes, byte = search(places + PLACE_BYTES * m, word0, word1, wide, weights)
    return key, codes, byte, lost


@jit
def _pack(bits: int, map0: Address, word0: Word, map1: Address, word1: Word, out: Address) -> None:
    if bits == 2:
        pack2(map0, word0, map1, word1, out)
    elif bits == 3:
        pack3(map0, word0, map1, word1, out)
    elif bits == 4:
        pack4(map0, word0, map1, word1, out)
    elif bits == 6:
        pack6(map0, word0, map1, word1, out)
    else:
        pack8(map0, word0, map1, word1, out)


@jit
def _encode_row(
    codes: Address,
    scales: Address,
    blocks: int,
    plain: Address,
    weighted: Address,
    weights: Address,
    bits: Any,
    wide: bool,
    out: Address,
) -> int:
    """Encode one row; the groups without weights, or ``NOT_SERVED``."""
    lost = 0
    worst: Word = np.uint64(0)
    for b in range(blocks):
        e = np.int64(load8(scales + b))
        word0, word1 = load64(codes), load64(codes + 8)
        near, far = plain + DIRECTORY_BYTES * e, weighted + DIRECTORY_BYTES * e
        if wide:
            key, map0, byte, less = _best(near, far, word0, word1, wide, weights)
            worst = max(worst, key)
            lost += less
            _pack(bits, map0, word0, map0, word1, out)
            out += 4 * bits
            store8(out, byte)
            out += 1
        else:
            key, map0, byte0, less = _best(near, far, word0, word0, wide, weights)
            worst = max(worst, key)
            lost += less
            second = weights + 4 * HALF if weights != 0 else 0
            key, map1, byte1, less = _best(near, far, word1, word1, wide, second)
            worst = max(worst, key)
            lost += less
            _pack(bits, map0, word0, map1, word1, out)
            out += 4 * bits
            store8(out, byte0)
            store8(out + 1, byte1)
            out += 2
        codes += HALF
        if weights != 0:
            weights += 4 * BLOCK
    return lost if worst < INFINITE else NOT_SERVED


@jit
def encode(
    codes: Array,
    scales: Array,
    plain: Array,
    weighted: Array,
    importance: Array,
    row_weights: bool,
    bits: Any,
    wide: bool,
    out: Array,
) -> int:
    """Encode rows: codes ``(M, K/2)``, scales ``(M, K/32)``, out ``(M, row_bytes)``, all C order.

    ``plain`` and ``weighted`` are directories of pages. Returns the number of groups without
    weights; or ``NOT_SERVED`` where an error or a weight is not finite, and ``out`` is undefined.
    """
    rows, blocks = scales.shape
    some = importance.size > 0
    source, target = np.int64(codes.ctypes.data), np.int64(out.ctypes.data)
    tile = np.zeros((TILE if some and row_weights else 0, BLOCK * blocks), dtype=np.float32)
    near, far = np.int64(plain.ctypes.data), np.int64(weighted.ctypes.data)
    lost = 0
    for first in range(0, rows, TILE):
        count = min(TILE, rows - first)
        if some and row_weights and not weigh(codes, scales, first, count, importance, tile):
            return NOT_SERVED
        for r in range(first, first + count):
            weights: Address = np.int64(0)
            if some and row_weights:
                weights = np.int64(tile.ctypes.data) + (r - first) * 4 * BLOCK * blocks
            elif some:
                weights = np.int64(importance.ctypes.data)
            row, to = source + r * HALF * blocks, target + r * out.shape[1]
            at = np.int64(scales.ctypes.data) + r * blocks
            found = _encode_row(row, at, blocks, near, far, weights, bits, wide, to)
            if found == NOT_SERVED:
                return NOT_SERVED
            lost += found
    return lost
