"""UE4M3: the value of every byte, and the byte nearest to a number."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.formats import _ue4m3
from ds4q.artifact.formats._ue4m3 import LAST, UE4M3, UE4M3_LOW, nearest
from tests.artifact.formats.rocmfpx import VECTORS
from tests.checks import check_parity, same_bits


def byte_for(target: float) -> int:
    return int(nearest(np.array([target], dtype=np.float32))[0])


def test_golden_values() -> None:
    same_bits(UE4M3[: LAST + 1], VECTORS["ue4m3"])
    assert not UE4M3[LAST + 1 :].any()  # invalid bytes are 0, not NaN


@pytest.mark.parametrize(
    ("byte", "value"),
    [
        (0x01, 2.0**-10),
        (0x08, 2.0**-7),
        (0x38, 0.5),
        (0x40, 1),
        (0x48, 2),
        (0x78, 128),
        (0x7E, 224),
    ],
)
def test_fixed_points(byte: int, value: float) -> None:
    assert UE4M3[byte] == value
    assert UE4M3_LOW[byte] == UE4M3_LOW[byte | 0x80] == value
    assert byte_for(value) == byte


def test_values_ascend() -> None:
    assert (np.diff(UE4M3[: LAST + 1]) > 0).all()
    assert UE4M3_LOW[0x7F] == UE4M3_LOW[0xFF] == 0


@pytest.mark.parametrize(
    ("target", "byte"),
    [
        (0.0, 0),
        (-1.0, 0),
        (np.nan, 0),
        (np.inf, 0),
        (-np.inf, 0),
        (2.0**-149, 1),  # never 0 for what is above 0
        (2.0**-10 * 1.5, 1),  # a tie goes down
        (2.0**-10 * 2.5, 2),
        (216.0, 0x7D),
        (216.01, 0x7E),
        (1000.0, 0x7E),
        (3e38, 1),  # in float32 every byte is equally far
    ],
)
def test_nearest_at_the_edges(target: float, byte: int) -> None:
    assert byte_for(target) == byte


@given(st.floats(2.0**-14, 300, width=32))
def test_nearest_has_the_smallest_distance(target: float) -> None:
    distance = {b: abs(Fraction(float(UE4M3[b])) - Fraction(target)) for b in range(1, LAST + 1)}
    smallest = min(distance.values())
    assert byte_for(target) == min(b for b, d in distance.items() if d == smallest)


def test_nearest_moves_a_scale_by_a_seventeenth_at_most() -> None:
    targets = np.geomspace(2.0**-7, 224, 5000).astype(np.float32)
    assert (np.abs(UE4M3[nearest(targets)] / targets - 1) <= 1 / 17 + 1e-6).all()


def test_parity() -> None:
    rng = np.random.default_rng(1)
    wild = rng.integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32)
    middles = (UE4M3[:LAST] + UE4M3[1 : LAST + 1]) / 2
    targets = np.concatenate([wild, middles, np.nextafter(middles, np.float32(np.inf))])
    result, _ = check_parity(_ue4m3.nearest, [targets.astype(np.float32)])
    assert result.shape == targets.shape
    check_parity(_ue4m3.nearest, [targets[:4000].reshape(40, 100).astype(np.float32)])
