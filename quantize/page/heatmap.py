"""Owns the geometry of a page's heat maps: grids become levels, levels SVG paths and legends.

Colours are classes of the style sheet: a map follows dark mode and paper, and needs no script. One
path a level, cells of a level side by side in one step: a map of 11,008 cells takes some 100 KB.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ds4q.artifact import types

Grid = Sequence[Sequence[float | None]]

LEVELS = 9
OTHER_SLOTS = (9, 10, 11)
# By bits per weight, as the colours are by lightness.
_SLOTS = {
    kind.name: slot
    for slot, kind in enumerate(
        (
            types.ROCMFP2,
            types.ROCMFP2_MIX,
            types.ROCMFP3,
            types.ROCMFP3_MIX,
            types.ROCMFP4_FAST,
            types.HFP4G32,
            types.ROCMFP4,
            types.ROCMFP6,
            types.ROCMFP8,
        )
    )
}
PLOT_WIDTH, PLOT_HEIGHT = 1024, 258  # pixels that a large map aims at
CELL_WIDTH, CELL_HEIGHT = (3, 24), (5, 22)  # least and most
LEFT, TOP, BOTTOM, RIGHT = 44, 18, 22, 12
X_TICK_PIXELS, Y_TICK_PIXELS = 44, 13
_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def type_slots(names: Sequence[str]) -> dict[str, int]:
    """Colour of each type: the same on every page for those of ds4q, by turns for all others."""
    others = [name for name in names if name not in _SLOTS]
    turns = {name: OTHER_SLOTS[i % len(OTHER_SLOTS)] for i, name in enumerate(others)}
    return {name: _SLOTS.get(name, turns.get(name, 0)) for name in names}


def few_levels(values: Sequence[float]) -> dict[float, int]:
    """A level for each of at most ``LEVELS`` distinct values, spread over the scale by rank."""
    ranked = sorted(set(values))
    gaps = max(1, len(ranked) - 1)
    return {value: rank * (LEVELS - 1) // gaps for rank, value in enumerate(ranked)}


def level_ranges(values: Sequence[float]) -> list[tuple[float, float]]:
    """Bounds of ``LEVELS`` levels of equal width from the least value to the greatest."""
    low, high = min(values), max(values)
    if low == high:
        return [(low, high)]
    edges = [low + (high - low) * i / LEVELS for i in range(LEVELS)] + [high]
    return list(itertools.pairwise(edges))


def level_in(value: float, ranges: Sequence[tuple[float, float]]) -> int:
    """Number of the range that holds ``value``; a border belongs to the range above it."""
    low, high = ranges[0][0], ranges[-1][1]
    if high == low:
        return 0
    return min(len(ranges) - 1, int((value - low) / (high - low) * len(ranges)))


def paths(grid: Sequence[Sequence[str | None]]) -> dict[str, str]:
    """SVG path data by class, a unit square a cell; None draws nothing."""
    out: dict[str, list[str]] = {}
    for y, row in enumerate(grid):
        start = 0
        for x in range(1, len(row) + 1):
            if x < len(row) and row[x] == row[start]:
                continue
            name = row[start]
            if name is not None:
                out.setdefault(name, []).append(f"M{start} {y}h{x - start}v1H{start}z")
            start = x
    return {name: "".join(steps) for name, steps in sorted(out.items())}


def frame(layers: Sequence[str], columns: Sequence[int]) -> dict[str, Any]:
    """Sizes in pixels and ticks that all maps of a page share."""
    width = _between(PLOT_WIDTH // len(columns), CELL_WIDTH)
    height = _between(PLOT_HEIGHT // len(layers), CELL_HEIGHT)
    return {
        "cell": (width, height),
        "origin": (LEFT, TOP),
        "plot": (width * len(columns), height * len(layers)),
        "size": (
            LEFT + width * len(columns) + RIGHT,
            TOP + height * len(layers) + BOTTOM,
        ),
        "x_ticks": _ticks(columns, width, X_TICK_PIXELS, LEFT),
        "y_ticks": _ticks(layers, height, Y_TICK_PIXELS, TOP),
    }


def _between(value: int, bounds: tuple[int, int]) -> int:
    return min(max(value, bounds[0]), bounds[1])


def _ticks(
    labels: Sequence[Any], pixels: int, apart: int, origin: int
) -> list[dict[str, float | str]]:
    step = next((s for s in _STEPS if s * pixels >= apart), _STEPS[-1])
    return [
        {"at": origin + (i + 0.5) * pixels, "label": str(labels[i])}
        for i in range(0, len(labels), step)
    ]


def sections(experts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The maps of a page: of types, of bytes, and of errors where they were measured."""
    parts = experts["parts"]
    if not parts:
        return []
    made = [_types(parts), _bytes(parts)]
    if any(part["errors"] for part in parts):
        made.append(_errors(parts))
    return made


def _section(name: str, title: str, maps: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"name": name, "title": title, "maps": maps, "legend": []} | more


def _map(number: int, part: Mapping[str, Any], grid: Sequence[Sequence[str | None]]) -> Any:
    return {"part": number, "title": part["title"], "paths": paths(grid), "legend": []}


def _by_kind(part: Mapping[str, Any], names: Sequence[str]) -> list[list[str | None]]:
    """The grid of a part's cells, each the name that its kind has."""
    return [[names[n] if n >= 0 else None for n in row] for row in part["cells"]]


def _types(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for part in parts:
        for kind in part["kinds"]:
            counts[kind["type"]] = counts.get(kind["type"], 0) + kind["experts"]
    slots = type_slots(list(counts))
    maps = [
        _map(i, part, _by_kind(part, [f"t{slots[kind['type']]}" for kind in part["kinds"]]))
        for i, part in enumerate(parts)
    ]
    ranked = sorted(counts.items(), key=lambda item: (slots[item[0]], item[0]))
    legend = [{"class": f"t{slots[name]}", "label": name, "cells": count} for name, count in ranked]
    return _section("types", "Type", maps, legend=legend)


def _bytes(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts: dict[int, int] = {}
    for part in parts:
        for kind in part["kinds"]:
            counts[kind["bytes"]] = counts.get(kind["bytes"], 0) + kind["experts"]
    sizes = sorted(counts)
    if len(sizes) <= LEVELS:
        levels: Mapping[float, int] = few_levels(sizes)
        legend = [
            {
                "class": f"h{levels[size]}",
                "label": f"{size:,} bytes",
                "cells": counts[size],
            }
            for size in sizes
        ]
    else:
        ranges = level_ranges(sizes)
        levels = {size: level_in(size, ranges) for size in sizes}
        legend = [
            {"class": f"h{i}", "label": f"{low:,.0f} to {high:,.0f} bytes", "cells": None}
            for i, (low, high) in enumerate(ranges)
        ]
    maps = [
        _map(i, part, _by_kind(part, [f"h{levels[kind['bytes']]}" for kind in part["kinds"]]))
        for i, part in enumerate(parts)
    ]
    return _section("bytes", "Bytes", maps, legend=legend)


def _errors(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    maps = []
    for number, part in enumerate(parts):
        errors: Grid | None = part["errors"]
        values = [v for row in errors or () for v in row if v is not None]
        ranges = level_ranges(values) if values else []
        # A cell that is there and was not measured keeps its source's codes.
        grid = [
            [
                None if cell < 0 else "exact" if error is None else f"h{level_in(error, ranges)}"
                for cell, error in zip(cells, row, strict=True)
            ]
            for cells, row in zip(part["cells"], errors or _nothing(part), strict=True)
        ]
        drawn = _map(number, part, grid)
        drawn["legend"] = [
            {"class": f"h{i}", "label": _range(low, high), "cells": None}
            for i, (low, high) in enumerate(ranges)
        ]
        if "exact" in drawn["paths"]:
            entry = {"class": "exact", "label": "not re-encoded", "cells": None}
            drawn["legend"].append(entry)
        maps.append(drawn)
    return _section("errors", "Error", maps)


def _nothing(part: Mapping[str, Any]) -> Grid:
    return [[None] * len(row) for row in part["cells"]]


def _range(low: float, high: float) -> str:
    return f"{low:.4f}" if low == high else f"{low:.4f} to {high:.4f}"
