"""Owns the plan of a job: which source tensor becomes which entry of which output, at which offset.

Everything about the outputs is known here, before the first byte moves: names, types, offsets,
lengths, metadata (but for three digests of fixed length). Moves no tensor data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ds4q.artifact import hfq, writer
from ds4q.artifact.metadata import BLANK_DIGEST, canonical, front_digest, seal
from ds4q.artifact.types import HFP4G32, TYPES, UPSTREAM_K, TensorType, matrix_shape
from ds4q.quantize.audit import Audit, Unit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.deepseek4 import Part
from ds4q.quantize.errors import JobError
from ds4q.quantize.recipe import Recipe

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


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose. Two jobs with equal options and sources write equal bytes."""

    recipe: Recipe
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    draft: DraftChoice = "split"
    allow_partial: bool = False

    def document(self) -> dict[str, Any]:
        """For the journal: resuming demands the same."""
        return {
            "recipe": self.recipe.document(),
            "include": list(self.include),
            "exclude": list(self.exclude),
            "dspark": self.draft,
            "allow_partial": self.allow_partial,
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
    def row_bytes(self) -> int:
        """Packed bytes of one row; rounded down where blocks run across rows."""
        return self.entry.nbytes // self.rows


@dataclass(frozen=True, slots=True)
class Output:
    """One file to write. ``metadata`` still has blank digests; their lengths are final."""

    path: Path
    part: Part
    layout: writer.Layout
    metadata: dict[str, Any]
    tensors: tuple[PlannedTensor, ...]

    @property
    def partial(self) -> bool:
        """Whether it lacks a part of its model."""
        return bool(self.metadata["ds4q"]["partial"])

    def front(self, source_digest: str) -> bytes:
        """Header, sealed metadata, index and padding, once the source has been read."""
        ours = self.metadata["ds4q"] | {"source_digest": source_digest}
        return self.layout.front(seal(self.metadata | {"ds4q": ours}))


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
    def file_bytes(self) -> int:
        """Bytes of all outputs together."""
        return sum(output.layout.file_bytes for output in self.outputs)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all packed tensors together."""
        return sum(t.entry.nbytes for output in self.outputs for t in output.tensors)


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
    outputs = []
    warnings: list[str] = []
    for part in sorted(parts, key=lambda name: name != "trunk"):
        path = out if part == "trunk" else sidecar_path(out, part)
        partial = audit.partial or part in cut
        output, odd = _plan_output(
            path, part, parts[part], checkpoint, options, partial, fingerprint, version
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
    odd = [spec for spec in specs if spec.type_id == HFP4G32.id and spec.shape[-1] % UPSTREAM_K]
    warnings = []
    if odd:
        warnings.append(
            f"{len(odd)} tensors have rows that are no multiple of {UPSTREAM_K} "
            f"(first: {odd[0].name}, {odd[0].shape[-1]}): not loadable by upstream hipfire"
        )
    metadata = _metadata(checkpoint, specs, options.recipe)
    metadata["ds4q"] = {
        "index_xxh3": BLANK_DIGEST,
        "k256": not odd,
        "metadata_xxh3": BLANK_DIGEST,
        "partial": partial,
        "private_qt": False,
        "recipe": options.recipe.name,
        "source_digest": BLANK_SHA256,
        "source_fingerprint": fingerprint,
        "tool_version": version,
    }
    layout = writer.layout(specs, len(canonical(metadata)), arch_id=hfq.ARCH_DEEPSEEK4)
    metadata["ds4q"]["index_xxh3"] = front_digest(layout.header, layout.index)
    tensors = tuple(
        PlannedTensor(unit, entry, *matrix_shape(entry.shape))
        for unit, entry in zip(units, layout.entries, strict=True)
    )
    return Output(path, part, layout, metadata, tensors), warnings


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
    checkpoint: Checkpoint, specs: list[writer.TensorSpec], recipe: Recipe
) -> dict[str, Any]:
    """The keys that hipfire's readers know."""
    counts = Counter(TYPES[spec.type_id].name for spec in specs)
    return source_metadata(checkpoint) | {
        "has_vision": False,
        "hipfire_quant_recipe": f"ds4q-{recipe.name}",
        "hipfire_recipe_census": dict(sorted(counts.items())),
    }
