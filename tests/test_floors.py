"""A room imports only from lower floors: read every import with ``ast``, list every violation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = {"artifact": 0, "hipkern": 1, "quantize": 1, "registry": 1, "runtime": 2, "ds4q": 3}
ROOMS = [room for room in FLOORS if room != "ds4q"]


def sources(room: str) -> list[Path]:
    """Python files of a room; for ``ds4q`` only its own, not what lies behind the links."""
    if room == "ds4q":
        return sorted([*(ROOT / room).glob("*.py"), *(ROOT / room / "cli").rglob("*.py")])
    return sorted((ROOT / room).rglob("*.py"))


def imported(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module imports, ``importlib.import_module`` included.

    ``from a import b`` counts as ``a.b``: ``b`` may be a room. ``package`` resolves relative names.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*module, alias.name])
        elif isinstance(node, ast.Call) and called(node) == "import_module":
            name = node.args[0]
            if isinstance(name, ast.JoinedStr):  # f"ds4q.{...}": what is fixed in front counts
                name = name.values[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def called(node: ast.Call) -> str:
    """The last part of the name of what is called; empty where it has none."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def violations(text: str, path: Path) -> list[str]:
    """What the imports of ``text`` break, were it the file ``path`` (relative to the root)."""
    room = path.parts[0]
    package = list(path.parts[:-1])
    if room != "ds4q":
        package.insert(0, "ds4q")
    found = []
    for line, name in imported(ast.parse(text), package):
        parts = name.split(".")
        where = f"{path}:{line}: imports {name}"
        if parts[0] in ROOMS:
            found.append(f"{where}: write ds4q.{name}")
            continue
        if parts[0] != "ds4q":
            continue
        target = parts[1] if len(parts) > 1 and parts[1] in ROOMS else "ds4q"
        if target != room and FLOORS[target] >= FLOORS[room]:
            found.append(
                f"{where}: {room} is on floor {FLOORS[room]}, {target} on {FLOORS[target]}"
            )
    return found


def test_every_room_imports_from_below_only() -> None:
    found = []
    for room in FLOORS:
        assert sources(room), f"no sources in {room}"
        for path in sources(room):
            found += violations(path.read_text("utf-8"), path.relative_to(ROOT))
    assert not found, "\n" + "\n".join(found)


def test_nothing_but_the_project_uses_bare_room_names() -> None:
    found = []
    for folder in ("tests", "tools", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, name in imported(ast.parse(path.read_text("utf-8")), []):
                if name.split(".")[0] in ROOMS:
                    found.append(f"{path.relative_to(ROOT)}:{line}: imports {name}")
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("artifact/a.py", "from ds4q.quantize.plan import Plan"),
        ("artifact/a.py", "import ds4q.runtime"),
        ("artifact/a.py", "from ds4q import hipkern"),
        ("artifact/a.py", "from ds4q.cli import main"),
        ("artifact/formats/a.py", "from ...quantize import plan"),
        ("quantize/a.py", "from ds4q.registry import entries"),  # same floor
        ("quantize/a.py", "from ..hipkern import probe"),
        ("quantize/a.py", "def f():\n    from ds4q.runtime import engine"),
        ("quantize/a.py", "import importlib\nimportlib.import_module('ds4q.runtime.engine')"),
        ("quantize/a.py", "import_module(f'ds4q.runtime.{name}')"),
        ("runtime/a.py", "import ds4q"),
        ("ds4q/cli/a.py", "import artifact.hfq"),
        ("ds4q/cli/a.py", "from quantize import plan"),
    ],
)
def test_a_violation_is_seen(path: str, text: str) -> None:
    assert len(violations(text, Path(path))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("artifact/formats/a.py", "from ..types import F16\nfrom . import plain"),
        ("quantize/a.py", "from ds4q.artifact.hfq import Reader\nfrom ds4q.quantize import plan"),
        ("runtime/a.py", "from ds4q import quantize, artifact\nimport numpy as np"),
        ("ds4q/cli/a.py", "from ds4q import __version__\nfrom ds4q.runtime import engine"),
        ("ds4q/cli/a.py", "import importlib\nimportlib.import_module(f'ds4q.cli.{name}')"),
    ],
)
def test_what_is_allowed_is_not_reported(path: str, text: str) -> None:
    assert violations(text, Path(path)) == []
