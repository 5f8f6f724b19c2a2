"""Owns the decode-table files of other tools: P4MIX and GUMIX read and written, DMIX read.

GGUF files embed them under the keys ``deepseek4.{p4mix,gumix,dmix}.sidecar`` or have them beside
them as ``FILE.{p4mix,gumix,dmix}.bin`` (github.com/Luce-Org/lucebox). An HFQ artifact holds single
entries (``tables.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds4q.artifact.formats import MixRow
from ds4q.artifact.tables import (
    BOOKS,
    GUMIX,
    KINDS,
    MAX_MODE,
    P4MIX,
    SURFACES,
    Table,
    TableHead,
    TableKind,
    legal_books,
    refuse_table,
)

MAX_FILE_BYTES = 64 << 20
FILE_HEADER = struct.Struct("<8sII")  # magic, entries, reserved
DMIX_MAGIC = b"DMIXs1\0\0"
DMIX_ENTRY = struct.Struct("<6IB3s")  # layer, class, qtype, slices, books, levels, mode, padding
DMIX_CLASSES = ("q_a", "q_b", "kv", "output_a", "output_b")
MAX_SLICES = 4096
UNSUPPORTED = {
    b"GUMIXv1\0": "GUMIXv1 (gate and up fused in one table)",
    b"DMX2s1\0\0": "DMX2 (tables by tensor name)",
}


@dataclass(frozen=True, slots=True)
class DenseBooks:
    """One DMIX entry: the books of a dense attention matrix, the same in each of its slices."""

    layer: int
    matrix: str
    type_id: int
    slices: int
    row: MixRow


def table_file(kind: TableKind, tables: Sequence[Table]) -> bytes:
    """A file of tables of one kind, in the order of layers and surfaces."""
    ordered = sorted(tables, key=lambda table: (table.layer, SURFACES.index(table.projection)))
    raw = FILE_HEADER.pack(kind.magic, len(tables), 0)
    return raw + b"".join(table.encode() for table in ordered)


def read_p4mix(raw: bytes, layers: int, *, path: object = None) -> list[Table]:
    """The tables of a P4MIX file (type 105, down) of a model with ``layers`` layers.

    Raises ``CodingError`` (``mix-table-format``) for the first rule that is broken.
    """
    return _read_tables(raw, P4MIX, layers, path)


def read_gumix(raw: bytes, layers: int, *, path: object = None) -> list[Table]:
    """The tables of a split GUMIX file (type 106); as ``read_p4mix``."""
    return _read_tables(raw, GUMIX, layers, path)


def read_dmix(raw: bytes, layers: int, *, path: object = None) -> list[DenseBooks]:
    """The entries of a DMIX file (types 105 and 106, dense attention); as ``read_p4mix``."""
    view = memoryview(raw)
    at, count = _open(view, DMIX_MAGIC, layers * len(DMIX_CLASSES), path=path)
    found: dict[tuple[int, str], DenseBooks] = {}
    for number in range(count):
        where: dict[str, Any] = {"path": path, "tensor": f"entry {number}"}
        books, size = _dense(view[at:], where)
        _place(books.layer, layers, (books.layer, books.matrix) in found, where)
        found[books.layer, books.matrix] = books
        at += size
    _end(view, at, path)
    return list(found.values())


def _read_tables(raw: bytes, kind: TableKind, layers: int, path: object) -> list[Table]:
    view = memoryview(raw)
    at, count = _open(view, kind.magic, layers * len(kind.projections), path=path)
    if kind is P4MIX:
        _refuse_other_header(view, path)
    found: dict[tuple[int, str], Table] = {}
    for number in range(count):
        where: dict[str, Any] = {"path": path, "tensor": f"entry {number}"}
        head = TableHead.read(view[at:], kind, **where)
        end = at + kind.entry_bytes(head.experts)
        _place(head.layer, layers, (head.layer, head.projection) in found, where)
        found[head.layer, head.projection] = Table.decode(view[at:end], kind.type.id, **where)
        at = end
    _end(view, at, path)
    return list(found.values())


def _open(view: memoryview, magic: bytes, limit: int, *, path: object) -> tuple[int, int]:
    """Where the first entry begins and how many there are."""
    if not FILE_HEADER.size < len(view) <= MAX_FILE_BYTES:
        expected = f"{FILE_HEADER.size + 1} to {MAX_FILE_BYTES} bytes"
        refuse_table("wrong length of a table file", path=path, expected=expected, found=len(view))
    found, count, reserved = FILE_HEADER.unpack_from(view)
    if found in UNSUPPORTED:
        refuse_table(f"{UNSUPPORTED[found]} is not supported", path=path)
    if found != magic:
        refuse_table("wrong magic of a table file", path=path, expected=magic, found=found)
    if not 1 <= count <= limit:
        refuse_table("wrong number of entries", path=path, expected=f"1 to {limit}", found=count)
    if reserved:
        refuse_table("reserved field is not 0", path=path, found=reserved)
    return FILE_HEADER.size, count


def _refuse_other_header(view: memoryview, path: object) -> None:
    """Name the entries of 5 words that a port for GLM writes: one of the first fields is missing.

    Their last word, the levels, stands where ours has the books, and modes where ours has levels.
    """
    if len(view) < FILE_HEADER.size + P4MIX.header.size:
        return
    *_, books, levels = P4MIX.header.unpack_from(view, FILE_HEADER.size)
    if books == P4MIX.levels != levels:
        refuse_table("a P4MIX entry with a header of 5 words is not supported", path=path)


def _place(layer: int, layers: int, twice: bool, where: dict[str, Any]) -> None:
    if layer >= layers:
        refuse_table("layer out of range", expected=f"below {layers}", found=layer, **where)
    if twice:
        refuse_table("a table for the same place appears twice", found=f"layer {layer}", **where)


def _end(view: memoryview, at: int, path: object) -> None:
    if at != len(view):
        refuse_table(
            "trailing bytes behind the last entry", path=path, expected=at, found=len(view)
        )


def _dense(view: memoryview, where: dict[str, Any]) -> tuple[DenseBooks, int]:
    """The DMIX entry that ``view`` begins with, and its length."""
    if len(view) < DMIX_ENTRY.size:
        header = f"{DMIX_ENTRY.size} bytes of header"
        refuse_table("truncated dmix entry", expected=header, found=len(view), **where)
    layer, number, qtype, slices, books, levels, mode, padding = DMIX_ENTRY.unpack_from(view)
    kind = KINDS.get(qtype)
    k = kind.levels if kind else 0
    rules: tuple[tuple[str, bool, object, object], ...] = (
        ("class", number < len(DMIX_CLASSES), "0 to 4", number),
        ("type", kind is not None, "105 or 106", qtype),
        ("number of slices", 1 <= slices <= MAX_SLICES, f"1 to {MAX_SLICES}", slices),
        ("number of books", books == BOOKS, BOOKS, books),
        ("number of levels", levels == k, k, levels),
        ("mode", mode <= MAX_MODE, "0 or 1", mode),
        ("padding", not any(padding), "0", padding.hex()),
    )
    for field, good, expected, found in rules:
        if not good:
            refuse_table(f"wrong {field} in a dmix entry", expected=expected, found=found, **where)
    end = DMIX_ENTRY.size + 2 * BOOKS * k
    if len(view) < end:
        refuse_table("truncated dmix entry", expected=f"{end} bytes", found=len(view), **where)
    raw = bytes(view[DMIX_ENTRY.size : end])
    words = np.frombuffer(raw, dtype="<u2").reshape(1, BOOKS, k)
    if mode and not legal_books(words)[0]:
        refuse_table("a book is not finite and ascending", **where)
    row = MixRow(mode, raw if mode or any(raw) else b"")
    return DenseBooks(layer, DMIX_CLASSES[number], qtype, slices, row), end
