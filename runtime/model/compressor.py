"""Owns the compressor: every ``ratio`` tokens become one key-value entry, by a learned softmax.

At ratio 4 a window also looks at the one before it: raw rows are twice as wide, and an entry mixes
the first half of the older window's columns with the second half of its own. An entry exists once
its last token has been seen; an incomplete tail emits nothing.

R ratio, w entry width, C raw columns (w, or 2 w where windows overlap).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.runtime.kv import CompressorCache
from ds4q.runtime.kvtype import Rows, narrow
from ds4q.runtime.model.norm import norm_row, rms_norm_reference
from ds4q.runtime.model.parts import Parts, Places, Step
from ds4q.runtime.model.rope import rotate_reference, rotate_row

F32 = npt.NDArray[np.float32]


def pool_reference(
    value_ring: F32,
    gate_ring: F32,
    ratio: int,
    norm_weight: F32,
    eps: float,
    cos: F32,
    sin: F32,
    first: int,
    entries: F32,
) -> None:
    """Write entries ``first`` on, of windows whose raw rows are all there.

    Parameters
    ----------
    value_ring, gate_ring : f32 [capacity, C], raw rows by position; gates with what is added by
        place in the window
    norm_weight : f32 [w]
    cos, sin : f32 [windows, pairs] at the first token of each window
    entries : f32 [windows, w], written in place
    """
    width = len(norm_weight)
    for i in range(len(entries)):
        start = (first + i) * ratio
        own = np.arange(start, start + ratio) % len(value_ring)
        value, gate = value_ring[own, -width:], gate_ring[own, -width:]  # [R, w]
        if value_ring.shape[1] > width and start > 0:
            before = np.arange(start - ratio, start) % len(value_ring)
            value = np.concatenate([value_ring[before, :width], value])
            gate = np.concatenate([gate_ring[before, :width], gate])
        weights = np.exp(gate - gate.max(axis=0))
        entry = (weights * value).sum(axis=0) / weights.sum(axis=0)
        entry = rms_norm_reference(entry[None], norm_weight, eps)[0]
        entries[i] = rotate_reference(entry, cos[i], sin[i])


@jit
def _mix(
    value_ring: F32,
    gate_ring: F32,
    start: int,
    own: int,
    stop: int,
    top: F32,
    total: F32,
    entry: F32,
) -> None:
    """Softmax-weighted sum per channel over positions start .. stop - 1, into ``entry`` [w].

    Positions before ``own`` give their first w columns, the others their last w.
    """
    width, columns = entry.shape[0], value_ring.shape[1]
    for i in range(width):
        top[i] = -np.inf
        total[i] = 0.0
        entry[i] = 0.0
    for position in range(start, stop):
        low = 0 if position < own else columns - width
        gate = gate_ring[position % gate_ring.shape[0], low : low + width]
        for i in range(width):
            top[i] = gate[i] if gate[i] > top[i] else top[i]
    for position in range(start, stop):
        low = 0 if position < own else columns - width
        slot = position % gate_ring.shape[0]
        gate = gate_ring[slot, low : low + width]
        value = value_ring[slot, low : low + width]
        for i in range(width):
            weight = np.exp(gate[i] - top[i])
            total[i] += weight
            entry[i] += weight * value[i]
    for i in range(width):
        entry[i] /= total[i]


@jit
def _pool_fast(
    value_ring: F32,
    gate_ring: F32,
    ratio: int,
    norm_weight: F32,
    eps: float,
    cos: F32,
    sin: F32,
    first: int,
    entries: F32,
) -> None:
    width = norm_weight.shape[0]
    overlap = value_ring.shape[1] > width
    top = np.empty(width, dtype=np.float32)
    total = np.empty(width, dtype=np.float32)
    for i in range(entries.shape[0]):
        own, entry = (first + i) * ratio, entries[i]
        start = own - ratio if overlap and own > 0 else own
        _mix(value_ring, gate_ring, start, own, own + ratio, top, total, entry)
        norm_row(entry, norm_weight, eps, entry)
        rotate_row(entry, cos[i], sin[i])


pool = FastPath(pool_reference, _pool_fast)


class Compressor:
    """One compressor with its weights: of attention, or of the indexer with its own.

    Parameters
    ----------
    name : tensor name up to ``.wkv.weight``, ``.wgate.weight``, ``.ape``, ``.norm.weight``
    width : columns of an entry
    """

    def __init__(self, parts: Parts, name: str, ratio: int, width: int) -> None:
        c = parts.config
        columns = 2 * width if ratio == 4 else width
        self._backend = parts.backend
        self._ratio = ratio
        self._eps = c.rms_norm_eps
        self._wkv = parts.source.matrix(f"{name}.wkv.weight", columns, c.hidden_size)
        self._wgate = parts.source.matrix(f"{name}.wgate.weight", columns, c.hidden_size)
        self._ape = parts.source.values(f"{name}.ape", ratio, columns)
        self._norm = parts.source.values(f"{name}.norm.weight", width)

    def append(self, x: F32, step: Step, caches: Sequence[CompressorCache]) -> list[Rows]:
        """Take the step's tokens, x [T, d], to the cache of each span.

        Returns the entry rows of each as they are stored, those now complete filled in.
        """
        places = step.places[self._ratio]
        values = self._backend.linear(self._wkv, x)
        gates = self._backend.linear(self._wgate, x) + self._ape[places.in_window]
        held = []
        for span, cache, windows in zip(step.spans, caches, places.windows, strict=True):
            cache.put(span.first, values[span.rows], gates[span.rows])
            if windows.start < windows.stop:
                self._complete(span.first // self._ratio, places, windows, cache)
            held.append(cache.entries.rows)
        return held

    def _complete(self, first: int, places: Places, windows: slice, cache: CompressorCache) -> None:
        """Make the entries ``first`` on, of a span's ``windows``."""
        made = np.empty((windows.stop - windows.start, len(self._norm)), np.float32)
        pool(
            cache.values,
            cache.gates,
            self._ratio,
            self._norm,
            self._eps,
            places.window_cos[windows],
            places.window_sin[windows],
            first,
            made,
        )
        cache.entries.put(first, narrow(made, cache.entries.rows.dtype))
