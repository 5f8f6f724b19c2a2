"""FORMAT.md against the code: every table of numbers, every ruling, every field."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from ds4q.artifact import (
    codings,
    errors,
    hfq,
    hfq2,
    metadata,
    mixfiles,
    receipt,
    tables,
    types,
)
from ds4q.artifact.formats import _fwht, hfp4g32, mq2lloyd
from ds4q.artifact.numeric import E2M1, E8M0
from ds4q.artifact.tables import expert_name
from tests.artifact import refusals, rulings, test_hfq, test_hfq_rulings
from tests.artifact.build import File

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "artifact" / "FORMAT.md").read_text(encoding="utf-8")
Row = dict[str, str]


def tables_of(text: str) -> dict[str, list[list[Row]]]:
    """Heading -> its tables; a table is a list of {column: cell}."""
    out: dict[str, list[list[Row]]] = {}
    heading, header = "", None
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
            out[heading] = []
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if header is None:
            header = cells
            out[heading].append([])
        elif set(line) != {"|", "-"}:
            assert len(cells) == len(header), line
            out[heading][-1].append(dict(zip(header, cells, strict=True)))
    return out


TABLES = tables_of(TEXT)


def table(heading: str, number: int = 0) -> list[Row]:
    return TABLES[heading][number]


def plain(cell: str) -> str:
    return cell.strip("`")


# ------------------------------------------------------------------ the container


def test_header_fields() -> None:
    rows = table("1.1 Header and order of parts")
    sizes = {"4s": 4, "I": 4, "Q": 8}
    codes = re.findall(r"4s|I|Q", hfq.HEADER.format)
    assert [int(row["bytes"]) for row in rows] == [sizes[code] for code in codes]
    offsets = [sum(int(r["bytes"]) for r in rows[:n]) for n in range(len(rows))]
    assert [int(row["offset"]) for row in rows] == offsets
    assert offsets[-1] + 8 == hfq.HEADER_BYTES == hfq.HEADER.size
    assert hfq.HEADER.format.startswith("<")
    written = {row["field"]: plain(row["value written"]) for row in rows}
    assert written["magic"].encode() == hfq.MAGIC
    assert int(written["version"]) == hfq.VERSION_WRITTEN
    assert int(written["arch_id"]) == hfq.ARCH_DEEPSEEK4
    assert int(written["metadata_offset"]) == hfq.HEADER_BYTES
    assert f"rounded up to {hfq.ALIGNMENT}" in written["data_offset"]


def test_index_entry_fields() -> None:
    rows = table("1.2 Index entry")
    assert [row["field"] for row in rows] == [
        "name_len",
        "name",
        "quant_type",
        "n_dims",
        "dims",
        "group_size",
        "data_size",
    ]
    fixed = {row["field"]: int(row["bytes"]) for row in rows if row["bytes"].isdigit()}
    assert fixed["name_len"] == hfq.NAME_LENGTH.size
    assert fixed["quant_type"] + fixed["n_dims"] == hfq.ENTRY_HEAD.size
    assert fixed["group_size"] + fixed["data_size"] == hfq.ENTRY_TAIL.size
    assert sum(fixed.values()) == hfq.ENTRY_FIXED_BYTES[1]
    assert sum(fixed.values()) + hfq.ENTRY_OFFSET.size == hfq.ENTRY_FIXED_BYTES[2]
    assert {row["field"]: row["bytes"] for row in rows}[
        "dims"
    ] == f"{struct.calcsize('<I')} · n_dims"


def test_worked_example_is_the_tested_file() -> None:
    section = TEXT.partition("### 1.3 Worked example")[2].partition("###")[0]
    block = section.split("```")[1]
    data = File((test_hfq.N_WEIGHT, test_hfq.A_WEIGHT)).data()
    ends = []
    for line in block.strip().splitlines():
        offset, rest = line.split(maxsplit=1)
        ends.append(int(offset))
        if re.fullmatch(r"[0-9a-f ]+", rest):
            raw = bytes.fromhex(rest)
            assert data[int(offset) : int(offset) + len(raw)] == raw
    assert ends == [0, 32, 45, 49, 77, 109, 4096, 4104, 4408]
    assert len(data) == 4408


def test_version_2_aspects() -> None:
    rows = {row["aspect"]: row["version 2"] for row in table("2. Container, version 2")}
    assert f"{hfq.ENTRY_OFFSET.size} bytes" in rows["index entry"]
    assert f"divided by {hfq2.OFFSET_UNIT}" in rows["index entry"]
    assert f"multiple of {hfq2.OFFSET_UNIT}" in rows["payloads"]
    assert f"`{hfq.UNFINISHED_MAGIC.decode()}`" in rows["unfinished file"]
    assert f'"{hfq2.TAIL_FORMAT}"' in TEXT
    assert f'"{hfq2.HASH_ALGORITHM}"' in TEXT
    assert hfq.VERSIONS_READ == (1, 2)


def test_version_2_scopes() -> None:
    found = {
        plain(row["scope"]): (plain(row["text"]).encode(), row["covers offsets"] == "yes")
        for row in table("2. Container, version 2", 1)
    }
    assert found == hfq2.HASH_SCOPES


# ------------------------------------------------------------------ metadata


def test_digests_of_the_ds4q_object() -> None:
    rows = {row["key"]: row for row in table("3.2 The `ds4q` object")}
    assert list(rows) == sorted(rows)
    digits = len(metadata.BLANK_DIGEST)
    for key in ("index_xxh3", "metadata_xxh3"):
        assert rows[key]["kind"] == f"{digits} hex"
    assert f"{digits} spaces" in rows["metadata_xxh3"]["content"]
    assert f"{hfq.HEADER_BYTES} header bytes" in rows["index_xxh3"]["content"]
    sealed = metadata.seal({"ds4q": {}})
    assert metadata.parse_metadata(sealed)["ds4q"].keys() == {"metadata_xxh3"}


# ------------------------------------------------------------------ tensor types


def test_type_table_is_the_code_s() -> None:
    def cell(value: int, kind: types.TensorType) -> str:
        return str(value) if kind.block else "?"

    further = {32: "32 before the first row", 35: "one per block lacking to a multiple of 16"}
    expected = [
        {
            "id": str(kind.id),
            "name": kind.name,
            "block": cell(kind.block, kind),
            "block bytes": cell(kind.block_bytes, kind),
            "row header": cell(kind.row_header_bytes, kind),
            "further bytes": further.get(kind.id, ""),
            "group size": cell(kind.group_size, kind),
            "codec": kind.codec,
        }
        for _, kind in sorted(types.TYPES.items())
    ]
    assert table("4. Tensor types") == expected
    assert {k.id for k in types.TYPES.values() if k.tensor_header_bytes or k.pad_blocks > 1} == {
        32,
        35,
    }
    assert types.TYPES[32].tensor_header_bytes == 32
    assert types.TYPES[35].pad_blocks == 16


def test_reserved_numbers() -> None:
    sentence = re.search(r"Numbers ([\d, and]+) are reserved", TEXT)
    assert sentence is not None
    assert set(map(int, re.findall(r"\d+", sentence[1]))) == types.RESERVED_IDS
    ruling = next(r for r in table("8. Rulings of the reader") if r["ruling"] == "`reserved-type`")
    assert set(map(int, re.findall(r"\d+", ruling["case"]))) == types.RESERVED_IDS


# ------------------------------------------------------------------ HFP4G32 and Q8F16


def test_row_header_table() -> None:
    rows = table("5.1 Row header")
    header = hfp4g32.row_header(96).tobytes()
    at = 0
    for row in rows:
        assert int(row["offset"]) == at
        at += int(row["bytes"])
    assert at == hfp4g32.ROW_HEADER_BYTES == types.HFP4G32.row_header_bytes == len(header)
    assert "`003c`" in rows[0]["value written"]
    assert header[:2].hex() == "003c"
    assert int.from_bytes(header[4:6], "little") == 96 // hfp4g32.BLOCK
    assert not any(header[2:4] + header[6:])
    assert all(row["value written"] == row["required"] for row in rows[1:])


def test_block_sizes() -> None:
    kind = types.HFP4G32
    assert (kind.block, kind.block_bytes) == (hfp4g32.BLOCK, hfp4g32.BLOCK_BYTES)
    assert hfp4g32.BLOCK_BYTES == 1 + hfp4g32.CODE_BYTES
    assert f"at most {types.MAX_ROW_BLOCKS * kind.block:,}" in TEXT


def test_row_lengths() -> None:
    rows = table("5.2 Block")
    assert len(rows) >= 12
    for row in rows:
        assert types.HFP4G32.row_bytes(int(row["K"])) == int(row["row bytes"])


def test_code_values() -> None:
    listed = re.search(r"codes 0\.\.15 meaning ([-\d.,\s]+)\.\s", TEXT)
    assert listed is not None
    values = np.array([float(word) for word in listed[1].split(",")], dtype=np.float32)
    assert values.tobytes() == E2M1.tobytes()


def test_ends_of_the_exponent_range() -> None:
    rows = {row["e"]: row for row in table("5.4 Ends of the exponent range")}
    assert list(rows) == ["0", "1", "2..252", "253", "254", "255"]
    assert f"bits {E8M0.view(np.uint32)[0]:08x}" in rows["0"]["value of the scale"]
    assert int("255") == hfp4g32.NAN_SCALE

    def counts(scale: int, code: int) -> tuple[int, int]:
        codes, scales = np.full((1, 16), code, np.uint8), np.array([[scale]], np.uint8)
        _, tiny, overflow = hfp4g32.scan(hfp4g32.repack(codes, scales))
        return tiny, overflow

    for scale in range(255):
        cell = str(scale) if str(scale) in rows else "2..252"
        words = rows[cell]["value of the scale"] + rows[cell]["rule"]
        limit = re.search(r"magnitude (\d) and above", words)
        for code in range(8):
            beyond = limit is not None and float(limit[1]) <= E2M1[code]
            assert counts(scale, code) == (scale < 2 and code > 0, beyond)


# ------------------------------------------------------------------ receipts


@pytest.mark.parametrize(
    ("number", "kind", "extra"),
    [(0, receipt.Receipt, ["format"]), (1, receipt.TensorRecord, [])],
)
def test_receipt_fields(number: int, kind: type, extra: list[str]) -> None:
    rows = table("7. Receipt", number)
    key = "field" if number == 0 else "field of a record"
    assert [row[key] for row in rows] == extra + [f.name for f in dataclasses.fields(kind)]
    for row in rows:
        digits = receipt._HEX_DIGITS.get(row[key])
        assert (row["kind"] == f"{digits} hex") == (digits is not None)
    if number == 0:
        formats = re.findall(r"`(.+?)`", rows[0]["content"])
        assert set(receipt._LACKING) <= set(formats)


def test_receipt_source_fields() -> None:
    names = [f.name for f in dataclasses.fields(receipt.SourceRecord)]
    assert f"records of {', '.join(names)} (32 hex)" in TEXT


# ------------------------------------------------------------------ decode tables


def sum_of(cell: str, experts: int) -> int:
    """The value of a cell such as ``24 + 2·E``."""
    terms = [term.replace("E", str(experts)).split("·") for term in cell.split(" + ")]
    return sum(math.prod(map(int, factors)) for factors in terms)


def words_of(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


def test_rocmfpx_object() -> None:
    rows = {row["key"]: row for row in table("3.3 The `rocmfpx` object")}
    assert list(rows) == sorted(rows)
    written = codings.rocmfpx_metadata(
        {expert_name(0, 0, "w2"): 105, expert_name(0, 1, "w2"): 102, "a": 107},
        calibration="imatrix",
        variant_107="dual",
        fp6_code32="zero",
    )
    assert rows.keys() == written.keys()
    assert rows["spec"]["content"] == str(codings.SPEC)
    assert words_of(rows["calibration"]["content"]) == codings.CALIBRATIONS
    for type_id, (key, words) in codings.VARIANTS.items():
        assert words_of(rows[key]["content"]) == words
        assert rows[key]["needed"] == f"with type {type_id}"
    (repair,) = written["repairs"]
    assert words_of(rows["repairs"]["content"]) == (
        "mix_tables",
        "count",
        "kind",
        codings.REPAIR,
        "table",
    )
    assert repair.keys() == {"count", "kind", "table"}
    assert f"{len(written['mix_index_sha256'])} hex" == rows["mix_index_sha256"]["kind"]


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("11.1 P4MIX entry (type 105)", tables.P4MIX), ("11.2 GUMIX entry (type 106)", tables.GUMIX)],
)
def test_entry_fields(heading: str, kind: tables.TableKind) -> None:
    rows = table(heading)
    fixed = [row for row in rows if row["bytes"].isdigit()]
    surface = ["surface"] if kind.surface else []
    assert [row["field"] for row in fixed] == [
        "layer",
        *surface,
        "experts",
        "out",
        "in",
        "books",
        "levels",
    ]
    rotation = ["rotation[E]"] if kind.rotation else []
    books = f"books[E][{tables.BOOKS}][{kind.levels}]"
    assert [row["field"] for row in rows[len(fixed) :]] == ["mode[E]", *rotation, books]
    for experts in (1, 2, 256):
        at = 0
        for row in rows:
            assert sum_of(row["offset"], experts) == at
            at += sum_of(row["bytes"], experts)
        assert at == kind.entry_bytes(experts)
    rules = {row["field"]: row["rule"] for row in rows}
    assert f"multiple of {kind.type.row_multiple}, at most {tables.MAX_DIM}" in rules["in"]
    assert rules["out"].endswith(f"1 to {tables.MAX_DIM}")
    assert rules["experts"] == f"E, 1 to {tables.MAX_EXPERTS}"
    assert (rules["books"], rules["levels"]) == (str(tables.BOOKS), f"K = {kind.levels}")
    assert rules["mode[E]"] == f"0 or {tables.MAX_MODE}"
    if kind.surface:
        listed = ", ".join(f"{n} for {word}" for n, word in enumerate(tables.SURFACES))
        assert rules["surface"] == listed


def test_lengths_of_tables() -> None:
    for row in table("11.2 GUMIX entry (type 106)", 1):
        found = [tables.table_bytes(type_id, int(row["experts"])) for type_id in (105, 106)]
        assert [row["P4MIX bytes"], row["GUMIX bytes"]] == [str(n) for n in found]


def test_worked_table_and_its_index() -> None:
    section = TEXT.partition("### 11.2")[2].partition("### 11.4")[0]
    blocks = section.split("```")[1::2]
    raw = bytes.fromhex(blocks[0])
    digests = re.findall(r"`([0-9a-f]{64})`", section)
    assert hashlib.sha256(raw).hexdigest() == digests[0]
    found = tables.Table.decode(raw, 105, mixed={0})
    assert (found.layer, found.out, found.in_) == (3, 64, 128)
    index = tables.mix_index({expert_name(3, 0, "w2"): 105}, {found.name: digests[0]})
    assert metadata.canonical(index).decode() == "".join(blocks[1].split())
    assert tables.mix_index_sha256(index) == digests[1]
    assert list(index[0]) == [row["key"] for row in table("11.3 The index")]


def test_table_files_of_other_tools() -> None:
    rows = {row["file"]: row for row in table("11.5 Table files of other tools")}
    magics = {
        "P4MIX": tables.P4MIX.magic,
        "GUMIX": tables.GUMIX.magic,
        "DMIX": mixfiles.DMIX_MAGIC,
    }
    assert {
        name: plain(row["magic"]).encode().ljust(8, b"\0") for name, row in rows.items()
    } == magics
    places = [tables.P4MIX.projections, tables.GUMIX.projections, mixfiles.DMIX_CLASSES]
    limits = ["the number of layers", "3 for each layer", "5 for each layer"]
    assert [row["entries"] for row in rows.values()] == [f"at most {words}" for words in limits]
    assert [len(words) for words in places] == [1, 3, 5]
    fields = table("11.5 Table files of other tools", 1)
    at = 0
    for row in fields:
        assert int(row["offset"]) == at
        at += int(row["bytes"]) if row["bytes"].isdigit() else 0
    assert at == mixfiles.DMIX_ENTRY.size
    rules = {row["field"]: row["rule"] for row in fields}
    assert rules["class"] == ", ".join(f"{n} {w}" for n, w in enumerate(mixfiles.DMIX_CLASSES))
    assert rules["slices"] == f"1 to {mixfiles.MAX_SLICES}"
    for magic in mixfiles.UNSUPPORTED:
        assert f"`{magic.rstrip(bytes(1)).decode()}`" in TEXT


def test_every_refusal_is_raised_somewhere_under_its_name() -> None:
    rows = {plain(row["refusal"]): row for row in table("12. Refusals of ROCmFPX tensors")}
    for row in rows.values():
        assert issubclass(getattr(errors, row["error"]), errors.ArtifactError)
        assert row["reason"]
    source = "".join(path.read_text("utf-8") for path in (ROOT / "artifact").rglob("*.py"))
    for name in rows:
        assert re.search(rf'[" ]{name}[":]', source), name
    crafted = {rule_id for rule_id, *_ in refusals.REFUSED.values()} - {"metadata"}
    elsewhere = {"qtype-unknown", "scale-byte", "mix-unregistered", "mix-binding"}
    assert crafted | elsewhere == rows.keys()
    assert not crafted & elsewhere


# ------------------------------------------------------------------ rulings and limits


def test_every_ruling_has_a_test_and_the_class_that_is_named() -> None:
    rows = {plain(row["ruling"]): row for row in table("8. Rulings of the reader")}
    tested = {r.name: r for r in rulings.RULINGS}
    assert rows.keys() == tested.keys() | test_hfq_rulings.ELSEWHERE.keys()
    assert not tested.keys() & test_hfq_rulings.ELSEWHERE.keys()
    for name, ruling in tested.items():
        when = " when used" if ruling.late else ""
        assert rows[name]["answer"] == ruling.error.__name__ + when
    for name, row in rows.items():
        assert row["reason"], name
        word = row["answer"].split()[0]
        known = word in ("warning", "strict", "accepted", "check") or issubclass(
            getattr(errors, word), errors.ArtifactError
        )
        assert known, name


def test_limits() -> None:
    widths = {"name_len": hfq.NAME_LENGTH.size, "n_dims": 1, "a dim": 4}
    for row in table("9. Limits"):
        value = int(row["value"])
        width = re.fullmatch(r"\(width of (.+)\)", row["constant"])
        if width:
            assert value == 2 ** (8 * widths[width[1]]) - 1
        else:
            module, _, name = row["constant"].partition(".")
            assert getattr(importlib.import_module(f"ds4q.artifact.{module}"), name) == value


def test_what_the_page_claims_of_its_own_tests() -> None:
    for name in re.findall(r"`(tests/[\w/.]+)`", TEXT):
        assert (Path(__file__).parents[2] / name).exists()
    for kind in types.TYPES.values():
        if kind.codec:
            importlib.import_module(f"ds4q.artifact.formats.{kind.codec}")


def test_mq2_lloyd_and_its_rotation() -> None:
    fields, signs, rotated = TABLES["4.3 MQ2G256Lloyd"]
    ends = [int(row["offset"]) + int(row["bytes"]) for row in fields]
    assert ends == [mq2lloyd.LEVEL_BYTES, types.MQ2_LLOYD.block_bytes]
    for row, used in zip(signs, (_fwht.BEFORE, _fwht.AFTER), strict=True):
        assert (used == _fwht.signs(int(row["seed"]))).all()
        assert np.packbits(used > 0, bitorder="little").tobytes().hex() == plain(row["bits"])
    ramp = np.arange(-128, 128, dtype=np.float32)
    (said,) = rotated
    assert [float(said[str(i)]) for i in range(8)] == _fwht.rotate(ramp)[:8].tolist()
    assert f"a multiple of {types.MQ2_LLOYD.row_multiple}" in TEXT


def test_page_is_shipped_and_names_its_sources() -> None:
    for words in ("github.com/warpfront/hipfire", "Apache-2.0", "OCP", "AMD hardware"):
        assert words in TEXT
    assert max(len(line) for line in TEXT.splitlines() if not line.startswith("|")) <= 100
