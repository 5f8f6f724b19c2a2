"""--html of inspect and verify: the page is written beside the report, and over nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ds4q import api
from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import receipt_path
from ds4q.cli import main
from tests.artifact.build import File, Tensor
from tests.quantize import models
from tests.quantize.builders import TINY
from tests.quantize.damage import flip
from tests.quantize.page.pages import Page


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of four experts."""
    folder = tmp_path_factory.mktemp("experts")
    return models.save(folder, models.expert_tensors(), config=models.EXPERT_CONFIG)


@pytest.fixture
def mixed(source: Path, tmp_path: Path) -> Path:
    """Experts of two mixed types, books and all."""
    models.run(source, tmp_path / "mix.hfq", recipe="mix")
    return tmp_path / "mix.hfq"


def ds4q(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def read(page: Path) -> tuple[Page, dict[str, Any]]:
    held = Page(page.read_text("utf-8"))
    return held, json.loads(held.scripts[0]) if held.scripts else {}


# ---------------------------------------------------------------- pages


def test_inspect_shows_the_same_with_a_page(tiny_artifact: Path, tmp_path: Path) -> None:
    html = tmp_path / "x.html"
    for words in ([], ["--json"], ["--layer", "1"]):
        plain = ds4q("inspect", tiny_artifact, *words)
        result = ds4q("inspect", tiny_artifact, *words, "--html", html)
        assert (result.exit_code, result.output) == (0, plain.output)
        held, data = read(html)  # the whole file, whatever --layer lists
        assert data["layers"] == ["0", "1", "2", "3"]
        assert data["columns"] == list(range(16))
        assert [kind["type"] for kind in data["parts"][0]["kinds"]] == ["HFP4G32"]
        assert "nothing is verified here" in held.text()


def test_verify_shows_errors_of_experts(mixed: Path, source: Path, tmp_path: Path) -> None:
    html = tmp_path / "x.html"
    result = ds4q("verify", mixed, "--source", source, "--json", "--html", html)
    assert result.exit_code == 0
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    held, data = read(html)
    gate_up, down = data["parts"]
    assert [kind["type"] for kind in gate_up["kinds"]] == ["ROCmFP2Mix"]
    assert [kind["type"] for kind in down["kinds"]] == ["ROCmFP3Mix"]
    for part in (gate_up, down):
        assert all(0.05 < error < 0.5 for row in part["errors"] for error in row)
    # A part's error lies between those of its tensors.
    worst = checks["source"]["figures"]["worst"][0]["nrmse"]
    assert max(e for row in gate_up["errors"] for e in row) <= worst
    assert "All 5 checks passed" in held.text()
    assert checks["receipt"]["figures"]["sha256"] in held.text()
    assert checks["source"]["figures"]["worst"][0]["tensor"] in held.text()


def test_a_lossless_artifact_has_no_errors(tiny_artifact: Path, tmp_path: Path) -> None:
    html = tmp_path / "x.html"
    assert ds4q("verify", tiny_artifact, "--source", TINY, "--html", html).exit_code == 0
    held, data = read(html)
    assert [part["errors"] for part in data["parts"]] == [None, None]
    assert "NRMSE" not in held.text()


def test_a_failed_check_has_a_page_and_exit_status_1(
    mixed: Path, source: Path, tmp_path: Path
) -> None:
    with Reader(mixed) as reader:
        entry = reader.entry("layers.3.ffn.experts.2.w2.weight")
    flip(mixed, entry.offset + 3)
    html = tmp_path / "x.html"
    result = ds4q("verify", mixed, "--source", source, "--html", html)
    assert result.exit_code == 1
    held, _ = read(html)
    assert "2 of 5 checks failed" in held.text()
    assert "layers.3.ffn.experts.2.w2.weight, layer 3, expert 2, projection w2" in held.text()


def test_a_hostile_name_is_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    path = File((Tensor(name, 53, (1,), 0, b"x"),)).write(tmp_path)
    html = tmp_path / "x.html"
    for command in ("inspect", "verify"):
        ds4q(command, path, "--html", html)
        held, _ = read(html)
        assert held.scripts == []
        assert "img" not in {tag for tag, _ in held.tags}
        assert name in held.text()


@pytest.mark.parametrize("kind", ["empty", "text"])
def test_what_is_no_artifact_has_a_page_that_says_so(kind: str, tmp_path: Path) -> None:
    path, html = tmp_path / "x", tmp_path / "x.html"
    path.write_text("" if kind == "empty" else "text" * 100)
    assert ds4q("verify", path, "--html", html).exit_code == 1
    assert "structure 1 failed" in read(html)[0].text()


def test_receipts_checkpoints_and_drafts_have_pages(random_artifact: Path, tmp_path: Path) -> None:
    html = tmp_path / "x.html"
    found = {}
    draft = random_artifact.with_name("ds4-random-dspark.hfq")
    for path in (random_artifact, receipt_path(random_artifact), TINY, draft):
        assert ds4q("inspect", path, "--html", html).exit_code == 0
        held, data = read(html)
        found[path.name] = [part["kinds"] for part in data["parts"]]
        assert path.name in held.text()
    names = list(found)
    assert found[names[0]] == found[names[1]]  # a receipt knows types and lengths of its artifact
    assert found["ds4-tiny"][0][0]["type"] == "F8_E8M0 + I8"
    assert data["layers"] == ["mtp.0", "mtp.1", "mtp.2"]


# ---------------------------------------------------------------- places


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_page_never_replaces_a_foreign_file(
    command: str, tiny_artifact: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "thesis.html"
    precious.write_text("<!doctype html><title>my thesis</title>")
    for place in (precious, tmp_path / "no" / "x.html", tmp_path, tiny_artifact):
        before = tiny_artifact.stat().st_mtime_ns
        result = ds4q(command, tiny_artifact, "--html", place)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--html" in result.stderr
        assert tiny_artifact.stat().st_mtime_ns == before
    assert precious.read_text().endswith("my thesis</title>")


def test_an_earlier_page_is_replaced(tiny_artifact: Path, tmp_path: Path) -> None:
    html = tmp_path / "x.html"
    assert ds4q("inspect", tiny_artifact, "--html", html).exit_code == 0
    first = html.read_text("utf-8")
    assert ds4q("verify", tiny_artifact, "--html", html).exit_code == 0
    assert html.read_text("utf-8") != first
    assert [path.name for path in tmp_path.iterdir()] == ["x.html"]


def test_page_and_junit_are_two_files(tiny_artifact: Path, tmp_path: Path) -> None:
    xml, html = tmp_path / "x.xml", tmp_path / "x.html"
    result = ds4q("verify", tiny_artifact, "--html", xml, "--junit", xml)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "same file" in result.stderr
    assert ds4q("verify", tiny_artifact, "--html", html, "--junit", xml).exit_code == 0
    assert "<testsuites>" in xml.read_text()
    assert "All 4 checks passed" in read(html)[0].text()


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_without_jinja2_it_is_said_before_any_work(
    command: str, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*args: object, **more: object) -> None:
        raise RuntimeError("there is work")

    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr(Reader, "__init__", work)
    monkeypatch.setattr(api, "verify", work)
    result = ds4q(command, tiny_artifact, "--html", tmp_path / "x.html")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "ds4q: error: the page of --html needs jinja2, which is not installed; "
        "pip install 'ds4q[report]'\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_without_a_page_jinja2_is_not_needed(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    for command in ("inspect", "verify"):
        assert ds4q(command, tiny_artifact).exit_code == 0
