"""The vector instructions, one by one, against plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ds4q.artifact.fastpath import jit
from ds4q.artifact.formats._blocks import pack
from ds4q.artifact.numeric import unpack_nibbles
from ds4q.quantize.exact import vectors
from tests.checks import Array, same_bits

GUARD = 0xEE


def words(codes: Array) -> Array:
    """Source codes ``(..., 16)`` as the uint64 that the instructions take."""
    return np.ascontiguousarray(codes[..., 0::2] | codes[..., 1::2] << 4).view(np.uint64)[..., 0]


def random_codes(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).integers(0, 16, shape, dtype=np.uint8)


@jit
def look(word: Any, weights: Any) -> Any:
    at = np.int64(weights.ctypes.data)
    return (
        vectors.largest(word),
        vectors.lowest(word),
        vectors.lowest_weighted(word, at),
        vectors.weightless(at),
    )


def test_magnitudes_of_chosen_codes() -> None:
    rng = np.random.default_rng(1)
    for codes in (*random_codes(2, 50, 16), *(random_codes(3, 50, 16) % 10)):
        weights = rng.choice(np.array([0, 0.5], np.float32), 16, p=[0.8, 0.2])
        negative, some = codes >= 8, weights > 0
        expected = (
            (codes & 7).max(),
            (codes & 7)[negative].max(initial=0),
            (codes & 7)[negative & some].max(initial=0),
            not some.any(),
        )
        assert look(words(codes), weights) == expected


def test_any_one_weight_is_a_weight() -> None:
    for lane in range(16):
        weights = np.zeros(16, np.float32)
        weights[lane] = 1e-45  # a subnormal
        codes = np.where(np.arange(16) == lane, 13, 15).astype(np.uint8)
        assert look(words(codes), weights) == (7, 7, 5, False)


@jit
def scans(table: Any, word0: Any, word1: Any, weights: Any) -> Any:
    at, w = np.int64(table.ctypes.data), np.int64(weights.ctypes.data)
    return (
        vectors.scan(at, word0),
        vectors.scan2(at, word0, word1),
        vectors.scan_weighted(at, word0, w),
        vectors.scan2_weighted(at, word0, word1, w),
    )


def aligned(values: Array) -> Array:
    """A copy whose address is a multiple of 64."""
    raw = np.empty(values.nbytes + 64, np.uint8)
    raw = raw[-raw.ctypes.data % 64 :][: values.nbytes]
    out: Array = raw.view(values.dtype).reshape(values.shape)
    out[:] = values
    return out


def in_order(terms: Array) -> Array:
    """float32 sums over the first axis, one addition after the other."""
    total = np.zeros(terms.shape[1:], np.float32)
    for term in terms:
        total = total + term
    return total


def key_of(sums: Array) -> int:
    lane = int(np.argmin(sums))
    return int(sums[lane : lane + 1].view(np.uint32)[0]) << 32 | lane


def test_scans_add_in_index_order_and_take_the_first_of_equal_sums() -> None:
    rng = np.random.default_rng(4)
    ties = 0
    for trial in range(200):
        codes = random_codes(trial, 2, 16)
        if trial % 2:  # few distinct terms: lanes tie, and the lane of the tie varies
            codes = codes % 2 * 15
            table = rng.integers(1, 4, (16, 16)).astype(np.float32)
        else:  # of all magnitudes: the order of additions shows in the last bits
            table = (rng.standard_normal((16, 16)) * 10.0 ** rng.integers(-6, 3, (16, 16))).astype(
                np.float32
            )
        first, second = words(codes)
        weights = rng.random(32).astype(np.float32)
        squares, both = aligned(table * table), codes.reshape(-1)
        plain = in_order(squares[codes[0]]), in_order(squares[both])
        found = scans(squares, first, second, weights)
        assert found[:2] == tuple(map(key_of, plain))
        signed = aligned(table)
        terms = weights[:, None] * signed[both] * signed[both]
        found = scans(signed, first, second, weights)
        assert found[2:] == (key_of(in_order(terms[:16])), key_of(in_order(terms)))
        ties += int(np.count_nonzero(plain[0] == plain[0].min()) > 1)
    assert ties > 20


def test_infinite_sums_are_the_largest_keys() -> None:
    table = aligned(np.full((16, 16), np.inf, np.float32))
    word = words(random_codes(0, 16))
    assert scans(table, word, word, np.ones(32, np.float32))[0] == 0x7F800000 << 32


@jit
def pack_all(maps: Any, word0: Any, word1: Any, out: Any) -> None:
    map0 = np.int64(maps.ctypes.data)
    map1, to = map0 + 16, np.int64(out.ctypes.data)
    row = out.shape[1]
    vectors.pack2(map0, word0, map1, word1, to)
    vectors.pack3(map0 + 32, word0, map1 + 32, word1, to + row)
    vectors.pack4(map0 + 64, word0, map1 + 64, word1, to + 2 * row)
    vectors.pack6(map0 + 96, word0, map1 + 96, word1, to + 3 * row)
    vectors.pack8(map0 + 128, word0, map1 + 128, word1, to + 4 * row)


def test_codes_are_mapped_and_packed_as_the_codecs_pack_them() -> None:
    rng = np.random.default_rng(5)
    sizes = (2, 3, 4, 6, 8)
    for _ in range(20):
        codes = rng.integers(0, 16, (2, 16), dtype=np.uint8)
        maps = np.stack([rng.integers(0, 1 << bits, (2, 16)) for bits in sizes]).astype(np.uint8)
        out = np.full((len(sizes), 40), GUARD, np.uint8)
        first, second = words(codes)
        pack_all(maps, first, second, out)
        for row, (bits, map_) in enumerate(zip(sizes, maps, strict=True)):
            mapped = np.concatenate([map_[0][codes[0]], map_[1][codes[1]]])
            expected = np.empty((1, 4 * bits), np.uint8)
            pack(mapped[None], np.empty((1, 0), np.uint8), bits, expected)
            same_bits(out[row, : 4 * bits], expected[0], what=f"{bits} bits")
            assert (out[row, 4 * bits :] == GUARD).all(), f"{bits} bits: written behind the block"


@jit
def bytes_of(source: Any, target: Any) -> Any:
    at, to = np.int64(source.ctypes.data), np.int64(target.ctypes.data)
    vectors.store8(to + 1, vectors.load8(at + 3))
    return vectors.load64(at + 1)


def test_single_bytes_and_words() -> None:
    source, target = np.arange(200, 210, dtype=np.uint8), np.full(3, GUARD, np.uint8)
    assert bytes_of(source, target) == int.from_bytes(bytes(range(201, 209)), "little")
    assert target.tolist() == [GUARD, 203, GUARD]


def test_words_hold_codes_as_a_source_does() -> None:
    codes = random_codes(6, 16)
    raw = np.frombuffer(words(codes).tobytes(), np.uint8)
    assert unpack_nibbles(raw).tolist() == codes.tolist()
