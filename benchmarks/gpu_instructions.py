"""Owns the other floor of the experts' kernels: instructions a weight over the rate of issue.

NVIDIA's profiler counts the instructions in a process of its own; without it there is no figure.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_experts import CHOSEN, KINDS, SHAPES, once
from ds4q.hipkern.driver import Device

METRIC = "smsp__inst_executed.sum"
KERNELS = {"moe_gate_up": "gate+up", "moe_down": "down"}


def floors(bench: Bench) -> None:
    """Instructions a weight, and what issuing them and moving the bytes take at least.

    The second needs the times of the part ``experts`` in the same run.
    """
    profiler = shutil.which("ncu")
    if profiler is None:
        print("ncu is not here: instructions are not counted")
        return
    command = [profiler, "--csv", "--metrics", METRIC, "--clock-control", "none"]
    command += ["--kernel-name", f"regex:{'|'.join(KERNELS)}"]
    command += [sys.executable, "-m", "benchmarks.gpu_instructions"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ncu failed: {done.stdout[-500:]}{done.stderr[-500:]}")
    counted = counts(done.stdout)
    for kind, pair in zip(KINDS, zip(counted[::2], counted[1::2], strict=True), strict=True):
        for (kernel, instructions), parts in zip(pair, (SHAPES[:2], SHAPES[2:]), strict=True):
            weights = CHOSEN * sum(rows * k for rows, k in parts)
            measure = f"{kind.name} {KERNELS[kernel]}"
            bench.add_value(f"{measure}, instructions a weight", 32 * instructions / weights, "1")
            issue = instructions / bench.issue_rate
            bench.add_value(f"{measure}, issue floor", 1e6 * issue, "us")
            if measure in bench.medians:
                seconds, nbytes = bench.medians[measure]
                moved = nbytes / bench.copy_rate
                bench.add_value(f"{measure}, byte floor", 1e6 * moved, "us")
                bench.add_value(
                    f"{measure}, over the larger floor", seconds / max(issue, moved), "x"
                )


def counts(text: str) -> list[tuple[str, int]]:
    """(kernel, instructions of warps) of each launch, from the profiler's table."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    return [
        (row["Kernel Name"].split("(")[0], int(row["Metric Value"].replace(",", "")))
        for row in csv.DictReader(lines[start:])
        if row["Metric Name"] == METRIC
    ]


if __name__ == "__main__":
    with Device.open() as device:
        once(Bench(device, []))
