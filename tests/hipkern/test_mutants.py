"""Kernels with a barrier taken out: the self-test must see each of them.

A barrier that no digest misses is either not needed, or guards what no case of the self-test
reaches.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ds4q.hipkern.driver import Device
from ds4q.hipkern.errors import HipError
from ds4q.hipkern.kernels import Kernels
from ds4q.hipkern.library import open_library
from ds4q.hipkern.selftest import Case, cases, run
from ds4q.hipkern.sim.control import Control
from ds4q.hipkern.source import FOLDER, load

BARRIER = re.compile(r"\bds4q_(?:group_)?barrier\(\);")
SEEDS = (0, 1, 2, 3)  # of the order in which lanes run; 0 is ascending
FEW = ("HFP4G32", "ROCmFP3Mix", "BF16", "", "D=64")


def barriers(file: str) -> list[re.Match[str]]:
    """Where the kernels of a file wait for each other."""
    return list(BARRIER.finditer((FOLDER / file).read_text("utf-8")))


def without(folder: Path, file: str, number: int) -> Path:
    """A copy of the kernels' sources that lacks one barrier of ``file``."""
    copy = folder / "kernels"
    shutil.copytree(FOLDER, copy)
    text, found = (copy / file).read_text("utf-8"), barriers(file)[number]
    (copy / file).write_text(text[: found.start()] + text[found.end() :], "utf-8")
    return copy


def reached_by(file: str) -> list[Case]:
    """Cases of kernels that are built from ``file``."""
    return [
        case
        for case in cases()
        if case.decoder in FEW and file in (case.file, *load(case.file).headers)
    ]


def caught(folder: Path, chosen: list[Case]) -> str | None:
    """How the kernels in ``folder`` are seen to be wrong, by any order of lanes; None if not."""
    control = Control(Path(open_library().path).parents[1])
    for seed in SEEDS:
        with control.using(lane_seed=seed), Device.open() as device:
            try:
                wrong = [
                    result
                    for result in run(device, Kernels(device, folder), chosen)
                    if not result.ok
                ]
            except HipError as error:
                return f"seed {seed}: {error}"
        if wrong:
            return f"seed {seed}: {wrong[0].kernel} {wrong[0].decoder}: other bits"
    return None


REDUCTIONS = [
    ("ds4q_dense.h", 0, "hyper.hip hc_collapse"),  # of a block's group sums
    ("head.hip", 0, "head.hip argmax_parts"),
]


@pytest.mark.parametrize(("file", "number", "kernel"), REDUCTIONS)
def test_a_barrier_removed_from_a_reduction_is_caught(
    sim: Control, tmp_path: Path, file: str, number: int, kernel: str
) -> None:
    chosen = [case for case in reached_by(file) if case.kernel == kernel]
    assert chosen
    assert caught(FOLDER, chosen) is None
    assert caught(without(tmp_path, file, number), chosen) is not None


EVERY = [
    (path.name, number)
    for path in sorted([*FOLDER.glob("*.hip"), *FOLDER.glob("*.h")])
    if path.name != "ds4q_dev.h"  # which defines what a barrier is
    for number in range(len(barriers(path.name)))
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "number"), EVERY)
def test_every_barrier_is_needed_and_missed(
    sim: Control, tmp_path: Path, file: str, number: int
) -> None:
    """In a process of its own: wrong indices may end it, which counts as seen."""
    without(tmp_path, file, number)
    command = [sys.executable, "-m", "tests.hipkern.test_mutants", str(tmp_path / "kernels"), file]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode != 0, (
        f"{file}: the barrier in line {line_of(file, number)} is not missed"
    )
    assert done.returncode in (-11, -6, 3), done.stderr


def line_of(file: str, number: int) -> int:
    text = (FOLDER / file).read_text("utf-8")
    return text[: barriers(file)[number].start()].count("\n") + 1


if __name__ == "__main__":  # see the test above
    _, at, name = sys.argv
    sys.exit(3 if caught(Path(at), reached_by(name)) else 0)
