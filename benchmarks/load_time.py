"""What loading costs now and what it cost before experts could be paged, from one run.

    python -m benchmarks.load_time [--before COMMIT] [--layers N] [--runs N] [FILE.hfq]
    python -m benchmarks.load_time --digests [--layers N] [--runs N] [FILE.hfq]

Both versions load the same artifact, each load in a process of its own, in turn, the file driven
out of the page cache before each and seen to be gone (the storage's own cache stays warm). The
older version is a worktree of its commit; it runs twice a turn, and how far its two sides lie apart
is what this machine can tell. Without a file, an artifact of true Flash shapes is written: N
layers of 3.5 GB, embedding and head.

Exit status 1 where, with paging off or with a cache that holds everything, a load reads otherwise
than before or takes more than 1.05 times as long and more than that spread; or where a paged load
reads an expert, or takes more than 1.2 times a plain parallel read of what it reads.

``--digests`` measures loads that compare every tensor with the receipt against loads
that do not, in alternating pairs, from a cold page cache and then from a warm one. Exit status 1
where the median pair of cold loads costs more than 1.03. FILE.hfq needs its receipt beside it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import flash_model
from benchmarks.harness import ROOT, Recorder, Times
from ds4q.artifact.hfq import Reader
from ds4q.runtime.config import checked_config
from ds4q.runtime.gates.load_time import Front, read_twice
from ds4q.runtime.gates.loading import Load, measure
from ds4q.runtime.gates.pagecache import drop
from ds4q.runtime.gates.yardstick import LANES, plain_read

BEFORE = "0f5bc11"  # the last commit without a catalogue of experts
RUNS = 7
THREADS = 2
SAME_TARGET = 1.05
PAGED_TARGET = 1.2
DIGESTS_TARGET = 1.03


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The files of ``commit`` in a folder that goes away."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


class Sides:
    """The kinds of loads, and what each cost so far."""

    def __init__(self, path: Path, before: Path) -> None:
        with Reader(path) as reader:
            config = checked_config(reader)
        self.path = path
        whole = {"budget": path.stat().st_size}
        least = {"slots": config.num_experts_per_tok}
        self.options: dict[str, dict[str, Any]] = {
            "before": {"tree": before},
            "before, again": {"tree": before},
            "paging off": {},
            "a cache that holds all": {"cache": whole},
            "the smallest cache": {"cache": least},
        }
        self.loads: dict[str, list[Load]] = {name: [] for name in self.options}
        self.plain_s: dict[str, list[float]] = {name: [] for name in self.options}

    def turn(self) -> None:
        """One cold load of each kind, and beside it a cold plain read of the same bytes."""
        for name in self.options:
            load = self.one(name)
            self.loads[name].append(load)
            self.drop()
            self.plain_s[name].append(plain_read(self.path, load.reads))

    def one(self, name: str) -> Load:
        """One cold load."""
        self.drop()
        return measure(self.path, threads=THREADS, **self.options[name])

    def drop(self) -> None:
        """Nothing of the file is in the page cache, or there is no benchmark."""
        if not drop(self.path):
            raise SystemExit(f"{self.path} cannot be driven out of the page cache")

    def median(self, name: str) -> float:
        """Seconds of a load."""
        return statistics.median(load.seconds for load in self.loads[name])


def digests(path: Path, runs: int, recorder: Recorder) -> list[str]:
    """Pairs of loads with and without digests; what they cost too much."""
    sides: dict[str, dict[str, Any]] = {
        "digests on": {"require_receipt": True},
        "digests off": {"check_reads": False},
    }
    wrong = []
    for state in ("cold", "warm"):
        loads: dict[str, list[Load]] = {name: [] for name in sides}
        for turn in range(runs + 1):
            for name in list(sides) if turn % 2 else list(sides)[::-1]:
                if state == "cold" and not drop(path):
                    raise SystemExit(f"{path} cannot be driven out of the page cache")
                load = measure(path, threads=THREADS, cache=sides[name])
                if turn:  # the first compiles kernels, and warms the cache
                    loads[name].append(load)
        for name, found in loads.items():
            times = Times([load.seconds for load in found], [load.cpu_s for load in found])
            recorder.add(f"load, {state}, {name}", times, "s")
        pairs = zip(loads["digests on"], loads["digests off"], strict=True)
        ratios = [on.seconds / off.seconds for on, off in pairs]
        ratio = statistics.median(ratios)
        recorder.add(f"load, {state}, on over off", Times(ratios, ratios), "x")
        print(f"{state}: {ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f}) x without digests")
        if state == "cold" and ratio > DIGESTS_TARGET:
            wrong.append(f"{state}: {ratio:.3f} x without digests")
    return wrong


def judge(sides: Sides) -> list[str]:
    """What is not as it must be."""
    wrong = []
    first = sides.loads["before"][0]
    a, b = (sides.median(name) for name in ("before", "before, again"))
    times = [load.seconds for name in ("before", "before, again") for load in sides.loads[name]]
    spread = max(times) / min(times)
    print(f"before against itself: medians {max(a, b) / min(a, b):.3f}, all {spread:.3f}")
    for name in ("paging off", "a cache that holds all"):
        wrong += [
            f"{name}: other reads than before"
            for load in sides.loads[name]
            if sorted(load.reads.tolist()) != sorted(first.reads.tolist()) or len(load.later)
        ]
        ratio = sides.median(name) / statistics.median(times)
        print(f"{name}: {ratio:.3f} x before")
        if ratio > max(SAME_TARGET, max(a, b) / min(a, b)):
            wrong.append(f"{name}: {ratio:.3f} x before")
    front = Front.read(sides.path)
    name = "the smallest cache"
    for load in sides.loads[name]:
        experts = int(front.of_experts(load.reads).sum())
        if experts or read_twice(load.reads):
            wrong.append(
                f"{name}: {experts} reads of experts, {read_twice(load.reads)} bytes twice"
            )
    pairs = zip(sides.loads[name], sides.plain_s[name], strict=True)
    ratio = statistics.median(load.seconds / plain for load, plain in pairs)
    print(f"{name}: {ratio:.3f} x a plain read of what it reads")
    if ratio > PAGED_TARGET:
        wrong.append(f"{name}: {ratio:.3f} x a plain read of what it reads")
    return wrong


def record(sides: Sides, recorder: Recorder) -> None:
    """Rows of seconds, and of what was read."""
    for name, loads in sides.loads.items():
        plain = sides.plain_s[name]
        reads = loads[0].reads
        nbytes = int(reads[:, 1].sum())
        told = f"{name}: {len(reads)} reads, {nbytes:,} bytes"
        times = Times([load.seconds for load in loads], [load.cpu_s for load in loads])
        recorder.add(f"load, {told}", times, "s")
        recorder.add(f"plain read by {LANES} threads, {told}", Times(plain, plain), "s")
        firsts = [load.first_token_s for load in loads]
        recorder.add(f"first token, {name}", Times(firsts, times.cpu), "s")


def against(path: Path, before: Path, runs: int, recorder: Recorder) -> list[str]:
    """Loads of this version and of the one in the folder ``before``; what is not as it must be."""
    sides = Sides(path, before)
    for name in sides.options:  # kernels are compiled on first use
        sides.one(name)
    for _ in range(runs):
        sides.turn()
    record(sides, recorder)
    return judge(sides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE.hfq")
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT")
    parser.add_argument("--layers", type=int, default=1, metavar="N")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N")
    parser.add_argument("--digests", action="store_true")
    arguments = parser.parse_args()
    recorder = Recorder("load_time", sys.argv[1:])
    with ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory())
        path = arguments.file
        if path is None:
            path = Path(temporary) / "flash.hfq"
            flash_model.write(path, "fp4", flash_model.flash_config((4,) * arguments.layers))
            if arguments.digests:
                flash_model.put_receipt(path)
        if arguments.digests:
            wrong = digests(path, arguments.runs, recorder)
        else:
            before = stack.enter_context(worktree(arguments.before))
            wrong = against(path, before, arguments.runs, recorder)
    recorder.write()
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
