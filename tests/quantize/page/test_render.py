"""The page as HTML: one file, sound, small, and nothing that a file holds becomes part of it."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import sys
from typing import Any

import pytest

from ds4q.artifact.report import NOT_JUDGED, Failure, Report
from ds4q.artifact.types import HFP4G32, ROCMFP2, ROCMFP3
from ds4q.quantize.errors import PageError
from ds4q.quantize.page import gather, is_page, load_template, render
from ds4q.quantize.page.render import count, figure, percent, size
from tests.checks import check_refused
from tests.quantize.page.pages import Page, document, expert, flash, row, sums

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}<!--"


def small(**changes: Any) -> dict[str, Any]:
    """A verified file of two experts."""
    rows = expert(0, 0, ROCMFP2, ROCMFP3) + expert(1, 5, HFP4G32, ROCMFP3)
    errors = {r["name"]: sums(1.0, 4.0) for r in rows if r["type"] != HFP4G32.name}
    report = Report()
    with report.check("structure") as check:
        check.figures["worst"] = [{"tensor": "a", "nrmse": 0.5}]
    return gather(document(rows, **changes), rows, "1.2.3", report, errors)


def hostile() -> dict[str, Any]:
    """The same words in every place that a file can fill."""
    rows = [
        row("layers.0.ffn.experts.0.w2.weight", HOSTILE, (2,), 2),
        row(HOSTILE, HOSTILE, (2,), 2),
    ]
    told = {"recipe": HOSTILE, "tool_version": HOSTILE, "source_fingerprint": [HOSTILE]}
    metadata = {"ds4q": told, "architecture": HOSTILE, "rocmfpx": {"variant_107": HOSTILE}}
    report = Report()
    with report.check(HOSTILE) as check:
        check.figures |= {HOSTILE: HOSTILE, "worst": [{HOSTILE: HOSTILE}]}
        check.notes.append(HOSTILE)
        check.fail(Failure(HOSTILE, tensor=HOSTILE, expected=HOSTILE, found=HOSTILE))
    held = document(rows, path=f"/x/{HOSTILE}", metadata=metadata, problems=[HOSTILE])
    return gather(held, rows, "1", report)


# ---------------------------------------------------------------- one file


@pytest.mark.parametrize("page", [small(), hostile()], ids=["small", "hostile"])
def test_the_page_loads_nothing(page: dict[str, Any]) -> None:
    text = render(page)
    assert "http://" not in text
    assert "https://" not in text
    held = Page(text)
    for name in ("src", "href", "srcset", "action", "data", "poster", "background"):
        assert held.attributes(name) == []
    style = text[text.index("<style>") : text.index("</style>")]
    assert "@import" not in style
    assert "url(" not in style
    assert not {tag for tag, _ in held.tags} & {"link", "iframe", "object", "embed", "img", "base"}


def test_the_page_forbids_itself_what_it_does_not_need() -> None:
    held = Page(render(small()))
    (policy,) = (a["content"] for _, a in held.tags if a.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy
    _data, script = held.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert not [name for _, a in held.tags for name in a if name.startswith("on")]


def test_nothing_of_a_file_becomes_code() -> None:
    text = render(hostile())
    held = Page(text)
    plain = Page(render(small()))
    assert len(held.scripts) == len(plain.scripts) == 2
    assert held.scripts[1] == plain.scripts[1]
    assert {tag for tag, _ in held.tags} <= {tag for tag, _ in plain.tags} | {"ul", "li", "p"}
    assert json.loads(held.scripts[0])["parts"][0]["kinds"][0]["type"] == HOSTILE
    assert "49" not in re.findall(r"\d+", held.text())
    assert held.text().count("<script>alert(1)</script>") >= 10
    assert not [v for _, a in held.tags for v in a.values() if v and "alert" in v]


@pytest.mark.parametrize("page", [small(), hostile()], ids=["small", "hostile"])
def test_the_page_is_sound_html(page: dict[str, Any]) -> None:
    text = render(page)
    held = Page(text)
    assert text.lstrip().startswith("<!doctype html>")
    ids = held.attributes("id")
    assert len(set(ids)) == len(ids)
    assert set(held.attributes("aria-labelledby")) <= set(ids)
    assert [a["lang"] for tag, a in held.tags if tag == "html"] == ["en"]
    levels = [int(tag[1]) for tag, _ in held.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))


def test_the_soundness_check_can_fail() -> None:
    for text in ("<p><b></p></b>", "<p>", "</p>", "<div/>"):
        with pytest.raises(ValueError, match=r"element|closed"):
            Page(text)


def test_the_mark_is_near_the_beginning() -> None:
    assert is_page(render(small()).encode())
    assert is_page(render(hostile()).encode())


def test_the_same_data_give_the_same_page() -> None:
    assert render(small()) == render(small())


def test_flash_in_the_worst_case_stays_light() -> None:
    rows, errors = flash()
    text = render(gather(document(rows), rows, "1", Report(), errors))
    assert 500_000 < len(text.encode()) < 2_000_000
    data = json.loads(Page(text).scripts[0])
    assert [len(part["errors"]) for part in data["parts"]] == [43, 43]


# ---------------------------------------------------------------- what is on it


def test_everything_is_said_in_words_too() -> None:
    """Without script, colours or maps: the tables carry it."""
    text = Page(render(small())).text()
    for words in (
        "The check passed",
        "model.hfq",
        "experts, gate and up",
        "0 gate and up ROCmFP2 20,480 2.500 0.5000 0.5000 0",
        "1 gate and up HFP4G32 38,912",
        "1 down ROCmFP3 14,336 3.500 0.5000 0.5000 5",
        "worst (1)",
        "HFQ artifact, version 1",
    ):
        assert words in text
    maps = [a for tag, a in Page(render(small())).tags if a.get("role") == "img"]
    assert len(maps) == 6
    assert all(a["aria-label"] for a in maps)


def test_failed_checks_are_counted_and_listed() -> None:
    report = Report()
    with report.check("good"):
        pass
    with report.check("bad") as check:
        for i in range(120):
            check.fail(Failure("differs", tensor=f"tensor{i}"))
    text = Page(render(gather(document([]), [], "1", report))).text()
    assert "1 of 2 checks failed" in text
    assert "120 failed" in text
    assert "tensor99: differs" in text
    assert "and 20 more" in text


def test_an_undecided_check_is_not_called_failed() -> None:
    report = Report()
    with report.check("load-time") as check:
        check.fail(Failure("undecided: the machine is too noisy"))
        check.undecided = True
    text = Page(render(gather(document([]), [], "1", report))).text()
    assert "1 of 1 checks undecided" in text
    assert "load-time undecided, 0.00 s" in text
    with report.check("bad") as check:
        check.fail(Failure("differs"))
    text = Page(render(gather(document([]), [], "1", report))).text()
    assert "2 of 2 checks failed" in text


def test_what_was_not_judged_is_not_called_passed() -> None:
    report = Report()
    with report.check("good"):
        pass
    with report.check("divergence") as check:
        check.unjudged = NOT_JUDGED
    held = Page(render(gather(document([]), [], "1", report)))
    assert "1 of 2 checks passed, 1 not judged" in held.text()
    assert "\N{EN DASH} divergence measured, not judged" in " ".join(held.text().split())


def test_an_inspected_file_is_not_called_verified() -> None:
    rows = expert(0, 0, ROCMFP2, ROCMFP3)
    text = Page(render(gather(document(rows, problems=["odd"]), rows, "1"))).text()
    assert "nothing is verified here" in text
    assert "Worth knowing odd" in text
    assert "passed" not in text
    assert "NRMSE" not in text


def test_a_source_has_no_bits_per_weight() -> None:
    rows = [row("layers.0.ffn.experts.0.w2.weight", "I8", (2,), 2)]
    held = Page(render(gather(document(rows, kind="checkpoint"), rows, "1")))
    assert "Bits per weight" not in held.text()
    assert "Bits per weight" in Page(render(small())).text()


def test_what_could_not_be_opened_has_a_page() -> None:
    report = Report()
    with report.check("structure") as check:
        check.fail(Failure("not an HFQ file"))
    page = gather({"kind": "artifact", "path": "/x/y.hfq"}, [], "1", report)
    held = Page(render(page))
    assert "1 of 1 checks failed" in held.text()
    assert "not an HFQ file" in held.text()
    assert held.scripts == []


def test_numbers_too_many_to_draw_are_said() -> None:
    stem = "layers.{0}.ffn.experts.{0}.w2.weight"
    rows = [row(stem.format(i), ROCMFP3, (1, 32)) for i in range(600)]
    held = Page(render(gather(document(rows), rows, "1")))
    assert "600 layers and 600 expert numbers are too many to draw" in held.text()
    assert "88 more layers are not listed" in held.text()
    assert held.scripts == []


# ---------------------------------------------------------------- numbers, and the engine


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 999, 1000, 98_294_917_184)] == [
        "0 bytes",
        "999 bytes",
        "1 kB",
        "98.3 GB",
    ]
    assert size(999_600) == "1 MB"
    assert count(1234567) == "1,234,567"
    assert [percent(x) for x in (0.0, 0.0001, 0.5, 1.0)] == [
        "0.0 %",
        "< 0.1 %",
        "50.0 %",
        "100.0 %",
    ]
    assert [figure(None), figure(0.12345), figure(2.5, 3)] == ["\N{EN DASH}", "0.1235", "2.500"]


def test_a_word_that_the_data_lack_is_an_error() -> None:
    page = small()
    del page["facts"]
    with pytest.raises(Exception, match="facts"):
        render(page)


def test_without_jinja2_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    check_refused(PageError, load_template, says=["jinja2", "pip install 'ds4q[report]'"])
