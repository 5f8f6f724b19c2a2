"""Owns the tables that the exact encoder reads: for a source scale and a largest code, candidates.

Half a block of FP4 source has one E8M0 byte e and 16 codes, so what a code's weight loses to each
candidate scale is a number that can be known beforehand, in the very float32 of the general
encoder. A *page* serves one e and one largest magnitude code m; it holds, for chunks of 16
candidates,

    terms   f32 [chunks][16 source codes][16 candidates]   squared errors, or errors if weighted
    maps    u8  [chunks * 16 candidates][16 source codes]  target codes
    metas   u8  [chunks * 16 candidates]                   scale bytes

Candidates that cannot be chosen for any 16 codes are left out, and the last one fills the chunk:
of equal errors the first wins. Pages are built when an e is met for the first time and then never
change, so that threads share them; only building takes the lock.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from ds4q.artifact.numeric import E2M1, E8M0
from ds4q.quantize.exact.rules import U8, F32Array, Indices, Scheme
from ds4q.quantize.exact.survivors import survivors
from ds4q.quantize.exact.vectors import CHUNK_BYTES, LANES

CODES = 16  # source codes; 8 is the sign
MAGNITUDES = 8
MAP_BYTES = CODES
PAGE_BYTES = CHUNK_BYTES + LANES * (MAP_BYTES + 1)  # for each chunk
ALIGNMENT = 64
PLACE_BYTES = 16  # of a page, in the directory: address and number of chunks
DIRECTORY_BYTES = PLACE_BYTES * MAGNITUDES  # of one e

_FIRST = np.zeros(1, dtype=np.int64)


class Pages:
    """The pages of one scheme, weighted or not."""

    def __init__(self, scheme: Scheme, weighted: bool) -> None:
        self._scheme = scheme
        self._weighted = weighted
        self._lock = threading.Lock()
        self._kept: dict[int, U8] = {}
        self._directory = np.zeros((256, MAGNITUDES, 2), dtype=np.int64)

    def directory(self, present: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Address and number of chunks by (e, m), with pages of all e that are ``present``.

        ``present`` is bool ``(256,)``. The array is not changed later: more pages come with a new
        one.
        """
        if any(e not in self._kept for e in np.flatnonzero(present)):
            with self._lock:
                wanted = [int(e) for e in np.flatnonzero(present) if e not in self._kept]
                directory = self._directory.copy()
                pages = {e: self._pages(e, directory) for e in wanted}
                self._directory = directory
                self._kept |= pages
        return self._directory

    def _pages(self, e: int, directory: npt.NDArray[np.int64]) -> U8:
        """The memory of one e's pages; their places go to ``directory[e]``."""
        with np.errstate(over="ignore", invalid="ignore"):
            x = E2M1 * E8M0[e]
            codes, terms = self._scheme.candidates(np.where(np.isfinite(x), x, np.float32(0)))
            if not self._weighted:
                terms = terms * terms
            chosen = self._chosen(x, terms)
        # No sum with a value that is not finite may be finite: such a group is to be refused.
        terms[~np.isfinite(x)] = np.inf
        sizes = [-(-len(kept) // LANES) for kept in chosen]
        memory = np.zeros(PAGE_BYTES * sum(sizes) + ALIGNMENT * MAGNITUDES, dtype=np.uint8)
        memory = memory[-memory.ctypes.data % ALIGNMENT :]
        at = 0
        for m, (kept, chunks) in enumerate(zip(chosen, sizes, strict=True)):
            directory[e, m] = memory.ctypes.data + at, chunks
            filled = np.append(kept, np.repeat(kept[-1:], LANES * chunks - len(kept)))
            rows, maps, metas = terms[:, filled], codes[:, filled].T, self._scheme.metas[filled]
            if m == 0:  # no search: every candidate is the group of zeros
                rows = np.where(np.isfinite(x[:, None]), np.float32(0), rows)
                maps, metas = np.full_like(maps, self._scheme.zero), np.zeros_like(metas)
            for part in (rows.reshape(CODES, chunks, LANES).swapaxes(0, 1), maps, metas):
                raw = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                memory[at : at + len(raw)] = raw
                at += len(raw)
            at += -at % ALIGNMENT
        return memory

    def _chosen(self, x: F32Array, terms: F32Array) -> list[Indices]:
        """The candidates that can win, by m."""
        fixed = self._scheme.fixed(x[:MAGNITUDES], self._weighted)
        magnitude = np.arange(CODES) % MAGNITUDES
        size = 32 if self._scheme.wide else 16
        chosen = [_FIRST]
        for m in range(1, MAGNITUDES):
            if not np.isfinite(x[m]):
                chosen.append(_FIRST)
            elif fixed is not None:
                chosen.append(fixed[m])
            else:
                codes = magnitude <= m, magnitude == m
                chosen.append(survivors(np.abs(terms), *codes, size, self._weighted))
        return chosen
