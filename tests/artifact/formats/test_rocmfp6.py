"""ROCmFP6: both meanings of code 32, golden and worked bytes, FP4 sources, error bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.formats import rocmfp6
from ds4q.artifact.formats._ue4m3 import UE4M3
from tests.artifact.formats import rocmfpx
from tests.artifact.formats.rocmfpx import NEAR, VECTORS, blocks_of, codec_of, fp4_source
from tests.checks import Array, check_golden, check_round_trip, same_bits

ZERO, NEG32 = codec_of(102, "zero"), codec_of(102, "neg32")
BOTH = pytest.mark.parametrize("codec", [ZERO, NEG32], ids=["zero", "neg32"])


@pytest.mark.parametrize("mode", ["ref", "imatrix"])
@pytest.mark.parametrize(
    ("library", "codec"), [("luce", ZERO), ("ciru_main", NEG32), ("charlie", NEG32)]
)
def test_golden(library: str, codec: rocmfpx.BlockCodec, mode: str) -> None:
    rocmfpx.check_quantizer_case(codec, f"{library}.q6_0_rocmfpx.{mode}")


@BOTH
def test_worked_block(codec: rocmfpx.BlockCodec) -> None:
    rocmfpx.check_worked(codec, "4b297c3d70b4" * 2 + "d0297c7db0bc" * 2 + "0a1e")


def test_endpoints() -> None:
    values = np.zeros((1, 32), dtype=np.float32)
    values[0, :2] = (-2, 1.9375)
    units = ZERO.encode_units(values)
    check_golden(units, "f404" + "00" * 22 + "25 00")
    assert ZERO.decode_units(units)[0, :2].tolist() == [-2.03125, 1.9296875]
    units = NEG32.encode_units(values)
    check_golden(units, "e007" + "00" * 22 + "20 00")
    assert (NEG32.decode_units(units) == values).all()


@pytest.mark.parametrize(("codec", "value"), [(ZERO, 0), (NEG32, -16)], ids=["zero", "neg32"])
def test_code_32(codec: rocmfpx.BlockCodec, value: float) -> None:
    units = np.zeros((1, 26), dtype=np.uint8)
    units[0, 0], units[0, 24] = 32, 0x38
    values = codec.decode_units(units)
    same_bits(values[0, :1], np.array([value], dtype=np.float32))


def test_the_wrong_endpoint_gives_other_values() -> None:
    packed = VECTORS["ciru_main.q6_0_rocmfpx.ref__bytes"]
    right, wrong = (codec.decode(packed, (1, 896)) for codec in (NEG32, ZERO))
    assert np.count_nonzero(right != wrong) == 37


@BOTH
def test_edges(codec: rocmfpx.BlockCodec) -> None:
    rocmfpx.check_edges(codec)
    rocmfpx.check_lost_weights(codec)
    rocmfpx.check_scale_bytes(codec)


@pytest.mark.parametrize("variant", ["zero", "neg32"])
def test_every_code_and_scale_decodes(variant: str) -> None:
    levels = rocmfp6.LEVELS[variant]
    assert levels.tolist() == [*range(32), 0 if variant == "zero" else -32, *range(-1, -32, -1)]
    for first in (0, 32):
        units = np.zeros((256, 26), dtype=np.uint8)
        number = sum((first + i) << (6 * i) for i in range(32))
        units[:, :24] = np.frombuffer(number.to_bytes(24, "little"), dtype=np.uint8)
        units[:, 24:] = np.arange(256, dtype=np.uint8)[:, None]
        expected = levels[first : first + 32] * UE4M3[:, None]
        same_bits(codec_of(102, variant).decode_units(units), expected, block_bytes=128)


@BOTH
def test_round_trip_of_what_it_holds(codec: rocmfpx.BlockCodec) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(-31, 32, (4, 64)).astype(np.float32) * np.float32(0.25)
    values[:, ::16] = 31 / 4
    check_round_trip(codec, values)


@BOTH
@given(
    codes=st.lists(st.integers(0, 15), min_size=32, max_size=32),
    exponent=st.integers(118, 136),
    importance=rocmfpx.WEIGHTS,
)
def test_an_fp4_source_survives(
    codec: rocmfpx.BlockCodec, codes: list[int], exponent: int, importance: list[float]
) -> None:
    values = fp4_source(codes, exponent)
    assert (codec.decode_units(codec.encode_units(values)) == values).all()
    weights = np.array(importance, dtype=np.float32) + np.float32(1e-3)
    rows, _ = codec.encode_rows(values, weights)
    assert (codec.decode(rows, values.shape) == values).all()


@BOTH
def test_fp4_sources_beyond_that_do_not_survive(codec: rocmfpx.BlockCodec) -> None:
    codes = list(range(16)) * 2
    for exponent, survives in ((117, False), (118, True), (136, True), (137, False)):
        values = fp4_source(codes, exponent)
        assert (codec.decode_units(codec.encode_units(values)) == values).all() == survives


@BOTH
@given(head=NEAR, power=st.integers(-9, 9))
def test_error_bounds(codec: rocmfpx.BlockCodec, head: list[float], power: int) -> None:
    def bound(place: Array) -> Array:
        return np.where(np.abs(place) <= 31.5, 0.5, np.nan)

    rocmfpx.check_error_bounds(codec, blocks_of(head) * np.float32(2.0**power), bound)
