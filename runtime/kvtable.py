"""Owns how compiled code reaches rows that several sequences keep: by a table of addresses.

It knows neither what the rows mean nor when they are read. One call then serves all sequences of a
step, whatever their number; an array argument each would cost a call each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.runtime.kvtype import Rows

I64 = npt.NDArray[np.int64]


class Held:
    """An array that a sequence keeps, and where it lies."""

    __slots__ = ("address", "rows")

    def __init__(self, rows: Rows) -> None:
        self.hold(rows)

    def hold(self, rows: Rows) -> None:
        """Keep ``rows``, C-contiguous, in place of what was kept."""
        self.rows = rows
        self.address: int = rows.ctypes.data


class Table:
    """What each sequence of a step keeps of one kind: arrays of one dtype and of one row shape.

    Attributes
    ----------
    arrays : of the sequences in the step's order; alive while the table is
    like : the first, whose type and strides are those of all
    addresses : int64 [N], where they begin
    """

    __slots__ = ("addresses", "arrays", "like")

    def __init__(self, held: Sequence[Held]) -> None:
        self.arrays = [each.rows for each in held]
        self.like = self.arrays[0]
        self.addresses: I64 = np.array([each.address for each in held])


def _type_rows_at(typingctx: Any, like: Any, address: Any, count: Any) -> Any:
    """The array of ``count`` rows at ``address``, its type and strides those of ``like``.

    Only from compiled code. The caller guarantees the bounds and keeps the array alive.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(like)
        given, out = made(context, builder, args[0]), made(context, builder)
        populate_array(
            out,
            data=builder.inttoptr(args[1], given.data.type),
            shape=[args[2], *cgutils.unpack_tuple(builder, given.shape)[1:]],
            strides=given.strides,
            itemsize=given.itemsize,
            meminfo=None,
        )
        return out._getvalue()

    return like(like, types.int64, types.int64), generate


rows_at = cast(Any, intrinsic(_type_rows_at))


def put_reference(rows: Rows, at: I64, owners: I64, table: Table) -> None:
    """Write ``rows`` [T, C] to the rows ``at`` [T] of what the sequences ``owners`` [T] keep."""
    for row, number, owner in zip(rows, at, owners, strict=True):
        table.arrays[owner][number] = row


@jit
def _put_rows(rows: Rows, at: I64, owners: I64, like: Rows, addresses: I64) -> None:
    for t in range(rows.shape[0]):
        source, target = rows[t], rows_at(like, addresses[owners[t]], at[t] + 1)[at[t]]
        for c in range(source.shape[0]):
            target[c] = source[c]


def _put_fast(rows: Rows, at: I64, owners: I64, table: Table) -> None:
    _put_rows(rows, at, owners, table.like, table.addresses)


put = FastPath(put_reference, _put_fast)
