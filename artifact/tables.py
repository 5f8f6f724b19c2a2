"""Owns decode tables: their wire format, names and index. Opens no file and binds nothing.

A table holds the mode and the two bf16 books of every expert of one (layer, projection), out of
band: a tensor of type 105 or 106 cannot be decoded without its row. The wire format is that of
Lucebox (github.com/Luce-Org/lucebox: P4MIX and GUMIX entries), byte for byte.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import CodingError
from ds4q.artifact.formats import MixRow
from ds4q.artifact.hfq import flat
from ds4q.artifact.metadata import canonical
from ds4q.artifact.types import ROCMFP2_MIX, ROCMFP3_MIX, TensorType

BOOKS = 2  # of one expert
MAX_EXPERTS = 65536
MAX_DIM = 1 << 20
MAX_MODE = 1
SURFACES = ("w1", "w3", "w2")  # gate, up, down: the numbers of GUMIX
BLANK_SHA256 = " " * 64  # a digest that is planned and not known yet

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
Flags = npt.NDArray[np.bool_]
_EXPERT = re.compile(
    r"layers\.(0|[1-9][0-9]{0,8})\.ffn\.experts\.(0|[1-9][0-9]{0,8})\.(w[123])\.weight"
)


@dataclass(frozen=True, slots=True)
class TableKind:
    """One wire format. ``levels`` of a book; P4MIX has rotations, GUMIX a surface."""

    name: str
    type: TensorType
    levels: int
    magic: bytes
    projections: tuple[str, ...]
    surface: bool
    rotation: bool

    @property
    def header(self) -> struct.Struct:
        """u32 layer, [surface], experts, out, in, books, levels."""
        return struct.Struct("<7I" if self.surface else "<6I")

    @property
    def row_bytes(self) -> int:
        """Bytes of one expert, over all parts of the entry."""
        return 1 + self.rotation + self.books_bytes

    @property
    def books_bytes(self) -> int:
        """Bytes of one expert's books."""
        return 2 * BOOKS * self.levels

    def entry_bytes(self, experts: int) -> int:
        """Bytes of a whole entry."""
        return self.header.size + experts * self.row_bytes


P4MIX = TableKind("p4mix", ROCMFP3_MIX, 8, b"P4MIXv1\0", ("w2",), surface=False, rotation=True)
GUMIX = TableKind("gumix", ROCMFP2_MIX, 4, b"GUMIXs1\0", SURFACES, surface=True, rotation=False)
KINDS = {kind.type.id: kind for kind in (P4MIX, GUMIX)}


def expert_of(name: str) -> tuple[int, int, str] | None:
    """Layer, expert and projection of a routed expert's matrix of the trunk, else None."""
    found = _EXPERT.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]), found[3])


def expert_name(layer: int, expert: int, projection: str) -> str:
    """The matrix of a routed expert of the trunk."""
    return f"layers.{layer}.ffn.experts.{expert}.{projection}.weight"


def table_name(layer: int, projection: str) -> str:
    """The tensor that holds the table of one (layer, projection)."""
    return f"layers.{layer}.ffn.experts.{projection}.mix_table"


def table_bytes(type_id: int, experts: int) -> int:
    """Length of the table for tensors of type 105 or 106."""
    return KINDS[type_id].entry_bytes(experts)


def refuse_table(what: str, **where: Any) -> NoReturn:
    """Raise the refusal of bytes that are no legal table."""
    raise CodingError.of("mix-table-format", what, **where)


@dataclass(frozen=True, slots=True)
class TableHead:
    """The header of an entry, within its limits."""

    layer: int
    projection: str
    experts: int
    out: int
    in_: int

    @classmethod
    def read(cls, raw: bytes | memoryview, kind: TableKind, **where: Any) -> TableHead:
        """The header that ``raw`` begins with; ``CodingError`` for a field out of its range."""
        if len(raw) < kind.header.size:
            header = f"{kind.header.size} bytes of header"
            refuse_table(f"truncated {kind.name} entry", expected=header, found=len(raw), **where)
        layer, *fields = kind.header.unpack_from(raw)
        number = fields.pop(0) if kind.surface else SURFACES.index("w2")
        experts, out, in_, books, levels = fields
        k = kind.type.row_multiple
        rules: tuple[tuple[str, bool, object, int], ...] = (
            ("number of books", books == BOOKS, BOOKS, books),
            ("number of levels", levels == kind.levels, kind.levels, levels),
            ("surface", number < len(SURFACES), "0, 1 or 2", number),
            ("number of experts", 1 <= experts <= MAX_EXPERTS, f"1 to {MAX_EXPERTS}", experts),
            ("out", 1 <= out <= MAX_DIM, f"1 to {MAX_DIM}", out),
            ("in", 1 <= in_ <= MAX_DIM and in_ % k == 0, f"{k} to {MAX_DIM} by {k}", in_),
        )
        for field, good, expected, found in rules:
            if not good:
                what = f"wrong {field} in a {kind.name} entry"
                refuse_table(what, expected=expected, found=found, **where)
        return cls(layer, SURFACES[number], experts, out, in_)


@dataclass(frozen=True, slots=True)
class Table:
    """Modes and books of the experts of one (layer, projection).

    Attributes
    ----------
    kind : "p4mix" (type 105) or "gumix" (106)
    out, in_ : dims of each expert's matrix
    rows : by global expert id; None where the expert's tensor is of another type
    """

    kind: str
    layer: int
    projection: str
    out: int
    in_: int
    rows: tuple[MixRow | None, ...]

    @property
    def name(self) -> str:
        """The tensor that holds it."""
        return table_name(self.layer, self.projection)

    @property
    def type_id(self) -> int:
        """The tensor type that it serves."""
        return self.wire.type.id

    @property
    def wire(self) -> TableKind:
        """Its wire format."""
        for kind in KINDS.values():
            if kind.name == self.kind:
                return kind
        refuse_table("unknown kind of decode table", expected="p4mix or gumix", found=self.kind)

    def row(self, expert: int) -> MixRow:
        """The row of an expert whose tensor has this type; ``CodingError`` for any other."""
        found = self.rows[expert] if 0 <= expert < len(self.rows) else None
        if found is None:
            what = f"the decode table has no row for expert {expert}"
            raise CodingError.of("mix-row-unmapped", what, tensor=self.name)
        return found

    def encode(self) -> bytes:
        """The payload: one entry without a file header. Rows of None become filler, all zero.

        Raises ``CodingError`` for whatever ``decode`` would refuse.
        """
        kind = self.wire
        if self.projection not in kind.projections:
            expected = " or ".join(kind.projections)
            refuse_table(
                f"wrong projection of a {kind.name} table", expected=expected, found=self.projection
            )
        surface = [SURFACES.index(self.projection)] if kind.surface else []
        fields = [self.layer, *surface, len(self.rows), self.out, self.in_, BOOKS, kind.levels]
        if not all(0 <= field < 1 << 32 for field in fields):
            refuse_table(f"a field of a {kind.name} table does not fit 32 bits", found=fields)
        blank = MixRow(0, bytes(kind.books_bytes))
        rows = [blank if row is None or not (row.mode or row.books) else row for row in self.rows]
        for expert, row in enumerate(rows):
            if not 0 <= row.mode <= MAX_MODE or len(row.books) != kind.books_bytes:
                expected = f"mode 0 or 1, {kind.books_bytes} bytes of books"
                found = f"mode {row.mode}, {len(row.books)} bytes"
                refuse_table(f"bad row of expert {expert}", expected=expected, found=found)
        raw = kind.header.pack(*fields) + bytes(row.mode for row in rows)
        raw += bytes(len(rows) * kind.rotation) + b"".join(row.books for row in rows)
        mixed = {expert for expert, row in enumerate(self.rows) if row is not None}
        Table.decode(raw, self.type_id, mixed=mixed, tensor=self.name)
        return raw

    @classmethod
    def decode(
        cls,
        raw: bytes | memoryview | U8,
        type_id: int,
        *,
        mixed: Collection[int] | None = None,
        **where: Any,
    ) -> Table:
        """Read exactly one entry.

        Parameters
        ----------
        type_id : 105 or 106, the type of the tensors that it serves
        mixed : the experts whose tensors have this type; the rows of all others must be filler.
            None: all of them, as in files whose experts are stacked in one tensor
        where : ``path`` and ``tensor`` for messages

        A row of mode 0 keeps its books, which nothing reads, unless they are all zero.

        Raises
        ------
        CodingError : the first rule that is broken, with the id ``mix-table-format``
        """
        kind, view = KINDS[type_id], flat(raw)
        head = TableHead.read(view, kind, **where)
        e, size = head.experts, kind.entry_bytes(head.experts)
        if len(view) != size:
            what = "trailing bytes behind a" if len(view) > size else "truncated"
            refuse_table(f"{what} {kind.name} entry", expected=size, found=len(view), **where)
        data = np.frombuffer(view, dtype=np.uint8)[kind.header.size :]
        modes, books = data[:e], data[-e * kind.books_bytes :].reshape(e, -1)
        if kind.rotation:
            _first(data[e : 2 * e] != 0, "rotation is not 0 for", **where)
        _first(modes > MAX_MODE, "mode is neither 0 nor 1 for", **where)
        words = books.view("<u2").reshape(e, BOOKS, kind.levels)
        _first(
            (modes == 1) & ~legal_books(words), "a book is not finite and ascending for", **where
        )
        used: Flags = np.asarray(books.any(axis=1))
        if mixed is not None:
            filler = np.ones(e, dtype=np.bool_)
            filler[[expert for expert in mixed if expert < e]] = False
            what = f"no tensor of type {type_id}, but a mode or books for"
            _first(filler & ((modes != 0) | used), what, **where)
        rows = tuple(
            MixRow(int(mode), books[n].tobytes() if mode or used[n] else b"")
            if mixed is None or n in mixed
            else None
            for n, mode in enumerate(modes)
        )
        return cls(kind.name, head.layer, head.projection, head.out, head.in_, rows)


def _first(broken: Flags, what: str, **where: Any) -> None:
    if broken.any():
        refuse_table(f"{what} expert {int(np.argmax(broken))}", **where)


def legal_books(words: U16) -> Flags:
    """Which of ``(n, books, levels)`` bf16 patterns are finite and strictly ascending, ``(n,)``.

    Compared as integers: neither NaN nor a flush of subnormals can blur the order. Both zeros are
    one value.
    """
    magnitude = (words & 0x7FFF).astype(np.int32)
    order = np.where(words >> 15 != 0, -magnitude, magnitude)
    ascending: Flags = np.asarray((order[..., 1:] > order[..., :-1]).all(axis=(1, 2)))
    finite: Flags = np.asarray((magnitude < 0x7F80).all(axis=(1, 2)))
    return ascending & finite


# ------------------------------------------------------------------ the index

_ITEM_KEYS = {"kind", "layer", "projection", "qtype", "rows", "sha256", "table"}
_SHA256 = re.compile("[0-9a-f]{64}")
Index = list[dict[str, Any]]


def mix_index(types: Mapping[str, int], digests: Mapping[str, str] | None = None) -> Index:
    """The array ``mix_tables`` of the metadata, sorted by (layer, projection).

    Parameters
    ----------
    types : tensor name -> type number; tensors of other types than 105 and 106 are passed over
    digests : table name -> SHA-256 (hex) of its payload; blank where it is not known yet, so that
        the length of the metadata is final before a book is fitted

    Raises ``CodingError`` for a tensor that no table can serve.
    """
    rows: dict[tuple[int, str, int], dict[str, int]] = {}
    for name, type_id in types.items():
        if type_id in KINDS:
            place = expert_of(name)
            if place is None:
                what = "types 105 and 106 are for the trunk's routed experts only"
                raise CodingError.of("mix-row-unmapped", what, tensor=name)
            layer, expert, projection = place
            rows.setdefault((layer, projection, type_id), {})[name] = expert
    return [
        {
            "kind": KINDS[type_id].name,
            "layer": layer,
            "projection": projection,
            "qtype": type_id,
            "rows": dict(sorted(experts.items())),
            "sha256": (digests or {}).get(table_name(layer, projection), BLANK_SHA256),
            "table": table_name(layer, projection),
        }
        for (layer, projection, type_id), experts in sorted(rows.items())
    ]


def mix_index_sha256(index: Index) -> str:
    """SHA-256 (hex) of the array as the metadata writes it: ``mix_index_sha256``."""
    return hashlib.sha256(canonical(index)).hexdigest()


def index_fault(index: Any) -> str | None:
    """What is wrong with the form of a parsed ``mix_tables``, or None."""
    if not isinstance(index, list):
        return "mix_tables is not an array"
    before = (-1, "")
    for number, item in enumerate(index):
        fault = _item_fault(item)
        if fault is not None:
            return f"item {number}: {fault}"
        place = (item["layer"], item["projection"])
        if place <= before:
            word = "appears twice" if place == before else "is not in order"
            return f"item {number}: {item['table']} {word}"
        before = place
    return None


def _item_fault(item: Any) -> str | None:
    if not isinstance(item, dict) or item.keys() != _ITEM_KEYS:
        return f"not an object of {', '.join(sorted(_ITEM_KEYS))}"
    layer, projection, rows = item["layer"], item["projection"], item["rows"]
    kind = KINDS.get(item["qtype"]) if type(item["qtype"]) is int else None
    if kind is None or item["kind"] != kind.name:
        return "kind and qtype are not p4mix, 105 or gumix, 106"
    if type(layer) is not int or layer < 0 or projection not in kind.projections:
        return f"wrong layer, or a projection that {kind.name} does not serve"
    if item["table"] != table_name(layer, projection):
        return f"table is not {table_name(layer, projection)}"
    if not isinstance(item["sha256"], str) or not _SHA256.fullmatch(item["sha256"]):
        return "sha256 is not 64 hex digits"
    if not isinstance(rows, dict) or not rows:
        return "rows is empty or not an object"
    for name, row in rows.items():
        if type(row) is not int or expert_of(name) != (layer, row, projection):
            return f"{name} is not row {row!r} of this table"
    return None
