"""ds4q verify: the report in its three forms, exit statuses, and what it does with bad grounds."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from ds4q import api
from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import receipt_path
from ds4q.artifact.stops import Terminated
from ds4q.cli import main
from ds4q.quantize import compare, convert
from tests.quantize import models
from tests.quantize.builders import TINY
from tests.quantize.damage import flip

FAILURE_KEYS = [
    "tensor",
    "layer",
    "expert",
    "projection",
    "row",
    "block",
    "expected",
    "found",
    "message",
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.mini(tmp_path_factory.mktemp("mini"))


@pytest.fixture
def artifact(source: Path, tmp_path: Path) -> Path:
    models.run(source, tmp_path / "x.hfq")
    return tmp_path / "x.hfq"


@pytest.fixture
def damaged(artifact: Path) -> Path:
    """One code of an expert is not the source's."""
    with Reader(artifact) as reader:
        entry = reader.entry("layers.0.ffn.experts.10.w1.weight")
    flip(artifact, entry.offset + 152 * 33 + 16 + 17 * 2 + 5, 0x30)
    return artifact


def verify(*words: object) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, words)])


# ---------------------------------------------------------------- forms


def test_the_table_lists_every_check(artifact: Path, source: Path) -> None:
    result = verify(artifact, "--source", source)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == [
        "structure",
        "inventory",
        "payload",
        "receipt",
        "source",
    ]
    assert all(" ok " in line for line in lines[1:6])
    assert lines[-1] == f"{artifact} ({artifact.stat().st_size:,} bytes): ok"


def test_json_has_the_promised_keys(damaged: Path, source: Path) -> None:
    result = verify(damaged, "--source", source, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert list(document) == ["schema_version", "ok", "artifact", "checks"]
    assert document["ok"] is False
    for check in document["checks"]:
        assert list(check) == ["name", "ok", "judged", "seconds", "figures", "failures"]
        assert check["ok"] == (check["figures"]["failures"] == 0)
        assert isinstance(check["seconds"], float)
        for failure in check["failures"]:
            assert sorted(failure) == sorted(FAILURE_KEYS)
    by_name = {check["name"]: check for check in document["checks"]}
    assert [name for name, check in by_name.items() if not check["ok"]] == ["receipt", "source"]
    (failure,) = by_name["source"]["failures"]
    place = [failure[key] for key in FAILURE_KEYS[:6]]
    assert place == ["layers.0.ffn.experts.10.w1.weight", 0, 10, "w1", 33, 2]
    before, after = bytes.fromhex(failure["expected"]), bytes.fromhex(failure["found"])
    assert [a ^ b for a, b in zip(before, after, strict=True)] == [0] * 5 + [0x30] + [0] * 11


def test_people_are_told_the_place_on_stderr(damaged: Path, source: Path) -> None:
    result = verify(damaged, "--source", source)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert len(lines) == 3  # the tensor's digest, the file's, the place
    assert lines[2].startswith(
        "source: layers.0.ffn.experts.10.w1.weight, layer 0, expert 10, projection w1, row 33, "
        "block 2: packed block differs from the source: expected "
    )
    assert result.stdout.splitlines()[-1].endswith(": FAILED")
    assert "FAILED (1)" in result.stdout
    assert "FAILED (2)" in result.stdout


def test_junit_names_the_tensors(damaged: Path, source: Path, tmp_path: Path) -> None:
    xml = tmp_path / "report.xml"
    result = verify(damaged, "--source", source, "--junit", xml)
    assert result.exit_code == 1
    (suite,) = ElementTree.parse(xml).getroot()
    assert (suite.tag, suite.get("tests"), suite.get("failures")) == ("testsuite", "5", "2")
    cases = {case.get("name"): case for case in suite}
    assert list(cases) == ["structure", "inventory", "payload", "receipt", "source"]
    assert all(case.tag == "testcase" for case in suite)
    (failure,) = cases["source"]
    assert failure.tag == "failure"
    message = failure.get("message")
    assert message is not None
    assert "layers.0.ffn.experts.10.w1.weight, layer 0, expert 10" in message
    assert [case.get("name") for case in suite if len(case)] == ["receipt", "source"]


def test_junit_of_a_sound_file_has_no_failure(artifact: Path, tmp_path: Path) -> None:
    assert verify(artifact, "--junit", tmp_path / "r.xml").exit_code == 0
    assert not list(ElementTree.parse(tmp_path / "r.xml").iter("failure"))


def test_a_report_that_cannot_be_written_is_refused_before_work(
    artifact: Path, tmp_path: Path
) -> None:
    for place in (tmp_path / "no" / "r.xml", tmp_path, artifact):
        before = artifact.read_bytes()
        result = verify(artifact, "--junit", place)
        assert (result.exit_code, result.stdout) == (2, "")
        assert str(place) in result.stderr or str(place.parent) in result.stderr
        assert artifact.read_bytes() == before


def test_an_earlier_report_is_replaced(artifact: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert verify(artifact, "--junit", tmp_path / "r.xml").exit_code == 0
    assert ElementTree.parse(tmp_path / "r.xml").getroot().tag == "testsuites"


@pytest.mark.parametrize(
    ("words", "says"),
    [([], "No such file"), (["--registry", "no-such-tag"], "no-such-tag")],
    ids=["file", "tag"],
)
def test_no_green_report_stays_when_nothing_could_be_checked(
    words: list[str], says: str, artifact: Path, tmp_path: Path
) -> None:
    report = tmp_path / "r.xml"
    assert verify(artifact, "--junit", report).exit_code == 0
    path = artifact if words else tmp_path / "no.hfq"
    assert verify(path, *words, "--junit", report).exit_code == 1
    (suite,) = ElementTree.parse(report).getroot()
    assert suite.get("name") == f"ds4q verify {path}"
    (failure,) = suite.iter("failure")
    assert says in (failure.get("message") or "")


def only_failure(report: Path) -> str:
    """The one line of a report that holds no other."""
    (failure,) = ElementTree.parse(report).getroot().iter("failure")
    return failure.get("message") or ""


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Terminated, ValueError])
def test_no_green_report_stays_when_the_run_is_stopped(
    stop: type[BaseException], artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "r.xml"
    assert verify(artifact, "--junit", report).exit_code == 0
    seen = []

    def interrupt(*arguments: object, **options: object) -> None:
        seen.append(only_failure(report))  # as it stands if the process is killed
        raise stop

    monkeypatch.setattr("ds4q.api.verify", interrupt)
    assert verify(artifact, "--junit", report).exit_code != 0
    assert [*seen, only_failure(report)] == ["the run did not finish"] * 2


def run_into(stdout: IO[str], *words: object) -> tuple[int, str]:
    """Exit status and standard error of a ``ds4q verify`` whose results go into a file."""
    command = [sys.executable, "-m", "ds4q", "verify", *map(str, words)]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


def test_a_full_standard_output_does_not_cost_the_report(damaged: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.xml"
    with open("/dev/full", "w") as full:
        status, said = run_into(full, damaged, "--json", "--junit", report)
    assert status == 1
    assert "No space left on device" in said
    failures = ElementTree.parse(report).getroot().iter("failure")
    assert any("layers.0.ffn.experts.10.w1" in (each.get("message") or "") for each in failures)


def test_a_report_that_cannot_be_written_does_not_cost_what_is_printed(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str, mark: bytes) -> None:
        if "did not finish" not in text:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("ds4q.cli.common.write_report", refuse)
    result = verify(artifact, "--junit", tmp_path / "r.xml", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is True
    assert "No space left" in result.stderr


@pytest.mark.parametrize("option", ["--junit", "--html"])
def test_a_report_is_not_written_over_standard_output(
    option: str, artifact: Path, tmp_path: Path
) -> None:
    both = tmp_path / "both"
    with both.open("w") as out:
        status, said = run_into(out, artifact, "--json", option, both)
    assert (status, both.read_bytes()) == (2, b"")
    assert "both' is where standard output goes; choose another name" in said


@pytest.mark.parametrize("length", [256, 300])
def test_a_report_with_a_name_that_is_too_long_is_refused_before_work(
    length: int, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("work was done")

    monkeypatch.setattr("ds4q.api.verify", never)
    result = verify(artifact, "--junit", tmp_path / ("n" * length))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith(": File name too long\n")


def test_a_missing_file_is_the_same_failure_alone_and_among_others(
    artifact: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "no.hfq"
    alone = json.loads(verify(missing, "--json").stdout)
    del alone["schema_version"]  # the document's, not a target's
    among = json.loads(verify(missing, artifact, "--json").stdout)["targets"][0]
    for document in (alone, among):
        for check in document["checks"]:
            del check["seconds"]
    assert alone == among
    assert not alone["ok"]


def test_a_hundred_failures_are_listed_and_all_are_counted(
    tiny_artifact: Path, tmp_path: Path
) -> None:
    path = tmp_path / "t.hfq"
    shutil.copy(tiny_artifact, path)
    shutil.copy(receipt_path(tiny_artifact), receipt_path(path))
    with Reader(path) as reader:
        entries = list(reader.tensors.values())
    for entry in entries:
        flip(path, entry.offset + entry.nbytes - 1)
    result = verify(path, "--source", TINY, "--json", "--threads", "2")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert len(checks["source"]["failures"]) == len(checks["receipt"]["failures"]) == 100
    assert checks["source"]["figures"]["failures"] == len(entries)
    assert checks["receipt"]["figures"]["failures"] == len(entries) + 1
    names = [failure["tensor"] for failure in checks["source"]["failures"]]
    assert names == [entry.name for entry in entries[:100]]
    for_people = verify(path, "--source", TINY, "--threads", "2")
    assert f"source: and {len(entries) - 100} more" in for_people.stderr.splitlines()


# ---------------------------------------------------------------- receipts


def test_no_receipt_is_said_and_is_no_check(artifact: Path, source: Path) -> None:
    receipt_path(artifact).unlink()
    for words in ([], ["--source", source]):
        result = verify(artifact, *words)
        assert result.exit_code == 0
        assert "payload: no receipt: digests not checked" in result.stdout
        document = json.loads(verify(artifact, *words, "--json").stdout)
        assert "receipt" not in [check["name"] for check in document["checks"]]
        assert "no receipt: digests not checked" in result.stdout


def test_a_receipt_may_be_named(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    moved = receipt_path(artifact).rename(tmp_path / "elsewhere" / "r")
    named = verify(artifact, "--receipt", moved, "--json")
    assert named.exit_code == 0
    checks = {check["name"]: check for check in json.loads(named.stdout)["checks"]}
    assert checks["receipt"]["ok"] is True
    assert checks["receipt"]["figures"]["sha256"] == models.digests(tmp_path, "x.hfq")["x.hfq"]


def test_the_receipt_of_the_sidecar_is_another_files(artifact: Path) -> None:
    other = artifact.with_name("x-dspark.hfq.receipt")
    result = verify(artifact, "--receipt", other)
    assert result.exit_code == 1
    assert "receipt: file length differs from the receipt" in result.stderr


def test_a_named_receipt_that_is_missing_is_one_line(artifact: Path, tmp_path: Path) -> None:
    result = verify(artifact, "--receipt", tmp_path / "no")
    assert result.exit_code == 1
    assert str(tmp_path / "no") in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_sidecar_is_verified_like_a_trunk(artifact: Path, source: Path) -> None:
    result = verify(artifact.with_name("x-dspark.hfq"), "--source", source)
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_name_that_is_not_text_is_printed_safely(artifact: Path, source: Path) -> None:
    """A byte that is not UTF-8, an escape and a line break, where the stream takes UTF-8 only."""
    odd = artifact.rename(artifact.with_name("a\udcff\x1b[31m\n.hfq"))
    receipt_path(artifact).rename(receipt_path(odd))
    for words in (["verify", str(odd), "--source", str(source)], ["inspect", str(odd)]):
        result = CliRunner(charset="utf-8").invoke(main, words)
        assert result.exit_code == 0, result.output
        assert "a\\xff\\x1b[31m\\x0a.hfq" in result.stdout
    made = CliRunner().invoke(
        main, ["quantize", str(source), "-o", str(odd), "--allow-partial", "--force"]
    )
    assert made.exit_code == 0, made.output
    assert "a\\xff\\x1b[31m\\x0a.hfq" in made.stdout


# ---------------------------------------------------------------- bad grounds


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = verify(tmp_path / "no.hfq")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr == f"structure: {tmp_path / 'no.hfq'}: No such file or directory\n"
    assert result.stdout.endswith("no.hfq: FAILED\n")


@pytest.mark.parametrize("kind", ["fifo", "empty", "text"])
def test_what_is_no_artifact_fails_structure(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(b"" if kind == "empty" else b"text" * 100)
    result = verify(path, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert [check["name"] for check in document["checks"]] == ["structure"]
    assert document["checks"][0]["failures"][0]["message"]


def test_a_missing_source_is_a_failed_check(artifact: Path, tmp_path: Path) -> None:
    result = verify(artifact, "--source", tmp_path / "no", "--json")
    assert result.exit_code == 1
    failed = [check for check in json.loads(result.stdout)["checks"] if not check["ok"]]
    assert [check["name"] for check in failed] == ["source"]
    assert str(tmp_path / "no") in failed[0]["failures"][0]["message"]


def test_wrong_usage_is_2() -> None:
    assert verify().exit_code == 2
    assert verify("x", "--threads", "0").exit_code == 2


@pytest.mark.parametrize("how", ["replaced", "appended", "cut", "removed"])
def test_a_file_that_changes_meanwhile(
    how: str, artifact: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was seen of it is not called sound."""

    def disturb(*arguments: Any) -> Any:
        if how == "replaced":
            copy = shutil.copy(artifact, tmp_path / f"copy{threading.get_ident()}")
            os.replace(copy, artifact)
        elif how == "appended":
            with artifact.open("ab") as file:
                file.write(b"x")
        elif how == "cut":
            os.truncate(artifact, 5000)
        else:
            artifact.unlink(missing_ok=True)  # several threads come here
        return convert.compare(*arguments)

    monkeypatch.setattr(compare, "compare", disturb)
    report = api.verify(artifact, source=source)
    assert not report.ok
    lines = [line for line in report.failure_lines() if line.startswith("payload: ")]
    assert len(lines) == 1
    assert "file changed" in lines[0] or "no longer there" in lines[0] or "too short" in lines[0]


# ---------------------------------------------------------------- threads


def test_no_more_threads_look_than_were_asked_for(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.hfq"
    shutil.copy(tiny_artifact, path)  # without its receipt: the hash's thread is free
    looking: set[int] = set()

    def watch(*arguments: Any) -> Any:
        looking.add(threading.get_ident())
        return convert.compare(*arguments)

    monkeypatch.setattr(compare, "compare", watch)
    for threads in (1, 2, 3):
        looking.clear()
        assert verify(path, "--source", TINY, "--threads", threads).exit_code == 0
        assert 1 <= len(looking) <= threads


def test_reports_do_not_depend_on_threads(damaged: Path, source: Path) -> None:
    with Reader(damaged) as reader:
        for entry in reader.tensors.values():
            flip(damaged, entry.offset + entry.nbytes - 2)
    found = []
    for threads in (1, 2, 8):
        document = json.loads(
            verify(damaged, "--source", source, "--threads", threads, "--json").stdout
        )
        for check in document["checks"]:
            del check["seconds"]
        found.append(document)
    assert found[0] == found[1] == found[2]


def test_a_stop_while_work_is_handed_out_ends_verify(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = ThreadPoolExecutor.submit, 0

    def submit(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    result = verify(artifact)
    assert result.exit_code == 130
    assert result.stderr == "ds4q: interrupted\n"
