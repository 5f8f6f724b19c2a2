"""Rows in other formats: worked bytes, every code in every place, refusals, both paths."""

from __future__ import annotations

import numpy as np
import pytest

from ds4q.artifact.formats import hfp4g32
from ds4q.quantize.export import convert
from ds4q.quantize.export.plan import U8, ExportError
from tests.checks import check_golden, check_parity, check_refused, same_bits

HEADER = "003c0000010000000000000000000000"


def rows_of(codes: U8, scales: U8) -> U8:
    return hfp4g32.repack(codes, scales)


def random_rows(rows: int = 7, blocks: int = 5, seed: int = 0) -> tuple[U8, U8, U8]:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, 16 * blocks), np.uint8)
    scales = rng.permutation(rows * blocks).reshape(rows, blocks).astype(np.uint8)
    return codes, scales, rows_of(codes, scales)


def test_the_worked_block() -> None:
    ours = bytes.fromhex(HEADER + "7f" + "1032547698badcfe" * 2)
    (found,) = convert.mxfp4_blocks(np.frombuffer(ours, np.uint8), 0, 1, 32)
    check_golden(found, "7f 00112233445566778899aabbccddeeff", block_bytes=17)


def test_each_code_keeps_its_column() -> None:
    for column in range(32):
        codes = np.zeros((1, 16), np.uint8)
        codes[0, column // 2] = 0xB << 4 * (column & 1)
        packed = rows_of(codes, np.array([[3]], np.uint8))
        (found,) = convert.mxfp4_blocks(packed.reshape(-1), 0, 1, 32)
        nibbles = np.concatenate((found[0, 1:] & 15, found[0, 1:] >> 4))
        assert np.flatnonzero(nibbles).tolist() == [column]
        assert (nibbles[column], found[0, 0]) == (0xB, 3)


def test_the_checkpoint_gets_back_its_bytes() -> None:
    codes, scales, packed = random_rows()
    found = convert.fp4_source(packed.reshape(-1), 0, len(packed), 160)
    same_bits(found[0], codes, what="codes")
    same_bits(found[1], scales, what="scales")


@pytest.mark.parametrize("how", [convert.fp4_source, convert.mxfp4_blocks])
@pytest.mark.parametrize(
    ("at", "value"), [(1, 0x40), (2, 1), (4, 9), (6, 1), (15, 1)], ids=lambda value: str(value)
)
def test_a_row_header_that_says_more_is_refused(how: object, at: int, value: int) -> None:
    _, _, packed = random_rows()
    packed[5, at] = value
    check_refused(
        ExportError,
        lambda: how(packed.reshape(-1), 64, len(packed), 160),  # type: ignore[operator]
        says=["row 69 has a row scale or flags", "expected 003c0000050000", "found "],
    )


def test_ids_are_widened() -> None:
    ids = np.array([0, 1, 255, 256, 2**31 - 1], "<u4")
    (found,) = convert.wide_ids(ids.view(np.uint8), 0, 1, 5)
    assert found.view("<i8").tolist() == ids.tolist()


def test_both_paths_agree() -> None:
    _, _, packed = random_rows()
    out = np.zeros((7, 5 * 17), np.uint8)
    _, (_, paired) = check_parity(convert._pair_halves, [packed, out], block_bytes=17)
    assert check_parity(convert._first_other_code, [packed, paired])[0] == -1


@pytest.mark.parametrize("path", ["reference", "fast"])
def test_a_changed_code_or_scale_is_seen(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4Q_REFERENCE", str(int(path == "reference")))
    _, _, packed = random_rows()
    (right,) = convert.mxfp4_blocks(packed.reshape(-1), 0, len(packed), 160)
    for row, byte, bit in ((0, 0, 0), (3, 1, 7), (6, 84, 0), (6, 68, 5)):
        wrong = right.copy()
        wrong[row, byte] ^= 1 << bit
        assert convert._first_other_code(packed, wrong) == row
    monkeypatch.setattr(convert, "_pair_halves", lambda rows, out: out.fill(0))
    says = ["MXFP4 codes differ", "row 32"]
    check_refused(
        ExportError, lambda: convert.mxfp4_blocks(packed.reshape(-1), 32, 7, 160), says=says
    )
