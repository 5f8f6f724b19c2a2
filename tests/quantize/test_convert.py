"""Conversions: every source kind to every type, what is exact, what is refused, what is counted."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.errors import ArtifactError
from ds4q.artifact.formats import codec_for, hfp4g32
from ds4q.artifact.numeric import E4M3, E8M0
from ds4q.artifact.types import BF16, F16, F32, HFP4G32, Q8F16, TIDI32, TensorType
from ds4q.quantize import convert
from ds4q.quantize.audit import Kind
from ds4q.quantize.convert import Events, Rows, compare, pack, scale_grid
from ds4q.quantize.errors import InexactError, SourceValueError
from tests.checks import check_parity, check_refused

Array = npt.NDArray[Any]
CODES = np.arange(256, dtype=np.uint8)
NUMBERS = CODES[(CODES & 127) != 127]  # E4M3 without its two NaNs


def rows_of(kind: Kind, values: Array, first: int = 0, **more: Any) -> Rows:
    """Rows of plain numbers; ``values`` already has the source's dtype."""
    raw = np.frombuffer(values.tobytes(), np.uint8)
    return Rows(kind, first, values.shape[0], values.shape[1], raw, **more)


def bf16_rows(values: Array, first: int = 0) -> Rows:
    bits = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2")
    return rows_of("bf16", bits, first)


def fp8_rows(codes: Array, grid: Array, first: int = 0) -> Rows:
    """Codes with their grid of 128 x 128 blocks; one number is the scale of every block."""
    whole = np.asarray(grid, np.float32)
    if not whole.shape:
        shape = -(-(first + codes.shape[0]) // 128), -(-codes.shape[1] // 128)
        whole = np.full(shape, whole, np.float32)
    return rows_of("fp8", codes, first, scale=whole, block=(128, 128))


def fp4_rows(codes: Array, scales: Array, first: int = 0) -> Rows:
    return Rows("fp4", first, len(codes), codes.shape[1] * 2, codes.reshape(-1), scales.reshape(-1))


def packed(rows: Rows, target: TensorType, *, lossless: bool = False) -> tuple[Array, Events]:
    out = np.empty(target.payload_bytes((rows.count, rows.k)), np.uint8)
    return out, pack(rows, target, out, lossless=lossless)


def decoded(rows: Rows, target: TensorType, *, lossless: bool = False) -> Array:
    payload, _ = packed(rows, target, lossless=lossless)
    return codec_for(target.id).decode(payload, (rows.count, rows.k))


# ---------------------------------------------------------------- FP4: bytes move, nothing else


def test_fp4_keeps_every_code_and_scale_byte() -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (7, 160), dtype=np.uint8)
    scales = rng.integers(0, 255, (7, 10), dtype=np.uint8)
    payload, _ = packed(fp4_rows(codes, scales), HFP4G32, lossless=True)
    found = hfp4g32.unpack(payload.reshape(7, -1))
    assert (found[0] == codes).all()
    assert (found[1] == scales).all()


def test_minus_zero_stays() -> None:
    codes = np.full((1, 16), 0x88, np.uint8)
    payload, events = packed(fp4_rows(codes, np.array([[0]], np.uint8)), HFP4G32, lossless=True)
    assert (payload[17:] == 0x88).all()
    assert events == Events()  # an all-zero block at scale 0 is what quantizers write
    values = codec_for(HFP4G32.id).decode(payload, (1, 32))
    assert np.signbit(values).all()


def test_nan_scale_names_row_and_block() -> None:
    codes, scales = np.zeros((3, 64), np.uint8), np.full((3, 4), 120, np.uint8)
    scales[2, 1] = 255
    check_refused(
        SourceValueError,
        lambda: packed(fp4_rows(codes, scales, first=40), HFP4G32),
        says=["NaN scale byte", "0xff in row 42, block 1"],
    )


@pytest.mark.parametrize(
    ("scale", "code", "tiny", "overflow"),
    [
        (0, 0x11, 1, 0),
        (0, 0x80, 0, 0),
        (1, 0x70, 1, 0),
        (2, 0x77, 0, 0),
        (252, 0x77, 0, 0),
        (253, 0x55, 0, 0),
        (253, 0x66, 0, 1),
        (254, 0x33, 0, 0),
        (254, 0xC4, 0, 1),
    ],
)
def test_blocks_at_the_ends_of_the_range_are_counted(
    scale: int, code: int, tiny: int, overflow: int
) -> None:
    codes, scales = np.zeros((2, 64), np.uint8), np.full((2, 4), 120, np.uint8)
    codes[1, 16:32], scales[1, 1] = code, scale
    _, events = packed(fp4_rows(codes, scales), HFP4G32, lossless=True)
    assert (events.tiny_scales, events.overflow_scales) == (tiny, overflow)


def test_a_repack_that_went_wrong_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each packed run is compared with its source: here a bit flips on the way."""
    real = hfp4g32.repack

    def flipped(codes: Array, scales: Array, rows: Array) -> Array:
        real(codes, scales, rows)
        rows[1, 40] ^= 1
        return rows

    monkeypatch.setattr(hfp4g32, "repack", flipped)
    codes, scales = np.zeros((3, 64), np.uint8), np.full((3, 4), 120, np.uint8)
    check_refused(
        ArtifactError,
        lambda: packed(fp4_rows(codes, scales, first=5), HFP4G32),
        says=["packed block differs from its source", "row 6, block 1"],
    )


# ---------------------------------------------------------------- FP8


def bf16_holds(value: float) -> bool:
    """Whether BF16 (8 significant bits, smallest step 2^-133) has ``value``, exactly."""
    if value == 0:
        return True
    mantissa, exponent = math.frexp(abs(value))  # in [0.5, 1)
    step = max(exponent - 8, -133)
    return exponent <= 128 and math.ldexp(mantissa, exponent - step).is_integer()


@pytest.mark.parametrize("scale", range(3, 247))
def test_fp8_is_exact_in_bf16_for_scale_bytes_3_to_246(scale: int) -> None:
    rows = fp8_rows(NUMBERS[None], E8M0[scale])
    payload, events = packed(rows, BF16, lossless=True)
    assert events == Events()
    found = codec_for(BF16.id).decode(payload, (1, 254))[0].astype(np.float64)
    exact = E4M3[NUMBERS].astype(np.float64) * 2.0 ** (scale - 127)
    assert (found == exact).all()
    assert (np.signbit(found) == np.signbit(exact)).all()


@pytest.mark.parametrize("scale", [*range(3), *range(247, 255)])
def test_fp8_outside_is_refused_code_by_code_where_bf16_lacks_the_value(scale: int) -> None:
    grid = E8M0[scale]
    refused = 0
    for code in NUMBERS:
        exact = float(E4M3[code].astype(np.float64) * 2.0 ** (scale - 127))
        rows = fp8_rows(np.array([[code]], np.uint8), grid)
        if bf16_holds(exact):
            assert float(decoded(rows, BF16, lossless=True)[0, 0]) == exact, (code, exact)
        else:
            refused += 1
            kind = SourceValueError if abs(exact) > 1 else InexactError
            with pytest.raises(kind):
                packed(rows, BF16, lossless=True)
    assert refused


def test_inexact_value_names_its_place_and_the_way_out() -> None:
    codes = np.full((4, 8), 0x38, np.uint8)
    codes[2, 5] = 0x01  # 2^-9
    rows = fp8_rows(codes, E8M0[2], first=64)
    error = check_refused(
        InexactError,
        lambda: packed(rows, BF16, lossless=True),
        says=["BF16 does not hold this value exactly", "at row 66, column 5", "fp4-q8"],
    )
    assert error.expected == 2.0**-134
    _, events = packed(rows, BF16, lossless=False)
    assert (events.inexact, events.max_error) == (1, 2.0**-134)


@pytest.mark.parametrize("scale", range(112, 135))
def test_fp8_is_exact_in_f16_for_scale_bytes_112_to_134(scale: int) -> None:
    _, events = packed(fp8_rows(NUMBERS[None], E8M0[scale]), F16)
    assert events == Events()


def test_fp8_in_f16_below_that_is_counted_and_above_refused() -> None:
    _, events = packed(fp8_rows(NUMBERS[None], E8M0[111]), F16)
    assert events.inexact == sum(1 for c in NUMBERS if (E4M3[c] * 2.0**-16 * 2**24) % 1)
    assert events.max_error == 2.0**-25
    with pytest.raises(SourceValueError, match="F16 cannot hold this value"):
        packed(fp8_rows(NUMBERS[None], E8M0[135]), F16)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_nan_names_row_and_column(code: int) -> None:
    codes = np.full((5, 300), 0x38, np.uint8)
    codes[3, 299] = code
    for target in (BF16, F16, Q8F16):
        check_refused(
            SourceValueError,
            partial(packed, fp8_rows(codes[:, 12:], np.ones(()), first=1000), target),
            says=["FP8 NaN", "row 1003, column 287"],
        )


def test_grid_blocks_follow_row_numbers_and_may_be_cut_short() -> None:
    """200 x 300 in blocks of 128: 2 x 3 scales, the last row and column of blocks ragged."""
    grid = E8M0[np.arange(127, 133, dtype=np.uint8).reshape(2, 3)]
    whole = decoded(fp8_rows(np.full((200, 300), 0x38, np.uint8), grid), BF16, lossless=True)
    assert [whole[at] for at in ((127, 127), (0, 299), (128, 128), (150, 290))] == [1, 4, 16, 32]
    for first, count in ((0, 100), (100, 60), (127, 2), (199, 1)):  # runs that cross a block
        codes = np.full((count, 300), 0x38, np.uint8)
        part = decoded(fp8_rows(codes, grid, first=first), BF16, lossless=True)
        assert (part == whole[first : first + count]).all()


@pytest.mark.parametrize("block", [(32, 32), (128, 128), (1, 128), (64, 16)])
def test_fp8_values_parity(block: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    m, k, first = 70, 200, 90
    codes = rng.choice(NUMBERS, (m, k))
    shape = (-(-(first + m) // block[0]), -(-k // block[1]))
    grid = E8M0[rng.integers(0, 255, shape)]
    out = np.empty((m, k), np.float32)
    check_parity(convert._fp8_values, [codes, grid, first, block, out])


@pytest.mark.parametrize(
    ("dtype", "raw"),
    [
        ("F8_E8M0", np.array([120, 130, 0, 254], np.uint8)),
        ("U8", np.array([120, 130, 0, 254], np.uint8)),
        ("F32", np.array([2.0**-7, 8, 2.0**-127, 2.0**127], "<f4").view(np.uint8)),
    ],
)
def test_scale_grids_of_every_dtype(dtype: str, raw: Array) -> None:
    found = scale_grid(raw, dtype, (2, 2))
    assert found.dtype == np.float32
    assert found.tolist() == [[2.0**-7, 8], [2.0**-127, 2.0**127]]


def test_illegal_scales_are_refused() -> None:
    with pytest.raises(SourceValueError, match="0xff at scale 2"):
        scale_grid(np.array([1, 2, 255, 255], np.uint8), "F8_E8M0", (2, 2))
    for bad in (0.0, -1.0, np.inf, np.nan):
        raw = np.array([1, 1, bad, 1], "<f4").view(np.uint8)
        with pytest.raises(SourceValueError, match="not a positive finite number"):
            scale_grid(raw, "F32", (2, 2))


def test_an_f32_scale_that_is_no_power_of_two_is_not_exact() -> None:
    rows = fp8_rows(np.array([[0x3D]], np.uint8), np.array(1.1))
    with pytest.raises(InexactError):
        packed(rows, BF16, lossless=True)


# ---------------------------------------------------------------- raw copies, other floats


FLOATS: list[tuple[Kind, TensorType, str]] = [
    ("bf16", BF16, "<u2"),
    ("f16", F16, "<f2"),
    ("f32", F32, "<f4"),
]


def source_of(kind: Kind, values: Array, first: int = 0) -> Rows:
    if kind == "bf16":
        return bf16_rows(values, first)
    return rows_of(kind, values.astype("<f2" if kind == "f16" else "<f4"), first)


@pytest.mark.parametrize(("kind", "target", "dtype"), FLOATS)
def test_raw_copies_are_the_source_bytes(kind: Kind, target: TensorType, dtype: str) -> None:
    values = np.array([[0.0, -0.0, 1.5, -3.25, 2.0**-14, 65504 * 0.5]], np.float32)
    rows = source_of(kind, values)
    assert convert.is_raw_copy(kind, target)
    payload, events = packed(rows, target, lossless=True)
    assert payload.tobytes() == rows.weight.tobytes()
    assert events == Events()
    assert np.signbit(decoded(rows, target))[0].tolist() == [False, True, False, True, False, False]


@pytest.mark.parametrize(("kind", "target", "dtype"), FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_raw_copies_refuse_what_is_not_finite(
    kind: Kind, target: TensorType, dtype: str, bad: float
) -> None:
    values = np.ones((3, 50), np.float32)
    values[1, 49] = bad
    check_refused(
        SourceValueError,
        lambda: packed(source_of(kind, values, first=7), target, lossless=True),
        says=["not finite", "row 8, column 49"],
    )


@pytest.mark.parametrize("mask", [0x7F80, 0x7C00, 0x7F80_0000])
def test_finite_scan_parity(mask: int) -> None:
    kind = np.uint32 if mask > 0xFFFF else np.uint16
    words: Array = (np.arange(4096) * 7).astype(kind)
    assert check_parity(convert._all_finite, [words & kind(~mask & 0xFFFF), mask])[0] is True
    words[4095] = mask
    assert check_parity(convert._all_finite, [words, mask])[0] is False


@pytest.mark.parametrize("target", [F16, Q8F16])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_conversions_refuse_what_is_not_finite(target: TensorType, bad: float) -> None:
    values = np.ones((4, 64), np.float32)
    values[2, 3] = bad
    with pytest.raises(SourceValueError, match=r"in rows 10\.\.13"):
        packed(source_of("f32", values, first=10), target)


def test_f16_overflow_is_refused_and_rounding_counted() -> None:
    with pytest.raises(SourceValueError, match="F16 cannot hold this value"):
        packed(bf16_rows(np.array([[1.0, 65536.0]])), F16)
    values = np.array([[1.0, 2.0**-26, 2.0**-24, 1 + 2.0**-7, 1000.0, -0.0]])
    _, events = packed(bf16_rows(values), F16)
    assert (events.inexact, events.max_error) == (1, 2.0**-26)  # flushed to zero
    rows = source_of("f32", np.array([[0.1, 0.5, 1 + 2.0**-11]]))
    _, events = packed(rows, F16)
    assert events.inexact == 2
    assert events.max_error == 2.0**-11
    with pytest.raises(InexactError, match="row 0, column 0"):
        packed(rows, F16, lossless=True)


def test_q8f16_counts_every_value_that_changes() -> None:
    rng = np.random.default_rng(5)
    values = rng.standard_normal((6, 96)).astype(np.float32)
    rows = source_of("f32", values)
    payload, events = packed(rows, Q8F16)
    back = codec_for(Q8F16.id).decode(payload, values.shape)
    assert events.inexact == int((back != values).sum())
    assert events.max_error == float(np.abs(values.astype(np.float64) - back).max())
    assert 0 < events.max_error < np.abs(values).max() / 127


def test_q8f16_loses_the_sign_of_zero_and_says_so() -> None:
    _, events = packed(source_of("f32", np.array([[-0.0] + [0.0] * 31])), Q8F16)
    assert (events.inexact, events.max_error) == (1, 0.0)


def test_f16_keeps_the_sign_of_zero() -> None:
    _, events = packed(source_of("f32", np.array([[-0.0, 0.0]])), F16)
    assert events == Events()


# ---------------------------------------------------------------- ids


@pytest.mark.parametrize(("kind", "dtype"), [("i64", "<i8"), ("i32", "<i4")])
def test_ids_become_unsigned_words(kind: Kind, dtype: str) -> None:
    ids = np.array([[0, 5], [7, 3]], dtype)
    payload, events = packed(rows_of(kind, ids, ids_below=8), TIDI32, lossless=True)
    assert payload.view("<u4").tolist() == [0, 5, 7, 3]
    assert events == Events()


@pytest.mark.parametrize(("kind", "dtype"), [("i64", "<i8"), ("i32", "<i4")])
@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1])
def test_an_id_that_names_no_expert_is_refused(kind: Kind, dtype: str, bad: int) -> None:
    ids = np.zeros((3, 6), dtype)
    ids[2, 4] = bad
    check_refused(
        SourceValueError,
        lambda: packed(rows_of(kind, ids, 30, ids_below=8), TIDI32),
        says=["id out of range", "expected 0..7", f"{bad} at row 32, column 4"],
    )


def test_without_a_config_ids_fit_their_type() -> None:
    ids = np.array([[2**32 - 1, 0]], "<i8")
    assert packed(rows_of("i64", ids), TIDI32)[0].view("<u4").tolist() == [2**32 - 1, 0]
    with pytest.raises(SourceValueError, match="4294967296 at row 0, column 1"):
        packed(rows_of("i64", np.array([[0, 2**32]], "<i8")), TIDI32)


# ---------------------------------------------------------------- events


def test_events_add_up() -> None:
    total = Events()
    total.add(Events(inexact=2, max_error=0.5, tiny_scales=1))
    total.add(Events(inexact=3, max_error=0.25, overflow_scales=4))
    assert total == Events(5, 0.5, 1, 4)
    assert total.document() == {
        "inexact": 5,
        "max_error": 0.5,
        "tiny_scales": 1,
        "overflow_scales": 4,
    }
    assert Events().document() == {}


# ---------------------------------------------------------------- the comparison back


def some_rows(target: TensorType, first: int = 0) -> Rows:
    """Source rows that become ``target``: 40 rows of 64."""
    rng = np.random.default_rng(7)
    if target is HFP4G32:
        codes = rng.integers(0, 256, (40, 32), dtype=np.uint8)
        return fp4_rows(codes, rng.integers(100, 140, (40, 2), dtype=np.uint8), first)
    if target is TIDI32:
        return rows_of("i64", rng.integers(0, 9, (40, 64)).astype("<i8"), first, ids_below=9)
    return source_of("f32", rng.standard_normal((40, 64)).astype(np.float32), first)


ALL_TARGETS = [HFP4G32, F32, F16, BF16, Q8F16, TIDI32]


@pytest.mark.parametrize("target", ALL_TARGETS, ids=lambda t: t.name)
def test_packed_rows_compare_equal(target: TensorType) -> None:
    rows = some_rows(target)
    payload, _ = packed(rows, target)
    before = payload.copy()
    assert compare(rows, target, payload) is None
    assert (payload == before).all()


@pytest.mark.parametrize("target", ALL_TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("seed", range(25))
def test_any_changed_byte_is_found_at_its_place(target: TensorType, seed: int) -> None:
    """Row, block and both byte strings are right, with rows that begin in mid-tensor."""
    rng = np.random.default_rng(seed)
    rows = some_rows(target, first=1000)
    payload, _ = packed(rows, target)
    at = int(rng.integers(payload.size))
    changed = payload.copy()
    changed[at] ^= np.uint8(1 << rng.integers(8))
    found = compare(rows, target, changed)
    assert found is not None
    row_bytes = payload.size // 40
    row, rest = divmod(at, row_bytes)
    header = target.row_header_bytes
    block = (rest - header) // target.block_bytes if rest >= header else -1
    start = row * row_bytes + (header + block * target.block_bytes if block >= 0 else 0)
    stop = start + (target.block_bytes if block >= 0 else header)
    assert (found.row, found.block) == (1000 + row, block)
    assert found.expected == payload[start:stop].tobytes().hex()
    assert found.found == changed[start:stop].tobytes().hex()


def test_the_first_difference_is_reported() -> None:
    rows = some_rows(HFP4G32)
    payload, _ = packed(rows, HFP4G32)
    payload[[1999, 700, 900]] ^= 1
    found = compare(rows, HFP4G32, payload)
    assert found is not None
    assert found.row == 700 // (payload.size // 40)
