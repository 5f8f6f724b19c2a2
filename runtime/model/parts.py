"""Owns what the operators of the model are built from and called with. No arithmetic.

``WeightSource`` keeps the model apart from the artifact: tests and later loaders bring their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ds4q.runtime.backend.cpu import CpuBackend
from ds4q.runtime.backend.weights import Expert, Weight
from ds4q.runtime.backend.workers import Workers
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.experts.store import ExpertStore, Phase
from ds4q.runtime.kv import LayerCache
from ds4q.runtime.model import rope

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
Trace = Callable[[str, npt.NDArray[Any]], None]
Observer = Callable[[int, I64, F32, F32, Mapping[int, Expert]], None]
"""Called before routed experts of a layer run: layer, expert ids [T, K], their weights [T, K], the
input [T, d] of all of them, and the experts that run now by id. Where they are not all in memory
at once, it is called for one part of them after another."""

# What sharing out a call costs, as multiplications.
_SHARED_WORK = 1 << 22

Routed = Callable[[int, I64, F32, F32], None]
"""Called before the experts of a layer are asked for: layer, ids [T, K], gate logits [T, E], and
the input [T, d] that they were made from."""


class WeightSource(Protocol):
    """Gives the model its tensors by name; each method refuses another shape with an error."""

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        """A packed [rows, cols] matrix."""

    def values(self, name: str, *shape: int) -> F32:
        """A small tensor, decoded."""

    def ids(self, name: str, rows: int, cols: int, below: int) -> npt.NDArray[np.int32]:
        """A table of ids in 0 .. below - 1."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an operator's constructor takes."""

    config: ModelConfig
    source: WeightSource
    experts: ExpertStore
    backend: CpuBackend
    workers: Workers


def share(workers: Workers, kernel: Callable[[int, int], None], units: int, unit_work: int) -> None:
    """Run ``kernel`` over ``range(units)``, on several threads where that pays.

    ``unit_work`` is roughly the multiplications of one unit.
    """
    if units > 1 and workers.pays(units * unit_work, _SHARED_WORK):
        workers.run(kernel, units)
    else:
        kernel(0, units)


class Span(NamedTuple):
    """Tokens of one sequence that go through a step together with those of others.

    They are the rows ``rows`` of all that has one row per token, and stand at positions ``first``
    on; ``layers`` is what their sequence keeps.
    """

    rows: slice
    first: int
    layers: Sequence[LayerCache]

    @property
    def end(self) -> int:
        """The position after the last of them."""
        return self.first + self.rows.stop - self.rows.start


@dataclass(frozen=True, slots=True)
class Places:
    """What positions mean to the layers of one ratio, for the tokens of one step.

    ``cos``, ``sin`` [T, pairs] at the tokens; ``counts`` [T] entries each token sees, ``most`` of
    them. Of the W windows that the step completes: ``window_cos``, ``window_sin`` [W, pairs] at the
    first token, ``window_numbers`` [W], and ``window_owners`` [W], the spans that they belong to.
    """

    cos: F32
    sin: F32
    counts: I64
    most: int
    window_cos: F32
    window_sin: F32
    window_numbers: I64
    window_owners: I64

    @staticmethod
    def of(frequencies: npt.NDArray[np.float64], ratio: int, positions: I64, owners: I64) -> Places:
        """Places of ``positions`` [T] of the spans ``owners`` [T]."""
        cos, sin = rope.turns(frequencies, positions)
        none = positions[:0]
        if not ratio:
            return Places(cos, sin, np.zeros_like(positions), 0, cos[:0], sin[:0], none, none)
        counts = (positions + 1) // ratio
        most = int(counts.max())
        last = np.flatnonzero((positions + 1) % ratio == 0)
        if not len(last):
            return Places(cos, sin, counts, most, cos[:0], sin[:0], none, none)
        turned = rope.turns(frequencies, positions[last] + 1 - ratio)
        return Places(cos, sin, counts, most, *turned, counts[last] - 1, owners[last])


@dataclass(frozen=True, slots=True)
class Step:
    """One batch of tokens on its way through the layers.

    ``ids`` int64 [T] belong to the sequences of ``spans``; token t to the span ``owners[t]``, where
    it stands at ``positions[t]``. ``places`` holds one entry per ratio. ``trace``, ``observer`` and
    ``routed`` look on, where somebody wants to know; ``phase`` is for statistics.
    """

    ids: I64
    spans: Sequence[Span]
    positions: I64
    owners: I64
    places: dict[int, Places]
    trace: Trace | None = None
    observer: Observer | None = None
    phase: Phase = "prefill"
    routed: Routed | None = None

    @staticmethod
    def of(
        ids: I64,
        spans: Sequence[Span],
        frequencies: Mapping[int, npt.NDArray[np.float64]],
        *,
        trace: Trace | None = None,
        observer: Observer | None = None,
        phase: Phase = "prefill",
        routed: Routed | None = None,
    ) -> Step:
        """A step of ``spans``, in layers that rotate by ``frequencies``, by ratio."""
        rows = np.array([(s.rows.start, s.rows.stop, s.first) for s in spans])
        starts, stops, firsts = rows.T
        owners = np.repeat(np.arange(len(spans)), stops - starts)
        positions = np.arange(len(ids)) + (firsts - starts)[owners]
        places = {
            ratio: Places.of(turned, ratio, positions, owners)
            for ratio, turned in frequencies.items()
        }
        return Step(ids, spans, positions, owners, places, trace, observer, phase, routed)
