"""Owns the export to GGUF: which tensor of the artifact goes where, and as what. Reads no payload.

HFP4G32 becomes MXFP4, whose codes and scales are the same. All other types keep their bytes:
ROCmFPX types have one number in both formats, Q8F16 is Q8_0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ds4q.artifact.codings import VARIANTS, Codings
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.tables import expert_of, table_name
from ds4q.artifact.types import (
    BF16,
    F16,
    F32,
    HFP4G32,
    Q8F16,
    RAW,
    ROCMFPX,
    TIDI32,
    TYPES,
    TensorType,
)
from ds4q.quantize.export import convert
from ds4q.quantize.export.container import GgmlType, GgufTensor, layout
from ds4q.quantize.export.keys import mix_keys, model_keys
from ds4q.quantize.export.names import experts_name, gguf_name
from ds4q.quantize.export.plan import (
    NOT_ASKED_FOR,
    Convert,
    ExportError,
    ExportPlan,
    Move,
    Place,
    PlannedFile,
    Written,
    is_expert,
)
from ds4q.quantize.export.tokenizer import tokenizer_keys

DRAFT = "of the draft, which stays in its artifact"
MXFP4 = GgmlType(39, "MXFP4", 32, 17)
# Numbers of GGML, which are not those of HFQ: 21, HFP4G32 here, is IQ3_S there.
_TYPES: dict[TensorType, GgmlType] = {
    F32: GgmlType(0, "F32", 1, 4),
    F16: GgmlType(1, "F16", 1, 2),
    Q8F16: GgmlType(8, "Q8_0", 32, 34),
    TIDI32: GgmlType(26, "I32", 1, 4),
    BF16: GgmlType(30, "BF16", 1, 2),
    HFP4G32: MXFP4,
    **{kind: GgmlType(kind.id, kind.name, kind.block, kind.block_bytes) for kind in ROCMFPX},
}
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One GGUF tensor and what it is made of: one tensor, or all experts in the order of ids."""

    tensor: GgufTensor
    entries: tuple[TensorEntry, ...]


def plan_gguf(
    reader: Reader, name: str, *, only_experts: bool, variants: dict[int, str | None]
) -> ExportPlan:
    """Plan one GGUF file.

    Parameters
    ----------
    name : of the output
    only_experts : leave out all other tensors, and mark the file as no whole model
    variants : type 107 or 102 -> how the runtime that will read the file takes it. A GGUF file
        does not say, so an artifact with such tensors is exported only where it means the same.

    Raises
    ------
    ExportError : a draft, a part of a model, a tensor or variant that does not fit GGUF, experts
        of one (layer, projection) that differ in type, naming the layer and the types
    """
    codings = Codings.of(reader)
    config = reader.metadata["config"]
    keys, dims = model_keys(config, reader.path)
    _check_variants(reader, codings, variants)
    entries = [entry for entry in reader.tensors.values() if entry.type_id != RAW.id]
    chosen = [entry for entry in entries if gguf_name(entry.name) is not None]
    left_out = {DRAFT: len(entries) - len(chosen)}
    if not chosen:
        remedy = "export the artifact of the model that it belongs to"
        raise ExportError("this is the draft part of a model", path=reader.path, remedy=remedy)
    if only_experts:
        left_out[NOT_ASKED_FOR] = sum(not is_expert(entry) for entry in chosen)
        chosen = [entry for entry in chosen if is_expert(entry)]
    elif (reader.metadata.get("ds4q") or {}).get("partial"):
        remedy = "quantize the whole model"
        experts = [entry for entry in chosen if is_expert(entry)]
        with suppress(ExportError):
            if _wanted(experts, dims.experts or 0, reader.path):
                remedy += ", or give --only experts"
        raise ExportError("this is only a part of a model", path=reader.path, remedy=remedy)
    wanted = _wanted(chosen, dims.experts or 0, reader.path)
    warnings: list[str] = []
    if not only_experts:
        words, warnings = tokenizer_keys(reader.metadata, config, reader.path)
        keys |= words
    keys |= mix_keys(reader.metadata, codings.tables, only_experts=only_experts)
    front, starts, nbytes = layout(keys, [each.tensor for each in wanted])
    moves = {}
    for each, start in zip(wanted, starts, strict=True):
        part = each.tensor.nbytes // len(each.entries)
        for number, entry in enumerate(each.entries):
            place = Place(0, start + number * part, part)
            moves[entry.name] = Move(_convert_of(entry), (place,))
    return ExportPlan(
        False,
        (PlannedFile(name, front, nbytes),),
        moves,
        tuple(Written(t.tensor.name, t.tensor.type.name, t.tensor.nbytes) for t in wanted),
        {why: count for why, count in left_out.items() if count},
        tuple(warnings),
    )


def _check_variants(reader: Reader, codings: Codings, variants: dict[int, str | None]) -> None:
    used = {e.type_id: e.name for e in reader.tensors.values() if e.type_id in VARIANTS}
    for type_id, given in variants.items():
        kind, option = TYPES[type_id].name, "--" + VARIANTS[type_id][0].replace("_", "-")
        ours = codings.coding(used[type_id]) if type_id in used else None
        if given == ours:
            continue
        if ours is None:
            remedy = f"leave out {option}"
            raise ExportError(f"the artifact has no {kind} tensor", path=reader.path, remedy=remedy)
        what = f"a GGUF file does not say how its {kind} tensors are to be read"
        if given is None:
            remedy = f"if the runtime that will read it takes them as {ours}, give {option} {ours}"
            raise ExportError(what, path=reader.path, found=ours, remedy=remedy)
        remedy = f"quantize again with the variant {given}: a variant is never relabelled"
        raise ExportError(what, path=reader.path, expected=given, found=ours, remedy=remedy)


def _wanted(entries: Sequence[TensorEntry], experts: int, path: object) -> list[_Wanted]:
    """The GGUF tensors, in the order of the file: top level, then layer by layer."""
    groups: dict[tuple[int, str], dict[int, TensorEntry]] = {}
    found: list[_Wanted] = []
    for entry in entries:
        place = expert_of(entry.name)
        if place is not None:
            groups.setdefault((place[0], place[2]), {})[place[1]] = entry
        else:
            found.append(_Wanted(_tensor(entry, str(gguf_name(entry.name)), path), (entry,)))
    for (layer, projection), held in groups.items():
        lacking = [expert for expert in range(experts) if expert not in held]
        stacked = table_name(layer, projection).replace("mix_table", "weight")
        if lacking:
            what = f"layer {layer} lacks {len(lacking)} of {experts} experts, {lacking[0]} for one"
            raise ExportError(what, path=path, tensor=stacked)
        members = tuple(held[expert] for expert in range(experts))
        _check_alike(members, layer, projection, path)
        one = _tensor(members[0], experts_name(layer, projection), path)
        found.append(_Wanted(GgufTensor(one.name, one.type, (experts, *one.shape)), members))
    return sorted(found, key=lambda each: _order(each.tensor.name))


def _check_alike(members: Sequence[TensorEntry], layer: int, projection: str, path: object) -> None:
    counts = Counter(TYPES[entry.type_id].name for entry in members)
    if len(counts) > 1:
        types = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        raise ExportError(
            f"layer {layer}: its experts' {projection} differ in type, and GGUF has one for all",
            path=path,
            found=types,
            remedy="quantize with --recipe budget --per-projection, or with a recipe whose rules "
            "do not select experts",
        )


def _tensor(entry: TensorEntry, name: str, path: object) -> GgufTensor:
    kind = TYPES[entry.type_id]
    target = _TYPES.get(kind)
    if target is None:
        what = f"GGUF has no type for {kind.name}"
        raise ExportError(what, path=path, tensor=entry.name)
    if not entry.shape or entry.shape[-1] % target.block:
        expected = f"rows of a multiple of {target.block}"
        what = f"{target.name} cannot hold this tensor"
        found = list(entry.shape)
        raise ExportError(what, path=path, tensor=entry.name, expected=expected, found=found)
    return GgufTensor(name, target, entry.shape)


def _convert_of(entry: TensorEntry) -> Convert:
    return convert.mxfp4_blocks if TYPES[entry.type_id] is HFP4G32 else convert.as_it_is


def _order(name: str) -> tuple[int, str]:
    found = _BLOCK.match(name)
    return (-1 if found is None else int(found[1])), name
