"""Owns the search for a group's scale byte: the one with the smallest error, of all 126.

Every byte counts: the answer is that of trying all of them, the smaller byte on a tie. Errors are
float32 sums in index order, without fused multiply-add: another order, or one rounding less, would
choose other bytes than the reference quantizers of Lucebox (github.com/Luce-Org/lucebox).

The compiled side tries 16 bytes at once, one a lane. It gives bytes up as soon as their sum so far
exceeds the best error. That changes nothing: adding a number that is not negative never makes a
float32 sum smaller.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.artifact.formats._rules import (
    DUAL,
    FP3,
    FP4,
    FP6_NEG32,
    FP6_ZERO,
    FP8,
    LEVELS,
    LOWEST,
    S40,
    SIGN,
    TOPS,
    ZERO_CODES,
    code_of,
    codes_reference,
    dual_level,
    fp3_level,
    fp4_level,
    s40_level,
    whole_level,
)
from ds4q.artifact.formats._ue4m3 import LAST, UE4M3, nearest, nearest_byte

F32Array = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

LANES = 16
CACHED_GROUPS = 4096  # of the numpy side
PAD = 16  # lanes below byte 0 and above LAST are NaN, so that their error is never the best
MIRROR = 0x80


def _padded(values: F32Array) -> F32Array:
    rim = np.full(PAD, np.nan, dtype=np.float32)
    return np.concatenate([rim, values, rim])


SCALES = _padded(np.concatenate([[np.float32(np.nan)], UE4M3[1 : LAST + 1]]))
INVERSES = np.float32(1) / SCALES
OFFSETS = _padded(UE4M3[: LAST + 1])  # as SCALES, with byte 0


# ------------------------------------------------------------------ numpy


def weights_reference(values: F32Array, importance: F32Array) -> F32Array:
    """Weight of each error: importance times sqrt(mean square of the row + x^2)."""
    with np.errstate(over="ignore", invalid="ignore"):  # 0 times an infinite root is not used
        squares = values * values
        total = np.add.accumulate(squares, axis=1, dtype=np.float32)[:, -1:]
        spread = np.sqrt(total / np.float32(values.shape[1]) + squares)
        return np.where(importance > 0, importance * spread, np.float32(0))


def _find_reference(rule: int, x: F32Array, weights: F32Array) -> tuple[U8, F32Array]:
    """Best byte and error of groups ``(n, size)``; byte 0 where every error overflows."""
    if len(x) > CACHED_GROUPS:
        runs = range(0, len(x), CACHED_GROUPS)
        cuts = [slice(first, first + CACHED_GROUPS) for first in runs]
        parts = [_find_reference(rule, x[cut], weights[cut]) for cut in cuts]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    best = np.full(len(x), np.inf, dtype=np.float32)
    found = np.zeros(len(x), dtype=np.uint8)
    levels = LEVELS[rule]
    with np.errstate(over="ignore", invalid="ignore"):  # infinity times 0 is no candidate
        for byte in range(1, LAST + 1):
            scale = UE4M3[byte]
            d = x - levels[codes_reference(rule, x, np.float32(1) / scale)] * scale
            error = np.add.accumulate(weights * d * d, axis=1, dtype=np.float32)[:, -1]
            better = error < best
            best[better], found[better] = error[better], byte
    return found, best


def _search_reference(
    values: F32Array, importance: F32Array, rule: int, scales: U8, codes: U8
) -> tuple[int, int]:
    """Scale bytes ``(M, groups)`` and codes ``(M, K)`` of rows ``(M, K)``.

    ``importance`` is ``(K,)``, or ``(0,)`` for none. Returns how many groups have no weight, and
    the number of the first one whose error overflows at every byte, or -1.
    """
    x = values.reshape(scales.size, -1)
    weighted = importance.size > 0
    weights = weights_reference(values, importance) if weighted else np.ones_like(values)
    weights = weights.reshape(x.shape)
    largest = np.abs(x).max(axis=1)
    lost = (largest > 0) & ~weights.any(axis=1)
    weights[lost] = 1
    found = nearest(largest / TOPS[rule])
    error = np.zeros(len(x), dtype=np.float32)
    searched = np.full(len(x), rule != FP8) | (weighted & ~lost)
    inner = DUAL if rule == SIGN else rule
    found[searched], error[searched] = _find_reference(inner, x[searched], weights[searched])
    mirrored = np.zeros(len(x), dtype=np.bool_)
    if rule == SIGN:
        other, other_error = _find_reference(DUAL, -x, weights)
        mirrored = other_error < error
        found, error = np.where(mirrored, other, found), np.minimum(error, other_error)
    found[largest == 0] = 0
    inverse = np.where(found > 0, INVERSES[PAD + found.astype(np.intp)], np.float32(0))
    with np.errstate(over="ignore"):
        packed = codes_reference(rule, np.where(mirrored[:, None], -x, x), inverse[:, None])
    packed[found == 0] = ZERO_CODES[rule]
    codes[:] = packed.reshape(codes.shape)
    scales[:] = np.where(mirrored, found | MIRROR, found).reshape(scales.shape)
    failed = np.flatnonzero((largest > 0) & np.isinf(error))
    return int(lost.sum()), int(failed[0]) if failed.size else -1


# ------------------------------------------------------------------ compiled


@jit
def weigh(row: F32Array, importance: F32Array, weights: F32Array) -> None:
    """``weights_reference`` of one row; ones where ``importance`` is empty."""
    if importance.size == 0:
        for i in range(row.size):
            weights[i] = np.float32(1)
        return
    total = np.float32(0)
    for i in range(row.size):
        total += row[i] * row[i]
    mean = total / np.float32(row.size)
    for i in range(row.size):
        weights[i] = np.float32(0)
        if importance[i] > 0:
            weights[i] = importance[i] * np.sqrt(mean + row[i] * row[i])


@jit
def _lane_errors(
    rule: int, x: F32Array, weights: F32Array, base: int, best: np.float32, errors: F32Array
) -> bool:
    """Errors of the bytes at ``base`` and after; False as soon as none can be as good as ``best``.

    ``x`` are magnitudes for the rules that look at these only.
    """
    for j in range(LANES):
        errors[j] = np.float32(0)
    for i in range(x.size):
        v, w = x[i], weights[i]
        if rule == FP4:
            for j in range(LANES):
                d = v - fp4_level(v * INVERSES[base + j]) * SCALES[base + j]
                errors[j] += w * d * d
        elif rule == FP3:
            for j in range(LANES):
                d = v - fp3_level(v * INVERSES[base + j]) * SCALES[base + j]
                errors[j] += w * d * d
        elif rule in (FP6_ZERO, FP6_NEG32, FP8):
            low, high = LOWEST[rule], TOPS[rule]
            for j in range(LANES):
                d = v - whole_level(v * INVERSES[base + j], low, high) * SCALES[base + j]
                errors[j] += w * d * d
        elif rule == S40:
            for j in range(LANES):
                d = v - s40_level(v * INVERSES[base + j]) * SCALES[base + j]
                errors[j] += w * d * d
        else:
            for j in range(LANES):
                d = v - dual_level(v * INVERSES[base + j]) * SCALES[base + j]
                errors[j] += w * d * d
        if i & 3 == 3:
            alive = 0
            for j in range(LANES):
                alive += errors[j] <= best
            if alive == 0:
                return False
    return True


@jit
def window_of(target: np.float32) -> int:
    """Where to start looking: the best byte is mostly near the one of ``target``."""
    low, high = 1, LAST
    while low < high:
        middle = (low + high + 1) >> 1
        if SCALES[PAD + middle] <= target:
            low = middle
        else:
            high = middle - 1
    return PAD + low - 4


@jit
def _find_fast(
    rule: int, x: F32Array, weights: F32Array, largest: np.float32, errors: F32Array
) -> tuple[int, np.float32]:
    """Best byte and error of one group; byte 0 where every error overflows."""
    best = np.float32(np.inf)
    found = 0
    start = window_of(largest / TOPS[rule])
    for step in (LANES, -LANES):
        base = start if step > 0 else start - LANES
        while 2 <= base <= PAD + LAST:  # a lane or more holds a byte
            if _lane_errors(rule, x, weights, base, best, errors):
                for j in range(LANES):
                    byte = base + j - PAD
                    if errors[j] < best or (errors[j] == best and byte < found):
                        best = errors[j]
                        found = byte
            base += step
    return found, best


@jit
def _search_fast(
    values: F32Array, importance: F32Array, rule: int, scales: U8, codes: U8
) -> tuple[int, int]:
    m, k = values.shape
    groups = scales.shape[1]
    size = k // groups
    row_weights = np.empty(k, dtype=np.float32)
    errors = np.empty(LANES, dtype=np.float32)
    x = np.empty(size, dtype=np.float32)
    weights = np.empty(size, dtype=np.float32)
    inner = DUAL if rule == SIGN else rule
    signed = inner == DUAL or rule == FP6_NEG32
    lost, failed = 0, -1
    for r in range(m):
        weigh(values[r], importance, row_weights)
        for g in range(groups):
            largest = np.float32(0)
            some = False
            for i in range(size):
                v = values[r, size * g + i]
                x[i] = v if signed else abs(v)
                weights[i] = row_weights[size * g + i]
                largest = max(largest, abs(v))
                some |= weights[i] != 0
            byte, mirror = 0, 0
            if largest > 0:
                if not some:
                    lost += 1
                    for i in range(size):
                        weights[i] = np.float32(1)
                if rule == FP8 and (importance.size == 0 or not some):
                    byte = nearest_byte(largest / TOPS[FP8])
                else:
                    byte, error = _find_fast(inner, x, weights, largest, errors)
                    if rule == SIGN:
                        for i in range(size):
                            x[i] = -x[i]
                        other, other_error = _find_fast(inner, x, weights, largest, errors)
                        if other_error < error:
                            byte, mirror = other, MIRROR
                    if byte == 0 and failed < 0:
                        failed = r * groups + g
            scales[r, g] = byte | mirror
            for i in range(size):
                v = values[r, size * g + i]
                codes[r, size * g + i] = (
                    ZERO_CODES[rule]
                    if byte == 0
                    else code_of(inner, -v if mirror else v, INVERSES[PAD + byte])
                )
    return lost, failed


search = FastPath(_search_reference, _search_fast)
