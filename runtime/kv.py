"""Owns what a sequence carries from one step to the next: window rows and compressed entries.

These two are kept as a KV type says; raw rows and the indexer's entries are float32 always.

A layer keeps a ring of window rows and, where it compresses, the raw rows of the windows in work
and the finished entries. Which of them count follows from ``State.position`` alone, and the rings
are longer than a batch. So a step that fails or is cancelled before the position moves has changed
nothing that a later step reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.runtime.config import ModelConfig
from ds4q.runtime.kvtype import STORED, KvType, Rows, narrow

F32 = npt.NDArray[np.float32]

_FIRST_ROWS = 256
_TILE_ROWS = 4  # kernels read entries in groups of four rows, the last one past the count


class Entries:
    """Rows that only ever grow in number; capacity doubles, so copying stays linear in all."""

    def __init__(self, width: int, expected: int | None, stored: np.dtype[Any]) -> None:
        rows = _FIRST_ROWS if expected is None else expected
        self.rows: Rows = np.zeros((_whole_tiles(rows), width), dtype=stored)

    def reserve(self, count: int) -> Rows:
        """The row array, [capacity >= count, width]; contents are kept."""
        if count > len(self.rows):
            rows = _whole_tiles(max(count, 2 * len(self.rows)))
            grown = np.zeros((rows, self.rows.shape[1]), self.rows.dtype)
            grown[: len(self.rows)] = self.rows
            self.rows = grown
        return self.rows

    def put(self, number: int, rows: Rows) -> None:
        """Write entries ``number`` on, next to those that are there."""
        end = number + len(rows)
        self.reserve(end)[number:end] = rows


def window_rows(config: ModelConfig, batch: int) -> int:
    """Rows of a window ring: a batch's own rows must not overwrite those its first token sees."""
    return config.sliding_window - 1 + batch


def overlap(ratio: int) -> int:
    """Windows that an entry looks at; raw rows are as many times as wide as an entry."""
    return 2 if ratio == 4 else 1


def ring_rows(ratio: int, batch: int) -> int:
    """Rows of a ring of raw rows: those of the windows in work, and a batch."""
    return overlap(ratio) * ratio + batch


def _whole_tiles(rows: int) -> int:
    return -(-rows // _TILE_ROWS) * _TILE_ROWS


def _put(ring: Rows, first: int, rows: Rows) -> None:
    """Write the rows of positions ``first`` on; no more than the ring has."""
    at = first % len(ring)
    ahead = min(len(rows), len(ring) - at)
    ring[at : at + ahead] = rows[:ahead]
    if ahead < len(rows):
        ring[: len(rows) - ahead] = rows[ahead:]


def _kept(ring: Rows, first: int, end: int) -> Rows:
    """A copy of the rows of positions ``first`` .. ``end - 1``."""
    return ring[np.arange(first, end) % len(ring)]


class CompressorCache:
    """State of one compressor: raw rows by position, and the entries of finished windows.

    Parameters
    ----------
    ratio : tokens per window
    width : columns of an entry; at ratio 4 raw rows are twice as wide and windows overlap
    batch : most tokens of one step
    max_context : most tokens of the sequence, or None to grow
    stored : how entries are kept
    """

    def __init__(
        self, ratio: int, width: int, batch: int, max_context: int | None, stored: np.dtype[Any]
    ) -> None:
        ring = (ring_rows(ratio, batch), overlap(ratio) * width)
        self.values: F32 = np.zeros(ring, dtype=np.float32)
        self.gates: F32 = np.zeros(ring, dtype=np.float32)
        expected = None if max_context is None else max_context // ratio
        self.entries = Entries(width, expected, stored)
        self._ratio = ratio

    def put(self, first: int, values: F32, gates: F32) -> None:
        """Write the raw rows of positions ``first`` on; a batch of them at most."""
        _put(self.values, first, values)
        _put(self.gates, first, gates)

    def rows(self, position: int) -> list[Rows]:
        """Copies of what steps from ``position`` on read: raw values, gates, and entries."""
        first = self._first(position)
        raw = [_kept(ring, first, position) for ring in (self.values, self.gates)]
        return [*raw, self.entries.rows[: position // self._ratio].copy()]

    def load(self, position: int, rows: Sequence[Rows]) -> None:
        """Take what ``rows`` gave at ``position``."""
        values, gates, entries = rows
        _put(self.values, self._first(position), values)
        _put(self.gates, self._first(position), gates)
        self.entries.put(0, entries)

    def _first(self, position: int) -> int:
        """The first raw row that an entry yet to come looks at."""
        return max(0, position // self._ratio - overlap(self._ratio) + 1) * self._ratio

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.values.nbytes + self.gates.nbytes + self.entries.rows.nbytes


class LayerCache:
    """State of one layer; ``compressor`` and ``index`` are None where the layer has none."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        batch: int,
        max_context: int | None,
        kv_type: KvType = "f32",
    ) -> None:
        ratio, stored = config.compress_ratios[layer], STORED[kv_type]
        self.window: Rows = np.zeros((window_rows(config, batch), config.head_dim), stored)
        self._reach = config.sliding_window
        self.compressor: CompressorCache | None = None
        self.index: CompressorCache | None = None
        if ratio:
            self.compressor = CompressorCache(ratio, config.head_dim, batch, max_context, stored)
        if ratio == 4:
            plain = STORED["f32"]
            self.index = CompressorCache(ratio, config.index_head_dim, batch, max_context, plain)

    def put(self, first: int, rows: F32) -> None:
        """Write the window rows of positions ``first`` on; a batch of them at most."""
        _put(self.window, first, narrow(rows, self.window.dtype))

    def rows(self, position: int) -> list[list[Rows]]:
        """Copies of what steps from ``position`` on read: window rows, then each compressor's."""
        window = _kept(self.window, self._first(position), position)
        return [[window], *(part.rows(position) for part in self._compressors)]

    def load(self, position: int, rows: Sequence[Sequence[Rows]]) -> None:
        """Take what ``rows`` gave at ``position``."""
        (window,), *others = rows
        _put(self.window, self._first(position), window)
        for part, own in zip(self._compressors, others, strict=True):
            part.load(position, own)

    def _first(self, position: int) -> int:
        """The first window row that the next token sees."""
        return max(0, position - self._reach + 1)

    @property
    def _compressors(self) -> list[CompressorCache]:
        return [part for part in (self.compressor, self.index) if part is not None]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.window.nbytes + sum(part.nbytes for part in self._compressors)


@dataclass(slots=True)
class State:
    """One sequence: ``position`` tokens are committed; the next token gets that position.

    ``number`` tells sequences of an engine apart in its records.
    """

    layers: list[LayerCache]
    position: int = field(default=0)
    number: int = field(default=0)

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def close(self) -> None:
        """Nothing: its memory goes with its last reference."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of what a sequence kept after ``position`` tokens: what later steps read, no more."""

    position: int
    layers: tuple[tuple[tuple[Rows, ...], ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(rows.nbytes for rows in self.arrays)

    @property
    def arrays(self) -> Iterator[Rows]:
        """All rows; none can be written to."""
        return (rows for layer in self.layers for part in layer for rows in part)


def snapshot(state: State) -> Snapshot:
    """A copy that no step of ``state`` changes."""
    position = state.position
    layers = tuple(tuple(map(tuple, layer.rows(position))) for layer in state.layers)
    copy = Snapshot(position, layers)
    for rows in copy.arrays:
        rows.setflags(write=False)
    return copy


def load(state: State, source: Snapshot) -> None:
    """Let an empty sequence go on from where ``source`` was taken."""
    for layer, rows in zip(state.layers, source.layers, strict=True):
        layer.load(source.position, rows)
    state.position = source.position


def new_state(
    config: ModelConfig, batch: int, max_context: int | None, kv_type: KvType = "f32"
) -> State:
    """An empty sequence for steps of at most ``batch`` tokens."""
    layers = range(config.num_hidden_layers)
    return State([LayerCache(config, n, batch, max_context, kv_type) for n in layers])


def state_bytes(config: ModelConfig, batch: int, max_context: int, kv_type: KvType = "f32") -> int:
    """Bytes of a sequence of ``max_context`` tokens, without making it."""
    floats = stored = 0
    for ratio in config.compress_ratios:
        stored += window_rows(config, batch) * config.head_dim
        if ratio:
            raw = 2 * ring_rows(ratio, batch) * overlap(ratio)
            entries = _whole_tiles(max_context // ratio)
            floats += raw * config.head_dim
            stored += entries * config.head_dim
            if ratio == 4:
                floats += (raw + entries) * config.index_head_dim
    return 4 * floats + STORED[kv_type].itemsize * stored
