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
from ds4q.runtime.kvtable import Table, put, rows_at
from ds4q.runtime.kvtype import narrow
from ds4q.runtime.model.norm import norm_row, rms_norm_reference
from ds4q.runtime.model.parts import Parts, Step
from ds4q.runtime.model.rope import rotate_reference, rotate_row

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


def take_reference(
    values: F32, gates: F32, ape: F32, positions: I64, owners: I64, raw: Table
) -> None:
    """Write raw rows to the rings of the sequences ``owners`` [T].

    Parameters
    ----------
    values, gates : f32 [T, C]
    ape : f32 [R, C], added to gates by place in the window
    positions : int64 [T]
    raw : f32 [2, capacity, C] each: values, and gates with what was added
    """
    gates = gates + ape[positions % len(ape)]
    for t, (position, owner) in enumerate(zip(positions, owners, strict=True)):
        ring = raw.arrays[owner]
        ring[:, position % ring.shape[1]] = values[t], gates[t]


@jit
def _take_rows(
    values: F32, gates: F32, ape: F32, positions: I64, owners: I64, like: F32, addresses: I64
) -> None:
    for t in range(values.shape[0]):
        ring, slot = rows_at(like, addresses[owners[t]], 2), positions[t] % like.shape[1]
        value, gate, added = ring[0, slot], ring[1, slot], ape[positions[t] % ape.shape[0]]
        for c in range(values.shape[1]):
            value[c] = values[t, c]
            gate[c] = gates[t, c] + added[c]


def _take_fast(values: F32, gates: F32, ape: F32, positions: I64, owners: I64, raw: Table) -> None:
    _take_rows(values, gates, ape, positions, owners, raw.like, raw.addresses)


def pool_reference(
    raw: Table,
    ratio: int,
    norm_weight: F32,
    eps: float,
    cos: F32,
    sin: F32,
    numbers: I64,
    owners: I64,
    entries: F32,
) -> None:
    """Make the entries of windows whose raw rows are all there.

    Parameters
    ----------
    raw : f32 [2, capacity, C] each, as ``take`` writes them
    norm_weight : f32 [w]
    cos, sin : f32 [windows, pairs] at the first token of each window
    numbers, owners : int64 [windows], which window of which sequence
    entries : f32 [windows, w], written in place
    """
    width = len(norm_weight)
    for i, (number, owner) in enumerate(zip(numbers, owners, strict=True)):
        value_ring, gate_ring = raw.arrays[owner]
        start = number * ratio
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
def _pool_windows(
    like: F32,
    addresses: I64,
    ratio: int,
    norm_weight: F32,
    eps: float,
    cos: F32,
    sin: F32,
    numbers: I64,
    owners: I64,
    entries: F32,
) -> None:
    width = norm_weight.shape[0]
    overlap = like.shape[2] > width
    top = np.empty(width, dtype=np.float32)
    total = np.empty(width, dtype=np.float32)
    for i in range(entries.shape[0]):
        ring = rows_at(like, addresses[owners[i]], 2)
        own, entry = numbers[i] * ratio, entries[i]
        start = own - ratio if overlap and own > 0 else own
        _mix(ring[0], ring[1], start, own, own + ratio, top, total, entry)
        norm_row(entry, norm_weight, eps, entry)
        rotate_row(entry, cos[i], sin[i])


def _pool_fast(
    raw: Table,
    ratio: int,
    norm_weight: F32,
    eps: float,
    cos: F32,
    sin: F32,
    numbers: I64,
    owners: I64,
    entries: F32,
) -> None:
    where = raw.like, raw.addresses
    _pool_windows(*where, ratio, norm_weight, eps, cos, sin, numbers, owners, entries)


take = FastPath(take_reference, _take_fast)
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

    def append(self, x: F32, step: Step, caches: Sequence[CompressorCache]) -> Table:
        """Take the step's tokens, x [T, d], to the cache of each span.

        Returns their entry rows as they are stored, those now complete filled in.
        """
        places = step.places[self._ratio]
        values, gates = self._backend.linear(self._wkv, x), self._backend.linear(self._wgate, x)
        raw = Table([cache.raw for cache in caches])
        take(values, gates, self._ape, step.positions, step.owners, raw)
        windows = places.window_numbers, places.window_owners
        if not len(places.window_numbers):
            return Table([cache.entries for cache in caches])
        made = np.empty((len(places.window_numbers), len(self._norm)), np.float32)
        turned = places.window_cos, places.window_sin
        pool(raw, self._ratio, self._norm, self._eps, *turned, *windows, made)
        for span, cache in zip(step.spans, caches, strict=True):
            cache.entries.reserve(span.end // self._ratio)
        entries = Table([cache.entries for cache in caches])
        put(narrow(made, entries.like.dtype), *windows, entries)
        return entries
