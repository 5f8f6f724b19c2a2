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
from ds4q.runtime.kvtable import Held
from ds4q.runtime.kvtype import STORED, KvType, Rows

F32 = npt.NDArray[np.float32]

_FIRST_ROWS = 256
_TILE_ROWS = 4  # kernels read entries in groups of four rows, the last one past the count


class Entries(Held):
    """Rows that only ever grow in number; capacity doubles, so copying stays linear in all."""

    __slots__ = ()

    def __init__(self, width: int, expected: int | None, stored: np.dtype[Any]) -> None:
        rows = _FIRST_ROWS if expected is None else expected
        super().__init__(np.zeros((_whole_tiles(rows), width), dtype=stored))

    def reserve(self, count: int) -> Rows:
        """The row array, [capacity >= count, width]; contents are kept."""
        if count > len(self.rows):
            rows = _whole_tiles(max(count, 2 * len(self.rows)))
            grown = np.zeros((rows, self.rows.shape[1]), self.rows.dtype)
            grown[: len(self.rows)] = self.rows
            self.hold(grown)
        return self.rows


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


def _slots(ring: Rows, first: int, end: int) -> npt.NDArray[np.int64]:
    """Where ``ring`` has the rows of positions ``first`` .. ``end - 1``."""
    return np.arange(first, end) % len(ring)


class CompressorCache:
    """State of one compressor: raw rows by position, and the entries of finished windows.

    Parameters
    ----------
    ratio : tokens per window
    width : columns of an entry; at ratio 4 raw rows are twice as wide and windows overlap
    batch : most tokens of one step
    max_context : most tokens of the sequence, or None to grow
    stored : how entries are kept

    Attributes
    ----------
    raw : f32 [2, ring, C], values and gates by position
    entries : of finished windows
    """

    def __init__(
        self, ratio: int, width: int, batch: int, max_context: int | None, stored: np.dtype[Any]
    ) -> None:
        shape = 2, ring_rows(ratio, batch), overlap(ratio) * width
        self.raw = Held(np.zeros(shape, dtype=np.float32))
        expected = None if max_context is None else max_context // ratio
        self.entries = Entries(width, expected, stored)
        self._ratio = ratio

    def rows(self, position: int) -> list[Rows]:
        """Copies of what steps from ``position`` on read: raw values, gates, and entries."""
        first = self._first(position)
        raw = [ring[_slots(ring, first, position)] for ring in self.raw.rows]
        return [*raw, self.entries.rows[: position // self._ratio].copy()]

    def load(self, position: int, rows: Sequence[Rows]) -> None:
        """Take what ``rows`` gave at ``position``."""
        *raw, entries = rows
        for ring, kept in zip(self.raw.rows, raw, strict=True):
            ring[_slots(ring, self._first(position), position)] = kept
        self.entries.reserve(len(entries))[: len(entries)] = entries

    def _first(self, position: int) -> int:
        """The first raw row that an entry yet to come looks at."""
        return max(0, position // self._ratio - overlap(self._ratio) + 1) * self._ratio

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.raw.rows.nbytes + self.entries.rows.nbytes


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
        self.window = Held(np.zeros((window_rows(config, batch), config.head_dim), stored))
        self._reach = config.sliding_window
        self.compressor: CompressorCache | None = None
        self.index: CompressorCache | None = None
        if ratio:
            self.compressor = CompressorCache(ratio, config.head_dim, batch, max_context, stored)
        if ratio == 4:
            plain = STORED["f32"]
            self.index = CompressorCache(ratio, config.index_head_dim, batch, max_context, plain)

    def rows(self, position: int) -> list[list[Rows]]:
        """Copies of what steps from ``position`` on read: window rows, then each compressor's."""
        ring = self.window.rows
        window = ring[_slots(ring, self._first(position), position)]
        return [[window], *(part.rows(position) for part in self._compressors)]

    def load(self, position: int, rows: Sequence[Sequence[Rows]]) -> None:
        """Take what ``rows`` gave at ``position``."""
        (window,), *others = rows
        ring = self.window.rows
        ring[_slots(ring, self._first(position), position)] = window
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
        return self.window.rows.nbytes + sum(part.nbytes for part in self._compressors)


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
