"""Owns which experts are measured at which types, and what all of them cost in bytes and accuracy.

A small model has all its experts measured at all types. In a large one some experts of each layer,
the pilot, say which types are worth measuring on the others. What a measurement is, ``losses.py``
says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds4q.artifact.types import HFP4G32
from ds4q.quantize.errors import JobError
from ds4q.quantize.grid import PROJECTIONS, ExpertDims
from ds4q.quantize.losses import F64, LOSSLESS, VARIANTS_107, WORDS, Meter, weigh
from ds4q.quantize.recipe import EXPERT_TYPES, PARTS, ExpertPart, part_of

I64 = npt.NDArray[np.int64]
Advance = Callable[[int], None]
PartWords = dict[ExpertPart, list[str]]

FEW_EXPERTS = 16  # of a layer, no more: all are measured at all types
PILOT_EXPERTS = 4  # of a layer with more


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What each type costs for each part of each routed expert.

    Attributes
    ----------
    losses : (layers, experts, 2, words), infinite where a type is closed or not worth measuring
    nbytes : of the same shape, payload bytes; 0 where no tensor is
    weights : of all routed experts
    variants : loss of each variant of type 107 that was open, if all of the pilot had it; all but
        the best are closed: an artifact has one
    """

    losses: F64
    nbytes: I64
    weights: int
    variants: Mapping[str, float]


def measure(meter: Meter, variant_107: str | None, advance: Advance) -> Measured:
    """Measure all experts of ``meter``; ``variant_107`` None leaves the choice open.

    Raises ``JobError`` for an unknown variant, ``SourceError`` for a value that is not legal.
    """
    variants = [w for w in VARIANTS_107 if variant_107 in (None, EXPERT_TYPES[w][1])]
    if not variants:
        raise JobError("unknown variant of type 107", found=variant_107)
    words = _candidates(meter.dims, variants)
    dims = meter.dims
    sums = np.full((dims.layers, dims.experts, len(PROJECTIONS), len(WORDS), 3), np.nan)
    count = dims.experts if dims.experts <= FEW_EXPERTS else PILOT_EXPERTS
    pilot = [(2 * i + 1) * dims.experts // (2 * count) for i in range(count)]
    for layer in range(dims.layers):
        sums[layer, pilot] = meter.measure(layer, pilot, words, advance)
    losses = weigh(sums, meter.imatrix)[:, pilot]
    totals = _totals(losses, words)
    best = min(totals, key=totals.__getitem__) if totals else None
    for word in VARIANTS_107:
        if word != best:
            words = {part: [w for w in some if w != word] for part, some in words.items()}
    _close_others(sums, words)
    rest = [expert for expert in range(dims.experts) if expert not in pilot]
    if rest:
        words = {part: _worthwhile(losses, words[part], dims, part) for part in PARTS}
        _close_others(sums, words)
        for layer in range(dims.layers):
            sums[layer, rest] = meter.measure(layer, rest, words, advance)
    shapes = [unit.info.logical_shape for unit in meter.units.values()]
    weights = sum(rows * k for rows, k in shapes)
    return Measured(weigh(sums, meter.imatrix), _sizes(meter), weights, totals)


def _candidates(dims: ExpertDims, variants: Sequence[str]) -> PartWords:
    """Types that each part can have and that are not dearer than FP4 kept as it is."""
    found: PartWords = {part: [] for part in PARTS}
    for part, word in itertools.product(PARTS, WORDS):
        kind, k = EXPERT_TYPES[word][0], dims.k(part)
        closed = word in VARIANTS_107 and word not in variants
        closed |= word == "rocmfp3-mix" and part == "gate-up"
        if closed or not k or (kind.row_multiple and k % kind.row_multiple):
            continue
        if word == LOSSLESS or kind.row_bytes(k) < HFP4G32.row_bytes(k):
            found[part].append(word)
    return found


def _totals(losses: F64, words: PartWords) -> dict[str, float]:
    """Loss of each open variant over the experts that were measured."""
    totals = {}
    for at, word in enumerate(WORDS):
        if word in VARIANTS_107 and any(word in some for some in words.values()):
            column = losses[..., at]
            totals[word] = float(column[np.isfinite(column)].sum())
    return totals


def _worthwhile(losses: F64, words: list[str], dims: ExpertDims, part: ExpertPart) -> list[str]:
    """The types of a part that none as small beats in the pilot."""
    sizes = {word: EXPERT_TYPES[word][0].row_bytes(dims.k(part)) for word in words}
    totals = {w: losses[:, :, PARTS.index(part), WORDS.index(w)].sum() for w in words}
    return [
        word
        for word in words
        if not any(
            sizes[other] <= sizes[word] and (totals[other], other) < (totals[word], word)
            for other in words
        )
    ]


def _close_others(sums: F64, words: PartWords) -> None:
    """Forget what was measured of types that are not among ``words``."""
    for at, name in enumerate(PROJECTIONS):
        closed = [i for i, word in enumerate(WORDS) if word not in words[part_of(name)]]
        sums[:, :, at, closed] = np.nan


def _sizes(meter: Meter) -> I64:
    """Payload bytes ``(layers, experts, 2, W)``; 0 where no tensor is, or for closed types."""
    dims = meter.dims
    found = np.zeros((dims.layers, dims.experts, len(PARTS), len(WORDS)), np.int64)
    known: dict[tuple[int, ...], list[int]] = {}
    for (layer, expert, projection), unit in meter.units.items():
        shape = unit.info.logical_shape
        if shape not in known:
            kinds = [EXPERT_TYPES[word][0] for word in WORDS]
            fits = [not (kind.row_multiple and shape[-1] % kind.row_multiple) for kind in kinds]
            known[shape] = [
                kind.payload_bytes(shape) if fit else 0
                for kind, fit in zip(kinds, fits, strict=True)
            ]
        found[layer, expert, PARTS.index(part_of(projection))] += known[shape]
    return found
