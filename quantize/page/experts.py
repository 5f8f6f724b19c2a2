"""Owns what a page shows of routed experts: cells of (layer, expert) for each part, and a summary.

Plain data only. A cell joins the tensors of one expert's part: w1 and w3, or w2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ds4q.artifact.describe import Rows
from ds4q.quantize.deepseek4 import Role, TensorInfo
from ds4q.quantize.recipe import PARTS, ExpertPart, part_of

if TYPE_CHECKING:
    from ds4q.quantize.measure import ErrorSums

MAX_CELLS = 1 << 16  # of one part; a real model has 61 x 384 at most
MAX_LAYERS = 512  # of the summary
MAX_NRMSE = 999.0  # in place of infinity, which JSON has not
EXPERT_ROLES = (
    "experts, gate and up",
    "experts, down",
    "draft's experts, gate and up",
    "draft's experts, down",
)
ABSENT = -1  # the number of a cell without tensors

Layer = tuple[bool, int]  # of the draft, number
Place = tuple[Layer, int, ExpertPart]


@dataclass(slots=True)
class _Cell:
    types: dict[str, None] = field(default_factory=dict)  # in the order of names, once each
    nbytes: int = 0
    weights: int = 0
    errors: list[ErrorSums] = field(default_factory=list)
    nrmse: float | None = None

    @property
    def type(self) -> str:
        return " + ".join(self.types)


def expert_role(info: TensorInfo) -> str:
    """What the sizes call a routed expert's tensor: one of ``EXPERT_ROLES``."""
    down = part_of(info.projection) == "down"
    return EXPERT_ROLES[2 * (info.part != "trunk") + down]


def title(part: ExpertPart) -> str:
    """A part's name for people."""
    return "down" if part == "down" else "gate and up"


def bits_per_weight(nbytes: int, weights: int) -> float | None:
    """Rounded to six digits; None where there are no weights."""
    return round(8 * nbytes / weights, 6) if weights else None


def experts(
    rows: Rows,
    infos: Iterable[TensorInfo | None],
    errors: Mapping[str, ErrorSums],
    count_weights: bool,
) -> dict[str, Any] | None:
    """Types, bytes and errors of every routed expert; None where there is none.

    ``parts`` hold ``cells[layer][expert]``, each the number of its kind (a type and a length) or
    ``ABSENT``, and ``errors`` alike or None: the root of squared error over squared source.
    ``layers`` and ``columns`` name the rows and columns that are there. ``summary`` has a row for
    each layer and part.
    """
    cells = _cells(rows, infos, errors)
    if not cells:
        return None
    layers = sorted({layer for layer, _, _ in cells})
    columns = sorted({expert for _, expert, _ in cells})
    drawn = len(layers) * len(columns) <= MAX_CELLS
    parts = [_part(part, layers, columns, cells) for part in PARTS] if drawn else []
    return {
        "layers": [_label(layer) for layer in layers],
        "columns": columns,
        "drawn": drawn,
        "bpw": _bits(cells.values()) if count_weights else None,
        "bytes": sum(cell.nbytes for cell in cells.values()),
        "parts": [part for part in parts if part["kinds"]],
        "summary": _summary(layers[:MAX_LAYERS], cells, count_weights),
        "layers_left_out": max(0, len(layers) - MAX_LAYERS),
        "measured": any(cell.nrmse is not None for cell in cells.values()),
    }


def _cells(
    rows: Rows, infos: Iterable[TensorInfo | None], errors: Mapping[str, ErrorSums]
) -> dict[Place, _Cell]:
    cells: dict[Place, _Cell] = {}
    for row, info in zip(rows, infos, strict=True):
        if info is None or info.role is not Role.EXPERT or info.layer is None:
            continue
        layer, part = (info.part != "trunk", info.layer), part_of(info.projection)
        cell = cells.setdefault((layer, info.expert or 0, part), _Cell())
        cell.types[row["type"]] = None
        cell.nbytes += row["bytes"]
        cell.weights += math.prod(row["shape"])
        if row["name"] in errors:
            cell.errors.append(errors[row["name"]])
    for cell in cells.values():
        cell.nrmse = nrmse(cell.errors)
    return cells


def _label(layer: Layer) -> str:
    return f"mtp.{layer[1]}" if layer[0] else str(layer[1])


def _bits(cells: Iterable[_Cell]) -> float | None:
    every = list(cells)
    return bits_per_weight(sum(c.nbytes for c in every), sum(c.weights for c in every))


def nrmse(errors: Iterable[ErrorSums]) -> float | None:
    """Of all tensors together, to six digits; None where none was measured."""
    every = list(errors)
    if not every:
        return None
    whole = type(every[0]).zero()  # its module imports the compiler, which inspect has no use for
    for one in every:
        whole.sums += one.sums
    return round(min(whole.nrmse, MAX_NRMSE), 6)


def _part(
    part: ExpertPart, layers: list[Layer], columns: list[int], cells: Mapping[Place, _Cell]
) -> dict[str, Any]:
    """The cells of one part as two grids; kinds in the order of their first cell."""
    kinds: dict[tuple[str, int], dict[str, Any]] = {}
    numbers: list[list[int]] = []
    measured: list[list[float | None]] = []
    for layer in layers:
        line = [cells.get((layer, expert, part)) for expert in columns]
        row: list[int] = []
        for cell in line:
            if cell is None:
                row.append(ABSENT)
                continue
            kind = kinds.setdefault(
                (cell.type, cell.nbytes),
                {"number": len(kinds), "type": cell.type, "bytes": cell.nbytes, "experts": 0},
            )
            kind["experts"] += 1
            row.append(kind["number"])
        numbers.append(row)
        measured.append([None if cell is None else cell.nrmse for cell in line])
    return {
        "part": part,
        "title": title(part),
        "kinds": list(kinds.values()),
        "cells": numbers,
        "errors": measured if any(v is not None for row in measured for v in row) else None,
    }


def _summary(
    layers: list[Layer], cells: Mapping[Place, _Cell], count_weights: bool
) -> list[dict[str, Any]]:
    by_row: dict[tuple[Layer, ExpertPart], dict[int, _Cell]] = {}
    for (layer, expert, part), cell in cells.items():
        by_row.setdefault((layer, part), {})[expert] = cell
    summary = []
    for layer in layers:
        for part in PARTS:
            held = by_row.get((layer, part))
            if held:
                row = {"layer": _label(layer), "part": part, "title": title(part)}
                summary.append(row | _summary_row(held, count_weights))
    return summary


def _summary_row(held: Mapping[int, _Cell], count_weights: bool) -> dict[str, Any]:
    types = Counter(cell.type for cell in held.values())
    errors = {e: cell.nrmse for e, cell in sorted(held.items()) if cell.nrmse is not None}
    worst = max(errors, key=lambda expert: errors[expert], default=None)
    return {
        "types": sorted(types.items(), key=lambda item: (-item[1], item[0])),
        "bytes": sum(cell.nbytes for cell in held.values()),
        "bpw": _bits(held.values()) if count_weights else None,
        "error_mean": round(sum(errors.values()) / len(errors), 6) if errors else None,
        "error_max": None if worst is None else errors[worst],
        "worst": worst,
    }
