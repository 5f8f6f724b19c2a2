"""What an artifact shows of itself: complete where it is short, brief where it is long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds4q.artifact.describe import MAX_TEXT, brief, describe, type_census
from ds4q.artifact.hfq import Reader
from tests.artifact.build import File, Tensor, sealed


def test_a_closed_reader_still_describes(tmp_path: Path) -> None:
    path = File((Tensor("a.weight"), Tensor("b", 2, (2, 3), 0, bytes(24)))).write(tmp_path)
    with Reader(path) as reader:
        pass
    document, rows = describe(reader)
    assert [(r["name"], r["type"], r["shape"], r["bytes"]) for r in rows] == [
        ("a.weight", "F16", [4], 8),
        ("b", "F32", [2, 3], 24),
    ]
    assert (document["kind"], document["version"], document["tensors"]) == ("artifact", 1, 2)
    assert document["bytes"] == path.stat().st_size
    assert document["types"] == {
        "F16": {"tensors": 1, "bytes": 8},
        "F32": {"tensors": 1, "bytes": 24},
    }


def test_types_are_counted_and_sorted() -> None:
    rows = [{"type": "b", "bytes": 1}, {"type": "a", "bytes": 2}, {"type": "b", "bytes": 4}]
    found = type_census(rows)
    assert list(found.items()) == [
        ("a", {"tensors": 1, "bytes": 2}),
        ("b", {"tensors": 2, "bytes": 5}),
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x" * MAX_TEXT, "x" * MAX_TEXT),
        ("x" * (MAX_TEXT + 1), f"<{MAX_TEXT + 1} characters>"),
        ({"a": 1}, {"a": 1}),
        (dict.fromkeys("abcdefghi"), "<9 keys>"),
        ([1, 2, 3], [1, 2, 3]),
        ([{"a": 1}] * 129, "<129 items>"),
        ({"index": [{"rows": {}}] * 129, "spec": 1}, {"index": "<129 items>", "spec": 1}),
        (None, None),
    ],
)
def test_long_values_become_their_size(value: Any, shown: Any) -> None:
    assert brief(value) == shown


def test_texts_of_the_prompt_encoder_are_shown_by_their_hashes(tmp_path: Path) -> None:
    hashes = {"REASONING_EFFORT_MAX": "0" * 64}
    texts = {"texts": {"REASONING_EFFORT_MAX": "x" * 999}, "sha256": hashes}
    path = tmp_path / "x.hfq"
    path.write_bytes(sealed(ours={"encoding": texts, "partial": False}))
    with Reader(path) as reader:
        document, _ = describe(reader)
    own = document["metadata"]["ds4q"]
    assert (own["encoding"], own["partial"]) == (hashes, False)
