"""Owns the rotation that MQ types store their weights in: a signed Walsh-Hadamard transform.

Runs of 256 values are multiplied with signs, transformed by butterflies, scaled by 1/16 and
multiplied with other signs; the inverse swaps the signs. It is orthonormal, so the product of a
rotated row with a rotated activation is that of the two as they were. hipfire's signs, from its
generator; the order of additions is ours, the same here and in ``hipkern/kernels/ds4q_fwht.h``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath, jit

F32Array = npt.NDArray[np.float32]

GROUP = 256
SCALE = np.float32(0.0625)  # 1 / sqrt(256)
_SEEDS = 42, 1042


def signs(seed: int) -> F32Array:
    """``GROUP`` signs as +1 and -1: bit 16 of a linear congruential generator's states."""
    states = []
    for _ in range(GROUP):
        seed = (seed * 1103515245 + 12345) % 2**31
        states.append(seed)
    return np.where(np.array(states) >> 16 & 1, np.float32(1), np.float32(-1))


BEFORE, AFTER = (signs(seed) for seed in _SEEDS)


def _transform_reference(values: F32Array, first: F32Array, last: F32Array) -> None:
    n = len(values)
    work = values * first
    half = GROUP // 2
    while half:
        pairs = work.reshape(n, GROUP // (2 * half), 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        work = np.stack((low + high, low - high), axis=2).reshape(n, GROUP)
        half //= 2
    values[:] = work * (SCALE * last)


@jit
def transform_fast(values: F32Array, first: F32Array, last: F32Array) -> None:
    """In place, ``(n, GROUP)``; compiled code calls it directly, all else ``transform``."""
    for g in range(values.shape[0]):
        for i in range(GROUP):
            values[g, i] *= first[i]
        half = GROUP // 2
        while half:
            for start in range(0, GROUP, 2 * half):
                for i in range(start, start + half):
                    low, high = values[g, i], values[g, i + half]
                    values[g, i], values[g, i + half] = low + high, low - high
            half //= 2
        for i in range(GROUP):
            values[g, i] *= SCALE * last[i]


transform = FastPath(_transform_reference, transform_fast)


def rotate(values: F32Array) -> F32Array:
    """Runs of ``GROUP`` of float32 values of any shape, rotated, in new memory."""
    out = np.array(values, dtype=np.float32, order="C")
    transform(out.reshape(-1, GROUP), BEFORE, AFTER)
    return out


def unrotate(values: F32Array) -> F32Array:
    """The inverse of ``rotate``, but for rounding."""
    out = np.array(values, dtype=np.float32, order="C")
    transform(out.reshape(-1, GROUP), AFTER, BEFORE)
    return out
