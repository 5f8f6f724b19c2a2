"""Owns how tests of ``ds4q registry`` speak to it and what they read of its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from ds4q.artifact.report import SCHEMA_VERSION
from ds4q.cli import main

TAG = "mini:fp4"


def registry(*words: object, text: str | None = None) -> Result:
    return CliRunner().invoke(main, ["registry", *map(str, words)], input=text)


def told(*words: object, status: int = 0) -> dict[str, Any]:
    """The one document of ``--json``, without its version."""
    result = registry(*words, "--json")
    assert result.exit_code == status, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found.pop("schema_version") == SCHEMA_VERSION
    return found


def refused(*words: object) -> str:
    """The one line of an error with exit status 1; stdout stays empty."""
    result = registry(*words)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    lines = [line for line in result.stderr.splitlines() if "warning" not in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("ds4q: error: ")
    return lines[0].removeprefix("ds4q: error: ")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}
