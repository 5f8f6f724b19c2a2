"""Owns the compressor: every ``ratio`` tokens become one key-value entry, by a learned softmax.

At ratio 4 a window also looks at the one before it: raw rows are twice as wide, and an entry mixes
the first half of the older window's columns with the second half of its own. An entry exists once
its last token has been seen; an incomplete tail emits nothing.

T tokens, R ratio, w entry width, C raw columns (w, or 2 w where windows overlap).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.runtime.kv import CompressorCache
from ds4q.runtime.kvtype import Rows, narrow
from ds4q.runtime.model.norm import norm_row, rms_norm_reference
from ds4q.runtime.model.parts import Parts, Step
from ds4q.runtime.model.rope import rotate_reference, rotate_row

F32 = npt.NDArray[np.float32]


def append_entries_reference(
    values: F32,
    gates: F32,
    ape: F32,
    norm_weight: F32,
    eps: float,
    cos: F32,
    sin: F32,
    first: int,
    value_ring: F32,
    gate_ring: F32,
    entries: F32,
) -> None:
    """Take raw rows of positions ``first`` on; write every entry that they complete.

    Parameters
    ----------
    values, gates : f32 [T, C], the two projections of the tokens
    ape : f32 [R, C], added to a gate row by its place in the window
    norm_weight : f32 [w]
    cos, sin : f32 [windows, pairs] at the first token of each window completed here
    value_ring, gate_ring : f32 [capacity, C], raw rows by position; gates with ape. The capacity
        holds this batch and the two windows (one without overlap) that it may complete
    entries : f32 [windows completed here, w], written in place
    """
    ratio, width = len(ape), len(norm_weight)
    positions = first + np.arange(len(values))
    value_ring[positions % len(value_ring)] = values
    gate_ring[positions % len(gate_ring)] = gates + ape[positions % ratio]
    for i, number in enumerate(range(first // ratio, (first + len(values)) // ratio)):
        start = number * ratio
        own = np.arange(start, start + ratio) % len(value_ring)
        value, gate = value_ring[own, -width:], gate_ring[own, -width:]  # [R, w]
        if values.shape[1] > width and number > 0:
            before = np.arange(start - ratio, start) % len(value_ring)
            value = np.concatenate([value_ring[before, :width], value])
            gate = np.concatenate([gate_ring[before, :width], gate])
        weights = np.exp(gate - gate.max(axis=0))
        entry = (weights * value).sum(axis=0) / weights.sum(axis=0)
        entry = rms_norm_reference(entry[None], norm_weight, eps)[0]
        entries[i] = rotate_reference(entry, cos[i], sin[i])


@jit
def _pool(
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
def _append_entries_fast(
    values: F32,
    gates: F32,
    ape: F32,
    norm_weight: F32,
    eps: float,
    cos: F32,
    sin: F32,
    first: int,
    value_ring: F32,
    gate_ring: F32,
    entries: F32,
) -> None:
    ratio, width = ape.shape[0], norm_weight.shape[0]
    overlap = values.shape[1] > width
    top = np.empty(width, dtype=np.float32)
    total = np.empty(width, dtype=np.float32)
    done = 0
    for t in range(values.shape[0]):
        position = first + t
        slot = position % value_ring.shape[0]
        value, gate, shift = value_ring[slot], gate_ring[slot], ape[position % ratio]
        for i in range(values.shape[1]):
            value[i] = values[t, i]
            gate[i] = gates[t, i] + shift[i]
        if (position + 1) % ratio == 0:
            own = position + 1 - ratio
            start = own - ratio if overlap and own > 0 else own
            entry = entries[done]
            _pool(value_ring, gate_ring, start, own, position + 1, top, total, entry)
            norm_row(entry, norm_weight, eps, entry)
            rotate_row(entry, cos[done], sin[done])
            done += 1


append_entries = FastPath(append_entries_reference, _append_entries_fast)


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
        gates = self._backend.linear(self._wgate, x)
        made = np.empty((len(places.window_cos), len(self._norm)), np.float32)
        held = []
        for span, cache, windows in zip(step.spans, caches, places.windows, strict=True):
            append_entries(
                values[span.rows],
                gates[span.rows],
                self._ape,
                self._norm,
                self._eps,
                places.window_cos[windows],
                places.window_sin[windows],
                span.first,
                cache.values,
                cache.gates,
                made[windows],
            )
            if windows.start < windows.stop:
                entries = narrow(made[windows], cache.entries.rows.dtype)
                cache.entries.put(span.first // self._ratio, entries)
            held.append(cache.entries.rows)
        return held
