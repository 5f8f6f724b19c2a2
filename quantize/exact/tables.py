"""Owns the tables that the exact encoder reads: what each candidate would cost each source code.

Half a block of FP4 source has one E8M0 byte e and 16 codes, so what a code's weight loses to each
candidate scale can be known beforehand, in the very float32 of the general encoder. A *page* holds,
for chunks of 16 candidates of one e,

    terms   f32 [chunks][16 source codes][16 candidates]   squared errors, or errors if weighted
    maps    u8  [chunks * 16 candidates][16 source codes]  target codes
    metas   u8  [chunks * 16 candidates]                   scale bytes

Candidates that cannot be chosen for any 16 codes are left out, and the last one fills the chunk:
of equal errors the first wins. Pages are built when an e is met for the first time and then never
change, so that threads share them; only building takes the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ds4q.artifact.numeric import E2M1, E8M0
from ds4q.quantize.exact.rules import (
    OFFSET_BYTES,
    SCALE_BYTES,
    U8,
    F32Array,
    Indices,
    Scheme,
    affine_candidates,
)
from ds4q.quantize.exact.survivors import survivors
from ds4q.quantize.exact.vectors import CHUNK_BYTES, LANES

CODES = 16  # source codes; 8 is the sign
MAGNITUDES = 8
MAP_BYTES = CODES
PAGE_BYTES = CHUNK_BYTES + LANES * (MAP_BYTES + 1)  # for each chunk
ALIGNMENT = 64
PLACE_BYTES = 16  # of a page, in the directory: address and number of chunks
AFFINE_PLACES = 256  # of one e: scales by offset byte, then offsets by scale byte
AFFINE_ZERO = 127  # the place of a block of zeros, where no offset byte is
AFFINE_OFFSETS = 128

_ALL = np.ones(CODES, dtype=np.bool_)
_FIRST = np.zeros(1, dtype=np.int64)


class Pages:
    """Pages by e and place.

    Parameters
    ----------
    build : the pages of an e, one for each place
    """

    def __init__(self, places: int, build: Callable[[int], list[U8]]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._kept: dict[int, U8] = {}
        self._directory = np.zeros((256, places, PLACE_BYTES // 8), dtype=np.int64)

    def directory(self, present: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Address and number of chunks by (e, place), with pages of all e that are ``present``.

        ``present`` is bool ``(256,)``. The array is not changed later: more pages come with a new
        one.
        """
        if any(e not in self._kept for e in np.flatnonzero(present)):
            with self._lock:
                wanted = [int(e) for e in np.flatnonzero(present) if e not in self._kept]
                directory = self._directory.copy()
                with np.errstate(over="ignore"):
                    memories = {e: _place(self._build(e), directory[e]) for e in wanted}
                self._directory = directory
                self._kept |= memories
        return self._directory


def _place(pages: list[U8], places: npt.NDArray[np.int64]) -> U8:
    """The pages in one piece of memory, each at a multiple of 64 bytes."""
    room = sum(len(page) for page in pages) + ALIGNMENT * (len(pages) + 1)
    memory = np.zeros(room, dtype=np.uint8)
    at = -memory.ctypes.data % ALIGNMENT
    for number, page in enumerate(pages):
        places[number] = memory.ctypes.data + at, len(page) // PAGE_BYTES
        memory[at : at + len(page)] = page
        at += len(page) + -len(page) % ALIGNMENT
    return memory


def _page(terms: F32Array, codes: U8, metas: U8, kept: Indices) -> U8:
    """A page of the candidates ``kept``; terms and codes ``(16, C)``, metas ``(C,)``."""
    chunks = -(-len(kept) // LANES)
    filled = np.append(kept, np.repeat(kept[-1:], LANES * chunks - len(kept)))
    by_chunk = terms[:, filled].reshape(CODES, chunks, LANES).swapaxes(0, 1)
    parts = by_chunk, codes[:, filled].T, metas[filled]
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])


def _values(e: int) -> tuple[F32Array, npt.NDArray[np.bool_]]:
    """The values of the 16 codes, and which are finite; 0 in place of those that are not."""
    x = E2M1 * E8M0[e]
    finite = np.isfinite(x)
    return np.where(finite, x, np.float32(0)), finite


def _terms(errors: F32Array, finite: npt.NDArray[np.bool_], weighted: bool) -> F32Array:
    """What is added up. A value that is not finite makes every sum infinite: it is refused."""
    terms = errors if weighted else errors * errors
    return np.where(finite[:, None], terms, np.float32(np.inf))


def _zero_page(finite: npt.NDArray[np.bool_], code: int) -> U8:
    """The only candidate of a group of zeros."""
    terms = _terms(np.zeros((CODES, 1), dtype=np.float32), finite, False)
    codes = np.full((CODES, 1), code, dtype=np.uint8)
    return _page(terms, codes, np.zeros(1, dtype=np.uint8), _FIRST)


def scheme_pages(scheme: Scheme, weighted: bool) -> Pages:
    """Pages by the largest magnitude code of a group."""
    magnitude = np.arange(CODES) % MAGNITUDES
    size = 32 if scheme.wide else 16

    def build(e: int) -> list[U8]:
        x, finite = _values(e)
        codes, errors = scheme.candidates(x)
        terms = _terms(errors, finite, weighted)
        fixed = scheme.fixed(x[:MAGNITUDES], weighted)
        pages = [_zero_page(finite, scheme.zero)]
        for m in range(1, MAGNITUDES):
            if not finite[m]:
                kept = _FIRST
            elif fixed is not None:
                kept = fixed[m]
            else:
                may, must = magnitude <= m, magnitude == m
                kept = survivors(np.abs(terms), may, must, size, weighted)
            pages.append(_page(terms, codes, scheme.metas, kept))
        return pages

    return Pages(MAGNITUDES, build)


def affine_pages(weighted: bool) -> Pages:
    """Pages of candidate scales by offset byte, a block of zeros, candidate offsets by scale byte.

    The first place for offsets, that of scale byte 0, is never looked at.
    """

    def page(x: F32Array, finite: npt.NDArray[np.bool_], scales: U8, offsets: U8) -> U8:
        codes, errors = affine_candidates(x, scales, offsets)
        terms = _terms(errors, finite, weighted)
        kept = survivors(np.abs(terms), _ALL, _ALL, 32, weighted)
        return _page(terms, codes, scales if len(scales) > 1 else offsets, kept)

    def build(e: int) -> list[U8]:
        x, finite = _values(e)
        one = np.arange(256, dtype=np.uint8)[:, None]
        zero = _zero_page(finite, 0)
        return [
            *(page(x, finite, SCALE_BYTES, one[offset]) for offset in OFFSET_BYTES),
            zero,
            zero,
            *(page(x, finite, one[scale], OFFSET_BYTES) for scale in SCALE_BYTES),
        ]

    return Pages(AFFINE_PLACES, build)
