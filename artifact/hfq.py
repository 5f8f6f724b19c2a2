"""Owns the HFQ container: layout constants and the strict reader. Never writes, never decodes.

The reader checks in a fixed order: magic, version, offsets, metadata, index, digests, bounds.
Nothing is allocated from a number that has not been compared with the file's length. ``FORMAT.md``
states every ruling with its reason.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import (
    ArtifactError,
    DuplicateTensorError,
    HeaderError,
    IndexFieldError,
    MagicError,
    MetadataError,
    PayloadBoundsError,
    TensorTypeError,
    TruncatedError,
    UnknownTensorError,
    VersionError,
)
from ds4q.artifact.files import NotRegularError, advise, open_regular
from ds4q.artifact.hfq2 import OFFSET_UNIT, read_tail
from ds4q.artifact.metadata import (
    any_metadata_digest,
    front_digest,
    metadata_digest,
    object_length,
    parse_metadata,
)
from ds4q.artifact.opened import OpenedFile
from ds4q.artifact.types import RESERVED_IDS, check_entry

MAGIC = b"HFQM"
UNFINISHED_MAGIC = b"HFQ!"
LFS_PREFIX = b"version https://git-lfs."  # of what git-lfs checks out in place of a file
VERSION_WRITTEN = 1
VERSIONS_READ = (1, 2)
HEADER = struct.Struct("<4sIIIQQ")  # magic, version, arch_id, n_tensors, metadata_, data_offset
HEADER_BYTES = 32
ALIGNMENT = 4096
ARCH_DEEPSEEK4 = 9
NAME_LENGTH = struct.Struct("<H")
ENTRY_HEAD = struct.Struct("<BB")  # quant_type, n_dims
ENTRY_TAIL = struct.Struct("<IQ")  # group_size, data_size
ENTRY_OFFSET = struct.Struct("<Q")  # version 2: payload offset / 32
ENTRY_FIXED_BYTES = {1: 16, 2: 24}
MAX_FRONT_BYTES = 512 << 20

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One index entry: ``shape`` in logical elements (out, in), ``offset`` in the file."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    group_size: int
    nbytes: int
    offset: int


def printable(name: str) -> bool:
    """Whether a tensor name is free of control characters, NUL and lone surrogates."""
    return _UNPRINTABLE.search(name) is None


def flat(data: bytes | memoryview | U8) -> memoryview:
    """The bytes of contiguous ``data`` as one flat view: its length counts bytes, not rows."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def pread_all(fd: int, out: U8, offset: int, *, path: object) -> None:
    """Fill ``out`` (contiguous) from ``offset`` of an open file, or raise ``TruncatedError``."""
    view = flat(out)
    done = 0
    while done < len(view):
        n = os.preadv(fd, [view[done:]], offset + done)
        if n == 0:
            raise TruncatedError(
                path=path, expected=f"{len(view)} bytes at offset {offset}", found=f"{done}"
            )
        done += n


def _misfit(entries: list[TensorEntry]) -> str | None:
    """Which tensor a damaged index is wrong about: the first that contradicts itself, if one does.

    A digest covers the index as a whole and cannot tell.
    """
    for entry in entries:
        try:
            check_entry(entry.type_id, entry.shape, entry.group_size, entry.nbytes)
        except ArtifactError:
            return entry.name
    return None


class _IndexCursor:
    """Takes fields from the index bytes; every field must end at or before data_offset."""

    def __init__(self, raw: memoryview, path: object) -> None:
        self.raw, self.path, self.at = raw, path, 0

    def take(self, n: int, field: str, number: int) -> memoryview:
        end = self.at + n
        if end > len(self.raw):
            raise IndexFieldError(
                f"index entry {number} runs past data_offset",
                path=self.path,
                found=f"{field} needs {n} bytes, {len(self.raw) - self.at} left",
            )
        part = self.raw[self.at : end]
        self.at = end
        return part


class Reader:
    """An open HFQ file whose structure has been validated; payloads are read with pread.

    Parameters
    ----------
    path : the file
    base : offset of a container that lies inside a larger file (version 1 only)

    Attributes
    ----------
    tensors : name -> entry, in index order
    metadata, metadata_raw : the parsed object and its bytes
    front_metadata : in version 2 the object in front of the index, where a tail holds the full one
    header_raw, index_raw : the 32 header bytes, and the index with its count
    opened : identity of the file, to detect writes to it
    warnings : what is legal but unusual; ``strict_warnings`` adds what published files also do
    payload_end : first byte after the last payload (version 2: or after the tail)
    embedded_at : where another container begins right behind this one, or None

    Raises
    ------
    ArtifactError : the first rule that the file breaks; ``OSError`` where it cannot be read
    """

    def __init__(self, path: str | os.PathLike[str], *, base: int = 0) -> None:
        self.path = Path(path)
        self.base = base
        self.warnings: list[str] = []
        self.strict_warnings: list[str] = []
        try:
            self._fd = open_regular(self.path)
        except NotRegularError as error:
            raise MagicError(path=self.path, found=error.found or error.rule) from None
        try:
            self.opened = OpenedFile(self._fd, self.path)
            self.file_bytes = self.opened.status.st_size
            self._open()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def fd(self) -> int:
        """The open file, for advice to the kernel."""
        return self._fd

    def check_unchanged(self) -> None:
        """Raise ``ChangedError`` unless the path still leads to the file as it was opened."""
        self.opened.check_path()

    def check_unwritten(self) -> str | None:
        """As ``OpenedFile.check_bytes``: the path may lead to another file by now."""
        return self.opened.check_bytes(self._fd)

    def reopen(self, flags: int = 0) -> int:
        """Another descriptor of this very file; the caller closes it. See ``OpenedFile.reopen``."""
        return self.opened.reopen(self._fd, flags)

    # ------------------------------------------------------------------ reading

    def pread_into(self, out: U8, offset: int) -> None:
        """Fill ``out`` (contiguous) from file ``offset``, or raise ``TruncatedError``."""
        pread_all(self._fd, out, offset, path=self.path)

    def entry(self, name: str) -> TensorEntry:
        """The index entry of ``name``; exact match only."""
        try:
            return self.tensors[name]
        except KeyError:
            raise UnknownTensorError(path=self.path, tensor=name) from None

    def read_into(self, entry: TensorEntry, out: U8, start: int = 0) -> None:
        """Fill ``out`` with the payload bytes of ``entry`` from byte ``start`` on."""
        if start < 0 or start + out.nbytes > entry.nbytes:
            raise PayloadBoundsError(
                path=self.path,
                tensor=entry.name,
                expected=f"at most {entry.nbytes} bytes",
                found=f"{start}+{out.nbytes}",
            )
        self.pread_into(out, entry.offset + start)

    def expect(self, entry: TensorEntry, start: int, nbytes: int) -> None:
        """Payload bytes that are read next: the system may bring them nearer meanwhile."""
        advise(self._fd, entry.offset + start, nbytes)

    def read(self, name: str) -> U8:
        """The whole payload of ``name`` as a fresh 1-D array."""
        entry = self.entry(name)
        out = np.empty(entry.nbytes, dtype=np.uint8)
        self.read_into(entry, out)
        return out

    # ------------------------------------------------------------------ opening

    def _open(self) -> None:
        available = self.file_bytes - self.base
        if available < HEADER_BYTES:
            raise TruncatedError(
                path=self.path, expected=f"at least {HEADER_BYTES} bytes", found=available
            )
        header = np.empty(HEADER_BYTES, dtype=np.uint8)
        self.pread_into(header, self.base)
        self.header_raw = header.tobytes()
        fields = HEADER.unpack(self.header_raw)
        magic, self.version, self.arch_id, count, metadata_offset, data_offset = fields
        if magic != MAGIC:
            unfinished = magic == UNFINISHED_MAGIC
            pointer = self.header_raw.startswith(LFS_PREFIX)
            raise MagicError(
                "unfinished version-2 file" if unfinished else None,
                path=self.path,
                expected=MAGIC,
                found="a git-lfs pointer" if pointer else magic,
                remedy="fetch the content with 'git lfs pull'" if pointer else None,
            )
        if self.version not in VERSIONS_READ:
            raise VersionError(path=self.path, expected="1 or 2", found=self.version)
        if self.version == 2 and self.base:
            raise VersionError("version 2 inside another file is not supported", path=self.path)
        if data_offset > available:
            raise TruncatedError(
                path=self.path, expected=f"at least {data_offset} bytes", found=available
            )
        if not HEADER_BYTES <= metadata_offset < data_offset:
            raise HeaderError(
                "metadata_offset out of range",
                path=self.path,
                expected=f"{HEADER_BYTES} to {data_offset - 1}",
                found=metadata_offset,
            )
        if data_offset - metadata_offset > MAX_FRONT_BYTES:
            raise HeaderError(
                "metadata and index are too long",
                path=self.path,
                expected=f"at most {MAX_FRONT_BYTES} bytes",
                found=data_offset - metadata_offset,
            )
        if metadata_offset != HEADER_BYTES:
            self.warnings.append(f"metadata_offset is {metadata_offset}, not {HEADER_BYTES}")
        if data_offset % ALIGNMENT:
            self.strict_warnings.append(f"data_offset {data_offset} is not {ALIGNMENT}-aligned")
        self.data_offset = self.base + data_offset
        self._read_front(count, metadata_offset, data_offset)

    def _read_front(self, count: int, metadata_offset: int, data_offset: int) -> None:
        front_bytes = np.empty(data_offset - metadata_offset, dtype=np.uint8)
        self.pread_into(front_bytes, self.base + metadata_offset)
        front = front_bytes.data
        end = object_length(front, self.path)
        self.metadata_raw = bytes(front[:end])
        self.metadata = parse_metadata(self.metadata_raw, self.path)
        cursor = _IndexCursor(front[end:], self.path)
        entries = self._read_index(cursor, count)
        self.index_raw = bytes(cursor.raw[: cursor.at])
        padding = cursor.raw[cursor.at :]
        if padding.nbytes and np.frombuffer(padding, dtype=np.uint8).any():
            self.strict_warnings.append("the padding between index and payload is not zero")
        self._check_front_digests(entries)
        self._place(entries)

    @property
    def index_xxh3(self) -> str:
        """xxh3-128 (hex) of header and index, as found."""
        return front_digest(self.header_raw, self.index_raw)

    @property
    def metadata_xxh3(self) -> str:
        """xxh3-128 (hex) of the metadata as found, its own digest blanked where it has one."""
        return any_metadata_digest(self.metadata_raw)

    def _check_front_digests(self, entries: list[TensorEntry]) -> None:
        """Files of ds4q carry digests of metadata and index: a changed byte is refused at open."""
        ours = self.metadata.get("ds4q")
        if ours is None:
            if str(self.metadata.get("hipfire_quant_recipe", "")).startswith("ds4q"):
                raise MetadataError("metadata lost its 'ds4q' object", path=self.path)
            return
        if not isinstance(ours, dict):
            raise MetadataError("metadata key 'ds4q' is not an object", path=self.path)
        checks = (
            ("metadata_xxh3", metadata_digest(self.metadata_raw), MetadataError, "metadata"),
            ("index_xxh3", self.index_xxh3, IndexFieldError, "header or index"),
        )
        for key, found, kind, what in checks:
            if found is None or ours.get(key) != found:
                raise kind(
                    f"{what} does not match its own digest ds4q.{key}",
                    path=self.path,
                    tensor=_misfit(entries) if kind is IndexFieldError else None,
                    expected=ours.get(key),
                    found=found,
                    remedy="the file is damaged: copy it again or re-create it",
                )

    def _read_index(self, cursor: _IndexCursor, count: int) -> list[TensorEntry]:
        (repeated,) = struct.unpack("<I", cursor.take(4, "tensor count", 0))
        if repeated != count:
            raise IndexFieldError(
                "index count differs from header count",
                path=self.path,
                expected=count,
                found=repeated,
            )
        room = (len(cursor.raw) - 4) // ENTRY_FIXED_BYTES[self.version]
        if count > room:
            raise IndexFieldError(
                "more tensors than the index has room for",
                path=self.path,
                expected=f"at most {room}",
                found=count,
            )
        entries: list[TensorEntry] = []
        seen: dict[str, int] = {}
        for number in range(count):
            entry = self._read_entry(cursor, number)
            first = seen.setdefault(entry.name, number)
            if first != number:
                raise DuplicateTensorError(
                    path=self.path, tensor=entry.name, found=f"entries {first} and {number}"
                )
            entries.append(entry)
        return entries

    def _read_entry(self, cursor: _IndexCursor, number: int) -> TensorEntry:
        (length,) = NAME_LENGTH.unpack(cursor.take(2, "name length", number))
        raw_name = bytes(cursor.take(length, "name", number))
        try:
            name = raw_name.decode("utf-8")
        except UnicodeDecodeError:
            raise IndexFieldError(
                f"name of index entry {number} is not UTF-8", path=self.path, found=raw_name
            ) from None
        if not name or not printable(name):
            raise IndexFieldError(
                f"name of index entry {number} is empty or holds control characters",
                path=self.path,
                found=repr(name),
            )
        type_id, n_dims = ENTRY_HEAD.unpack(cursor.take(2, "type and dims", number))
        if type_id in RESERVED_IDS:
            raise TensorTypeError(f"reserved tensor type {type_id}", path=self.path, tensor=name)
        shape = struct.unpack(f"<{n_dims}I", cursor.take(4 * n_dims, "dims", number))
        if 0 in shape:
            raise IndexFieldError("a dim is 0", path=self.path, tensor=name, found=list(shape))
        group_size, nbytes = ENTRY_TAIL.unpack(cursor.take(12, "sizes", number))
        offset = -1  # version 1 records none: it is the running sum
        if self.version == 2:
            (unit,) = ENTRY_OFFSET.unpack(cursor.take(8, "offset", number))
            offset = unit * OFFSET_UNIT
        return TensorEntry(name, type_id, shape, group_size, nbytes, offset)

    def _place(self, entries: list[TensorEntry]) -> None:
        """Give every entry its absolute offset and check it against the file's length."""
        self.tensors: dict[str, TensorEntry] = {}
        at = self.data_offset
        for entry in entries:
            start = at if self.version == 1 else entry.offset
            if start < self.data_offset:
                raise PayloadBoundsError(
                    path=self.path,
                    tensor=entry.name,
                    expected=f"offset of at least {self.data_offset}",
                    found=start,
                )
            at = start + entry.nbytes
            if at > self.file_bytes:
                raise TruncatedError(
                    "payload runs past the end of the file",
                    path=self.path,
                    tensor=entry.name,
                    expected=f"{at} bytes",
                    found=f"{self.file_bytes}",
                )
            # dataclasses.replace would take a third of the time of opening a large index.
            self.tensors[entry.name] = TensorEntry(
                entry.name, entry.type_id, entry.shape, entry.group_size, entry.nbytes, start
            )
        self.payload_end = max(
            (e.offset + e.nbytes for e in self.tensors.values()), default=self.data_offset
        )
        self.front_metadata = self.metadata
        if self.version == 2:
            self._check_overlaps()
            if "tail_metadata" in self.front_metadata:
                declared = self.front_metadata["tail_metadata"]
                self.metadata, self.payload_end = read_tail(self, declared)
        self._check_trailing()
        self._check_architecture()

    def _check_architecture(self) -> None:
        """hipfire's arch ids 5 and 6 are Qwen 3.5 and 3.6; a file that disagrees is mislabelled."""
        named = str(self.metadata.get("architecture", "")).lower().replace("_", ".")
        if named.startswith(("qwen3.5", "qwen3.6")) and self.arch_id not in (5, 6):
            self.warnings.append(f"metadata says {named!r}, but arch_id is {self.arch_id}")

    def _check_overlaps(self) -> None:
        in_order = sorted(self.tensors.values(), key=lambda e: (e.offset, e.nbytes))
        for before, after in itertools.pairwise(in_order):
            if before.offset + before.nbytes > after.offset:
                raise PayloadBoundsError(
                    f"payload overlaps that of {before.name}",
                    path=self.path,
                    tensor=after.name,
                    expected=f"offset of at least {before.offset + before.nbytes}",
                    found=after.offset,
                )

    def _check_trailing(self) -> None:
        extra = self.file_bytes - self.payload_end
        self.embedded_at: int | None = None
        if extra <= 0:
            return
        head = np.empty(min(4, extra), dtype=np.uint8)
        self.pread_into(head, self.payload_end)
        if head.tobytes() == MAGIC:
            self.embedded_at = self.payload_end
            self.warnings.append(
                f"another HFQ container begins at byte {self.payload_end} ({extra} bytes)"
            )
        else:
            self.warnings.append(f"{extra} bytes follow the last payload")
