"""Run by ``test_kernels.py`` in a process whose numba compiles for another CPU.

Every weight ends where a page without any access rights begins, so a read past the end kills the
process. Results go to the folder named on the command line, a report to stdout.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core.registry import cpu_target

from ds4q.artifact.types import F16
from ds4q.runtime.backend import Weight, kernels, vectors
from tests.runtime.backend import packs

Array = npt.NDArray[Any]


def at_the_end(weight: Weight) -> Weight:
    """The same weight, moved so that its last byte is the last that may be read."""
    size = weight.data.size
    pages = -(-size // mmap.PAGESIZE)
    area = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    memory = np.frombuffer(area, dtype=np.uint8)
    guard = ctypes.c_void_p(memory.ctypes.data + pages * mmap.PAGESIZE)
    if ctypes.CDLL(None, use_errno=True).mprotect(guard, mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    data = memory[pages * mmap.PAGESIZE - size : pages * mmap.PAGESIZE]
    data[:] = weight.data
    return Weight(weight.type_id, weight.rows, weight.cols, data, weight.coding)


def product(weight: Weight, x: Array) -> Array:
    guarded = at_the_end(weight)
    out = np.full((len(x), weight.rows), np.nan, dtype=np.float32)
    kernels.multiply(guarded.matrix, guarded.rows, x, out)
    return out


def main(folder: Path) -> None:
    results = {}
    for kind in packs.KINDS:
        cols = packs.columns(kind, 5)
        weight = packs.draw(kind, 37, cols, seed=5)[0]
        results[packs.name(kind)] = product(weight, packs.activations(6, cols))
    tail = packs.draw(F16, 5, 39, seed=6)[0]
    results["tail"] = product(tail, packs.activations(5, 39))
    scales = np.arange(255, dtype=np.uint8).reshape(255, 1)
    codes = np.tile(np.arange(32, dtype=np.uint8) % 16, (255, 1))
    weight, values = packs.hfp4g32(codes, scales, np.ones(255, dtype=np.float16))
    results["codes"] = product(weight, np.eye(32, dtype=np.float32)).T + np.float32(0)
    with np.errstate(over="ignore"):
        results["codes_expected"] = values.astype(np.float32) + np.float32(0)
    words = np.arange(65536, dtype=np.uint16).reshape(-1, 1)
    results["halves"] = product(packs.plain(F16, words)[0], np.ones((1, 1), np.float32))[0]
    for name, result in results.items():
        np.save(folder / f"{name}.npy", result)
    context = cpu_target.target_context
    dispatcher: Any = kernels.multiply
    report = {
        "cpu": list(vectors.cpu_of(context)),
        "x86": context.codegen().magic_tuple()[0].startswith("x86_64"),
        "compiled": sum(dispatcher.stats.cache_misses.values()) > 0,
        "digest": hashlib.sha256(b"".join(r.tobytes() for r in results.values())).hexdigest(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
