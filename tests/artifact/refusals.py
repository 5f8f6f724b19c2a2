"""Owns the refusals of ROCmFPX artifacts as files: each attack, its rule id, the tensor it names.

The rule ids are those of ``artifact/FORMAT.md``. Every attack is ``LEGAL`` changed in one place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.artifact.build import Tensor
from tests.artifact.mixed import (
    BOOKS_4,
    BOOKS_8,
    EXPERTS,
    K_IN,
    LEGAL,
    OUT,
    Mixed,
    digest_of,
    expert,
    gumix,
    item,
    p4mix,
    table,
    weight,
)

PREFIX = "layers.3.ffn.experts"
GATE, DOWN, UP = (f"{PREFIX}.{p}.mix_table" for p in ("w1", "w2", "w3"))


def swapped(mixed: Mixed, name: str, payload: bytes) -> Mixed:
    """With another payload of a table, and its digest in the index."""
    old = next(t for t in mixed.tensors if t.name == name)
    return mixed.tensor(name, replace(old, payload=payload, shape=(len(payload),)))


def item_key(number: int, key: str, value: Any) -> Mixed:
    return LEGAL.item(number, lambda old: old | {key: value})


def stale(name: str, payload: bytes) -> Mixed:
    """With another payload of a table, of which the index knows nothing."""
    digests = {i["table"]: i["sha256"] for i in LEGAL.document()["mix_tables"]}
    items = tuple(i | {"sha256": digests[i["table"]]} for i in LEGAL.items)
    return swapped(LEGAL, name, payload).but(items=items)


def retyped(name: str, type_id: int, shape: tuple[int, ...] = (OUT, K_IN)) -> Mixed:
    full = f"{PREFIX}.{name}.weight"
    return LEGAL.tensor(f".{name}.weight", weight(full, type_id, shape))


def claims(name: str, **changes: Any) -> Mixed:
    """With an index entry of a tensor that claims something else."""
    old = next(t for t in LEGAL.tensors if str(t.name).endswith(name))
    return LEGAL.tensor(name, replace(old, **changes))


ROWS = item("w1", [0], 106)["rows"]
ONE_LEVEL_DOWN = (*BOOKS_8[0][:6], BOOKS_8[0][7], BOOKS_8[0][6])
DENSE = "layers.3.attn.wq_a.weight"
DRAFT = "mtp.0.ffn.experts.0.w1.weight"
MIXED_DRAFT = LEGAL.but(tensors=(*LEGAL.tensors, weight(DRAFT, 106, (OUT, K_IN))))

# name: rule id, artifact, tensor that is named, words of the message
REFUSED: dict[str, tuple[str, Mixed, str | None, str]] = {
    # metadata
    "not an object": ("metadata", LEGAL.but(whole=["dual"]), None, "not an object"),
    "no spec": ("metadata", LEGAL.key("spec", None), None, "rocmfpx.spec"),
    "spec null": ("metadata", LEGAL.but(whole={"spec": None}), None, "found None"),
    "spec 2": ("metadata", LEGAL.key("spec", 2), None, "expected 1, found 2"),
    "spec true": ("metadata", LEGAL.key("spec", True), None, "found True"),
    "spec as text": ("metadata", LEGAL.key("spec", "1"), None, "found '1'"),
    # variants
    "no variant": ("variant-missing", LEGAL.key("variant_107", None), f"{PREFIX}.1.w1.weight", ""),
    "no endpoint": ("variant-missing", LEGAL.key("fp6_code32", None), f"{PREFIX}.1.w2.weight", ""),
    "strange variant": (
        "variant-unknown",
        LEGAL.key("variant_107", "Dual"),
        f"{PREFIX}.1.w1.weight",
        "expected dual, affine, s40 or sign, found 'Dual'",
    ),
    "empty variant": ("variant-unknown", LEGAL.key("variant_107", ""), None, "found ''"),
    "list of variants": ("variant-unknown", LEGAL.key("variant_107", ["dual"]), None, "dual"),
    "variant of the other": ("variant-unknown", LEGAL.key("fp6_code32", "dual"), None, "zero or"),
    # shapes
    "short payload": (
        "shape",
        claims(".2.w1.weight", payload=bytes(OUT * K_IN // 32 * 14 - 1)),
        f"{PREFIX}.2.w1.weight",
        "",
    ),
    "in by 32": ("shape", claims(".2.w1.weight", shape=(8, 80)), f"{PREFIX}.2.w1.weight", "32"),
    "106 by 64": (
        "shape",
        claims(".0.w1.weight", shape=(8, 64)),
        f"{PREFIX}.0.w1.weight",
        "multiple of 128",
    ),
    "107 by 64": (
        "shape",
        claims(".1.w1.weight", shape=(8, 64)),
        f"{PREFIX}.1.w1.weight",
        "multiple of 128",
    ),
    "three dims": (
        "shape",
        claims(".2.w1.weight", shape=(2, 2, K_IN)),
        f"{PREFIX}.2.w1.weight",
        "two dims",
    ),
    "105 for gate": ("shape", retyped("0.w1", 105), f"{PREFIX}.0.w1.weight", "w2 only"),
    "105 beside 106": (
        "shape",
        LEGAL.tensor(".1.w2.weight", weight(f"{PREFIX}.1.w2.weight", 106, (OUT, K_IN))),
        f"{PREFIX}.1.w2.weight",
        "105 and 106 in one projection",
    ),
    "gate and up differ": (
        "shape",
        retyped("2.w3", 100),
        f"{PREFIX}.2.w3.weight",
        "expected 104, found 100",
    ),
    # the index
    "no index": (
        "mix-index",
        LEGAL.key("mix_tables", None).key("mix_index_sha256", None),
        f"{PREFIX}.0.w1.weight",
        "has no mix_tables",
    ),
    "no index but its digest": ("mix-index", LEGAL.key("mix_tables", None), None, "no mix_tables"),
    "index without digest": ("mix-index", LEGAL.key("mix_index_sha256", None), None, "digest"),
    "wrong digest": ("mix-index", LEGAL.key("mix_index_sha256", digest_of([])), None, "digest"),
    "upper-case digest": (
        "mix-index",
        LEGAL.key("mix_index_sha256", digest_of(LEGAL.document()["mix_tables"]).upper()),
        None,
        "digest",
    ),
    "object for an index": ("mix-index", LEGAL.key("mix_tables", {}), None, "not an array"),
    "unsorted": ("mix-index", LEGAL.but(items=LEGAL.items[::-1]), None, "is not in order"),
    "twice": ("mix-index", LEGAL.but(items=LEGAL.items[:1] * 2), None, "appears twice"),
    "number for an item": ("mix-index", LEGAL.but(items=(7,)), None, "not an object of"),
    "key too many": ("mix-index", item_key(0, "note", ""), None, "not an object of"),
    "wrong kind": ("mix-index", item_key(0, "kind", "p4mix"), None, "kind and qtype"),
    "wrong qtype": ("mix-index", item_key(0, "qtype", 107), None, "kind and qtype"),
    "listed qtype": ("mix-index", item_key(0, "qtype", [106]), None, "kind and qtype"),
    "negative layer": ("mix-index", item_key(0, "layer", -1), None, "wrong layer"),
    "layer as text": ("mix-index", item_key(0, "layer", "3"), None, "wrong layer"),
    "projection of another kind": (
        "mix-index",
        LEGAL.but(items=(item("w1", [0], 105), *LEGAL.items[1:])),
        None,
        "that p4mix does not serve",
    ),
    "list for a projection": ("mix-index", item_key(0, "projection", ["w1"]), None, "projection"),
    "table of another name": ("mix-index", item_key(0, "table", "t"), None, f"table is not {GATE}"),
    "digest as a number": ("mix-index", item_key(0, "sha256", 1), None, "64 hex digits"),
    "no rows": ("mix-index", item_key(0, "rows", {}), None, "rows is empty"),
    "list of rows": ("mix-index", item_key(0, "rows", list(ROWS)), None, "rows is empty or not"),
    "row of another expert": ("mix-index", item_key(0, "rows", dict.fromkeys(ROWS, 1)), None, ""),
    "row that is true": (
        "mix-index",
        item_key(0, "rows", {f"{PREFIX}.1.w1.weight": True}),
        None,
        "is not row True",
    ),
    "row of another layer": (
        "mix-index",
        item_key(0, "rows", {"layers.4.ffn.experts.0.w1.weight": 0}),
        None,
        "is not row 0 of this table",
    ),
    "row of a dense tensor": ("mix-index", item_key(0, "rows", {DENSE: 0}), None, "is not row 0"),
    "table that is not listed": (
        "mix-index",
        LEGAL.but(tensors=(*LEGAL.tensors, table("w1", gumix(), layer=4))),
        "layers.4.ffn.experts.w1.mix_table",
        "no decode table of the index",
    ),
    "raw tensor": (
        "mix-index",
        LEGAL.but(tensors=(*LEGAL.tensors, Tensor("note", 120, (3,), 0, b"abc"))),
        "note",
        "no decode table of the index",
    ),
    # tables
    "no table": ("mix-table-missing", LEGAL.tensor("w1.mix_table"), GATE, ""),
    "damaged table": (
        "mix-table-digest",
        stale(GATE, gumix([(1, BOOKS_4[::-1]), (0, None), (0, None)])),
        GATE,
        "",
    ),
    "truncated table": ("mix-table-digest", stale(DOWN, p4mix()[:-1]), DOWN, ""),
    "table of another type": (
        "mix-table-format",
        claims("w1.mix_table", type_id=1, shape=(len(gumix()) // 2,), payload=gumix()[:-1]),
        GATE,
        "expected type 120",
    ),
    "table with two dims": (
        "mix-table-format",
        claims("w1.mix_table", shape=(1, len(gumix()))),
        GATE,
        "not a decode table",
    ),
    "table that cannot be so long": (
        "mix-table-format",
        swapped(LEGAL, GATE, bytes(28 + 17 * 65536 + 1)),
        GATE,
        "not a decode table",
    ),
    "truncated and told": ("mix-table-format", swapped(LEGAL, DOWN, p4mix()[:-1]), DOWN, "trunc"),
    "trailing bytes": ("mix-table-format", swapped(LEGAL, DOWN, p4mix() + b"\0"), DOWN, "trailing"),
    "header only in part": ("mix-table-format", swapped(LEGAL, DOWN, p4mix()[:9]), DOWN, "trunc"),
    "table for another layer": (
        "mix-table-format",
        swapped(LEGAL, DOWN, p4mix(layer=2)),
        DOWN,
        "table for another layer: expected 3, found 2",
    ),
    "table for another projection": (
        "mix-table-format",
        swapped(LEGAL, GATE, gumix(surface=1)),
        GATE,
        "another projection: expected w1, found w3",
    ),
    "table for fewer experts": (
        "mix-table-format",
        swapped(LEGAL, DOWN, p4mix([(1, BOOKS_8), (0, None)])),
        DOWN,
        f"expected {EXPERTS}, found 2",
    ),
    "model without experts": ("mix-table-format", LEGAL.but(config={}), GATE, "no n_routed"),
    "table for another out": (
        "mix-table-format",
        swapped(LEGAL, DOWN, p4mix(out=OUT + 1)),
        DOWN,
        "another shape",
    ),
    "table for another in": (
        "mix-table-format",
        swapped(LEGAL, GATE, gumix(in_=2 * K_IN)),
        GATE,
        "another shape",
    ),
    "expert beyond the model": (
        "mix-table-format",
        LEGAL.but(tensors=(*LEGAL.tensors, expert(EXPERTS, "w2", 105))).but(
            items=(LEGAL.items[0], item("w2", [0, EXPERTS], 105), LEGAL.items[2])
        ),
        DOWN,
        "rows below 3",
    ),
    "table of the other kind": ("mix-table-format", swapped(LEGAL, GATE, p4mix()), GATE, "number"),
    "mode 2": (
        "mix-table-format",
        swapped(LEGAL, DOWN, p4mix([(2, BOOKS_8), (0, None), (0, None)])),
        DOWN,
        "mode is neither",
    ),
    "rotation": ("mix-table-format", swapped(LEGAL, DOWN, p4mix(rotation=1)), DOWN, "rotation"),
    "unsorted book": (
        "mix-table-format",
        swapped(LEGAL, DOWN, p4mix([(1, (BOOKS_8[0], ONE_LEVEL_DOWN)), (0, None), (0, None)])),
        DOWN,
        "ascending",
    ),
    "books for an expert of another type": (
        "mix-table-format",
        swapped(LEGAL, DOWN, p4mix([(1, BOOKS_8), (0, BOOKS_8), (0, None)])),
        DOWN,
        "no tensor of type 105, but a mode or books for expert 1",
    ),
    # cover
    "tensor without a row": (
        "mix-row-unmapped",
        LEGAL.but(tensors=(*LEGAL.tensors, expert(0, "w2", 105, layer=4))),
        "layers.4.ffn.experts.0.w2.weight",
        "without a row",
    ),
    "mixed draft": ("mix-row-unmapped", MIXED_DRAFT, DRAFT, "without a row"),
    "mixed dense tensor": (
        "mix-row-unmapped",
        LEGAL.but(tensors=(*LEGAL.tensors, weight(DENSE, 106, (OUT, K_IN)))),
        DENSE,
        "without a row",
    ),
    "row of a missing tensor": (
        "mix-row-unmapped",
        LEGAL.tensor(".0.w2.weight"),
        f"{PREFIX}.0.w2.weight",
        "no tensor of type 105",
    ),
    "row of a tensor of another type": (
        "mix-row-unmapped",
        LEGAL.tensor(".0.w2.weight", expert(0, "w2", 104)),
        f"{PREFIX}.0.w2.weight",
        "no tensor of type 105",
    ),
    "row of a tensor of the other mixed type": (
        "mix-row-unmapped",
        swapped(retyped("0.w2", 106), DOWN, p4mix(in_=K_IN)),
        f"{PREFIX}.0.w2.weight",
        "no tensor of type 105",
    ),
}
