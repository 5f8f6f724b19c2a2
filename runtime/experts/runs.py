"""Owns which stretches of a file an expert is, and the pages around them. Reads none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ds4q.artifact.hfq import TensorEntry
from ds4q.runtime.experts.catalogue import Record

PAGE = 4096  # what O_DIRECT wants offsets, lengths and addresses to be multiples of


class Run(NamedTuple):
    """Tensors that lie back to back, in file order."""

    offset: int
    nbytes: int
    entries: tuple[TensorEntry, ...]

    @property
    def aligned(self) -> tuple[int, int]:
        """Offset and length of the enclosing range of whole pages."""
        start = self.offset // PAGE * PAGE
        return start, -(-(self.offset + self.nbytes - start) // PAGE) * PAGE


def runs(record: Record) -> Iterator[Run]:
    """The reads that an expert takes: one where it lies in one piece."""
    entries = sorted(record.entries, key=lambda entry: entry.offset)
    first = 0
    for last, entry in enumerate(entries, 1):
        end = entry.offset + entry.nbytes
        if last == len(entries) or entries[last].offset != end:
            start = entries[first].offset
            yield Run(start, end - start, tuple(entries[first:last]))
            first = last


def staging_bytes(record: Record) -> int:
    """Length of a buffer, wherever it begins, that the expert can be staged in.

    Each of at most three reads is longer than what it brings by less than two pages, and what is
    before the buffer's first page is left free.
    """
    return record.nbytes + 7 * PAGE
