"""Owns what a sequence carries from one step to the next: window rows and compressed entries.

A layer keeps a ring of window rows and, where it compresses, the raw rows of the windows in work
and the finished entries. Which of them count follows from ``State.position`` alone, and the rings
are longer than a batch. So a step that fails or is cancelled before the position moves has changed
nothing that a later step reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ds4q.runtime.config import ModelConfig

F32 = npt.NDArray[np.float32]

_FIRST_ROWS = 256
_TILE_ROWS = 4  # kernels read entries in groups of four rows, the last one past the count


class Entries:
    """Rows that only ever grow in number; capacity doubles, so copying stays linear in all."""

    def __init__(self, width: int, expected: int | None) -> None:
        rows = _FIRST_ROWS if expected is None else expected
        self.rows: F32 = np.zeros((_whole_tiles(rows), width), dtype=np.float32)

    def reserve(self, count: int) -> F32:
        """The row array, [capacity >= count, width]; contents are kept."""
        if count > len(self.rows):
            grown = np.zeros(
                (_whole_tiles(max(count, 2 * len(self.rows))), self.rows.shape[1]), np.float32
            )
            grown[: len(self.rows)] = self.rows
            self.rows = grown
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


class CompressorCache:
    """State of one compressor: raw rows by position, and the entries of finished windows.

    Parameters
    ----------
    ratio : tokens per window
    width : columns of an entry; at ratio 4 raw rows are twice as wide and windows overlap
    batch : most tokens of one step
    max_context : most tokens of the sequence, or None to grow
    """

    def __init__(self, ratio: int, width: int, batch: int, max_context: int | None) -> None:
        ring = (ring_rows(ratio, batch), overlap(ratio) * width)
        self.values: F32 = np.zeros(ring, dtype=np.float32)
        self.gates: F32 = np.zeros(ring, dtype=np.float32)
        self.entries = Entries(width, None if max_context is None else max_context // ratio)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.values.nbytes + self.gates.nbytes + self.entries.rows.nbytes


class LayerCache:
    """State of one layer; ``compressor`` and ``index`` are None where the layer has none."""

    def __init__(
        self, config: ModelConfig, layer: int, batch: int, max_context: int | None
    ) -> None:
        ratio = config.compress_ratios[layer]
        self.window: F32 = np.zeros((window_rows(config, batch), config.head_dim), np.float32)
        self.compressor: CompressorCache | None = None
        self.index: CompressorCache | None = None
        if ratio:
            self.compressor = CompressorCache(ratio, config.head_dim, batch, max_context)
        if ratio == 4:
            self.index = CompressorCache(ratio, config.index_head_dim, batch, max_context)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        parts = [part.nbytes for part in (self.compressor, self.index) if part is not None]
        return self.window.nbytes + sum(parts)


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


def new_state(config: ModelConfig, batch: int, max_context: int | None) -> State:
    """An empty sequence for steps of at most ``batch`` tokens."""
    return State(
        [LayerCache(config, layer, batch, max_context) for layer in range(config.num_hidden_layers)]
    )


def state_bytes(config: ModelConfig, batch: int, max_context: int) -> int:
    """Bytes of a sequence of ``max_context`` tokens, without making it."""
    floats = 0
    for ratio in config.compress_ratios:
        floats += window_rows(config, batch) * config.head_dim
        widths = ((config.head_dim,) if ratio else ()) + (
            (config.index_head_dim,) if ratio == 4 else ()
        )
        for width in widths:
            floats += 2 * ring_rows(ratio, batch) * overlap(ratio) * width
            floats += _whole_tiles(max_context // ratio) * width
    return 4 * floats
