"""The page about exports lists the types as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

from ds4q.quantize.export.gguf import _TYPES

PAGE = Path(__file__).parents[3] / "docs" / "export.md"
ROW = re.compile(r"^\| (\w+) \| (\w+) \((\d+)\) \|", re.MULTILINE)


def test_the_table_of_gguf_types() -> None:
    told = {(ours, theirs, int(number)) for ours, theirs, number in ROW.findall(PAGE.read_text())}
    assert told == {(kind.name, ggml.name, ggml.id) for kind, ggml in _TYPES.items()}
