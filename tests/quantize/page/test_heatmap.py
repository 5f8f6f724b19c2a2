"""Maps of a page: paths draw the grid, levels hold their values, colours can be told apart."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact import types
from ds4q.quantize.deepseek4 import classify
from ds4q.quantize.page import heatmap, render
from ds4q.quantize.page.experts import experts
from tests.quantize.page.pages import expert, flash, sums

F64 = npt.NDArray[np.float64]
STYLE = Path(render.__code__.co_filename).with_name("page.css").read_text("utf-8")

Grid = list[list[str | None]]
grids = st.integers(1, 9).flatmap(
    lambda width: st.lists(
        st.lists(st.sampled_from([None, "h0", "h1", "t3"]), min_size=width, max_size=width),
        min_size=1,
        max_size=6,
    )
)


def painted(paths: dict[str, str], height: int, width: int) -> Grid:
    """What a browser paints: each step is a bar of height 1."""
    grid: Grid = [[None] * width for _ in range(height)]
    for name, steps in paths.items():
        found = re.findall(r"M(\d+) (\d+)h(\d+)v1H(\d+)z", steps)
        assert "".join(f"M{x} {y}h{n}v1H{back}z" for x, y, n, back in found) == steps
        for x, y, n, back in found:
            assert x == back
            for column in range(int(x), int(x) + int(n)):
                assert grid[int(y)][column] is None, "painted twice"
                grid[int(y)][column] = name
    return grid


@given(grids)
def test_paths_paint_the_grid(grid: Grid) -> None:
    assert painted(heatmap.paths(grid), len(grid), len(grid[0])) == grid


def test_a_run_of_equal_cells_is_one_step() -> None:
    assert heatmap.paths([["h1"] * 256]) == {"h1": "M0 0h256v1H0z"}


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=30))
def test_a_value_lies_in_the_range_of_its_level(values: list[float]) -> None:
    ranges = heatmap.level_ranges(values)
    slack = 1e-9 * max(values)
    for value in values:
        low, high = ranges[heatmap.level_in(value, ranges)]
        assert low - slack <= value <= high + slack
    assert heatmap.level_in(min(values), ranges) == 0
    assert heatmap.level_in(max(values), ranges) == len(ranges) - 1


def test_few_sizes_have_levels_of_their_own_in_order() -> None:
    for n in range(1, heatmap.LEVELS + 1):
        levels = heatmap.few_levels([100.0 * i for i in range(n)] * 2)
        assert sorted(levels.values()) == list(levels.values())
        assert len(set(levels.values())) == n
        assert min(levels.values()) == 0
        if n > 1:
            assert max(levels.values()) == heatmap.LEVELS - 1


# ---------------------------------------------------------------- geometry


@pytest.mark.parametrize(("layers", "columns"), [(1, 1), (4, 16), (43, 256), (61, 384)])
def test_a_map_of_any_model_is_of_a_size_to_look_at(layers: int, columns: int) -> None:
    found = heatmap.frame([str(i) for i in range(layers)], list(range(columns)))
    width, height = found["plot"]
    assert width == columns * found["cell"][0]
    assert height == layers * found["cell"][1]
    assert width <= 1152
    assert height <= 310
    for ticks, apart in (("x_ticks", 30), ("y_ticks", 13)):
        places = [tick["at"] for tick in found[ticks]]
        assert all(b - a >= apart for a, b in itertools.pairwise(places))


def test_ticks_name_the_columns_that_are_there() -> None:
    found = heatmap.frame(["3", "mtp.0"], [5, 7, 1000])
    assert [tick["label"] for tick in found["x_ticks"]] == ["5", "1000"]
    assert [tick["label"] for tick in found["y_ticks"]] == ["3", "mtp.0"]


# ---------------------------------------------------------------- sections


def test_maps_say_what_the_cells_say() -> None:
    rows = [
        *expert(0, 0, types.ROCMFP2, types.ROCMFP3),
        *expert(0, 1, types.HFP4G32, types.ROCMFP3),
        *expert(1, 1, types.ROCMFP2, types.ROCMFP3),
    ]
    errors = {
        f"layers.{layer}.ffn.experts.{number}.w1.weight": sums(error, 100.0)
        for layer, number, error in ((0, 0, 1.0), (1, 1, 9.0))
    }
    found = experts(rows, [classify(r["name"]) for r in rows], errors, True)
    assert found is not None
    kinds, sizes, lost = heatmap.sections(found)
    assert [entry["label"] for entry in kinds["legend"]] == ["ROCmFP2", "ROCmFP3", "HFP4G32"]
    assert [entry["cells"] for entry in kinds["legend"]] == [2, 3, 1]
    fp2, fp3, fp4 = (entry["class"] for entry in kinds["legend"])
    assert painted(kinds["maps"][0]["paths"], 2, 2) == [[fp2, fp4], [None, fp2]]
    assert painted(kinds["maps"][1]["paths"], 2, 2) == [[fp3, fp3], [None, fp3]]
    assert [entry["label"] for entry in sizes["legend"]] == [
        "14,336 bytes",
        "20,480 bytes",
        "38,912 bytes",
    ]
    assert painted(sizes["maps"][0]["paths"], 2, 2) == [["h4", "h8"], [None, "h4"]]
    gate_up, down = lost["maps"]
    assert painted(gate_up["paths"], 2, 2) == [["h0", "exact"], [None, "h8"]]
    assert gate_up["legend"][0]["label"] == "0.1000 to 0.1222"
    assert gate_up["legend"][-1]["label"] == "not re-encoded"
    assert painted(down["paths"], 2, 2) == [["exact"] * 2, [None, "exact"]]
    assert len(down["legend"]) == 1


def test_many_sizes_share_levels() -> None:
    rows = [r for n in range(20) for r in expert(0, n, types.ROCMFP2, types.ROCMFP3)]
    for number, held in enumerate(rows):
        held["bytes"] += number * 32
    found = experts(rows, [classify(r["name"]) for r in rows], {}, True)
    assert found is not None
    _, sizes = heatmap.sections(found)
    assert len(sizes["legend"]) == heatmap.LEVELS
    assert sizes["legend"][0]["label"].startswith("14,368 to ")


def test_what_is_not_drawn_has_no_maps() -> None:
    assert heatmap.sections({"parts": []}) == []


# ---------------------------------------------------------------- colours


def test_every_type_of_ds4q_has_a_colour_of_its_own() -> None:
    names = [kind.name for kind in (*types.ROCMFPX, types.HFP4G32)]
    slots = heatmap.type_slots([*names, "MQ4G256", "type 99", "I8", "one more"])
    assert len({slots[name] for name in names}) == len(names)
    assert not {slots[name] for name in names} & set(heatmap.OTHER_SLOTS)
    assert slots["one more"] == slots["MQ4G256"] != slots["I8"]


def test_the_style_sheet_has_every_class_that_maps_use() -> None:
    rows, errors = flash()
    found = experts(rows, [classify(r["name"]) for r in rows], errors, True)
    assert found is not None
    classes = {"ground", "cursor"}
    for section in heatmap.sections(found):
        for drawn in section["maps"]:
            classes |= {*drawn["paths"], *(entry["class"] for entry in drawn["legend"])}
    assert {f"h{i}" for i in range(9)} | {f"t{i}" for i in range(9)} <= classes
    assert not [name for name in classes if not re.search(rf"^\.{name} \{{", STYLE, re.M)]


# Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB.
SIGHTS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
# Ottosson 2020, Oklab.
TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def oklab(colours: list[str], sight: F64) -> F64:
    """``(N, 3)`` of colours ``#rrggbb`` as that eye sees them."""
    coded = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in colours])
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ sight.T, 0, 1)
    lab: F64 = np.cbrt(seen @ TO_CONES.T) @ TO_LAB.T
    return lab


def colours(letter: str, count: int) -> list[list[str]]:
    """Values of --t0, --t1 ... in the style sheet: light mode, then dark mode where it differs."""
    found = re.findall(rf"--{letter}(\d+): (#[0-9a-f]{{6}});", STYLE)
    modes = [found[:count], found[count:]] if len(found) >= 2 * count else [found[:count]]
    assert all([int(n) for n, _ in mode] == list(range(count)) for mode in modes)
    return [[colour for _, colour in mode] for mode in modes]


@pytest.mark.parametrize("sight", SIGHTS)
def test_types_can_be_told_apart_by_any_eye(sight: str) -> None:
    (mode,) = colours("t", 12)
    lab = oklab(mode[:9], SIGHTS[sight])
    apart = [float(np.linalg.norm(a - b)) for a, b in itertools.combinations(lab, 2)]
    assert min(apart) > 0.13


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("letter", ["b", "e"])
def test_more_is_darker_on_light_ground_and_lighter_on_dark(letter: str, sight: str) -> None:
    light, dark = colours(letter, heatmap.LEVELS)
    for mode, sign in ((light, -1), (dark, 1)):
        steps = sign * np.diff(oklab(mode, SIGHTS[sight])[:, 0])
        assert steps.min() > 0.02
