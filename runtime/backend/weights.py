"""Owns packed weights as the backends take them: sizes checked once, bytes never decoded whole.

It multiplies nothing and reads no file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ds4q.artifact.types import type_of
from ds4q.runtime.errors import WeightError


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix [rows, cols] in its packed bytes; row results are what ``linear`` multiplies.

    Parameters
    ----------
    type_id : number in the type table
    rows, cols : output and input features
    data : (rows * row_bytes,) uint8, contiguous; kept, not copied, and must not be resized

    Raises
    ------
    WeightError : the bytes are not what type and shape demand
    """

    type_id: int
    rows: int
    cols: int
    data: npt.NDArray[np.uint8]
    row_bytes: int = field(init=False)
    address: int = field(init=False)

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
        object.__setattr__(self, "row_bytes", row_bytes)
        object.__setattr__(self, "address", data.ctypes.data)


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
    layout: tuple[int, int, int, int, int, int] = field(init=False)
    addresses: tuple[int, int, int] = field(init=False)

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
        # Experts of equal layout can share one kernel call.
        layout = (gate.type_id, gate.rows, gate.row_bytes, down.type_id, down.rows, down.row_bytes)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "addresses", (gate.address, up.address, down.address))
