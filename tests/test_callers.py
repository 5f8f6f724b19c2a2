"""What runtime offers is used by something that is no test."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.test_floors import ROOT, sources

USERS = ("artifact", "benchmarks", "ds4q", "hipkern", "quantize", "registry", "runtime")

FROM_OUTSIDE = {"send_400_response"}  # overridden: uvicorn calls it


def _offered(tree: ast.Module) -> Iterator[str]:
    """Public functions, classes and methods, by name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
            if isinstance(node, ast.ClassDef):
                inner = (x.name for x in node.body if isinstance(x, ast.FunctionDef))
                yield from (name for name in inner if not name.startswith("_"))


def _used(tree: ast.Module) -> Iterator[str]:
    """Every name that is read, imported ones left out: importing calls nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _unused(offered: dict[str, Path], used: Counter[str]) -> list[str]:
    return [f"{path.relative_to(ROOT)}: {name}" for name, path in offered.items() if not used[name]]


def test_everything_public_in_runtime_has_a_caller_outside_tests() -> None:
    offered: dict[str, Path] = {}
    used: Counter[str] = Counter()
    for folder in USERS:
        for path in sources(folder):
            tree = ast.parse(path.read_text("utf-8"))
            used.update(_used(tree))
            if folder == "runtime":
                offered |= dict.fromkeys(_offered(tree), path)
    assert len(offered) > 300
    assert {each.split()[-1] for each in _unused(offered, used)} == FROM_OUTSIDE


def test_what_nobody_calls_is_seen() -> None:
    tree = ast.parse("def lone(): ...\nclass Held:\n    def idle(self): ...\nHeld()")
    offered = dict.fromkeys(_offered(tree), ROOT / "runtime" / "x.py")
    assert _unused(offered, Counter(_used(tree))) == ["runtime/x.py: lone", "runtime/x.py: idle"]
