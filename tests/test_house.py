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
    "artifact/files.py": "the one place: atomic, and never over a file of the user's",
    "artifact/locks.py": "lock files, which are exclusive from their first moment",
    "artifact/opened.py": "opens a file again that is open",
    "artifact/writer.py": "partial files, claimed as its own",
    "ds4q/cli/__init__.py": "/dev/null",
    "hipkern/cache.py": "builds and their locks, in a folder of ds4q's own",
    "hipkern/objects.py": "code objects of a developer's command, in a folder for them",
    "hipkern/selftest/__main__.py": "hashes.json of the repository",
    "hipkern/sim/__init__.py": "a library that it builds in a temporary folder",
    "quantize/export/staging.py": "shards, exclusively created in a folder that it has made",
    "quantize/journal.py": "appends to journals, claimed as its own",
    "registry/blocks.py": "appends to journals, claimed as its own",
    "runtime/rows.py": "nameless temporary files",
}
TO_FILES = {
    "os": (
        "rename", "renames", "replace", "link", "symlink", "truncate", "mkfifo", "mknod",
        "O_WRONLY", "O_RDWR", "O_CREAT",
    ),
    "shutil": ("move", "copy", "copy2", "copyfile", "copytree"),
    "zipfile": ("ZipFile",),
    "np": ("save", "savez", "savez_compressed", "savetxt", "memmap"),
}  # fmt: skip
METHODS_TO_FILES = ("write_text", "write_bytes", "tofile")
METHODS_TO_PATHS = ("rename", "replace", "symlink_to", "hardlink_to")  # and a path, no more
WRITING = re.compile(r"[rwaxbt+]*[wax+][rwaxbt+]*")


def puts_a_file(node: ast.AST) -> bool:
    """Whether a part of a program names a file, or opens a path to write to it.

    ``os.open`` counts but for folders: files are read through ``artifact/files.py``, too.
    """
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in TO_FILES:
        return node.attr in TO_FILES[ast.unparse(node.value)]
    if isinstance(node, ast.ImportFrom):
        return any(
            each.name in (*TO_FILES.get(node.module or "", ()), "open") for each in node.names
        )
    if isinstance(node, ast.Import):
        return any(each.name in TO_FILES and each.asname for each in node.names)
    if not isinstance(node, ast.Call):
        return False
    name, method = ast.unparse(node.func), getattr(node.func, "attr", "")
    if name == "os.open":
        return "os.O_DIRECTORY" not in ast.unparse(node)
    if name == "open" or method == "open":
        given = node.args[1:] if name == "open" else node.args  # a path's own method is given none
        given += [word.value for word in node.keywords if word.arg == "mode"]
        parts = [part for each in given for part in ast.walk(each)]
        modes = [part.value for part in parts if isinstance(part, ast.Constant)]
        unknown = name == "open" and len(modes) < len(given)
        return unknown or any(WRITING.fullmatch(str(mode)) for mode in modes)
    alone = len(node.args) == 1 and not node.keywords
    return method in METHODS_TO_FILES or (method in METHODS_TO_PATHS and alone)


def file_writers() -> dict[str, list[str]]:
    """Modules that put files, each with where it does."""
    found: dict[str, list[str]] = {}
    for path, _, tree in modules():
        for node in filter(puts_a_file, ast.walk(tree)):
            words = f"{path}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"
            found.setdefault(str(path), []).append(words)
    return found


def test_one_place_writes_files() -> None:
    """Elsewhere a file of the user's could be written over, or be left cut short."""
    found = file_writers()
    others = [words for path in found.keys() - FILE_WRITERS.keys() for words in found[path]]
    assert not others, "write through artifact/files.py: " + ", ".join(sorted(others))
    assert not FILE_WRITERS.keys() - found.keys(), "these write nothing any more"


@pytest.mark.parametrize(
    "text",
    [
        "open(p, 'w')",
        "open(p, mode='ab')",
        "open(p, mode)",
        "open(p, 'w' if new else 'a')",
        "p.open('r+b')",
        "p.open('rb' if old else 'wb')",
        "gzip.open(p, 'xt')",
        "os.open(p, os.O_WRONLY | os.O_CREAT)",
        "os.open(p, flags)",
        "os.open(p, os.O_RDONLY)",
        "flags = os.O_RDWR",
        "p.write_text(t, 'utf-8')",
        "p.write_bytes(data=b)",
        "p.rename(q)",
        "p.replace(q)",
        "os.replace(p, q)",
        "move = os.rename",
        "from os import replace",
        "import shutil as s",
        "shutil.copyfile(p, q)",
        "values.tofile(p)",
        "np.save(p, values)",
        "zipfile.ZipFile(p, 'w')",
    ],
)
def test_such_a_write_is_seen(text: str) -> None:
    assert any(map(puts_a_file, ast.walk(ast.parse(text))))


@pytest.mark.parametrize(
    "text",
    [
        "open(p)",
        "open(p, 'rb')",
        "open(p, encoding='utf-8')",
        "Device.open()",
        "os.open(p, os.O_RDONLY | os.O_DIRECTORY)",
        "f.read()",
        "text.replace(a, b)",
        "replace(record, name=n)",
        "dataclasses.replace(record, name=n)",
        "import os",
        "from os import fspath",
    ],
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
