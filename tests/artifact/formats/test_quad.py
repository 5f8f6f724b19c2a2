"""The shuffles of four 17-byte blocks, byte by byte; whole rows are in ``test_hfp4g32.py``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ds4q.artifact.fastpath import jit
from ds4q.artifact.formats import _quad
from tests.checks import Array, same_bits


@jit
def interleave(codes: Any, scales: Any, packed: Any) -> None:
    _quad.interleave(
        np.uintp(codes.ctypes.data), np.uintp(scales.ctypes.data), np.uintp(packed.ctypes.data)
    )


@jit
def difference(codes: Any, scales: Any, packed: Any) -> Any:
    return _quad.difference(
        np.uintp(codes.ctypes.data), np.uintp(scales.ctypes.data), np.uintp(packed.ctypes.data)
    )


def distinct() -> tuple[Array, Array, Array]:
    """Codes 0..63 and scales 200..203, with a guard of 16 bytes behind the packed blocks."""
    codes, scales = np.arange(64, dtype=np.uint8), np.arange(200, 204, dtype=np.uint8)
    return codes, scales, np.full(84, 0xEE, dtype=np.uint8)


def test_every_byte_has_one_source() -> None:
    assert sorted(_quad._source_lane(byte) for byte in range(68)) == list(range(68))


def test_interleave_writes_68_bytes_and_no_more() -> None:
    codes, scales, packed = distinct()
    interleave(codes, scales, packed)
    blocks = [[200 + b, *range(16 * b, 16 * b + 16)] for b in range(4)]
    same_bits(packed[:68], np.array(blocks, dtype=np.uint8).reshape(-1), block_bytes=17)
    assert (packed[68:] == 0xEE).all()


def test_difference_sees_every_bit_and_nothing_behind() -> None:
    codes, scales, packed = distinct()
    interleave(codes, scales, packed)
    assert difference(codes, scales, packed) == 0
    for at in range(84):
        for bit in (1, 128):
            packed[at] ^= bit
            assert (difference(codes, scales, packed) != 0) == (at < 68)
            packed[at] ^= bit
