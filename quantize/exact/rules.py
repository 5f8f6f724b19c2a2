"""Owns which codes each ROCmFPX type gives a weight at each scale, as numpy arrays of float32.

A scheme has its candidates: scale bytes, in the order that settles ties. It shares tables with the
codecs in ``artifact/formats/`` and no code, so that each side checks the other. Searches and
layouts in memory are elsewhere (``tables.py``). The rules are those of the reference quantizers in
Luce-Org/lucebox, ``s40`` and ``neg32`` those of ciru-ai/ROCmFPX.

Shapes: X values, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ds4q.artifact.formats import Coding, MixRow, mix, rocmfp2, rocmfp3, rocmfp4, rocmfp6, rocmfp8
from ds4q.artifact.formats._ue4m3 import LAST, UE4M3
from ds4q.artifact.types import (
    MIXED,
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

U8 = npt.NDArray[np.uint8]
F32Array = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]
Rule = Callable[[F32Array, F32Array], npt.NDArray[np.intp]]

SCALE_BYTES: U8 = np.arange(1, LAST + 1, dtype=np.uint8)
OFFSET_BYTES: U8 = np.arange(LAST + 1, dtype=np.uint8)
UPPER = 0x80  # of a scale byte: the second book, or the mirrored levels
NEIGHBOURS = 2  # scale bytes tried on each side of a mixed type's centre


def _magnitudes(*thresholds: float) -> Rule:
    """Codes 0.. by the number of thresholds below a magnitude; negative ones follow."""
    limits = np.array(thresholds, np.float32)

    def codes(x: F32Array, q: F32Array) -> Indices:
        index = (np.abs(q)[..., None] > limits).sum(axis=-1)
        found: Indices = np.where((x < 0) & (index > 0), index + len(limits) + 1, index)
        return found

    return codes


def _half_away(magnitude: F32Array) -> F32Array:
    whole = np.floor(magnitude)
    return whole + (magnitude - whole >= np.float32(0.5))


def _fp6_zero(x: F32Array, q: F32Array) -> Indices:
    size = _half_away(np.minimum(np.abs(q), np.float32(31))).astype(np.intp)
    return size + 32 * ((x < 0) & (size > 0))


def _fp6_neg32(x: F32Array, q: F32Array) -> Indices:
    below = q < 0
    size = _half_away(np.minimum(np.abs(q), np.where(below, np.float32(32), np.float32(31))))
    # -32 has the code that would be -0.
    return size.astype(np.intp) % 32 + 32 * (below & (size > 0))


def _fp8(x: F32Array, q: F32Array) -> Indices:
    size = _half_away(np.minimum(np.abs(q), np.float32(127))).astype(np.intp)
    return np.where(q < 0, -size, size) & 0xFF


def _dual(x: F32Array, q: F32Array) -> Indices:
    return np.where(q > 1.5, 3, np.where(q > 0.5, 2, np.where(q > -0.5, 1, 0)))


def _s40(x: F32Array, q: F32Array) -> Indices:
    outer = np.abs(q) > np.float32(2.5)
    return np.where(np.signbit(x), 1 - outer, 2 + outer)


class Scheme:
    """One type under one coding: its candidates for a group of weights.

    Attributes
    ----------
    bits : of a code
    wide : one scale for the block of 32, not one for each half
    zero : code of a group of zeros, whose scale byte is 0
    metas : the candidates' scale bytes; among equal errors the first one wins
    row_weights : whether weights of errors depend on the row, or are the importance itself
    """

    bits: int
    wide: bool = False
    zero: int = 0
    metas: U8 = SCALE_BYTES
    row_weights: bool = True

    def candidates(self, x: F32Array) -> tuple[U8, F32Array]:
        """Codes and errors x - value of values ``(X,)`` for all candidates, ``(X, C)``."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def fixed(self, magnitudes: F32Array, weighted: bool) -> list[Indices] | None:
        """The candidates for each largest magnitude of a group; None where all are tried."""
        return None


@dataclass(frozen=True, eq=False)
class Levels(Scheme):
    """A type with fixed levels.

    ``rule`` is (values, values / scale) -> codes. Scale bytes of 0x80 and above mirror the levels.
    Where ``top`` is given, an unweighted group takes the byte nearest to its largest value / top.
    """

    bits: int
    levels: F32Array
    rule: Rule
    wide: bool = False
    zero: int = 0
    metas: U8 = field(default_factory=lambda: SCALE_BYTES)
    top: float = 0

    def candidates(self, x: F32Array) -> tuple[U8, F32Array]:
        scales = UE4M3[self.metas % UPPER]
        sign = np.where(self.metas < UPPER, np.float32(1), np.float32(-1))
        mirrored = x[:, None] * sign
        codes = self.rule(mirrored, mirrored * (np.float32(1) / scales))
        return codes.astype(np.uint8), x[:, None] - sign * self.levels[codes] * scales

    def fixed(self, magnitudes: F32Array, weighted: bool) -> list[Indices] | None:
        if weighted or not self.top:
            return None
        return [np.array([nearest(m) - 1]) for m in magnitudes / np.float32(self.top)]


class Books(Scheme):
    """A mixed type under two books: of each, five scale bytes about the one that fits."""

    metas = np.concatenate([SCALE_BYTES, SCALE_BYTES | UPPER])
    row_weights = False

    def __init__(self, bits: int, books: F32Array) -> None:
        self.bits = bits
        self.books = books
        with np.errstate(over="ignore"):  # levels are any finite numbers
            self.midpoints = np.float32(0.5) * (books[:, :-1] + books[:, 1:])
        self.zero = int(np.count_nonzero(self.midpoints[0] < 0))

    def candidates(self, x: F32Array) -> tuple[U8, F32Array]:
        scales = UE4M3[self.metas % UPPER]
        book = self.metas // UPPER
        q = x[:, None] * (np.float32(1) / scales)
        codes = (q[..., None] > self.midpoints[book]).sum(axis=-1)
        return codes.astype(np.uint8), x[:, None] - self.books[book, codes] * scales

    def fixed(self, magnitudes: F32Array, weighted: bool) -> list[Indices] | None:
        return [np.concatenate([self._tried(m, book) for book in range(2)]) for m in magnitudes]

    def _tried(self, largest: np.float32, book: int) -> Indices:
        centre = nearest(largest / np.abs(self.books[book]).max())
        low, high = max(centre - NEIGHBOURS, 1), min(centre + NEIGHBOURS, LAST)
        return np.arange(low, high + 1) - 1 + book * len(SCALE_BYTES)


def affine_candidates(x: F32Array, scales: U8, offsets: U8) -> tuple[U8, F32Array]:
    """As ``Scheme.candidates`` for ``affine`` of type 107: value = code * scale - offset.

    One of both is an array of bytes, the other is one byte, ``(1,)``.
    """
    scale, offset = UE4M3[scales], UE4M3[offsets]
    whole = np.floor((x[:, None] + offset) / scale + np.float32(0.5))
    codes = np.clip(whole, np.float32(0), np.float32(3))
    return codes.astype(np.uint8), x[:, None] - (codes * scale - offset)


def nearest(target: np.float32) -> int:
    """The scale byte nearest to a target; 0 where it is not above 0 or not finite."""
    if not (target > 0 and np.isfinite(target)):
        return 0
    return int(np.argmin(np.abs(UE4M3[SCALE_BYTES] - target))) + 1


_FP4 = _magnitudes(0.5, 1.5, 2.5, 3.5, 5, 7, 9)
_SIGNED = np.concatenate([SCALE_BYTES, SCALE_BYTES | UPPER])
_SCHEMES: dict[tuple[TensorType, str], Scheme] = {
    (ROCMFP4, ""): Levels(4, rocmfp4.LEVELS, _FP4),
    (ROCMFP4_FAST, ""): Levels(4, rocmfp4.LEVELS, _FP4, wide=True),
    (ROCMFP6, "zero"): Levels(6, rocmfp6.LEVELS["zero"], _fp6_zero),
    (ROCMFP6, "neg32"): Levels(6, rocmfp6.LEVELS["neg32"], _fp6_neg32),
    (ROCMFP8, ""): Levels(8, rocmfp8.LEVELS, _fp8, wide=True, top=127),
    (ROCMFP3, ""): Levels(3, rocmfp3.LEVELS, _magnitudes(0.5, 1.5, 3)),
    (ROCMFP2, "dual"): Levels(2, rocmfp2.LEVELS["dual"], _dual, zero=1),
    (ROCMFP2, "sign"): Levels(2, rocmfp2.LEVELS["dual"], _dual, zero=1, metas=_SIGNED),
    (ROCMFP2, "s40"): Levels(2, rocmfp2.LEVELS["s40"], _s40),
}


def scheme_of(kind: TensorType, coding: Coding | None) -> Scheme | None:
    """The scheme of a type, or None where it has no candidates that a table could hold.

    ``affine`` of type 107 has two numbers to search for (``affine_candidates``); a mixed type in
    mode 0 is never written.
    """
    if kind in MIXED and isinstance(coding, MixRow):
        bits = {ROCMFP3_MIX: 3, ROCMFP2_MIX: 2}[kind]
        return Books(bits, mix.levels_of(kind, coding)) if coding.mode else None
    return _SCHEMES.get((kind, coding if kind.coding and isinstance(coding, str) else ""))
