"""How matrices are told to kernels: decoders, books, struct layouts, grids, and what is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ds4q.artifact.errors import CodingError, PayloadSizeError
from ds4q.artifact.formats import MixRow
from ds4q.artifact.types import TYPES, type_of
from ds4q.hipkern import matrix
from ds4q.hipkern.errors import HipUsageError
from ds4q.hipkern.kernels import DECODERS
from tests.hipkern.packed import BOOKS2, BOOKS3, FORMS


def test_every_type_with_weights_has_a_decoder_that_is_built() -> None:
    assert {form.decoder for form in FORMS.values()} == set(DECODERS)
    with_codec = {t.id for t in TYPES.values() if t.codec and t.name not in ("TidI32", "Raw")}
    assert with_codec == {form.type_id for form in FORMS.values()}


@pytest.mark.parametrize("name", ["TidI32", "Raw", "MQ4G256"])
def test_a_type_without_weights_or_codec_has_no_decoder(name: str) -> None:
    number = next(t.id for t in TYPES.values() if t.name == name)
    with pytest.raises(HipUsageError, match=name):
        matrix.decoder_of(number, None)


def test_books_are_two_rows_of_bf16_and_how_a_scale_byte_chooses() -> None:
    packed = matrix.books_of(105, MixRow(1, BOOKS3))
    assert packed is not None
    assert len(packed) == matrix.BOOKS_BYTES
    assert packed[:8] == struct.pack("<2I", 1, 0)
    assert packed[8:] == BOOKS3
    fixed = matrix.books_of(105, MixRow(0, b""))
    assert fixed is not None
    assert fixed[:4] == bytes(4)
    levels = np.frombuffer(fixed[8:], "<u2").reshape(2, 8)
    assert levels.tolist() == [[0, 0x3F80, 0x4000, 0x4080, 0x8000, 0xBF80, 0xC000, 0xC080]] * 2, (
        "code 4 of 105 is a negative zero"
    )
    two = matrix.books_of(106, MixRow(1, BOOKS2))
    assert two is not None
    assert np.frombuffer(two[8:], "<u2").reshape(2, 8)[:, :4].tobytes() == BOOKS2
    sign = matrix.books_of(107, "sign")
    assert sign is not None
    assert np.frombuffer(sign[8:], "<u2")[[0, 8]].tolist() == [0xBF80, 0x3F80]


@pytest.mark.parametrize(("number", "coding"), [(21, None), (102, "zero"), (107, "affine")])
def test_other_decoders_take_no_books(number: int, coding: str | None) -> None:
    assert matrix.books_of(number, coding) is None


@pytest.mark.parametrize(("number", "coding"), [(105, None), (107, None), (102, "other")])
def test_a_coding_that_is_missing_or_unknown_is_refused(number: int, coding: str | None) -> None:
    with pytest.raises(CodingError):
        matrix.books_of(number, coding)


def test_structs_have_the_layout_of_the_header() -> None:
    packed = matrix.pack_matrix(0x10, 0x20, 21, 3, 64, 50)
    assert len(packed) == matrix.MATRIX_BYTES
    assert struct.unpack("<2Q6i", packed) == (0x10, 0x20, 21, 3, 64, 50, 0, 0)
    job = matrix.pack_job(packed, 0x30, 0x40, 64, 3, 7)
    assert len(job) == matrix.JOB_BYTES
    assert struct.unpack("<2Q4i", job[40:]) == (0x30, 0x40, 64, 3, 7, matrix.linear_rows(21, 3, 64))


@pytest.mark.parametrize(("number", "cols"), [(21, 48), (16, 33), (3, 16), (106, 96), (107, 160)])
def test_rows_that_are_not_whole_blocks_are_refused(number: int, cols: int) -> None:
    with pytest.raises((HipUsageError, PayloadSizeError), match=str(cols)):
        matrix.row_bytes_of(number, cols)


@pytest.mark.parametrize("name", FORMS)
def test_row_bytes_are_those_of_the_type(name: str) -> None:
    number = FORMS[name].type_id
    assert matrix.row_bytes_of(number, 256) == type_of(number).payload_bytes((3, 256)) // 3


@pytest.mark.parametrize("cols", [32, 512, 1024, 2048, 4096, 8192, 1 << 20])
@pytest.mark.parametrize("rows", [1, 31, 1024, 4096, 32768])
@pytest.mark.parametrize("decoder", [3, 16])
def test_blocks_of_a_product_cover_its_rows_in_equal_shares(
    decoder: int, rows: int, cols: int
) -> None:
    share = matrix.linear_rows(decoder, rows, cols)
    assert share % matrix.GROUPS == 0
    assert 2 <= share // matrix.GROUPS <= 32
    assert (matrix.linear_blocks(decoder, rows, cols) - 1) * share < rows
    assert matrix.linear_blocks(decoder, rows, cols) * share >= rows


def test_grids_cover_what_they_compute() -> None:
    assert matrix.gate_up_grid(2048, 6, 2) == (86, 7, 2)
    assert matrix.down_grid(4096, 6, 2) == (86, 7, 2)
    assert matrix.sum_grid(4096, 2) == (32, 2, 1)
    assert matrix.decode_grid(37, 160) == (2, 1, 1)
    assert matrix.embed_grid(4128, 5) == (2, 5, 1)


@pytest.mark.parametrize("k", [0, 32])
def test_a_number_of_experts_that_kernels_cannot_take_is_refused(k: int) -> None:
    with pytest.raises(HipUsageError, match="experts"):
        matrix.down_grid(4096, k, 1)
