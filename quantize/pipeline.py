"""Packing: every planned tensor into its partial file, journaled, then sealed and read back.

Workers take whole tensors and write disjoint, planned ranges; what they write does not depend on
how many they are or on where an earlier run was stopped: a resumed job packs every block again, and
saves the writing alone. Every packed run of rows is compared with
its source before it is written, and the finished file is read back and digested before it gets its
name.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ds4q.artifact.digest import sha256_stream
from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.formats.hfp4g32 import BLOCK as FP4_BLOCK
from ds4q.artifact.hfq import TensorEntry
from ds4q.artifact.locks import WriteError
from ds4q.artifact.metadata import any_metadata_digest, canonical
from ds4q.artifact.readahead import ReadAhead
from ds4q.artifact.receipt import Receipt, SourceRecord, TensorRecord
from ds4q.artifact.types import MIXED, RAW, ROCMFPX, row_runs
from ds4q.quantize.audit import Audit
from ds4q.quantize.books import FittedBooks
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.convert import Encoding, Events, pack
from ds4q.quantize.errors import SaturationError
from ds4q.quantize.fitting import Fitting, books_text
from ds4q.quantize.journal import BlockRecord, Journal, Key
from ds4q.quantize.outputs import OutputFile
from ds4q.quantize.plan import Output, Plan, PlannedTensor
from ds4q.quantize.rows import CHUNK_BYTES, Buffers, RowReader, source_ranges

U8 = npt.NDArray[np.uint8]
Advance = Callable[[int], None]
BLOCK_BYTES = 16 << 20  # of packed rows per journal line: the most that a stop can cost a worker
MAX_SATURATED_SHARE = 0.01  # of a tensor's blocks: an expert that is lost must not go unnoticed
SYNC_SECONDS = 15.0  # between two syncs: the work that a power loss can cost


class Stopped(Exception):
    """Raised inside workers when the job ends early; never leaves this module."""


@dataclass(slots=True)
class Packed:
    """What packing one tensor found out: digests (xxh3-128 hex), events, bytes found written.

    ``books`` are the fitted books of a tensor of a mixed type.
    """

    packed: str
    sources: tuple[str, ...]
    events: Events
    kept_bytes: int
    books: FittedBooks | None = None


@dataclass(slots=True)
class Hashers:
    """Running digests of one tensor or one block: packed rows, weight bytes, scale bytes."""

    packed: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    sources: list[xxhash.xxh3_128] = field(default_factory=list)

    def add(self, packed: U8, parts: tuple[U8, ...]) -> None:
        """Feed one run of rows."""
        self.packed.update(packed.data)
        while len(self.sources) < len(parts):
            self.sources.append(xxhash.xxh3_128())
        for hasher, part in zip(self.sources, parts, strict=True):
            hasher.update(part.data)

    def source_digests(self) -> tuple[str, ...]:
        """Hex digests of weight and, where scales go with the rows, scale."""
        return tuple(hasher.hexdigest() for hasher in self.sources)


class Pipeline:
    """Packs all tensors of a plan into its partial files.

    ``earlier`` are the blocks that an earlier run says it wrote. They are packed again and compared
    with the partial file, which is written to where it differs.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        audit: Audit,
        plan: Plan,
        files: Sequence[OutputFile],
        journal: Journal,
        earlier: Mapping[Key, BlockRecord],
        advance: Advance,
    ) -> None:
        self._checkpoint = checkpoint
        self._audit = audit
        self.plan = plan
        self.files = files
        self.journal = journal
        self.earlier = earlier
        self.advance = advance
        self.fitting = Fitting(checkpoint, audit, plan.options.imatrix)
        self.stop = threading.Event()
        self._local = threading.local()
        self.results: dict[tuple[int, int], Packed] = {}

    def pack_all(self, threads: int) -> None:
        """Pack every tensor; the first error stops all workers and is raised."""
        order = sorted(self._tensors(), key=self._priority)
        tensors = [self.plan.outputs[o].tensors[t] for o, t in order]
        ahead = ReadAhead([source_ranges(self._checkpoint, tensor.unit) for tensor in tensors])
        work: list[Future[None]] = []
        with ThreadPoolExecutor(threads + 1) as pool:
            try:  # a stop may come while work is still being handed out
                syncing = pool.submit(self._sync_loop)
                work.extend(
                    pool.submit(self._pack_tensor, o, t, ahead, number)
                    for number, (o, t) in enumerate(order)
                )
                wait(work, return_when=FIRST_EXCEPTION)
            finally:
                self.stop.set()
                for future in work:
                    future.cancel()
        _raise_first([*work, syncing])

    def _tensors(self) -> Iterator[tuple[int, int]]:
        for o, output in enumerate(self.plan.outputs):
            for t in range(len(output.tensors)):
                yield o, t

    def _priority(self, key: tuple[int, int]) -> tuple[int, str, int]:
        """Largest first (a giant at the end would leave cores idle), then in source order."""
        tensor = self.plan.outputs[key[0]].tensors[key[1]]
        giant = tensor.entry.nbytes > BLOCK_BYTES
        weight = tensor.unit.weight
        return (-tensor.entry.nbytes if giant else 0, weight.shard, weight.offset)

    def _pack_tensor(self, o: int, t: int, ahead: ReadAhead, number: int) -> None:
        tensor = self.plan.outputs[o].tensors[t]
        shard = self._checkpoint.shards[tensor.unit.weight.shard].path
        buffers = self._local.__dict__.setdefault("buffers", Buffers())
        try:
            unit = tensor.unit
            reader = RowReader(self._checkpoint, self._audit, unit, buffers, ahead.take(number))
            self.results[o, t] = _TensorWork(self, o, t, reader, buffers).run()
        except Stopped:
            return
        except BaseException as error:
            self.stop.set()
            if isinstance(error, Ds4qError):
                raise error.located(path=shard, tensor=tensor.unit.name) from error
            raise

    # ------------------------------------------------------------ syncing

    def _sync_loop(self) -> None:
        """Push data to the disk now and then, so that a power loss costs seconds, not hours.

        Not more often: writing back competes with reading the source, and what is left at the end
        is written while the file is hashed.
        """
        while not self.stop.wait(SYNC_SECONDS):
            for file in self.files:
                file.sync()
            self.journal.sync()


class _TensorWork:
    """Packs one tensor block by block."""

    def __init__(
        self, pipeline: Pipeline, o: int, t: int, reader: RowReader, buffers: Buffers
    ) -> None:
        self._job = pipeline
        self._key = (o, t)
        self._tensor: PlannedTensor = pipeline.plan.outputs[o].tensors[t]
        self._file = pipeline.files[o]
        self._reader = reader
        self._buffers = buffers
        self._blocks = list(row_runs(self._tensor.rows, self._tensor.row_bytes, BLOCK_BYTES))
        self._several = len(self._blocks) > 1
        self._whole = Hashers()
        self._books: FittedBooks | None = None
        self._encoding: Encoding | None = None

    def run(self) -> Packed:
        """Bring every block into the partial file; digests are of the whole tensor."""
        events, kept_bytes = Events(), 0
        record: BlockRecord | None = None
        for b, (first, count) in enumerate(self._blocks):
            record, kept = self._write((*self._key, b), first, count)
            kept_bytes += record.nbytes if kept else 0
            events.add(Events.of(record.events))
            self._job.advance(record.nbytes)
        self._check_saturation(events.saturated_blocks)
        if record is None or self._several:
            packed, sources = self._whole.packed.hexdigest(), self._sources(self._whole)
        else:
            packed, sources = record.packed, record.sources
        return Packed(packed, sources, events, kept_bytes, self._books)

    def _check_saturation(self, saturated: int) -> None:
        """Refuse a tensor most of whose loss would come from the range of its type."""
        blocks = self._tensor.rows * self._tensor.k // FP4_BLOCK
        if saturated > MAX_SATURATED_SHARE * blocks and not self._job.plan.options.allow_saturation:
            raise SaturationError(
                tensor=self._tensor.entry.name,
                expected=f"at most {MAX_SATURATED_SHARE:.0%} of the blocks saturated",
                found=f"{saturated:,} of {blocks:,} as {self._tensor.target.name}",
            )

    def _how(self) -> Encoding:
        """How the tensor is encoded; its books are fitted when the first block asks for them."""
        if self._encoding is None:
            kind, options = self._tensor.target, self._job.plan.options
            if kind in MIXED and self._books is None:
                self._books = self._job.fitting.books(self._tensor.unit, kind)
            row = None if self._books is None else self._books.row
            importance = options.importance(self._tensor.unit.info) if kind in ROCMFPX else None
            self._encoding = Encoding(row or options.recipe.variant_of(kind), importance)
        return self._encoding

    def _sources(self, hashers: Hashers) -> tuple[str, ...]:
        """Digests of the source bytes that went into ``hashers``, and of an FP8 grid as a whole."""
        grid = self._reader.whole_scale
        return hashers.source_digests() + (
            () if grid is None else (xxhash.xxh3_128(grid.data).hexdigest(),)
        )

    def _chunks(self, first: int, count: int) -> Iterator[tuple[int, int, U8, int]]:
        """First row, row count, a buffer for the packed rows, their offset in the file."""
        for at, n in row_runs(count, self._tensor.row_bytes, CHUNK_BYTES):
            if self._job.stop.is_set():
                raise Stopped
            row = first + at
            offset, nbytes = self._tensor.span(row, n)
            yield row, n, self._buffers.take("packed", nbytes), offset

    def _write(self, key: Key, first: int, count: int) -> tuple[BlockRecord, bool]:
        """Bring rows ``first`` .. ``first + count`` into the partial file, and journal them.

        The flag says whether an earlier run had written them all.
        """
        own, events, how = Hashers(), Events(), self._how()
        lossless = self._job.plan.options.recipe.exact_dense
        earlier = self._job.earlier.get(key)
        kept = earlier is not None
        for row, n, packed, offset in self._chunks(first, count):
            rows, parts = self._reader.read(row, n)
            events.add(pack(rows, self._tensor.target, packed, lossless=lossless, encoding=how))
            own.add(packed, parts)
            if self._several:
                self._whole.add(packed, parts)
            if earlier is None or not self._holds(packed, offset):
                kept = False
                self._file.pwrite(packed, offset)
        record = BlockRecord(
            *key,
            self._tensor.span(first, count)[1],
            own.packed.hexdigest(),
            self._sources(own),
            events.document(),
            books_text(self._books),
        )
        if record != earlier:
            self._job.journal.record(record)
        return record, kept

    def _holds(self, packed: U8, offset: int) -> bool:
        """Whether the partial file has these bytes already."""
        there = self._buffers.take("there", packed.nbytes)
        self._file.pread_into(there, offset)
        return np.array_equal(there, packed)


def _raise_first(futures: list[Future[None]]) -> None:
    for future in futures:
        if not future.cancelled() and (error := future.exception()) is not None:
            raise error


# ---------------------------------------------------------------- after packing


def source_digest(checkpoint: Checkpoint, digests: dict[str, str]) -> str:
    """SHA-256 (hex) of the canonical list of [name, dtype, shape, xxh3-128] of the source tensors.

    ``digests`` maps the tensors that were read to their xxh3-128; sorted by name, so that it does
    not depend on sharding.
    """
    rows = [
        [name, checkpoint.tensors[name].dtype, list(checkpoint.tensors[name].shape), digest]
        for name, digest in sorted(digests.items())
    ]
    return hashlib.sha256(canonical(rows)).hexdigest()


@dataclass(frozen=True, slots=True)
class WrittenTable:
    """A decode table that was written: digests of its payload, and repairs of its books."""

    xxh3: str
    sha256: str
    repairs: int


def write_tables(file: OutputFile, output: Output, results: list[Packed]) -> list[WrittenTable]:
    """Write the decode tables of an output, once the books of all its tensors are known."""
    written = []
    for table in output.tables:
        books = {expert: results[number].books for expert, number in table.members}
        payload = table.payload({e: b.row for e, b in books.items() if b is not None})
        file.pwrite(payload, table.entry.offset)
        written.append(
            WrittenTable(
                xxhash.xxh3_128(payload).hexdigest(),
                hashlib.sha256(payload).hexdigest(),
                sum(b.repairs for b in books.values() if b is not None),
            )
        )
    return written


def tensor_records(
    output: Output, results: list[Packed], tables: list[WrittenTable]
) -> tuple[TensorRecord, ...]:
    """The receipt's rows of one output, in index order."""
    records = [
        TensorRecord(
            table.entry.name,
            RAW.name,
            table.entry.shape,
            table.entry.nbytes,
            done.xxh3,
            (),
            {"book_repairs": done.repairs} if done.repairs else {},
        )
        for table, done in zip(output.tables, tables, strict=True)
    ]
    for tensor, result in zip(output.tensors, results, strict=True):
        unit = tensor.unit
        records.append(
            TensorRecord(
                tensor.entry.name,
                tensor.target.name,
                tensor.entry.shape,
                tensor.entry.nbytes,
                result.packed,
                tuple(
                    SourceRecord(source.name, source.dtype, source.shape, digest)
                    for source, digest in zip(unit.tensors, result.sources, strict=True)
                ),
                result.events.document(),
            )
        )
    return tuple(sorted(records, key=lambda record: record.name.encode("utf-8")))


def seal(
    file: OutputFile, output: Output, plan: Plan, results: list[Packed], digest: str
) -> Receipt:
    """Write tables and front, read the file back against its digests, sync it.

    The receipt is returned. The sync runs while the file is read back: both wait for different
    things.
    """
    tables = write_tables(file, output, results)
    metadata = output.sealed(digest, [(t.sha256, t.repairs) for t in tables])
    file.pwrite(output.layout.front(metadata), 0)
    packed = [(t.entry, r.packed) for t, r in zip(output.tensors, results, strict=True)]
    packed += [(t.entry, w.xxh3) for t, w in zip(output.tables, tables, strict=True)]
    check = ReadBack(file.path, packed)
    with ThreadPoolExecutor(1) as pool:
        syncing = pool.submit(file.sync)
        sha256 = sha256_stream(file.pread_into, file.file_bytes, seen=check.seen)
        check.finish()
        syncing.result()
    ours = output.metadata["ds4q"]
    return Receipt(
        file_bytes=file.file_bytes,
        sha256=sha256,
        index_xxh3=ours["index_xxh3"],
        recipe=ours["recipe"],
        tool_version=ours["tool_version"],
        source_fingerprint=plan.fingerprint,
        source_digest=digest,
        partial=output.partial,
        skipped=plan.skipped,
        tensors=tensor_records(output, results, tables),
        metadata_xxh3=any_metadata_digest(metadata),
        imatrix_sha256=ours.get("imatrix_sha256", ""),
    )


class ReadBack:
    """Compares the payloads of the finished file, chunk by chunk, with what was packed."""

    def __init__(self, path: Path, packed: list[tuple[TensorEntry, str]]) -> None:
        self._path = path
        self._tensors = iter(sorted(packed, key=lambda item: item[0].offset))
        self._hasher = xxhash.xxh3_128()
        self._current = next(self._tensors, None)

    def seen(self, offset: int, chunk: U8) -> None:
        """The next bytes of the file."""
        end = offset + chunk.nbytes
        while self._current is not None:
            entry = self._current[0]
            start = max(entry.offset, offset)
            stop = min(entry.offset + entry.nbytes, end)
            if start < stop:
                self._hasher.update(chunk[start - offset : stop - offset].data)
            if stop < entry.offset + entry.nbytes:
                return  # goes on in the next chunk
            self._compare(*self._current)
            self._current = next(self._tensors, None)

    def _compare(self, entry: TensorEntry, packed: str) -> None:
        found = self._hasher.hexdigest()
        self._hasher.reset()
        if found != packed:
            raise WriteError(
                "the file read back differs from what was written",
                path=self._path,
                tensor=entry.name,
                expected=packed,
                found=found,
                remedy="check disk and memory of this machine",
            )

    def finish(self) -> None:
        """The file has ended: every tensor must have been seen."""
        if self._current is not None:
            raise WriteError(
                "the file read back is too short",
                path=self._path,
                tensor=self._current[0].name,
            )
