"""Owns what each type costs in accuracy: (layer, expert, part) measured from the FP4 source.

Nothing here knows a budget. A sample of whole rows of each matrix is encoded and decoded. With x
the source, y the result and w the importance of columns, a matrix has the relative error

    r = (E + 3 C) / S,   E = sum w (x - y)^2,   S = sum w x^2,   C = (sum w x (x - y))^2 / S.

E is what noise adds to the squared error of the product with an input. C is the part of it that
shrinks the product: it does not average out over the experts of a token, so it weighs more. The
loss of down is r, of gate and up 0.7 (r_gate + r_up), times what the expert weighs. With a the
energy that it adds to the output for each of its tokens (mean squared routing weight x S of down),
a layer weighs the sum of tokens x a, which its experts share as tokens x sqrt(a). A layer counts by
how many layers read its error, over how large the stream is by then: (layers - l) / (1 + energy up
to l / mean energy of a layer). Constants and rules are measurements on a small trained model
(``docs/decisions``), where they foretell which plan of equal size keeps its predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.formats import Coding, MixRow, RowCodec, codec_for, hfp4g32
from ds4q.artifact.types import HFP4G32, ROCMFP3_MIX
from ds4q.quantize.audit import Unit
from ds4q.quantize.books import BookFit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.exact import encode_fp4
from ds4q.quantize.grid import PROJECTIONS, ExpertDims, routed
from ds4q.quantize.imatrix import Imatrix
from ds4q.quantize.measure import ErrorSums
from ds4q.quantize.recipe import EXPERT_TYPES, PARTS, ExpertPart, part_of

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Words = Mapping[ExpertPart, Sequence[str]]

VARIANTS_107 = ("rocmfp2-dual", "rocmfp2-affine", "rocmfp2-s40", "rocmfp2-sign")
MIXED_WORDS = ("rocmfp2-mix", "rocmfp3-mix")
LOSSLESS = "fp4"
# Types 101 to 103 are no candidates: they lose accuracy and hardly a byte against FP4 as it is.
WORDS = (*VARIANTS_107, "rocmfp2-mix", "rocmfp3", "rocmfp3-mix", "rocmfp4", LOSSLESS)

SAMPLE_WEIGHTS = 1 << 16  # of one matrix: small models are measured whole
SAMPLE_TOTAL = 1 << 28  # of all matrices: bounds the time that a large model takes
FEW_WEIGHTS = 1 << 16  # of a matrix: fewer are encoded sooner than tables for new books are made
SHRINK_WEIGHT = 3.0
GATE_UP_WEIGHT = 0.7
MIX_WEIGHT = 1.05  # a mixed type must be worth its table and its books

_ERROR, _SOURCE, _PRODUCT = range(3)


class _Sample(NamedTuple):
    """Rows of one matrix: codes ``(M, K/2)``, scales ``(M, K/32)``, values ``(M, K)``."""

    unit: Unit
    codes: U8
    scales: U8
    values: F32
    importance: F32 | None

    @property
    def nbytes(self) -> int:
        """Source bytes that were read."""
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class Meter:
    """Measures experts of one checkpoint. Results do not depend on ``threads``.

    Parameters
    ----------
    units : tensors of the trunk's routed experts, by (layer, expert, projection)
    imatrix : weighs columns and experts; None weighs all alike
    """

    checkpoint: Checkpoint
    units: Mapping[tuple[int, int, str], Unit]
    dims: ExpertDims
    imatrix: Imatrix | None
    threads: int
    sample_weights: int

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        units: Iterable[Unit],
        dims: ExpertDims,
        imatrix: Imatrix | None,
        threads: int,
        sample_weights: int = SAMPLE_WEIGHTS,
    ) -> Meter:
        """A meter of the routed experts among ``units``."""
        experts = dict(routed(units))
        share = SAMPLE_TOTAL // max(1, len(experts))
        return cls(checkpoint, experts, dims, imatrix, threads, min(sample_weights, share))

    def sample_bytes(self) -> int:
        """Source bytes of all samples, which ``measure`` reports expert by expert."""
        total = 0
        for unit in self.units.values():
            rows, k = unit.info.logical_shape
            count = len(sample_rows(rows, k, self.sample_weights))
            total += sum(count * tensor.nbytes // rows for tensor in unit.tensors)
        return total

    def measure(
        self, layer: int, experts: Sequence[int], words: Words, advance: Callable[[int], None]
    ) -> F64:
        """Sums of w (x - y)^2, w x^2 and w x y, ``(len(experts), 3, len(WORDS), 3)``.

        Second axis as ``PROJECTIONS``; NaN where a tensor is absent or a word is not asked for.
        Samples are scaled up to whole matrices.
        """
        found = np.empty((len(experts), len(PROJECTIONS), len(WORDS), 3))
        with ThreadPoolExecutor(self.threads) as pool:
            results = pool.map(lambda expert: self._measure(layer, expert, words), experts)
            for at, (sums, nbytes) in enumerate(results):
                found[at] = sums
                advance(nbytes)
        return found

    def _measure(self, layer: int, expert: int, words: Words) -> tuple[F64, int]:
        found = np.full((len(PROJECTIONS), len(WORDS), 3), np.nan)
        read_bytes = 0
        for part in PARTS:
            wanted = [at for at, name in enumerate(PROJECTIONS) if part_of(name) == part]
            there = [at for at in wanted if (layer, expert, PROJECTIONS[at]) in self.units]
            samples = [self._read(layer, expert, PROJECTIONS[at]) for at in there]
            read_bytes += sum(sample.nbytes for sample in samples)
            for word in words[part]:
                coding: Coding | None = EXPERT_TYPES[word][1] or None
                if word in MIXED_WORDS:
                    if there != wanted:
                        continue  # gate and up share their books
                    coding = self._fitted(word, samples)
                for at, sample in zip(there, samples, strict=True):
                    with self._located(sample):
                        found[at, WORDS.index(word)] = _sums(word, coding, sample)
        return found, read_bytes

    def _fitted(self, word: str, samples: Sequence[_Sample]) -> MixRow:
        """Books for the sampled rows of one part."""
        fit = BookFit(8 if EXPERT_TYPES[word][0] is ROCMFP3_MIX else 4)
        for sample in samples:
            with self._located(sample):
                fit.add(sample.codes, sample.scales, sample.importance)
        return fit.fit().row

    @contextmanager
    def _located(self, sample: _Sample) -> Iterator[None]:
        """Errors name the tensor."""
        try:
            yield
        except Ds4qError as error:
            path = self.checkpoint.shards[sample.unit.weight.shard].path
            raise error.located(path=path, tensor=sample.unit.name) from None

    def _read(self, layer: int, expert: int, projection: str) -> _Sample:
        unit = self.units[layer, expert, projection]
        rows, k = unit.info.logical_shape
        chosen = sample_rows(rows, k, self.sample_weights)
        arrays = []
        for tensor in unit.tensors:
            row_bytes = tensor.nbytes // rows
            held = np.empty((len(chosen), row_bytes), np.uint8)
            if len(chosen) == rows:
                self.checkpoint.read_into(tensor, held.reshape(-1))
            else:
                for at, row in enumerate(chosen):
                    self.checkpoint.read_into(tensor, held[at], row * row_bytes)
            arrays.append(held)
        codes, scales = arrays
        importance = None
        if self.imatrix is not None:
            importance = self.imatrix.importance(layer, expert, projection)
            importance = importance if importance.any() else None
        return _Sample(unit, codes, scales, hfp4g32.source_values(codes, scales), importance)


def sample_rows(rows: int, k: int, weights: int) -> Sequence[int]:
    """Evenly spaced rows of a matrix ``(rows, k)``: ``weights`` elements, but one row at least."""
    count = min(rows, max(1, weights // k))
    return [(2 * i + 1) * rows // (2 * count) for i in range(count)]


def _sums(word: str, coding: Coding | None, sample: _Sample) -> F64:
    """Sums of w (x - y)^2, w x^2 and w x y, of the rows scaled up to the matrix."""
    kind = EXPERT_TYPES[word][0]
    x = y = sample.values
    if kind is not HFP4G32:
        codec = codec_for(kind.id, coding)
        packed = np.empty((len(x), kind.row_bytes(x.shape[1])), np.uint8)
        if isinstance(codec, RowCodec) and kind.coding == "row" and x.size < FEW_WEIGHTS:
            packed[:] = codec.encode_rows(x, sample.importance)[0]
        else:
            encode_fp4(sample.codes, sample.scales, kind, coding, sample.importance, packed)
        y = codec.decode(packed.reshape(-1), x.shape)
    sums = ErrorSums.zero()
    sums.add(x, y, sample.importance)
    error, source, _, product = sums.sums
    return np.array([error, source, product]) * (sample.unit.info.logical_shape[0] / len(x))


def relative_errors(sums: F64) -> F64:
    """Relative errors of parts and words, ``(..., 2, W)``, of sums ``(..., 3, W, 3)``.

    Mixed types carry the weight of their tables. NaN where neither projection was measured.
    """
    error, source, product = (sums[..., i] for i in (_ERROR, _SOURCE, _PRODUCT))
    some = np.where(source > 0, source, 1)
    shrunk = (source - product) / some
    each = np.where(np.isnan(source), np.nan, error / some + SHRINK_WEIGHT * shrunk * shrunk)
    gate_up = each[..., :2, :]
    measured = ~np.isnan(gate_up).all(axis=-2)
    both = np.where(measured, np.nansum(gate_up, axis=-2), np.nan)
    found = np.stack([GATE_UP_WEIGHT * both, each[..., 2, :]], axis=-2)
    for word in MIXED_WORDS:
        found[..., WORDS.index(word)] *= MIX_WEIGHT
    result: F64 = found
    return result


def energies(sums: F64, imatrix: Imatrix | None) -> F64:
    """What each expert's errors weigh in its layer, ``(layers, experts)``, of all experts' sums.

    The sum of a layer is the energy that its experts add to its output. An expert whose down is
    not there counts as the mean of its layer, a layer without any as 1.
    """
    found = sums[:, :, 2, WORDS.index(LOSSLESS), _SOURCE].copy()
    for layer, row in enumerate(found):
        there = ~np.isnan(row)
        row[~there] = row[there].mean() if there.any() else 1.0
        tokens = np.ones(len(row))
        if imatrix is not None:
            row *= _gains(imatrix.gain(layer))
            # One more than was counted: what the text did not use, another text may.
            tokens += imatrix.tokens(layer)
        total = float(tokens @ row)
        # The root: a mean energy far above the others' is that of few tokens.
        row[:] = tokens * np.sqrt(row)
        row *= total / max(row.sum(), np.finfo(np.float64).tiny)
    return found


def _gains(gain: F32) -> F64:
    """Mean squared routing weights; an expert that was not used takes the mean of the others."""
    used = gain > 0
    filled = gain.astype(np.float64)
    filled[~used] = filled[used].mean() if used.any() else 1.0
    return filled


def reach(energy: F64) -> F64:
    """How much an error of each layer's output counts, ``(layers,)``, of energies by expert."""
    layers = energy.sum(axis=1)
    mean = layers.mean()
    stream = 1 + np.cumsum(layers) / (mean if mean > 0 else 1.0)
    found: F64 = np.arange(len(layers), 0, -1) / stream
    return found


def weigh(sums: F64, imatrix: Imatrix | None) -> F64:
    """Losses ``(layers, experts, 2, W)`` of all experts' sums; infinite where not measured.

    In units of the whole: if every down had the relative error r, their losses would add up to r.
    """
    energy = energies(sums, imatrix)
    share = energy * reach(energy)[:, None]
    total = share.sum()
    share /= total if total > 0 else 1.0
    losses = relative_errors(sums) * share[:, :, None, None]
    return np.where(np.isnan(losses), np.inf, losses)
