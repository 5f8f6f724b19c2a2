"""Blocks: where each code lies, packing, validation, what every block encoder refuses."""

from __future__ import annotations

import numpy as np
import pytest

from ds4q.artifact.errors import CodingError
from ds4q.artifact.formats import _blocks, codec_for
from ds4q.artifact.formats._blocks import BlockCodec, pack, unpack_block, unpack_reference
from ds4q.artifact.formats._rules import LEVELS
from ds4q.artifact.types import ROCMFP6, ROCMFP8
from tests.checks import Array, check_parity, check_refused, same_bits

WIDTHS = [2, 3, 4, 6, 8]


def random_codes(bits: int, blocks: int = 50) -> tuple[Array, Array]:
    """Codes ``(n, 32)`` and two scale bytes a block."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (blocks, 32), dtype=np.uint8)
    return codes, rng.integers(0, 256, (blocks, 2), dtype=np.uint8)


@pytest.mark.parametrize("bits", WIDTHS)
def test_each_weight_has_its_own_bits(bits: int) -> None:
    for weight in range(32):
        codes = np.zeros((1, 32), dtype=np.uint8)
        codes[0, weight] = 2**bits - 1
        units = np.zeros((1, 4 * bits + 1), dtype=np.uint8)
        pack(codes, np.zeros((1, 1), dtype=np.uint8), bits, units)
        number = int.from_bytes(units.tobytes(), "little")
        nibble = 8 * (weight % 16) + 4 * (weight // 16)  # byte j: weight j low, j + 16 high
        assert number == (2**bits - 1) << (nibble if bits == 4 else bits * weight)


@pytest.mark.parametrize("bits", WIDTHS)
def test_unpack_is_the_inverse(bits: int) -> None:
    codes, scales = random_codes(bits)
    units = np.zeros((50, 4 * bits + 2), dtype=np.uint8)
    check_parity(pack, [codes, scales, bits, units], block_bytes=units.shape[1])
    pack(codes, scales, bits, units)
    same_bits(units[:, 4 * bits :], scales)
    same_bits(unpack_reference(units, bits), codes, block_bytes=32)
    one = np.zeros(32, dtype=np.uint8)
    for unit, expected in zip(units, codes, strict=True):
        unpack_block(unit, bits, one)
        same_bits(one, expected)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bits", WIDTHS)
def test_decode_parity(bits: int, groups: int) -> None:
    rng = np.random.default_rng(9)
    units = rng.integers(0, 256, (300, 4 * bits + groups), dtype=np.uint8)
    levels = rng.standard_normal((2, 2**bits)).astype(np.float32)
    levels[:, 0] = (-0.0, 3e38)
    scales = rng.random(256).astype(np.float32)
    scales[::5] = 0
    out = np.zeros((300, 32), dtype=np.float32)
    check_parity(_blocks._decode, [units, bits, levels, scales, out], block_bytes=128)


def test_a_codec_without_a_search_does_not_encode() -> None:
    class Bare(BlockCodec):
        type = ROCMFP8
        bits = 8

    with pytest.raises(NotImplementedError, match="Bare is abstract"):
        Bare(LEVELS[4]).encode_units(np.ones((1, 32), dtype=np.float32))


@pytest.mark.parametrize("coding", ["Zero", "ZERO", "zero ", "dual"])
def test_unknown_variant(coding: str) -> None:
    check_refused(
        CodingError,
        lambda: codec_for(ROCMFP6.id, coding, path="p", tensor="t"),
        path="p",
        tensor="t",
        says=["variant-unknown", "ROCmFP6", "zero or neg32", coding],
    )
