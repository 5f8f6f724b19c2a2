"""Every document of ``--json``, and every JSON file for scripts, has its ``schema_version``."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ds4q import api
from ds4q.artifact.report import SCHEMA_VERSION
from ds4q.cli import main
from tests.quantize.builders import TINY
from tests.registry.documents import document
from tests.registry.server import serving
from tests.registry.shelves import registered
from tests.registry.test_signing import write_key
from tests.test_floors import ROOT, sources
from tools import cli_reference

JSON_COMMANDS = [
    name
    for name, command in cli_reference.commands().items()
    if "as_json" in {param.name for param in command.params}
]
RUN = ["--prompt-ids", "1,2,3,4,5", "--max-tokens", "2"]


def ds4q(*words: object) -> str:
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def words_of(
    random_artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, list[object]]]:
    """Words with which each command succeeds, and by ``stats`` the file that they write."""
    folder = tmp_path_factory.mktemp("json")
    www, model = folder / "www", folder / "home" / "models" / "m.hfq"
    www.mkdir()
    model.parent.mkdir(parents=True)
    shutil.copy(random_artifact, model)
    shutil.copy(f"{random_artifact}.receipt", f"{model}.receipt")
    (www / "a.fp4").write_bytes(b"model")
    published = registered("a.fp4", b"model", repo=www.as_uri())
    (www / "registry.json").write_text(json.dumps(document({"m": published})))
    (folder / "t.ids").write_text("5 6 7 8 9")
    here, trace, stats = www / "registry.json", folder / "trace", folder / "stats"
    with pytest.MonkeyPatch.context() as patch, serving(www) as server:
        patch.setenv("DS4Q_HOME", str(folder / "home"))
        paged = ["run", model, "--expert-cache", "3MB", *RUN, "--trace", trace, "--trace-states"]
        ds4q(*paged, "--stats", stats)
        ds4q("adapter", "train", trace, "-o", folder / "first.adapter")
        ds4q("registry", "add", model, "--tag", "mine:fp4")
        yield {
            "quantize": [TINY, "-o", folder / "q.hfq", "--dry-run"],
            "verify": [model],
            "inspect": [model],
            "run": [model, *RUN],
            "calibrate": [model, "--text", folder / "t.ids", "-o", folder / "i"],
            "cache profile": [trace, "-o", folder / "profile"],
            "cache replay": [trace],
            "adapter eval": [folder / "first.adapter", trace],
            "adapter train": [trace, "-o", folder / "m.adapter"],
            "export": [model, "--to", "gguf", "-o", folder / "x.gguf", "--only", "experts"],
            "registry add": [model, "--tag", "other:fp4", "--dry-run"],
            "registry card": ["mine:fp4"],
            "registry gen": ["--check"],
            "registry list": [],
            "registry pull": ["m", "--registry", here, "--dry-run"],
            "registry rm": ["mine:fp4", "--dry-run"],
            "registry show": ["mine:fp4"],
            "registry status": [],
            "registry update": ["--registry", server.url("registry.json")],
            "registry verify": ["mine:fp4"],
            "sign": [model, "--key", write_key(folder / "mine.pem")],
            "doctor": [],
            "stats": [stats],
        }


@pytest.mark.parametrize("name", JSON_COMMANDS)
def test_every_document_of_a_command_has_its_version(
    name: str, words_of: dict[str, list[object]]
) -> None:
    found: dict[str, Any] = json.loads(ds4q(*name.split(), *words_of[name], "--json", "-q"))
    assert next(iter(found)) == "schema_version"
    assert found["schema_version"] == SCHEMA_VERSION


def test_statistics_of_a_run_have_their_version(words_of: dict[str, list[object]]) -> None:
    (stats,) = words_of["stats"]
    assert json.loads(Path(str(stats)).read_text())["schema_version"] == SCHEMA_VERSION


def test_the_report_of_a_plan_has_its_version(tmp_path: Path) -> None:
    api.quantize(TINY, tmp_path / "b.hfq", recipe="budget", target_bpw=4.0, warn=lambda _: None)
    (report,) = tmp_path.glob("b.hfq.plan*.json")
    assert json.loads(report.read_text())["schema_version"] == SCHEMA_VERSION


def test_no_command_writes_json_by_itself() -> None:
    """``json_text`` is the only way out, so a new command cannot forget the version."""
    found = [
        str(path.relative_to(ROOT))
        for path in sources("ds4q")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("dump", "dumps")
    ]
    assert found == ["ds4q/cli/registry.py"], "only a value in a table for people"
