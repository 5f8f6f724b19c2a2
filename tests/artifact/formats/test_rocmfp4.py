"""ROCmFP4 and ROCmFP4Fast: golden and worked bytes, what an FP4 source keeps, error bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.formats import rocmfp4
from ds4q.artifact.formats._ue4m3 import UE4M3
from ds4q.artifact.numeric import E2M1
from tests.artifact.formats import rocmfpx
from tests.artifact.formats.rocmfpx import (
    NEAR,
    WORKED,
    blocks_of,
    codec_of,
    fp4_source,
)
from tests.checks import Array, check_golden, check_round_trip, same_bits

FP4, FAST = codec_of(100), codec_of(101)


@pytest.mark.parametrize("library", ["luce", "ciru_main", "charlie"])
@pytest.mark.parametrize(
    ("codec", "name"), [(FP4, "q4_0_rocmfp4"), (FAST, "q4_0_rocmfp4_fast")], ids=["100", "101"]
)
def test_golden(codec: rocmfpx.BlockCodec, name: str, library: str) -> None:
    rocmfpx.check_quantizer_case(codec, f"{library}.{name}.ref")


def test_worked_block() -> None:
    values = rocmfpx.check_worked(FP4, "44aa0167ef0032cc" * 2 + "172d")
    assert values[[0, 16, 1, 17]].tolist() == [0.1171875, 0.8125, -0.05859375, -0.40625]
    rocmfpx.check_worked(FAST, "51b01072fa0040d9" * 2 + "2a")


def test_worked_block_with_importance() -> None:
    rows, lost = FAST.encode_rows(WORKED[None], np.arange(1, 33, dtype=np.float32))
    check_golden(rows, "41a00061e90030c9" * 2 + "2d")
    assert lost == 0


@pytest.mark.parametrize("codec", [FP4, FAST], ids=["100", "101"])
def test_edges(codec: rocmfpx.BlockCodec) -> None:
    rocmfpx.check_edges(codec)
    rocmfpx.check_lost_weights(codec)
    rocmfpx.check_scale_bytes(codec)


@pytest.mark.parametrize("codec", [FP4, FAST], ids=["100", "101"])
def test_every_code_and_scale_decodes(codec: rocmfpx.BlockCodec) -> None:
    units = np.zeros((256, codec.type.block_bytes), dtype=np.uint8)
    units[:, :16] = np.arange(16, dtype=np.uint8) * 0x11
    units[:, 16:] = np.arange(256, dtype=np.uint8)[:, None]
    expected = np.tile(rocmfp4.LEVELS, 2) * UE4M3[:, None]
    same_bits(codec.decode_units(units), expected.astype(np.float32), block_bytes=128)
    assert not np.signbit(codec.decode_units(units)[:, 8]).any()  # code 8 is +0


def test_negative_level_times_nothing_is_minus_zero() -> None:
    units = np.full((1, 18), 0x91, dtype=np.uint8)  # codes 1 and 9
    units[0, 16:] = (0x00, 0xFF)
    values = FP4.decode_units(units)[0]
    assert not values.any()
    assert np.signbit(values).tolist() == [False] * 16 + [True] * 16


def test_round_trip_of_what_it_holds() -> None:
    rng = np.random.default_rng(0)
    for codec in (FP4, FAST):
        values = rocmfp4.LEVELS[rng.integers(0, 8, (4, 64))] * np.float32(0.25)
        values[:, ::16] = 2.5
        check_round_trip(codec, values)


def bound(place: Array) -> Array:
    size = np.abs(place)
    return np.select([size <= 4.5, size <= 11], [0.5, 1.0], np.nan)


@given(head=NEAR, power=st.integers(-9, 6))
def test_error_bounds(head: list[float], power: int) -> None:
    values = blocks_of(head) * np.float32(2.0**power)
    for codec in (FP4, FAST):
        rocmfpx.check_error_bounds(codec, values, bound)


def is_held(present: set[float], exponent: int) -> bool:
    """Whether type 100 is said to hold a half of an FP4 block, by its magnitudes that are not 0."""
    if 6 not in present or present <= {1.5, 3, 6}:
        return exponent <= 135
    return not present & {0.5, 1.5} and exponent <= 134


def test_which_fp4_sources_are_exact() -> None:
    # Every set of magnitudes at every exponent that a scale byte reaches, with both signs.
    halves, expected = [], []
    for exponent in range(118, 136):
        for members in range(1, 128):
            codes = [code for code in range(1, 8) if members >> (code - 1) & 1]
            signed = [*codes, *(8 + code for code in codes)]
            halves.append(fp4_source(signed + [0] * (32 - len(signed)), exponent)[0, :16])
            present = {float(E2M1[code]) for code in codes}
            expected.append(is_held(present, exponent))
    values = np.concatenate(halves).reshape(-1, 32)
    decoded = FP4.decode_units(FP4.encode_units(values))
    found = (decoded == values).reshape(-1, 16).all(axis=1)
    assert found.tolist() == expected
    assert 0 < sum(expected) < len(expected)
