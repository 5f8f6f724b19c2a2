"""Quantize and verify one layer of true Flash shapes, against ``cp`` and ``cat`` of the same files.

    python -m benchmarks.repack [--folder DIR] [--experts N] [--repeats N]

Alternates, in one run and on one file system: ``cp --reflink=never`` of the source, ``ds4q
quantize``, ``cat`` of source and artifact, ``ds4q verify --source``. Both writers are fsynced,
their destination is removed before; the inputs are dropped from the page cache before each side
(the storage's own cache stays warm: "guest-cold"). Then, without a target: verify with both files
in the page cache beside its floor, one SHA-256 stream of the artifact; peak memory for two sizes;
and the repack kernel alone against memcpy.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import flash_layer
from benchmarks.harness import Recorder, Times, alternate
from ds4q.artifact.digest import sha256_stream
from ds4q.artifact.formats import hfp4g32
from ds4q.artifact.hfq import Reader
from ds4q.artifact.types import HFP4G32, row_runs
from ds4q.quantize.rows import CHUNK_BYTES

QUANTIZE_TARGET = 1.25
VERIFY_TARGET = 1.5
KERNEL_TARGET = 0.8
KERNEL_BYTES = 288 << 20
MEMORY_TARGET_MIB = 400
MEMORY_EXPERTS = (64, 256)


def drop(paths: list[Path]) -> None:
    """Write back and forget the cached pages of ``paths``."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def ds4q(*words: object) -> int:
    """Run a command of ds4q in a process of its own; its peak memory in bytes."""
    command = [sys.executable, "-m", "ds4q", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return usage.ru_maxrss * 1024


class Files:
    """The layer, and where each side puts its output."""

    def __init__(self, folder: Path, experts: int) -> None:
        self.source = folder / f"source-{experts}"
        self.out = folder / f"out-{experts}.hfq"
        self.copy = folder / f"copy-{experts}"
        if not self.source.exists():
            # In a process of its own: a child's peak memory counts that of the parent it came from.
            program = "import sys, pathlib, benchmarks.flash_layer as f; "
            program += "f.write(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
            subprocess.run(
                [sys.executable, "-c", program, str(self.source), str(experts)], check=True
            )
        self.shards = sorted(self.source.glob("*.safetensors"))

    @property
    def source_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.shards)

    def quantize(self) -> int:
        return ds4q("quantize", self.source, "-o", self.out, "--allow-partial", "-q")

    def verify(self) -> int:
        return ds4q("verify", self.out, "--source", self.source, "-q")

    def cp(self) -> None:
        self.copy.mkdir()
        words = ["cp", "--reflink=never", *map(str, self.shards), str(self.copy)]
        subprocess.run(words, check=True)
        for path in sorted(self.copy.iterdir()):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def cat(self) -> None:
        words = ["cat", *map(str, [*self.shards, self.out])]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)

    def remove_outputs(self) -> None:
        shutil.rmtree(self.copy, ignore_errors=True)
        for path in self.out.parent.glob(self.out.name + "*"):
            path.unlink()
        os.sync()


def timed(times: Times, run: Callable[[], object]) -> None:
    """Add one repetition; CPU time is that of the child processes too."""
    before, wall = _cpu_s(), time.perf_counter()
    run()
    times.wall.append(time.perf_counter() - wall)
    times.cpu.append(_cpu_s() - before)


def _cpu_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def cold(files: Files, repeats: int) -> dict[str, Times]:
    """The four sides in turn; the first round warms programs and compiled kernels, unmeasured."""
    times = {name: Times() for name in ("cp", "quantize", "cat", "verify")}
    for round_ in range(repeats + 1):
        current = times if round_ else {name: Times() for name in times}
        files.remove_outputs()
        drop(files.shards)
        timed(current["cp"], files.cp)
        files.remove_outputs()
        drop(files.shards)
        timed(current["quantize"], files.quantize)
        for name, run in (("cat", files.cat), ("verify", files.verify)):
            drop([*files.shards, files.out])
            timed(current[name], run)
    return times


def warm(files: Files, repeats: int) -> dict[str, Times]:
    """Verify with all inputs cached, and the SHA-256 stream below which it cannot go."""

    def sha256() -> str:
        with Reader(files.out) as reader:
            return sha256_stream(reader.pread_into, reader.file_bytes)

    times = {"verify": Times(), "sha256": Times()}
    files.cat()
    for _ in range(repeats):
        timed(times["verify"], files.verify)
        timed(times["sha256"], sha256)
    return times


def memory(folder: Path) -> list[tuple[str, int, float]]:
    """(command, experts, peak MiB) of each command for two sizes; they should not differ."""
    peaks = []
    for experts in MEMORY_EXPERTS:
        files = Files(folder, experts)
        files.remove_outputs()
        measured = (
            ("quantize", files.quantize()),
            ("verify", files.verify()),
            ("inspect", ds4q("inspect", files.out, "--tensors")),
        )
        peaks += [(name, experts, peak / 2**20) for name, peak in measured]
    return peaks


def kernel(repeats: int) -> tuple[dict[str, Times], float]:
    """Repack against memcpy of the same bytes, one thread; the source bytes of one repetition.

    Both go by runs of rows as long as the pipeline's, into an output that is used again, as it
    does: what both have to do is to read the source from memory.
    """
    k, rng = flash_layer.HIDDEN, np.random.default_rng(0)
    _, step = next(iter(row_runs(1 << 20, HFP4G32.row_bytes(k), CHUNK_BYTES)))
    rows = KERNEL_BYTES // (k // 2 + k // 32) // step * step
    codes = np.frombuffer(rng.bytes(rows * k // 2), np.uint8).reshape(rows, k // 2)
    scales = np.frombuffer(rng.bytes(rows * k // 32), np.uint8).reshape(rows, k // 32)
    packed = np.empty((step, HFP4G32.row_bytes(k)), np.uint8)
    copies = np.empty(step * k // 2, np.uint8), np.empty(step * k // 32, np.uint8)
    runs = [slice(first, first + step) for first in range(0, rows, step)]

    def repack() -> None:
        for run in runs:
            hfp4g32.repack(codes[run], scales[run], packed)

    def memcpy() -> None:
        for run in runs:
            np.copyto(copies[0], codes[run].reshape(-1))
            np.copyto(copies[1], scales[run].reshape(-1))

    repack()
    back = hfp4g32.unpack(packed)
    if not (np.array_equal(back[0], codes[runs[-1]]) and np.array_equal(back[1], scales[runs[-1]])):
        raise SystemExit("the repack kernel is wrong")
    times = alternate({"repack": repack, "memcpy": memcpy}, repeats)
    return times, float(codes.nbytes + scales.nbytes)


def verdict(name: str, value: float, target: float, *, at_most: bool = True) -> None:
    met = value <= target if at_most else value >= target
    sign = "<=" if at_most else ">="
    print(f"{name}: {value:.2f} (target {sign} {target}): {'met' if met else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to work; needs 20 GB (default: /tmp)")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    recorder = Recorder("repack", sys.argv[1:])
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        files = Files(Path(folder), MEMORY_EXPERTS[-1])
        print(f"source {files.source_bytes / 1e9:.2f} GB")
        times = cold(files, given.repeats)
        for name, side in times.items():
            recorder.add(f"{name}, guest-cold", side, "s")
        hot = warm(files, given.repeats)
        for name, side in hot.items():
            recorder.add(f"{name}, warm", side, "s")
        peaks = memory(Path(folder))
    kernels, nbytes = kernel(given.repeats)
    for name, side in kernels.items():
        recorder.add(f"{name} kernel, 1 thread", side, "GB/s of source", nbytes / 1e9)
    recorder.write()
    verdict("quantize / cp", times["quantize"].median / times["cp"].median, QUANTIZE_TARGET)
    verdict("verify / cat", times["verify"].median / times["cat"].median, VERIFY_TARGET)
    print(f"verify / sha256, warm: {hot['verify'].median / hot['sha256'].median:.2f}")
    ratio = kernels["memcpy"].median / kernels["repack"].median
    verdict("repack / memcpy", ratio, KERNEL_TARGET, at_most=False)
    for name, experts, mib in peaks:
        verdict(f"peak MiB of {name}, {experts} experts", mib, MEMORY_TARGET_MIB)


if __name__ == "__main__":
    main()
