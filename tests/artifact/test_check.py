"""The structural check: what makes a file fit for decoding, and what ds4q says about its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds4q.artifact.check import census, check_structure, own_metadata, type_name
from ds4q.artifact.hfq import Reader
from ds4q.artifact.report import Check
from tests.artifact.build import File, Tensor, sealed

A = Tensor("a.weight")
B = Tensor("b.weight", 21, (2, 256), 32, bytes(304))
ODD = Tensor("c.weight", 21, (2, 64), 32, bytes(100))
OURS = {"k256": True}


def structure(tmp_path: Path, data: bytes | File) -> Check:
    path = tmp_path / "x.hfq"
    path.write_bytes(data if isinstance(data, bytes) else data.data())
    check = Check("structure")
    with Reader(path) as reader:
        check_structure(reader, check)
    return check


# ------------------------------------------------------------------ any file


def test_sound_file(tmp_path: Path) -> None:
    check = structure(tmp_path, File((A, B)))
    assert check.ok
    assert check.notes == []
    assert check.figures == {"version": 1, "tensors": 2, "bytes": 4096 + 8 + 304}


def test_every_fault_is_listed(tmp_path: Path) -> None:
    faults = (
        A,
        Tensor("b", 1, (4,), 0, bytes(6)),
        Tensor("c", 21, (2, 64), 256, bytes(100)),
        Tensor("d", 99),
        Tensor("e", 13, (256,), 256, bytes(136)),
        Tensor("f", 21, (2, 48), 32, bytes(90)),
    )
    check = structure(tmp_path, File(faults))
    assert [f.tensor for f in check.failures] == ["b", "c", "d", "e", "f"]
    assert [f.message for f in check.failures] == [
        "payload length does not fit type and shape",
        "wrong group size for HFP4G32",
        "qtype-unknown: unknown tensor type 99",
        "qtype-unknown: ds4q has no codec for tensor type 13 (MQ4G256)",
        "HFP4G32 cannot hold rows of this length",
    ]
    assert check.failures[0].expected == "8 bytes"


def test_unusual_file_of_another_tool_is_noted(tmp_path: Path) -> None:
    check = structure(tmp_path, File((B, A), data_offset=200, padding=bytes(91), tail=b"xy"))
    assert check.ok
    assert check.notes == [
        "2 bytes follow the last payload",
        "data_offset 200 is not 4096-aligned",
    ]


# ------------------------------------------------------------------ files of ds4q


def test_own_file(tmp_path: Path) -> None:
    assert structure(tmp_path, sealed((A, B), ours=OURS)).ok


def test_own_file_with_short_rows(tmp_path: Path) -> None:
    assert structure(tmp_path, sealed((A, B, ODD), ours={"k256": False})).ok
    check = structure(tmp_path, sealed((A, B, ODD), ours=OURS))
    assert check.lines() == ["wrong ds4q.k256: expected True, found False"]


def test_own_file_that_says_nothing_of_its_rows(tmp_path: Path) -> None:
    check = structure(tmp_path, sealed((A,)))
    assert check.lines() == ["wrong ds4q.k256: expected None, found True"]


def test_own_file_out_of_order(tmp_path: Path) -> None:
    check = structure(tmp_path, sealed((B, A), ours=OURS))
    assert check.lines() == ["a.weight: tensors are not sorted by name"]
    # by bytes: "experts.10" stands before "experts.2"
    two, ten = Tensor("experts.2"), Tensor("experts.10")
    assert structure(tmp_path, sealed((ten, two), ours=OURS)).ok
    assert not structure(tmp_path, sealed((two, ten), ours=OURS)).ok


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda data: data + b"x", "1 bytes follow the last payload"),
        (lambda data: data[:4095] + b"x" + data[4096:], "padding between index and payload"),
    ],
    ids=["tail", "padding"],
)
def test_own_file_is_exact(damage: Any, line: str, tmp_path: Path) -> None:
    check = structure(tmp_path, damage(sealed((A, B), ours=OURS)))
    assert len(check.failures) == 1
    assert line in check.lines()[0]


def test_own_file_with_a_false_census(tmp_path: Path) -> None:
    for wrong in ({"F16": 2}, {}, None, {"F16": 1, "HFP4G32": 1, "F32": 0}):
        data = sealed((A, B), ours=OURS, metadata={"hipfire_recipe_census": wrong})
        check = structure(tmp_path, data)
        assert [f.message for f in check.failures] == ["wrong type census"]


def test_own_metadata(tmp_path: Path) -> None:
    path = tmp_path / "x.hfq"
    path.write_bytes(sealed((A,), ours={"recipe": "fp4-q8"}))
    with Reader(path) as reader:
        ours = own_metadata(reader)
        assert ours is not None
        assert ours["recipe"] == "fp4-q8"
    with Reader(File((A,)).write(tmp_path)) as reader:
        assert own_metadata(reader) is None


# ------------------------------------------------------------------ names of types


def test_census_counts_by_name(tmp_path: Path) -> None:
    odd = (Tensor("a", 99), Tensor("b", 13), Tensor("c", 1), Tensor("d", 1))
    with Reader(File(odd).write(tmp_path)) as reader:
        found = census(reader.tensors.values())
    assert list(found.items()) == [("F16", 2), ("MQ4G256", 1), ("type 99", 1)]


def test_type_name() -> None:
    assert [type_name(n) for n in (21, 35, 23, 99)] == [
        "HFP4G32",
        "MFP4G32E8SOA",
        "type 23",
        "type 99",
    ]
