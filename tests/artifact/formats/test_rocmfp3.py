"""ROCmFP3: golden and worked bytes, every code, error bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.formats import rocmfp3
from ds4q.artifact.formats._ue4m3 import UE4M3
from tests.artifact.formats import rocmfpx
from tests.artifact.formats.rocmfpx import NEAR, blocks_of, codec_of
from tests.checks import Array, check_round_trip, same_bits

CODEC = codec_of(104)


@pytest.mark.parametrize("mode", ["ref", "imatrix"])
@pytest.mark.parametrize("library", ["luce", "ciru_main", "charlie"])
def test_golden(library: str, mode: str) -> None:
    rocmfpx.check_quantizer_case(CODEC, f"{library}.q3_0_rocmfpx.{mode}")


def test_worked_block() -> None:
    units = CODEC.encode_units(rocmfpx.WORKED[None])
    values = rocmfpx.check_worked(CODEC, "2a76c4" * 4 + "2135")
    assert CODEC.scales[units[0, 12]] == 0.0703125
    assert (values[:8] / np.float32(0.0703125)).tolist() == [2, -1, 0, 4, -4, 0, 1, -2]


def test_edges() -> None:
    rocmfpx.check_edges(CODEC)
    rocmfpx.check_lost_weights(CODEC)
    rocmfpx.check_scale_bytes(CODEC)


def test_every_code_and_scale_decodes() -> None:
    units = np.zeros((256, 14), dtype=np.uint8)
    units[:, :12] = np.tile(np.frombuffer(bytes.fromhex("88c6fa"), dtype=np.uint8), 4)  # 0..7
    units[:, 12:] = np.arange(256, dtype=np.uint8)[:, None]
    assert rocmfp3.LEVELS.tolist() == [0, 1, 2, 4, 0, -1, -2, -4]
    expected = np.tile(rocmfp3.LEVELS, 4) * UE4M3[:, None]
    same_bits(CODEC.decode_units(units), expected, block_bytes=128)
    assert not np.signbit(CODEC.decode_units(units)[:, 4]).any()  # code 4 is +0


def test_round_trip_of_what_it_holds() -> None:
    rng = np.random.default_rng(0)
    values = rocmfp3.LEVELS[rng.integers(0, 8, (4, 64))] * np.float32(0.375)
    values[:, ::16] = 1.5
    check_round_trip(CODEC, values)


@given(head=NEAR, power=st.integers(-9, 6))
def test_error_bounds(head: list[float], power: int) -> None:
    def bound(place: Array) -> Array:
        size = np.abs(place)
        return np.select([size <= 2.5, size <= 5], [0.5, 1.0], np.nan)

    rocmfpx.check_error_bounds(CODEC, blocks_of(head) * np.float32(2.0**power), bound)
