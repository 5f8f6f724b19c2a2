"""Owns what the host reads out of a kernel file: declarations, includes, stated figures.

Compiles nothing. A kernel is declared once, in its source, as ``DS4Q_KERNEL(name, threads,
(arguments))``: the host takes block size and argument kinds from there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds4q.hipkern.errors import HipUsageError
from ds4q.hipkern.handles import KINDS

FOLDER = Path(__file__).parent / "kernels"

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"/]+)"', re.MULTILINE)
_KERNEL = re.compile(
    r"^DS4Q_KERNEL(?:_OF\(\s*\w+\s*,|\()\s*(\w+)\s*,\s*(\w+)\s*,\s*\(([^()]*)\)\s*\)", re.MULTILINE
)
_MACRO = re.compile(r"^\s*#\s*define\s+(\w+)\s+\(?(\d+)\)?\s*$", re.MULTILINE)
_FIGURE = re.compile(r"\b(no)\s+LDS\b|\bLDS\s+(\d+(?:,?\s+(?:or\s+)?\d+)*)")


@dataclass(frozen=True, slots=True)
class Declaration:
    """A kernel as its source declares it.

    ``threads`` is a number or the name of a macro. ``kinds`` are keys of ``handles.KINDS``.
    ``lds_bytes`` are the figures that the comment above states, one for each way to build it.
    """

    name: str
    threads: str
    kinds: tuple[str, ...]
    lds_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """One kernel file with the headers that it reaches, by name."""

    file: str
    text: str
    headers: Mapping[str, str]
    kernels: Mapping[str, Declaration]

    def kernel(self, name: str) -> Declaration:
        found = self.kernels.get(name)
        if found is None:
            raise HipUsageError(
                f"{self.file} declares no kernel of this name",
                expected=", ".join(self.kernels),
                found=name,
            )
        return found

    def threads(self, name: str, defines: Mapping[str, int]) -> int:
        """The block size of kernel ``name`` when it is built with ``defines``."""
        word = self.kernel(name).threads
        if word.isdecimal():
            return int(word)
        if word in defines:
            return defines[word]
        values = {
            int(value)
            for text in (self.text, *self.headers.values())
            for macro, value in _MACRO.findall(_COMMENT.sub("", text))
            if macro == word
        }
        if len(values) != 1:
            raise HipUsageError(
                f"{self.file}: the block size of {name} cannot be told",
                expected=f"one #define of {word} to a number",
                found=sorted(values) or "none",
            )
        return values.pop()


def load(file: str, folder: Path = FOLDER) -> Source:
    """Read ``file`` and what it includes.

    Raises
    ------
    HipUsageError : no such kernel file, or an argument of a type that a launch cannot pack
    """
    path = folder / file
    if not path.is_file():
        raise HipUsageError("no such kernel file", path=path)
    text = path.read_text("utf-8")
    headers: dict[str, str] = {}
    wanted = _INCLUDE.findall(text)
    while wanted:
        name = wanted.pop()
        if name not in headers:
            headers[name] = (folder / name).read_text("utf-8")
            wanted += _INCLUDE.findall(headers[name])
    code = _COMMENT.sub("", text)
    names = [match[1] for match in _KERNEL.finditer(code)]
    kernels = {
        name: Declaration(
            name,
            threads,
            tuple(_kind(file, name, part) for part in arguments.split(",") if part.strip()),
            _figures(text, name, names),
        )
        for name, threads, arguments in _KERNEL.findall(code)
    }
    return Source(file, text, dict(sorted(headers.items())), kernels)


def _kind(file: str, kernel: str, argument: str) -> str:
    if "*" in argument:
        return "pointer"
    words = [word for word in argument.split() if word != "const"]
    if len(words) != 2 or words[0] not in KINDS:
        raise HipUsageError(
            f"{file}: {kernel} has an argument that a launch cannot pack",
            expected=f"a pointer or {', '.join(KINDS)}",
            found=" ".join(argument.split()),
        )
    return words[0]


def _figures(text: str, kernel: str, kernels: list[str]) -> tuple[int, ...]:
    """What comments state as LDS, from a line on that begins with the kernel's name and a colon."""
    said = ""
    inside = False
    for line in text.splitlines():
        comment = re.match(r"//\s*(.*)", line)
        if comment is None:
            inside = False
            continue
        # As in: this, that: grid (...)
        subjects = re.split(r",\s*", comment[1].partition(":")[0])
        if any(subject in kernels for subject in subjects):
            inside = kernel in subjects
        if inside:
            said += comment[1] + " "
    found = _FIGURE.search(said)
    if found is None:
        return ()
    return (0,) if found[1] else tuple(int(n) for n in re.findall(r"\d+", found[2]))
