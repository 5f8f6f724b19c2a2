"""Owns the search for scale and offset of ``affine`` blocks (107): value = code * scale - offset.

The scale is searched, then the offset, then the scale again, each over all bytes and the smaller
byte on a tie, as Lucebox's quantizer does (github.com/Luce-Org/lucebox). Errors and pruning are
those of ``_search.py``.
"""

from __future__ import annotations

import numpy as np

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.artifact.formats._search import (
    LANES,
    OFFSETS,
    PAD,
    SCALES,
    U8,
    F32Array,
    weigh,
    weights_reference,
)
from ds4q.artifact.formats._ue4m3 import LAST, UE4M3, nearest, nearest_byte

BLOCK = 32
SMALLEST = np.float32(2.0**-10)  # of the scale looked at first


def _codes_reference(x: F32Array, scale: F32Array, offset: F32Array) -> F32Array:
    """Codes 0..3 as floats, each step rounded to float32."""
    with np.errstate(over="ignore"):
        shifted: F32Array = (x + offset) / scale + np.float32(0.5)
    codes: F32Array = np.clip(np.floor(shifted), np.float32(0), np.float32(3))
    return codes


def _errors_reference(
    x: F32Array, weights: F32Array, scale: F32Array, offset: F32Array
) -> F32Array:
    with np.errstate(over="ignore", invalid="ignore"):
        d = x - (_codes_reference(x, scale, offset) * scale - offset)
        return np.add.accumulate(weights * d * d, axis=1, dtype=np.float32)[:, -1]


def _search_reference(
    values: F32Array, importance: F32Array, scales: U8, codes: U8
) -> tuple[int, int]:
    """As ``_search.search``; ``scales`` ``(M, K / 16)`` are pairs of scale and offset."""
    x = values.reshape(-1, BLOCK)
    weights = np.ones_like(x)
    if importance.size:
        weights = weights_reference(values, importance).reshape(x.shape)
    live = np.abs(x).max(axis=1) > 0
    lost = live & ~weights.any(axis=1)
    weights[lost] = 1
    seen = weights > 0
    largest = np.where(seen, x, -np.inf).max(axis=1, initial=-np.inf)
    smallest = np.where(seen, x, np.inf).min(axis=1, initial=np.inf)
    offset = np.maximum(-smallest, np.float32(0)).astype(np.float32)
    target = np.maximum((largest + offset).astype(np.float32) / np.float32(3), SMALLEST)
    found = [nearest(target), nearest(offset)]
    for searched, first in ((0, 1), (1, 0), (0, 1)):
        best = np.full(len(x), np.inf, dtype=np.float32)
        chosen = found[searched].copy()
        for byte in range(first, LAST + 1):
            pair = [UE4M3[f][:, None] for f in found]
            pair[searched] = UE4M3[byte : byte + 1]
            error = _errors_reference(x, weights, pair[0], pair[1])
            better = error < best
            best[better], chosen[better] = error[better], byte
        found[searched] = chosen
    scale, shift = UE4M3[found[0]][:, None], UE4M3[found[1]][:, None]
    packed = _codes_reference(x, scale, shift).astype(np.uint8)
    packed[~live] = 0
    codes[:] = packed.reshape(codes.shape)
    scales[:] = np.where(live[:, None], np.stack(found, axis=1), 0).reshape(scales.shape)
    failed = np.flatnonzero(live & np.isinf(best))
    return int(lost.sum()), int(failed[0]) if failed.size else -1


@jit
def _code(x: np.float32, scale: np.float32, offset: np.float32) -> np.float32:
    code = np.floor((x + offset) / scale + np.float32(0.5))
    return min(max(code, np.float32(0)), np.float32(3))


@jit
def _lane_errors(
    x: F32Array,
    weights: F32Array,
    scales: F32Array,
    offsets: F32Array,
    best: np.float32,
    errors: F32Array,
) -> bool:
    """As ``_search``'s, for 16 pairs of scale and offset."""
    for j in range(LANES):
        errors[j] = np.float32(0)
    for i in range(BLOCK):
        v, w = x[i], weights[i]
        for j in range(LANES):
            product = _code(v, scales[j], offsets[j]) * scales[j]
            d = v - (product - offsets[j])
            errors[j] += w * d * d
        if i & 3 == 3:
            alive = 0
            for j in range(LANES):
                alive += errors[j] <= best
            if alive == 0:
                return False
    return True


@jit
def _scan(
    x: F32Array, weights: F32Array, scale: int, offset: int, over_scale: bool, lanes: F32Array
) -> tuple[int, np.float32]:
    """The best byte with the other one fixed, and its error; the old byte if all overflow."""
    found = scale if over_scale else offset
    best = np.float32(np.inf)
    start = PAD + found - LANES // 2
    for step in (LANES, -LANES):
        base = start if step > 0 else start - LANES
        while 1 <= base <= PAD + LAST:
            for j in range(LANES):
                lanes[0, j] = SCALES[base + j] if over_scale else UE4M3[scale]
                lanes[1, j] = UE4M3[offset] if over_scale else OFFSETS[base + j]
            if _lane_errors(x, weights, lanes[0], lanes[1], best, lanes[2]):
                for j in range(LANES):
                    byte = base + j - PAD
                    error = lanes[2, j]
                    if error < best or (error == best < np.inf and byte < found):
                        best = error
                        found = byte
            base += step
    return found, best


@jit
def _search_fast(values: F32Array, importance: F32Array, scales: U8, codes: U8) -> tuple[int, int]:
    m, k = values.shape
    row_weights = np.empty(k, dtype=np.float32)
    x = np.empty(BLOCK, dtype=np.float32)
    weights = np.empty(BLOCK, dtype=np.float32)
    lanes = np.empty((3, LANES), dtype=np.float32)
    lost, failed = 0, -1
    for r in range(m):
        weigh(values[r], importance, row_weights)
        for b in range(k // BLOCK):
            live, some = False, False
            for i in range(BLOCK):
                x[i] = values[r, BLOCK * b + i]
                weights[i] = row_weights[BLOCK * b + i]
                live |= x[i] != 0
                some |= weights[i] != 0
            scale, offset = 0, 0
            if live:
                largest, smallest = np.float32(-np.inf), np.float32(np.inf)
                lost += not some
                for i in range(BLOCK):
                    if not some:
                        weights[i] = np.float32(1)
                    if weights[i] > 0:
                        largest = max(largest, x[i])
                        smallest = min(smallest, x[i])
                low = max(-smallest, np.float32(0))
                scale = nearest_byte(max((largest + low) / np.float32(3), SMALLEST))
                offset = nearest_byte(low)
                scale, best = _scan(x, weights, scale, offset, True, lanes)
                offset, best = _scan(x, weights, scale, offset, False, lanes)
                scale, best = _scan(x, weights, scale, offset, True, lanes)
                if best == np.inf and failed < 0:
                    failed = r * (k // BLOCK) + b
            scales[r, 2 * b] = scale
            scales[r, 2 * b + 1] = offset
            for i in range(BLOCK):
                code = np.float32(0)
                if live:
                    code = _code(x[i], UE4M3[scale], UE4M3[offset])
                codes[r, BLOCK * b + i] = np.uint8(code)
    return lost, failed


search_affine = FastPath(_search_reference, _search_fast)
