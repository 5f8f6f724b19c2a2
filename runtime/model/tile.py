"""Owns one vector primitive: a 4 x 16 tile of a matrix product, in float32 and in a fixed order.

numba vectorises no sum over floats (that would reorder it), so the lanes are written out here with
llvmlite: 16 columns side by side, each a plain running sum. A column's value is the same whatever
the CPU's vector width and whatever lies in the other columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import llvmlite.ir as ir
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

F32 = npt.NDArray[np.float32]

ROWS = 4
LANES = 16

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _pointer(builder: Any, array: Any, offset: Any, kind: Any) -> Any:
    raw = builder.bitcast(array.data, ir.IntType(8).as_pointer())
    return builder.bitcast(builder.gep(raw, [offset]), kind.as_pointer())


def _broadcast(builder: Any, scalar: Any) -> Any:
    first = builder.insert_element(
        ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0)
    )
    spread = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, first, spread)


def _emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    a, b, out = (
        context.make_array(kind)(context, builder, value)
        for kind, value in zip(signature.args, args, strict=True)
    )
    steps = cgutils.unpack_tuple(builder, a.shape)[1]
    a_row, a_step = cgutils.unpack_tuple(builder, a.strides)
    b_step = cgutils.unpack_tuple(builder, b.strides)[0]
    out_row = cgutils.unpack_tuple(builder, out.strides)[0]
    rows = [ir.Constant(steps.type, r) for r in range(ROWS)]

    sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(ROWS)]
    for total in sums:
        builder.store(ir.Constant(_VECTOR, [0.0] * LANES), total)
    with cgutils.for_range(builder, steps, intp=steps.type) as loop:
        lanes = builder.load(_pointer(builder, b, builder.mul(loop.index, b_step), _VECTOR))
        lanes.align = 4
        for row, total in zip(rows, sums, strict=True):
            offset = builder.add(builder.mul(row, a_row), builder.mul(loop.index, a_step))
            factor = builder.load(_pointer(builder, a, offset, _FLOAT))
            product = builder.fmul(_broadcast(builder, factor), lanes)
            builder.store(builder.fadd(builder.load(total), product), total)
    for row, total in zip(rows, sums, strict=True):
        target = _pointer(builder, out, builder.mul(row, out_row), _VECTOR)
        builder.store(builder.load(total), target).align = 4
    return context.get_dummy_value()


def _type_tile(typingctx: Any, a: Any, b: Any, out: Any) -> Any:
    """``out[r, :16] = sum_i a[r, i] * b[i, :16]`` for r in 0..3, summed in the order of i.

    Only from compiled code. ``a`` f32 [4, n] of any strides; ``b`` f32 [n, >= 16] and ``out``
    f32 [4, >= 16] with contiguous rows. The caller guarantees the shapes: nothing is checked.
    """
    for kind in (a, b, out):
        if not (isinstance(kind, types.Array) and kind.ndim == 2 and kind.dtype == types.float32):
            return None
    return types.void(a, b, out), _emit


tile = cast(Callable[[F32, F32, F32], None], intrinsic(_type_tile))
