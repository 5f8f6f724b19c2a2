"""The one report that every check fills, and its forms: JSON, JUnit XML, a table.

Rooms offer checks that take a ``Check`` and add failures and figures to it; this module knows none
of them. The JSON keys are a contract with scripts.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal
from xml.etree import ElementTree

from ds4q.artifact import files
from ds4q.artifact.errors import MAX_WORDS, Ds4qError, cut, one_line
from ds4q.artifact.places import to_json

MAX_LISTED = 100
NOT_JUDGED = "measured, not judged"
NOT_COMPARED = "not compared"

SCHEMA_VERSION = 1
"""Of every JSON document for scripts: it rises when a key is renamed, removed or changes meaning.
New keys leave it as it is."""

Verdict = Literal["ok", "failed", "undecided", "not judged"]

_PLACE = re.compile(
    r"(?:layers|mtp)\.(\d{1,9})\."
    r"(?:ffn\.(?:experts\.(\d{1,9})|shared_experts)(?:\.(w[123]))?(?=\.|$))?"
)


def json_text(document: Mapping[str, Any]) -> str:
    """``document`` as JSON with its ``schema_version``, ending in a newline.

    ASCII only, so that no locale can break it. Names that are not UTF-8 are written as ``to_json``
    says. Raises ``ValueError`` for NaN and infinity, which JSON does not have.
    """
    versioned = {"schema_version": SCHEMA_VERSION} | dict(document)
    return json.dumps(_carried(versioned), indent=2, allow_nan=False) + "\n"


def _carried(value: Any) -> Any:
    """``value`` with every text as JSON can carry it."""
    if isinstance(value, str):
        return to_json(value)
    if isinstance(value, dict):
        return {_carried(key): _carried(each) for key, each in value.items()}
    return [_carried(each) for each in value] if isinstance(value, list | tuple) else value


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

    def placed(self) -> Failure:
        """The same failure with layer, expert and projection as the tensor's name has them."""
        known = (self.layer, self.expert, self.projection) != (None, None, None)
        found = None if known or self.tensor is None else _PLACE.match(self.tensor)
        if found is None:
            return self
        layer, expert, projection = found.groups()
        return replace(
            self,
            layer=int(layer),
            expert=None if expert is None else int(expert),
            projection=projection,
        )

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
    """One named check. It is ok while no failure was added; every failure is counted.

    ``unjudged`` says in a few words why it neither passes nor fails unless it could not be done:
    ``NOT_JUDGED`` where no limit was given, ``NOT_COMPARED`` where there was nothing to hold it to.
    """

    name: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    count: int = 0
    undecided: bool = False  # its failures only say that no verdict was possible
    path: str | None = None  # of the artifact: errors about other files name theirs
    unjudged: str | None = None

    @property
    def ok(self) -> bool:
        """Whether no failure was added."""
        return self.count == 0

    @property
    def verdict(self) -> Verdict:
        """What a report says of the check."""
        if not self.ok:
            return "undecided" if self.undecided else "failed"
        return "ok" if self.unjudged is None else "not judged"

    @property
    def result(self) -> str:
        """``ok``, ``UNDECIDED``, why nothing was judged, or ``FAILED`` with a count, for people."""
        if self.undecided:
            return "UNDECIDED"
        if not self.ok:
            return f"FAILED ({self.count:,})"
        return "ok" if self.unjudged is None else self.unjudged

    def fail(self, failure: Failure) -> None:
        """Count ``failure``; the first ``MAX_LISTED`` are kept."""
        self.count += 1
        if len(self.failures) < MAX_LISTED:
            self.failures.append(failure.placed())

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

    def figures_text(self) -> str:
        """The figures in one line, without lists and objects."""
        return one_line(
            ", ".join(
                f"{key} {_short(value)}"
                for key, value in self.figures.items()
                if value is not None and not isinstance(value, (dict, list))
            )
        )

    def document(self) -> dict[str, Any]:
        """The JSON object of this check; ``ok`` is None where nothing was judged."""
        figures = self.figures | {"failures": self.count}
        if self.notes:
            figures["notes"] = list(self.notes)
        verdict = self.verdict
        return {
            "name": self.name,
            "ok": None if verdict == "not judged" else verdict == "ok",
            "judged": verdict != "not judged",
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
        """Whether no check failed; checks that judged nothing are passed over."""
        return all(check.ok for check in self.checks)

    @property
    def verdict(self) -> str:
        """``ok``, ``FAILED``, or ``UNDECIDED`` where that is all that is not ok."""
        if self.ok:
            return "ok"
        return "UNDECIDED" if all(c.ok or c.undecided for c in self.checks) else "FAILED"

    @property
    def result(self) -> str:
        """The verdict, and the checks that judged nothing."""
        passed_over = [
            f"{check.name} {check.unjudged}"
            for check in self.checks
            if check.verdict == "not judged"
        ]
        return "; ".join([self.verdict, *passed_over])

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
        """A JUnit test suite: a test case for each check, with at most one ``failure`` each.

        A check that judged nothing is ``skipped``, with its figures: viewers must not count it as
        a pass.
        """
        path = one_line(str(self.artifact.get("path", "")))
        verdicts = [check.verdict for check in self.checks]
        suite = ElementTree.Element(
            "testsuite",
            name=f"ds4q verify {path}".strip(),
            tests=str(len(self.checks)),
            failures=str(sum(not check.ok for check in self.checks)),
            errors="0",
            skipped=str(verdicts.count("not judged")),
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
            if check.verdict == "not judged":
                said = ": ".join(filter(None, [check.unjudged, check.figures_text()]))
                ElementTree.SubElement(case, "skipped", message=said)
            elif lines := check.lines():
                count = f"{check.count:,} failures, the first: " if check.count > 1 else ""
                failure = ElementTree.SubElement(
                    case, "failure", type=one_line(check.name), message=count + lines[0]
                )
                failure.text = "\n".join(lines)
        return suite

    def failure_lines(self) -> list[str]:
        """Every listed failure in a line, ``check: where: what``, and how many are not listed."""
        return [f"{check.name}: {line}" for check in self.checks for line in check.lines()]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Name, result, seconds and figures of each check, as a table for people shows them."""
        return [
            (check.name, check.result, f"{check.seconds:.2f}", check.figures_text())
            for check in self.checks
        ]


is_junit = files.beginning(
    rb'<\?xml version="1\.0" encoding="UTF-8"\?>\n<testsuites>\s*<testsuite name="ds4q verify'
)
"""Whether a file that begins so was written by ``junit``."""


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
