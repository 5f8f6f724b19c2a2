"""Owns writing types as a TOML recipe that ``rules.py`` reads back to the same types.

The text depends on the types alone: equal plans have equal files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import numpy as np

from ds4q.quantize.grid import TypeGrid
from ds4q.quantize.recipe import EXPERT_TYPES, PARTS, Recipe

Ids = tuple[int, ...]


def recipe_text(recipe: Recipe, grid: TypeGrid, description: str = "") -> str:
    """The recipe as TOML: the most common word as default, a rule for each set of the others.

    ``description`` must be printable. Experts of one word, part and set are joined over layers,
    layers and parts over experts, so that a plan of whole layers is a few lines.
    """
    counts = np.bincount(grid.codes.reshape(-1), minlength=len(grid.words))
    default = grid.words[int(np.argmax(counts))]
    lines = [f"name = {_quoted(recipe.name)}"]
    if description:
        lines.append(f"description = {_quoted(description)}")
    lines.append(f"default = {_quoted(default)}")
    if recipe.variant_107:
        lines.append(f"variant_107 = {_quoted(recipe.variant_107)}")
    lines += ["", "[dense]", f"recipe = {_quoted(recipe.dense)}"]
    for word, parts, layers, experts in _rules(grid, default):
        lines += ["", "[[rule]]", f"type = {_quoted(word)}"]
        if len(layers) < grid.codes.shape[0]:
            lines.append(f"layers = {_quoted(_ranges(layers))}")
        if len(parts) < len(PARTS):
            lines.append(f"part = {_quoted(PARTS[parts[0]])}")
        if len(experts) < grid.codes.shape[1]:
            lines.append(f"experts = {_quoted(_ranges(experts))}")
    return "\n".join(lines) + "\n"


def _rules(grid: TypeGrid, default: str) -> Iterator[tuple[str, Ids, Ids, Ids]]:
    """(word, parts, layers, experts), disjoint: what is not of the default's type and variant."""
    layers, _, parts = grid.codes.shape
    sets: dict[tuple[int, int, int], Ids] = {}  # (code, part, layer) -> experts
    for layer in range(layers):
        for part in range(parts):
            column = grid.codes[layer, :, part]
            for code in np.unique(column).tolist():
                sets[code, part, layer] = tuple(np.flatnonzero(column == code).tolist())
    by_part: dict[tuple[int, int, Ids], list[int]] = {}  # (code, part, experts) -> layers
    for (code, part, layer), experts in sorted(sets.items()):
        by_part.setdefault((code, part, experts), []).append(layer)
    joined: dict[tuple[int, Ids, Ids], list[int]] = {}  # (code, layers, experts) -> parts
    for (code, part, experts), found in by_part.items():
        joined.setdefault((code, tuple(found), experts), []).append(part)
    for (code, at, experts), both in sorted(joined.items()):
        word = grid.words[code]
        if EXPERT_TYPES[word] != EXPERT_TYPES[default]:
            yield word, tuple(both), at, experts


def _ranges(ids: Iterable[int]) -> str:
    """``"0-9,42"`` of ascending ids."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _quoted(text: str) -> str:
    """A basic string of TOML, whose escapes are JSON's for printable text."""
    return json.dumps(text, ensure_ascii=False)
