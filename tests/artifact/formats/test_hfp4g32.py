"""HFP4G32: the repack to the byte, its inverse, where rows differ, what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.errors import PayloadSizeError, PayloadValueError
from ds4q.artifact.formats import codec_for, hfp4g32
from ds4q.artifact.numeric import E2M1
from ds4q.artifact.types import HFP4G32
from tests.artifact.build import source_tensors
from tests.checks import Array, check_golden, check_parity, check_refused, same_bits

CODEC = codec_for(21)
W1, S1 = "layers.0.ffn.experts.0.w1.weight", "layers.0.ffn.experts.0.w1.scale"
CODES_0_15 = "1032547698badcfe"
WIDTHS = [32, 64, 96, 128, 160, 256, 288, 704, 2304]


def random_source(m: int, k: int, seed: int = 0) -> tuple[Array, Array]:
    """Codes (m, k/2) and scale bytes (m, k/32): neighbouring scales differ, none is NaN."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (m, k // 2), dtype=np.uint8)
    scales = (np.arange(m * k // 32) * 7 % 255).astype(np.uint8).reshape(m, k // 32)
    return codes, scales


def from_case(path: Path) -> tuple[Array, Array, Array]:
    """Codes, scales and repacked rows of a case file."""
    tensors = source_tensors(path)
    codes, scales = tensors[W1], tensors[S1]
    return codes, scales, hfp4g32.repack(codes, scales)


def values_of(rows: Array) -> Array:
    k = (rows.shape[1] - 16) // 17 * 32
    return CODEC.decode(rows.reshape(-1), (len(rows), k))


def row(scales: bytes, codes: bytes, row_scale: bytes = b"\x00\x3c") -> Array:
    """One row, built by hand."""
    head = row_scale + b"\0\0" + len(scales).to_bytes(2, "little") + bytes(10)
    body = b"".join(scales[j : j + 1] + codes[16 * j : 16 * j + 16] for j in range(len(scales)))
    return np.frombuffer(head + body, dtype=np.uint8).reshape(1, -1).copy()


# ------------------------------------------------------------------ golden bytes


def test_worked_row() -> None:
    codes = np.zeros((1, 16), dtype=np.uint8)
    codes[0, 0] = 0x42
    rows = hfp4g32.repack(codes, np.array([[0x80]], dtype=np.uint8))
    check_golden(rows, "003c0000010000000000000000000000 80 42 000000000000000000000000000000")
    assert values_of(rows)[0].tolist() == [2, 4] + [0] * 30


def test_golden_source_bytes() -> None:
    for byte, scale, expected in ((0x42, 127, [1, 2]), (0x12, 128, [2, 1])):
        codes = np.full((1, 16), byte, dtype=np.uint8)
        rows = hfp4g32.repack(codes, np.array([[scale]], dtype=np.uint8))
        assert values_of(rows)[0, :2].tolist() == expected


def test_header_of_a_row_of_4096() -> None:
    assert hfp4g32.row_header(4096).tobytes().hex() == "003c0000800000000000000000000000"
    assert hfp4g32.row_header(2_097_120).tobytes().hex() == "003c0000ffff00000000000000000000"


def test_c06_nibble_order(cases_dir: Path) -> None:
    _, _, rows = from_case(cases_dir / "c06_nibble.safetensors")
    check_golden(rows, "003c0000010000000000000000000000 7f" + CODES_0_15 * 2)
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6] * 2
    values = values_of(rows)[0]
    assert values.tolist() == expected
    assert values[8].tobytes() == b"\x00\x00\x00\x80"  # -0 keeps its sign


def test_c07_scale_grid_is_not_transposed(cases_dir: Path) -> None:
    _, _, rows = from_case(cases_dir / "c07_scale2x2.safetensors")
    assert values_of(rows).sum(axis=1).tolist() == [96, 384]


def test_c08_exponent_is_not_a_number(cases_dir: Path) -> None:
    _, _, rows = from_case(cases_dir / "c08_scale120.safetensors")
    check_golden(rows[0, 16:19], "78 22 22")
    assert (values_of(rows) == 0.0078125).all()


def test_c09_ends_of_the_scale_range(cases_dir: Path) -> None:
    codes, scales, rows = from_case(cases_dir / "c09_edge_scales.safetensors")
    digest = "dd169fc35bf35c09fd09ada7e55dc74c2ab87514f200c7bf3981cb71b79c9c7b"
    assert hashlib.sha256(rows.tobytes()).hexdigest() == digest
    assert scales[0].tolist() == [0x00, 0x01, 0x6E, 0x7F, 0x80, 0x96, 0xFD, 0xFE]
    values = values_of(rows)[0].reshape(8, 32)
    assert [hex(v) for v in values[0, [2, 1, 7]].view(np.uint32)] == [
        "0x400000",
        "0x200000",
        "0x1400000",
    ]
    assert values[7, 3] == np.float32(2.5521178e38)
    assert np.isinf(values[7, 4])
    CODEC.validate(rows.reshape(-1), (1, 256))
    assert hfp4g32.scan(rows) == (-1, 2, 2)
    back = hfp4g32.unpack(rows)
    same_bits(back[0], codes)
    same_bits(back[1], scales)


def test_c09_nan_scale_is_kept_and_refused(cases_dir: Path) -> None:
    _, scales, rows = from_case(cases_dir / "c09_scale_nan.safetensors")
    assert scales[0, 7] == rows[0, 16 + 7 * 17] == 0xFF
    assert np.isnan(values_of(rows)[0, 224:]).all()
    check_refused(
        PayloadValueError,
        lambda: CODEC.validate(rows.reshape(-1), (1, 256), path="p", tensor=W1),
        path="p",
        tensor=W1,
        says=["NaN scale byte in row 0, block 7", "0xff"],
    )


@pytest.mark.parametrize(
    ("k", "row_bytes"), [(32, 33), (64, 50), (192, 118), (288, 169), (704, 390), (2304, 1240)]
)
def test_c11_row_lengths(k: int, row_bytes: int, cases_dir: Path) -> None:
    _, _, rows = from_case(cases_dir / f"c11_K{k}.safetensors")
    assert rows.shape == (3, row_bytes)
    assert (rows == rows[0]).all()
    assert values_of(rows).shape == (3, k)


# ------------------------------------------------------------------ there and back


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("m", [1, 3])
def test_unpack_is_the_inverse(m: int, k: int) -> None:
    codes, scales = random_source(m, k)
    kept = codes.copy(), scales.copy()
    rows = hfp4g32.repack(codes, scales)
    assert rows.shape == (m, HFP4G32.row_bytes(k))
    back = hfp4g32.unpack(rows)
    for found, expected, before in zip(back, (codes, scales), kept, strict=True):
        same_bits(found, expected)
        same_bits(expected, before, what="input")
    assert hfp4g32.first_difference(codes, scales, rows) is None
    CODEC.validate(rows.reshape(-1), (m, k))


@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.binary(min_size=17, max_size=17))
def test_any_bytes_survive(blocks: int, seed: int, block: bytes) -> None:
    codes, scales = random_source(2, 32 * blocks, seed)
    scales[1, -1], codes[1, -16:] = block[0], np.frombuffer(block[1:], np.uint8)
    back = hfp4g32.unpack(hfp4g32.repack(codes, scales))
    same_bits(back[0], codes)
    same_bits(back[1], scales)


def test_repack_into_a_buffer() -> None:
    codes, scales = random_source(4, 160)
    buffer = np.full((4, HFP4G32.row_bytes(160)), 0xEE, dtype=np.uint8)
    assert hfp4g32.repack(codes, scales, buffer) is buffer
    same_bits(buffer, hfp4g32.repack(codes, scales))


def test_repack_of_rows_within_larger_arrays() -> None:
    # Rows of a wider array: contiguous within a row, not from row to row.
    codes, scales = random_source(6, 256)
    wide_codes, wide_scales = np.zeros((6, 200), np.uint8), np.zeros((6, 20), np.uint8)
    wide_codes[:, 3:131], wide_scales[:, 5:13] = codes, scales
    wide_rows = np.zeros((6, 300), np.uint8)
    out = wide_rows[:, 7:159]
    hfp4g32.repack(wide_codes[:, 3:131], wide_scales[:, 5:13], out)
    same_bits(out.copy(), hfp4g32.repack(codes, scales))
    assert not wide_rows[:, :7].any()
    assert not wide_rows[:, 159:].any()
    assert hfp4g32.first_difference(wide_codes[:, 3:131], wide_scales[:, 5:13], out) is None


def test_sources_that_disagree_are_never_touched() -> None:
    codes, scales = random_source(4, 256)
    rows = hfp4g32.repack(codes, scales)
    for bad in (
        (codes[:, :-1], scales, rows),
        (codes[:3], scales, rows),
        (codes, scales[:, :-1], rows),
        (codes.reshape(-1), scales, rows),
        (codes, scales, rows[:3]),
        (codes, scales, rows[:, :-1]),
        (codes, scales, np.zeros((4, 153), np.uint8)),
        (codes.astype(np.int16), scales, rows),
        (codes, scales, rows.view(np.int8)),
        (codes.repeat(2, axis=1)[:, ::2], scales, rows),
        (codes, scales.repeat(2, axis=1)[:, ::2], rows),
        (codes, scales, rows.repeat(2, axis=1)[:, ::2]),
        (codes.T.copy().T, scales, rows),
    ):
        for use in (hfp4g32.repack, hfp4g32.first_difference):
            check_refused(
                PayloadSizeError,
                lambda use=use, bad=bad: use(*bad),  # type: ignore[misc]
                says=["codes, scales and rows"],
            )


def test_row_longer_than_its_header_can_say() -> None:
    k = 2_097_152
    codes, scales = np.zeros((1, k // 2), np.uint8), np.zeros((1, k // 32), np.uint8)
    check_refused(PayloadSizeError, lambda: hfp4g32.repack(codes, scales), says=["2097120"])


# ------------------------------------------------------------------ decoding


@pytest.mark.parametrize("row_scale", [1.0, 0.75, 3.0, -2.0, 65504.0, 2.0**-24])
def test_every_code_and_scale_decodes_as_in_float64(row_scale: float) -> None:
    codes = bytes.fromhex(CODES_0_15 * 2)
    header = np.float16(row_scale).tobytes()
    rows = np.concatenate([row(bytes([s]), codes, header) for s in range(255)])
    exact = (
        float(np.float16(row_scale))
        * E2M1.astype(np.float64)[None, :]
        * 2.0 ** (np.arange(255)[:, None] - 127.0)
    )
    with np.errstate(over="ignore"):
        expected = np.tile(exact, 2).astype(np.float32)
    same_bits(values_of(rows), expected, block_bytes=128)


def test_decode_shapes() -> None:
    codes, scales = random_source(6, 64)
    rows = hfp4g32.repack(codes, scales)
    values = values_of(rows)
    assert values.dtype == np.float32
    same_bits(CODEC.decode(rows.reshape(-1), (2, 3, 64)), values.reshape(2, 3, 64))
    same_bits(CODEC.decode(rows[0], (64,)), values[0])


@pytest.mark.parametrize("shape", [(2, 63), (2, 48), (2,), ()])
def test_decode_of_a_shape_without_whole_blocks(shape: tuple[int, ...]) -> None:
    payload = np.zeros(100, dtype=np.uint8)
    for use in (CODEC.decode, CODEC.validate):
        check_refused(PayloadSizeError, lambda use=use: use(payload, shape))  # type: ignore[misc]


def test_there_is_no_float_encoder() -> None:
    with pytest.raises(NotImplementedError):
        CODEC.encode(np.ones((1, 32), dtype=np.float32))


# ------------------------------------------------------------------ where rows differ


@pytest.mark.parametrize("k", [32, 128, 288])
def test_first_difference_pinpoints_every_byte(k: int) -> None:
    codes, scales = random_source(3, k)
    rows = hfp4g32.repack(codes, scales)
    for r in range(3):
        for at in range(rows.shape[1]):
            rows[r, at] ^= 0x10
            expected = (r, -1 if at < 16 else (at - 16) // 17)
            assert hfp4g32.first_difference(codes, scales, rows) == expected
            rows[r, at] ^= 0x10


def test_first_difference_is_the_first() -> None:
    codes, scales = random_source(4, 256)
    rows = hfp4g32.repack(codes, scales)
    rows[3, 20] ^= 1
    rows[2, 16 + 17 * 5 + 3] ^= 1
    rows[2, 16 + 17 * 6] ^= 1
    assert hfp4g32.first_difference(codes, scales, rows) == (2, 5)
    rows[2, 15] ^= 1
    assert hfp4g32.first_difference(codes, scales, rows) == (2, -1)


# ------------------------------------------------------------------ edge counts


@pytest.mark.parametrize(
    ("scale", "code", "expected"),
    [
        (0, 0, (0, 0)),
        (0, 8, (0, 0)),  # -0 is a zero
        (0, 1, (1, 0)),
        (0, 9, (1, 0)),
        (1, 7, (1, 0)),
        (2, 1, (0, 0)),
        (252, 7, (0, 0)),
        (253, 5, (0, 0)),
        (253, 6, (0, 1)),
        (253, 14, (0, 1)),
        (254, 3, (0, 0)),
        (254, 4, (0, 1)),
        (254, 12, (0, 1)),
        (255, 7, (0, 0)),
    ],
)
@pytest.mark.parametrize("high", [False, True], ids=["low nibble", "high nibble"])
def test_edge_counts(scale: int, code: int, expected: tuple[int, int], high: bool) -> None:
    codes = bytearray(48)
    codes[16 + 13] = code << 4 if high else code
    rows = np.repeat(row(bytes([127, scale, 127]), bytes(codes)), 2, axis=0)
    assert hfp4g32.scan(rows)[1:] == (2 * expected[0], 2 * expected[1])


# ------------------------------------------------------------------ validation


@pytest.mark.parametrize(
    ("at", "value"),
    [(2, 1), (3, 0x3C), (4, 7), (4, 0), (5, 1), (6, 1), (6, 0x05), (7, 1), (15, 0xFF)],
)
def test_bad_header_byte(at: int, value: int) -> None:
    codes, scales = random_source(4, 256)
    rows = hfp4g32.repack(codes, scales)
    rows[2, at] = value
    check_refused(
        PayloadValueError,
        lambda: CODEC.validate(rows.reshape(-1), (4, 256), first_row=64, path="p", tensor="t"),
        path="p",
        tensor="t",
        says=["row header in row 66", rows[2, :16].tobytes().hex()],
    )


@pytest.mark.parametrize("row_scale", [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E00])
def test_bad_row_scale(row_scale: int) -> None:
    rows = row(b"\x7f", bytes(16), row_scale.to_bytes(2, "little"))
    check_refused(
        PayloadValueError, lambda: CODEC.validate(rows[0], (1, 32)), says=["row header in row 0"]
    )


def test_other_finite_row_scales_are_legal() -> None:
    for row_scale in (0x0001, 0x3800, 0x7BFF, 0xBC00):
        CODEC.validate(row(b"\x7f", bytes(16), row_scale.to_bytes(2, "little"))[0], (1, 32))


def test_nan_scale_is_the_first_one() -> None:
    codes, scales = random_source(5, 288)
    scales[3, 8] = scales[3, 4] = scales[4, 0] = 255
    rows = hfp4g32.repack(codes, scales)
    for shape in ((5, 288), (5, 1, 288)):
        check_refused(
            PayloadValueError,
            lambda shape=shape: CODEC.validate(rows.reshape(-1), shape, first_row=32),  # type: ignore[misc]
            says=["NaN scale byte in row 35, block 4"],
        )


def test_old_mq4_lloyd_payload_is_not_taken_for_hfp4() -> None:
    # hipfire once used 21 for MQ4G256Lloyd: 160 bytes for 256 weights, here as 152-byte rows.
    rng = np.random.default_rng(9)
    payload = rng.integers(0, 256, 19 * 160, dtype=np.uint8)
    check_refused(
        PayloadValueError, lambda: CODEC.validate(payload, (20, 256)), says=["row header in row 0"]
    )


# ------------------------------------------------------------------ both paths


@pytest.mark.parametrize("k", WIDTHS)
def test_parity(k: int) -> None:
    codes, scales = random_source(7, k, seed=k)
    scales[3, -1] = 255
    header = hfp4g32.row_header(k)
    empty = np.zeros((7, HFP4G32.row_bytes(k)), dtype=np.uint8)
    _, (_, _, _, rows) = check_parity(
        hfp4g32._repack, [codes, scales, header, empty], block_bytes=17
    )
    assert check_parity(hfp4g32._first_bad_row, [codes, scales, header, rows])[0] == -1
    for at in (15, 16, 17, rows.shape[1] - 1):
        rows[5, at] ^= 0x80
        found, _ = check_parity(hfp4g32._first_bad_row, [codes, scales, header, rows])
        assert found == 5
        rows[5, at] ^= 0x80
    first_nan, _, _ = check_parity(hfp4g32.scan, [rows])[0]
    assert first_nan == 4 * (k // 32) - 1
    row_scales = np.linspace(0.5, 2, 7, dtype=np.float32)
    out = np.zeros((7, k), dtype=np.float32)
    check_parity(hfp4g32._decode, [rows, row_scales, out], block_bytes=128)


def test_source_values_are_the_decoded_values() -> None:
    k = 96
    codes, scales = random_source(9, k, seed=1)
    scales.reshape(-1)[:27] = [*range(13), *range(241, 255)]
    out = np.zeros((9, k), dtype=np.float32)
    check_parity(hfp4g32._source_values, [codes, scales, out], block_bytes=128)
    found = hfp4g32.source_values(codes, scales)
    with np.errstate(over="ignore"):
        decoded = codec_for(HFP4G32.id).decode(hfp4g32.repack(codes, scales).reshape(-1), (9, k))
    same_bits(found, decoded)


def test_scan_parity_at_every_scale() -> None:
    codes = bytes.fromhex(CODES_0_15 * 2)
    rows = np.concatenate([row(bytes([s, 127]), codes * 2) for s in range(256)])
    result, _ = check_parity(hfp4g32.scan, [rows])
    assert result == (510, 2, 2)
