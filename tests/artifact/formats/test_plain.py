"""F16, F32, BF16, TidI32 and raw bytes: golden bytes, rounding, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.errors import PayloadSizeError, PayloadValueError
from ds4q.artifact.formats import Codec, codec_for
from tests.checks import Array, check_golden, check_refused, check_round_trip, same_bits

F16, F32, BF16, TIDI32 = codec_for(1), codec_for(2), codec_for(16), codec_for(22)
RAW = codec_for(120)
FLOATS = pytest.mark.parametrize("codec", [F16, F32, BF16], ids=lambda c: c.type.name)
ANY_SHAPE = [(), (1,), (5,), (2, 3), (2, 3, 4)]


@FLOATS
@pytest.mark.parametrize("shape", ANY_SHAPE)
def test_floats_survive(codec: Codec, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    values = (rng.integers(-128, 128, shape) / 8).astype(np.float32).reshape(shape)
    payload = check_round_trip(codec, values)
    assert len(payload) == values.size * codec.type.block_bytes


def test_golden_bytes() -> None:
    values = np.array([1, -2, 0.5, -0.0, 65504], dtype=np.float32)
    check_golden(F16.encode(values), "003c 00c0 0038 0080 ff7b")
    check_golden(F32.encode(values), "0000803f 000000c0 0000003f 00000080 00e07f47")
    check_golden(BF16.encode(values[:4]), "803f 00c0 003f 0080")
    check_golden(
        TIDI32.encode(np.array([0, 1, 255, 2**32 - 1])), "00000000 01000000 ff000000 ffffffff"
    )


@FLOATS
def test_minus_zero_and_subnormals_keep_their_bits(codec: Codec) -> None:
    smallest = {1: 2.0**-24, 2: 2.0**-149, 16: 2.0**-133}[codec.type.id]
    check_round_trip(codec, np.array([-0.0, 0.0, smallest, -smallest], dtype=np.float32))


@pytest.mark.parametrize("codec", [F16, BF16], ids=lambda c: c.type.name)
def test_every_finite_pattern_survives(codec: Codec) -> None:
    patterns = np.arange(65536, dtype="<u2")
    mask = {1: 0x7C00, 16: 0x7F80}[codec.type.id]
    finite = patterns[patterns & mask != mask]
    values = codec.decode(finite.view(np.uint8), finite.shape)
    same_bits(codec.encode(values), finite.view(np.uint8))
    codec.validate(finite.view(np.uint8), finite.shape)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1 + 2**-8, 0x3F80),  # half way: down to even
        (1 + 3 * 2**-8, 0x3F82),  # half way: up to even
        (1 + 2**-8 + 2**-20, 0x3F81),
        (-(1 + 2**-8), 0xBF80),
        (2.0**-134, 0x0000),
        (2.0**-134 * 1.5, 0x0001),
        (255.5, 0x4380),  # carries into the exponent
    ],
)
def test_bf16_rounds_to_nearest_even(value: float, expected: int) -> None:
    packed = BF16.encode(np.array([value], dtype=np.float32))
    assert packed.view("<u2").tolist() == [expected]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bf16_is_the_nearest(value: float) -> None:
    try:
        packed = BF16.encode(np.array([value], dtype=np.float32))
    except PayloadValueError:
        assert abs(value) >= 2.0**127 * (2 - 2.0**-8)
        return
    got = float(BF16.decode(packed, (1,))[0])
    word = int(packed.view("<u2")[0])
    for near in (word - 1, word + 1):
        if 0 <= near < 65536 and near & 0x7F80 != 0x7F80 and near >> 15 == word >> 15:
            other = float(BF16.decode(np.array([near], "<u2").view(np.uint8), (1,))[0])
            assert abs(got - value) <= abs(other - value)


def test_f16_rounds_to_nearest_even() -> None:
    values = np.array([2049, 2051, 1 + 2**-11, 65519.996], dtype=np.float32)
    assert F16.decode(F16.encode(values), (4,)).tolist() == [2048, 2052, 1, 65504]


# ------------------------------------------------------------------ refusals


@FLOATS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_encoder_refuses_what_is_not_finite(codec: Codec, bad: float) -> None:
    values = np.array([[1, 2], [3, bad]], dtype=np.float32)
    name = codec.type.name
    check_refused(
        PayloadValueError,
        lambda: codec.encode(values),
        says=[f"{name} cannot hold this value", "at 3"],
    )


@pytest.mark.parametrize(
    ("codec", "value"),
    [(F16, 65520.0), (F16, -1e30), (BF16, 3.4e38), (BF16, 1e300), (F32, 1e300), (F32, 3.5e38)],
)
def test_encoder_refuses_what_would_overflow(codec: Codec, value: float) -> None:
    values = np.array([0, value])
    check_refused(
        PayloadValueError,
        lambda: codec.encode(values),
        says=["cannot hold this value", "at 1"],
    )


@FLOATS
@pytest.mark.parametrize("bad", [0, 1, 2], ids=["nan", "inf", "-inf"])
def test_validate_names_the_element(codec: Codec, bad: int) -> None:
    patterns = {1: (0x7E00, 0x7C00, 0xFC00), 16: (0x7FC0, 0x7F80, 0xFF80)}
    number = codec.type.id
    if number == 2:
        packed = np.zeros(6, "<u4")
        packed[4] = (0x7FC00000, 0x7F800000, 0xFF800000)[bad]
    else:
        packed = np.zeros(6, "<u2").astype("<u2")
        packed[4] = patterns[number][bad]
    payload = packed.view(np.uint8)
    for first_row, element in ((0, 4), (10, 34)):
        check_refused(
            PayloadValueError,
            lambda first=first_row: codec.validate(  # type: ignore[misc]
                payload, (2, 3), first_row=first, path="p", tensor="t"
            ),
            path="p",
            tensor="t",
            says=["not finite", f"element {element}"],
        )


def test_every_bf16_is_told_finite_or_not() -> None:
    for pattern in range(1 << 16):
        payload = np.array([0x3F80, pattern, 0xBF80], "<u2").view(np.uint8)
        try:
            BF16.validate(payload, (1, 3))
            found = True
        except PayloadValueError:
            found = False
        assert found == (pattern & 0x7F80 != 0x7F80), hex(pattern)


@pytest.mark.parametrize("bad", [-1, 2**32, -(2**63)])
def test_ids_out_of_range(bad: int) -> None:
    values = np.array([0, bad, 5], dtype=np.int64)
    check_refused(PayloadValueError, lambda: TIDI32.encode(values), says=["0..2^32-1", str(bad)])


def test_ids_are_integers() -> None:
    values = np.array([0, 2**31, 2**32 - 1], dtype=np.int64)
    back = TIDI32.decode(TIDI32.encode(values), (3,))
    assert back.dtype == np.int64
    assert back.tolist() == values.tolist()
    fractions: Array = np.array([0.5, 1.5])
    check_refused(PayloadValueError, lambda: TIDI32.encode(fractions), says=["not integers"])


def test_raw_bytes_stay_as_they_are() -> None:
    values = np.arange(256, dtype=np.uint8)
    payload = check_round_trip(RAW, values)
    same_bits(payload, values)
    back = RAW.decode(payload, (256,))
    back[0] = 9
    assert payload[0] == 0  # a copy
    wide: Array = np.arange(3)
    check_refused(PayloadValueError, lambda: RAW.encode(wide), says=["not uint8", "int64"])


@pytest.mark.parametrize("codec", [F16, F32, BF16, TIDI32, RAW], ids=lambda c: c.type.name)
def test_payload_of_another_length(codec: Codec) -> None:
    width = codec.type.block_bytes
    for nbytes in (5 * width, 7 * width, 6 * width - 1, 0):
        payload = np.zeros(nbytes, dtype=np.uint8)
        for use in (codec.decode, codec.validate):
            error = check_refused(
                PayloadSizeError,
                lambda use=use, payload=payload: use(payload, (2, 3)),  # type: ignore[misc]
            )
            assert (error.expected, error.found) == (6 * width, nbytes)


@pytest.mark.parametrize("codec", [F16, F32, BF16, TIDI32, RAW], ids=lambda c: c.type.name)
def test_scalar_can_be_validated(codec: Codec) -> None:
    payload = np.zeros(codec.type.block_bytes, dtype=np.uint8)
    codec.validate(payload, ())
    assert codec.decode(payload, ()).shape == ()
