"""What a pull costs against curl, and what it makes of a server that misbehaves.

    python -m benchmarks.pull [--mib N] [--runs N] [--rate MB_PER_S]

An artifact of N MiB (2048) of random bytes is served on 127.0.0.1, no faster than MB_PER_S (400).
`ds4q registry pull` and `curl | tee FILE | sha256sum`, each followed by a sync of the file, take
turns, N runs each (5); so does curl with openssl in place of sha256sum, which some systems build
without the processor's SHA instructions. Then the server drops, resets and stalls connections,
tells wrong lengths, sends wrong bytes and wrong ranges, answers 416 and 503, redirects and
trickles, and the pull is killed halfway. Exit status 1 where the pull takes more than 1.1 times as
long as the faster curl, or where the second part does not end with the right SHA-256 after at most
1.05 times the bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Recorder, Times
from ds4q.artifact.receipt import receipt_path
from tests.registry import artifacts
from tests.registry.server import Fault, Request, Server, serving

TENSOR_MIB = 4
TARGET = 1.1
BYTES_TARGET = 1.05
NAME = "pulled.fp4"
MIB = 1 << 20


class Bench:
    """An artifact that is served, a registry that names it, and a folder to pull into."""

    def __init__(self, folder: Path, server: Server, mib: int) -> None:
        self.server, self.models = server, folder / "models"
        self.artifact = server.folder / NAME
        self.receipt = artifacts.write(self.artifact, mib // TENSOR_MIB, TENSOR_MIB * MIB // 16384)
        self.registry = folder / "registry.json"
        repo = server.url("").rstrip("/")
        self.registry.write_text(json.dumps(artifacts.document(repo, self.artifact)))
        self.models.mkdir()

    @property
    def command(self) -> list[str]:
        """The pull as a user types it."""
        words = ["registry", "pull", artifacts.TAG, "--registry", str(self.registry)]
        return [sys.executable, "-m", "ds4q", *words, "--models-dir", str(self.models), "--json"]

    def clear(self) -> None:
        """An empty folder, and nothing of it that the system still has to write."""
        for path in sorted(self.models.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        os.sync()

    def pull(self) -> None:
        """One undisturbed pull."""
        done = subprocess.run(self.command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
        trunk = json.loads(done.stdout)["files"][1]
        if trunk["sha256"] != self.receipt.sha256:
            raise SystemExit(f"pulled {trunk}")

    def curl(self, hasher: str) -> None:
        """The same with the tools of every system."""
        url, to = self.server.url(NAME), self.models / NAME
        script = f'curl -sf "$1" | tee "$2" | {hasher} && sync "$2"'
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", script, "curl", url, str(to)],
            capture_output=True,
            check=True,
        )
        if self.receipt.sha256.encode() not in done.stdout.split():
            raise SystemExit(f"curl got {done.stdout!r}")


def compare(bench: Bench, runs: int, recorder: Recorder) -> float:
    """All sides in turn; how many times as long the pull takes as the faster curl, by medians."""
    sides = {"ds4q registry pull": bench.pull}
    for hasher in ("sha256sum", "openssl dgst -sha256"):
        sides[f"curl, tee, {hasher}, sync"] = partial(bench.curl, hasher)
    times = {name: Times() for name in sides}
    for _ in range(runs):
        for name, run in sides.items():
            bench.clear()
            before, start = os.times(), time.perf_counter()
            run()
            times[name].wall.append(time.perf_counter() - start)
            after = os.times()
            spent = after.children_user + after.children_system
            times[name].cpu.append(spent - before.children_user - before.children_system)
    size = bench.receipt.file_bytes
    for name, each in times.items():
        recorder.add(f"{name}, {size:,} bytes", each, "s")
    ours, *theirs = (statistics.median(each.wall) for each in times.values())
    for name, median in zip(list(times)[1:], theirs, strict=True):
        print(f"the pull takes {ours / median:.3f} x as long as {name}")
    return ours / min(theirs)


class Evil:
    """One fault after another, with good answers between them; every kind at least once."""

    def __init__(self, server: Server) -> None:
        self.faults = [
            Fault(stop_after=20 * MIB),
            Fault(stop_after=MIB, reset=True),
            Fault(flip_at=100),
            Fault(status=416),
            Fault(add_total=-1),
            Fault(location=f"/{NAME}?moved"),
            Fault(stop_after=3 * MIB),
            Fault(status=503),
            Fault(lines=(b"no header", b'RateLimit: "api";r=4;t=1')),
            Fault(stop_after=0),
            Fault(shift=7),
            Fault(stop_after=2 * MIB, stall=True),
            Fault(trickle_s=0.01),
            Fault(stop_after=5 * MIB + 1, reset=True),
        ]
        self.ended = 0  # connections that were cut
        server.fault = self.next

    def next(self, request: Request) -> Fault:
        """The fault of this request."""
        good = "?moved" in request.path or request.path.endswith(".receipt")
        if good or request.number % 2 or not self.faults:
            return Fault()
        fault = self.faults.pop(0)
        self.ended += fault.stop_after is not None
        return fault


def misbehave(bench: Bench, recorder: Recorder) -> list[str]:
    """Pull through all faults and a kill; what is not as it must be."""
    server, size = bench.server, bench.receipt.file_bytes
    bench.clear()
    server.settle()
    evil = Evil(server)
    times = Times()
    start = time.perf_counter()
    with subprocess.Popen(bench.command, stdout=subprocess.DEVNULL, cwd=ROOT) as killed:
        while server.sent_bytes < size // 2 and killed.poll() is None:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    bench.pull()
    times.wall.append(time.perf_counter() - start)
    times.cpu.append(0.0)
    sent = server.sent_bytes - receipt_path(bench.artifact).stat().st_size
    print(f"{evil.ended} connections cut, killed once, {sent / size:.4f} x the bytes sent")
    recorder.add(f"pull through faults and a kill, {sent / size:.4f} x the bytes", times, "s")
    wrong = []
    if (bench.models / NAME).read_bytes() != bench.artifact.read_bytes():
        wrong.append("faults: another file than was served")
    if evil.faults or evil.ended < 5 or killed.returncode != -signal.SIGKILL:
        wrong.append(f"faults: only {evil.ended} cuts, {len(evil.faults)} faults left")
    if sent > BYTES_TARGET * size:
        wrong.append(f"faults: {sent / size:.4f} x the bytes")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=2048, metavar="N")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--rate", type=float, default=400.0, metavar="MB_PER_S")
    arguments = parser.parse_args()
    recorder = Recorder("pull", sys.argv[1:])
    with tempfile.TemporaryDirectory() as temporary:
        served = Path(temporary) / "served"
        served.mkdir()
        with serving(served, rate_bytes_per_s=arguments.rate * 1e6) as server:
            bench = Bench(Path(temporary), server, arguments.mib)
            ratio = compare(bench, arguments.runs, recorder)
            wrong = [f"{ratio:.3f} x as long as curl"] if ratio > TARGET else []
            wrong += misbehave(bench, recorder)
    recorder.write()
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
