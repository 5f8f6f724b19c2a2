"""Owns fitting the two codebooks of a mixed tensor (105, 106), from FP4 codes or from float rows.

A half of 16 weights, divided by its largest magnitude m, belongs to population 0 if its root mean
square is below 0.52, else to 1; each population gets a book of K levels by Lloyd's algorithm over a
histogram of 4,097 bins. The procedure, down to its rounding, is that of Luce-Org/lucebox.

Nothing here depends on threads: masses are added to a bin in row-major order. An expert of zeros
needs no rule of its own: all centres are 0, and the repair that keeps levels apart gives 0 and the
smallest numbers above.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import PayloadSizeError
from ds4q.artifact.fastpath import FastPath, jit
from ds4q.artifact.formats import MixRow, hfp4g32
from ds4q.artifact.numeric import E2M1, E8M0, bf16_to_f32
from ds4q.quantize.errors import JobError, SourceValueError

U8 = npt.NDArray[np.uint8]
F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]

HALF = 16
BLOCK_BYTES = 16  # of source codes
STEPS = 4096  # between -1 and 1
CENTRE = STEPS // 2
POPULATIONS = 2
SPREAD = 0.52  # root mean square / largest magnitude, below which a half is in population 0
LLOYD_STEPS = 24
MIN_NORMAL = 0x0080  # bf16, the smallest number that a level may be moved to from 0
SIGN = 0x8000

Words = list[int]  # bf16 patterns


class FittedBooks(NamedTuple):
    """A table row, and how many levels had to be moved to keep a book ascending."""

    row: MixRow
    repairs: int


def _bins(ratios: F32Array) -> npt.NDArray[np.intp]:
    """The bins of numbers in [-1, 1], rounded half away from zero."""
    at = (ratios + np.float32(1)) * np.float32(0.5) * np.float32(STEPS)
    below = np.floor(at)
    found: npt.NDArray[np.intp] = np.where(at - below >= np.float32(0.5), below + 1, below)
    return found.astype(np.intp)


def add_values(values: F32Array, importance: F32Array, histograms: F64Array) -> int:
    """Add rows ``(M, K)`` to ``histograms`` ``(2, 4097)``; a column weighs its importance.

    Returns the number of the first half with a value that is not finite, or -1; the histograms are
    of no use then.
    """
    x = values.reshape(-1, HALF)
    largest = np.abs(x).max(axis=1, keepdims=True)
    bad = np.flatnonzero(~np.isfinite(largest))
    if bad.size:
        return int(bad[0])
    zero = largest == 0
    divisor = np.where(zero, np.float32(1), largest)
    wide = x.astype(np.float64)
    squares = np.cumsum(wide * wide, axis=1)[:, -1:]  # in index order
    population = np.where(np.sqrt(squares / HALF) / divisor < SPREAD, 0, 1)
    weights = np.broadcast_to(importance, values.shape).reshape(-1, HALF).astype(np.float64)
    # A half of zeros adds 16, whatever its columns weigh.
    weights = np.where(zero, np.eye(1, HALF) * HALF, weights)
    # add.at goes in order, so that each bin's sum is that of a loop over the rows.
    np.add.at(histograms, (population, _bins(np.clip(x / divisor, -1, 1))), weights)
    return -1


_MAGNITUDES = E2M1[:8]
with np.errstate(over="ignore", invalid="ignore"):
    _FINITE = np.isfinite(_MAGNITUDES * E8M0[:, None])  # by scale byte and largest code
# Below: what a half does is told by its largest magnitude code and the others, since the scale
# cancels. Sums of squares of doubled values are small integers.
_SQUARES = (4 * E2M1.astype(np.float64) ** 2).astype(np.int64)
_SUMS = np.arange(HALF * int(_SQUARES.max()) + 1)
_POPULATION_1 = np.array(  # sums of squares from here on, by largest code
    [0, *(np.argmax(np.sqrt(_SUMS / 4 / HALF) / m >= SPREAD) for m in _MAGNITUDES[1:].tolist())]
)
_BINS = np.zeros((8, 16), dtype=np.int64)  # by largest code and code
_BINS[1:] = _bins(np.clip(E2M1 / _MAGNITUDES[1:, None], -1, 1))


def _add_reference(codes: U8, scales: U8, importance: F32Array, histograms: F64Array) -> int:
    return add_values(hfp4g32.source_values(codes, scales), importance, histograms)


@jit
def _add_fast(codes: U8, scales: U8, importance: F32Array, histograms: F64Array) -> int:
    rows, blocks = scales.shape
    for r in range(rows):
        for h in range(2 * blocks):
            start = HALF // 2 * h
            m, total = 0, 0
            for i in range(HALF // 2):
                low, high = codes[r, start + i] & 15, codes[r, start + i] >> 4
                m = max(m, low & 7, high & 7)
                total += _SQUARES[low] + _SQUARES[high]
            if not _FINITE[scales[r, h >> 1], m]:
                return int(2 * blocks * r + h)
            if m == 0:
                histograms[0, CENTRE] += HALF
                continue
            population = 1 if total >= _POPULATION_1[m] else 0
            for i in range(HALF // 2):
                byte = codes[r, start + i]
                column = 2 * (start + i)
                low, high = _BINS[m, byte & 15], _BINS[m, byte >> 4]
                histograms[population, low] += np.float64(importance[column])
                histograms[population, high] += np.float64(importance[column + 1])
    return -1


_add = FastPath(_add_reference, _add_fast)


class BookFit:
    """Collects the weights of one expert's part, in rows, and fits its books.

    Parameters
    ----------
    levels : of a book: 8 for type 105, 4 for type 106
    """

    def __init__(self, levels: int) -> None:
        self._levels = levels
        self._histograms = np.zeros((POPULATIONS, STEPS + 1))

    def add(self, codes: U8, scales: U8, importance: F32Array | None) -> None:
        """Add rows of FP4 source: codes ``(M, K/2)``, scales ``(M, K/32)``, importance ``(K,)``.

        An importance of zeros is as none. The order of rows counts in the last bit: of gate and up,
        gate comes first.

        Raises ``SourceValueError`` for a weight that is not finite, ``PayloadSizeError`` for shapes
        that do not agree.
        """
        k = 2 * codes.shape[1]
        weights = np.ones(k, np.float32) if importance is None else importance
        if codes.shape != (len(scales), BLOCK_BYTES * scales.shape[1]) or weights.shape != (k,):
            raise PayloadSizeError(
                "codes, scales and importance must agree",
                found=f"{codes.shape}, {scales.shape}, {weights.shape}",
            )
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise SourceValueError("importance must be finite and not negative")
        if not weights.any():  # the encoder weighs nothing then, and books are for what it does
            weights = np.ones(k, np.float32)
        half = _add(codes, scales, weights, self._histograms)
        if half >= 0:
            row, first = divmod(half * HALF, k)
            raise SourceValueError(
                "weight is not finite", found=f"row {row}, from column {first} on"
            )

    def fit(self) -> FittedBooks:
        """The books of all that was added; ``JobError`` where nothing was."""
        mass = self._histograms.sum(axis=1)
        if not mass.any():
            raise JobError("there are no weights to fit codebooks to")
        books: Words = []
        repairs = 0
        for histogram, some in zip(self._histograms, mass > 0, strict=True):
            own = histogram if some else self._histograms.sum(axis=0)
            words, moved = to_bf16(lloyd(own, self._levels))
            books += words
            repairs += moved
        return FittedBooks(MixRow(1, np.array(books, dtype="<u2").tobytes()), repairs)


def lloyd(histogram: F64Array, levels: int) -> F32Array:
    """Ascending centres, float32 ``(levels,)``, of a histogram that is not empty."""
    bins = np.flatnonzero(histogram)
    mass = histogram[bins]
    place = -1 + 2 * bins / STEPS
    running = np.cumsum(mass)
    quantiles = running[-1] * (np.arange(levels) + 0.5) / levels
    centres = place[np.searchsorted(running, quantiles)].astype(np.float32)
    for _ in range(LLOYD_STEPS):
        midpoints = np.float32(0.5) * (centres[1:] + centres[:-1])
        nearest = np.searchsorted(midpoints, place.astype(np.float32), side="left")
        masses = np.bincount(nearest, mass, minlength=levels)
        moments = np.bincount(nearest, mass * place, minlength=levels)
        full = masses > 0
        centres[full] = (moments[full] / masses[full]).astype(np.float32)
        centres.sort()
    result: F32Array = centres
    return result


def to_bf16(levels: F32Array) -> tuple[Words, int]:
    """Strictly ascending bf16 patterns near ascending ``levels``, and how many had to be moved.

    Lucebox names the rule "bf16-epsilon-v1". Raises ``JobError`` where the result does not lie
    within -1 and 1.
    """
    bits = levels.view(np.uint32).astype(np.uint64)
    words = [int(word) for word in (bits + 0x7FFF + (bits >> 16 & 1)) >> 16]  # nearest even
    moved = set()
    for i in range(1, len(words)):
        if _value(words[i]) <= _value(words[i - 1]):
            words[i] = _above(words[i - 1])
            moved.add(i)
    if _value(words[-1]) > 1:
        words[-1] = 0x3F80
        moved.add(len(words) - 1)
        for i in range(len(words) - 2, -1, -1):
            if _value(words[i]) >= _value(words[i + 1]):
                words[i] = _above(words[i + 1] ^ SIGN) ^ SIGN
                moved.add(i)
    values = [_value(word) for word in words]
    if not (values[0] >= -1 and values[-1] <= 1 and all(np.diff(values) > 0)):
        raise JobError("codebook levels cannot be told apart", found=f"{levels.tolist()}")
    return words, len(moved)


def _value(word: int) -> float:
    return float(bf16_to_f32(np.array([word], dtype=np.uint16))[0])


def _above(word: int) -> int:
    """The next bf16 above; above zero, the smallest normal number."""
    if word & ~SIGN == 0:
        return MIN_NORMAL
    return word - 1 if word & SIGN else word + 1
