"""Owns the receipt: what a third party needs to check an artifact without the engine.

A receipt is one zstd frame of canonical JSON beside the artifact (``NAME.hfq.receipt``). It holds
no clock and no path, so the same job writes the same bytes. It says per tensor where the bytes came
from (source names, dtype, shape, xxh3-128) and what they became (type, shape, xxh3-128 of the
payload), and for the whole file its length and SHA-256.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from ds4q.artifact.errors import ArtifactError, MetadataError, ReceiptError
from ds4q.artifact.hfq import Reader
from ds4q.artifact.metadata import canonical, front_digest, parse_metadata
from ds4q.artifact.types import BY_NAME

FORMAT = "ds4q.receipt.v1"
SUFFIX = ".receipt"
MAX_RECEIPT_BYTES = 1 << 30
_LEVEL = 9


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """One source tensor: name, safetensors dtype, shape, xxh3-128 (hex) of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    xxh3: str


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One packed tensor. ``events`` counts what the conversion met (roundings, edge scales)."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    xxh3: str
    sources: tuple[SourceRecord, ...]
    events: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The parsed receipt; ``index_xxh3`` covers header and index as ``ds4q.index_xxh3`` does."""

    file_bytes: int
    sha256: str
    index_xxh3: str
    recipe: str
    tool_version: str
    source_fingerprint: str
    source_digest: str
    partial: bool
    skipped: tuple[tuple[str, str], ...]  # (source tensor, reason)
    tensors: tuple[TensorRecord, ...]

    def encode(self) -> bytes:
        """The file's bytes."""
        text = canonical({"format": FORMAT} | asdict(self))
        packer = zstandard.ZstdCompressor(
            level=_LEVEL, write_checksum=True, write_content_size=True, threads=0
        )
        return packer.compress(text)


def _fail(path: object, what: str, error: Exception | None = None) -> ReceiptError:
    return ReceiptError(what, path=path, found=None if error is None else error)


def read_receipt(path: str | os.PathLike[str]) -> Receipt:
    """Parse a receipt strictly; anything else raises ``ReceiptError`` naming the file."""
    raw = Path(path).read_bytes()
    try:
        size = zstandard.frame_content_size(raw)
        if not 0 <= size <= MAX_RECEIPT_BYTES:
            raise _fail(path, f"receipt does not state a length of at most {MAX_RECEIPT_BYTES}")
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        text = unpacker.decompress(raw)
        # Decompression stops silently after one frame, or before the end of a cut one.
        if not unpacker.eof or unpacker.unused_data or len(text) != size:
            raise _fail(path, "receipt is cut short or has bytes behind its end")
    except zstandard.ZstdError as error:
        raise _fail(path, "receipt is not an intact zstd frame", error) from None
    try:
        document = parse_metadata(text, path)
    except MetadataError as error:
        raise ReceiptError(f"receipt: {error.what}", path=path, found=error.found) from None
    if document.pop("format", None) != FORMAT:
        raise _fail(path, f"not a receipt of format {FORMAT}")
    return _build(document, path)


def _build(document: dict[str, Any], path: object) -> Receipt:
    try:
        tensors = []
        for item in document.pop("tensors"):
            sources = tuple(
                SourceRecord(**{**s, "shape": tuple(s["shape"])}) for s in item.pop("sources")
            )
            item["shape"] = tuple(item["shape"])
            tensors.append(TensorRecord(**item, sources=sources))
        skipped = tuple((str(name), str(why)) for name, why in document.pop("skipped"))
        receipt = Receipt(**document, tensors=tuple(tensors), skipped=skipped)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _fail(path, "receipt lacks a field or has one too many", error) from None
    strings = (receipt.sha256, receipt.index_xxh3, receipt.recipe, *(t.xxh3 for t in tensors))
    if not isinstance(receipt.file_bytes, int) or not all(isinstance(s, str) for s in strings):
        raise _fail(path, "receipt has a field of the wrong kind")
    unknown = [t for t in tensors if t.type not in BY_NAME]
    if unknown:
        raise ReceiptError(
            "receipt names an unknown type",
            path=path,
            tensor=unknown[0].name,
            found=unknown[0].type,
        )
    return receipt


def receipt_path(artifact: Path) -> Path:
    """Where the receipt of ``artifact`` is written."""
    return artifact.with_name(artifact.name + SUFFIX)


def find_receipt(reader: Reader, explicit: Path | None = None) -> tuple[Path, Receipt] | None:
    """The receipt of an open artifact, or None.

    ``explicit`` is used as given. Otherwise: by name; else, for a renamed artifact, the one receipt
    of the folder with the file's length, preferring one with the same header and index.
    """
    if explicit is not None:
        return explicit, read_receipt(explicit)
    by_name = receipt_path(reader.path)
    if by_name.exists():
        return by_name, read_receipt(by_name)
    fitting = []
    for path in sorted(reader.path.parent.glob("*" + SUFFIX)):
        try:
            receipt = read_receipt(path)
        except (ArtifactError, OSError):
            continue  # some other tool's file: not ours to judge while looking for a name
        if receipt.file_bytes == reader.file_bytes:
            fitting.append((path, receipt))
    front = front_digest(reader.header_raw, reader.index_raw)
    same_front = [pair for pair in fitting if pair[1].index_xxh3 == front]
    for group in (same_front, fitting):
        if len(group) == 1:
            return group[0]
    return None
