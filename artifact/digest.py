"""Owns the SHA-256 of a whole file, read once and hashed beside the reading. Knows no format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
CHUNK_BYTES = 1 << 20


def sha256_stream(
    pread_into: Callable[[U8, int], None],
    nbytes: int,
    *,
    before: Callable[[int], None] = lambda nbytes: None,
    seen: Callable[[int, U8], None] = lambda offset, chunk: None,
) -> str:
    """SHA-256 (hex) of bytes 0 .. ``nbytes``; two buffers, so reading and hashing overlap.

    ``before`` hears of each chunk's length before it is read, and may block to hold the stream
    back. ``seen`` gets each chunk with its offset while it is hashed; it must not keep it.
    """
    hasher = hashlib.sha256()
    buffers = [np.empty(min(CHUNK_BYTES, max(nbytes, 1)), dtype=np.uint8) for _ in range(2)]
    hashing: Future[None] | None = None
    with ThreadPoolExecutor(1) as worker:
        for turn, start in enumerate(range(0, nbytes, CHUNK_BYTES)):
            part = buffers[turn % 2][: min(CHUNK_BYTES, nbytes - start)]
            before(len(part))
            pread_into(part, start)
            if hashing is not None:
                hashing.result()
            hashing = worker.submit(hasher.update, part.data)
            seen(start, part)
    return hasher.hexdigest()
