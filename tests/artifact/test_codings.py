"""How ROCmFPX tensors are read: every refusal by its name, with the legal artifact beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.artifact.check import check_structure
from ds4q.artifact.codings import MAX_REPAIRS, VARIANTS, Codings, repairs_fit, rocmfpx_metadata
from ds4q.artifact.errors import ArtifactError, CodingError, MetadataError
from ds4q.artifact.formats import MixRow
from ds4q.artifact.hfq import Reader
from ds4q.artifact.metadata import canonical
from ds4q.artifact.report import Check
from ds4q.artifact.tables import BLANK_SHA256, mix_index_sha256
from tests.artifact.build import File, Tensor, sealed
from tests.artifact.mixed import (
    BOOKS_4,
    BOOKS_8,
    K_IN,
    LEGAL,
    OUT,
    Mixed,
    expert,
    gumix,
    item,
    p4mix,
    table,
    weight,
)
from tests.artifact.refusals import DOWN, GATE, PREFIX, REFUSED, UP, claims, swapped
from tests.checks import check_refused


def load(folder: Path, data: Mixed | File | bytes) -> Codings:
    path = write(folder, data)
    with Reader(path) as reader:
        return Codings.of(reader)


def write(folder: Path, data: Mixed | File | bytes) -> Path:
    path = folder / "x.hfq"
    data = data.file() if isinstance(data, Mixed) else data
    path.write_bytes(data if isinstance(data, bytes) else data.data())
    return path


def structure(folder: Path, data: Mixed | File | bytes) -> Check:
    check = Check("structure")
    with Reader(write(folder, data)) as reader:
        check_structure(reader, check)
    return check


# ------------------------------------------------------------------ what is read


def test_every_tensor_that_needs_a_coding_has_it(tmp_path: Path) -> None:
    codings = load(tmp_path, LEGAL)
    found = {str(t.name): codings.coding(str(t.name)) for t in LEGAL.tensors}
    gate = MixRow(1, gumix()[31:47])
    down = MixRow(1, p4mix()[30:62])
    assert found == {
        f"{PREFIX}.0.w1.weight": gate,
        f"{PREFIX}.0.w2.weight": down,
        f"{PREFIX}.0.w3.weight": gate,
        f"{PREFIX}.1.w1.weight": "dual",
        f"{PREFIX}.1.w2.weight": "zero",
        f"{PREFIX}.1.w3.weight": "dual",
    } | {f"{PREFIX}.2.{p}.weight": None for p in ("w1", "w2", "w3")} | dict.fromkeys(
        (GATE, DOWN, UP)
    )
    assert [table.name for table in codings.tables] == [GATE, DOWN, UP]
    assert codings.coding("no.such.tensor") is None


def test_codecs_decode_by_what_was_read(tmp_path: Path) -> None:
    tensors = {str(t.name): t for t in LEGAL.tensors}
    with Reader(write(tmp_path, LEGAL)) as reader:
        codings = Codings.of(reader)
        for name, entry in reader.tensors.items():
            codec = codings.codec(entry)
            assert codec.type.id == tensors[name].type_id
            assert codec.decode(reader.read(name), entry.shape).shape == entry.shape


def test_a_table_without_its_row_is_never_decoded(tmp_path: Path) -> None:
    with Reader(write(tmp_path, LEGAL)) as reader:
        entry = reader.entry(f"{PREFIX}.0.w1.weight")
        error = check_refused(
            CodingError,
            lambda: Codings(path=reader.path).codec(entry),
            path=reader.path,
            tensor=entry.name,
        )
        assert error.what.startswith("mix-unregistered: ")


def test_a_file_without_these_types_needs_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, File()) == Codings(tmp_path / "x.hfq")
    assert structure(tmp_path, File()).ok


def drop_mixed(mixed: Mixed) -> Mixed:
    kept = [t for t in mixed.tensors if t.type_id not in (105, 106, 120)]
    return mixed.but(tensors=tuple(kept), items=())


LEGAL_TOO: dict[str, Mixed] = {
    "variants": LEGAL.key("variant_107", "affine").key("fp6_code32", "neg32"),
    "sign": LEGAL.key("variant_107", "sign"),
    "a key of a later version": LEGAL.key("note", {"x": 1}),
    "no tables where no tensor is mixed": drop_mixed(LEGAL)
    .key("mix_tables", None)
    .key("mix_index_sha256", None),
    "an empty index where no tensor is mixed": drop_mixed(LEGAL),
    "nothing told of calibration and repairs": LEGAL.key("calibration", None).key("repairs", None),
    "only gate of an expert": LEGAL.tensor(".0.w3.weight")
    .tensor("w3.mix_table")
    .but(items=LEGAL.items[:2]),
    "mode 0": LEGAL.tensor("w2.mix_table", table("w2", p4mix([(0, BOOKS_8), *[(0, None)] * 2]))),
    "106 for down": LEGAL.tensor(".0.w2.weight", weight(f"{PREFIX}.0.w2.weight", 106, (OUT, K_IN)))
    .tensor("w2.mix_table", table("w2", gumix(surface=2)))
    .but(items=(LEGAL.items[0], item("w2", [0], 106), LEGAL.items[2])),
}


@pytest.mark.parametrize("name", LEGAL_TOO)
def test_legal(name: str, tmp_path: Path) -> None:
    load(tmp_path, LEGAL_TOO[name])
    check = structure(tmp_path, LEGAL_TOO[name])
    assert check.ok, check.lines()


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    rule_id, attack, tensor, words = REFUSED[name]
    kind: type[ArtifactError] = MetadataError if rule_id == "metadata" else CodingError
    error = check_refused(
        kind, lambda: load(tmp_path, attack), path=tmp_path / "x.hfq", tensor=tensor, says=[words]
    )
    assert error.what.startswith(f"{rule_id}: " if kind is CodingError else "metadata ")
    if kind is CodingError:
        assert error.tensor is not None
    check = structure(tmp_path, attack)
    told = [f for f in check.failures if f.message == error.what]
    assert [f.tensor for f in told][:1] == [error.tensor]


def test_the_refused_artifacts_differ_in_little_from_a_legal_one(tmp_path: Path) -> None:
    load(tmp_path, LEGAL)
    assert structure(tmp_path, LEGAL).lines() == []
    with Reader(write(tmp_path, LEGAL.own())) as reader:
        Codings.of(reader)
    assert structure(tmp_path, LEGAL.own()).lines() == []


OWN_TOO = [
    name
    for name, (rule_id, attack, _, _) in REFUSED.items()
    if rule_id != "shape" and not any(t.nbytes or t.type_id == 1 for t in attack.tensors)
]


@pytest.mark.parametrize("name", OWN_TOO)
def test_files_of_ds4q_are_held_to_the_same(name: str, tmp_path: Path) -> None:
    rule_id, attack, _, _ = REFUSED[name]
    ordered = attack.but(tensors=tuple(sorted(attack.tensors, key=lambda t: str(t.name))))
    check = structure(tmp_path, ordered.own())
    start = "metadata rocmfpx" if rule_id == "metadata" else f"{rule_id}: "
    message = check.failures[0].message.replace("metadata key 'rocmfpx'", "metadata rocmfpx")
    assert message.startswith(start)


def test_without_the_object(tmp_path: Path) -> None:
    bare = LEGAL.but(whole=None)
    found = {f.message.split(":")[0]: f.tensor for f in structure(tmp_path, bare).failures}
    assert found == {
        "variant-missing": f"{PREFIX}.1.w2.weight",
        "mix-index": f"{PREFIX}.0.w1.weight",
    }
    plain = Mixed((expert(0, "w2", 104),), (), whole=None)
    says = ["metadata has no object 'rocmfpx'"]
    check_refused(
        MetadataError, lambda: load(tmp_path, plain), tensor=str(plain.tensors[0].name), says=says
    )
    load(tmp_path, plain.but(whole={"spec": 1}))


def test_every_fault_is_told(tmp_path: Path) -> None:
    bad = swapped(swapped(LEGAL, DOWN, p4mix(layer=2)), UP, gumix(surface=1)[:-1])
    bad = bad.key("fp6_code32", None).tensor("w1.mix_table")
    lines = [(f.tensor, f.message.split(":")[0]) for f in structure(tmp_path, bad).failures]
    assert lines == [
        (f"{PREFIX}.1.w2.weight", "variant-missing"),
        (GATE, "mix-table-missing"),
        (DOWN, "mix-table-format"),
        (UP, "mix-table-format"),
    ]


def test_wrong_group_size_is_an_index_fault(tmp_path: Path) -> None:
    check = structure(tmp_path, claims(".2.w1.weight", group_size=0))
    assert check.lines() == [
        f"{PREFIX}.2.w1.weight, layer 3, expert 2, projection w1: "
        "wrong group size for ROCmFP3: expected 32, found 0"
    ]


def test_unknown_types_are_told_by_their_id(tmp_path: Path) -> None:
    odd = [99, 108, 119, 121, 255]
    check = structure(tmp_path, File([Tensor(f"t{n:03}", n) for n in odd]))
    assert [f.message for f in check.failures] == [
        f"qtype-unknown: unknown tensor type {n}" for n in odd
    ]


# ------------------------------------------------------------------ what verify alone refuses


@pytest.mark.parametrize(
    ("type_id", "key", "word"), [(107, "variant_107", "s40"), (102, "fp6_code32", "zero")]
)
def test_a_variant_that_no_tensor_has(type_id: int, key: str, word: str, tmp_path: Path) -> None:
    kept = tuple(t for t in LEGAL.tensors if t.type_id != type_id)
    without = LEGAL.but(tensors=kept)
    assert structure(tmp_path, without.key(key, None)).ok
    load(tmp_path, without.key(key, word))
    assert structure(tmp_path, without.key(key, word)).lines() == [
        f"metadata rocmfpx.{key} is set, but no tensor has type {type_id}: found '{word}'"
    ]
    alone = File(metadata=canonical({"rocmfpx": {"spec": 1, key: word}}))
    assert [f.found for f in structure(tmp_path, alone).failures] == [f"'{word}'"]


def test_calibration(tmp_path: Path) -> None:
    check = structure(tmp_path, LEGAL.key("calibration", "absmax"))
    assert check.ok
    assert check.notes == []  # nothing is wrong with it
    told = "absmax (lower quality than with an imatrix)"
    assert check.figures["calibration"] == told
    for form in (LEGAL.file, LEGAL.own):
        assert structure(tmp_path, form()).notes == []
    lines = structure(tmp_path, LEGAL.key("calibration", "imatrx")).lines()
    assert lines == [
        "wrong metadata rocmfpx.calibration: expected imatrix or absmax, found 'imatrx'"
    ]
    assert structure(tmp_path, LEGAL.key("calibration", None)).ok
    assert not structure(tmp_path, LEGAL.key("calibration", None).own()).ok


REPAIRS = LEGAL.document()["repairs"]
BAD_REPAIRS: list[Any] = [
    None,
    {},
    REPAIRS[:2],
    REPAIRS[::-1],
    [*REPAIRS, REPAIRS[0]],
    [*REPAIRS[:2], "0000"],
    *(
        [*REPAIRS[:2], REPAIRS[2] | change]
        for change in (
            {"count": "1"},
            {"count": "00001"},
            {"count": "-001"},
            {"count": 1234},
            {"kind": "bf16"},
            {"table": GATE},
            {"more": 1},
        )
    ),
]


@pytest.mark.parametrize("repairs", BAD_REPAIRS)
def test_repairs(repairs: Any, tmp_path: Path) -> None:
    tables = load(tmp_path, LEGAL).tables
    assert repairs_fit([*REPAIRS[:2], REPAIRS[2] | {"count": "1234"}], tables)
    assert not repairs_fit(repairs, tables)
    lines = structure(tmp_path, LEGAL.key("repairs", repairs).own()).lines()
    assert lines == ["metadata rocmfpx.repairs is not one count for each decode table"]
    assert structure(tmp_path, LEGAL.key("repairs", repairs)).ok


def test_gate_and_up_may_differ_but_it_is_said(tmp_path: Path) -> None:
    other = swapped(LEGAL, UP, gumix([(1, BOOKS_4[::-1]), (0, None), (0, None)], surface=1))
    for form in (other.file(), other.own()):
        check = structure(tmp_path, form)
        assert check.ok
        assert check.notes == ["layer 3: the rows of gate and up differ in 1 experts, the first 0"]


def test_private_types_are_declared(tmp_path: Path) -> None:
    for data, told in ((LEGAL, True), (Mixed((Tensor("a"),), (), whole=None), False)):
        own = {"k256": True}
        assert structure(tmp_path, data.own()).ok
        wrong = data.metadata()
        lied = sealed(data.tensors, ours=own | {"private_qt": not told}, metadata=wrong)
        assert structure(tmp_path, lied).lines() == [
            f"wrong ds4q.private_qt: expected {not told}, found {told}"
        ]


# ------------------------------------------------------------------ damage

METADATA = canonical(LEGAL.metadata())
TABLE_BYTES = {t.name: t for t in LEGAL.tensors if t.type_id == 120}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder whose file every example overwrites."""
    return tmp_path_factory.mktemp("codings")


@settings(max_examples=300)
@given(at=st.integers(0, len(METADATA) - 1), new=st.integers(0, 255))
def test_a_changed_byte_of_the_object_is_refused_or_changes_nothing(
    folder: Path, at: int, new: int
) -> None:
    raw = METADATA[:at] + bytes([new]) + METADATA[at + 1 :]
    expected = load(folder, LEGAL)
    try:
        found = load(folder, File(LEGAL.tensors, metadata=raw))
    except ArtifactError:
        return
    assert found == expected


@pytest.mark.parametrize("name", [GATE, DOWN, UP])
def test_a_changed_byte_of_a_table_is_refused(name: str, folder: Path) -> None:
    whole = LEGAL.file().data()
    payload = TABLE_BYTES[name].payload
    begin = whole.index(payload)
    for at in range(begin, begin + len(payload)):
        damaged = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        with pytest.raises(CodingError, match="mix-table-digest: "):
            load(folder, damaged)


# ------------------------------------------------------------------ writing

TYPES = {str(t.name): t.type_id for t in LEGAL.tensors}
PLANNED = rocmfpx_metadata(TYPES, calibration="imatrix", variant_107="dual", fp6_code32="zero")


def test_written_object_is_the_one_that_is_read() -> None:
    expected = LEGAL.document()
    digests = {i["table"]: i["sha256"] for i in expected["mix_tables"]}
    found = rocmfpx_metadata(
        TYPES,
        calibration="imatrix",
        variant_107="dual",
        fp6_code32="zero",
        digests=digests,
        repairs={DOWN: 7, GATE: MAX_REPAIRS},
    )
    assert [r["count"] for r in found["repairs"]] == ["9999", "0007", "0000"]
    assert found | {"repairs": expected["repairs"]} == expected
    assert len(canonical(found)) == len(canonical(PLANNED))


def test_planned_object_has_blanks() -> None:
    assert PLANNED["mix_index_sha256"] == BLANK_SHA256
    assert {i["sha256"] for i in PLANNED["mix_tables"]} == {BLANK_SHA256}
    some = rocmfpx_metadata(
        TYPES,
        calibration="absmax",
        variant_107="dual",
        fp6_code32="zero",
        digests={GATE: "0" * 64},
    )
    assert some["mix_index_sha256"] == BLANK_SHA256


def test_planned_object_is_not_readable(tmp_path: Path) -> None:
    check_refused(
        CodingError,
        lambda: load(tmp_path, LEGAL.but(whole=PLANNED)),
        path=tmp_path / "x.hfq",
        says=["mix-index: "],
    )
    blank = PLANNED | {"mix_index_sha256": mix_index_sha256(PLANNED["mix_tables"])}
    check_refused(
        CodingError,
        lambda: load(tmp_path, LEGAL.but(whole=blank)),
        says=["mix-index: ", "64 hex digits"],
    )


def test_only_what_is_used_is_written() -> None:
    assert rocmfpx_metadata({"a": 1, "b": 21}, calibration="absmax", variant_107="dual") == {}
    both: dict[str, Any] = {"variant_107": "s40", "fp6_code32": "neg32"}
    plain = {"calibration": "absmax", "spec": 1}
    assert rocmfpx_metadata({"a": 104}, calibration="absmax", **both) == plain
    assert rocmfpx_metadata({"a": 107}, calibration="absmax", **both) == plain | {
        "variant_107": "s40"
    }
    assert rocmfpx_metadata({"a": 102}, calibration="absmax", **both) == plain | {
        "fp6_code32": "neg32"
    }


@pytest.mark.parametrize(
    ("types", "more", "kind", "says"),
    [
        ({"a": 107}, {}, CodingError, "variant-missing: "),
        ({"a": 102}, {"variant_107": "dual"}, CodingError, "variant-missing: "),
        ({"a": 107}, {"variant_107": "zero"}, CodingError, "variant-unknown: "),
        ({"a": 104}, {"calibration": "none"}, MetadataError, "calibration"),
        ({"a": 106}, {}, CodingError, "mix-row-unmapped: "),
        (TYPES, {"repairs": {DOWN: MAX_REPAIRS + 1}}, MetadataError, "too many repaired"),
    ],
)
def test_what_cannot_be_written(
    types: dict[str, int], more: dict[str, Any], kind: type[ArtifactError], says: str
) -> None:
    words = {"variant_107": "dual", "fp6_code32": "zero"} if types is TYPES else {}
    given_words: dict[str, Any] = {"calibration": "absmax"} | words | more
    check_refused(kind, lambda: rocmfpx_metadata(types, **given_words), says=[says])


def test_every_variant_can_be_written_and_read(tmp_path: Path) -> None:
    for type_id, (key, words) in VARIANTS.items():
        for word in words:
            one = Mixed((expert(0, "w1", type_id),), ())
            name = str(one.tensors[0].name)
            told: dict[str, Any] = {"calibration": "absmax", key: word}
            document = rocmfpx_metadata({name: type_id}, **told)
            document = json.loads(canonical(document))
            assert load(tmp_path, one.but(whole=document)).coding(name) == word
