"""How pages lie in memory, and that threads may build them at once."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from ds4q.artifact.numeric import E2M1, E8M0
from ds4q.artifact.types import ROCMFP2, ROCMFP3, ROCMFP8
from ds4q.quantize.exact.rules import Scheme, affine_candidates, scheme_of
from ds4q.quantize.exact.tables import (
    AFFINE_OFFSETS,
    AFFINE_ZERO,
    PAGE_BYTES,
    Pages,
    affine_pages,
    scheme_pages,
)
from tests.checks import Array, same_bits


def present(*es: int) -> Array:
    return np.isin(np.arange(256), es)


def read(place: Array) -> tuple[Array, Array, Array]:
    """Terms ``(16, C)``, maps ``(C, 16)`` and metas ``(C,)`` of the page at a place."""
    address, chunks = (int(number) for number in place)
    assert address % 64 == 0
    raw = ctypes.string_at(address, chunks * PAGE_BYTES)
    memory = np.frombuffer(raw, np.uint8)
    terms = memory[: chunks * 1024].view(np.float32).reshape(chunks, 16, 16)
    maps = memory[chunks * 1024 : chunks * 1280].reshape(-1, 16)
    return terms.swapaxes(0, 1).reshape(16, -1), maps, memory[chunks * 1280 :]


def scheme(kind: object = ROCMFP3, coding: object = None) -> Scheme:
    found = scheme_of(kind, coding)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("weighted", [False, True])
def test_pages_hold_terms_maps_and_scale_bytes(weighted: bool) -> None:
    for e in (119, 127):
        x = E2M1 * E8M0[e]
        codes, errors = scheme().candidates(x)
        terms = errors if weighted else errors * errors
        pages = scheme_pages(scheme(), weighted)
        directory = pages.directory(present(e))
        for m in range(1, 8):
            found, maps, metas = read(directory[e, m])
            kept = metas.astype(np.intp) - 1
            distinct = np.unique(kept)
            assert (np.diff(kept) >= 0).all(), "ties go to the smaller byte"
            assert (kept[len(distinct) :] == kept[-1]).all(), "only the last one fills the chunk"
            same_bits(found, terms[:, kept], block_bytes=4)
            same_bits(maps, codes[:, kept].T)


def test_pages_of_zeros_have_one_candidate() -> None:
    for kind, coding, code in ((ROCMFP3, None, 0), (ROCMFP2, "dual", 1), (ROCMFP2, "s40", 0)):
        pages = scheme_pages(scheme(kind, coding), False)
        directory = pages.directory(present(254, 255))
        terms, maps, metas = read(directory[254, 0])
        assert not terms[[0, 8]].any()
        assert (maps == code).all()
        assert not metas.any()
        assert np.isinf(read(directory[255, 0])[0]).all(), "zero times a NaN scale is no zero"


def test_values_beyond_float32_have_infinite_terms() -> None:
    for weighted in (False, True):
        pages = scheme_pages(scheme(ROCMFP8), weighted)
        directory = pages.directory(present(254))
        for m in range(1, 8):
            terms = read(directory[254, m])[0]
            assert np.isinf(terms[[4, 7, 12, 15]]).all()
            assert weighted == np.isfinite(terms[[1, 9]]).all()


def test_affine_pages_lie_by_offset_and_by_scale() -> None:
    e = 121
    pages = affine_pages(False)
    directory = pages.directory(present(e))
    x, one = E2M1 * E8M0[e], np.arange(256, dtype=np.uint8)[:, None]
    for byte in (0, 1, 40, 126):
        terms, maps, metas = read(directory[e, byte])
        codes, errors = affine_candidates(x, metas, one[byte])
        same_bits(terms, errors * errors, block_bytes=4)
        same_bits(maps, codes.T)
    for byte in (1, 40, 126):
        terms, maps, metas = read(directory[e, AFFINE_OFFSETS + byte])
        codes, errors = affine_candidates(x, one[byte], metas)
        same_bits(terms, errors * errors, block_bytes=4)
        same_bits(maps, codes.T)
    terms, maps, metas = read(directory[e, AFFINE_ZERO])
    assert not any(part.any() for part in (terms, maps, metas))


def test_threads_build_each_page_once_and_see_whole_directories() -> None:
    built: list[int] = []

    def build(e: int) -> list[Array]:
        built.append(e)
        return [np.full(PAGE_BYTES, e, np.uint8)] * 2

    pages = Pages(2, build)
    start = threading.Barrier(8)
    wrong: list[int] = []

    def ask(number: int) -> None:
        rng = np.random.default_rng(number)
        start.wait()
        for _ in range(40):
            es = rng.integers(0, 256, 5)
            directory = pages.directory(present(*es.tolist()))
            wrong.extend(
                e
                for e in es.tolist()
                for place in directory[e]
                if read(place)[2].tolist() != [e] * 16
            )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(built) == len(set(built))
    assert len(built) > 200


def test_a_directory_that_was_given_out_does_not_change() -> None:
    pages = scheme_pages(scheme(), False)
    first = pages.directory(present(120))
    kept = first.copy()
    second = pages.directory(present(121, 122))
    assert pages.directory(present(120, 122)) is second
    same_bits(first, kept)
    same_bits(second[120], kept[120])
    assert second[121].all()
