"""FORMAT.md against the ROCmFPX codecs: layouts, scales, levels, thresholds, worked bytes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ds4q.artifact.formats import Coding, MixRow, _rules
from ds4q.artifact.formats._blocks import BlockCodec
from ds4q.artifact.formats._ue4m3 import LAST, UE4M3
from ds4q.artifact.types import ROCMFPX, TYPES
from tests.artifact.formats.rocmfpx import WORKED, codec_of
from tests.artifact.test_format import TEXT, Row, plain, table
from tests.checks import Array, same_bits

BLOCKS, ENCODERS = "4.1 ROCmFPX blocks", "4.2 ROCmFPX encoders"
BOOKS = {
    105: bytes.fromhex("80bf20bfc0be00be003ec03e203f803f" * 2),
    106: bytes.fromhex("60bf80be803e603f" * 2),
}


def coding_of(type_id: int, reading: str) -> Coding | None:
    """The coding that a word of the tables stands for."""
    if reading.startswith("mode "):
        return MixRow(int(reading[5:]), BOOKS[type_id])
    return reading or None


def readings(row: Row) -> list[BlockCodec]:
    """The codecs of a row of the table of blocks."""
    number = int(row["id"])
    return [codec_of(number, coding_of(number, word)) for word in row["reading"].split(", ")]


def codecs_named(cell: str) -> list[tuple[BlockCodec, str]]:
    """Codecs of a first column such as "106 mode 0, 107 `dual`, `sign`", and their readings."""
    found, number = [], 0
    for part in cell.split(", "):
        word = part
        if part[:3].isdigit():
            number, word = int(part[:3]), part[3:].strip()
        if word.startswith("bit 7"):
            continue
        found.append((codec_of(number, coding_of(number, plain(word))), plain(word)))
    return found


def numbers(cell: str) -> list[float]:
    """The numbers of a list, in which ``a..b`` stands for a range."""
    values: list[float] = []
    for part in cell.split(", "):
        first, dots, last = part.partition("..")
        if dots:
            step = 1 if int(last) > int(first) else -1
            values += range(int(first), int(last) + step, step)
        else:
            values.append(float(part))
    return values


def test_blocks() -> None:
    rows = table(BLOCKS)
    assert {int(row["id"]) for row in rows} == {kind.id for kind in ROCMFPX}
    for row in rows:
        kind = TYPES[int(row["id"])]
        assert int(row["block bytes"]) == kind.block_bytes
        assert int(row["K a multiple of"]) == kind.row_multiple
        for codec in readings(row):
            assert codec.type is kind
            assert row["code bytes"] == f"0..{4 * codec.bits - 1}"
            scales = [int(n) for n in re.findall(r"\b(\d+) (?:for|the)", row["scale bytes"])]
            assert scales == list(range(4 * codec.bits, kind.block_bytes))
            assert ("half 1" in row["scale bytes"]) == (codec.group == 16)
    words = {int(row["id"]): row["where code i lies"] for row in reversed(rows)}
    for number, bits in ((102, 6), (104, 3), (106, 2)):
        assert f"bits {bits}·i " in words[number]


def test_every_reading_has_a_row() -> None:
    named = {(int(r["id"]), word) for r in table(BLOCKS) for word in r["reading"].split(", ")}
    words = {102: ["zero", "neg32"], 107: ["dual", "affine", "s40", "sign"]}
    words |= {number: ["mode 0", "mode 1"] for number in (105, 106)}
    expected = {k.id: [""] for k in ROCMFPX} | words
    assert named == {(number, word) for number, all_ in expected.items() for word in all_}


def test_scales() -> None:
    rows = table(BLOCKS, 1)
    assert len(rows) == 6
    for row in rows:
        assert UE4M3[int(row["byte"], 16)] == float(row["value"])
    assert f"Bytes above {LAST} are invalid" in TEXT


def test_levels() -> None:
    rows = table(BLOCKS, 2)
    seen = set()
    for row in rows:
        cell = row["levels of code 0, 1, 2, ..."]
        for codec, word in codecs_named(row["type"]):
            seen.add((codec.type.id, word))
            if "book" in cell:
                assert cell.startswith(f"the {2**codec.bits} of the book")
                continue
            expected: Array = np.array(numbers(cell), dtype=np.float32)
            half = codec.levels[int(row["type"].endswith("bit 7 set"))]
            same_bits(half, expected, block_bytes=4, what=row["type"])
    assert len(seen) == 14


def test_thresholds_and_zero_codes() -> None:
    rows = {row["type"]: row for row in table(ENCODERS)}
    for name, rule in (("100, 101", _rules.FP4), ("104, 105 mode 0", _rules.FP3)):
        listed = re.search(r"(?:exceeds|with) ([\d., ]+)", rows[name]["code"])
        assert listed is not None
        assert numbers(listed[1]) == _rules._MAGNITUDES[rule].tolist()
    for name, row in rows.items():
        for codec, _ in codecs_named(name.replace("105 and 106", "105 mode 1, 106")):
            units = codec.encode_units(np.zeros((1, 32), dtype=np.float32))
            assert not units[0, 4 * codec.bits :].any()
            if row["group of zeros"] == "that of level 0":
                continue
            code = int(row["group of zeros"])
            assert (units[0, : 4 * codec.bits] == code * 0x55).all()


def test_worked_bytes() -> None:
    rows = table(ENCODERS, 1)
    block = TEXT.partition("The block {")[2].partition("is\n")[0]
    listed = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", block)]
    assert np.repeat(np.array(listed).reshape(2, 8), 2, axis=0).ravel().tolist() == pytest.approx(
        WORKED.tolist()
    )
    for row in rows:
        for codec, _ in codecs_named(row["type"]):
            assert codec.encode_units(WORKED[None]).tobytes().hex() == plain(row["bytes"])
    assert len(rows) == 9


def test_what_an_fp4_source_keeps() -> None:
    sentence = re.search(r"Type 102 holds .+ from (\d+) to (\d+) exactly", TEXT)
    assert sentence is not None
    assert sentence.groups() == ("118", "136")  # held to it in formats/test_rocmfp6.py
