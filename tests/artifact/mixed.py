"""Owns crafted artifacts with ROCmFPX tensors and decode tables, legal or broken in one place.

Wire formats, index and digests are spelled out again, as in ``build.py``: a mistake in
``artifact/tables.py`` must not hide in the files that test it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.artifact.build import File, Tensor, sealed

EXPERTS = 3
OUT, K_IN, K_MID = 4, 128, 64  # w1 and w3 are [OUT, K_IN], w2 is [OUT, K_MID]
BLOCK_BYTES = {100: 18, 101: 17, 102: 26, 103: 33, 104: 14, 105: 14, 106: 10, 107: 10}

BOOKS_8 = ((0xBF80, 0xBF20, 0xBEC0, 0xBE00, 0x3E00, 0x3EC0, 0x3F20, 0x3F80),) * 2
BOOKS_4 = ((0xBF60, 0xBE80, 0x3E80, 0x3F60), (0xBF80, 0xBEC0, 0x3EC0, 0x3F80))
Books = Sequence[Sequence[int]]
Row = tuple[int, Books | None]  # mode and books; no books: all bits zero


def entry(
    words: Sequence[int], rows: Sequence[Row], k: int, *, rotation: int | None = None
) -> bytes:
    """One P4MIX (with ``rotation``) or GUMIX entry; ``words`` is the header as it is to be."""
    out = struct.pack(f"<{len(words)}I", *words) + bytes(mode for mode, _ in rows)
    if rotation is not None:
        out += bytes([rotation] * len(rows))
    for _, books in rows:
        for book in books or ([0] * k, [0] * k):
            out += struct.pack(f"<{k}H", *book)
    return out


def p4mix(
    rows: Sequence[Row] = ((1, BOOKS_8), (0, None), (0, None)),
    *,
    layer: int = 3,
    out: int = OUT,
    in_: int = K_MID,
    tail: Sequence[int] = (2, 8),
    rotation: int = 0,
) -> bytes:
    """A P4MIX entry; by default the one of ``LEGAL``."""
    return entry((layer, len(rows), out, in_, *tail), rows, 8, rotation=rotation)


def gumix(
    rows: Sequence[Row] = ((1, BOOKS_4), (0, None), (0, None)),
    *,
    layer: int = 3,
    surface: int = 0,
    out: int = OUT,
    in_: int = K_IN,
    tail: Sequence[int] = (2, 4),
) -> bytes:
    """A GUMIX entry; by default the gate's of ``LEGAL``."""
    return entry((layer, surface, len(rows), out, in_, *tail), rows, 4)


def weight(name: str, type_id: int, shape: tuple[int, ...]) -> Tensor:
    """A ROCmFPX tensor of zeros."""
    nbytes = shape[0] * shape[-1] // 32 * BLOCK_BYTES[type_id]
    return Tensor(name, type_id, shape, 32, bytes(nbytes))


def expert(number: int, projection: str, type_id: int, layer: int = 3) -> Tensor:
    """A matrix of a routed expert."""
    name = f"layers.{layer}.ffn.experts.{number}.{projection}.weight"
    return weight(name, type_id, (OUT, K_MID if projection == "w2" else K_IN))


def table(projection: str, payload: bytes, layer: int = 3) -> Tensor:
    """The tensor of a decode table."""
    name = f"layers.{layer}.ffn.experts.{projection}.mix_table"
    return Tensor(name, 120, (len(payload),), 0, payload)


def item(projection: str, experts: Sequence[int], qtype: int, layer: int = 3) -> dict[str, Any]:
    """An item of the index; its digest is filled in by ``Mixed.document``."""
    prefix = f"layers.{layer}.ffn.experts"
    return {
        "kind": {105: "p4mix", 106: "gumix"}.get(qtype, "?"),
        "layer": layer,
        "projection": projection,
        "qtype": qtype,
        "rows": {f"{prefix}.{n}.{projection}.weight": n for n in experts},
        "table": f"{prefix}.{projection}.mix_table",
    }


def digest_of(index: Any) -> str:
    """SHA-256 of an index as the metadata writes it."""
    text = json.dumps(index, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Mixed:
    """An artifact. ``keys`` overrides what the metadata object would hold; None drops a key."""

    tensors: tuple[Tensor, ...]
    items: tuple[Any, ...]
    keys: tuple[tuple[str, Any], ...] = ()
    config: Any = None
    whole: Any = ()  # in place of the whole object

    def document(self) -> Any:
        """The metadata object ``rocmfpx``."""
        if self.whole != ():
            return self.whole
        payloads = {str(t.name): t.payload for t in self.tensors if t.type_id == 120}
        index = [
            {"sha256": hashlib.sha256(payloads.get(str(i.get("table")), b"")).hexdigest()} | i
            if isinstance(i, dict)
            else i
            for i in self.items
        ]
        repairs = [
            {"count": "0000", "kind": "bf16-epsilon-v1", "table": i["table"]}
            for i in index
            if isinstance(i, dict)
        ]
        found = {
            "spec": 1,
            "calibration": "imatrix",
            "variant_107": "dual",
            "fp6_code32": "zero",
            "repairs": repairs,
            "mix_tables": index,
        } | dict(self.keys)
        found.setdefault("mix_index_sha256", digest_of(found["mix_tables"]))
        return {key: value for key, value in found.items() if value is not None}

    def but(self, **changes: Any) -> Mixed:
        """The same artifact with other fields."""
        return replace(self, **changes)

    def key(self, name: str, value: Any) -> Mixed:
        """With another value of a key of the object; None drops it."""
        return self.but(keys=(*self.keys, (name, value)))

    def tensor(self, name: str, *new: Tensor) -> Mixed:
        """With ``new`` in place of the tensor whose name ends in ``name``."""
        kept = [t for t in self.tensors if not str(t.name).endswith(name)]
        assert len(kept) == len(self.tensors) - 1, name
        return self.but(tensors=tuple(sorted((*kept, *new), key=lambda t: str(t.name))))

    def item(self, number: int, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Mixed:
        """With one changed item of the index."""
        items = list(self.items)
        items[number] = change(items[number])
        return self.but(items=tuple(items))

    def metadata(self) -> dict[str, Any]:
        """The metadata of a file of another tool."""
        config = {"n_routed_experts": EXPERTS} if self.config is None else self.config
        document = self.document()
        return {"config": config} | ({} if document is None else {"rocmfpx": document})

    def file(self) -> File:
        """As another tool writes it."""
        return File(self.tensors, metadata=json.dumps(self.metadata()).encode())

    def own(self) -> bytes:
        """As ds4q writes it."""
        return sealed(self.tensors, ours={"k256": True}, metadata=self.metadata())


# Expert 0 is mixed, expert 1 needs both variants, expert 2 needs nothing.
LEGAL = Mixed(
    tuple(
        sorted(
            (
                *(expert(0, p, q) for p, q in (("w1", 106), ("w2", 105), ("w3", 106))),
                *(expert(1, p, q) for p, q in (("w1", 107), ("w2", 102), ("w3", 107))),
                *(expert(2, p, q) for p, q in (("w1", 104), ("w2", 100), ("w3", 104))),
                table("w1", gumix()),
                table("w2", p4mix()),
                table("w3", gumix(surface=1)),
            ),
            key=lambda t: str(t.name),
        )
    ),
    (item("w1", [0], 106), item("w2", [0], 105), item("w3", [0], 106)),
)
