"""Owns how a benchmark measures and what it records. It knows no kernel and no target.

Sides of a comparison run alternately in one process (A B A B ...), since the speed of a shared
machine drifts; wall and CPU time are kept apart, since a wall time far above CPU time means that
something else was running.
"""

from __future__ import annotations

import csv
import datetime
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = (
    "date",
    "commit",
    "machine",
    "command",
    "measure",
    "n",
    "median",
    "min",
    "max",
    "unit",
    "cpu_per_wall",
    "load",
)


@dataclass
class Times:
    """Seconds of each repetition of one side."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.wall)

    @property
    def cpu_per_wall(self) -> float:
        """CPU seconds of this process per wall second: the number of cores that it really had."""
        wall = sum(self.wall)
        return sum(self.cpu) / wall if wall else 0.0


def alternate(sides: Mapping[str, Callable[[], object]], repeats: int = 7) -> dict[str, Times]:
    """Run every side once unmeasured, then all in turn ``repeats`` times."""
    for run in sides.values():
        run()
    times = {name: Times() for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            times[name].wall.append(time.perf_counter() - wall)
            times[name].cpu.append(time.process_time() - cpu)
    return times


def load_average() -> str:
    return f"{os.getloadavg()[0]:.2f}"


def machine() -> str:
    """CPU model, cores and memory; no host name."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    meminfo = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    total_kib = next(int(line.split()[1]) for line in meminfo if line.startswith("MemTotal:"))
    cores = len(os.sched_getaffinity(0))
    return f"{models[0] if models else 'unknown CPU'}, {cores} cores, {total_kib / 2**20:.1f} GiB"


def commit() -> str:
    """The commit that was measured; a ``+`` where tracked files differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode
    return head.stdout.strip() + ("+" if changed else "")


class Recorder:
    """Collects the rows of one run, prints them and appends them to ``results/NAME.csv``.

    ``device`` names a GPU that was measured.
    """

    def __init__(self, name: str, arguments: list[str], device: str = "") -> None:
        self._file = RESULTS / f"{name}.csv"
        self._fixed = {
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            "machine": f"{device}, {machine()}" if device else machine(),
            "command": " ".join(["python", "-m", f"benchmarks.{name}", *arguments]),
        }
        self._rows: list[dict[str, object]] = []
        self._load_before = load_average()
        print(f"{self._fixed['machine']}, commit {self._fixed['commit']}")

    def add(
        self,
        measure: str,
        times: Times,
        unit: str,
        amount: float | None = None,
        *,
        per_cpu: bool = False,
    ) -> None:
        """One row: wall or CPU seconds as they are, or the rate ``amount`` per such second."""
        seconds = times.cpu if per_cpu else times.wall
        values = seconds if amount is None else [amount / each for each in seconds]
        row: dict[str, object] = {
            "measure": measure,
            "n": len(values),
            "median": f"{statistics.median(values):.4g}",
            "min": f"{min(values):.4g}",
            "max": f"{max(values):.4g}",
            "unit": unit,
            "cpu_per_wall": f"{times.cpu_per_wall:.2f}",
        }
        self._rows.append(row)
        print("{measure:44} {median:>8} {unit} (n {n}, {min} to {max})".format(**row))

    def write(self) -> None:
        load = f"{self._load_before}-{load_average()}"
        print(f"load average before-after: {load}")
        new = not self._file.exists()
        self._file.parent.mkdir(exist_ok=True)
        with self._file.open("a", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows({**self._fixed, **row, "load": load} for row in self._rows)
