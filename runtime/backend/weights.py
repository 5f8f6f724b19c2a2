"""Owns packed weights as the backends take them: sizes checked once, bytes never decoded whole.

It multiplies nothing and reads no file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ds4q.artifact.formats import Coding
from ds4q.artifact.types import ROCMFPX, type_of
from ds4q.runtime.backend.levels import decoder_of, level_table
from ds4q.runtime.errors import WeightError


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix [rows, cols] in its packed bytes; row results are what ``linear`` multiplies.

    Parameters
    ----------
    type_id : number in the type table
    rows, cols : output and input features
    data : (rows * row_bytes,) uint8, contiguous; kept, not copied, and must not be resized
    coding : what the type's bytes cannot be read without, see ``codec_for``

    Attributes
    ----------
    matrix : address of the bytes, address of the level table or 0, decoder and bytes of a row: a
        line of what the kernels take

    Raises
    ------
    WeightError : the bytes are not what type and shape demand
    CodingError : the coding that the type needs is absent or unknown
    """

    type_id: int
    rows: int
    cols: int
    data: npt.NDArray[np.uint8]
    coding: Coding | None = None
    row_bytes: int = field(init=False)
    decoder: int = field(init=False)
    levels: npt.NDArray[np.float32] | None = field(init=False)
    matrix: tuple[int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        kind = type_of(self.type_id)
        if self.rows <= 0 or self.cols <= 0 or not kind.block or self.cols % kind.block:
            raise WeightError(f"no {kind.name} matrix of this shape", found=(self.rows, self.cols))
        row_bytes = kind.row_bytes(self.cols)
        data = self.data
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise WeightError(
                "packed bytes are not one contiguous run",
                expected="uint8, 1-D",
                found=f"{data.dtype}, {data.ndim}-D",
            )
        if data.size != self.rows * row_bytes:
            raise WeightError(
                f"packed bytes of a {kind.name} matrix {self.rows} x {self.cols}",
                expected=f"{self.rows * row_bytes} bytes",
                found=f"{data.size} bytes",
            )
        levels = level_table(kind, self.coding) if kind in ROCMFPX else None
        decoder = decoder_of(kind.id, self.coding)
        at = 0 if levels is None else levels.ctypes.data
        object.__setattr__(self, "row_bytes", row_bytes)
        object.__setattr__(self, "decoder", decoder)
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "matrix", (data.ctypes.data, at, decoder, row_bytes))

    @property
    def address(self) -> int:
        """Where the packed bytes begin."""
        return self.matrix[0]


@dataclass(frozen=True, slots=True, eq=False)
class Expert:
    """The three matrices of a gated feed-forward: gate and up [width, d], down [d, width].

    Raises
    ------
    WeightError : the three do not fit each other
    """

    gate: Weight
    up: Weight
    down: Weight
    shape: tuple[int, int] = field(init=False)  # width, d
    matrices: npt.NDArray[np.int64] = field(init=False)  # ``Weight.matrix`` of the three in a row
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        gate, up, down = self.gate, self.up, self.down
        if (gate.type_id, gate.rows, gate.cols) != (up.type_id, up.rows, up.cols):
            raise WeightError(
                "gate and up of an expert differ in type or shape",
                expected=(gate.type_id, gate.rows, gate.cols),
                found=(up.type_id, up.rows, up.cols),
            )
        if (down.rows, down.cols) != (gate.cols, gate.rows):
            raise WeightError(
                "down of an expert does not map back",
                expected=(gate.cols, gate.rows),
                found=(down.rows, down.cols),
            )
        object.__setattr__(self, "shape", (gate.rows, gate.cols))
        object.__setattr__(self, "matrices", np.array(gate.matrix + up.matrix + down.matrix))
        object.__setattr__(self, "nbytes", sum(w.data.nbytes for w in (gate, up, down)))
