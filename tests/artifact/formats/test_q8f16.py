"""Q8F16: hipfire's encoder to the bit, its refusals, and what every code decodes to."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.errors import PayloadSizeError, PayloadValueError
from ds4q.artifact.formats import codec_for, q8f16
from ds4q.artifact.types import Q8F16
from tests.checks import Array, check_golden, check_parity, check_refused, same_bits

CODEC = codec_for(3)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
GROUPS = st.lists(FINITE, min_size=32, max_size=32)


def group(*head: float) -> Array:
    """One group: ``head``, then zeros."""
    values = np.zeros(32, dtype=np.float32)
    values[: len(head)] = head
    return values


def codes_of(payload: Array) -> list[int]:
    return payload.reshape(-1, 34)[:, 2:].view(np.int8).reshape(-1).tolist()


def test_golden_group() -> None:
    # max 127: scale 1.0, inverse 1.0, so each code is the rounded value.
    check_golden(
        CODEC.encode(group(127, -127, 1, -1, 2.5, -2.5, 0.49, -0.0)),
        "003c 7f 81 01 ff 03 fd 00 00" + "00" * 24,
    )


def test_groups_run_over_row_major_data() -> None:
    values = np.arange(128, dtype=np.float32).reshape(8, 16)  # a group is two rows
    payload = CODEC.encode(values)
    same_bits(payload, CODEC.encode(values.reshape(4, 32)))
    assert len(payload) == Q8F16.payload_bytes((8, 16)) == 4 * 34
    same_bits(CODEC.decode(payload, (8, 16)), CODEC.decode(payload, (4, 32)).reshape(8, 16))


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.5, 1), (-0.5, -1), (1.5, 2), (-1.5, -2), (2.5, 3), (126.5, 127), (-126.5, -127)],
)
def test_halves_round_away_from_zero(value: float, code: int) -> None:
    assert codes_of(CODEC.encode(group(127, value)))[1] == code


def test_just_below_half_rounds_to_zero() -> None:
    # The float32 below one half: adding one half before truncating would give one.
    below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    assert codes_of(CODEC.encode(group(127, below, -below)))[1:3] == [0, 0]


def test_codes_come_from_the_unrounded_scale() -> None:
    # max/127 = 0.999572..., f16 rounds the scale to 0.99951; with that scale 100.0 would be 100.05.
    top = np.float32(126.94567)
    payload = CODEC.encode(group(float(top), 99.4573))
    scale = top / np.float32(127)
    assert payload[:2].view("<f2")[0] == np.float16(scale) != scale
    inverse = np.float32(1) / scale
    expected = int(np.float32(99.4573) * inverse + np.float32(0.5))
    assert codes_of(payload)[:2] == [127, expected]


def test_scale_is_stored_nearest_even() -> None:
    for scale in (1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-24, 2.0**-25 * 1.5):
        payload = CODEC.encode(group(127 * scale))
        assert payload[:2].view("<f2")[0] == np.float16(np.float32(127 * scale) / np.float32(127))


def test_zero_group() -> None:
    payload = CODEC.encode(np.array([0.0, -0.0] * 16, dtype=np.float32))
    check_golden(payload, "00" * 34)
    values = CODEC.decode(payload, (32,))
    same_bits(values, np.zeros(32, dtype=np.float32))


def test_decode_is_code_times_scale_for_every_code() -> None:
    units = np.zeros((8, 34), dtype=np.uint8)
    units[:, 2:] = np.arange(256, dtype=np.uint8).reshape(8, 32)
    units[:, :2] = np.array([[0x55, 0x35]], dtype=np.uint8)  # 0.33325...
    values = CODEC.decode(units.reshape(-1), (8, 32)).reshape(-1)
    scale = float(np.float16(np.array([0x3555], "<u2").view("<f2")[0]))
    assert values.tolist() == [
        float(np.float32(scale * (byte - 256 if byte > 127 else byte))) for byte in range(256)
    ]


@given(GROUPS)
def test_encoder_follows_its_definition(head: list[float]) -> None:
    values = np.array(head, dtype=np.float32)
    scale = np.abs(values).max() / np.float32(127)
    with np.errstate(all="ignore"):
        stored = np.float16(scale)
        inverse = np.float32(1) / scale if scale else np.float32(0)
    if not np.isfinite(stored) or (stored == 0 and scale != 0):
        check_refused(PayloadValueError, lambda: CODEC.encode(values), says=["f16 range"])
        return
    payload = CODEC.encode(values)
    assert payload[:2].view("<f2")[0] == stored
    for value, code in zip(values, codes_of(payload), strict=True):
        exact = Fraction(float(value * inverse))
        away = int(abs(exact) + Fraction(1, 2)) * (1 if exact > 0 else -1)
        assert code == max(-128, min(127, away))


@given(GROUPS)
def test_error_stays_within_half_a_step_and_the_rounded_scale(head: list[float]) -> None:
    values = np.array([min(max(v, -8e6), 8e6) for v in head], dtype=np.float32)
    values[0] = max(1.0, float(np.abs(values).max()))
    decoded = CODEC.decode(CODEC.encode(values), values.shape)
    error = np.abs(decoded.astype(np.float64) - values)
    scale = float(values[0]) / 127
    # half a step of rounding, and 127 codes times the scale's own f16 rounding of 2^-11
    assert error.max() <= scale * (0.5 + 127 * 2.0**-11) * (1 + 1e-6)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_encoder_refuses_what_is_not_finite(bad: float) -> None:
    check_refused(
        PayloadValueError, lambda: CODEC.encode(group(1, bad)), says=["not finite", "value 1"]
    )


@pytest.mark.parametrize(
    "largest",
    [65520 * 127.0, 3e38, 127 * 2.0**-26, 1e-40, 2.0**-149, 127 * 2.0**-149],  # f32 flushes some
)
def test_encoder_refuses_a_scale_outside_f16(largest: float) -> None:
    values = np.stack([group(1), group(1, largest), group(2)])
    values[1, 0] = 0
    check_refused(PayloadValueError, lambda: CODEC.encode(values), says=["f16 range", "in group 1"])


def test_largest_and_smallest_scale_are_kept() -> None:
    for scale, bits in ((65504.0, 0x7BFF), (2.0**-24, 0x0001)):
        payload = CODEC.encode(group(127 * scale))
        assert payload[:2].view("<u2")[0] == bits


@pytest.mark.parametrize("shape", [(31,), (3, 5), (33,), ()])
def test_encoder_refuses_part_of_a_group(shape: tuple[int, ...]) -> None:
    values = np.ones(shape, dtype=np.float32)
    check_refused(PayloadSizeError, lambda: CODEC.encode(values), says=["multiple of 32"])


@pytest.mark.parametrize(("bits", "word"), [(0x7E00, "nan"), (0x7C00, "inf"), (0xBC00, "-1.0")])
def test_validate_names_the_group(bits: int, word: str) -> None:
    units = np.zeros((8, 34), dtype=np.uint8)
    units[5, :2] = np.array([bits], "<u2").view(np.uint8)
    payload = units.reshape(-1)
    cases = [((8, 32), 0, 5), ((8, 32), 96, 101), ((4, 64), 32, 69), ((16, 16), 64, 37)]
    for shape, first_row, number in cases:
        check_refused(
            PayloadValueError,
            lambda shape=shape, first=first_row: CODEC.validate(  # type: ignore[misc]
                payload, shape, first_row=first, path="p", tensor="t"
            ),
            path="p",
            tensor="t",
            says=[f"{word} in group {number}"],
        )


def test_validate_accepts_what_the_encoder_writes() -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((64, 96)).astype(np.float32)
    CODEC.validate(CODEC.encode(values), values.shape)


# ------------------------------------------------------------------ both paths


@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e37, 0.0])
def test_codes_parity(magnitude: float) -> None:
    rng = np.random.default_rng(4)
    values = (rng.standard_normal((257, 32)) * magnitude).astype(np.float32)
    values[3] = 0
    values[5, 7] = np.float32(-0.0)
    values[6] = np.arange(32) - np.float32(15.5)
    args = [values, np.zeros(257, np.float32), np.zeros((257, 34), np.uint8)]
    check_parity(q8f16._codes, args, block_bytes=34)
