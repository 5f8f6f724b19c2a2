"""Owns the search for the book and scale byte of a half in mixed blocks, mode 1 (105 and 106).

For each book, the five bytes around the one that puts the largest weight on the largest level; the
smallest error wins, then the lower book, then the lower byte (Luce-Org/lucebox). Weights of errors
are the importance as it is.
"""

from __future__ import annotations

import numpy as np

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.artifact.formats._search import INVERSES, MIRROR, PAD, SCALES, U8, F32Array
from ds4q.artifact.formats._ue4m3 import nearest, nearest_byte

HALF = 16
BOOKS = 2
BEFORE = 2  # bytes before the central one, and as many after it
LANES = 8  # 2 * BEFORE + 1 are used


def midpoints_of(levels: F32Array) -> F32Array:
    """Where the next level begins, float32 ``(2, K - 1)``: a value on it takes the lower level."""
    with np.errstate(over="ignore"):
        return (levels[:, 1:] + levels[:, :-1]) * np.float32(0.5)


def _search_reference(
    values: F32Array,
    importance: F32Array,
    levels: F32Array,
    midpoints: F32Array,
    scales: U8,
    codes: U8,
) -> tuple[int, int]:
    """As ``_search.search``, for books ``(2, K)``: bit 7 of a scale byte is the book."""
    x = values.reshape(-1, HALF)
    weights = np.ones_like(x)
    if importance.size:
        weights = np.broadcast_to(importance, values.shape).reshape(x.shape).copy()
    largest = np.abs(x).max(axis=1)
    lost = (largest > 0) & ~weights.any(axis=1)
    weights[lost] = 1
    best = np.full(len(x), np.inf, dtype=np.float32)
    meta = np.zeros(len(x), dtype=np.uint8)
    packed = np.zeros(x.shape, dtype=np.uint8)
    packed[:] = np.searchsorted(midpoints[0], np.float32(0), side="left")
    with np.errstate(over="ignore", invalid="ignore"):
        for book in range(BOOKS):
            centre = nearest(largest / np.abs(levels[book]).max()).astype(np.intp)
            for step in range(-BEFORE, BEFORE + 1):
                byte = centre + step
                q = x * INVERSES[PAD + byte, None]
                code = np.searchsorted(midpoints[book], q, side="left")
                d = x - levels[book][code] * SCALES[PAD + byte, None]
                error = np.add.accumulate(weights * d * d, axis=1, dtype=np.float32)[:, -1]
                better = (error < best) & (largest > 0)
                best[better], packed[better] = error[better], code[better]
                meta[better] = byte[better] | book * MIRROR
    scales[:] = meta.reshape(scales.shape)
    codes[:] = packed.reshape(codes.shape)
    failed = np.flatnonzero((largest > 0) & np.isinf(best))
    return int(lost.sum()), int(failed[0]) if failed.size else -1


@jit
def _code(q: np.float32, midpoints: F32Array) -> int:
    code = 0
    for k in range(midpoints.size):
        code += int(q > midpoints[k])
    return code


@jit
def _lane_errors(
    x: F32Array,
    weights: F32Array,
    levels: F32Array,
    midpoints: F32Array,
    base: int,
    lanes: F32Array,
) -> None:
    """Errors (first row of ``lanes``) of a book at the bytes from ``base`` on."""
    for j in range(LANES):
        lanes[0, j] = np.float32(0)
    for i in range(HALF):
        v, w = x[i], weights[i]
        for j in range(LANES):
            lanes[1, j] = v * INVERSES[base + j]
            lanes[2, j] = levels[0]
        for k in range(midpoints.size):
            middle, level = midpoints[k], levels[k + 1]
            for j in range(LANES):
                lanes[2, j] = level if lanes[1, j] > middle else lanes[2, j]
        for j in range(LANES):
            d = v - lanes[2, j] * SCALES[base + j]
            lanes[0, j] += w * d * d


@jit
def _search_fast(
    values: F32Array,
    importance: F32Array,
    levels: F32Array,
    midpoints: F32Array,
    scales: U8,
    codes: U8,
) -> tuple[int, int]:
    m, k = values.shape
    x = np.empty(HALF, dtype=np.float32)
    weights = np.empty(HALF, dtype=np.float32)
    lanes = np.empty((3, LANES), dtype=np.float32)
    lost, failed = 0, -1
    for r in range(m):
        for g in range(k // HALF):
            largest = np.float32(0)
            some = False
            for i in range(HALF):
                x[i] = values[r, HALF * g + i]
                weights[i] = np.float32(1) if importance.size == 0 else importance[HALF * g + i]
                largest = max(largest, abs(x[i]))
                some |= weights[i] != 0
            if not some:
                lost += int(largest > 0)
                for i in range(HALF):
                    weights[i] = np.float32(1)
            best = np.float32(np.inf)
            meta, found, inverse = 0, 0, np.float32(0)
            if largest > 0:
                for book in range(BOOKS):
                    top = max(abs(levels[book, 0]), abs(levels[book, -1]))
                    base = PAD + nearest_byte(largest / top) - BEFORE
                    _lane_errors(x, weights, levels[book], midpoints[book], base, lanes)
                    for j in range(2 * BEFORE + 1):
                        if lanes[0, j] < best:
                            best = lanes[0, j]
                            found, inverse = book, INVERSES[base + j]
                            meta = (base + j - PAD) | book * MIRROR
                if meta == 0 and failed < 0:
                    failed = r * (k // HALF) + g
            scales[r, g] = meta
            for i in range(HALF):
                q = np.float32(0) if meta == 0 else x[i] * inverse
                codes[r, HALF * g + i] = _code(q, midpoints[found])
    return lost, failed


search_books = FastPath(_search_reference, _search_fast)
