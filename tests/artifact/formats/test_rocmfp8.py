"""ROCmFP8: golden and worked bytes, every code, error bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.formats import rocmfp8
from ds4q.artifact.formats._ue4m3 import UE4M3
from tests.artifact.formats import rocmfpx
from tests.artifact.formats.rocmfpx import NEAR, blocks_of, codec_of
from tests.checks import Array, check_round_trip, same_bits

CODEC = codec_of(103)


@pytest.mark.parametrize("mode", ["ref", "imatrix"])
@pytest.mark.parametrize("library", ["luce", "ciru_main", "charlie"])
def test_golden(library: str, mode: str) -> None:
    rocmfpx.check_quantizer_case(CODEC, f"{library}.q8_0_rocmfpx.{mode}")


def test_worked_block() -> None:
    rocmfpx.check_worked(CODEC, "08fc0116ec0005f6" * 2 + "42e3077c8b042cc5" * 2 + "0e")


def test_edges() -> None:
    rocmfpx.check_edges(CODEC, searched=False)
    rocmfpx.check_lost_weights(CODEC)
    rocmfpx.check_scale_bytes(CODEC)


def test_every_code_and_scale_decodes() -> None:
    units = np.zeros((8 * 256, 33), dtype=np.uint8)
    units[:, :32] = np.tile(np.arange(256, dtype=np.uint8).reshape(8, 32), (256, 1))
    units[:, 32] = np.repeat(np.arange(256, dtype=np.uint8), 8)
    levels = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
    same_bits(rocmfp8.LEVELS, levels)
    expected = (levels * UE4M3[:, None]).reshape(-1, 32)
    same_bits(CODEC.decode_units(units), expected, block_bytes=128)
    assert CODEC.decode_units(units)[8 * 0x40 + 4, 0] == -128


def test_weights_beyond_the_scales_saturate() -> None:
    values = np.full((1, 32), 1e5, dtype=np.float32)
    values[0, 1] = -1e5
    units = CODEC.encode_units(values)
    assert units[0].tolist() == [127, 129] + [127] * 30 + [0x7E]


def test_round_trip_of_what_it_holds() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(-127, 128, (4, 64)).astype(np.float32) * np.float32(0.25)
    values[:, ::32] = 127 / 4
    check_round_trip(CODEC, values)


@given(head=NEAR, power=st.integers(-5, 12))
def test_error_bounds(head: list[float], power: int) -> None:
    def bound(place: Array) -> Array:
        return np.where(np.abs(place) <= 127.5, 0.5, np.nan)

    rocmfpx.check_error_bounds(CODEC, blocks_of(head) * np.float32(2.0**power), bound)
