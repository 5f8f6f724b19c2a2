"""Tries the verdicts of the load-time gate: unchanged loads beside noise, and slower loads.

    python -m benchmarks.load_gate [--trials N] [--series NAME]... [--experts N] [FILE.hfq]

A baseline is written first, beside nothing else. Each trial then runs the whole gate against it:

    beside   the unchanged artifact beside two spinning processes and a process that reads a file
             from the disk again and again
    slower   loads made 20 % slower (the process that loads sleeps; the product has no such option)
    quiet    the unchanged artifact beside nothing else
    both     slower loads beside the same noise

Without a file, an artifact of one layer with true Flash shapes and N experts is written.

Exit status 1 where an unchanged load fails in any trial, or a slower load passes in any.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import flash_model
from benchmarks.harness import Recorder, Times
from ds4q.artifact.report import Check, Report
from ds4q.runtime.gates import LoadTime, Surroundings

TRIALS = 20
EXPERTS = 16
SMALL_VOCABULARY = {"vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 1}
SLOWER = 0.2
READ_BYTES = 512 << 20
SPINNERS = 2
SERIES = {  # noise, slower
    "beside": (True, False),
    "slower": (False, True),
    "quiet": (False, False),
    "both": (True, True),
}
DEFAULT_SERIES = ["beside", "slower"]

READER = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
size, buffer = os.fstat(fd).st_size, bytearray(1 << 20)
while True:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    for offset in range(0, size, len(buffer)):
        os.preadv(fd, [buffer], offset)
"""

SLOW_LOAD = f"""
import time
from ds4q.runtime.engine import Engine

honest = Engine.load.__func__

def load(cls, *args, **options):
    start = time.perf_counter()
    engine = honest(cls, *args, **options)
    time.sleep({SLOWER} * (time.perf_counter() - start))
    return engine

Engine.load = classmethod(load)
"""


@contextmanager
def noise(folder: Path) -> Iterator[None]:
    """Two processes that spin and one that reads from the disk."""
    path = folder / "read"
    if not path.exists():
        path.write_bytes(os.urandom(1 << 20) * (READ_BYTES >> 20))
    commands = [["-c", "while True: pass"]] * SPINNERS + [["-c", READER, str(path)]]
    with ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen([sys.executable, *command])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


@contextmanager
def slower(folder: Path) -> Iterator[None]:
    """Loads take 20 % longer: their process finds this module in its path."""
    place = folder / "slower"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(SLOW_LOAD, encoding="utf-8")
    sys.path.insert(0, str(place))
    try:
        yield
    finally:
        sys.path.remove(str(place))


def trial(gate: LoadTime, path: Path, threads: int) -> Check:
    """The gate once, as ``ds4q verify`` runs it."""
    report = Report({"path": str(path)})
    with report.check(gate.name) as check:
        gate.prepare(path, Surroundings(threads))(check)
    return check


def explained(check: Check) -> str:
    """One line a trial: outcome, and the slowdown that each kind of load was found to have."""
    arms = check.figures.get("arms", {})
    described = [
        f"{name} {arm['outcome']} of {arm['pairs']} ("
        + ", ".join(
            f"{key.removesuffix('_s')} {each['low']:.2f}-{each['high']:.2f}"
            for key, each in arm["slower_by"].items()
        )
        + f", share {arm['processor_share']:.2f})"
        for name, arm in arms.items()
    ]
    others = [failure.line() for failure in check.failures if "load time to" not in failure.message]
    return "; ".join([str(check.figures.get("outcome", "error")), *described, *others])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE.hfq")
    parser.add_argument("--trials", type=int, default=TRIALS, metavar="N")
    parser.add_argument("--series", action="append", choices=list(SERIES), metavar="NAME")
    parser.add_argument("--experts", type=int, default=EXPERTS, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    arguments = parser.parse_args()
    recorder = Recorder("load_gate", sys.argv[1:])
    wrong = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = arguments.file
        if path is None:
            path = folder / "flash.hfq"
            config = flash_model.flash_config((4,)) | SMALL_VOCABULARY
            flash_model.write(path, "fp4", config | {"n_routed_experts": arguments.experts})
        baseline = folder / "baseline.json"
        written = trial(LoadTime(write_baseline=baseline), path, arguments.threads)
        if not written.ok:
            raise SystemExit("\n".join(written.lines()))
        for name in arguments.series or DEFAULT_SERIES:
            noisy, slow = SERIES[name]
            outcomes: Counter[str] = Counter()
            seconds = []
            with ExitStack() as stack:
                if noisy:
                    stack.enter_context(noise(folder))
                if slow:
                    stack.enter_context(slower(folder))
                for number in range(arguments.trials):
                    start = time.perf_counter()
                    check = trial(LoadTime(baseline=baseline), path, arguments.threads)
                    seconds.append(time.perf_counter() - start)
                    outcomes[check.figures.get("outcome", "error")] += 1
                    print(f"{name} {number + 1}: {explained(check)}", flush=True)
            counts = ", ".join(f"{outcomes[word]} {word}" for word in ("pass", "fail", "undecided"))
            recorder.add(f"{name}: {counts}; a trial", Times(seconds, seconds), "s")
            bad = "pass" if slow else "fail"
            if outcomes[bad] or outcomes["error"]:
                wrong.append(f"{name}: {outcomes[bad]} {bad}, {outcomes['error']} errors")
    recorder.write()
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
