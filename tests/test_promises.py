"""Promises across rooms that were once broken: each test is a slip that must not cost anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ds4q import api
from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.receipt import read_receipt, receipt_path
from ds4q.quantize.outputs import OutputPlaceError
from ds4q.runtime.engine import Engine
from tests.checks import check_refused
from tests.quantize import models

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.mini(tmp_path_factory.mktemp("mini"))


@pytest.mark.parametrize("name", ["", ".", "..", "folder/", "folder/.."])
def test_an_output_that_is_no_file_name_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Ds4qError, match="not a file name"):
        api.quantize(source, name)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_a_link_is_left_alone_even_with_force(
    source: Path, tmp_path: Path
) -> None:
    for target in ("nowhere", "there"):
        (tmp_path / "there").write_bytes(b"precious")
        link = tmp_path / f"{target}.hfq"
        link.symlink_to(target)
        with pytest.raises(Ds4qError, match="a link, not a file"):
            models.run(source, link, force=True)
        assert link.is_symlink()
    assert (tmp_path / "there").read_bytes() == b"precious"


def test_a_draft_of_an_earlier_job_is_named_where_it_stays(tmp_path: Path) -> None:
    source, out = ROOT / "tests" / "data" / "ds4-random", tmp_path / "x.hfq"
    heard: list[str] = []
    api.quantize(source, out, warn=heard.append)
    assert not [line for line in heard if "is there already" in line]
    api.quantize(source, out, draft="drop", force=True, warn=heard.append)
    stays = [line for line in heard if "is there already" in line]
    words = "is there already and stays as it is: this job does not write it"
    assert stays == [f"{tmp_path / 'x-dspark.hfq'} {words}"]


@pytest.mark.parametrize("length", [244, 247, 251])  # the draft's name is too long, or this one is
def test_a_name_too_long_is_refused_as_the_one_that_was_given(tmp_path: Path, length: int) -> None:
    out = tmp_path / f"{'x' * length}.hfq"
    check_refused(
        OutputPlaceError,
        lambda: api.quantize(ROOT / "tests" / "data" / "ds4-tiny", out),
        path=out,
        says=["output name is too long", "choose a name that is"],
    )


def test_a_draft_file_is_not_run_as_a_model(random_artifact: Path) -> None:
    draft = random_artifact.with_name("ds4-random-dspark.hfq")
    with pytest.raises(Ds4qError, match=r"draft part of a model; run the artifact"):
        Engine.load(draft, threads=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": "fp4-q8"},
        {"tool_version": "9"},
        {"partial": True},
        {"source_fingerprint": "0" * 64},
        {"source_digest": "0" * 64},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_receipt_that_contradicts_the_artifact_fails(
    tiny_artifact: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    receipt = read_receipt(receipt_path(tiny_artifact))
    other = tmp_path / "other.receipt"
    other.write_bytes(replace(receipt, **changes).encode())  # type: ignore[arg-type]
    report = api.verify(tiny_artifact, receipt=other)
    (failure,) = [f for check in report.checks for f in check.failures]
    assert next(iter(changes)) in failure.message


def test_a_receipt_that_records_another_source_fails_against_the_source(
    tiny_artifact: Path, tmp_path: Path
) -> None:
    receipt = read_receipt(receipt_path(tiny_artifact))
    records = list(receipt.tensors)
    number = next(i for i, r in enumerate(records) if r.type == "HFP4G32")
    weight, scale = records[number].sources
    forged = (weight, replace(scale, xxh3="0" * 32))
    records[number] = replace(records[number], sources=forged)
    other = tmp_path / "other.receipt"
    other.write_bytes(replace(receipt, tensors=tuple(records)).encode())
    report = api.verify(
        tiny_artifact, receipt=other, source=ROOT / "tests" / "data" / "ds4-tiny", threads=2
    )
    (failure,) = [f for check in report.checks for f in check.failures]
    assert (failure.tensor, failure.message) == (
        records[number].name,
        "receipt records another source",
    )
    assert failure.expected is not None
    assert str(failure.expected).endswith("0" * 32)
