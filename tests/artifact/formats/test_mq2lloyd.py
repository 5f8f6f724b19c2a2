"""MQ2G256Lloyd: bytes by hand, rotated values turned back, levels that are refused, lengths."""

from __future__ import annotations

import numpy as np
import pytest

from ds4q.artifact.errors import PayloadSizeError, PayloadValueError
from ds4q.artifact.formats import codec_for
from ds4q.artifact.formats._fwht import AFTER, BEFORE, rotate, unrotate
from ds4q.artifact.formats.mq2lloyd import stored_values
from ds4q.artifact.types import MQ2_LLOYD, TYPES, check_entry
from tests.artifact import mq2
from tests.checks import check_refused, same_bits

CODEC = codec_for(MQ2_LLOYD.id)
# -1, -0.5, 0.25, 2 as f16; then codes 0 1 2 3 (0xe4) 60 times, and 3 2 1 0 (0x1b) four times.
GROUP = bytes.fromhex("00bc00b800340040") + b"\xe4" * 60 + b"\x1b" * 4


def group(*levels: float) -> np.ndarray:
    data = np.frombuffer(GROUP, np.uint8).copy()
    data[:8] = np.array(levels, "<f2").view(np.uint8)
    return data


def test_a_group_by_hand() -> None:
    stored = stored_values(np.frombuffer(GROUP, np.uint8)[None])
    assert stored.dtype == np.float32
    assert stored[0].tolist() == [-1, -0.5, 0.25, 2] * 60 + [2, 0.25, -0.5, -1] * 4
    payload = np.frombuffer(GROUP * 2, np.uint8)
    CODEC.validate(payload, (1, 512))
    found = CODEC.decode(payload, (1, 512))
    same_bits(found, unrotate(np.concatenate([stored, stored], axis=1)))
    # One weight in float64: row 5 of the transposed Hadamard matrix, signs on both sides.
    parity = np.array([bin(5 & j).count("1") % 2 for j in range(256)])
    want = BEFORE[5] / 16 * (np.where(parity, -1, 1) * AFTER * stored[0].astype(np.float64)).sum()
    assert abs(found[0, 5] - want) < 1e-6
    assert abs(want) > 0.01


def test_a_single_stored_value_spreads_over_its_group_alone() -> None:
    levels = np.array([[-1, 0, 0, 0], [0, 0, 0, 0]], "<f2")
    codes = np.ones((2, 256), np.uint8)
    codes[0, 7] = 0
    found = CODEC.decode(mq2.pack(levels, codes), (1, 512))[0]
    assert np.abs(found[:256]).tolist() == [1 / 16] * 256
    assert not found[256:].any()
    assert rotate(found[:256]).tolist() == [0.0] * 7 + [-1.0] + [0.0] * 248


def test_the_tests_encoder_reaches_the_error_of_lloyd_on_gaussian_weights() -> None:
    values = np.random.default_rng(1).standard_normal((16, 1024)).astype(np.float32)
    payload = mq2.encode(values)
    CODEC.validate(payload, values.shape)
    found = CODEC.decode(payload, values.shape)
    error = ((found - values).astype(np.float64) ** 2).mean() / (values**2).mean()
    assert 0.09 < error < 0.12  # a fixed quantizer's is 0.1175
    assert ((stored_values(payload.reshape(-1, 72)) - values.reshape(-1, 256)) ** 2).mean() > 1.5


@pytest.mark.parametrize(
    "levels",
    [
        (-1, float("nan"), 1, 2),
        (-1, 0, 1, float("inf")),
        (float("-inf"), 0, 1, 2),
        (-1, -1.5, 1, 2),
        (2, 1, 0, -1),
        (0, 2, 1, 3),
    ],
)
def test_levels_that_are_refused(levels: tuple[float, ...]) -> None:
    good = group(-1, -0.5, 0.25, 2)
    payload = np.concatenate([good, good, good, group(*levels), good, good])
    error = check_refused(
        PayloadValueError,
        lambda: CODEC.validate(payload, (3, 512), first_row=8, path="p", tensor="t"),
        path="p",
        tensor="t",
        says=["MQ2G256Lloyd in group 19", "finite and ascending"],
    )
    assert str(error.found).split(", ")[2] == f"{levels[2]:g}"


@pytest.mark.parametrize(
    "levels",
    [(0, 0, 0, 0), (-0.0, 0, -0.0, 1), (0, -0.0, 0, 0), (-65504, 0, 6e-8, 65504), (1,) * 4],
)
def test_levels_that_are_legal(levels: tuple[float, ...]) -> None:
    CODEC.validate(group(*levels), (1, 256))


def test_bytes_of_a_row_and_lengths_that_are_refused() -> None:
    assert MQ2_LLOYD.payload_bytes((2048, 4096)) == 2_359_296
    check_entry(19, (4, 512), 256, 4 * 2 * 72)
    for shape, nbytes in (((4, 512), 575), ((4, 512), 577), ((8, 128), 8 * 36), ((2, 384), 216)):
        with pytest.raises(PayloadSizeError):
            check_entry(19, shape, 256, nbytes)
    check_refused(PayloadSizeError, lambda: CODEC.decode(np.zeros(71, np.uint8), (1, 256)))


def test_it_is_read_only_and_its_unrotated_twin_is_not_it() -> None:
    with pytest.raises(NotImplementedError):
        CODEC.encode(np.zeros((1, 256), np.float32))
    assert TYPES[51].name == "MQ2G256LloydU"
    assert not TYPES[51].codec
