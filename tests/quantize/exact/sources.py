"""Owns FP4 sources for the tests of the exact encoder, and the general encoder's answer to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ds4q.artifact.errors import PayloadValueError
from ds4q.artifact.formats import Coding, MixRow, RowCodec, codec_for, hfp4g32
from ds4q.artifact.types import (
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
from ds4q.quantize.exact import encode_fp4
from tests.checks import Array, same_bits

# Ascending bf16 levels, as fits give them; the second pair lies on powers of two, where ties are.
BOOKS = {
    ROCMFP3_MIX: MixRow(
        1,
        bytes.fromhex("71bf0cbfc7be3cbec93d8b3ef13e6a3f")
        + bytes.fromhex("80bf00bf80be80bd803d803e003f803f"),
    ),
    ROCMFP2_MIX: MixRow(1, bytes.fromhex("2cbf33be513e3a3f") + bytes.fromhex("80bf80be803e803f")),
}
Target = tuple[TensorType, Coding | None]
TARGETS: list[Target] = [
    (ROCMFP4, None),
    (ROCMFP4_FAST, None),
    (ROCMFP6, "zero"),
    (ROCMFP6, "neg32"),
    (ROCMFP8, None),
    (ROCMFP3, None),
    (ROCMFP2, "dual"),
    (ROCMFP2, "sign"),
    (ROCMFP2, "s40"),
    (ROCMFP2, "affine"),
    *BOOKS.items(),
]


def name_of(target: Target) -> str:
    """For the names of parametrized tests."""
    kind, coding = target
    return f"{kind.name}-{coding}" if isinstance(coding, str) else kind.name


def packed(codes: Array) -> Array:
    """Bytes ``(M, K/2)`` of codes ``(M, K)``."""
    both: Array = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return both


def mixed_codes(rng: np.random.Generator, rows: int, k: int) -> Array:
    """Code bytes of six distributions by halves: each is one way for errors to tie or to vanish."""
    halves = rows * k // 16
    codes = rng.integers(0, 16, (halves, 16), dtype=np.uint8)
    kind = rng.integers(0, 6, halves)
    few = rng.integers(0, 16, (halves, 3), dtype=np.uint8)
    pick = np.take_along_axis(few, rng.integers(0, 3, (halves, 16)), axis=1)
    small = np.minimum(np.abs(rng.standard_normal((halves, 16)) * 2), 7).astype(np.uint8)
    sparse = rng.random((halves, 16)) < 0.9
    codes = np.where(kind[:, None] == 1, pick, codes)
    codes = np.where(kind[:, None] == 2, (codes & 8) | small, codes)
    codes = np.where((kind[:, None] == 3) & sparse, codes & 8, codes)
    codes = np.where(kind[:, None] == 4, codes & 8, codes)  # zeros of both signs
    codes = np.where(kind[:, None] == 5, few[:, :1] ^ (codes & 8), codes)  # one magnitude
    return packed(codes.reshape(rows, k))


def importance_of(rng: np.random.Generator, k: int, *, gaps: bool) -> Array:
    """Weights over several orders of magnitude; with gaps, zeros and whole halves of zeros."""
    weights = (np.abs(rng.standard_normal(k)) ** 4).astype(np.float32)
    if gaps:
        weights *= rng.choice(np.array([0, 1, 1, 1e-6], np.float32), k)
        weights.reshape(-1, 16)[rng.random(k // 16) < 0.3] = 0
    return weights


def general(codes: Array, scales: Array, target: Target, weights: Any) -> tuple[Array, int]:
    """What the codec's own encoder makes of the values: rows and lost groups."""
    codec = codec_for(target[0].id, target[1])
    assert isinstance(codec, RowCodec)
    return codec.encode_rows(hfp4g32.source_values(codes, scales), weights)


def exact(codes: Array, scales: Array, target: Target, weights: Any) -> tuple[Array, int]:
    """Rows and lost groups of ``encode_fp4``."""
    out = np.full((len(codes), target[0].row_bytes(2 * codes.shape[1])), 0xEE, dtype=np.uint8)
    return out, encode_fp4(codes, scales, *target, weights, out)


def check_same(codes: Array, scales: Array, target: Target, weights: Any) -> int:
    """Both encoders write the same bytes and count the same groups; returns the count."""
    expected, lost = general(codes, scales, target, weights)
    found, found_lost = exact(codes, scales, target, weights)
    same_bits(found, expected, block_bytes=target[0].block_bytes, what=name_of(target))
    assert found_lost == lost
    return lost


def outcome(encoder: Callable[..., tuple[Array, int]], *args: Any) -> tuple[bytes, int] | str:
    """What an encoder returns, or says when it refuses."""
    try:
        rows, lost = encoder(*args)
    except PayloadValueError as error:
        return str(error)
    return rows.tobytes(), lost
