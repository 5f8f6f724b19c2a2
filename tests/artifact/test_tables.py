"""Decode tables: worked bytes, the index and its digest, and all that is no table."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.artifact.errors import CodingError
from ds4q.artifact.formats import MixRow
from ds4q.artifact.tables import (
    KINDS,
    MAX_DIM,
    MAX_EXPERTS,
    SURFACES,
    Table,
    expert_name,
    expert_of,
    index_fault,
    legal_books,
    mix_index,
    mix_index_sha256,
    table_bytes,
    table_name,
)
from tests.artifact.mixed import BOOKS_4, BOOKS_8, Row, gumix, p4mix
from tests.checks import check_golden, check_refused

# Layer 3, two experts, out 64, in 128; expert 0 is adaptive, expert 1 is filler.
P4MIX_HEX = (
    "03000000 02000000 40000000 80000000 02000000 08000000 0100 0000"
    "80bf20bfc0be00be003ec03e203f803f 80bf00bf80be80bd803d803e003f803f" + "00" * 32
)
GUMIX_HEX = (
    "03000000 01000000 02000000 40000000 80000000 02000000 04000000 0100"
    "60bf80be803e603f 80bfc0bec03e803f" + "00" * 16
)
P4MIX_SHA256 = "ca74730ed93ca0341aee3da4eae24ebd2277089c5eb6b91bbbc7da327e2806ef"
INDEX_SHA256 = "96b6ad497a42f46fd2089205df77e8a079104f0b83eaf6f5e972540373691de4"
W2_OF_LAYER_3 = "layers.3.ffn.experts.0.w2.weight"

TWO_BOOKS = bytes.fromhex("80bf20bfc0be00be003ec03e203f803f80bf00bf80be80bd803d803e003f803f")
DOWN = Table("p4mix", 3, "w2", 64, 128, (MixRow(1, TWO_BOOKS), None))
UP = Table("gumix", 3, "w3", 64, 128, (MixRow(1, bytes.fromhex(GUMIX_HEX)[30:46]), None))


# ------------------------------------------------------------------ worked bytes


def test_p4mix_bytes() -> None:
    raw = DOWN.encode()
    check_golden(raw, P4MIX_HEX)
    assert len(raw) == 92
    assert hashlib.sha256(raw).hexdigest() == P4MIX_SHA256
    assert Table.decode(raw, 105, mixed={0}) == DOWN


def test_gumix_bytes() -> None:
    raw = UP.encode()
    check_golden(raw, GUMIX_HEX)
    assert len(raw) == 62
    assert Table.decode(raw, 106, mixed={0}) == UP


def test_the_books_are_those_that_the_bytes_mean() -> None:
    row = DOWN.row(0)
    levels = (row.words.astype(np.uint32) << 16).view(np.float32)
    first, second = np.array([0.125, 0.375, 0.625, 1.0]), np.array([0.0625, 0.25, 0.5, 1.0])
    expected = [[*-half[::-1], *half] for half in (first, second)]
    assert levels.tolist() == expected


def test_lengths() -> None:
    assert (table_bytes(105, 256), table_bytes(106, 256)) == (8728, 4380)
    assert 16 + 43 * table_bytes(105, 256) == 375_320
    assert 16 + 86 * table_bytes(106, 256) == 376_696
    assert 16 + 129 * table_bytes(106, 256) == 565_036
    # the tables of DeepSeek-V4-Flash as tensors: 106 for gate and up, 105 for down
    assert 43 * (2 * table_bytes(106, 256) + table_bytes(105, 256)) == 751_984


def test_index_digest() -> None:
    index = mix_index({W2_OF_LAYER_3: 105}, {DOWN.name: P4MIX_SHA256})
    text = json.dumps(index, sort_keys=True, separators=(",", ":"))
    assert len(text) == 224
    assert text == (
        '[{"kind":"p4mix","layer":3,"projection":"w2","qtype":105,"rows":{"'
        + W2_OF_LAYER_3
        + '":0}'
        f',"sha256":"{P4MIX_SHA256}","table":"layers.3.ffn.experts.w2.mix_table"}}]'
    )
    assert mix_index_sha256(index) == INDEX_SHA256
    assert index_fault(index) is None


# ------------------------------------------------------------------ names


def test_names() -> None:
    assert table_name(12, "w3") == "layers.12.ffn.experts.w3.mix_table"
    assert expert_of(expert_name(12, 255, "w1")) == (12, 255, "w1")


@pytest.mark.parametrize(
    "name",
    [
        "mtp.0.ffn.experts.0.w1.weight",
        "layers.0.ffn.experts.0.w4.weight",
        "layers.0.ffn.experts.0.w1.weight.scale",
        "layers.00.ffn.experts.0.w1.weight",
        "layers.0.ffn.experts.01.w1.weight",
        "layers.0.ffn.experts.٣.w1.weight",
        "layers.0.ffn.shared_experts.w1.weight",
        "layers.0.ffn.experts.w1.mix_table",
        "layers.0.ffn.experts.0.w1.weight\n",
        "",
    ],
)
def test_names_that_are_no_expert_s(name: str) -> None:
    assert expert_of(name) is None


# ------------------------------------------------------------------ any legal table survives


@st.composite
def books_of(draw: st.DrawFn, levels: int) -> bytes:
    """Two books of strictly ascending finite bf16 levels."""
    keys = st.lists(
        st.integers(-0x7F7F, 0x7F7F), min_size=levels, max_size=levels, unique=True
    ).map(sorted)
    words = [(-n | 0x8000) if n < 0 else n for _ in range(2) for n in draw(keys)]
    return struct.pack(f"<{2 * levels}H", *words)


@st.composite
def legal_tables(draw: st.DrawFn) -> Table:
    type_id = draw(st.sampled_from([105, 106]))
    kind = KINDS[type_id]
    full = books_of(kind.levels)
    row = st.none() | st.builds(MixRow, st.just(1), full) | st.just(MixRow(0, b""))
    return Table(
        kind.name,
        draw(st.integers(0, 1000)),
        draw(st.sampled_from(kind.projections)),
        draw(st.integers(1, 300)),
        draw(st.integers(1, 8)) * kind.type.row_multiple,
        tuple(draw(st.lists(row, min_size=1, max_size=5))),
    )


def mixed_of(table: Table) -> set[int]:
    return {n for n, row in enumerate(table.rows) if row is not None}


@given(legal_tables())
def test_round_trip(table: Table) -> None:
    raw = table.encode()
    assert len(raw) == table_bytes(table.type_id, len(table.rows))
    assert Table.decode(raw, table.type_id, mixed=mixed_of(table)) == table


@settings(max_examples=300)
@given(legal_tables(), st.data())
def test_a_changed_byte_is_refused_or_read_as_it_stands(table: Table, data: st.DataObject) -> None:
    raw = bytearray(table.encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        found = Table.decode(bytes(raw), table.type_id, mixed=mixed_of(table))
    except CodingError:
        return
    # Layer, dims and levels may become others that are legal as well; none of it may be lost.
    assert found != table
    assert found.encode() == bytes(raw)


@given(legal_tables(), st.data())
def test_a_cut_or_longer_table_is_refused(table: Table, data: st.DataObject) -> None:
    raw = table.encode()
    other = raw[: data.draw(st.integers(0, len(raw) - 1))]
    for bad in (other, raw + data.draw(st.binary(min_size=1, max_size=70))):
        with pytest.raises(CodingError, match="mix-table-format: "):
            Table.decode(bad, table.type_id, mixed=mixed_of(table))


def test_mode_0_of_a_mixed_expert() -> None:
    plain = Table.decode(p4mix([(0, None)] * 2), 105, mixed={0})
    assert plain.rows == (MixRow(0, b""), None)
    # Upstream writes books for every expert: nothing reads those of mode 0, and none is lost.
    raw = p4mix([(0, tuple(book[::-1] for book in BOOKS_8)), (0, None)])
    kept = Table.decode(raw, 105, mixed={0})
    assert kept.row(0).mode == 0
    assert kept.encode() == raw


def test_without_the_mixed_experts_every_row_counts() -> None:
    table = Table.decode(bytes.fromhex(P4MIX_HEX), 105)
    assert table.rows == (DOWN.row(0), MixRow(0, b""))


# ------------------------------------------------------------------ what is no table


def mode(number: int) -> list[Row]:
    return [(number, BOOKS_8), (0, None), (0, None)]


def level(index: int, word: int, book: int = 1) -> list[Row]:
    books: list[list[int]] = [list(b) for b in BOOKS_8]
    books[book][index] = word
    return [(1, books), (0, None), (0, None)]


NO_TABLES: dict[str, tuple[int, bytes, str, bytes]] = {
    # name: type, attack, words of the message, legal twin
    "one book": (105, p4mix(tail=(1, 8)), "number of books", p4mix(tail=(2, 8))),
    "four levels": (105, p4mix(tail=(2, 4)), "number of levels", p4mix(tail=(2, 8))),
    "eight levels": (106, gumix(tail=(2, 8)), "number of levels", gumix(tail=(2, 4))),
    "surface 3": (106, gumix(surface=3), "surface", gumix(surface=2)),
    "no expert": (105, p4mix([]), "number of experts", p4mix([(0, None)])),
    "out 0": (105, p4mix(out=0), "wrong out", p4mix(out=1)),
    "out too large": (105, p4mix(out=MAX_DIM + 1), "wrong out", p4mix(out=MAX_DIM)),
    "in 0": (105, p4mix(in_=0), "wrong in", p4mix(in_=32)),
    "in too large": (105, p4mix(in_=MAX_DIM + 32), "wrong in", p4mix(in_=MAX_DIM)),
    "in by 32": (105, p4mix(in_=80), "wrong in", p4mix(in_=96)),
    "in by 128": (106, gumix(in_=192), "wrong in", gumix(in_=256)),
    "mode 2": (105, p4mix(mode(2)), "mode is neither 0 nor 1 for expert 0", p4mix(mode(1))),
    "rotated": (105, p4mix(rotation=1), "rotation is not 0 for expert 0", p4mix(rotation=0)),
    "nan": (105, p4mix(level(7, 0x7FC0)), "finite and ascending", p4mix(level(7, 0x3F81))),
    "signalling nan": (105, p4mix(level(7, 0x7F81)), "finite and", p4mix(level(7, 0x7F7F))),
    "infinity": (105, p4mix(level(7, 0x7F80)), "finite and", p4mix(level(7, 0x7F7F))),
    "minus infinity": (105, p4mix(level(0, 0xFF80)), "finite and", p4mix(level(0, 0xFF7F))),
    "equal levels": (105, p4mix(level(6, 0x3F80)), "ascending", p4mix(level(6, 0x3F7F))),
    "descending": (105, p4mix(level(0, 0x3F80, 0)), "ascending", p4mix(level(0, 0xBF81, 0))),
    "two zeros": (
        106,
        gumix([(1, ((0xBF80, 0x8000, 0x0000, 0x3F80), BOOKS_4[1])), (0, None), (0, None)]),
        "ascending",
        gumix([(1, ((0xBF80, 0x8000, 0x0001, 0x3F80), BOOKS_4[1])), (0, None), (0, None)]),
    ),
    "filler with a mode": (
        105,
        p4mix([(1, BOOKS_8), (1, BOOKS_8), (0, None)]),
        "but a mode or books for expert 1",
        p4mix(),
    ),
    "filler with books": (
        106,
        gumix([(1, BOOKS_4), (0, None), (0, BOOKS_4)]),
        "but a mode or books for expert 2",
        gumix(),
    ),
}


@pytest.mark.parametrize("name", NO_TABLES)
def test_no_table(name: str) -> None:
    type_id, attack, words, twin = NO_TABLES[name]
    where = {"path": "x.hfq", "tensor": "t"}
    check_refused(
        CodingError,
        lambda: Table.decode(attack, type_id, mixed={0}, **where),
        **where,
        says=["mix-table-format: ", words],
    )
    assert Table.decode(twin, type_id, mixed={0}).encode() == twin


def test_too_many_experts() -> None:
    many = struct.pack("<6I", 0, MAX_EXPERTS + 1, 1, 32, 2, 8)
    check_refused(CodingError, lambda: Table.decode(many, 105), says=["number of experts"])
    most = struct.pack("<6I", 0, MAX_EXPERTS, 1, 32, 2, 8)
    check_refused(CodingError, lambda: Table.decode(most, 105), says=["truncated"])
    assert len(Table.decode(most + bytes(34 * MAX_EXPERTS), 105).rows) == MAX_EXPERTS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: replace(t, kind="gumixv1"), "unknown kind"),
        (lambda t: replace(t, projection="w1"), "wrong projection of a p4mix table"),
        (lambda t: replace(t, layer=1 << 32), "does not fit 32 bits"),
        (lambda t: replace(t, in_=48), "wrong in"),
        (lambda t: replace(t, rows=()), "number of experts"),
        (lambda t: replace(t, rows=(MixRow(2, TWO_BOOKS),)), "bad row of expert 0"),
        (lambda t: replace(t, rows=(None, MixRow(1, TWO_BOOKS[:16]))), "bad row of expert 1"),
        (lambda t: replace(t, rows=(MixRow(1, b""),)), "bad row of expert 0"),
        (lambda t: replace(t, rows=(MixRow(1, TWO_BOOKS[::-1]),)), "finite and ascending"),
    ],
)
def test_what_cannot_be_written(change: Callable[[Table], Table], words: str) -> None:
    check_refused(CodingError, lambda: change(DOWN).encode(), says=["mix-table-format: ", words])


def test_rows_of_other_experts_are_refused() -> None:
    for expert in (1, 2, -1):
        says = ["mix-row-unmapped: ", f"expert {expert}"]
        check_refused(CodingError, partial(DOWN.row, expert), tensor=DOWN.name, says=says)


def test_legal_books_of_many_rows() -> None:
    words = np.array([BOOKS_4, BOOKS_4[::-1], (BOOKS_4[0], BOOKS_4[1][::-1])], dtype=np.uint16)
    assert legal_books(words).tolist() == [True, True, False]


def test_surfaces_are_gate_up_down() -> None:
    assert [Table.decode(gumix(surface=n), 106, mixed={0}).projection for n in range(3)] == list(
        SURFACES
    )
    assert SURFACES == ("w1", "w3", "w2")


# ------------------------------------------------------------------ the index

TYPES = {
    "layers.10.ffn.experts.0.w2.weight": 106,
    "layers.2.ffn.experts.0.w2.weight": 105,
    "layers.2.ffn.experts.0.w3.weight": 106,
    "layers.2.ffn.experts.10.w1.weight": 106,
    "layers.2.ffn.experts.9.w1.weight": 106,
    "layers.2.ffn.experts.1.w1.weight": 107,
    "layers.2.ffn.experts.w1.mix_table": 120,
    "head.weight": 3,
}


def test_index_is_sorted_by_layer_and_projection_whatever_the_order() -> None:
    index = mix_index(TYPES)
    assert [(i["layer"], i["projection"], i["qtype"], i["kind"]) for i in index] == [
        (2, "w1", 106, "gumix"),
        (2, "w2", 105, "p4mix"),
        (2, "w3", 106, "gumix"),
        (10, "w2", 106, "gumix"),
    ]
    assert index[0]["rows"] == {
        "layers.2.ffn.experts.9.w1.weight": 9,
        "layers.2.ffn.experts.10.w1.weight": 10,
    }
    assert mix_index(dict(reversed(TYPES.items()))) == index
    assert mix_index({"head.weight": 3}) == []


def test_index_keeps_its_length_when_the_digests_come() -> None:
    planned = mix_index(TYPES)
    digests = {
        item["table"]: hashlib.sha256(item["table"].encode()).hexdigest() for item in planned
    }
    filled = mix_index(TYPES, digests)
    assert [i["sha256"] for i in filled] == list(digests.values())
    assert len(json.dumps(filled)) == len(json.dumps(planned))
    assert index_fault(filled) is None
    assert index_fault(planned) == "item 0: sha256 is not 64 hex digits"


def test_no_index_for_what_no_table_serves() -> None:
    for name in ("mtp.0.ffn.experts.0.w1.weight", "layers.0.attn.wq_a.weight"):
        says = ["mix-row-unmapped: ", "routed experts only"]
        check_refused(CodingError, partial(mix_index, {name: 106}), tensor=name, says=says)
