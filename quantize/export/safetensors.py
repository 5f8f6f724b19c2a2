"""Owns the export to safetensors: an artifact's tensors as the checkpoint that it came from.

Experts get back their codes and scale bytes. Dense weights come in the type that the artifact
holds them in. Reads no payload.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.metadata import canonical
from ds4q.artifact.types import BF16, F16, F32, HFP4G32, RAW, TIDI32, TYPES, matrix_shape
from ds4q.quantize.deepseek4 import TRUNK_ROWS
from ds4q.quantize.export import convert
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
from ds4q.quantize.safetensors import DTYPE_BITS, LENGTH_BYTES

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
_AS_THEY_ARE = {F16: "F16", BF16: "BF16", F32: "F32"}
_LAYER = re.compile(r"(layers|mtp)\.(\d+)\.")


class _Held(NamedTuple):
    """One tensor to write: the artifact's tensor that it comes from, and what the header says."""

    source: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def plan_safetensors(reader: Reader, name: str, *, only_experts: bool) -> ExportPlan:
    """Plan a folder of shards with what belongs beside them, or a single file.

    Parameters
    ----------
    name : of the output; one that ends in ``.safetensors`` is a single file
    only_experts : leave out all other tensors

    Raises
    ------
    ExportError : a tensor whose type the checkpoint does not have: its source is not in the file
    """
    entries = [entry for entry in reader.tensors.values() if entry.type_id != RAW.id]
    left_out: dict[str, int] = {}
    if only_experts:
        others = sum(not is_expert(entry) for entry in entries)
        left_out = {NOT_ASKED_FOR: others} if others else {}
        entries = [entry for entry in entries if is_expert(entry)]
    if not entries:
        raise ExportError("there is no tensor to export", path=reader.path)
    others_only = not only_experts and _experts_fit(entries)
    converts = {entry.name: _convert_of(entry, reader.path, others_only) for entry in entries}
    single = name.endswith(SUFFIX)
    groups: dict[tuple[int, int], list[_Held]] = {}
    for entry in entries:
        group = (0, 0) if single else _shard_of(entry.name)
        groups.setdefault(group, []).extend(_held(entry))
    shards = [sorted(groups[group], key=_order) for group in sorted(groups)]
    files: list[PlannedFile] = []
    places: dict[str, list[Place]] = {entry.name: [] for entry in entries}
    for number, held in enumerate(shards):
        file_name = name if single else f"model-{number + 1:05}-of-{len(shards):05}{SUFFIX}"
        front = _front(held)
        at = len(front)
        for tensor in held:
            places[tensor.source].append(Place(number, at, tensor.nbytes))
            at += tensor.nbytes
        files.append(PlannedFile(file_name, front, at))
    # Codes come before scales in a move, and weights are larger than their scales.
    moves = {
        source: Move(converts[source], tuple(sorted(found, key=lambda place: -place.nbytes)))
        for source, found in places.items()
    }
    tensors = tuple(Written(t.name, t.dtype, t.nbytes) for held in shards for t in held)
    if not single:
        weight_map = {
            t.name: file.name for file, held in zip(files, shards, strict=True) for t in held
        }
        total = sum(tensor.nbytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        files += [_text(INDEX, index), *_beside(reader.metadata)]
    return ExportPlan(not single, tuple(files), moves, tensors, left_out)


def _experts_fit(entries: Iterable[TensorEntry]) -> bool:
    """Whether there are experts, each of a type that the checkpoint has."""
    kinds = {TYPES[entry.type_id] for entry in entries if is_expert(entry)}
    return bool(kinds) and kinds <= {HFP4G32, *_AS_THEY_ARE}


def _convert_of(entry: TensorEntry, path: object, others_only: bool) -> Convert:
    """``others_only``: what is refused can be left out, as every expert can be exported."""
    kind = TYPES[entry.type_id]
    if kind is HFP4G32 and is_expert(entry):
        return convert.fp4_source
    if kind is TIDI32:
        return convert.wide_ids
    if kind in _AS_THEY_ARE:
        return convert.as_it_is
    if is_expert(entry):
        remedy = "export an artifact of a recipe that keeps experts as they are, as fp4"
    else:
        remedy = "export an artifact of the lossless recipe fp4"
        if others_only:
            remedy = f"give --only experts, or {remedy}"
    raise ExportError(
        f"a tensor of type {kind.name} does not hold the checkpoint's bytes",
        path=path,
        tensor=entry.name,
        remedy=remedy,
    )


def _held(entry: TensorEntry) -> list[_Held]:
    kind, name = TYPES[entry.type_id], entry.name
    if kind is not HFP4G32:
        dtype = "I64" if kind is TIDI32 else _AS_THEY_ARE[kind]
        return [_Held(name, name, dtype, entry.shape)]
    rows, k = matrix_shape(entry.shape)
    return [
        _Held(name, name, "I8", (rows, k // 2)),
        _Held(name, name.removesuffix(".weight") + ".scale", "F8_E8M0", (rows, k // 32)),
    ]


def _shard_of(name: str) -> tuple[int, int]:
    """A shard of its own for each layer and draft stage; the top level comes first."""
    found = _LAYER.match(name)
    if found is None:
        if name not in TRUNK_ROWS:
            raise ExportError("not a tensor of a checkpoint", tensor=name)
        return 0, 0
    return (1 if found[1] == "layers" else 2), int(found[2])


def _order(held: _Held) -> tuple[int, str]:
    """As safetensors' own writer: wide types first, so that each lies at a multiple of its size."""
    return -DTYPE_BITS[held.dtype], held.name


def _front(tensors: Sequence[_Held]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + tensor.nbytes
        entry = {"data_offsets": [at, end], "dtype": tensor.dtype, "shape": list(tensor.shape)}
        header[tensor.name] = entry
        at = end
    raw = canonical(header)
    raw += b" " * (-len(raw) % LENGTH_BYTES)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


def _beside(metadata: dict[str, Any]) -> Iterable[PlannedFile]:
    """The files that the artifact took from its checkpoint."""
    yield _text("config.json", metadata["config"])
    for name in ("generation_config", "tokenizer_config"):
        if metadata.get(name) is not None:
            yield _text(f"{name}.json", metadata[name])
    tokenizer = metadata.get("tokenizer", "{}")
    if tokenizer != "{}":
        raw = str(tokenizer).encode("utf-8")
        yield PlannedFile("tokenizer.json", raw, len(raw))


def _text(name: str, document: Any) -> PlannedFile:
    raw = (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
    return PlannedFile(name, raw, len(raw))
