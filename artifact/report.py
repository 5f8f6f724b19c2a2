"""Owns the one report that every check fills, and its forms: JSON, JUnit XML, a table.

Rooms offer checks that take a ``Check`` and add failures and figures to it; this module knows none
of them. The JSON keys are a contract with scripts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.etree import ElementTree

from ds4q.artifact.errors import MAX_WORDS, Ds4qError, cut, one_line

MAX_LISTED = 100


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that is wrong and where; ``None`` where a coordinate does not apply.

    ``expected`` and ``found`` are cut as in a ``Ds4qError``'s line.
    """

    message: str
    tensor: str | None = None
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None
    row: int | None = None
    block: int | None = None
    expected: str | int | None = None
    found: str | int | None = None

    def __post_init__(self) -> None:
        for name in ("expected", "found"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, cut(value))

    @classmethod
    def of(cls, error: Ds4qError, message: str, **where: Any) -> Failure:
        """A failure with the tensor and the values of ``error``."""
        expected = None if error.expected is None else str(error.expected)
        found = None if error.found is None else str(error.found)
        return cls(message, tensor=error.tensor, expected=expected, found=found, **where)

    def line(self) -> str:
        """The failure in one line, for people."""
        where = [cut(self.tensor)] if self.tensor else []
        for label in ("layer", "expert", "projection", "row", "block"):
            value = getattr(self, label)
            if value is not None:
                where.append(f"{label} {value}")
        message = cut(self.message, MAX_WORDS)
        text = f"{', '.join(where)}: {message}" if where else message
        values = [
            f"{label} {value}"
            for label, value in (("expected", self.expected), ("found", self.found))
            if value is not None
        ]
        return one_line(": ".join([text, ", ".join(values)] if values else [text]))


@dataclass(slots=True)
class Check:
    """One named check. It is ok while no failure was added; every failure is counted."""

    name: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    count: int = 0
    undecided: bool = False  # its failures only say that no verdict was possible
    path: str | None = None  # of the artifact: errors about other files name theirs

    @property
    def ok(self) -> bool:
        """Whether no failure was added."""
        return self.count == 0

    @property
    def result(self) -> str:
        """``ok``, ``UNDECIDED``, or ``FAILED`` with the number of failures, for people."""
        if self.undecided:
            return "UNDECIDED"
        return "ok" if self.ok else f"FAILED ({self.count:,})"

    def fail(self, failure: Failure) -> None:
        """Count ``failure``; the first ``MAX_LISTED`` are kept."""
        self.count += 1
        if len(self.failures) < MAX_LISTED:
            self.failures.append(failure)

    def fail_with(self, error: Ds4qError, **where: Any) -> None:
        """Count an error as a failure."""
        message = error.what if not error.remedy else f"{error.what}; {error.remedy}"
        if error.path is not None and error.path != self.path:
            message = f"{error.path}: {message}"
        self.fail(Failure.of(error, message, **where))

    def lines(self) -> list[str]:
        """Each listed failure in one line, and how many are not listed."""
        unlisted = self.count - len(self.failures)
        more = [f"and {unlisted:,} more"] if unlisted else []
        return [failure.line() for failure in self.failures] + more

    def document(self) -> dict[str, Any]:
        """The JSON object of this check."""
        figures = self.figures | {"failures": self.count}
        if self.notes:
            figures["notes"] = list(self.notes)
        return {
            "name": self.name,
            "ok": self.ok,
            "seconds": round(self.seconds, 6),
            "figures": figures,
            "failures": [asdict(f) for f in self.failures],
        }


@dataclass(slots=True)
class Report:
    """All checks of one artifact. ``artifact`` holds what identifies it."""

    artifact: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every check is ok."""
        return all(check.ok for check in self.checks)

    @property
    def verdict(self) -> str:
        """``ok``, ``FAILED``, or ``UNDECIDED`` where that is all that is not ok."""
        if self.ok:
            return "ok"
        return "UNDECIDED" if all(c.ok or c.undecided for c in self.checks) else "FAILED"

    @contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """Time a check and append it; a ``Ds4qError`` inside becomes its failure."""
        path = self.artifact.get("path")
        check = Check(name, path=None if path is None else str(path))
        self.checks.append(check)
        start = time.perf_counter()
        try:
            yield check
        except Ds4qError as error:
            check.fail_with(error)
        finally:
            check.seconds += time.perf_counter() - start

    def document(self) -> dict[str, Any]:
        """The JSON document of ``ds4q verify --json``."""
        return {
            "ok": self.ok,
            "artifact": self.artifact,
            "checks": [check.document() for check in self.checks],
        }

    def suite(self) -> ElementTree.Element:
        """A JUnit test suite: one test case a check, one ``failure`` element a line of it."""
        path = one_line(str(self.artifact.get("path", "")))
        suite = ElementTree.Element(
            "testsuite",
            name=f"ds4q verify {path}".strip(),
            tests=str(len(self.checks)),
            failures=str(sum(not c.ok for c in self.checks)),
            errors="0",
            time=f"{sum(c.seconds for c in self.checks):.3f}",
        )
        for check in self.checks:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=path or "ds4q.verify",  # viewers key a test by its class and name
                name=one_line(check.name),
                time=f"{check.seconds:.3f}",
            )
            for line in check.lines():
                ElementTree.SubElement(case, "failure", message=line).text = line
        return suite

    def failure_lines(self) -> list[str]:
        """Every listed failure in a line, ``check: where: what``, and how many are not listed."""
        return [f"{check.name}: {line}" for check in self.checks for line in check.lines()]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Name, result, seconds and figures of each check, as a table for people shows them."""
        return [
            (
                check.name,
                check.result,
                f"{check.seconds:.2f}",
                ", ".join(
                    f"{key} {_short(value)}"
                    for key, value in check.figures.items()
                    if value is not None and not isinstance(value, (dict, list))
                ),
            )
            for check in self.checks
        ]


def junit(reports: Iterable[Report]) -> str:
    """JUnit XML (UTF-8) of ``reports``, a test suite each."""
    root = ElementTree.Element("testsuites")
    root.extend(report.suite() for report in reports)
    ElementTree.indent(root)
    # The library's own declaration would name the locale's encoding.
    text: str = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _short(figure: Any) -> str:
    """A figure as people read it; the JSON has all its digits."""
    if type(figure) is int:
        return f"{figure:,}"
    return f"{figure:.6g}" if isinstance(figure, float) else cut(str(figure))
