"""The type table: upstream's numbers and ours, payload lengths, reserved and unknown numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact import types
from ds4q.artifact.errors import IndexFieldError, PayloadSizeError, TensorTypeError
from ds4q.artifact.formats import Coding, MixRow, codec_for
from ds4q.artifact.hfq import Reader
from ds4q.artifact.types import (
    BF16,
    BY_NAME,
    F16,
    F32,
    HFP4G32,
    MIXED,
    MQ2_LLOYD,
    Q8F16,
    RAW,
    RESERVED_IDS,
    ROCMFPX,
    ROW_GRANULE,
    TIDI32,
    TYPES,
    check_entry,
    decodable,
    matrix_shape,
    row_runs,
    type_of,
)
from tests.checks import check_refused

# hipfire docs/quant-formats/qt-register.txt: number and name of every type of its own.
REGISTER = """
0 Q4F16G64, 1 F16, 2 F32, 3 Q8F16, 4 Q4K, 5 Q8HFQ, 6 HFQ4G256, 7 HFQ4G128, 8 HFQ6G256,
9 HFQ2G256, 10 HFQ2G128, 11 HFQ3G256, 12 HFQ3G128, 13 MQ4G256, 14 MQ8G256, 15 MQ6G256, 16 BF16,
17 MQ3G256, 18 MQ2G256, 19 MQ2G256Lloyd, 20 MQ3G256Lloyd, 21 HFP4G32, 22 TidI32, 24 MFP4G32,
28 PARO4G128, 29 PARO4G128T, 30 MQ4G256Lloyd, 31 MQ5G256, 32 MFP4G32Lloyd, 33 MFP4G32P,
34 MFP4G32E8, 35 MFP4G32E8SOA, 36 MFP3G32E8, 37 MFP2G32E8, 38 MQ2G256GL, 39 MQ3G256GL,
40 TQ2G128, 41 BQ1G128, 44 MQ4G256V2, 45 MQ4CG256, 47 MQ6G256V2, 48 MQ5G256V2, 49 MQ3G256V2,
50 MQ2G256V2, 51 MQ2G256LloydU, 52 MQ4G256V2Lloyd, 53 MQ4G128V2
"""
UPSTREAM = [(int(n), name) for n, name in re.findall(r"(\d+) (\w+)", REGISTER)]
# Lucebox's GGML numbers, and ds4q's own for bytes that are no weights.
PRIVATE = [
    (100, "ROCmFP4"),
    (101, "ROCmFP4Fast"),
    (102, "ROCmFP6"),
    (103, "ROCmFP8"),
    (104, "ROCmFP3"),
    (105, "ROCmFP3Mix"),
    (106, "ROCmFP2Mix"),
    (107, "ROCmFP2"),
    (120, "Raw"),
]
NUMBERED = UPSTREAM + PRIVATE
# What the codecs of these types cannot do without.
CODINGS: dict[int, Coding] = {
    102: "zero",
    105: MixRow(0, b""),
    106: MixRow(0, b""),
    107: "dual",
}

# Bytes of a tensor [4, 1024], from hipfire's length formulas.
M, K = 4, 1024
LENGTHS = {
    **dict.fromkeys([1, 16], 2 * M * K),
    **dict.fromkeys([2, 22], 4 * M * K),
    3: 34 * M * K // 32,
    **dict.fromkeys([6, 13, 44, 45, 52], 136 * M * K // 256),
    **dict.fromkeys([18, 19, 50, 51], 72 * M * K // 256),
    20: 112 * M * K // 256,
    30: 160 * M * K // 256,
    **dict.fromkeys([15, 47], 200 * M * K // 256),
    **dict.fromkeys([31, 48], 168 * M * K // 256),
    **dict.fromkeys([17, 49], 104 * M * K // 256),
    **dict.fromkeys([21, 24, 33, 34], M * (16 + 17 * 32)),
    32: 32 + M * (16 + 17 * 32),
    35: M * (16 + 32 + 16 * 32),
    36: M * (16 + 13 * 32),
    37: M * (16 + 9 * 32),
    38: 66 * M * K // 256,
    39: 98 * M * K // 256,
    40: 34 * M * K // 128,
    41: 18 * M * K // 128,
    100: 18 * M * K // 32,
    101: 17 * M * K // 32,
    102: 26 * M * K // 32,
    103: 33 * M * K // 32,
    **dict.fromkeys([104, 105], 14 * M * K // 32),
    **dict.fromkeys([106, 107], 10 * M * K // 32),
    120: M * K,
}

# ------------------------------------------------------------------ numbers and names


@pytest.mark.parametrize(("number", "name"), NUMBERED)
def test_register(number: int, name: str) -> None:
    assert type_of(number).name == name
    assert type_of(number).id == number
    assert BY_NAME[name] is TYPES[number]


def test_table_holds_the_register_and_nothing_else() -> None:
    assert sorted(TYPES) == [number for number, _ in NUMBERED]
    assert len(BY_NAME) == len(TYPES)


def test_named_constants() -> None:
    constants = {
        F16: 1,
        F32: 2,
        Q8F16: 3,
        BF16: 16,
        MQ2_LLOYD: 19,
        HFP4G32: 21,
        TIDI32: 22,
        RAW: 120,
    }
    constants |= {kind: 100 + n for n, kind in enumerate(ROCMFPX)}
    assert [kind.id for kind in MIXED] == [105, 106]
    assert {kind: kind.id for kind in constants} == constants
    assert {kind for kind in TYPES.values() if kind.codec} == constants.keys()


@pytest.mark.parametrize("number", [23, 25, 26, 27, 43])
def test_reserved_number(number: int) -> None:
    assert number in RESERVED_IDS
    check_refused(
        TensorTypeError,
        lambda: type_of(number, path="p", tensor="t"),
        path="p",
        tensor="t",
        says=[f"reserved tensor type {number}"],
    )


def test_reserved_numbers_are_exactly_these() -> None:
    assert frozenset({23, 25, 26, 27, 43}) == RESERVED_IDS


@pytest.mark.parametrize("number", [42, 46, 54, 99, 108, 109, 110, 111, 119, 121, 255, -1])
def test_unknown_number(number: int) -> None:
    check_refused(TensorTypeError, lambda: type_of(number), says=[f"unknown tensor type {number}"])


@pytest.mark.parametrize("number", [n for n, _ in NUMBERED])
def test_decodable_exactly_where_there_is_a_codec(number: int) -> None:
    if number in (1, 2, 3, 16, 19, 21, 22) or number >= 100:
        assert decodable(number) is TYPES[number]
        assert codec_for(number, CODINGS.get(number)).type is TYPES[number]
    else:
        name = TYPES[number].name
        for look in (decodable, codec_for):
            check_refused(
                TensorTypeError,
                lambda look=look: look(number, path="p", tensor="t"),  # type: ignore[misc]
                path="p",
                tensor="t",
                says=[f"no codec for tensor type {number} ({name})"],
            )


# ------------------------------------------------------------------ lengths


@pytest.mark.parametrize("number", sorted(TYPES))
def test_payload_length(number: int) -> None:
    kind = TYPES[number]
    if number in LENGTHS:
        assert kind.payload_bytes((M, K)) == LENGTHS[number]
        assert kind.payload_bytes((2, M // 2, K)) == LENGTHS[number]
    else:
        check_refused(
            TensorTypeError, lambda: kind.payload_bytes((M, K)), says=[kind.name, "not known"]
        )


@pytest.mark.parametrize(
    ("k", "row_bytes"),
    [
        (32, 33),
        (64, 50),
        (192, 118),
        (256, 152),
        (288, 169),
        (512, 288),
        (704, 390),
        (1024, 560),
        (2048, 1104),
        (2304, 1240),
        (3072, 1648),
        (4096, 2192),
        (7168, 3824),
    ],
)
def test_hfp4_row_bytes(k: int, row_bytes: int) -> None:
    assert HFP4G32.row_bytes(k) == row_bytes
    assert HFP4G32.payload_bytes((3, k)) == 3 * row_bytes


def test_true_expert_sizes() -> None:
    assert HFP4G32.payload_bytes((2048, 4096)) == 4_489_216
    assert HFP4G32.payload_bytes((4096, 2048)) == 4_521_984
    assert TYPES[19].payload_bytes((2048, 4096)) == 2_359_296
    assert TYPES[20].payload_bytes((2048, 4096)) == 3_670_016
    assert TYPES[30].payload_bytes((2048, 4096)) == 5_242_880
    sizes = {
        100: 4_718_592,
        101: 4_456_448,
        102: 6_815_744,
        103: 8_650_752,
        104: 3_670_016,
        105: 3_670_016,
        106: 2_621_440,
        107: 2_621_440,
    }
    for number, nbytes in sizes.items():
        for shape in ((2048, 4096), (4096, 2048)):
            assert TYPES[number].payload_bytes(shape) == nbytes
            check_entry(number, shape, 32, nbytes)


@pytest.mark.parametrize("kind", ROCMFPX, ids=lambda kind: kind.name)
def test_blocks_of_rocmfpx_do_not_run_across_rows(kind: types.TensorType) -> None:
    multiple = 128 if kind.id in (106, 107) else 32
    assert kind.row_multiple == multiple
    blocks = multiple // 32
    assert kind.payload_bytes((3, multiple)) == 3 * blocks * kind.block_bytes
    assert kind.span(2, 1, multiple) == (
        2 * blocks * kind.block_bytes,
        blocks * kind.block_bytes,
    )
    # 2 x 16 weights are whole blocks in all, and no row of theirs is.
    for k in {16, multiple // 2, multiple + 16, multiple + multiple // 4}:
        error = check_refused(
            PayloadSizeError,
            lambda k=k: kind.payload_bytes((2 * blocks, k)),  # type: ignore[misc]
            says=[kind.name],
        )
        assert (error.expected, error.found) == (f"a multiple of {multiple}", k)
    check_refused(PayloadSizeError, lambda: kind.payload_bytes((4, 0)), says=[kind.name])


def test_what_a_payload_cannot_be_read_without() -> None:
    assert {k.id: k.coding for k in TYPES.values() if k.coding} == {
        102: "variant",
        105: "row",
        106: "row",
        107: "variant",
    }


def test_raw_bytes_have_any_length() -> None:
    check_entry(120, (62,), 0, 62)
    for nbytes in (61, 63):
        check_refused(
            PayloadSizeError,
            lambda nbytes=nbytes: check_entry(120, (62,), 0, nbytes),  # type: ignore[misc]
        )
    check_refused(IndexFieldError, lambda: check_entry(120, (62,), 32, 62))


def test_soa_rows_pad_their_scales_to_sixteen() -> None:
    kind = TYPES[35]
    assert [kind.row_bytes(k) for k in (32, 480, 512, 544)] == [
        16 + 16 + 16,
        16 + 16 + 15 * 16,
        16 + 16 + 16 * 16,
        16 + 32 + 17 * 16,
    ]


@pytest.mark.parametrize(
    ("kind", "shape", "nbytes"),
    [(F16, (), 2), (F32, (), 4), (TIDI32, (7,), 28), (Q8F16, (16, 2), 34), (HFP4G32, (64,), 50)],
)
def test_scalars_and_vectors(kind: types.TensorType, shape: tuple[int, ...], nbytes: int) -> None:
    assert kind.payload_bytes(shape) == nbytes


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (HFP4G32, (3, 48)),
        (HFP4G32, (3, 16)),
        (HFP4G32, ()),
        (HFP4G32, (32, 1)),
        (HFP4G32, (4, 0)),
        (Q8F16, (3, 5)),
        (Q8F16, ()),
        (F16, (4, 0)),
        (TYPES[13], (2, 100)),
    ],
)
def test_shape_that_the_type_cannot_hold(kind: types.TensorType, shape: tuple[int, ...]) -> None:
    check_refused(PayloadSizeError, lambda: kind.payload_bytes(shape), says=[kind.name])


def test_rows_longer_than_their_block_count_field() -> None:
    assert HFP4G32.row_bytes(2_097_120) == 16 + 17 * 65535
    error = check_refused(PayloadSizeError, lambda: HFP4G32.row_bytes(2_097_152))
    assert (error.expected, error.found) == ("at most 2097120", 2_097_152)


def test_lengths_do_not_overflow() -> None:
    shape = (2**32 - 1,) * 255
    assert F32.payload_bytes(shape) == 4 * (2**32 - 1) ** 255


# ------------------------------------------------------------------ index entries


def test_entry_that_fits() -> None:
    check_entry(21, (2, 256), 32, 304)
    check_entry(1, (), 0, 2)
    check_entry(4, (3, 3), 17, 12345)  # Q4K: no length is known here


@pytest.mark.parametrize("nbytes", [303, 305, 0, 2**64 - 1])
def test_entry_of_another_length(nbytes: int) -> None:
    error = check_refused(
        PayloadSizeError,
        lambda: check_entry(21, (2, 256), 32, nbytes, path="p", tensor="t"),
        path="p",
        tensor="t",
    )
    assert (error.expected, error.found) == ("304 bytes", f"{nbytes} bytes")


def test_entry_of_another_group_size() -> None:
    # A file from before hipfire moved MQ4G256Lloyd from 21 to 30.
    error = check_refused(
        IndexFieldError,
        lambda: check_entry(21, (2, 256), 256, 320, path="p", tensor="t"),
        path="p",
        tensor="t",
    )
    assert (error.expected, error.found) == (32, 256)


def test_entry_whose_rows_do_not_divide() -> None:
    check_refused(
        PayloadSizeError,
        lambda: check_entry(21, (3, 48), 32, 99, path="p", tensor="t"),
        path="p",
        tensor="t",
        says=["a multiple of 32", "48"],
    )


# ------------------------------------------------------------------ rows of a tensor


@pytest.mark.parametrize(
    ("shape", "rows", "k"),
    [((), 1, 1), ((7,), 1, 7), ((3, 5), 3, 5), ((2, 3, 5), 6, 5), ((4, 1), 4, 1)],
)
def test_matrix_shape(shape: tuple[int, ...], rows: int, k: int) -> None:
    assert matrix_shape(shape) == (rows, k)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 1 << 20))
def test_row_runs_cover_every_row_once(rows: int, row_bytes: int, limit_bytes: int) -> None:
    runs = list(row_runs(rows, row_bytes, limit_bytes))
    assert [r for first, count in runs for r in range(first, first + count)] == list(range(rows))
    assert all(first % ROW_GRANULE == 0 for first, _ in runs)
    assert all(count * row_bytes <= max(limit_bytes, ROW_GRANULE * row_bytes) for _, count in runs)


# ------------------------------------------------------------------ one number, one meaning


def test_c10_number_22_is_a_table_of_integers(cases_dir: Path) -> None:
    with Reader(cases_dir / "c10_id22.hfq") as reader:
        entry = reader.entry("t.weight")
        ids = codec_for(entry.type_id).decode(reader.read("t.weight"), entry.shape)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert ids.dtype.kind == "i"


def test_c10_number_23_is_reserved(cases_dir: Path) -> None:
    path = cases_dir / "c10_id23.hfq"
    check_refused(
        TensorTypeError,
        lambda: Reader(path),
        path=path,
        tensor="t.weight",
        says=["reserved tensor type 23"],
    )


def test_c10_number_99_is_unknown(cases_dir: Path) -> None:
    path = cases_dir / "c10_id99.hfq"
    with Reader(path) as reader:  # `inspect` may list it
        entry = reader.entry("t.weight")
        assert (entry.type_id, entry.shape, entry.nbytes) == (99, (1, 32), 33)
    check_refused(
        TensorTypeError,
        lambda: codec_for(entry.type_id, path=path, tensor=entry.name),
        path=path,
        tensor="t.weight",
        says=["unknown tensor type 99"],
    )
