"""Owns what only HFQ version 2 has: the metadata tail and the hash over index and payload.

ds4q reads version 2 and never writes it. The layout is that of hipfire's forks; ``FORMAT.md`` says
what is required.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ds4q.artifact.errors import ArtifactError, MetadataError
from ds4q.artifact.metadata import MAX_METADATA_BYTES, object_length, parse_metadata
from ds4q.artifact.report import Check, Failure

if TYPE_CHECKING:
    from ds4q.artifact.hfq import Reader, TensorEntry

OFFSET_UNIT = 32
TAIL_FORMAT = "hipfire.hfq.tail.v1"
HASH_ALGORITHM = "xxh64"
CHUNK_BYTES = 4 << 20

# scope -> (text that is hashed first, whether offset / 32 is hashed for each tensor)
HASH_SCOPES = {
    "hfq_v2_index_offsets_and_payload": (b"hipfire-hfq-v2-critical-index-and-payload", True),
    "hfq_tensor_index_and_payload_v1": (b"hipfire-hfq-quantized-tensor-payload-v1", False),
}


def read_tail(reader: Reader, declared: Any) -> tuple[dict[str, Any], int]:
    """The full metadata, which version 2 keeps behind the payload, and the tail's end.

    ``declared`` is the front object's ``tail_metadata``. Raises ``MetadataError`` unless it
    describes a range behind the last payload that holds the object it promises.
    """
    fields = declared if isinstance(declared, dict) else {}
    offset, size = fields.get("offset"), fields.get("size")
    if (
        not isinstance(offset, int)
        or not isinstance(size, int)
        or offset % OFFSET_UNIT
        or offset < reader.payload_end
        or not 0 < size <= MAX_METADATA_BYTES
        or offset + size > reader.file_bytes
    ):
        raise MetadataError(
            "tail_metadata does not describe a range behind the payload",
            path=reader.path,
            found=f"offset {offset}, size {size}",
        )
    raw = np.empty(size, dtype=np.uint8)
    reader.pread_into(raw, offset)
    value = _declared_value(fields["hash"]) if "hash" in fields else None
    found = xxhash.xxh64(raw.data, seed=0).hexdigest()
    if "hash" in fields and value != found:
        raise MetadataError(
            "tail metadata does not match its hash", path=reader.path, expected=value, found=found
        )
    if object_length(raw.data, reader.path) != size:
        raise MetadataError("bytes follow the object of the tail", path=reader.path)
    parsed = parse_metadata(raw.tobytes(), reader.path)
    full = parsed.get("metadata")
    if parsed.get("format") != TAIL_FORMAT or not isinstance(full, dict):
        raise MetadataError(
            "tail holds no 'metadata' object",
            path=reader.path,
            expected=f"format {TAIL_FORMAT}",
            found=parsed.get("format"),
        )
    return full, offset + size


def _declared_value(declared: Any) -> Any:
    """The hash value of a declaration, or a text that no hash equals."""
    fields = declared if isinstance(declared, dict) else {}
    if fields.get("algorithm") != HASH_ALGORITHM or fields.get("seed", 0) != 0:
        return f"{HASH_ALGORITHM} with seed 0, not {fields.get('algorithm')!r}"
    return fields.get("value")


def declares_hash(reader: Reader) -> bool:
    """Whether the file promises a hash over its index and payload."""
    return "quantization_hash" in reader.front_metadata


def check_quantization_hash(reader: Reader, check: Check) -> None:
    """Compare ``quantization_hash`` with the file; reads every payload once, in index order.

    Raises
    ------
    ArtifactError : the declaration cannot be checked: another algorithm or scope
    """
    declared = reader.front_metadata.get("quantization_hash")
    fields = declared if isinstance(declared, dict) else {}
    scope = fields.get("scope")
    if not isinstance(scope, str) or scope not in HASH_SCOPES:
        raise ArtifactError(
            "quantization_hash has an unknown scope", path=reader.path, found=repr(scope)
        )
    if HASH_SCOPES[scope][1] and reader.version != 2:
        raise ArtifactError(
            "quantization_hash covers offsets that this version does not have",
            path=reader.path,
            found=f"version {reader.version}",
        )
    payload_bytes = sum(entry.nbytes for entry in reader.tensors.values())
    counted = {"tensor_count": len(reader.tensors), "payload_bytes": payload_bytes}
    for key, found in counted.items():
        if key in fields and fields[key] != found:
            check.fail(Failure(f"quantization_hash.{key}", expected=str(fields[key]), found=found))
    value, found_hash = _declared_value(declared), quantization_hash(reader, scope)
    check.figures["xxh64"] = found_hash
    if value != found_hash:
        check.fail(Failure("quantization hash differs", expected=str(value), found=found_hash))


def quantization_hash(reader: Reader, scope: str) -> str:
    """xxh64 (16 hex digits) of index fields and payloads in index order, padding left out."""
    text, with_offsets = HASH_SCOPES[scope]
    hasher = xxhash.xxh64(text, seed=0)
    for entry in reader.tensors.values():
        hasher.update(_entry_fields(entry, with_offsets))
        for part in _payload(reader, entry):
            hasher.update(part)
    return hasher.hexdigest()


def _entry_fields(entry: TensorEntry, with_offsets: bool) -> bytes:
    name = entry.name.encode("utf-8")
    n_dims = len(entry.shape)
    out = struct.pack("<Q", len(name)) + name + struct.pack("<BQ", entry.type_id, n_dims)
    out += struct.pack(f"<{n_dims}II", *entry.shape, entry.group_size)
    if with_offsets:
        out += struct.pack("<Q", entry.offset // OFFSET_UNIT)
    return out + struct.pack("<Q", entry.nbytes)


def _payload(reader: Reader, entry: TensorEntry) -> Iterator[memoryview]:
    buffer = np.empty(min(CHUNK_BYTES, entry.nbytes), dtype=np.uint8)
    for start in range(0, entry.nbytes, CHUNK_BYTES):
        part = buffer[: min(CHUNK_BYTES, entry.nbytes - start)]
        reader.read_into(entry, part, start)
        yield part.data
