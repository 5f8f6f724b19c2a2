"""Owns the planned recipe: types of experts measured, then chosen for a target size, and why.

What each type costs is ``pilot.py``'s and ``losses.py``'s, how bytes are spent ``spend.py``'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact.tables import table_bytes
from ds4q.quantize.audit import Audit, Unit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.errors import JobError
from ds4q.quantize.grid import ExpertDims, TypeGrid
from ds4q.quantize.imatrix import Imatrix
from ds4q.quantize.losses import LOSSLESS, MIXED_WORDS, SAMPLE_WEIGHTS, WORDS, Meter
from ds4q.quantize.pilot import Measured, measure
from ds4q.quantize.recipe import EXPERT_TYPES, PARTS, Recipe
from ds4q.quantize.rules import BUDGET
from ds4q.quantize.ruletext import recipe_text
from ds4q.quantize.spend import Choice, Spender, Spent, Step

I64 = npt.NDArray[np.int64]
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]

INDEX_ROW_BYTES = 48  # about what the metadata says of a tensor with a decode table
MAX_ROUNDS = 8  # of comparing a plan with the file it leads to


class TargetSizeError(JobError):
    """No choice of types is as small as the target."""

    rule = "target is below the smallest possible size"
    cure = "raise the target"


@dataclass(frozen=True, slots=True)
class Target:
    """What was asked for: bits per routed expert weight, or bytes of the whole trunk file."""

    bpw: float | None
    nbytes: int | None

    def __str__(self) -> str:
        return f"{self.bpw:g} bits per weight" if self.nbytes is None else f"{self.nbytes} bytes"


@dataclass(frozen=True, slots=True, eq=False)
class BudgetPlan:
    """A plan that keeps a target.

    Attributes
    ----------
    recipe : named ``budget``
    toml : a recipe file that gives the same types
    measured : what it was chosen from
    sample_weights : that were measured of each matrix at most
    per_projection : whether all experts of a layer have one type for gate and up, one for down
    """

    recipe: Recipe
    grid: TypeGrid
    toml: str
    target: Target
    spent: Spent
    measured: Measured
    imatrix_sha256: str | None
    sample_weights: int
    per_projection: bool = False

    @property
    def payload_bytes(self) -> int:
        """Bytes of all routed expert tensors, tables left out."""
        return int(_picked(self.measured.nbytes, self.grid.codes).sum())

    @property
    def bpw(self) -> float:
        """Bits per weight of the routed experts."""
        return 8 * self.payload_bytes / self.measured.weights

    def report(self) -> dict[str, Any]:
        """What was chosen and why, as JSON.

        Losses are relative squared errors, weighted over all experts (``losses.py``); ``border`` is
        the least profitable step that was taken and the best one that was not. It comes first:
        ``outputs.is_plan`` recognizes the file by it.
        """
        losses = _picked(self.measured.losses, self.grid.codes)
        losses = np.where(np.isfinite(losses), losses, 0)  # parts that are not there
        return {
            "border": {
                "last": self._step_document(self.spent.last_step),
                "next": self._step_document(self.spent.next_step),
            },
            "target": {"bpw": self.target.bpw, "bytes": self.target.nbytes},
            "bpw_experts": self.bpw,
            "payload_bytes": self.payload_bytes,
            "loss": self.spent.loss,
            "variant_107": self.grid.variant_107 or None,
            "variants": dict(self.measured.variants),
            "imatrix_sha256": self.imatrix_sha256,
            "sample_weights": self.sample_weights,
            "per_projection": self.per_projection,
            "types": {part: self._counts(slice(None), at) for at, part in enumerate(PARTS)},
            "layers": [
                {"layer": layer}
                | {
                    part: {
                        "types": self._counts(layer, at),
                        "loss": float(losses[layer, :, at].sum()),
                    }
                    for at, part in enumerate(PARTS)
                }
                for layer in range(len(losses))
            ],
        }

    def _counts(self, layer: int | slice, part: int) -> dict[str, int]:
        there = self.measured.nbytes[layer, :, part].sum(axis=-1) > 0
        counts = np.bincount(self.grid.codes[layer, :, part][there], minlength=len(WORDS))
        return {WORDS[code]: int(counts[code]) for code in np.flatnonzero(counts)}

    def _step_document(self, step: Step | None) -> dict[str, Any] | None:
        if step is None:
            return None
        layer, part = divmod(step.group, len(PARTS))
        return {
            "layer": layer,
            "expert": None if self.per_projection else step.item,
            "part": PARTS[part],
            "type": WORDS[step.option],
            "bytes": step.nbytes,
            "loss_saved": step.saved,
            "loss_saved_per_gigabyte": 1e9 * step.rate,
        }

    def table(self) -> str:
        """The report for people: a line for each layer, then what the next step would buy."""
        report = self.report()
        lines = [
            f"budget: {self.target}; {self.bpw:.4f} bits per expert weight, "
            f"loss {self.spent.loss:.5f}"
        ]
        for entry in report["layers"]:
            parts = []
            for part in PARTS:
                types = ", ".join(f"{n} {word}" for word, n in entry[part]["types"].items())
                parts.append(f"{part} {types or '-'} ({entry[part]['loss']:.5f})")
            lines.append(f"layer {entry['layer']}: " + "; ".join(parts))
        for what, step in report["border"].items():
            if step is not None:
                whose = "all experts" if self.per_projection else f"expert {step['expert']}"
                lines.append(
                    f"{what} step: layer {step['layer']} {whose} {step['part']} "
                    f"to {step['type']}, {step['bytes']} bytes save {step['loss_saved']:.3g}"
                )
        return "\n".join(lines)


def plan_budget(
    checkpoint: Checkpoint,
    audit: Audit,
    *,
    imatrix: Imatrix | None,
    variant_107: str | None,
    target_bpw: float | None,
    target_bytes: int | None,
    file_bytes: Callable[[Recipe], int],
    threads: int,
    progress: Progress,
    units: Iterable[Unit] | None = None,
    sample_weights: int = SAMPLE_WEIGHTS,
    per_projection: bool = False,
) -> BudgetPlan:
    """Choose a type for each part of each routed expert of the trunk, within a target size.

    Deterministic: the same source, imatrix and target give the same plan, whatever ``threads``.

    Parameters
    ----------
    variant_107 : dual, affine, s40 or sign; None takes the best
    target_bpw, target_bytes : exactly one: bits per weight of the routed experts, row headers
        counted and tables not, or bytes of the whole trunk file
    file_bytes : length of the trunk file that a recipe leads to
    units : tensors that go into the artifact; None means all of ``audit``
    sample_weights : measured of one matrix at most
    per_projection : give all experts of a layer one type for gate and up, and one for down, as
        formats need that stack them in one tensor

    Raises
    ------
    TargetSizeError : the target is below the smallest possible size, which is told
    SourceError : a source value that no artifact may hold
    """
    dims = ExpertDims.of(audit)
    chosen = audit.units if units is None else units
    meter = Meter.of(checkpoint, chosen, dims, imatrix, threads, sample_weights)
    if not meter.units:
        raise JobError("no routed experts to choose types for", path=checkpoint.folder)
    with progress("measure", meter.sample_bytes()) as advance:
        measured = measure(meter, variant_107, advance)
    target = Target(target_bpw, target_bytes)
    spent, grid = _fit(measured, target, file_bytes, per_projection=per_projection)
    recipe = _recipe(grid)
    return BudgetPlan(
        recipe,
        grid,
        recipe_text(recipe, grid, f"planned for {target}"),
        target,
        spent,
        measured,
        None if imatrix is None else imatrix.sha256,
        meter.sample_weights,
        per_projection,
    )


def _spender(measured: Measured, *, with_tables: bool, per_projection: bool) -> Spender:
    """Groups are (layer, part); a group has one mixed type or none.

    Items are the group's experts, or with ``per_projection`` all of them as one.
    """
    layers, experts, parts, words = measured.losses.shape
    shape = layers * parts, experts, words
    by_group = measured.losses.transpose(0, 2, 1, 3).reshape(shape)
    sizes = measured.nbytes.transpose(0, 2, 1, 3).reshape(shape)
    if per_projection:
        there = sizes.max(axis=2, keepdims=True) > 0
        together = np.where(there, by_group, 0).sum(axis=1, keepdims=True)
        by_group = np.where(there.max(axis=1, keepdims=True), together, np.inf)
        sizes = sizes.sum(axis=1, keepdims=True)
    plain = tuple(at for at, word in enumerate(WORDS) if word not in MIXED_WORDS)
    choices = []
    for group, found in enumerate(by_group):
        some = [Choice(plain)]
        tables = 1 if PARTS[group % parts] == "down" else 2
        for word in MIXED_WORDS:
            at = WORDS.index(word)
            if np.isfinite(found[:, at]).any():
                table = table_bytes(EXPERT_TYPES[word][0].id, experts) + experts * INDEX_ROW_BYTES
                some.append(Choice((*plain, at), tables * table if with_tables else 0))
        choices.append(some)
    return Spender(by_group, sizes, choices)


def _fit(
    measured: Measured,
    target: Target,
    file_bytes: Callable[[Recipe], int],
    *,
    per_projection: bool,
) -> tuple[Spent, TypeGrid]:
    """The plan for a target."""
    with_tables = target.nbytes is not None
    spender = _spender(measured, with_tables=with_tables, per_projection=per_projection)
    least, weights = spender.smallest, measured.weights
    if target.nbytes is None:
        wanted = (target.bpw or 0.0) * weights / 8
        if not wanted >= least:
            smallest = f"at least {_rounded_up(8 * least / weights)} bits per weight"
            raise TargetSizeError(expected=smallest, found=target.bpw)
        spent = spender.spend(int(min(wanted, spender.largest)))
        return spent, _grid(spent, measured.losses)
    spent = spender.spend(least)
    best = spent, _grid(spent, measured.losses)
    least_file = file_bytes(_recipe(best[1]))
    if target.nbytes < least_file:
        bpw = _rounded_up(8 * least / weights)
        raise TargetSizeError(
            expected=f"at least {least_file} bytes ({bpw} bits per expert weight)",
            found=target.nbytes,
        )
    # What the file has beside the experts depends a little on the plan: tables, and the metadata
    # that names them. So the budget is what the last plan left over, or took too much.
    budget = min(least + target.nbytes - least_file, spender.largest)
    for _ in range(MAX_ROUNDS):
        spent = spender.spend(budget)
        grid = _grid(spent, measured.losses)
        over = file_bytes(_recipe(grid)) - target.nbytes
        if over <= 0 and spent.loss <= best[0].loss:
            best = spent, grid
        next_budget = budget - over if over > 0 else spent.nbytes - over
        next_budget = max(least, min(next_budget, spender.largest))
        if next_budget == budget:
            break
        budget = next_budget
    return best


def _rounded_up(bpw: float) -> str:
    """Four digits that, given as a target, are not too small."""
    return f"{math.ceil(1e4 * bpw) / 1e4:.4f}"


def _grid(spent: Spent, losses: npt.NDArray[np.float64]) -> TypeGrid:
    """Types by (layer, expert, part); parts that are not there follow their group or part."""
    layers, experts, parts, _ = losses.shape
    options = spent.options.reshape(layers, parts, -1).transpose(0, 2, 1)
    options = np.broadcast_to(options, (layers, experts, parts))  # one for all, or one each
    codes = np.zeros(options.shape, np.uint8)
    for part in range(parts):
        everywhere = _commonest(options[:, :, part])
        for layer in range(layers):
            row = options[layer, :, part]
            usual = _commonest(row) if (row >= 0).any() else everywhere
            codes[layer, :, part] = np.where(row >= 0, row, usual)
    return TypeGrid(WORDS, codes)


def _commonest(options: I64) -> int:
    counts = np.bincount(options[options >= 0].reshape(-1), minlength=len(WORDS))
    return int(np.argmax(counts)) if counts.any() else WORDS.index(LOSSLESS)


def _recipe(grid: TypeGrid) -> Recipe:
    return Recipe(BUDGET, experts=grid, variant_107=grid.variant_107)


def _picked(values: npt.NDArray[Any], codes: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Of ``values`` ``(layers, experts, 2, W)`` those of the types that were chosen."""
    return np.take_along_axis(values, codes[..., None].astype(np.int64), axis=3)[..., 0]
