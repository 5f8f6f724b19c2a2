"""Owns the one pass over an artifact's payload that all content checks share.

The file is read once from the disk: workers hand each run of rows to every visitor while a second
reader hashes the same bytes a little ahead or behind, out of the page cache. Failures come back in
file order, whatever the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import (
    FIRST_EXCEPTION,
    CancelledError,
    Future,
    ThreadPoolExecutor,
    wait,
)
from heapq import heappop
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ds4q.artifact.codings import Codings
from ds4q.artifact.digest import sha256_stream
from ds4q.artifact.errors import ArtifactError, PayloadValueError
from ds4q.artifact.formats import Codec
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.readahead import Range, ReadAhead
from ds4q.artifact.receipt import Receipt, TensorRecord, saturation_note
from ds4q.artifact.report import Check, Failure
from ds4q.artifact.types import TYPES, matrix_shape, row_runs

U8 = npt.NDArray[np.uint8]
CHUNK_BYTES = 1 << 20
WINDOW_BYTES = 512 << 20  # how far hashing and checking may drift apart


class TensorVisitor(Protocol):
    """Sees the packed rows of one tensor in order, in one thread."""

    def rows(self, first: int, count: int, packed: U8) -> None:
        """``packed`` (1-D) holds rows ``first`` .. ``first + count``; not to be kept."""

    def done(self) -> list[Failure]:
        """What was wrong with the tensor."""


class Visitor(Protocol):
    """A content check. ``begin`` is called by any thread, once a tensor."""

    check: Check

    def begin(self, entry: TensorEntry, rows: int, k: int) -> TensorVisitor | None:
        """A visitor for one tensor, or None where this check has nothing to see."""


class _Gate:
    """Keeps two readers of one file within ``WINDOW_BYTES`` of each other."""

    def __init__(self, end: int) -> None:
        self._moved = threading.Condition()
        self._hashed = 0
        self._starts: set[int] = set()  # of tensors that are not checked yet
        self._order: list[int] = []  # the same as a heap; what left the set is dropped at the top
        self._end = end
        self.closed = False

    def _checked(self) -> int:
        while self._order and self._order[0] not in self._starts:
            heappop(self._order)
        return self._order[0] if self._order else self._end

    def begin(self, offset: int) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self.closed or offset <= self._hashed + WINDOW_BYTES)

    def finish(self, offset: int) -> None:
        with self._moved:
            self._starts.discard(offset)
            self._moved.notify_all()

    def expect(self, offsets: Sequence[int]) -> None:
        self._starts.update(offsets)
        self._order = sorted(self._starts)

    def hashed(self, nbytes: int) -> None:
        with self._moved:
            self._hashed += nbytes
            self._moved.notify_all()
            self._moved.wait_for(
                lambda: self.closed or self._hashed <= self._checked() + WINDOW_BYTES
            )
            if self.closed:  # work failed or was stopped: nobody waits for the hash of the rest
                raise CancelledError

    def close(self) -> None:
        with self._moved:
            self.closed = True
            self._moved.notify_all()


def walk(
    reader: Reader,
    visitors: Sequence[Visitor],
    *,
    threads: int,
    sha256: bool,
    advance: Callable[[int], None],
) -> str | None:
    """Read every payload once and show it to ``visitors``; their checks collect the failures.

    Returns the SHA-256 (hex) of the whole file where ``sha256`` asks for it.

    Raises
    ------
    ArtifactError : the file could not be read to its end, or changed
    """
    entries = sorted(reader.tensors.values(), key=lambda e: e.offset)
    gate = _Gate(reader.file_bytes)
    gate.expect([e.offset for e in entries])
    ahead = ReadAhead([[Range(reader.fd, e.offset, e.nbytes)] for e in entries])
    found: dict[tuple[int, int], list[Failure]] = {}

    def look(number: int) -> None:
        entry = entries[number]
        if sha256:
            gate.begin(entry.offset)
        try:
            if not gate.closed:
                for v, failures in enumerate(
                    _look_at(reader, entry, visitors, advance, ahead.take(number))
                ):
                    found[number, v] = failures
        finally:
            gate.finish(entry.offset)

    def digest() -> str:
        return sha256_stream(reader.pread_into, reader.file_bytes, before=gate.hashed)

    hashing: list[Future[str]] = []
    work: list[Future[None]] = []
    with ThreadPoolExecutor(threads + sha256) as pool:
        try:  # a stop may come while work is still being handed out
            hashing += [pool.submit(digest)] if sha256 else []
            work.extend(pool.submit(look, number) for number in range(len(entries)))
            every: list[Future[Any]] = [*hashing, *work]
            wait(every, return_when=FIRST_EXCEPTION)
        finally:
            gate.close()
            for future in work:
                future.cancel()
    for future in work:
        if not future.cancelled():
            future.result()
    reader.check_unchanged()
    for (_, v), failures in sorted(found.items()):
        for failure in failures:
            visitors[v].check.fail(failure)
    return hashing[0].result() if hashing else None


_local = threading.local()


def _look_at(
    reader: Reader,
    entry: TensorEntry,
    visitors: Sequence[Visitor],
    advance: Callable[[int], None],
    reached: Callable[[int], None],
) -> list[list[Failure]]:
    rows, k = matrix_shape(entry.shape)
    active = [visitor.begin(entry, rows, k) for visitor in visitors]
    for first, count in row_runs(rows, entry.nbytes // rows, CHUNK_BYTES):
        start, nbytes = TYPES[entry.type_id].span(first, count, k)
        buffer = getattr(_local, "buffer", None)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = _local.buffer = np.empty(nbytes, dtype=np.uint8)
        packed = buffer[:nbytes]
        reached(start)
        reader.read_into(entry, packed, start)
        for tensor in active:
            if tensor is not None:
                tensor.rows(first, count, packed)
        advance(packed.nbytes)
    return [[] if tensor is None else tensor.done() for tensor in active]


class _Legal:
    def __init__(self, codec: Codec, entry: TensorEntry, k: int, below: int | None) -> None:
        self._codec, self._entry, self._k, self._below = codec, entry, k, below
        self._failures: list[Failure] = []

    def rows(self, first: int, count: int, packed: U8) -> None:
        if self._failures:
            return
        try:
            self._codec.validate(packed, (count, self._k), first_row=first, tensor=self._entry.name)
            if self._below is not None:
                self._check_ids(first, packed.view("<u4"), self._below)
        except ArtifactError as error:
            located = error.located(tensor=self._entry.name)
            self._failures.append(Failure.of(located, located.what))

    def _check_ids(self, first: int, ids: npt.NDArray[np.uint32], below: int) -> None:
        at = int(np.argmax(ids))
        if ids[at] >= below:
            raise PayloadValueError(
                "id out of range",
                expected=f"0..{below - 1}",
                found=f"{ids[at]} at row {first + at // self._k}, column {at % self._k}",
            )

    def done(self) -> list[Failure]:
        return self._failures


class LegalBytes:
    """Every byte is one that its type allows: row headers, scales, finite numbers.

    ``ids_below`` bounds the ids of some tensors of type TidI32, by name.
    """

    def __init__(self, check: Check, codings: Codings, ids_below: Mapping[str, int]) -> None:
        self.check = check
        self._codings = codings
        self._ids_below = ids_below

    def begin(self, entry: TensorEntry, rows: int, k: int) -> TensorVisitor | None:
        below = self._ids_below.get(entry.name)
        return _Legal(self._codings.codec(entry), entry, k, below)


class _Digest:
    def __init__(self, entry: TensorEntry, record: TensorRecord | None) -> None:
        self._entry, self._record = entry, record
        self._hasher = xxhash.xxh3_128()

    def rows(self, first: int, count: int, packed: U8) -> None:
        self._hasher.update(packed.data)

    def done(self) -> list[Failure]:
        name = self._entry.name
        if self._record is None:
            return [Failure("tensor is not in the receipt", tensor=name)]
        found = self._hasher.hexdigest()
        if found != self._record.xxh3:
            message = "payload differs from its receipt"
            return [Failure(message, tensor=name, expected=self._record.xxh3, found=found)]
        return []


class ReceiptDigests:
    """Every payload has the digest, type and shape that the receipt records."""

    def __init__(self, check: Check, receipt: Receipt) -> None:
        self.check = check
        self.receipt = receipt
        self._records = {record.name: record for record in receipt.tensors}

    def begin(self, entry: TensorEntry, rows: int, k: int) -> TensorVisitor | None:
        return _Digest(entry, self._records.get(entry.name))

    def compare_sha256(self, found: str) -> None:
        """The whole file, once it has been read."""
        self.check.figures["sha256"] = found
        if found != self.receipt.sha256:
            rest = "the metadata or the padding" if self.receipt.metadata_note else "the padding"
            self.check.fail(
                Failure(
                    "SHA-256 of the file differs from the receipt"
                    + (f", and all else agrees: {rest} differs" if self.check.ok else ""),
                    expected=self.receipt.sha256,
                    found=found,
                )
            )

    def compare_front(self, reader: Reader) -> None:
        """Length, header, metadata, index and the list of tensors, before any payload is read."""
        saturated = saturation_note(t.saturated_blocks for t in self.receipt.tensors)
        self.check.notes += filter(None, (saturated, self.receipt.metadata_note))
        if reader.file_bytes != self.receipt.file_bytes:
            self.check.fail(
                Failure(
                    "file length differs from the receipt",
                    expected=self.receipt.file_bytes,
                    found=reader.file_bytes,
                )
            )
        for what, said, found in (
            ("header or index", self.receipt.index_xxh3, reader.index_xxh3),
            ("metadata", self.receipt.metadata_xxh3, reader.metadata_xxh3),
        ):
            if said and found != said:
                message = f"{what} differs from the receipt"
                self.check.fail(Failure(message, expected=said, found=found))
        ours = reader.metadata.get("ds4q", {})
        for key in (
            "recipe",
            "tool_version",
            "source_fingerprint",
            "source_digest",
            "partial",
            "imatrix_sha256",
        ):
            said = getattr(self.receipt, key)
            if key in ours and ours[key] != said:
                message = f"receipt and metadata disagree about {key}"
                self.check.fail(Failure(message, expected=str(ours[key]), found=str(said)))
        for record in self.receipt.tensors:
            entry = reader.tensors.get(record.name)
            if entry is None:
                self.check.fail(
                    Failure("tensor of the receipt is not in the file", tensor=record.name)
                )
            elif (TYPES[entry.type_id].name, entry.shape) != (record.type, record.shape):
                self.check.fail(
                    Failure(
                        "type or shape differs from the receipt",
                        tensor=record.name,
                        expected=f"{record.type} {list(record.shape)}",
                        found=f"{TYPES[entry.type_id].name} {list(entry.shape)}",
                    )
                )
