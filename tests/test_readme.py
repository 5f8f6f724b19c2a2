"""README's section "Follow one tensor": each ``file:function`` stop is read and looked up."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STOP = re.compile(r"`([\w./-]+\.py):([\w.]+?)(?:\(\))?`")


def stops(readme: str) -> list[tuple[str, str]]:
    """(file, function or Class.method) of each stop of the section, in order."""
    section = re.search(
        r"^## Follow one tensor\n(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL
    )
    return STOP.findall(section[1]) if section else []


def defines(text: str, name: str) -> bool:
    """Whether Python source defines the function, class or method ``name`` (dotted)."""
    body = ast.parse(text).body
    for part in name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name == part
        ]
        if not found:
            return False
        body = found[-1].body
    return True


def test_each_stop_exists() -> None:
    found = stops((ROOT / "README.md").read_text("utf-8"))
    assert 6 <= len(found) <= 12, f"about eight stops, not {len(found)}"
    missing = [
        f"{file}:{name}"
        for file, name in found
        if not (ROOT / file).is_file() or not defines((ROOT / file).read_text("utf-8"), name)
    ]
    assert not missing


README = """\
# x
`a.py:not_this`
## Follow one tensor
1. `quantize/checkpoint.py:Checkpoint.open` finds it.
2. `quantize/plan.py:plan()` gives it a place; `plain.py` is no stop.
## Next
`b.py:nor_this`
"""


def test_stops_are_read_from_their_section_only() -> None:
    assert stops(README) == [
        ("quantize/checkpoint.py", "Checkpoint.open"),
        ("quantize/plan.py", "plan"),
    ]
    assert stops("# no such section\n`a.py:f`") == []


@pytest.mark.parametrize(
    ("name", "is_defined"),
    [("f", True), ("C", True), ("C.m", True), ("m", False), ("C.f", False), ("g", False)],
)
def test_definitions_are_found_by_name(name: str, is_defined: bool) -> None:
    text = "def f(): pass\nclass C:\n    async def m(self): pass\ng = 1\n"
    assert defines(text, name) is is_defined
