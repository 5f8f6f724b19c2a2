"""Owns the benchmark of a GPU: are its bits right, and how near memory's limit is each kernel.

    DS4Q_HIP=cuda python -m benchmarks.gpu [--record] [PART ..]

Parts are hashes, experts, instructions, matrices, step and together; without any all of them run.
Times are device time between two events, but those of "together", which the host takes. Rates are
of packed bytes; "of copy" is a rate over that of a large device copy in the same run, which counts
bytes read and bytes written. An NVIDIA GPU tells nothing about the speed of an AMD GPU.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import gpu_experts, gpu_instructions, gpu_matrices, gpu_step, gpu_together
from benchmarks.gpu_bench import Bench
from ds4q.hipkern.driver import Device


def hashes(bench: Bench) -> None:
    """Every kernel on fixed inputs; refuses to go on where one gives other bits."""
    from ds4q.hipkern import selftest

    results = selftest.run(bench.device, bench.kernels)
    wrong = [f"{result.kernel} {result.decoder}" for result in results if not result.ok]
    right = len(results) - len(wrong)
    bench.add_value(f"kernels of {len(results)} with the simulated device's bits", right, "cases")
    if wrong:
        raise SystemExit(f"other bits than on the simulated device: {', '.join(wrong)}")


PARTS = {
    "hashes": hashes,
    "experts": gpu_experts.steps,
    "instructions": gpu_instructions.floors,
    "matrices": gpu_matrices.singles,
    "step": gpu_step.steps,
    "together": gpu_together.steps,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all, if none is given")
    parser.add_argument("--record", action="store_true", help="append to results/gpu.csv")
    arguments = parser.parse_args()
    with Device.open() as device:
        bench = Bench(device, sys.argv[1:])
        for part in arguments.parts or PARTS:
            print(f"-- {part}")
            PARTS[part](bench)
        if arguments.record:
            bench.record.write()


if __name__ == "__main__":
    main()
