"""One line per error, whatever the file held; one class per broken rule."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact import errors, writer
from ds4q.artifact.errors import (
    MAX_PATH,
    MAX_VALUE,
    MAX_WORDS,
    ArtifactError,
    ChangedError,
    Ds4qError,
    ThreadRefusedError,
    TruncatedError,
    UnknownTensorError,
    one_line,
)

CLASSES = [
    value
    for module in (errors, writer)
    for value in vars(module).values()
    if inspect.isclass(value)
    and issubclass(value, Ds4qError)
    and value.__module__ == module.__name__
]


def test_message_has_where_what_and_remedy() -> None:
    error = Ds4qError(
        "weight is wrong",
        path=Path("a/b.hfq"),
        tensor="layers.0.w",
        expected=3,
        found=[4],
        remedy="try again",
    )
    assert str(error) == "a/b.hfq: layers.0.w: weight is wrong: expected 3, found [4]; try again"
    assert (error.path, error.tensor, error.expected, error.found) == (
        "a/b.hfq",
        "layers.0.w",
        3,
        [4],
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "failed"),
        ({"path": "p"}, "p: failed"),
        ({"tensor": "t"}, "t: failed"),
        ({"expected": 0}, "failed: expected 0"),
        ({"found": 0}, "failed: found 0"),
        ({"found": ""}, "failed: found "),
        ({"remedy": "cure"}, "failed; cure"),
    ],
)
def test_parts_are_optional(fields: dict[str, object], text: str) -> None:
    assert str(Ds4qError(**fields)) == text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc\x1b[2J\x7f", r"a\x09b\x0ac\x1b[2J\x7f"),
        ("\x9b31m\x85", r"\x9b31m\x85"),
        ("\u202egpj.exe\u2066\u061c\u200f", r"\u202egpj.exe\u2066\u061c\u200f"),
        ("a\u2028b\u2029c\u200bd\ufeff", r"a\u2028b\u2029c\u200bd\ufeff"),
        ("\U000e0041x", r"\U000e0041x"),
        (os.fsdecode(b"caf\xe9"), r"caf\xe9"),
        ("half \ud83d", r"half \ud83d"),
        ("caf\u00e9 \u4f60 \\ % [red]", "caf\u00e9 \u4f60 \\ % [red]"),
    ],
)
def test_one_line_shows_what_a_terminal_would_obey(text: str, shown: str) -> None:
    assert one_line(text) == shown


def test_values_of_a_message_are_cut() -> None:
    long = "x" * 70_000
    error = Ds4qError(long, path=long, tensor=long, expected=long, found=long, remedy=long)
    assert error.found == long
    assert str(error).count("... (70,000 characters)") == 6
    assert len(str(error)) < MAX_PATH + 3 * MAX_VALUE + 2 * MAX_WORDS + 300
    assert str(Ds4qError(found="y" * MAX_VALUE)).endswith("y")


def test_class_gives_rule_and_cure() -> None:
    assert str(TruncatedError(path="p", expected="5 bytes")) == (
        "p: file is too short: expected 5 bytes; copy or download the file again"
    )
    assert str(TruncatedError("cut", remedy="")) == "cut"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_states_its_rule(kind: type[Ds4qError]) -> None:
    assert kind.__doc__
    assert kind is Ds4qError or kind.rule != Ds4qError.rule
    error = kind(path="p", tensor="t", expected=1, found=2)
    assert str(error).startswith(f"p: t: {kind.rule}: expected 1, found 2")
    assert str(error).isprintable()


def test_rules_differ() -> None:
    rules = [kind.rule for kind in CLASSES]
    assert len(set(rules)) == len(rules) > 15


def test_artifact_errors_are_value_errors() -> None:
    for kind in vars(errors).values():
        if (
            inspect.isclass(kind)
            and issubclass(kind, Ds4qError)
            and kind not in (Ds4qError, ThreadRefusedError)
        ):
            assert issubclass(kind, ArtifactError)
            assert issubclass(kind, ValueError)


def test_unknown_tensor_reads_as_text_not_as_a_key() -> None:
    error = UnknownTensorError(path="p", tensor="t")
    assert isinstance(error, KeyError)
    assert str(error) == "p: t: no such tensor"


def test_located_fills_in_what_is_missing() -> None:
    error = ChangedError(found=3, remedy="r")
    there = error.located(path=Path("p"), tensor="t")
    assert type(there) is ChangedError
    assert str(there) == "p: t: file changed while it was open: found 3; r"
    again = there.located(path="q", tensor="u")
    assert str(again) == str(there)
    assert str(error) == "file changed while it was open: found 3; r"


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("a\nb\r\t", r"a\x0ab\x0d\x09"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\0\x7f\x85", r"\x00\x7f\x85"),
        ("line\u2028end", r"line\u2028end"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\ud800", r"\ud800"),
        ("\ufffe\uffff", r"\ufffe\uffff"),
        ("grün 你好 😀", "grün 你好 😀"),
    ],
)
def test_one_line(raw: str, clean: str) -> None:
    assert one_line(raw) == clean
    assert str(Ds4qError(raw)) == clean


@given(st.text(), st.text(), st.binary())
def test_any_content_is_one_line(path: str, tensor: str, found: bytes) -> None:
    text = str(ArtifactError(path=path, tensor=tensor, found=found, expected=path, remedy=tensor))
    assert text.isprintable()
    text.encode("utf-8")
