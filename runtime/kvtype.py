"""Owns how the rows that a sequence keeps are stored: as float32, or rounded to 16 bits.

Arithmetic is float32 whatever the type: rows are rounded once when they are written, to nearest
and on ties to even, and widened exactly when they are read. Beyond what f16 can hold is infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic

from ds4q.artifact.numeric import bf16_to_f32
from ds4q.runtime.backend.vectors import FLOAT, I32, cpu_of, half_to_float

F32 = npt.NDArray[np.float32]
KvType = Literal["f32", "f16", "bf16"]
Rows = npt.NDArray[Any]
"""Rows as they are stored: float32, the bits of bf16 as uint16, or those of f16 as int16. Compiled
code knows no 16-bit floats, and tells the two apart by the sign."""

STORED: dict[KvType, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.int16),
    "bf16": np.dtype(np.uint16),
}


def narrow(rows: F32, stored: np.dtype[Any]) -> Rows:
    """``rows`` as they are stored; themselves where that is float32."""
    if stored == np.float32:
        return rows
    if stored == np.int16:
        with np.errstate(over="ignore"):
            return rows.astype(np.float16).view(np.int16)
    bits = np.ascontiguousarray(rows).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(rows), np.uint32(0x7FC0), nearest).astype(np.uint16)


def widen(rows: Rows) -> F32:
    """Stored rows as float32; themselves where they are."""
    if rows.dtype == np.float32:
        return rows
    return bf16_to_f32(rows) if rows.dtype == np.uint16 else rows.view(np.float16).astype("f4")


def _type_widened(typingctx: Any, value: Any) -> Any:
    """One stored value as float32; only from compiled code."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value == types.float32:
            return args[0]
        if value == types.int16:
            return half_to_float(builder, cpu_of(context), args[0])
        return builder.bitcast(builder.shl(builder.zext(args[0], I32), I32(16)), FLOAT)

    return types.float32(value), generate


widened = cast(Callable[[Any], np.float32], intrinsic(_type_widened))
