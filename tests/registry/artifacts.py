"""Owns artifacts of random bytes with a true receipt, and registry documents that name them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import Receipt, TensorRecord, receipt_path
from ds4q.artifact.types import BY_NAME
from ds4q.artifact.writer import TensorSpec, layout
from tests.registry import documents

TAG = "deepseek-v4-flash:fp4"
COLUMNS = 4096


def write(path: Path, tensors: int, rows: int, seed: int = 0) -> Receipt:
    """An artifact of F32 tensors ``[rows, 4096]`` at ``path``, its receipt beside it."""
    metadata = json.dumps({"architecture": "deepseek_v4"}).encode()
    names = [f"layers.{number}.weight" for number in range(tensors)]
    specs = [TensorSpec(name, BY_NAME["F32"].id, (rows, COLUMNS)) for name in names]
    plan = layout(specs, len(metadata), arch_id=9)
    rng = np.random.default_rng(seed)
    whole = hashlib.sha256()
    records = []
    with path.open("wb") as file:
        front = plan.front(metadata)
        whole.update(front)
        file.write(front)
        for spec in specs:
            payload = rng.bytes(spec.nbytes)
            whole.update(payload)
            file.write(payload)
            digest = xxhash.xxh3_128_hexdigest(payload)
            records.append(TensorRecord(spec.name, "F32", spec.shape, spec.nbytes, digest, ()))
    with Reader(path) as reader:
        index, told = reader.index_xxh3, reader.metadata_xxh3
    receipt = Receipt(
        file_bytes=plan.file_bytes,
        sha256=whole.hexdigest(),
        index_xxh3=index,
        metadata_xxh3=told,
        recipe="fp4",
        tool_version="0",
        source_fingerprint="0" * 32,
        source_digest="0" * 64,
        partial=False,
        skipped=(),
        tensors=tuple(records),
    )
    receipt_path(path).write_bytes(receipt.encode())
    return receipt


def registered(path: Path) -> dict[str, Any]:
    """Size and digest of a file, as an entry has them."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": path.name, "sha256": digest, "size_bytes": path.stat().st_size}


def document(repo: str, path: Path, **changes: Any) -> dict[str, Any]:
    """A registry that holds ``TAG``: the artifact at ``path`` and its receipt, from ``repo``."""
    known = registered(path)
    size_gb = known["size_bytes"] / 1e9
    receipt = registered(receipt_path(path))
    entry = documents.entry(repo=repo, size_gb=size_gb, receipt=receipt, **known | changes)
    return documents.document({TAG: entry})
