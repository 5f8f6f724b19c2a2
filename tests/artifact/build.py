"""Owns HFQ files built byte by byte, legal or broken in one chosen place. Does not use the writer.

The layout is spelled out again on purpose: a mistake in the reader's or writer's constants must not
hide in the files that test them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact import metadata as metadata_json
from ds4q.artifact import writer
from ds4q.artifact.hfq import ARCH_DEEPSEEK4
from ds4q.artifact.types import TYPES

METADATA = b'{"config":{}}'
F16_ONE = b"\x00\x3c"


@dataclass(frozen=True)
class Tensor:
    """One index entry and its payload. The rest is what the entry claims."""

    name: str | bytes = "a.weight"
    type_id: int = 1
    shape: tuple[int, ...] = (4,)
    group_size: int = 0
    payload: bytes = F16_ONE * 4
    nbytes: int | None = None
    offset: int | None = None
    n_dims: int | None = None
    name_length: int | None = None

    def entry(self, offset: int | None) -> bytes:
        """The entry's bytes; with ``offset`` in version 2 form."""
        name = self.name.encode() if isinstance(self.name, str) else self.name
        length = len(name) if self.name_length is None else self.name_length
        n_dims = len(self.shape) if self.n_dims is None else self.n_dims
        nbytes = len(self.payload) if self.nbytes is None else self.nbytes
        out = struct.pack("<H", length) + name + struct.pack("<BB", self.type_id, n_dims)
        out += struct.pack(f"<{len(self.shape)}I", *self.shape)
        out += struct.pack("<IQ", self.group_size, nbytes)
        if offset is None:
            return out
        claimed = offset // 32 if self.offset is None else self.offset
        return out + struct.pack("<Q", claimed)


TWO = (Tensor("a.weight"), Tensor("b.weight", 2, (2, 3), 0, bytes(24)))


@dataclass(frozen=True)
class File:
    """A whole file. Every ``None`` is the legal value; anything else is written as given."""

    tensors: Sequence[Tensor] = TWO
    metadata: bytes = METADATA
    version: int = 1
    magic: bytes = b"HFQM"
    arch_id: int = 9
    count: int | None = None
    index_count: int | None = None
    metadata_offset: int = 32
    data_offset: int | None = None
    gap: bytes = b""  # between header and metadata, where metadata_offset is not 32
    padding: bytes | None = None
    tail: bytes = b""

    def data(self) -> bytes:
        """The file."""
        return self.front() + self.payloads() + self.tail

    def aligned_end(self, index_bytes: int) -> int:
        """Where the payload begins: the end of the index, rounded up to 4096."""
        end = 32 + len(self.gap) + len(self.metadata) + index_bytes
        return -(-end // 4096) * 4096

    def front(self) -> bytes:
        """Everything before the payload."""
        index = self.index(4096)  # the length does not depend on the offsets
        data_at = self.aligned_end(len(index)) if self.data_offset is None else self.data_offset
        index = self.index(data_at)
        n = len(self.tensors)
        header = self.magic + struct.pack(
            "<IIIQQ",
            self.version,
            self.arch_id,
            n if self.count is None else self.count,
            self.metadata_offset,
            data_at,
        )
        out = header + self.gap + self.metadata + index
        padding = b"\0" * (data_at - len(out)) if self.padding is None else self.padding
        return out + padding

    def index(self, data_at: int) -> bytes:
        """Count and entries."""
        n = len(self.tensors) if self.index_count is None else self.index_count
        out, at = struct.pack("<I", n), data_at
        for tensor in self.tensors:
            out += tensor.entry(at if self.version == 2 else None)
            at += len(tensor.payload)
            if self.version == 2:
                at = -(-at // 32) * 32
        return out

    def payloads(self) -> bytes:
        """Back to back; in version 2 each begins at a multiple of 32."""
        out = b""
        for tensor in self.tensors:
            out += b"\0" * (-len(out) % 32 if self.version == 2 else 0) + tensor.payload
        return out

    def but(self, **changes: Any) -> File:
        """The same file with some fields replaced."""
        return replace(self, **changes)

    def write(self, folder: Path, name: str = "x.hfq") -> Path:
        """Write it to ``folder`` and return its path."""
        path = folder / name
        path.write_bytes(self.data())
        return path


def sealed(
    tensors: Sequence[Tensor] = TWO,
    *,
    ours: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
) -> bytes:
    """A file as ds4q writes it: planned by the writer, with both digests in its metadata."""
    specs = [writer.TensorSpec(str(t.name), t.type_id, t.shape) for t in tensors]
    counts: dict[str, int] = {}
    for spec in specs:
        counts[TYPES[spec.type_id].name] = counts.get(TYPES[spec.type_id].name, 0) + 1
    private = any(spec.type_id >= 100 for spec in specs)
    own = {"index_xxh3": metadata_json.BLANK_DIGEST, "metadata_xxh3": metadata_json.BLANK_DIGEST}
    document = {
        "architecture": "deepseek_v4",
        "config": {"model_type": "deepseek_v4"},
        "ds4q": own | {"private_qt": private, "recipe": "fp4", "tool_version": "0"} | (ours or {}),
        "hipfire_quant_recipe": "ds4q-fp4",
        "hipfire_recipe_census": dict(sorted(counts.items())),
    } | (metadata or {})
    plan = writer.layout(specs, len(metadata_json.canonical(document)), arch_id=ARCH_DEEPSEEK4)
    document["ds4q"]["index_xxh3"] = metadata_json.front_digest(plan.header, plan.index)
    return plan.front(metadata_json.seal(document)) + b"".join(t.payload for t in tensors)


def source_tensors(path: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """Raw bytes of every tensor of a safetensors file, 2-D by the rows of its shape."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    out = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        begin, end = entry["data_offsets"]
        data = np.frombuffer(raw, np.uint8, end - begin, 8 + length + begin)
        out[name] = data.reshape(entry["shape"][0], -1)
    return out
