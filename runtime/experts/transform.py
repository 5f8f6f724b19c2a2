"""Owns how the bytes that are read of an expert become the bytes that a slot holds.

Without a transform they are the same bytes, read into place in one step. A rank that multiplies a
part of every expert reads the whole and keeps its part. The file and its catalogue do not depend on
the number of ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import PayloadSizeError
from ds4q.artifact.formats.hfp4g32 import row_header
from ds4q.artifact.hfq import TensorEntry
from ds4q.artifact.types import HFP4G32, TensorType, type_of
from ds4q.runtime.errors import FillTransformError
from ds4q.runtime.experts.catalogue import Key, Record

U8 = npt.NDArray[np.uint8]
Parts = tuple[U8, U8, U8]  # gate, up, down

_SCALE_BYTES = 2  # of an HFP4G32 row's header: they belong to the row, the rest tells its length


class ExpertFillTransform(Protocol):
    """Makes what a slot holds of what was read; read and written lengths may differ."""

    def packed(self, record: Record) -> Record:
        """The expert as a slot holds it: other shapes and lengths, nowhere in the file.

        Raises
        ------
        FillTransformError : the expert cannot be transformed
        """

    def apply(self, record: Record, read: Parts, written: Parts) -> None:
        """Fill ``written``, of the lengths that ``packed`` tells, from the whole expert."""


class WidthSlice:
    """A rank's share of every expert: 1/ranks of its width, in rank order.

    Rows of gate and up, and the matching columns of down, so that the products of all ranks add up
    to the expert's. Columns are cut between blocks; every block is in exactly one rank's share.

    Parameters
    ----------
    rank, ranks : 0 <= rank < ranks

    Raises
    ------
    FillTransformError : there is no such rank
    """

    def __init__(self, rank: int, ranks: int) -> None:
        if not 0 <= rank < ranks:
            raise FillTransformError(
                "no such rank", expected=f"0 to {ranks - 1}", found=rank, remedy="choose another"
            )
        self.rank = rank
        self.ranks = ranks

    def packed(self, record: Record) -> Record:
        """See ``ExpertFillTransform``: gate, up [width / ranks, d], down [d, width / ranks]."""
        width, d = record.gate.shape
        share = self._share(record.key, width)
        return Record(
            record.key,
            self._cut(record.gate, (share, d)),
            self._cut(record.up, (share, d)),
            self._cut(record.down, (d, share)),
        )

    def apply(self, record: Record, read: Parts, written: Parts) -> None:
        """See ``ExpertFillTransform``."""
        width, d = record.gate.shape
        share = width // self.ranks
        for entry, whole, part in zip(record.entries[:2], read[:2], written[:2], strict=True):
            row_bytes = type_of(entry.type_id).row_bytes(d)
            first = self.rank * share * row_bytes
            np.copyto(part, whole[first : first + share * row_bytes])
        self._copy_columns(type_of(record.down.type_id), read[2], written[2], d, width)

    def _copy_columns(self, kind: TensorType, whole: U8, part: U8, d: int, width: int) -> None:
        share = width // self.ranks
        source = whole.reshape(d, kind.row_bytes(width))
        target = part.reshape(d, kind.row_bytes(share))
        head = kind.row_header_bytes
        nbytes = target.shape[1] - head
        first = head + self.rank * nbytes
        np.copyto(target[:, head:], source[:, first : first + nbytes])
        if head:
            target[:, :head] = row_header(share)
            target[:, :_SCALE_BYTES] = source[:, :_SCALE_BYTES]

    def _share(self, key: Key, width: int) -> int:
        if width % self.ranks:
            raise FillTransformError(
                f"width of expert {key.expert} of layer {key.layer}",
                expected=f"a multiple of {self.ranks}",
                found=width,
            )
        return width // self.ranks

    def _cut(self, entry: TensorEntry, shape: tuple[int, int]) -> TensorEntry:
        kind = type_of(entry.type_id)
        known = kind == HFP4G32 or not kind.row_header_bytes
        if not known or kind.tensor_header_bytes or kind.pad_blocks != 1:
            raise FillTransformError(
                f"rows of {kind.name} are not cut into columns", tensor=entry.name
            )
        try:
            kind.row_bytes(shape[1])
        except PayloadSizeError as error:
            raise FillTransformError(
                error.what, tensor=entry.name, expected=error.expected, found=error.found
            ) from None
        # Minus one: no read of a packed expert can be mistaken for one of the file.
        return replace(entry, shape=shape, nbytes=kind.payload_bytes(shape), offset=-1)
