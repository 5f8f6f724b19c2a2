"""Owns what an artifact shows of itself as plain data: sizes, metadata in brief, its tensors.

For whoever prints or draws it. Reads nothing beyond what the reader has read, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ds4q.artifact.check import type_name
from ds4q.artifact.hfq import Reader

Document = dict[str, Any]
Rows = list[dict[str, Any]]

MAX_TEXT = 120
MAX_KEYS = 8


def describe(reader: Reader) -> tuple[Document, Rows]:
    """What ``ds4q inspect`` says of an artifact, and a row for each tensor in index order.

    The reader may be closed by now.
    """
    rows = [
        {
            "name": entry.name,
            "type": type_name(entry.type_id),
            "shape": list(entry.shape),
            "offset": entry.offset,
            "bytes": entry.nbytes,
        }
        for entry in reader.tensors.values()
    ]
    metadata = {
        key: _own(value) if key == "ds4q" else brief(value)
        for key, value in sorted(reader.metadata.items())
    }
    document = {
        "kind": "artifact",
        "path": str(reader.path),
        "bytes": reader.file_bytes,
        "version": reader.version,
        "arch_id": reader.arch_id,
        "data_offset": reader.data_offset,
        "tensors": len(rows),
        "types": type_census(rows),
        "metadata": metadata,
    }
    return document, rows


def _own(value: Any) -> Any:
    """The object of ds4q, complete but for the texts of the prompt encoder: their hashes tell."""
    if not isinstance(value, dict) or not isinstance(value.get("encoding"), dict):
        return value
    return value | {"encoding": value["encoding"].get("sha256")}


def type_census(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Type name -> tensors and bytes, sorted by name."""
    types: dict[str, dict[str, int]] = {}
    for row in rows:
        entry = types.setdefault(row["type"], {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += row["bytes"]
    return dict(sorted(types.items()))


def brief(value: Any) -> Any:
    """A metadata value short enough to show: long texts, lists and objects become their size."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"<{len(value):,} characters>"
    if isinstance(value, dict):
        if len(value) > MAX_KEYS:
            return f"<{len(value)} keys>"
        return {key: brief(item) if isinstance(item, list) else item for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return f"<{len(value)} items>"
    return value
