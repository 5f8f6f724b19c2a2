"""Mixed types: golden blocks of both modes, golden encodings, table rows that are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.errors import CodingError, PayloadSizeError
from ds4q.artifact.formats import MixRow, codec_for, mix
from ds4q.artifact.types import ROCMFP2_MIX, ROCMFP3_MIX
from tests.artifact.formats import rocmfpx
from tests.artifact.formats.rocmfpx import NEAR, VECTORS, blocks_of, codec_of
from tests.checks import Array, check_golden, check_refused, same_bits

TYPES = pytest.mark.parametrize("type_id", [105, 106])
BOOKS = {
    105: bytes.fromhex("80bf20bfc0be00be003ec03e203f803f 80bf00bf80be80bd803d803e003f803f"),
    106: bytes.fromhex("60bf80be803e603f 80bfc0bec03e803f"),
}


def row(key: str, mode: int = 1) -> MixRow:
    """A table row with a book of the golden vectors."""
    return MixRow(mode, VECTORS[key].astype("<u2").tobytes())


# ------------------------------------------------------------------ decoding


@TYPES
@pytest.mark.parametrize("mode", [0, 1])
def test_golden_blocks(type_id: int, mode: int) -> None:
    stem = f"mix{type_id}_m{mode}_"
    codec = codec_of(type_id, row(stem + "book", mode))
    found = codec.decode_units(VECTORS[stem + "blocks"])
    same_bits(found, VECTORS[stem + "y"], block_bytes=128)


def test_zero_levels_of_mode_0() -> None:
    # Code 4 of 105 is -0 and stays so; type 104 has +0 there.
    units = np.zeros((1, 14), dtype=np.uint8)
    units[0, 0], units[0, 12] = 4, 0x40
    values = codec_of(105, MixRow(0, b"")).decode_units(units)[0]
    same_bits(values[:2], np.array([-0.0, 0.0], dtype=np.float32))
    same_bits(codec_of(104).decode_units(units)[0, :2], np.zeros(2, dtype=np.float32))


@TYPES
def test_upper_bytes_are_nothing_in_mode_0_and_the_second_book_in_mode_1(type_id: int) -> None:
    codec = codec_of(type_id, MixRow(0, b""))
    units = np.full((1, codec.type.block_bytes), 0xFF, dtype=np.uint8)
    units[0, -2:] = (0x80, 0xC0)
    assert not codec.decode_units(units).any()
    books = MixRow(1, BOOKS[type_id])
    values = codec_of(type_id, books).decode_units(units)[0]
    assert values.tolist() == [0.0] * 16 + [mix.levels_of(codec.type, books)[1, -1]] * 16


def test_worked_block() -> None:
    values = np.array([0.9, -0.2, 0.3, -0.85] * 4 + [0.05, -0.11, 0.28, -0.3] * 4)
    codec = codec_of(106, MixRow(1, BOOKS[106]))
    units = codec.encode_units(values.astype(np.float32)[None])
    check_golden(units, "27272727 36363636 4033")
    expected = [0.875, -0.25, 0.25, -0.875] * 4
    expected += [0.0859375, -0.0859375, 0.30078125, -0.30078125] * 4
    assert codec.decode_units(units)[0].tolist() == expected


def test_levels_of_a_row() -> None:
    levels = mix.levels_of(ROCMFP3_MIX, MixRow(1, BOOKS[105]))
    half = [0.125, 0.375, 0.625, 1], [0.0625, 0.25, 0.5, 1]
    assert levels.tolist() == [[-x for x in book[::-1]] + book for book in half]
    assert mix.levels_of(ROCMFP2_MIX, MixRow(0, BOOKS[106])).tolist() == [[-1, 0, 1, 2]]


# ------------------------------------------------------------------ encoding


@TYPES
def test_golden_encodings(type_id: int) -> None:
    codec = codec_of(type_id, row(f"mixenc{type_id}_book"))
    x = VECTORS["mixenc_x"][None]
    for importance, key in ((None, "bytes"), (VECTORS["mixenc_imp"], "bytes_w")):
        expected = VECTORS[f"mixenc{type_id}_{key}"]
        found, lost = codec.encode_rows(x, importance)
        same_bits(found[0], expected, block_bytes=codec.type.block_bytes, what=key)
        assert lost == 0
        codec.validate(found, x.shape)
    decoded = codec.decode(VECTORS[f"mixenc{type_id}_bytes"], x.shape)[0]
    same_bits(decoded, VECTORS[f"mixenc{type_id}_y"])


@TYPES
@pytest.mark.parametrize("mode", [0, 1])
def test_edges(type_id: int, mode: int) -> None:
    codec = codec_of(type_id, MixRow(mode, BOOKS[type_id]))
    rocmfpx.check_edges(codec)
    rocmfpx.check_lost_weights(codec)
    rocmfpx.check_scale_bytes(codec)


@pytest.mark.parametrize(("type_id", "twin"), [(105, codec_of(104)), (106, codec_of(107, "dual"))])
def test_mode_0_encodes_as_its_twin(type_id: int, twin: rocmfpx.BlockCodec) -> None:
    codec = codec_of(type_id, MixRow(0, b""))
    for importance in (None, VECTORS["w"]):
        found = codec.encode_rows(VECTORS["x"][None], importance)
        expected = twin.encode_rows(VECTORS["x"][None], importance)
        same_bits(found[0], expected[0], block_bytes=codec.type.block_bytes)


@TYPES
@given(head=NEAR, power=st.integers(-9, 6))
def test_error_bounds(type_id: int, head: list[float], power: int) -> None:
    codec = codec_of(type_id, MixRow(1, BOOKS[type_id]))
    values = blocks_of(head) * np.float32(2.0**power)
    units = codec.encode_units(values)
    decoded = codec.decode_units(units)
    for half in range(2):
        cut = slice(16 * half, 16 * half + 16)
        byte = units[0, 4 * codec.bits + half]
        levels, scale = codec.levels[byte >> 7].astype(np.float64), float(codec.scales[byte])
        if scale == 0:
            continue
        place = values[0, cut] / scale
        inside = (place >= levels[0]) & (place <= levels[-1])
        above = np.clip(np.searchsorted(levels, place), 1, len(levels) - 1)
        gap = levels[above] - levels[above - 1]
        error = np.abs(decoded[0, cut] - values[0, cut]) / scale
        assert (error <= gap / 2 + 1e-6)[inside].all()


# ------------------------------------------------------------------ refusals


def test_rows_of_106_need_128_weights() -> None:
    codec = codec_of(106, MixRow(1, BOOKS[106]))
    values = np.ones((2, 96), dtype=np.float32)
    check_refused(PayloadSizeError, lambda: codec.encode_rows(values), says=["a multiple of 128"])
    check_refused(PayloadSizeError, lambda: codec.encode(values), says=["a multiple of 128"])
    payload = np.zeros(60, dtype=np.uint8)
    check_refused(PayloadSizeError, lambda: codec.decode(payload, (2, 96)), says=["128"])
    rows, _ = codec_of(105, MixRow(1, BOOKS[105])).encode_rows(values)
    assert rows.shape == (2, 42)


def with_level(type_id: int, at: int, pattern: int) -> MixRow:
    books: Array = np.frombuffer(BOOKS[type_id], dtype="<u2").copy()
    books[at] = pattern
    return MixRow(1, books.tobytes())


@TYPES
@pytest.mark.parametrize(
    ("coding", "says"),
    [
        (lambda t: MixRow(2, BOOKS[t]), ["mode", "found 2"]),
        (lambda t: MixRow(1, b""), ["two books", "found 0"]),
        (lambda t: MixRow(1, BOOKS[t][:-2]), ["two books"]),
        (lambda t: MixRow(1, BOOKS[211 - t]), ["two books"]),
        (lambda t: MixRow(1, bytes(len(BOOKS[t]))), ["ascending"]),
        (lambda t: with_level(t, 1, 0x7F80), ["finite"]),
        (lambda t: with_level(t, 0, 0xFF80), ["finite"]),
        (lambda t: with_level(t, 0, 0x7FC0), ["finite"]),
        (lambda t: with_level(t, 1, 0xBF80), ["ascending"]),
        (lambda t: with_level(t, -1, 0xBF80), ["ascending"]),
    ],
)
def test_bad_rows(type_id: int, coding: object, says: list[str]) -> None:
    bad = coding(type_id)  # type: ignore[operator]
    check_refused(
        CodingError,
        lambda: codec_for(type_id, bad, path="p", tensor="t"),
        path="p",
        tensor="t",
        says=["mix-table-format", *says],
    )


@TYPES
def test_without_a_row_nothing_is_decoded(type_id: int) -> None:
    for coding in (None, "", "dual"):
        check_refused(
            CodingError,
            lambda coding=coding: codec_for(type_id, coding, path="p", tensor="t"),  # type: ignore[misc]
            path="p",
            tensor="t",
            says=["mix-unregistered"],
        )
    kind = ROCMFP3_MIX if type_id == 105 else ROCMFP2_MIX
    check_refused(CodingError, lambda: mix.codec(kind, "dual"), says=["mix-unregistered"])
