"""The pages agree with the code: the generated reference, links, commands and make targets."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from ds4q.cli import COMMANDS
from tools import cli_reference

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "artifact" / "FORMAT.md"]
)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
TARGETS = re.compile(r"^([a-z-]+):", re.MULTILINE)
CODE_LINE = re.compile(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)


def code_lines(text: str) -> list[str]:
    """Lines of code blocks and pieces of inline code of a Markdown page."""
    found: list[str] = []
    for block, inline in CODE_LINE.findall(text):
        found += block.splitlines() if block else [inline]
    return [line.strip().removeprefix("$ ") for line in found]


def test_the_reference_is_what_the_commands_say() -> None:
    assert cli_reference.PAGE.read_text("utf-8") == cli_reference.page(), "run 'make docs'"


def test_the_reference_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    wide = cli_reference.page()
    monkeypatch.setenv("COLUMNS", "40")
    assert cli_reference.page() == wide
    assert max(len(line) for line in wide.splitlines() if not line.startswith("|")) <= 100


@pytest.mark.parametrize("name", cli_reference.commands())
def test_every_command_has_help_an_example_and_help_for_each_option(name: str) -> None:
    command = cli_reference.commands()[name]
    assert f"ds4q {name}" in (command.help or "").partition("Example")[2]
    bare = [p.name for p in command.params if isinstance(p, click.Option) and not p.help]
    assert not bare, f"options without help: {bare}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_inside_the_project_lead_somewhere(page: Path) -> None:
    dead = [to for to in LINK.findall(page.read_text("utf-8")) if not (page.parent / to).exists()]
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_and_commands_that_pages_name_exist(page: Path) -> None:
    targets = set(TARGETS.findall((ROOT / "Makefile").read_text()))
    lines = code_lines(page.read_text("utf-8"))
    unknown = [
        word
        for line in lines
        if line.startswith("make ")
        for word in line.partition("#")[0].split()[1:]
        if word not in targets and "=" not in word
    ]
    unknown += [
        line
        for line in lines
        if (match := re.match(r"ds4q ([a-z]+)\b", line)) and match[1] not in COMMANDS
    ]
    assert not unknown


def test_make_has_the_targets_that_the_house_promises() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    promised = (
        "help setup links demo test test-slow test-gpu objects registry lint type check bench"
        " bench-gpu goldens docs clean"
    )
    assert phony[1].split() == promised.split()
    assert set(phony[1].split()) == set(TARGETS.findall(text))
    missing = [name for name in phony[1].split() if not re.search(rf"^{name}:.*## ", text, re.M)]
    assert not missing, f"make help does not tell of {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_pages_name_exist(page: Path) -> None:
    rooms = ("artifact", "hipkern", "quantize", "registry", "runtime", "ds4q", "tests", "docs")
    named = re.compile(rf"`((?:{'|'.join(rooms)})/[\w./-]*)(?::[\w.]+)?`")
    gone = [name for name in named.findall(page.read_text("utf-8")) if not (ROOT / name).exists()]
    assert not gone
