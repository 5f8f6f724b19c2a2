"""Owns reading a source tensor in runs of rows, in buffers that a thread uses again and again.

Memory is bounded by a run of rows, not by a tensor: the largest source tensor is a gigabyte.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ds4q.artifact.readahead import Range
from ds4q.artifact.types import matrix_shape
from ds4q.quantize.audit import FP8_BLOCK, Audit, Unit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.convert import Rows, scale_grid

U8 = npt.NDArray[np.uint8]
CHUNK_BYTES = 1 << 20  # of packed rows: source and packed run fit a core's L2 cache together


class Buffers:
    """Named byte buffers of one thread; each grows to the largest request and is used again."""

    def __init__(self) -> None:
        self._held: dict[str, U8] = {}

    def take(self, name: str, nbytes: int) -> U8:
        """A view of ``nbytes`` bytes; valid until ``name`` is taken again."""
        held = self._held.get(name)
        if held is None or held.nbytes < nbytes:
            held = self._held[name] = np.empty(nbytes, dtype=np.uint8)
        return held[:nbytes]


def source_ranges(checkpoint: Checkpoint, unit: Unit) -> list[Range]:
    """Where the bytes of a weight and its scale lie, for ``ReadAhead``."""
    return [Range(checkpoint.shards[t.shard].fd, t.offset, t.nbytes) for t in unit.tensors]


def _unheard(nbytes: int) -> None:
    """Nobody reads ahead."""


class RowReader:
    """Reads rows of one source unit; the FP8 grid is read once and kept."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        audit: Audit,
        unit: Unit,
        buffers: Buffers,
        reached: Callable[[int], None] = _unheard,
    ) -> None:
        """``reached`` hears how many weight bytes were asked for, ahead of each read."""
        self._reached = reached
        self._checkpoint = checkpoint
        self._unit = unit
        self._buffers = buffers
        self._block = audit.dims.fp8_block or FP8_BLOCK
        self._experts = audit.dims.experts
        self._rows, self._k = matrix_shape(unit.info.logical_shape)
        self._row_bytes = unit.weight.nbytes // self._rows
        self._grid: npt.NDArray[np.float32] | None = None
        self._grid_raw: U8 | None = None
        if unit.kind == "fp8" and unit.scale is not None:
            self._grid_raw = checkpoint.read(unit.scale)
            self._grid = scale_grid(self._grid_raw, unit.scale.dtype, unit.scale.shape)

    def read(self, first: int, count: int) -> tuple[Rows, tuple[U8, ...]]:
        """Rows ``first`` .. ``first + count``, and the raw bytes that belong to them alone.

        The raw parts are (weight,) or, for FP4, (weight, scale); an FP8 grid belongs to the whole
        tensor and is given by ``whole_scale``.
        """
        unit = self._unit
        self._reached(first * self._row_bytes)
        weight = self._buffers.take("weight", count * self._row_bytes)
        self._checkpoint.read_into(unit.weight, weight, first * self._row_bytes)
        scale: U8 | npt.NDArray[np.float32] | None = self._grid
        parts: tuple[U8, ...] = (weight,)
        if unit.kind == "fp4" and unit.scale is not None:
            scale_row_bytes = unit.scale.nbytes // self._rows
            scale = self._buffers.take("scale", count * scale_row_bytes)
            self._checkpoint.read_into(unit.scale, scale, first * scale_row_bytes)
            parts = (weight, scale)
        rows = Rows(unit.kind, first, count, self._k, weight, scale, self._block, self._experts)
        return rows, parts

    @property
    def whole_scale(self) -> U8 | None:
        """The raw bytes of an FP8 scale grid; None where there is none."""
        return self._grid_raw
