"""Owns running a composite action and a workflow's use of it as their runner does, without one.

Only what these files use is understood; anything else raises.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
ACTION = ROOT / "action.yml"
WORKFLOW = ROOT / "examples" / "ci" / "validate.yml"
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


def load(path: Path) -> dict[str, Any]:
    """A YAML file."""
    loaded = yaml.safe_load(path.read_text("utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def expand(text: str, values: Mapping[str, str]) -> str:
    """``text`` with its ``${{ ... }}`` replaced; an expression that is not known raises."""
    return EXPRESSION.sub(lambda match: values[match[1]], text)


def wanted(condition: str, values: Mapping[str, str]) -> bool:
    """A step's ``if``: always, or one value compared with nothing."""
    inner = EXPRESSION.fullmatch(condition)
    assert inner is not None, condition
    if inner[1] == "always()":
        return True
    left, equals, right = inner[1].partition(" == ")
    assert (equals, right) == (" == ", "''"), condition
    return values[left] == ""


def commands(log: str) -> list[str]:
    """The lines of a log that its runner takes for commands: in either form, unless stopped."""
    found, resume = [], ""
    for line in re.split(r"\r\n|\r|\n", log):
        text = line.strip()
        if resume:
            resume = "" if text == resume else resume
        elif text.startswith("::stop-commands::"):
            resume = f"::{text.removeprefix('::stop-commands::')}::"
        elif text.startswith("::") or re.search(r"##\[[\w-]+", text):
            found.append(text)
    return found


@dataclass(frozen=True)
class Ran:
    """What a run of the action came to."""

    status: int
    outputs: dict[str, str]
    log: str


def run_action(
    given: Mapping[str, str], workspace: Path, temp: Path, *, checkout: Path = ROOT, **env: str
) -> Ran:
    """Run every step of action.yml in ``workspace`` with the inputs of a workflow's ``with``.

    ``checkout`` is where the runner has put this repository.
    """
    action = load(ACTION)
    inputs = action["inputs"]
    assert given.keys() <= inputs.keys(), "an input that the action does not have"
    required = {name for name, each in inputs.items() if each.get("required")}
    assert required <= given.keys(), "a required input is missing"
    values = {"github.action_path": str(checkout)}
    for name, each in inputs.items():
        values[f"inputs.{name}"] = given.get(name, each.get("default", ""))
    status, log = 0, ""
    for number, step in enumerate(action["runs"]["steps"]):
        if status or not wanted(step.get("if", "${{ always() }}"), values):
            continue
        assert step["shell"] == "bash"
        assert "${{" not in step["run"], "text of an input must not become text of a script"
        script, out = temp / f"step{number}.sh", temp / f"outputs{number}"
        script.write_text(step["run"])
        out.touch()
        own = {key: expand(text, values) for key, text in step.get("env", {}).items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=workspace,
            env=os.environ | {"RUNNER_TEMP": str(temp), "GITHUB_OUTPUT": str(out)} | own | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        status, log = done.returncode, log + done.stdout + done.stderr
        for line in out.read_text().splitlines():
            key, _, value = line.partition("=")
            values[f"steps.{step['id']}.outputs.{key}"] = value
    outputs = {}
    if any(key.startswith("steps.") for key in values):
        outputs = {k: expand(o["value"], values) for k, o in action["outputs"].items()}
    return Ran(status, outputs, log)


def uses_of_the_action() -> list[dict[str, Any]]:
    """The steps of the example workflow that use this action."""
    jobs = load(WORKFLOW)["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    return [step for step in steps if step.get("uses", "").startswith("OWNER/ds4q@")]
