"""Owns how each ROCmFPX type rounds: the code of a weight at a given scale, and its level.

A rule is a number, since compiled code branches on it. The numpy side looks codes up in thresholds;
the compiled side computes levels, because lanes can compute and not look up. Thresholds and ties
are those of Lucebox's reference quantizers (github.com/Luce-Org/lucebox), for code 32 of type 102
and for ``s40`` also ciru-ai/ROCmFPX's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import jit

F32Array = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

FP4, FP3, FP6_ZERO, FP6_NEG32, FP8, DUAL, S40, SIGN = range(8)

_FP6 = [*range(32), 0, *range(-1, -32, -1)]
_TABLES: dict[int, list[int]] = {
    FP4: [0, 1, 2, 3, 4, 6, 8, 10, 0, -1, -2, -3, -4, -6, -8, -10],  # E2M1 doubled, 12 made 10
    FP3: [0, 1, 2, 4, 0, -1, -2, -4],
    FP6_ZERO: _FP6,
    FP6_NEG32: [-32 if code == 32 else level for code, level in enumerate(_FP6)],
    FP8: [*range(128), *range(-128, 0)],
    DUAL: [-1, 0, 1, 2],
    S40: [-4, -1, 1, 4],
    SIGN: [-1, 0, 1, 2],  # of a half that is not mirrored
}
LEVELS: dict[int, F32Array] = {
    rule: np.array(levels, dtype=np.float32) for rule, levels in _TABLES.items()
}

# The level that the largest weight of a group takes where nothing is clipped.
TOPS: F32Array = np.array([10, 4, 31, 31, 127, 2, 4, 2], dtype=np.float32)
LOWEST: F32Array = np.array([0, 0, 0, -32, 0, -1, 1, -1], dtype=np.float32)  # magnitudes end at 0

ZERO_CODES: U8 = np.array([0, 0, 0, 0, 0, 1, 0, 1], dtype=np.uint8)  # of a group of zeros

_MAGNITUDES = {
    FP4: np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 9], dtype=np.float32),
    FP3: np.array([0.5, 1.5, 3], dtype=np.float32),
}
_DUAL = np.array([-0.5, 0.5, 1.5], dtype=np.float32)

_HALF, _ONE, _OUTER = np.float32(0.5), np.float32(1), np.float32(2.5)
_31, _32, _127 = np.float32(31), np.float32(32), np.float32(127)


def _half_away(values: F32Array) -> F32Array:
    whole = np.trunc(values)
    away = np.abs(values - whole) >= _HALF
    return np.where(away, whole + np.copysign(_ONE, values), whole)


def codes_reference(rule: int, x: F32Array, inverse: Any) -> U8:
    """Codes of weights ``x`` at a scale whose inverse is ``inverse``, both float32."""
    q: F32Array = x * inverse
    code: npt.NDArray[Any]
    if rule in (FP4, FP3):
        index = np.searchsorted(_MAGNITUDES[rule], np.abs(q), side="left")
        half = len(_MAGNITUDES[rule]) + 1
        code = np.where((x < 0) & (index > 0), index + half, index)
    elif rule == FP6_ZERO:
        size = _half_away(np.minimum(np.abs(q), _31))
        code = np.where((x < 0) & (size > 0), size + _32, size)
    elif rule == FP6_NEG32:
        whole = _half_away(np.clip(q, -_32, _31))
        code = np.where(whole >= 0, whole, np.where(whole == -_32, _32, _32 - whole))
    elif rule == FP8:
        code = _half_away(np.clip(q, -_127, _127)).astype(np.int8)
    elif rule == S40:
        outer = (np.abs(q) > _OUTER).astype(np.int8)
        code = np.where(np.signbit(x), 1 - outer, 2 + outer)
    else:
        code = np.searchsorted(_DUAL, q, side="left")
    return code.astype(np.uint8)


@jit
def fp4_level(q: np.float32) -> np.float32:
    """Level of a magnitude."""
    level = np.float32(0)
    if q > np.float32(0.5):
        level = np.float32(1)
    if q > np.float32(1.5):
        level = np.float32(2)
    if q > np.float32(2.5):
        level = np.float32(3)
    if q > np.float32(3.5):
        level = np.float32(4)
    if q > np.float32(5):
        level = np.float32(6)
    if q > np.float32(7):
        level = np.float32(8)
    if q > np.float32(9):
        level = np.float32(10)
    return level


@jit
def fp3_level(q: np.float32) -> np.float32:
    """Level of a magnitude."""
    level = np.float32(0)
    if q > np.float32(0.5):
        level = np.float32(1)
    if q > np.float32(1.5):
        level = np.float32(2)
    if q > np.float32(3):
        level = np.float32(4)
    return level


@jit
def dual_level(q: np.float32) -> np.float32:
    """Level of a signed weight."""
    level = np.float32(-1)
    if q > np.float32(-0.5):
        level = np.float32(0)
    if q > np.float32(0.5):
        level = np.float32(1)
    if q > np.float32(1.5):
        level = np.float32(2)
    return level


@jit
def s40_level(q: np.float32) -> np.float32:
    """Level of a magnitude."""
    level = np.float32(1)
    if q > np.float32(2.5):
        level = np.float32(4)
    return level


@jit
def whole_level(q: np.float32, low: np.float32, high: np.float32) -> np.float32:
    """``q`` within ``low`` and ``high``, rounded half away from zero."""
    q = min(max(q, low), high)
    whole: np.float32 = np.trunc(q)
    if abs(q - whole) >= np.float32(0.5):
        whole += np.copysign(np.float32(1), q)
    return whole


@jit
def code_of(rule: int, x: np.float32, inverse: np.float32) -> int:
    """Code of one weight at a scale whose inverse is ``inverse``."""
    q = x * inverse
    if rule == FP4:
        index = int(fp4_level(abs(q)))
        if index > 4:
            index = 2 + index // 2  # 6, 8, 10 -> 5, 6, 7
        return index + 8 if x < 0 and index > 0 else index
    if rule == FP3:
        index = min(int(fp3_level(abs(q))), 3)
        return index + 4 if x < 0 and index > 0 else index
    if rule == FP6_ZERO:
        index = int(whole_level(abs(q), np.float32(0), np.float32(31)))
        return index + 32 if x < 0 and index > 0 else index
    if rule == FP6_NEG32:
        index = int(whole_level(q, np.float32(-32), np.float32(31)))
        if index >= 0:
            return index
        return 32 if index == -32 else 32 - index
    if rule == FP8:
        return int(whole_level(q, np.float32(-127), np.float32(127))) & 255
    if rule == S40:
        outer = abs(q) > np.float32(2.5)
        return 1 - int(outer) if np.signbit(x) else 2 + int(outer)
    return int(dual_level(q)) + 1
