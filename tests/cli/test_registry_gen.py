"""ds4q registry gen: what it says and how it ends where the files do not agree."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ds4q.cli import main
from ds4q.registry import generate as module

ROOM = Path(__file__).parents[2] / "registry"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the room's files, which the command works on."""
    for name in ("models.json", "listing.json", "registry.json"):
        shutil.copy(ROOM / name, tmp_path)
    monkeypatch.setattr(module, "generate", partial(module.generate, tmp_path))
    return tmp_path


@pytest.fixture
def edited(folder: Path) -> Path:
    """The same after somebody has edited the curated file."""
    models = json.loads((folder / "models.json").read_text("utf-8"))
    models["models"]["deepseek-v4-flash"]["min_vram_gb"] = 97
    (folder / "models.json").write_text(json.dumps(models), "utf-8")
    return folder


def gen(*words: str) -> Result:
    return CliRunner().invoke(main, ["registry", "gen", *words])


def test_a_check_tells_the_difference_and_fails(edited: Path) -> None:
    before = (edited / "registry.json").read_bytes()
    result = gen("--check")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert [line.split() for line in lines if line[:2] in ("- ", "+ ")] == [
        ["-", '"min_vram_gb":', "96,"],
        ["+", '"min_vram_gb":', "97,"],
    ]
    assert (edited / "registry.json").read_bytes() == before


def test_a_check_as_json_fails_too(edited: Path) -> None:
    result = gen("--check", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["changed"] is True


def test_generating_writes_and_is_then_what_the_check_wants(edited: Path) -> None:
    assert gen().exit_code == 0
    document = json.loads((edited / "registry.json").read_text("utf-8"))
    assert document["models"]["deepseek-v4-flash"]["min_vram_gb"] == 97
    assert gen("--check").exit_code == 0


def test_every_problem_is_a_line_and_nothing_is_written(edited: Path) -> None:
    models = json.loads((edited / "models.json").read_text("utf-8"))
    models["models"]["deepseek-v4-flash-lite"] = models["models"]["deepseek-v4-flash"]
    models["aliases"]["lost"] = "nowhere"
    models["models"]["deepseek-v4-flash"] = dict(models["models"]["deepseek-v4-flash"], file="x.y")
    (edited / "models.json").write_text(json.dumps(models), "utf-8")
    before = (edited / "registry.json").read_bytes()
    result = gen()
    assert result.exit_code == 1
    assert result.stdout == ""
    said = result.stderr.splitlines()
    assert any(line.startswith("deepseek-v4-flash-lite: arch_id: tag") for line in said)
    assert any(line.startswith("deepseek-v4-flash: quant: file 'x.y'") for line in said)
    assert said[-1].startswith("ds4q: error: ")
    assert (edited / "registry.json").read_bytes() == before
