"""Owns an encoder of MQ2G256Lloyd, for tests alone: ds4q reads the type and never writes it.

Lloyd's algorithm over each rotated group, as hipfire fits it; means in float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds4q.artifact.formats._fwht import GROUP, rotate

U8 = npt.NDArray[np.uint8]
STARTS = [round(fraction * (GROUP - 1)) for fraction in (0.125, 0.375, 0.625, 0.875)]
STEPS = 8


def encode(values: npt.NDArray[np.float32], steps: int = STEPS) -> U8:
    """Payload of ``(M, K)`` values, K a multiple of 256."""
    stored = rotate(values).reshape(-1, GROUP)
    levels = np.sort(stored, axis=1)[:, STARTS].astype(np.float64)
    for _ in range(steps):
        codes = nearest(stored, levels)
        for code in range(4):
            mine = codes == code
            counts = mine.sum(axis=1)
            sums = np.where(mine, stored, 0).sum(axis=1, dtype=np.float64)
            levels[:, code] = np.where(counts, sums / np.maximum(counts, 1), levels[:, code])
        levels.sort(axis=1)
    return pack(levels.astype("<f2"), nearest(stored, levels.astype("<f2").astype(np.float64)))


def nearest(stored: npt.NDArray[np.float32], levels: npt.NDArray[np.float64]) -> U8:
    """Codes (n, 256); ties to the lower one."""
    middles = (levels[:, 1:] + levels[:, :-1]) / 2
    found = np.zeros(stored.shape, np.uint8)
    for i in range(3):
        found += stored > middles[:, i : i + 1]
    return found


def pack(levels: npt.NDArray[np.float16], codes: U8) -> U8:
    """Groups of levels f16 (n, 4) and codes (n, 256), one after the other."""
    fields = codes.reshape(len(codes), -1, 4) << np.array([0, 2, 4, 6], np.uint8)
    packed = np.bitwise_or.reduce(fields, axis=2).astype(np.uint8)
    return np.concatenate(
        [np.ascontiguousarray(levels, dtype="<f2").view(np.uint8), packed], axis=1
    ).reshape(-1)
