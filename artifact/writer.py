"""Writing an HFQ file: its planned layout, and the partial file in which an output grows.

Every offset is known before the first byte moves, so workers write disjoint ranges in any order and
the bytes do not depend on it. No file has the final name before ``publish``.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds4q.artifact import stops
from ds4q.artifact.errors import (
    ArtifactError,
    DuplicateTensorError,
    HeaderError,
    IndexFieldError,
    MetadataError,
)
from ds4q.artifact.files import (
    ForeignFileError,
    Recognize,
    claim,
    create,
    file_kind,
    fsync_folder,
    named,
    publish,
)
from ds4q.artifact.hfq import (
    ALIGNMENT,
    ENTRY_HEAD,
    ENTRY_TAIL,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_FRONT_BYTES,
    NAME_LENGTH,
    VERSION_WRITTEN,
    TensorEntry,
    flat,
    printable,
)
from ds4q.artifact.locks import FileLock, LockedError, WriteError
from ds4q.artifact.metadata import MAX_METADATA_BYTES
from ds4q.artifact.types import check_entry, type_of

U8 = npt.NDArray[np.uint8]
PARTIAL_SUFFIX = ".partial"
UNFINISHED = b"ds4q.unfinished\n"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What an index entry says before the payload exists; type and shape give the length."""

    name: str
    type_id: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Payload bytes; a shape that the type cannot hold raises, naming the tensor."""
        try:
            return type_of(self.type_id).payload_bytes(self.shape)
        except ArtifactError as error:
            raise error.located(tensor=self.name) from None


@dataclass(frozen=True, slots=True)
class Layout:
    """A planned file: ``header`` and ``index`` bytes, entries in index order, total length."""

    header: bytes
    index: bytes
    entries: tuple[TensorEntry, ...]
    data_offset: int
    file_bytes: int

    def front(self, metadata: bytes) -> bytes:
        """Everything before the payload, padded with zeros up to ``data_offset``."""
        front = self.header + metadata + self.index
        if len(front) > self.data_offset or self.data_offset - len(front) >= ALIGNMENT:
            raise IndexFieldError(
                "metadata changed its length after planning",
                expected=self.data_offset,
                found=len(front),
            )
        return front + b"\0" * (self.data_offset - len(front))


def _encode_entry(spec: TensorSpec) -> bytes:
    raw = spec.name.encode("utf-8", "surrogatepass")
    if not raw or len(raw) > 0xFFFF or not printable(spec.name):
        raise IndexFieldError(
            "name must have 1 to 65535 bytes of UTF-8 and no control characters", tensor=spec.name
        )
    if len(spec.shape) > 255 or any(not 0 < dim < 2**32 for dim in spec.shape):
        raise IndexFieldError("at most 255 dims of 1 to 2^32-1", tensor=spec.name, found=spec.shape)
    kind = type_of(spec.type_id, tensor=spec.name)
    nbytes = spec.nbytes
    check_entry(spec.type_id, spec.shape, kind.group_size, nbytes, tensor=spec.name)
    return (
        NAME_LENGTH.pack(len(raw))
        + raw
        + ENTRY_HEAD.pack(spec.type_id, len(spec.shape))
        + struct.pack(f"<{len(spec.shape)}I", *spec.shape)
        + ENTRY_TAIL.pack(kind.group_size, nbytes)
    )


def layout(tensors: Sequence[TensorSpec], metadata_bytes: int, *, arch_id: int) -> Layout:
    """Plan a version 1 file: tensors in the order given, payloads back to back.

    ``metadata_bytes`` is the length of the metadata, which may be filled in later.

    Raises
    ------
    DuplicateTensorError, IndexFieldError, PayloadSizeError, TensorTypeError : a tensor that the
        reader would refuse
    MetadataError, HeaderError : metadata or index longer than the reader takes
    """
    if metadata_bytes > MAX_METADATA_BYTES:
        raise MetadataError(
            "metadata is too long",
            expected=f"at most {MAX_METADATA_BYTES} bytes",
            found=metadata_bytes,
        )
    seen: dict[str, int] = {}
    parts = [struct.pack("<I", len(tensors))]
    for number, spec in enumerate(tensors):
        if seen.setdefault(spec.name, number) != number:
            raise DuplicateTensorError(
                tensor=spec.name, found=f"entries {seen[spec.name]} and {number}"
            )
        parts.append(_encode_entry(spec))
    index = b"".join(parts)
    end = HEADER_BYTES + metadata_bytes + len(index)
    data_offset = -(-end // ALIGNMENT) * ALIGNMENT
    if data_offset - HEADER_BYTES > MAX_FRONT_BYTES:
        raise HeaderError(
            "metadata and index are too long",
            expected=f"at most {MAX_FRONT_BYTES} bytes",
            found=data_offset - HEADER_BYTES,
        )
    header = HEADER.pack(MAGIC, VERSION_WRITTEN, arch_id, len(tensors), HEADER_BYTES, data_offset)
    entries, at = [], data_offset
    for spec in tensors:
        group = type_of(spec.type_id).group_size
        entries.append(TensorEntry(spec.name, spec.type_id, spec.shape, group, spec.nbytes, at))
        at += spec.nbytes
    return Layout(header, index, tuple(entries), data_offset, at)


class PartialFile:
    """``NAME.partial`` beside the output, locked against a second writer.

    The name is fixed so that a resumed job finds it. From the moment at which the name exists the
    file begins with ``mark``, by which a later run recognizes it. Writes are positioned and
    complete; every failed system call raises ``OSError``.

    Parameters
    ----------
    final : the name that the finished file gets
    mark : how an unfinished file of this kind begins
    recognize : how else one may begin, once the mark was overwritten
    inputs : files that the job reads

    Raises
    ------
    LockedError : another process holds the file
    ForeignFileError : the name is taken by something that ds4q did not write
    """

    def __init__(
        self,
        final: Path,
        file_bytes: int,
        *,
        mark: bytes = UNFINISHED,
        recognize: Recognize = lambda head: False,
        inputs: Sequence[os.stat_result] = (),
    ) -> None:
        self.final = final
        self.path = final.with_name(final.name + PARTIAL_SUFFIX)
        self.file_bytes = file_bytes
        self.fd = -1
        self._mark = mark
        with stops.held():
            while self.fd < 0:
                try:
                    self._open(lambda head: head.startswith(mark) or recognize(head), inputs)
                except FileNotFoundError:
                    self._create()

    def _create(self) -> None:
        """Make a file with the mark and lock it, or nothing; another process may be faster."""
        try:
            self.fd = create(self.path, self._mark)
        except FileExistsError:
            return
        try:
            self._lock = FileLock(self.fd, self.path)
        except LockedError:
            os.close(self.fd)
            self.fd = -1
            raise
        except BaseException:
            self.path.unlink(missing_ok=True)
            os.close(self.fd)
            self.fd = -1
            raise

    def _open(self, recognize: Recognize, inputs: Sequence[os.stat_result]) -> None:
        """Lock the file that is there, then prove that it is ds4q's own."""
        status = self.path.lstat()
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device must not even be opened
            raise ForeignFileError(path=self.path, found=file_kind(status.st_mode))
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self.path, flags)
        try:
            lock = FileLock(fd, self.path)
        except BaseException:
            os.close(fd)
            raise
        self.fd, self._lock = fd, lock
        try:
            # The holder may have given the file its final name between our open and our lock.
            if not self._has_its_name():
                raise LockedError(path=self.path)
            if claim(self.path, recognize, inputs=inputs) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        except BaseException:
            self.close()
            raise

    def _has_its_name(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.fd), self.path.lstat())
        except FileNotFoundError:
            return False

    def reset(self) -> None:
        """Give up what was written: the file holds the mark alone, as a new one does."""
        if os.pread(self.fd, len(self._mark) + 1, 0) != self._mark:
            self.pwrite(self._mark, 0)
            os.ftruncate(self.fd, len(self._mark))

    def allocate(self) -> None:
        """Give the file its final length; bytes that were not written read as zeros."""
        with named(self.path):
            os.ftruncate(self.fd, self.file_bytes)

    def pwrite(self, data: bytes | U8 | memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        view = flat(data)
        with named(self.path):
            while view:
                n = os.pwrite(self.fd, view, offset)
                if n == 0:
                    raise OSError(errno.EIO, "write returned 0 bytes")
                view, offset = view[n:], offset + n

    def pread_into(self, out: U8, offset: int) -> None:
        """Fill ``out`` from ``offset``; what was not written yet reads as zeros."""
        view, done = flat(out), 0
        while done < len(view):
            n = os.preadv(self.fd, [view[done:]], offset + done)
            if n == 0:
                raise OSError(errno.EIO, "partial file is shorter than planned", str(self.path))
            done += n

    def sync(self) -> None:
        """Force what was written to the disk."""
        with named(self.path):
            os.fsync(self.fd)
            os.close(
                os.dup(self.fd)
            )  # some file systems report a lost write at a close; we stay open

    def close(self) -> None:
        """Release the lock; the file stays. A failing close loses nothing that was synced."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            self._lock.release()
            with suppress(OSError):
                os.close(fd)

    def publish(self, *, replace: bool | Callable[[Path], bool] = False) -> None:
        """Give the synced file its final name, durably; see ``files.publish``."""
        if not self._has_its_name():
            raise WriteError(
                "the unfinished file was moved or replaced by another program", path=self.path
            )
        publish(self.path, self.final, replace=replace)
        fsync_folder(self.final.parent)

    def discard(self) -> None:
        """Remove the partial file, unless another file has its name by now."""
        if self.fd >= 0 and self._has_its_name():
            self.path.unlink(missing_ok=True)
        self.close()
