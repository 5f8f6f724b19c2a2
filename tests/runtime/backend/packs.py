"""Owns packed weights for the backend's tests, each with its exact values in float64.

The values are worked out here, independently of the codecs and the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact.formats import Coding, MixRow
from ds4q.artifact.types import (
    BF16,
    F16,
    F32,
    HFP4G32,
    MQ2_LLOYD,
    Q8F16,
    ROCMFP2,
    ROCMFP2_MIX,
    ROCMFP3,
    ROCMFP3_MIX,
    ROCMFP4,
    ROCMFP4_FAST,
    ROCMFP6,
    ROCMFP8,
    TensorType,
)
from ds4q.runtime.backend import Weight

Array = npt.NDArray[Any]
Kind = TensorType | tuple[TensorType, Coding]


def mix_row(*books: list[float]) -> MixRow:
    """Mode 1 with two books of levels that bf16 holds exactly."""
    words = np.array(books, dtype=np.float32).view(np.uint32) >> 16
    return MixRow(1, words.astype("<u2").tobytes())


THREE_BIT = mix_row(
    [-1, -0.59375, -0.375, -0.1015625, 0.078125, 0.3125, 0.625, 0.99609375],
    [-0.75, -0.5, -0.25, -0.0625, 0, 0.1875, 0.5, 1],
)
TWO_BIT = mix_row([-0.875, -0.25, 0.21875, 0.90625], [-1, -0.375, 0, 0.6875])
LOSSY: tuple[Kind, ...] = (
    ROCMFP4,
    ROCMFP4_FAST,
    (ROCMFP6, "zero"),
    (ROCMFP6, "neg32"),
    ROCMFP8,
    ROCMFP3,
    (ROCMFP3_MIX, MixRow(0, bytes(32))),
    (ROCMFP3_MIX, THREE_BIT),
    (ROCMFP2_MIX, MixRow(0, bytes(16))),
    (ROCMFP2_MIX, TWO_BIT),
    (ROCMFP2, "dual"),
    (ROCMFP2, "affine"),
    (ROCMFP2, "s40"),
    (ROCMFP2, "sign"),
)
KINDS: tuple[Kind, ...] = (HFP4G32, Q8F16, BF16, F16, F32, MQ2_LLOYD, *LOSSY)
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def parts(kind: Kind) -> tuple[TensorType, Coding | None]:
    return (kind, None) if isinstance(kind, TensorType) else kind


def columns(kind: Kind, blocks: int) -> int:
    """``blocks`` times the shortest row that the type allows, 32 columns or more."""
    return blocks * max(32, parts(kind)[0].row_multiple)


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


def signs(seed: int) -> Array:
    """Of the rotation of MQ2G256Lloyd, f64 (256,)."""
    bits = []
    for _ in range(256):
        seed = (1103515245 * seed + 12345) & 0x7FFFFFFF
        bits.append(seed >> 16 & 1)
    return 2.0 * np.array(bits) - 1


def mq2lloyd(levels: Array, codes: Array) -> tuple[Weight, Array]:
    """Of levels f16 (M, K/256, 4) and codes u8 (M, K)."""
    m, k = codes.shape
    data = np.zeros((m, k // 256, 72), dtype=np.uint8)
    data[:, :, :8] = levels.astype("<f2").view(np.uint8).reshape(m, -1, 8)
    each = codes.reshape(m, k // 256, 64, 4)
    data[:, :, 8:] = sum(each[..., i] << 2 * i for i in range(4))
    stored = np.take_along_axis(levels.astype(np.float64), codes.reshape(m, -1, 256), axis=2)
    hadamard: Array = np.ones((1, 1))
    for _ in range(8):
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    values = (stored * signs(1042)) @ hadamard / 16 * signs(42)
    return Weight(MQ2_LLOYD.id, m, k, data.reshape(-1)), values.reshape(m, k)


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


def ue4m3(codes: Array) -> Array:
    """Scale bytes -> f64; 0x7f and above are zero."""
    exponent, mantissa = codes.astype(np.int64) >> 3, codes & 7
    value = np.where(exponent, (8.0 + mantissa) * 2.0 ** (exponent - 11.0), mantissa * 2.0**-10)
    return np.where(codes > 0x7E, 0, value)


def rocmfpx(kind: Kind, blocks: Array) -> tuple[Weight, Array]:
    """Of packed blocks u8 (M, K / 32, block bytes)."""
    table, coding = parts(kind)
    m, n, _ = blocks.shape
    number, last = codes(table, blocks), blocks[:, :, -1:]
    first = last if table in (ROCMFP4_FAST, ROCMFP8) else blocks[:, :, -2:-1]
    scales = np.repeat(np.concatenate([first, last], axis=-1), 16, axis=-1)
    learned = isinstance(coding, MixRow) and coding.mode == 1
    choice = scales >> 7
    if learned or coding == "sign":
        scales = scales & 0x7F
    if coding == "affine":
        values = number * ue4m3(first) - ue4m3(last)
    elif coding == "sign":
        values = np.where(choice, 1.0 - number, number - 1.0) * ue4m3(scales)
    elif isinstance(coding, MixRow) and learned:
        books = coding.words.astype(np.uint32) << 16
        values = books.view(np.float32).astype(np.float64)[choice, number] * ue4m3(scales)
    else:
        values = levels(table, coding)[number] * ue4m3(scales)
    weight = Weight(table.id, m, 32 * n, blocks.reshape(-1), coding)
    return weight, values.reshape(m, 32 * n)


def levels(kind: TensorType, coding: Coding | None) -> Array:
    """Levels by code, of types that have fixed ones."""
    if kind in (ROCMFP2, ROCMFP2_MIX):
        return np.array([-4.0, -1, 1, 4] if coding == "s40" else [-1.0, 0, 1, 2])
    if kind is ROCMFP8:
        return np.arange(256).astype(np.int8).astype(np.float64)
    half = {
        ROCMFP4: [0, 1, 2, 3, 4, 6, 8, 10],
        ROCMFP4_FAST: [0, 1, 2, 3, 4, 6, 8, 10],
        ROCMFP6: list(range(32)),
        ROCMFP3: [0, 1, 2, 4],
        ROCMFP3_MIX: [0, 1, 2, 4],
    }[kind]
    both = np.array(half + [-value for value in half], dtype=np.float64)
    if coding == "neg32":
        both[32] = -32
    return both


def codes(kind: TensorType, blocks: Array) -> Array:
    """Codes u8 (..., 32) of packed blocks u8 (..., block bytes)."""
    if kind in (ROCMFP4, ROCMFP4_FAST):
        nibbles = blocks[..., :16]
        return np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    bits = kind.block_bytes * 8 // 32
    stream = np.unpackbits(blocks, axis=-1, bitorder="little")[..., : 32 * bits]
    each = stream.reshape(*blocks.shape[:-1], 32, bits)
    found: Array = (each << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)
    return found


def name(value: object) -> str:
    """For the ids of parametrised tests, and for file names."""
    if isinstance(value, tuple):
        kind, coding = value
        return f"{kind.name}-{coding.mode if isinstance(coding, MixRow) else coding}"
    return value.name if isinstance(value, TensorType) else str(value)


def draw(kind: Kind, rows: int, cols: int, seed: int) -> tuple[Weight, Array]:
    """A random matrix with ordinary values."""
    table, coding = parts(kind)
    rng = np.random.default_rng([seed, table.id, rows, cols])
    if kind in LOSSY:
        blocks = rng.integers(0, 256, (rows, cols // 32, table.block_bytes), dtype=np.uint8)
        count = 1 if table in (ROCMFP4_FAST, ROCMFP8) else 2
        scales = rng.integers(0, 0x50, blocks[:, :, -count:].shape, dtype=np.uint8)
        if coding == "sign" or (isinstance(coding, MixRow) and coding.mode == 1):
            scales |= rng.integers(0, 2, scales.shape, dtype=np.uint8) << 7
        blocks[:, :, -count:] = scales
        return rocmfpx(kind, blocks)
    if table is HFP4G32:
        codes = rng.integers(0, 16, (rows, cols), dtype=np.uint8)
        scales = rng.integers(112, 128, (rows, cols // 32), dtype=np.uint8)
        return hfp4g32(codes, scales, rng.uniform(0.5, 2, rows).astype(np.float16))
    if table is Q8F16:
        codes = rng.integers(-128, 128, (rows, cols), dtype=np.int8)
        return q8f16(codes, rng.uniform(0.001, 0.1, (rows, cols // 32)).astype(np.float16))
    if table is MQ2_LLOYD:
        levels = np.sort(rng.standard_normal((rows, cols // 256, 4)), axis=2).astype(np.float16)
        return mq2lloyd(levels, rng.integers(0, 4, (rows, cols), dtype=np.uint8))
    values = rng.standard_normal((rows, cols)).astype(np.float32)
    if table is F16:
        return plain(table, values.astype(np.float16).view(np.uint16))
    if table is BF16:
        return plain(table, (values.view(np.uint32) >> 16).astype(np.uint16))
    return plain(table, values)


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


def shapes() -> list[tuple[Kind, int, int]]:
    """Every type at odd and even numbers of blocks; types without blocks also with a rest."""
    whole: list[tuple[Kind, int, int]] = [
        (kind, m, columns(kind, n)) for kind in KINDS for m, n in ((1, 1), (3, 3), (7, 4))
    ]
    long: list[tuple[Kind, int, int]] = [(kind, 40, 2048) for kind in KINDS]
    rest: list[tuple[Kind, int, int]] = [
        (kind, m, k) for kind in (BF16, F16, F32) for m, k in ((2, 1), (3, 31), (5, 100))
    ]
    return whole + long + rest
