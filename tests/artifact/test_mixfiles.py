"""Decode-table files of other tools: worked bytes, every refusal beside a legal file, damage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.artifact.errors import CodingError
from ds4q.artifact.formats import MixRow
from ds4q.artifact.mixfiles import MAX_FILE_BYTES, read_dmix, read_gumix, read_p4mix, table_file
from ds4q.artifact.tables import GUMIX, P4MIX, Table
from tests.artifact.mixed import BOOKS_4, BOOKS_8, Row, gumix, p4mix
from tests.checks import check_refused

LAYERS = 43
DMIX_HEX = (
    "03000000 03000000 6a000000 08000000 02000000 04000000 01 000000"
    "60bf80be803e603f 80bfc0bec03e803f"
)
ALL_8: list[Row] = [(1, BOOKS_8), (0, None)]
ALL_4: list[Row] = [(1, BOOKS_4), (0, BOOKS_4)]


def file(magic: bytes, *entries: bytes, count: int | None = None, reserved: int = 0) -> bytes:
    n = len(entries) if count is None else count
    return magic + struct.pack("<II", n, reserved) + b"".join(entries)


def p4mix_file(*entries: bytes, **fields: int) -> bytes:
    return file(b"P4MIXv1\0", *entries, **fields)


def gumix_file(*entries: bytes, **fields: int) -> bytes:
    return file(b"GUMIXs1\0", *entries, **fields)


def dmix_file(*entries: bytes, **fields: int) -> bytes:
    return file(b"DMIXs1\0\0", *entries, **fields)


def dmix(
    *,
    layer: int = 3,
    place: int = 3,
    qtype: int = 106,
    slices: int = 8,
    books: int = 2,
    levels: int = 4,
    mode: int = 1,
    padding: bytes = bytes(3),
    words: Any = BOOKS_4,
) -> bytes:
    head = struct.pack("<6IB", layer, place, qtype, slices, books, levels, mode) + padding
    return head + b"".join(struct.pack(f"<{len(book)}H", *book) for book in words)


def test_p4mix() -> None:
    first, second = p4mix(ALL_8, layer=2), p4mix(ALL_8, layer=42, out=7, in_=96)
    found = read_p4mix(p4mix_file(first, second), LAYERS)
    assert [t.encode() for t in found] == [first, second]
    assert [(t.layer, t.projection, t.out, t.in_) for t in found] == [
        (2, "w2", 4, 64),
        (42, "w2", 7, 96),
    ]
    # every expert is stacked in one tensor there: a row of zeros is a row, not filler
    assert found[0].rows[1] == MixRow(0, b"")


def test_gumix() -> None:
    entries = [gumix(ALL_4, layer=layer, surface=n) for layer in (0, 42) for n in (2, 0, 1)]
    found = read_gumix(gumix_file(*entries), LAYERS)
    assert [t.encode() for t in found] == entries
    assert [(t.layer, t.projection) for t in found] == [
        (layer, p) for layer in (0, 42) for p in ("w2", "w1", "w3")
    ]


def test_lengths_of_whole_files() -> None:
    full = [(1, BOOKS_8)] * 256
    entries = [p4mix(full, layer=n, out=4096, in_=2048) for n in range(LAYERS)]
    raw = p4mix_file(*entries)
    assert len(raw) == 375_320
    assert len(read_p4mix(raw, LAYERS)) == LAYERS


def test_dmix() -> None:
    raw = dmix_file(bytes.fromhex(DMIX_HEX))
    assert raw == dmix_file(dmix())
    (found,) = read_dmix(raw, LAYERS)
    assert (found.layer, found.matrix, found.type_id, found.slices) == (3, "output_a", 106, 8)
    assert found.row == MixRow(1, bytes.fromhex(DMIX_HEX)[28:])
    both = dmix_file(dmix(), dmix(place=0, qtype=105, levels=8, words=BOOKS_8, slices=4096))
    assert [b.matrix for b in read_dmix(both, LAYERS)] == ["output_a", "q_a"]
    blank = dmix_file(dmix(mode=0, words=[[0] * 4] * 2))
    assert read_dmix(blank, LAYERS)[0].row == MixRow(0, b"")


Reader = Callable[..., list[Any]]
P, G = p4mix(ALL_8), gumix(ALL_4)
TWO_LEVELS = ((0xBF60, 0xBE80, 0x3F60, 0x3E60), BOOKS_4[1])
BAD: dict[str, tuple[Reader, bytes, str, bytes]] = {
    # name: reader, attack, words of the message, legal twin
    "empty": (read_p4mix, b"", "wrong length", p4mix_file(P)),
    "header only": (read_p4mix, p4mix_file(count=1), "wrong length", p4mix_file(P)),
    "another file": (read_p4mix, gumix_file(G), "wrong magic", p4mix_file(P)),
    "another file (gumix)": (read_gumix, p4mix_file(P), "wrong magic", gumix_file(G)),
    "another file (dmix)": (read_dmix, gumix_file(G), "wrong magic", dmix_file(dmix())),
    "later version": (read_p4mix, file(b"P4MIXv2\0", P), "wrong magic", p4mix_file(P)),
    "fused": (read_gumix, file(b"GUMIXv1\0", G), "GUMIXv1 (gate and up fused", gumix_file(G)),
    "by name": (read_dmix, file(b"DMX2s1\0\0", dmix()), "DMX2", dmix_file(dmix())),
    "5 words": (
        read_p4mix,
        p4mix_file(struct.pack("<5I", 2, 4, 64, 2, 8) + P[24:]),
        "header of 5 words",
        p4mix_file(P),
    ),
    "5 words without books": (
        read_p4mix,
        p4mix_file(struct.pack("<5I", 3, 2, 4, 64, 8) + P[24:]),
        "header of 5 words",
        p4mix_file(P),
    ),
    "8 books": (read_p4mix, p4mix_file(p4mix(ALL_8, tail=(8, 8))), "of books", p4mix_file(P)),
    "no entries": (read_p4mix, p4mix_file(P, count=0), "number of entries", p4mix_file(P)),
    "more entries than layers": (
        read_p4mix,
        p4mix_file(P, count=LAYERS + 1),
        "expected 1 to 43, found 44",
        p4mix_file(*(p4mix(ALL_8, layer=n) for n in range(LAYERS))),
    ),
    "more entries than surfaces": (
        read_gumix,
        gumix_file(G, count=3 * LAYERS + 1),
        "expected 1 to 129, found 130",
        gumix_file(*(gumix(ALL_4, layer=n, surface=s) for n in range(LAYERS) for s in range(3))),
    ),
    "more entries than matrices": (
        read_dmix,
        dmix_file(dmix(), count=5 * LAYERS + 1),
        "expected 1 to 215, found 216",
        dmix_file(*(dmix(layer=n, place=c) for n in range(LAYERS) for c in range(5))),
    ),
    "reserved": (read_p4mix, p4mix_file(P, reserved=1), "reserved", p4mix_file(P)),
    "reserved (dmix)": (read_dmix, dmix_file(dmix(), reserved=1), "reserved", dmix_file(dmix())),
    "trailing": (read_p4mix, p4mix_file(P) + b"\0", "trailing bytes", p4mix_file(P)),
    "trailing entry": (read_gumix, gumix_file(G, G, count=1), "trailing bytes", gumix_file(G)),
    "trailing (dmix)": (read_dmix, dmix_file(dmix()) + b"\0", "trailing", dmix_file(dmix())),
    "cut": (read_p4mix, p4mix_file(P)[:-1], "truncated p4mix", p4mix_file(P)),
    "one entry missing": (read_p4mix, p4mix_file(P, count=2), "truncated p4mix", p4mix_file(P)),
    "cut (dmix)": (read_dmix, dmix_file(dmix())[:-1], "truncated dmix", dmix_file(dmix())),
    "cut header (dmix)": (read_dmix, dmix_file(dmix()[:27]), "truncated dmix", dmix_file(dmix())),
    "layer": (
        read_p4mix,
        p4mix_file(p4mix(ALL_8, layer=LAYERS)),
        "layer out of range",
        p4mix_file(p4mix(ALL_8, layer=LAYERS - 1)),
    ),
    "layer (dmix)": (
        read_dmix,
        dmix_file(dmix(layer=LAYERS)),
        "layer out of range",
        dmix_file(dmix(layer=LAYERS - 1)),
    ),
    "layer twice": (
        read_p4mix,
        p4mix_file(P, P),
        "twice",
        p4mix_file(P, p4mix(ALL_8, layer=4)),
    ),
    "surface twice": (
        read_gumix,
        gumix_file(G, G),
        "twice",
        gumix_file(G, gumix(ALL_4, surface=1)),
    ),
    "matrix twice": (
        read_dmix,
        dmix_file(dmix(), dmix()),
        "twice",
        dmix_file(dmix(), dmix(place=4)),
    ),
    "mode 2": (read_gumix, gumix_file(gumix([(2, BOOKS_4)])), "mode", gumix_file(G)),
    "mode 2 (dmix)": (read_dmix, dmix_file(dmix(mode=2)), "mode", dmix_file(dmix(mode=1))),
    "rotation": (read_p4mix, p4mix_file(p4mix(ALL_8, rotation=1)), "rotation", p4mix_file(P)),
    "class": (read_dmix, dmix_file(dmix(place=5)), "class", dmix_file(dmix(place=4))),
    "type": (read_dmix, dmix_file(dmix(qtype=107)), "type", dmix_file(dmix())),
    "levels of the other": (read_dmix, dmix_file(dmix(levels=8)), "levels", dmix_file(dmix())),
    "one book": (read_dmix, dmix_file(dmix(books=1)), "number of books", dmix_file(dmix())),
    "no slice": (read_dmix, dmix_file(dmix(slices=0)), "slices", dmix_file(dmix(slices=1))),
    "slices": (read_dmix, dmix_file(dmix(slices=4097)), "slices", dmix_file(dmix(slices=4096))),
    "padding": (read_dmix, dmix_file(dmix(padding=b"\0\1\0")), "padding", dmix_file(dmix())),
    "unsorted (dmix)": (
        read_dmix,
        dmix_file(dmix(words=TWO_LEVELS)),
        "finite and ascending",
        dmix_file(dmix(mode=0, words=TWO_LEVELS)),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    read, attack, words, twin = BAD[name]
    path = "m.gguf"
    check_refused(
        CodingError,
        lambda: read(attack, LAYERS, path=path),
        path=path,
        says=["mix-table-format: ", words],
    )
    assert read(twin, LAYERS, path=path)


def test_a_file_that_is_too_long() -> None:
    raw = p4mix_file(P).ljust(MAX_FILE_BYTES + 1, b"\0")
    check_refused(CodingError, lambda: read_p4mix(raw, LAYERS), says=["wrong length"])
    check_refused(CodingError, lambda: read_p4mix(raw[:-1], LAYERS), says=["trailing bytes"])


WHOLE: list[tuple[Reader, bytes]] = [
    (read_p4mix, p4mix_file(P, p4mix(ALL_8, layer=4))),
    (read_gumix, gumix_file(G, gumix(ALL_4, surface=2))),
    (read_dmix, dmix_file(dmix(), dmix(place=1, qtype=105, levels=8, words=BOOKS_8))),
]


@settings(max_examples=300)
@given(st.sampled_from(WHOLE), st.data())
def test_a_changed_byte_is_refused_or_read_as_it_stands(
    case: tuple[Reader, bytes], data: st.DataObject
) -> None:
    read, whole = case
    raw = bytearray(whole)
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        found = read(bytes(raw), LAYERS)
    except CodingError:
        return
    assert found != read(whole, LAYERS)
    if isinstance(found[0], Table):
        assert whole[:16] + b"".join(table.encode() for table in found) == bytes(raw)


@given(st.sampled_from(WHOLE), st.binary(max_size=200), st.integers(0, 300))
def test_soup_gives_no_other_error(case: tuple[Reader, bytes], soup: bytes, keep: int) -> None:
    read, whole = case
    with suppress(CodingError):
        assert read(whole[:keep] + soup, LAYERS)


def test_files_are_written_in_the_order_of_layers_and_surfaces() -> None:
    up, gate, down = (
        gumix(ALL_4, layer=layer, surface=surface) for layer, surface in ((2, 1), (2, 0), (1, 2))
    )
    raw = gumix_file(down, gate, up)
    tables = [Table.decode(entry, 106) for entry in (up, gate, down)]
    assert table_file(GUMIX, tables) == raw
    assert [table.encode() for table in read_gumix(raw, LAYERS)] == [down, gate, up]
    one = p4mix(ALL_8)
    assert table_file(P4MIX, [Table.decode(one, 105)]) == p4mix_file(one)
