"""Owns how an artifact's ROCmFPX tensors are to be read: the metadata object ``rocmfpx``.

Writes the object, and reads it strictly: variants, the index of decode tables, the tables. What
is not told is refused; nothing is guessed from the content. Decodes no tensor.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds4q.artifact.errors import ArtifactError, CodingError, MetadataError, PayloadSizeError
from ds4q.artifact.formats import Codec, Coding, codec_for
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.tables import (
    BLANK_SHA256,
    KINDS,
    MAX_EXPERTS,
    Index,
    Table,
    TableHead,
    expert_of,
    index_fault,
    mix_index,
    mix_index_sha256,
    refuse_table,
    table_bytes,
)
from ds4q.artifact.types import (
    RAW,
    ROCMFP2,
    ROCMFP3_MIX,
    ROCMFP6,
    ROCMFPX,
    TYPES,
    check_entry,
)

KEY = "rocmfpx"
SPEC = 1
# Type -> the key that names its variant, and the words that it may hold.
VARIANTS = {
    ROCMFP2.id: ("variant_107", ("dual", "affine", "s40", "sign")),
    ROCMFP6.id: ("fp6_code32", ("zero", "neg32")),
}
CALIBRATIONS = ("imatrix", "absmax")
REPAIR = "bf16-epsilon-v1"
MAX_REPAIRS = 9999

_COUNT = re.compile("[0-9]{4}")
_LOSSY = frozenset(kind.id for kind in ROCMFPX)
Refuse = Callable[[ArtifactError], None]


@dataclass(frozen=True, slots=True)
class Codings:
    """What the payloads of one artifact cannot be read without.

    Attributes
    ----------
    tables : its decode tables, sorted by (layer, projection)
    """

    path: object = None
    tables: tuple[Table, ...] = ()
    by_name: Mapping[str, Coding] = field(default_factory=dict)

    @classmethod
    def of(cls, reader: Reader) -> Codings:
        """Read and check all of it; reads the decode tables and no other payload.

        Raises
        ------
        CodingError : the first refusal of FORMAT.md that the artifact meets, named by its id
        MetadataError : the object ``rocmfpx`` is absent, malformed or of another spec
        """

        def refuse(error: ArtifactError) -> None:
            raise error.located(path=reader.path)

        return examine(reader, refuse)

    def coding(self, name: str) -> Coding | None:
        """What ``codec_for`` wants for this tensor; None where its type needs nothing."""
        return self.by_name.get(name)

    def codec(self, entry: TensorEntry) -> Codec:
        """The codec of a tensor of this artifact."""
        coding = self.coding(entry.name)
        return codec_for(entry.type_id, coding, path=self.path, tensor=entry.name)

    def uneven_pairs(self) -> Iterator[str]:
        """A line for each layer whose gate and up tables differ where both have a row."""
        by_place = {(table.layer, table.projection): table for table in self.tables}
        for (layer, projection), gate in by_place.items():
            up = by_place.get((layer, "w3"))
            if projection != "w1" or up is None:
                continue
            pairs = enumerate(zip(gate.rows, up.rows, strict=True))
            odd = [n for n, (a, b) in pairs if a is not None and b is not None and a != b]
            if odd:
                which = f"{len(odd)} experts, the first {odd[0]}"
                yield f"layer {layer}: the rows of gate and up differ in {which}"


def examine(reader: Reader, refuse: Refuse) -> Codings:
    """As ``Codings.of``, but every refusal goes to ``refuse``, which may return.

    What depends on something refused is not looked at, so no fault is told twice.
    """
    lossy = [e for e in reader.tensors.values() if e.type_id in _LOSSY]
    tables = [e for e in reader.tensors.values() if e.type_id == RAW.id]
    document = _document(reader, lossy + tables, refuse)
    if document is None:
        return Codings(reader.path)
    by_name: dict[str, Coding] = {}
    for type_id in VARIANTS:
        coded = [e.name for e in lossy if e.type_id == type_id]
        variant = _variant(document, type_id, coded[0], refuse) if coded else None
        if variant is not None:
            by_name |= dict.fromkeys(coded, variant)
    _check_shapes(reader, lossy, refuse)
    mixed = {e.name: e for e in lossy if e.type_id in KINDS}
    index = _index(document, mixed, tables, refuse)
    if index is None:
        return Codings(reader.path, (), by_name)
    read: list[Table] = []
    for item in index:
        try:
            table = _read_table(reader, item)
        except ArtifactError as error:
            refuse(error)
            continue
        read.append(table)
        by_name |= {name: table.row(row) for name, row in item["rows"].items() if name in mixed}
    _check_cover(index, mixed, refuse)
    return Codings(reader.path, tuple(read), by_name)


def _document(reader: Reader, entries: list[TensorEntry], refuse: Refuse) -> dict[str, Any] | None:
    """The object, empty where a later stage tells what is missed, or None if that is all."""
    if KEY not in reader.metadata:
        if not entries:
            return None
        if not any(TYPES[e.type_id].coding or e.type_id == RAW.id for e in entries):
            what = f"metadata has no object '{KEY}', but tensors of ROCmFPX types"
            refuse(MetadataError(what, tensor=entries[0].name))
        return {}
    document = reader.metadata[KEY]
    if not isinstance(document, dict):
        refuse(MetadataError(f"metadata key '{KEY}' is not an object"))
        return None
    spec = document.get("spec")
    if type(spec) is not int or spec != SPEC:
        what = f"metadata {KEY}.spec is not one that this version knows"
        refuse(MetadataError(what, expected=SPEC, found=repr(spec)))
        return None
    return document


def _variant(document: dict[str, Any], type_id: int, tensor: str, refuse: Refuse) -> str | None:
    key, words = VARIANTS[type_id]
    expected = f"{', '.join(words[:-1])} or {words[-1]}"
    if key not in document:
        what = f"metadata {KEY}.{key} does not say how {TYPES[type_id].name} is to be read"
        refuse(CodingError.of("variant-missing", what, tensor=tensor, expected=expected))
        return None
    if document[key] not in words:
        what = f"metadata {KEY}.{key} is a word that this version does not know"
        found = repr(document[key])
        refuse(
            CodingError.of("variant-unknown", what, tensor=tensor, expected=expected, found=found)
        )
        return None
    variant: str = document[key]
    return variant


def _check_shapes(reader: Reader, lossy: list[TensorEntry], refuse: Refuse) -> None:
    """Lengths and dims of every ROCmFPX tensor, and which types may stand beside each other."""
    for entry in lossy:
        name, place = entry.name, expert_of(entry.name)
        try:
            check_entry(entry.type_id, entry.shape, entry.group_size, entry.nbytes, tensor=name)
        except PayloadSizeError as error:
            values = {"expected": error.expected, "found": error.found}
            refuse(CodingError.of("shape", error.what, tensor=name, **values))
        except ArtifactError as error:
            refuse(error)
        if place is None:
            continue
        if len(entry.shape) != 2:
            what = "an expert's matrix has two dims"
            refuse(CodingError.of("shape", what, tensor=name, found=list(entry.shape)))
        if entry.type_id == ROCMFP3_MIX.id and place[2] != "w2":
            refuse(CodingError.of("shape", "type 105 is for w2 only", tensor=name))
    first: dict[int, TensorEntry] = {}
    for entry in reader.tensors.values() if lossy else ():
        layer, _, projection = expert_of(entry.name) or (0, 0, "")
        if projection == "w2" and entry.type_id in KINDS:
            other = first.setdefault(layer, entry)
            if other.type_id != entry.type_id:
                what = f"types 105 and 106 in one projection, as in {other.name}"
                refuse(CodingError.of("shape", what, tensor=entry.name))
        elif projection == "w1":
            up = reader.tensors.get(entry.name[: -len("w1.weight")] + "w3.weight")
            if up is not None and up.type_id != entry.type_id:
                what = "w1 and w3 of one expert have different types"
                values = {"expected": entry.type_id, "found": up.type_id}
                refuse(CodingError.of("shape", what, tensor=up.name, **values))


def _index(
    document: dict[str, Any],
    mixed: Mapping[str, TensorEntry],
    tables: list[TensorEntry],
    refuse: Refuse,
) -> Index | None:
    """The index of decode tables, whose digest and form are right; None where it was refused."""
    if not (document.keys() & {"mix_tables", "mix_index_sha256"} or mixed or tables):
        return []
    named = next(iter(mixed), None) or (tables[0].name if tables else None)
    index: Index = document.get("mix_tables", [])
    fault = None if "mix_tables" in document else f"metadata {KEY} has no mix_tables"
    if fault is None and document.get("mix_index_sha256") != mix_index_sha256(index):
        fault = f"mix_index_sha256 of metadata {KEY} is not the digest of mix_tables"
    fault = fault or index_fault(index)
    if fault is not None:
        refuse(CodingError.of("mix-index", fault, tensor=named))
        return None
    listed = {item["table"] for item in index}
    for entry in tables:
        if entry.name not in listed:
            what = "raw tensor that is no decode table of the index"
            refuse(CodingError.of("mix-index", what, tensor=entry.name))
    return index


def _read_table(reader: Reader, item: dict[str, Any]) -> Table:
    """The table of one item of the index, held to its digest, the config and its tensors."""
    name, type_id = item["table"], item["qtype"]
    entry = reader.tensors.get(name)
    if entry is None:
        raise CodingError.of("mix-table-missing", "the index names it", tensor=name)
    limit = table_bytes(type_id, MAX_EXPERTS)
    if entry.type_id != RAW.id or entry.shape != (entry.nbytes,) or entry.nbytes > limit:
        expected = f"type {RAW.id}, [n], n up to {limit}"
        found = f"type {entry.type_id}, {list(entry.shape)}"
        refuse_table("not a decode table", tensor=name, expected=expected, found=found)
    raw = reader.read(name).tobytes()
    digest = hashlib.sha256(raw).hexdigest()
    if digest != item["sha256"]:
        raise CodingError.of(
            "mix-table-digest",
            "the payload is not the one that the index names",
            tensor=name,
            expected=item["sha256"],
            found=digest,
        )
    head = TableHead.read(raw, KINDS[type_id], tensor=name)
    _check_head(reader, item, head)
    return Table.decode(raw, type_id, mixed=set(item["rows"].values()), tensor=name)


def _check_head(reader: Reader, item: dict[str, Any], head: TableHead) -> None:
    """The header names the table's own layer, and the sizes of the model and of its tensors."""
    config = reader.metadata.get("config")
    experts = config.get("n_routed_experts") if isinstance(config, dict) else None
    if type(experts) is not int:
        refuse_table("metadata config has no n_routed_experts to hold it to", tensor=item["table"])
    rules: list[tuple[str, object, object]] = [
        ("layer", item["layer"], head.layer),
        ("projection", item["projection"], head.projection),
        ("number of experts", experts, head.experts),
    ]
    shapes = {e.shape for n in item["rows"] if (e := reader.tensors.get(n)) is not None}
    rules += [("shape", list(shape), [head.out, head.in_]) for shape in sorted(shapes)]
    for what, expected, found in rules:
        if expected != found:
            refuse_table(
                f"table for another {what}", tensor=item["table"], expected=expected, found=found
            )
    last = max(item["rows"].values())
    if last >= head.experts:
        expected = f"rows below {head.experts}"
        refuse_table("too few rows", tensor=item["table"], expected=expected, found=last)


def _check_cover(index: Index, mixed: Mapping[str, TensorEntry], refuse: Refuse) -> None:
    """Every mixed tensor has one row, and every row a mixed tensor of its table's type."""
    mapped = {name: item["qtype"] for item in index for name in item["rows"]}
    for name, type_id in mapped.items():
        if name not in mixed or mixed[name].type_id != type_id:
            what = f"a row leads to it, but it is no tensor of type {type_id}"
            refuse(CodingError.of("mix-row-unmapped", what, tensor=name))
    for name, entry in mixed.items():
        if name not in mapped:
            what = f"a tensor of type {entry.type_id} without a row in a decode table"
            refuse(CodingError.of("mix-row-unmapped", what, tensor=name))


# ------------------------------------------------------------------ writing


def rocmfpx_metadata(
    types: Mapping[str, int],
    *,
    calibration: str,
    variant_107: str = "",
    fp6_code32: str = "",
    digests: Mapping[str, str] | None = None,
    repairs: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The metadata object of an artifact with ``types``; empty where it has no ROCmFPX tensor.

    Parameters
    ----------
    types : tensor name -> type number, of the whole artifact
    calibration : "imatrix" or "absmax"
    variant_107, fp6_code32 : written only where a tensor has the type
    digests : table name -> SHA-256 (hex) of its payload
    repairs : table name -> levels that the fit of its books had to move

    Without ``digests`` and ``repairs`` their places are blank or zero: the length of the JSON is
    final, so offsets can be planned before a book is fitted.
    """
    used = set(types.values()) & _LOSSY
    if not used:
        return {}
    if calibration not in CALIBRATIONS:
        raise MetadataError(f"{KEY}.calibration", expected=CALIBRATIONS, found=calibration)
    document: dict[str, Any] = {"calibration": calibration, "spec": SPEC}
    given = {"variant_107": variant_107, "fp6_code32": fp6_code32}
    for type_id, (key, words) in VARIANTS.items():
        if type_id in used:
            if given[key] not in words:
                rule = "variant-unknown" if given[key] else "variant-missing"
                raise CodingError.of(rule, key, expected=" or ".join(words), found=given[key])
            document[key] = given[key]
    index = mix_index(types, digests)
    if index:
        known = all(item["sha256"] != BLANK_SHA256 for item in index)
        document["mix_tables"] = index
        document["mix_index_sha256"] = mix_index_sha256(index) if known else BLANK_SHA256
        document["repairs"] = [_repair(item["table"], repairs or {}) for item in index]
    return document


def repairs_fit(repairs: Any, tables: Sequence[Table]) -> bool:
    """Whether ``repairs`` is a list that ``rocmfpx_metadata`` writes for ``tables``."""
    if not isinstance(repairs, list) or len(repairs) != len(tables):
        return False
    return all(
        isinstance(item, dict)
        and item.keys() == {"count", "kind", "table"}
        and (item["kind"], item["table"]) == (REPAIR, table.name)
        and isinstance(item["count"], str)
        and _COUNT.fullmatch(item["count"]) is not None
        for item, table in zip(repairs, tables, strict=True)
    )


def _repair(table: str, counts: Mapping[str, int]) -> dict[str, str]:
    count = counts.get(table, 0)
    if not 0 <= count <= MAX_REPAIRS:
        expected = f"at most {MAX_REPAIRS}"
        raise MetadataError(
            "too many repaired levels", tensor=table, expected=expected, found=count
        )
    return {"count": f"{count:04d}", "kind": REPAIR, "table": table}
