"""Owns changes to finished artifacts: one byte, one payload, a whole new index, a new receipt.

What is sealed again carries digests that agree with its new bytes, as a forger would write them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from ds4q.artifact.check import census
from ds4q.artifact.hfq import ARCH_DEEPSEEK4, Reader
from ds4q.artifact.metadata import BLANK_DIGEST, canonical, front_digest, seal
from ds4q.artifact.receipt import read_receipt, receipt_path
from ds4q.artifact.writer import TensorSpec, layout

Payloads = dict[str, tuple[int, tuple[int, ...], bytes]]
"""Name -> type number, shape, payload."""


def flip(path: Path, at: int, mask: int = 1) -> None:
    """Change one byte in place."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def new_receipt(path: Path) -> None:
    """Make the receipt agree with the artifact beside it: every payload digest, SHA-256, front."""
    old = read_receipt(receipt_path(path))
    with Reader(path) as reader:
        records = tuple(
            replace(record, xxh3=xxhash.xxh3_128(reader.read(record.name).tobytes()).hexdigest())
            for record in old.tensors
            if record.name in reader.tensors
        )
        front = replace(old, index_xxh3=reader.index_xxh3, metadata_xxh3=reader.metadata_xxh3)
    data = path.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    new = replace(front, tensors=records, sha256=sha256, file_bytes=len(data))
    receipt_path(path).write_bytes(new.encode())


def rebuild(
    path: Path,
    out: Path,
    tensors: Callable[[Payloads], Payloads] = lambda payloads: payloads,
    metadata: Callable[[dict[str, Any]], dict[str, Any]] = lambda metadata: metadata,
) -> Path:
    """Write ``out`` as ``path`` with other tensors or metadata: a sound file in itself."""
    with Reader(path) as reader:
        held = {
            name: (entry.type_id, entry.shape, reader.read(name).tobytes())
            for name, entry in reader.tensors.items()
        }
        words = dict(reader.metadata)
    payloads = dict(sorted(tensors(held).items()))
    words = metadata(words)
    specs = [TensorSpec(name, kind, shape) for name, (kind, shape, _) in payloads.items()]
    ours = words.get("ds4q")
    if ours is not None:
        words = words | {"ds4q": ours | {"metadata_xxh3": BLANK_DIGEST}}
    planned = layout(specs, len(canonical(words)), arch_id=ARCH_DEEPSEEK4)
    words["hipfire_recipe_census"] = census(planned.entries)
    planned = layout(specs, len(canonical(words)), arch_id=ARCH_DEEPSEEK4)
    raw = canonical(words)
    if ours is not None:
        index = front_digest(planned.header, planned.index)
        raw = seal(words | {"ds4q": words["ds4q"] | {"index_xxh3": index}})
    out.write_bytes(planned.front(raw) + b"".join(p for _, _, p in payloads.values()))
    return out
