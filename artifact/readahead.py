"""Owns telling the kernel what will be read next, where many threads read many places of a file.

The kernel's own readahead follows one stream per open file; workers that read tensor after tensor
through one descriptor look like random access to it. An item is what one worker reads from begin
to end: one or more byte ranges, the first of which leads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ds4q.artifact.files import NotRegularError, advise, open_regular

WITHIN_BYTES = 16 << 20  # of the item being read
PRIME_BYTES = 256 << 20  # of each file, about what a disk reads while Python starts
AHEAD_BYTES = 48 << 20  # of the items that come next
STEP_BYTES = 4 << 20  # less than this is not worth a system call


def prime(paths: Iterable[Path]) -> None:
    """Start the disk on the beginning of files that will be read as soon as Python is ready.

    Loading the compiled kernels takes half a second, in which nothing else would ask the disk for
    anything. A file that cannot be opened is left to whoever reads it to complain about.
    """
    for path in paths:
        with suppress(OSError, NotRegularError):
            fd = open_regular(path)
            try:
                advise(fd, 0, PRIME_BYTES)
            finally:
                os.close(fd)


class Range(NamedTuple):
    """``nbytes`` at ``offset`` of the open file ``fd``."""

    fd: int
    offset: int
    nbytes: int


class ReadAhead:
    """Advises the kernel ahead of workers that take ``items`` in order."""

    def __init__(self, items: Sequence[Sequence[Range]]) -> None:
        self._items = items
        self._advised = [0] * len(items)
        sizes = (sum(part.nbytes for part in item) for item in items)
        self._starts = list(accumulate(sizes, initial=0))  # of each item, and the end of the last
        self._frontier = 0  # items before it were brought in: none is looked at twice
        self._lock = threading.Lock()

    def take(self, number: int) -> Callable[[int], None]:
        """A worker takes item ``number``: bring in its beginning and the items behind it.

        Returns a function to be called with the bytes of the leading range that were read.
        """
        self._reach(number, 0)
        horizon = self._starts[number + 1] + AHEAD_BYTES
        while (following := self._next_before(number, horizon)) is not None:
            self._reach(following, 0)
        return partial(self._reach, number)

    def _next_before(self, number: int, horizon: int) -> int | None:
        """The next item behind ``number`` to bring in, if it begins before ``horizon``."""
        with self._lock:
            following = max(self._frontier, number + 1)
            if following == len(self._items) or self._starts[following] >= horizon:
                return None
            self._frontier = following + 1
            return following

    def _reach(self, number: int, done: int) -> None:
        """The leading range of item ``number`` has been read up to byte ``done``."""
        lead = self._items[number][0]
        with self._lock:
            have = self._advised[number]
            wanted = min(lead.nbytes, done + WITHIN_BYTES)
            if (wanted - have < STEP_BYTES and wanted < lead.nbytes) or wanted <= have:
                return
            self._advised[number] = wanted
        advise(lead.fd, lead.offset + have, wanted - have)
        if have == 0:
            for part in self._items[number][1:]:
                advise(part.fd, part.offset, part.nbytes)
