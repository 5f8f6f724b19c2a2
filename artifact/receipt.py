"""Owns the receipt: what a third party needs to check an artifact without the engine.

A receipt is one zstd frame of canonical JSON beside the artifact (``NAME.hfq.receipt``). It holds
no clock and no path, so the same job writes the same bytes. It says per tensor where the bytes came
from (source names, dtype, shape, xxh3-128) and what they became (type, shape, xxh3-128 of the
payload), and for the whole file its length and SHA-256.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import zstandard

from ds4q.artifact.errors import MetadataError, ReceiptError
from ds4q.artifact.files import NotRegularError, open_regular
from ds4q.artifact.hfq import Reader
from ds4q.artifact.metadata import canonical, parse_metadata
from ds4q.artifact.places import broken_link
from ds4q.artifact.types import BY_NAME

FORMAT = "ds4q.receipt.v3"
_LACKING = {  # by format: the fields that it does not have, "" in memory
    "ds4q.receipt.v1": ("imatrix_sha256", "metadata_xxh3"),
    "ds4q.receipt.v2": ("metadata_xxh3",),
    FORMAT: (),
}
SUFFIX = ".receipt"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
MAX_RECEIPT_BYTES = 64 << 20  # compressed and not
SATURATED = "saturated_blocks"  # the event of a block outside the range of its type
_BEGINNING = b'{"file_bytes":'  # of the canonical JSON
_MAX_WINDOW_BYTES = 8 << 20  # level 9 takes 4 MiB
_LEVEL = 9
_STEP_BYTES = 1024
_CUT_REMEDY = "copy it again from where the artifact came from, or remove it to go without digests"

R = TypeVar("R", bound="SourceRecord | TensorRecord | Receipt")


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

    @property
    def saturated_blocks(self) -> float:
        """Blocks outside the range of the tensor's type."""
        return self.events.get(SATURATED, 0)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The parsed receipt; ``index_xxh3`` and ``metadata_xxh3`` as in the artifact's own metadata.

    A receipt of an earlier version has no ``metadata_xxh3``; ``metadata_note`` says so.
    """

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
    metadata_xxh3: str
    imatrix_sha256: str = ""  # of the file that weighed the errors of lossy types

    @property
    def metadata_note(self) -> str | None:
        """Why the metadata cannot be compared with this receipt; None where it can."""
        if self.metadata_xxh3:
            return None
        return "the receipt is of an earlier version, which does not cover the metadata"

    def encode(self) -> bytes:
        """The file's bytes."""
        text = canonical({"format": FORMAT} | asdict(self))
        packer = zstandard.ZstdCompressor(
            level=_LEVEL, write_checksum=True, write_content_size=True, threads=0
        )
        return packer.compress(text)


def saturation_note(counts: Iterable[float]) -> str | None:
    """One line about saturated blocks, given the count of each tensor; None if there are none."""
    some = [int(count) for count in counts if count]
    if not some:
        return None
    tensors = f"{len(some):,} tensor{'s' if len(some) > 1 else ''}"
    return (
        f"not exact: {sum(some):,} blocks saturated in {tensors}: the scales of their types do not "
        "reach the source's"
    )


def _fail(
    path: object, what: str, found: object = None, *, remedy: str | None = None
) -> ReceiptError:
    return ReceiptError(what, path=path, found=found, remedy=remedy)


def read_receipt(path: str | os.PathLike[str]) -> Receipt:
    """Parse a receipt strictly; anything else raises ``ReceiptError`` naming the file."""
    document = _parse(_decompress(_read_file(path), path), path)
    version = document.pop("format", None)
    if not isinstance(version, str) or version not in _LACKING:
        raise _fail(path, f"not a receipt of format {' or '.join(_LACKING)}", version)
    for name in _LACKING[version]:
        if document.setdefault(name, "") != "":
            raise _fail(path, f"{version} has no {name}")
    return _build(document, path, version)


def is_receipt(head: bytes) -> bool:
    """Whether a file that begins so is a receipt: a zstd frame of a document of that kind."""
    if not head.startswith(ZSTD_MAGIC):
        return False
    try:
        unpacker = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        return unpacker.stream_reader(head).read(len(_BEGINNING)) == _BEGINNING
    except zstandard.ZstdError:
        return False


def _read_file(path: str | os.PathLike[str]) -> bytes:
    """The whole file, if it is small enough to be a receipt: it may be the artifact by mistake."""
    try:
        fd = open_regular(path)
    except NotRegularError as error:
        raise _fail(path, "receipt is not a regular file", error.found) from None
    with open(fd, "rb") as file:
        head = file.read(len(ZSTD_MAGIC))
        if not head:
            raise _fail(path, "receipt is empty", remedy=_CUT_REMEDY)
        if head != ZSTD_MAGIC:
            raise _fail(path, "receipt is not a zstd frame", head)
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > MAX_RECEIPT_BYTES:
            raise _fail(path, f"receipt is longer than {MAX_RECEIPT_BYTES} bytes", nbytes)
        return head + file.read()


def _decompress(raw: bytes, path: object) -> bytes:
    """The text of exactly one frame that says its own length; never more than it says."""
    try:
        size = zstandard.frame_content_size(raw)
        if not 0 <= size <= MAX_RECEIPT_BYTES:
            raise _fail(path, f"receipt does not state a length of at most {MAX_RECEIPT_BYTES}")
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        text, at = bytearray(), 0
        # Small steps: a few bytes of a forged frame may stand for gigabytes.
        while at < len(raw) and not unpacker.eof and len(text) <= size:
            text += unpacker.decompress(raw[at : at + _STEP_BYTES])
            at += _STEP_BYTES
    except zstandard.ZstdError as error:
        raise _fail(
            path, "receipt is not an intact zstd frame", error, remedy=_CUT_REMEDY
        ) from None
    # Decompression stops silently after one frame, or before the end of a cut one.
    if len(text) > size:
        raise _fail(path, f"receipt holds more than the {size:,} bytes of text that it states")
    if not unpacker.eof or len(text) < size:
        raise _fail(
            path,
            f"receipt is cut short: it ends before the {size:,} bytes of text that it states",
            f"{len(raw):,} bytes of the file",
            remedy=_CUT_REMEDY,
        )
    if unpacker.unused_data or at < len(raw):
        raise _fail(path, "bytes follow the end of the receipt")
    return bytes(text)


def _parse(text: bytes, path: object) -> dict[str, Any]:
    try:
        return parse_metadata(text, path)
    except MetadataError as error:
        raise _fail(path, f"receipt: {error.what}", error.found) from None


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_list(value: object, item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(item, value))


# The kinds of JSON value that a field's annotation stands for.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "str": lambda v: isinstance(v, str),
    "bool": lambda v: isinstance(v, bool),
    "int": _is_count,
    "dict[str, float]": lambda v: (
        isinstance(v, dict) and all(type(x) in (int, float) for x in v.values())
    ),
    "tuple[int, ...]": lambda v: _is_list(v, _is_count),
    "tuple[tuple[str, str], ...]": lambda v: _is_list(
        v, lambda pair: _is_list(pair, lambda x: isinstance(x, str)) and len(pair) == 2
    ),
    "tuple[SourceRecord, ...]": lambda v: isinstance(v, list),
    "tuple[TensorRecord, ...]": lambda v: isinstance(v, list),
}
_HEX_DIGITS = {
    "sha256": 64,
    "imatrix_sha256": 64,
    "index_xxh3": 32,
    "metadata_xxh3": 32,
    "xxh3": 32,
}
_HEX = {n: re.compile(f"[0-9a-f]{{{n}}}") for n in _HEX_DIGITS.values()}


# By class and field: annotation, kind of JSON value, and the pattern of a digest. A large model's
# receipt asks for them 100,000 times.
_Wanted = dict[str, tuple[str, Callable[[Any], bool], re.Pattern[str] | None]]
_WANTED: dict[type[Any], _Wanted] = {
    kind: {
        field.name: (
            str(field.type),
            _KINDS[str(field.type)],
            _HEX[_HEX_DIGITS[field.name]] if field.name in _HEX_DIGITS else None,
        )
        for field in fields(kind)
    }
    for kind in (SourceRecord, TensorRecord, Receipt)
}


def _record(kind: type[R], item: Any, path: object) -> R:
    """``kind`` from a JSON object that has exactly its fields, each of the right kind."""
    wanted = _WANTED[kind]
    if not isinstance(item, dict) or item.keys() != wanted.keys():
        keys = sorted(item) if isinstance(item, dict) else item
        raise _fail(path, f"receipt lacks a field of {kind.__name__} or has one too many", keys)
    values: dict[str, Any] = {}
    for name, (annotation, right, digest) in wanted.items():
        value = item[name]
        absent = name in ("imatrix_sha256", "metadata_xxh3") and value == ""  # see ``_build``
        if not right(value) or (digest and not absent and not digest.fullmatch(value)):
            raise _fail(path, f"receipt has a {name} of the wrong kind", repr(value)[:80])
        if annotation == "tuple[SourceRecord, ...]":
            value = [_record(SourceRecord, source, path) for source in value]
        elif annotation == "tuple[TensorRecord, ...]":
            value = [_record(TensorRecord, tensor, path) for tensor in value]
        elif annotation == "tuple[tuple[str, str], ...]":
            value = [tuple(pair) for pair in value]
        values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _build(document: dict[str, Any], path: object, version: str) -> Receipt:
    receipt = _record(Receipt, document, path)
    needed = "metadata_xxh3" if version == FORMAT else "imatrix_sha256"
    if needed not in _LACKING[version] and not getattr(receipt, needed):
        raise _fail(path, f"{version} without {needed}")
    seen: set[str] = set()
    for record in receipt.tensors:
        if record.type not in BY_NAME:
            raise ReceiptError(
                "receipt names an unknown type", path=path, tensor=record.name, found=record.type
            )
        if record.name in seen:
            raise ReceiptError("receipt names a tensor twice", path=path, tensor=record.name)
        seen.add(record.name)
    return receipt


def receipt_path(artifact: Path) -> Path:
    """Where the receipt of ``artifact`` is written."""
    return artifact.with_name(artifact.name + SUFFIX)


def find_receipt(reader: Reader, explicit: Path | None = None) -> tuple[Path, Receipt] | None:
    """The receipt of an open artifact, or None.

    ``explicit`` is used as given. Otherwise: by name; else, for a renamed artifact, a receipt of
    the folder with the same length, header, index and source. None of these depends on the payload,
    so a damaged artifact still finds its receipt. Raises ``ReceiptError`` where the file that was
    named is not a receipt.
    """
    if explicit is not None:
        return explicit, read_receipt(explicit)
    by_name = receipt_path(reader.path)
    if (what := broken_link(by_name)) is not None:
        raise ReceiptError(what, path=by_name, remedy="mend the link, or remove it")
    try:
        if by_name.exists():
            return by_name, read_receipt(by_name)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # a file of that name cannot be
            raise
    ours = reader.metadata.get("ds4q")
    source_digest = ours.get("source_digest") if isinstance(ours, dict) else None
    for path in sorted(reader.path.parent.glob("*" + SUFFIX)):
        try:
            receipt = read_receipt(path)
        except (ReceiptError, OSError):
            continue  # some other tool's file: not ours to judge while looking for a name
        found = (receipt.file_bytes, receipt.index_xxh3, receipt.source_digest)
        if found == (reader.file_bytes, reader.index_xxh3, source_digest):
            return path, receipt
    return None
