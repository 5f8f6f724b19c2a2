"""Owns the plan of a job: which source tensor becomes which entry of which output, at which offset.

Everything about the outputs is known here, before the first byte moves: names, types, offsets,
lengths, metadata (but for three digests of fixed length). Moves no tensor data.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ds4q.artifact import hfq, writer
from ds4q.artifact.codings import rocmfpx_metadata
from ds4q.artifact.formats import MixRow
from ds4q.artifact.metadata import BLANK_DIGEST, canonical, front_digest, seal
from ds4q.artifact.tables import KINDS, Table, table_bytes, table_name
from ds4q.artifact.types import (
    HFP4G32,
    MIXED,
    RAW,
    ROCMFP2_MIX,
    ROCMFP3_MIX,
    ROCMFPX,
    TYPES,
    UPSTREAM_K,
    TensorType,
    matrix_shape,
)
from ds4q.quantize.audit import Audit, Unit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.deepseek4 import Part, Role, TensorInfo
from ds4q.quantize.encoding import KEY, Encoding, encoding_in
from ds4q.quantize.errors import JobError
from ds4q.quantize.recipe import RECIPES, Recipe

if TYPE_CHECKING:
    from ds4q.quantize.imatrix import Imatrix

DraftChoice = Literal["split", "keep", "drop"]
BLANK_SHA256 = " " * 64
DROPPED = "draft dropped"


class FilterError(JobError):
    """An include or exclude prefix that does not do what it says."""

    rule = "prefix matches no tensor"
    cure = (
        "prefixes are literal beginnings of tensor names; list them with 'ds4q inspect --tensors'"
    )


class AccountingError(JobError):
    """A source tensor that would neither be written nor listed as left out."""

    rule = "tensor is neither planned nor skipped"
    cure = "this is a bug in ds4q: please report it"


def importance_of(imatrix: Imatrix | None, info: TensorInfo) -> npt.NDArray[np.float32] | None:
    """What an imatrix says of the columns of a routed expert's matrix; None of anything else."""
    if imatrix is None or info.layer is None or info.expert is None:
        return None
    return imatrix.importance(info.layer, info.expert, info.projection or "")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose. Two jobs with equal options and sources write equal bytes.

    ``allow_saturation`` accepts tensors beyond the range of their types; it changes no byte.
    """

    recipe: Recipe
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    draft: DraftChoice = "split"
    allow_partial: bool = False
    imatrix: Imatrix | None = None
    allow_saturation: bool = False

    def importance(self, info: TensorInfo) -> npt.NDArray[np.float32] | None:
        """What the columns of a routed expert's matrix weigh; None weighs all alike."""
        return importance_of(self.imatrix, info)

    def document(self) -> dict[str, Any]:
        """For the journal: resuming demands the same."""
        return {
            "recipe": self.recipe.document(),
            "include": list(self.include),
            "exclude": list(self.exclude),
            "dspark": self.draft,
            "allow_partial": self.allow_partial,
            "imatrix": "" if self.imatrix is None else self.imatrix.sha256,
        }


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One source unit and its place in an output. ``rows`` x ``k`` are the logical 2-D sizes."""

    unit: Unit
    entry: hfq.TensorEntry
    rows: int
    k: int

    @property
    def target(self) -> TensorType:
        return TYPES[self.entry.type_id]

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Offset in the file and length of packed rows, as ``row_runs`` cuts them."""
        start, nbytes = self.target.span(first, count, self.k)
        return self.entry.offset + start, nbytes

    @property
    def is_routed_expert(self) -> bool:
        """Whether it counts for the bits per expert weight: a trunk's routed expert."""
        return self.unit.info.role is Role.EXPERT

    @property
    def row_bytes(self) -> int:
        """Packed bytes of one row; rounded down where blocks run across rows."""
        return self.entry.nbytes // self.rows


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """A decode table and its place in an output: books of all experts of one layer and projection.

    ``members`` are (expert, number of its tensor in the output's ``tensors``).
    """

    entry: hfq.TensorEntry
    layer: int
    projection: str
    kind: TensorType
    experts: int
    shape: tuple[int, int]
    members: tuple[tuple[int, int], ...]

    def payload(self, rows: Mapping[int, MixRow]) -> bytes:
        """The payload, once the books of every member are known."""
        every = tuple(rows.get(expert) for expert in range(self.experts))
        kind = KINDS[self.kind.id].name
        return Table(kind, self.layer, self.projection, *self.shape, every).encode()


@dataclass(frozen=True, slots=True)
class Output:
    """One file to write. ``metadata`` still has blank digests; their lengths are final."""

    path: Path
    part: Part
    layout: writer.Layout
    metadata: dict[str, Any]
    tensors: tuple[PlannedTensor, ...]
    tables: tuple[PlannedTable, ...] = ()

    @property
    def partial(self) -> bool:
        """Whether it lacks a part of its model."""
        return bool(self.metadata["ds4q"]["partial"])

    def sealed(self, source_digest: str, tables: Sequence[tuple[str, int]] = ()) -> bytes:
        """The sealed metadata, once the source has been read.

        ``tables`` gives SHA-256 and repaired levels of each of ``tables``, in their order.
        """
        ours = self.metadata["ds4q"] | {"source_digest": source_digest}
        metadata = self.metadata | {"ds4q": ours}
        if self.tables:
            told = self.metadata["rocmfpx"]
            found = dict(zip((t.entry.name for t in self.tables), tables, strict=True))
            metadata["rocmfpx"] = rocmfpx_metadata(
                {entry.name: entry.type_id for entry in self.layout.entries},
                calibration=told["calibration"],
                variant_107=told.get("variant_107", ""),
                fp6_code32=told.get("fp6_code32", ""),
                digests={name: sha256 for name, (sha256, _) in found.items()},
                repairs={name: repairs for name, (_, repairs) in found.items()},
            )
        return seal(metadata)


@dataclass(frozen=True, slots=True)
class Plan:
    """All outputs of a job, the trunk first, and what of the source is left out and why."""

    outputs: tuple[Output, ...]
    skipped: tuple[tuple[str, str], ...]
    fingerprint: str
    options: Options
    warnings: tuple[str, ...]
    source_bytes: int

    @property
    def partial(self) -> bool:
        """Whether any output lacks a part of its model."""
        return any(output.partial for output in self.outputs)

    @property
    def lossless(self) -> bool:
        """Whether every value of the source survives."""
        packed = any(o.metadata["ds4q"]["private_qt"] for o in self.outputs)
        return self.options.recipe.exact_dense and not packed

    @property
    def file_bytes(self) -> int:
        """Bytes of all outputs together."""
        return sum(output.layout.file_bytes for output in self.outputs)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all packed tensors together."""
        return sum(t.entry.nbytes for output in self.outputs for t in output.tensors)

    @property
    def trunk(self) -> Output:
        """The output that the job is named after."""
        return self.outputs[0]


def sidecar_path(trunk: Path, part: Part) -> Path:
    """``<stem>-dspark.<ext>`` or ``<stem>-mtp.<ext>`` beside the trunk."""
    return trunk.with_name(f"{trunk.stem}-{part}{trunk.suffix}")


def make_plan(
    checkpoint: Checkpoint, audit: Audit, out: Path, options: Options, version: str
) -> Plan:
    """Plan every output of a job.

    Parameters
    ----------
    out : path of the trunk artifact; sidecars are placed beside it
    version : tool version, recorded in metadata
    """
    kept, left_out = _select(audit.units, options)
    parts: dict[Part, list[Unit]] = {}
    for unit in kept:
        parts.setdefault(_part(unit, options), []).append(unit)
    if "trunk" not in parts:
        raise JobError(
            "no tensor of the trunk is left",
            remedy="relax --include-prefix and --exclude-prefix, or keep the draft in the "
            "trunk file with --dspark keep",
        )
    cut = {_part(unit, options) for unit, why in left_out if why != DROPPED}
    skipped = [(name, why) for unit, why in left_out for name in _source_names(unit)]
    skipped += [(t.name, "integer tensor of unknown name") for t in audit.extra]
    lost = checkpoint.tensors.keys() - {name for unit in kept for name in _source_names(unit)}
    lost -= {name for name, _ in skipped}
    if lost:
        raise AccountingError(path=checkpoint.folder, tensor=min(lost))
    fingerprint = checkpoint.fingerprint()
    encoding = encoding_in(checkpoint.folder)
    outputs = []
    warnings = [] if encoding is None else list(encoding.notes)
    for part in sorted(parts, key=lambda name: name != "trunk"):
        path = out if part == "trunk" else sidecar_path(out, part)
        partial = audit.partial or part in cut
        output, odd = _plan_output(
            path,
            part,
            parts[part],
            checkpoint,
            options,
            partial,
            fingerprint,
            version,
            audit.dims.experts,
            encoding,
        )
        outputs.append(output)
        warnings += odd
    return Plan(
        tuple(outputs),
        tuple(skipped),
        fingerprint,
        options,
        tuple(warnings),
        sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
    )


def _part(unit: Unit, options: Options) -> Part:
    """The file that ``unit`` goes to, or would go to."""
    return "trunk" if options.draft == "keep" else unit.info.part


def _source_names(unit: Unit) -> list[str]:
    return [tensor.name for tensor in unit.tensors]


def _select(units: Sequence[Unit], options: Options) -> tuple[list[Unit], list[tuple[Unit, str]]]:
    """Include first, then exclude; every unit is kept or left out with a reason."""
    unused = Counter({prefix: 0 for prefix in (*options.include, *options.exclude)})
    kept: list[Unit] = []
    left_out: list[tuple[Unit, str]] = []
    for unit in units:
        name = unit.weight.name
        included = [p for p in options.include if name.startswith(p)]
        excluded = [p for p in options.exclude if name.startswith(p)]
        unused.update(included + excluded)
        if options.include and not included:
            why = "not included"
        elif excluded:
            why = f"excluded by prefix {excluded[0]}"
        elif options.draft == "drop" and unit.info.part != "trunk":
            why = DROPPED
        else:
            kept.append(unit)
            continue
        left_out.append((unit, why))
    idle = [prefix for prefix, uses in unused.items() if not uses]
    if idle:
        raise FilterError(found=repr(idle[0]))
    return kept, left_out


def _plan_output(
    path: Path,
    part: Part,
    units: list[Unit],
    checkpoint: Checkpoint,
    options: Options,
    partial: bool,
    fingerprint: str,
    version: str,
    experts: int | None,
    encoding: Encoding | None,
) -> tuple[Output, list[str]]:
    units = sorted(units, key=lambda unit: unit.weight.name.encode("utf-8"))
    specs = [
        writer.TensorSpec(
            unit.weight.name,
            options.recipe.type_for(unit.info, unit.kind).id,
            unit.info.logical_shape,
        )
        for unit in units
    ]
    tables = _tables(units, specs, experts)
    specs = sorted([*specs, *(t.spec for t in tables)], key=lambda spec: spec.name.encode("utf-8"))
    odd = [spec for spec in specs if spec.type_id == HFP4G32.id and spec.shape[-1] % UPSTREAM_K]
    warnings = []
    if odd:
        warnings.append(
            f"{len(odd)} tensors have rows that are no multiple of {UPSTREAM_K} "
            f"(first: {odd[0].name}, {odd[0].shape[-1]}): not loadable by upstream hipfire"
        )
    metadata = _metadata(checkpoint, specs, options)
    metadata["ds4q"] |= {
        "k256": not odd,
        "partial": partial,
        "source_fingerprint": fingerprint,
        "tool_version": version,
    }
    if encoding is not None:
        metadata["ds4q"][KEY] = encoding.document()
    layout = writer.layout(specs, len(canonical(metadata)), arch_id=hfq.ARCH_DEEPSEEK4)
    metadata["ds4q"]["index_xxh3"] = front_digest(layout.header, layout.index)
    entries = {entry.name: entry for entry in layout.entries}
    tensors = tuple(
        PlannedTensor(unit, entries[unit.name], *matrix_shape(entries[unit.name].shape))
        for unit in units
    )
    planned = tuple(table.at(entries[table.spec.name]) for table in tables)
    return Output(path, part, layout, metadata, tensors, planned), warnings


@dataclass(frozen=True, slots=True)
class _Table:
    """A decode table before it has a place."""

    spec: writer.TensorSpec
    layer: int
    projection: str
    kind: TensorType
    experts: int
    shape: tuple[int, int]
    members: tuple[tuple[int, int], ...]

    def at(self, entry: hfq.TensorEntry) -> PlannedTable:
        return PlannedTable(
            entry,
            self.layer,
            self.projection,
            self.kind,
            self.experts,
            self.shape,
            self.members,
        )


def _tables(units: list[Unit], specs: list[writer.TensorSpec], experts: int | None) -> list[_Table]:
    """One table for each (layer, projection) with an expert of a mixed type.

    Raises ``JobError`` where one projection of a layer would hold both mixed types.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for number, (unit, spec) in enumerate(zip(units, specs, strict=True)):
        info = unit.info
        if TYPES[spec.type_id] in MIXED and info.layer is not None and info.projection:
            groups.setdefault((info.layer, info.projection), []).append(number)
    tables = []
    for (layer, projection), numbers in sorted(groups.items()):
        members = tuple((units[number].info.expert or 0, number) for number in numbers)
        kinds = {specs[number].type_id for number in numbers}
        if len(kinds) > 1:
            raise JobError(
                "experts of one layer and projection have both mixed types",
                tensor=specs[numbers[0]].name,
                expected=f"{ROCMFP3_MIX.name} or {ROCMFP2_MIX.name} in all of them",
                remedy="change the recipe",
            )
        kind = TYPES[kinds.pop()]
        total = experts or 1 + max(expert for expert, _ in members)
        name = table_name(layer, projection)
        spec = writer.TensorSpec(name, RAW.id, (table_bytes(kind.id, total),))
        rows, k = specs[numbers[0]].shape
        tables.append(_Table(spec, layer, projection, kind, total, (rows, k), members))
    return tables


def source_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """What an artifact's metadata takes verbatim from the checkpoint."""
    texts = checkpoint.texts
    tokenizer_config = texts.tokenizer_config
    if texts.chat_template is not None and "chat_template" not in (tokenizer_config or {}):
        tokenizer_config = (tokenizer_config or {}) | {"chat_template": texts.chat_template}
    return {
        "architecture": checkpoint.config.get("model_type", "deepseek_v4"),
        "config": checkpoint.config,
        "generation_config": texts.generation_config,
        "tokenizer": "{}" if texts.tokenizer is None else texts.tokenizer,
        "tokenizer_config": tokenizer_config,
    }


def _metadata(
    checkpoint: Checkpoint, specs: list[writer.TensorSpec], options: Options
) -> dict[str, Any]:
    """All keys: hipfire's, our own with blank digests, and ``rocmfpx`` where its types are used."""
    recipe = options.recipe
    kinds = {TYPES[spec.type_id] for spec in specs}
    counts = Counter(TYPES[spec.type_id].name for spec in specs)
    ours = {
        "index_xxh3": BLANK_DIGEST,
        "metadata_xxh3": BLANK_DIGEST,
        "private_qt": not kinds.isdisjoint(ROCMFPX),
        "recipe": recipe.name,
        "source_digest": BLANK_SHA256,
    }
    metadata = source_metadata(checkpoint) | {
        "ds4q": ours,
        "has_vision": False,
        "hipfire_quant_recipe": f"ds4q-{recipe.name}",
        "hipfire_recipe_census": dict(sorted(counts.items())),
    }
    if ours["private_qt"]:
        if options.imatrix is not None:
            ours["imatrix_sha256"] = options.imatrix.sha256
        metadata["rocmfpx"] = rocmfpx_metadata(
            {spec.name: spec.type_id for spec in specs},
            calibration="absmax" if options.imatrix is None else "imatrix",
            variant_107=recipe.variant_107,
            fp6_code32=recipe.fp6_code32,
        )
    if RECIPES.get(recipe.name) != recipe:
        ours["recipe_sha256"] = hashlib.sha256(canonical(recipe.document())).hexdigest()
    return metadata
