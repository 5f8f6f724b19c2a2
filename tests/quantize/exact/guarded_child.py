"""Run by ``test_encode.py`` in a process of its own, whose numba may compile for another CPU.

Each array ends where a page without any access rights begins, so that a read or a write past the
end kills the process. A digest of all results goes to stdout.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap

import numpy as np
from numba.core.registry import cpu_target

from ds4q.quantize.exact import encode_fp4
from tests.checks import Array
from tests.quantize.exact.sources import TARGETS, importance_of, mixed_codes


def at_the_end(array: Array) -> Array:
    """The same array, moved so that its last byte is the last that may be touched."""
    size = array.nbytes
    pages = -(-size // mmap.PAGESIZE)
    area = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    memory = np.frombuffer(area, dtype=np.uint8)
    guard = ctypes.c_void_p(memory.ctypes.data + pages * mmap.PAGESIZE)
    if ctypes.CDLL(None, use_errno=True).mprotect(guard, mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    moved = memory[pages * mmap.PAGESIZE - size : pages * mmap.PAGESIZE]
    view: Array = moved.view(array.dtype).reshape(array.shape)
    view[:] = array
    return view


def digest(*, guarded: bool) -> str:
    """Of the rows of every target, weighted and not; one run of rows is less than a tile."""
    rng = np.random.default_rng(11)
    results = hashlib.sha256()
    move = at_the_end if guarded else np.array
    for rows, k in ((9, 128), (3, 256)):
        codes = move(mixed_codes(rng, rows, k))
        scales = move(rng.integers(118, 124, (rows, k // 32), dtype=np.uint8))
        for weights in (None, move(importance_of(rng, k, gaps=True))):
            for kind, coding in TARGETS:
                out = move(np.zeros((rows, kind.row_bytes(k)), np.uint8))
                lost = encode_fp4(codes, scales, kind, coding, weights, out)
                results.update(out.tobytes() + bytes([lost]))
    return results.hexdigest()


if __name__ == "__main__":
    context = cpu_target.target_context
    shuffle = "+ssse3" in context.codegen().magic_tuple()[2].split(",")
    print(json.dumps({"digest": digest(guarded=True), "shuffle": shuffle}))
