"""Owns packed weights for the backend's tests, each with its exact values in float64.

The values are worked out here, independently of the codecs and the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact.types import BF16, F16, F32, HFP4G32, Q8F16, TensorType
from ds4q.runtime.backend import Weight

Array = npt.NDArray[Any]

KINDS = (HFP4G32, Q8F16, BF16, F16, F32)
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def hfp4g32(codes: Array, scales: Array, row_scales: Array) -> tuple[Weight, Array]:
    """Of codes u8 (M, K), scale bytes u8 (M, K/32) and row scales f16 (M,)."""
    m, k = codes.shape
    data = np.zeros((m, HFP4G32.row_bytes(k)), dtype=np.uint8)
    data[:, 0:2] = row_scales.astype("<f2").view(np.uint8).reshape(m, 2)
    data[:, 4] = k // 32 & 255
    data[:, 5] = k // 32 >> 8
    blocks = data[:, 16:].reshape(m, k // 32, 17)
    blocks[:, :, 0] = scales
    blocks[:, :, 1:] = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(m, k // 32, 16)
    values = np.where(codes & 8, -1.0, 1.0) * MAGNITUDES[codes & 7]
    values *= np.repeat(2.0 ** (scales.astype(np.int64) - 127), 32, axis=1)
    values *= row_scales.astype(np.float64)[:, None]
    return Weight(HFP4G32.id, m, k, data.reshape(-1)), values


def q8f16(codes: Array, scales: Array) -> tuple[Weight, Array]:
    """Of codes i8 (M, K) and scales f16 (M, K/32)."""
    m, k = codes.shape
    data = np.zeros((m, k // 32, 34), dtype=np.uint8)
    data[:, :, :2] = scales.astype("<f2").view(np.uint8).reshape(m, k // 32, 2)
    data[:, :, 2:] = codes.view(np.uint8).reshape(m, k // 32, 32)
    values = codes * np.repeat(scales.astype(np.float64), 32, axis=1)
    return Weight(Q8F16.id, m, k, data.reshape(-1)), values


def plain(kind: TensorType, words: Array) -> tuple[Weight, Array]:
    """Of the words of an unpacked type: u16 (M, K) for F16 and BF16, f32 (M, K) for F32."""
    m, k = words.shape
    values = {
        F16: lambda: words.view("<f2"),
        BF16: lambda: (words.astype(np.uint32) << 16).view(np.float32),
        F32: lambda: words,
    }[kind]()
    data = np.ascontiguousarray(words).view(np.uint8).reshape(-1)
    with np.errstate(invalid="ignore"):  # signalling NaN among all words
        return Weight(kind.id, m, k, data), values.astype(np.float64)


def name(value: object) -> str:
    """For the ids of parametrised tests."""
    return value.name if isinstance(value, TensorType) else str(value)


def draw(kind: TensorType, rows: int, cols: int, seed: int) -> tuple[Weight, Array]:
    """A random matrix with ordinary values."""
    rng = np.random.default_rng([seed, kind.id, rows, cols])
    if kind is HFP4G32:
        codes = rng.integers(0, 16, (rows, cols), dtype=np.uint8)
        scales = rng.integers(112, 128, (rows, cols // 32), dtype=np.uint8)
        return hfp4g32(codes, scales, rng.uniform(0.5, 2, rows).astype(np.float16))
    if kind is Q8F16:
        codes = rng.integers(-128, 128, (rows, cols), dtype=np.int8)
        return q8f16(codes, rng.uniform(0.001, 0.1, (rows, cols // 32)).astype(np.float16))
    values = rng.standard_normal((rows, cols)).astype(np.float32)
    if kind is F16:
        return plain(kind, values.astype(np.float16).view(np.uint16))
    if kind is BF16:
        return plain(kind, (values.view(np.uint32) >> 16).astype(np.uint16))
    return plain(kind, values)


def activations(tokens: int, cols: int, seed: int = 0) -> Array:
    rng = np.random.default_rng([seed, tokens, cols])
    return rng.standard_normal((tokens, cols)).astype(np.float32)


def check_close(found: Array, values: Array, x: Array) -> None:
    """Within 1e-6 of sum |w x|: the lane sums of K columns err by about sqrt(K / 16) * 2^-24."""
    wide = x.astype(np.float64)
    error = np.abs(found - wide @ values.T)
    bound = 1e-6 * (np.abs(wide) @ np.abs(values).T)
    assert found.dtype == np.float32
    assert (error <= bound).all(), f"worst: {(error / bound).max():.3g} of the tolerance"


def shapes() -> list[tuple[TensorType, int, int]]:
    """Every type at odd and even numbers of blocks; types without blocks also with a rest."""
    whole = [(kind, m, k) for kind in KINDS for m, k in ((1, 32), (3, 96), (7, 128), (40, 2048))]
    rest = [(kind, m, k) for kind in (BF16, F16, F32) for m, k in ((2, 1), (3, 31), (5, 100))]
    return whole + rest
