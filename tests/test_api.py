"""The functions that programs call: what they return, raise and warn of; they print nothing."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ds4q import api
from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import receipt_path
from tests.quantize import models
from tests.quantize.builders import TINY
from tests.quantize.damage import flip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.mini(tmp_path_factory.mktemp("mini"))


def test_quantize_and_verify_a_whole_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    warned: list[str] = []
    summary = api.quantize(str(TINY), str(tmp_path / "t.hfq"), warn=warned.append)
    assert [output.path for output in summary.plan.outputs] == [tmp_path / "t.hfq"]
    assert summary.receipts[0].file_bytes == (tmp_path / "t.hfq").stat().st_size
    assert not summary.plan.partial
    report = api.verify(str(tmp_path / "t.hfq"), source=str(TINY))
    assert report.ok
    assert report.artifact["path"] == str(tmp_path / "t.hfq")
    assert report.artifact["name"] == "t.hfq"
    assert report.artifact["bytes"] == summary.receipts[0].file_bytes
    assert (report.artifact["tensors"], report.artifact["recipe"]) == (306, "fp4")
    assert all(check.seconds > 0 for check in report.checks)
    assert capfd.readouterr() == ("", "")


def test_what_is_unusual_is_a_python_warning_unless_somebody_listens(
    source: Path, tmp_path: Path
) -> None:
    heard: list[str] = []
    api.quantize(source, tmp_path / "y.hfq", allow_partial=True, warn=heard.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        api.quantize(source, tmp_path / "x.hfq", allow_partial=True)
    assert [str(warning.message) for warning in caught] == heard
    assert any("tokenizer.json is absent" in text for text in heard)
    assert any("no multiple of 256" in text for text in heard)


def test_an_unknown_recipe_is_an_error_with_the_known_ones(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        Ds4qError,
        match=r"unknown recipe: expected fp4, fp4-q8, .*, mix2, budget or a .toml file, found no",
    ):
        api.quantize(source, tmp_path / "x.hfq", recipe="no", allow_partial=True)
    assert list(tmp_path.iterdir()) == []


def test_errors_are_raised_and_leave_nothing(source: Path, tmp_path: Path) -> None:
    for bad in (source / "no", tmp_path):
        with pytest.raises(Ds4qError):
            api.quantize(bad, tmp_path / "x.hfq", warn=lambda text: None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No such file"):
        api.verify(tmp_path / "x.hfq")


def test_progress_is_opened_once_a_pass_and_closed(source: Path, tmp_path: Path) -> None:
    log: list[tuple[str, int, int]] = []

    @contextmanager
    def progress(label: str, total: int) -> Iterator[api.Advance]:
        done = [0]

        def advance(nbytes: int) -> None:
            done[0] += nbytes

        yield advance
        log.append((label, total, done[0]))

    out = tmp_path / "x.hfq"
    models.run(source, out, progress=progress, draft="drop")
    api.verify(out, source=source, progress=progress)
    with Reader(out) as reader:
        payload = sum(entry.nbytes for entry in reader.tensors.values())
    assert log == [("quantize", payload, payload), ("verify", payload, payload)]


def test_a_dry_run_has_no_progress_and_no_receipts(source: Path, tmp_path: Path) -> None:
    def progress(label: str, total: int) -> None:
        pytest.fail("nothing is done in a dry run")

    summary = models.run(source, tmp_path / "x.hfq", dry_run=True, progress=progress)
    assert summary.receipts == ()
    assert "sha256" not in summary.document()


def test_checks_come_in_their_order_and_only_with_their_ground(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    models.run(source, out)

    def names(**options: object) -> list[str]:
        return [check.name for check in api.verify(out, **options).checks]  # type: ignore[arg-type]

    assert names(source=source) == ["structure", "inventory", "payload", "receipt", "source"]
    assert names() == ["structure", "inventory", "payload", "receipt"]
    receipt_path(out).unlink()
    assert names(source=source) == ["structure", "inventory", "payload", "source"]
    flip(out, 0)
    assert names(source=source) == ["structure"]


def test_no_descriptor_stays_open(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.hfq"
    models.run(source, out)
    api.verify(out, source=source)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        models.run(source, out, force=True)
        api.verify(out, source=source)
        api.verify(out, source=source / "no")
        with pytest.raises(Ds4qError):
            models.run(source, out)
        with pytest.raises(Ds4qError):
            models.run(source, out, include=["no"])
    assert len(os.listdir("/proc/self/fd")) <= before


def test_every_option_of_the_command_is_an_argument() -> None:
    from ds4q.cli.quantize import command

    options = {param.name for param in command.params}
    of_people = {"as_json", "quiet", "verbose"}
    afterwards = {"tag"}  # a program calls ds4q.registry.add with what it was given
    assert options - of_people - afterwards == inspect.signature(api.quantize).parameters.keys() - {
        "progress",
        "warn",
    }
