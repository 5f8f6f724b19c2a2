"""The report: the JSON that scripts rely on, JUnit that parses, lines and a table for people."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from ds4q.artifact.errors import MAX_VALUE, MAX_WORDS, PayloadValueError, TruncatedError
from ds4q.artifact.report import (
    MAX_LISTED,
    NOT_JUDGED,
    SCHEMA_VERSION,
    Check,
    Failure,
    Report,
    json_text,
    junit,
)

PLACE = Failure(
    "code differs",
    tensor="layers.2.ffn.experts.17.w1.weight",
    layer=2,
    expert=17,
    projection="w1",
    row=5,
    block=9,
    expected="80 42",
    found="80 43",
)


def example() -> Report:
    report = Report({"path": "/x/a.hfq", "name": "a.hfq"})
    with report.check("structure") as check:
        check.figures["tensors"] = 1200
        check.notes.append("3 bytes follow the last payload")
    with report.check("source") as check:
        check.figures |= {"bytes": 10**9, "ratio": 0.25, "exact": True}
        check.fail(PLACE)
        check.fail(Failure('bad <row> & "more"'))
    return report


# ------------------------------------------------------------------ JSON


def test_json_has_exactly_the_promised_keys() -> None:
    document = example().document()
    assert sorted(document) == ["artifact", "checks", "ok"]
    for check in document["checks"]:
        assert sorted(check) == ["failures", "figures", "judged", "name", "ok", "seconds"]
        for failure in check["failures"]:
            assert sorted(failure) == [
                "block",
                "expected",
                "expert",
                "found",
                "layer",
                "message",
                "projection",
                "row",
                "tensor",
            ]


def test_json_document() -> None:
    document = json.loads(json.dumps(example().document(), allow_nan=False))
    assert document["ok"] is False
    assert document["artifact"] == {"path": "/x/a.hfq", "name": "a.hfq"}
    structure, source = document["checks"]
    assert (structure["name"], structure["ok"], structure["failures"]) == ("structure", True, [])
    assert structure["figures"] == {
        "tensors": 1200,
        "failures": 0,
        "notes": ["3 bytes follow the last payload"],
    }
    assert (source["name"], source["ok"]) == ("source", False)
    assert source["figures"] == {"bytes": 10**9, "ratio": 0.25, "exact": True, "failures": 2}
    assert source["failures"][0] == {
        "tensor": "layers.2.ffn.experts.17.w1.weight",
        "layer": 2,
        "expert": 17,
        "projection": "w1",
        "row": 5,
        "block": 9,
        "expected": "80 42",
        "found": "80 43",
        "message": "code differs",
    }
    assert source["failures"][1]["tensor"] is None


def test_100_failures_are_listed_and_all_are_counted() -> None:
    check = Check("source")
    for number in range(250):
        check.fail(Failure("differs", row=number))
    document = check.document()
    assert MAX_LISTED == 100
    assert [f["row"] for f in document["failures"]] == list(range(100))
    assert document["figures"]["failures"] == 250
    assert document["ok"] is False
    assert check.lines()[99:] == ["row 99: differs", "and 150 more"]


def test_document_does_not_alias_the_check() -> None:
    check = Check("x", notes=["n"])
    document = check.document()
    document["figures"]["notes"].append("m")
    document["figures"]["new"] = 1
    assert (check.notes, check.figures) == (["n"], {})


# ------------------------------------------------------------------ checks


def test_ok_while_nothing_failed() -> None:
    report = Report()
    assert report.ok
    with report.check("a") as check:
        assert check.ok
    assert report.ok
    check.fail(Failure("x"))
    assert not check.ok
    assert not report.ok


def test_undecided_is_not_ok_and_has_its_own_word() -> None:
    report = Report()
    with report.check("load-time") as check:
        check.fail(Failure("undecided: the machine is too noisy"))
        check.undecided = True
    assert (report.ok, report.verdict) == (False, "UNDECIDED")
    assert report.rows()[0][1] == "UNDECIDED"
    with report.check("other") as other:
        other.fail(Failure("wrong"))
    assert report.verdict == "FAILED"
    assert example().verdict == "FAILED"
    assert Report().verdict == "ok"


def test_error_inside_a_check_becomes_its_failure() -> None:
    report = Report({"path": "a.hfq"})
    with report.check("payload"):
        raise PayloadValueError("NaN scale", path="a.hfq", tensor="t", expected=1, found=[2])
    (failure,) = report.checks[0].failures
    assert failure == Failure("NaN scale", tensor="t", expected="1", found="[2]")
    assert report.checks[0].seconds > 0


def test_error_about_another_file_names_it() -> None:
    report = Report({"path": "a.hfq"})
    with report.check("source"):
        raise TruncatedError(path="src/model.safetensors")
    assert report.checks[0].lines() == [
        "src/model.safetensors: file is too short; copy or download the file again"
    ]


def test_other_exceptions_are_not_swallowed() -> None:
    report = Report()
    with pytest.raises(ZeroDivisionError), report.check("x"):
        raise ZeroDivisionError
    assert report.checks[0].seconds > 0


def test_fail_with_takes_further_coordinates() -> None:
    check = Check("x")
    check.fail_with(PayloadValueError("bad", tensor="t"), layer=3, row=4)
    assert check.lines() == ["t, layer 3, row 4: bad"]


@pytest.mark.parametrize(
    ("tensor", "place"),
    [
        ("layers.4.ffn.experts.17.w2.weight", (4, 17, "w2")),
        ("mtp.0.ffn.experts.3.w1.weight", (0, 3, "w1")),
        ("layers.4.ffn.experts.17", (4, 17, None)),
        ("layers.4.ffn.experts.17.w3.scale", (4, 17, "w3")),
        ("layers.4.ffn.shared_experts.w3.weight", (4, None, "w3")),
        ("layers.41.attn.wq_a.weight", (41, None, None)),
        ("layers.4.ffn.experts.w2.mix_table", (4, None, None)),
        ("embed.weight", (None, None, None)),
        ("xlayers.4.ffn.experts.17.w2.weight", (None, None, None)),
        (None, (None, None, None)),
    ],
)
def test_a_failure_has_the_place_that_its_tensor_names(
    tensor: str | None, place: tuple[int | None, int | None, str | None]
) -> None:
    check = Check("receipt")
    check.fail(Failure("differs", tensor=tensor))
    (found,) = check.failures
    assert (found.layer, found.expert, found.projection) == place


def test_a_place_that_is_given_is_kept() -> None:
    check = Check("neutrality")
    check.fail(Failure("differs", tensor="layers.4.ffn.experts.17.w2.weight", layer=5))
    assert (check.failures[0].layer, check.failures[0].expert) == (5, None)


# ------------------------------------------------------------------ measured, not judged


def measured(*failures: Failure) -> Report:
    report = Report({"path": "a.hfq"})
    with report.check("structure"):
        pass
    with report.check("divergence") as check:
        check.unjudged = NOT_JUDGED
        check.figures["kl"] = 0.25
        for failure in failures:
            check.fail(failure)
    return report


def test_what_was_not_judged_is_neither_ok_nor_a_failure() -> None:
    report = measured()
    assert (report.ok, report.result) == (True, f"ok; divergence {NOT_JUDGED}")
    document = report.document()
    assert document["ok"] is True
    structure, divergence = document["checks"]
    assert (structure["ok"], structure["judged"]) == (True, True)
    assert (divergence["ok"], divergence["judged"]) == (None, False)
    assert [row[1] for row in report.rows()] == ["ok", NOT_JUDGED]
    root = ElementTree.fromstring(junit([report]))
    check_junit_shape(root)
    (suite,) = root
    assert (suite.attrib["failures"], suite.attrib["skipped"]) == ("0", "1")
    (skipped,) = root.iter("skipped")
    assert skipped.attrib["message"] == f"{NOT_JUDGED}: kl 0.25"


def test_a_measurement_that_could_not_be_made_is_a_failure() -> None:
    report = measured(Failure("NaN"))
    assert (report.ok, report.result) == (False, "FAILED")
    divergence = report.document()["checks"][1]
    assert (divergence["ok"], divergence["judged"]) == (False, True)
    check_junit_shape(root := ElementTree.fromstring(junit([report])))
    assert len(list(root.iter("failure"))) == 1


def test_every_document_has_its_version_first() -> None:
    text = json_text({"ok": True, "word": "你"})
    assert text.startswith(f'{{\n  "schema_version": {SCHEMA_VERSION},\n  "ok": true')
    assert text.isascii()
    assert text.endswith("}\n")
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({"kl": float("nan")})


# ------------------------------------------------------------------ lines


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (Failure("bad"), "bad"),
        (Failure("bad", row=0, block=0), "row 0, block 0: bad"),
        (Failure("bad", expected=1), "bad: expected 1"),
        (Failure("bad", found=0), "bad: found 0"),
        (Failure("bad\nline", tensor="a\x1bb"), r"a\x1bb: bad\x0aline"),
        (
            PLACE,
            "layers.2.ffn.experts.17.w1.weight, layer 2, expert 17, projection w1, row 5, block 9: "
            "code differs: expected 80 42, found 80 43",
        ),
    ],
)
def test_failure_is_one_line(failure: Failure, line: str) -> None:
    assert failure.line() == line
    assert failure.line().isprintable()


def test_failure_lines_name_their_check() -> None:
    lines = example().failure_lines()
    assert len(lines) == 2
    assert lines[0].startswith("source: layers.2.ffn.experts.17.w1.weight, layer 2")
    assert lines[1] == 'source: bad <row> & "more"'


# ------------------------------------------------------------------ JUnit


def test_junit() -> None:
    text = junit([example()])
    assert text.startswith('<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>')
    root = ElementTree.fromstring(text.encode("utf-8"))
    (suite,) = root
    assert suite.attrib["name"] == "ds4q verify /x/a.hfq"
    assert (suite.attrib["tests"], suite.attrib["failures"], suite.attrib["errors"]) == (
        "2",
        "1",
        "0",
    )
    cases = list(suite)
    assert [case.attrib["name"] for case in cases] == ["structure", "source"]
    assert not list(cases[0])
    (failure,) = cases[1].findall("failure")
    assert failure.attrib["message"] == f"2 failures, the first: {PLACE.line()}"
    assert (failure.text or "").splitlines() == [PLACE.line(), 'bad <row> & "more"']
    check_junit_shape(root)


def check_junit_shape(root: ElementTree.Element) -> None:
    """The common JUnit shape: which elements and attributes there are, and how many of each."""
    numbers = ("tests", "failures", "errors", "skipped")
    assert (root.tag, root.attrib) == ("testsuites", {})
    for suite in root:
        assert suite.tag == "testsuite"
        assert set(suite.attrib) == {"name", "time", *numbers}
        assert float(suite.attrib["time"]) >= 0
        counted = {"tests": len(suite), "errors": 0, "failures": 0, "skipped": 0}
        for case in suite:
            assert case.tag == "testcase"
            assert set(case.attrib) == {"name", "classname", "time"}
            assert float(case.attrib["time"]) >= 0
            assert len(case) <= 1, "a test case has at most one outcome"
            for outcome in case:
                assert outcome.tag in ("failure", "skipped")
                wanted = {"failure": {"message", "type"}, "skipped": {"message"}}
                assert set(outcome.attrib) == wanted[outcome.tag]
                assert not list(outcome)
                counted["failures" if outcome.tag == "failure" else "skipped"] += 1
        assert {name: int(suite.attrib[name]) for name in numbers} == counted


def test_junit_holds_no_character_that_xml_forbids() -> None:
    nasty = "\x00\x08\x1b\x7f\ufffe\uffff\ud800\n你 ü"
    report = Report({"path": nasty})
    with report.check("structure") as check:
        check.fail(Failure(nasty, tensor=nasty, expected=nasty, found=nasty))
    root = ElementTree.fromstring(junit([report]).encode("utf-8"))
    element = root.find(".//failure")
    assert element is not None
    assert element.text == element.attrib["message"] == check.lines()[0]
    check_junit_shape(root)
    assert "你 ü" in (element.text or "")


def test_junit_of_several_keeps_them_apart() -> None:
    """Viewers take two test cases of one class and name for one."""
    other = example()
    other.artifact["path"] = "/x/b.hfq"
    root = ElementTree.fromstring(junit([example(), other]))
    assert [suite.attrib["name"] for suite in root] == [
        "ds4q verify /x/a.hfq",
        "ds4q verify /x/b.hfq",
    ]
    keys = [(case.attrib["classname"], case.attrib["name"]) for case in root.iter("testcase")]
    assert len(keys) == 4
    assert len(set(keys)) == 4


def test_junit_says_how_many_are_not_listed() -> None:
    report = Report()
    with report.check("source") as check:
        for _ in range(103):
            check.fail(Failure("differs"))
    root = ElementTree.fromstring(junit([report]))
    (failure,) = root.iter("failure")
    lines = (failure.text or "").splitlines()
    assert len(lines) == 101
    assert lines[-1] == "and 3 more"
    assert failure.attrib["message"] == "103 failures, the first: differs"


# ------------------------------------------------------------------ the table


def test_rows() -> None:
    structure, source = example().rows()[:2]
    assert structure[:2] == ("structure", "ok")
    assert structure[3].endswith("tensors 1,200")
    assert source[1] == "FAILED (2)"
    assert source[3].endswith("bytes 1,000,000,000, ratio 0.25, exact True")


def test_rows_have_figures_of_one_value_only() -> None:
    figures: dict[str, Any] = {"file": "a.receipt", "list": [1], "object": {}}
    ((_, _, _, text),) = Report(checks=[Check("x", figures=figures)]).rows()
    assert text == "file a.receipt"


def test_rows_round_floats_and_leave_out_what_is_unknown() -> None:
    figures: dict[str, Any] = {"kl": 0.00202292783942, "top1": 1.0, "kl_se": None, "exact": True}
    ((_, _, _, text),) = Report(checks=[Check("x", figures=figures)]).rows()
    assert text == "kl 0.00202293, top1 1, exact True"


def test_values_of_a_failure_are_cut_in_every_form_of_the_report() -> None:
    report = Report()
    with report.check("x") as check:
        check.fail(Failure("m" * 90_000, tensor="t" * 70_000, found="f" * 80_000))
    found = report.document()["checks"][0]["failures"][0]["found"]
    assert found == "f" * MAX_VALUE + "... (80,000 characters)"
    assert len(report.failure_lines()[0]) < 2 * MAX_VALUE + MAX_WORDS + 200
    assert len(junit([report])) < 3 * (2 * MAX_VALUE + MAX_WORDS)
