"""House rules that a machine can hold: sizes, docstrings, exports, no assert in the product."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.test_floors import FLOORS, ROOT, sources

LINES_PER_FILE = 500
LINES_PER_FUNCTION = 90
EXPORTS = 10


@functools.cache
def modules() -> list[tuple[Path, str, ast.Module]]:
    texts = [(path, path.read_text("utf-8")) for room in FLOORS for path in sources(room)]
    return [(path.relative_to(ROOT), text, ast.parse(text)) for path, text in texts]


def test_files_and_functions_stay_readable() -> None:
    found = []
    for path, text, tree in modules():
        if (lines := text.count("\n")) > LINES_PER_FILE:
            found.append(f"{path}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LINES_PER_FUNCTION:
                    found.append(f"{path}:{node.lineno}: {node.name} has {lines} lines")
    assert not found, "\n" + "\n".join(found)


def test_every_module_says_what_it_is() -> None:
    found = [str(path) for path, _, tree in modules() if not ast.get_docstring(tree)]
    assert not found, "without a docstring: " + ", ".join(found)


def test_the_product_raises_and_never_asserts() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, _, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert not found, "assert is gone under python -O: " + ", ".join(found)


def test_packages_export_few_names() -> None:
    found = []
    for path, _, tree in modules():
        if path.name != "__init__.py":
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = ast.literal_eval(node.value)
                if len(names) > EXPORTS:
                    found.append(f"{path}: {len(names)} names")
    assert not found, found


WRITERS = {
    "ds4q/cli/common.py",  # the one place: it neutralises what is foreign
    "ds4q/__main__.py",  # before the command line is imported
    "hipkern/objects.py",  # own commands, of names and errors that are one line
    "hipkern/selftest/__main__.py",
    "runtime/gates/asking.py",  # JSON from a child process
    "runtime/gates/loading.py",
}
TO_TERMINAL = (
    "print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write",
    "sys.stdout.buffer.write", "warnings.warn", "Console",
)  # fmt: skip


def test_one_place_writes_to_the_terminal() -> None:
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node.func)}"
        for path, _, tree in modules()
        if str(path) not in WRITERS
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in TO_TERMINAL
    ]
    assert not found, "write through ds4q/cli/common.py: " + ", ".join(found)


FILE_WRITERS = {
    "artifact/files.py",  # the one place: atomic, and never over a file of the user's
    "artifact/locks.py",  # lock files, which are exclusive from their first moment
    "artifact/writer.py",  # partial files, claimed as theirs
    "ds4q/cli/__init__.py",  # /dev/null
    "hipkern/cache.py",  # kernels in a folder of ds4q's own
    "hipkern/objects.py",
    "hipkern/selftest/__main__.py",  # hashes.json of the repository
    "hipkern/sim/__init__.py",
    "quantize/export/staging.py",  # in a folder that it has made
    "quantize/journal.py",  # appends to journals, claimed as theirs
    "registry/blocks.py",
    "runtime/rows.py",  # nameless temporary files
}
TO_FILES = (
    "os.rename", "os.replace", "os.link", "os.symlink", "os.truncate", "shutil.move",
    "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree",
)  # fmt: skip
METHODS_TO_FILES = ("write_text", "write_bytes", "rename", "symlink_to", "hardlink_to")
FLAGS_TO_FILES = ("os.O_WRONLY", "os.O_RDWR", "os.O_CREAT")


def puts_a_file(node: ast.AST) -> bool:
    """Whether a part of a program names a file, or opens a path to write to it."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in FLAGS_TO_FILES
    if not isinstance(node, ast.Call):
        return False
    name, method = ast.unparse(node.func), getattr(node.func, "attr", "")
    if name == "open" or (method == "open" and not name.startswith("os.")):
        words = [*node.args, *(word.value for word in node.keywords)]
        modes = [word.value for word in words if isinstance(word, ast.Constant)]
        return any(re.fullmatch(r"[rwaxbt+]*[wax+][rwaxbt+]*", str(mode)) for mode in modes)
    a_path_takes_one = method in METHODS_TO_FILES and len(node.args) == 1
    return name in TO_FILES or (method == "write_text") or a_path_takes_one


def test_one_place_writes_files() -> None:
    """Elsewhere a file of the user's could be written over, or be left cut short."""
    found = [
        f"{path}: {ast.unparse(node)}"
        for path, _, tree in modules()
        if str(path) not in FILE_WRITERS
        for node in ast.walk(tree)
        if puts_a_file(node)
    ]
    assert not found, "write through artifact/files.py: " + ", ".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "open(p, 'w')",
        "open(p, mode='ab')",
        "p.open('r+b')",
        "os.open(p, os.O_WRONLY | os.O_CREAT)",
        "p.write_text(t, 'utf-8')",
        "p.write_bytes(b)",
        "p.rename(q)",
        "os.replace(p, q)",
        "shutil.copyfile(p, q)",
    ],
)
def test_such_a_write_is_seen(text: str) -> None:
    assert any(map(puts_a_file, ast.walk(ast.parse(text))))


@pytest.mark.parametrize(
    "text", ["open(p)", "open(p, 'rb')", "os.open(p, os.O_RDONLY)", "f.read()"]
)
def test_reading_is_not(text: str) -> None:
    assert not any(map(puts_a_file, ast.walk(ast.parse(text))))


def test_nothing_is_left_open() -> None:
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    found = [
        f"{path}:{number}"
        for path, text, _ in modules()
        for number, line in enumerate(text.splitlines(), 1)
        if marks.search(line)
    ]
    assert not found, found


def test_every_room_is_a_package() -> None:
    folders = {path.parent for room in FLOORS for path in sources(room)}
    assert [str(f) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []
