"""Owns the time and memory of planning a budget for the whole of DeepSeek-V4-Flash.

    python -m benchmarks.flash_plan [--folder DIR] [--zeros] [--threads N] [--target 98GB]

The checkpoint is synthetic: all names, types and shapes that the published config implies, in
sparse shards. The rows that the planner samples hold random FP4 codes and scales; with ``--zeros``
they are holes, too. Measured is the command itself in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import Recorder, Times
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.config import check_config
from ds4q.quantize.deepseek4 import Inventory, Storage, classify
from ds4q.quantize.losses import SAMPLE_TOTAL, sample_rows
from tests.quantize.builders import FLASH, Entry, write_model

SHARDS = 48
EXPERT_MATRICES = 43 * 256 * 3
DTYPES = {
    Storage.FP4: "I8",
    Storage.FP8: "F8_E4M3",
    Storage.BF16: "BF16",
    Storage.F32: "F32",
    Storage.INTEGER: "I64",
}


def listing(inventory: Inventory) -> dict[str, Entry]:
    """Every tensor of a checkpoint in DeepSeek's own types, scales included."""
    found: dict[str, Entry] = {}
    for name in inventory.required():
        expected = inventory.expected(name)
        shape = tuple(n for n in expected.shape if n is not None)
        scale = name.removesuffix("weight") + "scale"
        if expected.storage is Storage.FP4:
            found[scale] = ("F8_E8M0", (shape[0], shape[1] // 32))
            shape = shape[0], shape[1] // 2
        elif expected.storage is Storage.FP8:
            found[scale] = ("F8_E8M0", tuple(-(-n // 128) for n in shape))
        found[name] = (DTYPES[expected.storage], shape)
    return found


def fill(folder: Path) -> None:
    """Random codes and scales in the rows of the trunk's experts that the planner samples."""
    rng = np.random.default_rng(0)
    with Checkpoint.open(folder) as checkpoint:
        files = {name: (folder / name).open("r+b") for name in checkpoint.shards}
        for name, tensor in checkpoint.tensors.items():
            info = classify(name.removesuffix("scale").removesuffix("weight") + "weight")
            if info is None or info.expert is None or info.part != "trunk":
                continue
            scale = name.endswith("scale")
            rows, row_bytes = tensor.shape
            k = row_bytes * (32 if scale else 2)
            for row in sample_rows(rows, k, SAMPLE_TOTAL // EXPERT_MATRICES):
                low, high = (114, 124) if scale else (0, 256)
                files[tensor.shard].seek(tensor.offset + row * row_bytes)
                files[tensor.shard].write(rng.integers(low, high, row_bytes, np.uint8).tobytes())
        for file in files.values():
            file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep the checkpoint here, or use it again")
    parser.add_argument("--zeros", action="store_true")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--target", default="98GB")
    parser.add_argument("--record", action="store_true", help="append to results/flash_plan.csv")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "flash"
        if not folder.is_dir():
            # The 0731 release, with its draft.
            inventory = Inventory(check_config(FLASH, "config.json"), "dspark", 3)
            write_model(folder, listing(inventory), FLASH, shards=SHARDS)
            if not args.zeros:
                fill(folder)
        command = [sys.executable, "-m", "ds4q", "quantize", str(folder), "--json", "--dry-run"]
        command += ["-o", str(Path(temporary) / "flash.hfq"), "--threads", str(args.threads)]
        command += ["--recipe", "budget", "--target-size", args.target]
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(done.stderr)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads(done.stdout)
    print(f"{seconds:.1f} s, {usage.ru_maxrss / 2**20:.2f} GiB, {usage.ru_utime:.1f} s of CPU")
    print(f"{report['bytes']} bytes, {report['bpw_experts']:.4f} bits per expert weight")
    if args.record:
        record = Recorder("flash_plan", sys.argv[1:])
        times = Times([seconds], [usage.ru_utime + usage.ru_stime])
        record.add("plan", times, "s")
        memory = Times([usage.ru_maxrss / 2**20], [usage.ru_maxrss / 2**20])
        record.add("peak memory", memory, "GiB")
        record.write()


if __name__ == "__main__":
    main()
