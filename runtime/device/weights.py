"""Owns an artifact's tensors on the device: checked and placed first, then read and copied.

Bytes stay packed. Planning refuses all that index and metadata can tell and reads nothing; ``fill``
reads in parallel into pinned memory, checks rows there as a load into host memory does, and copies
on a stream of its own while the next rows are being read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from ds4q.artifact.formats import Coding
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.types import type_of
from ds4q.hipkern import matrix as packing
from ds4q.hipkern.driver import Device
from ds4q.hipkern.streams import Stream
from ds4q.runtime.device.layout import Layout, Place
from ds4q.runtime.device.reads import LANES, Job, Run, read_jobs
from ds4q.runtime.device.staging import Staging
from ds4q.runtime.digests import Digests
from ds4q.runtime.errors import DeviceModelError
from ds4q.runtime.source import Progress, Tensors

U8 = npt.NDArray[np.uint8]

MATRIX_ALIGN = 16  # kernels load 16 bytes at a time
COLUMNS = 32  # of a row come in multiples of it
PIECE_BYTES = 8 << 20  # of one read, one check and one copy
SMALL_BYTES = 4 << 20  # of one copy of what is not read in pieces


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A packed matrix on the device: its tensor's rows from ``first_row`` on."""

    entry: TensorEntry
    first_row: int
    rows: int
    cols: int
    row_bytes: int
    decoder: int
    books: Place | None
    place: Place

    @property
    def blocks(self) -> int:
        """Blocks of ``linear`` that its product takes."""
        return packing.linear_blocks(self.decoder, self.rows, self.cols)

    def packed(self) -> bytes:
        """``ds4q_matrix``; there must be memory behind the place."""
        books = 0 if self.books is None else self.books.address
        return packing.pack_matrix(
            self.place.address, books, self.decoder, self.rows, self.cols, self.row_bytes
        )


class DeviceSource:
    """The tensors of an open artifact, as a model on a device takes them.

    Parameters
    ----------
    reader : stays open until ``fill`` has returned
    digests : every tensor that is read is compared with them; None: nothing is compared

    Attributes
    ----------
    layouts : all device memory that the tensors need
    tensors : what describes them
    """

    def __init__(self, reader: Reader, digests: Digests | None = None) -> None:
        self._reader = reader
        self.tensors = Tensors(reader, digests)
        self._tables = Layout()  # apart: a piece of the matrices also copies what lies in its gaps
        self._dense = Layout()
        self.layouts = [self._tables, self._dense]
        self._groups: list[tuple[str, list[Matrix]]] = [("dense", [])]
        self._books: dict[tuple[int, Coding | None], Place] = {}
        self._small: list[tuple[Place, Callable[[], npt.NDArray[np.generic] | bytes]]] = []
        self._id_tables: dict[str, npt.NDArray[np.int32]] = {}

    def values(self, name: str, *shape: int) -> Place:
        """A small tensor of any decodable float type, as f32."""
        self.tensors.values_entry(name, shape)
        return self.table(4 * int(np.prod(shape)), partial(self.tensors.values, name, *shape))

    def ids(self, name: str, rows: int, cols: int, below: int) -> Place:
        """A table of ids in 0 .. below - 1, as i32."""
        self.tensors.ids_entry(name, (rows, cols))

        def make() -> npt.NDArray[np.int32]:
            self._id_tables[name] = made = self.tensors.ids(name, rows, cols, below)
            return made

        return self.table(4 * rows * cols, make)

    def id_table(self, name: str) -> npt.NDArray[np.int32]:
        """What ``ids`` has placed, once ``fill`` has read it."""
        return self._id_tables[name]

    def table(self, nbytes: int, make: Callable[[], npt.NDArray[np.generic] | bytes]) -> Place:
        """A place for what ``make`` gives once every place has its address."""
        place = self._tables.reserve(nbytes)
        self._small.append((place, make))
        return place

    def matrix(self, name: str, rows: int, cols: int) -> Matrix:
        """A packed [rows, cols] matrix."""
        return self.row_groups(name, rows, cols, 1)[0]

    def row_groups(self, name: str, rows: int, cols: int, groups: int) -> list[Matrix]:
        """A packed matrix cut into equal runs of rows, each a matrix of its own."""
        entry = self._matrix_entry(name, (rows, cols))
        part = rows // groups
        cut = [self._placed(self._dense, entry, g * part, part) for g in range(groups)]
        self._groups[0][1].extend(cut)
        return cut

    def stacked(self, label: str, shapes: Sequence[tuple[str, tuple[int, int]]]) -> list[Matrix]:
        """Packed matrices in a buffer of their own, in exactly this order."""
        layout = Layout()
        self.layouts.append(layout)
        found = [
            self._placed(layout, self._matrix_entry(name, shape), 0, shape[0])
            for name, shape in shapes
        ]
        self._groups.append((label, found))
        return found

    def pooled(self, entry: TensorEntry, place: Place) -> Matrix:
        """A packed matrix that is in one slot or another, or nowhere; ``place`` is the first slot.

        Its decode table is bound already, and its bytes are not filled in.
        """
        self._check_columns(entry)
        return self._described(entry, 0, entry.shape[0], place)

    def fill(self, device: Device, stream: Stream, progress: Progress | None) -> Staging:
        """Read, check and copy everything, on ``stream``.

        ``progress`` is called with (bytes read, bytes in all) of the matrices, in this thread. On
        return the last copies may still be under way, out of what is returned: the caller frees it
        once they have been made.

        Raises
        ------
        DigestError, ReceiptError : a tensor differs from the receipt, or that cannot be used
        """
        jobs = [job for label, matrices in self._groups for job in _jobs(label, matrices, self)]
        largest = max(job.job.nbytes for job in jobs)
        self._fill_small(device, stream)
        staging = Staging(device, stream, 2 * LANES, largest)
        total, done = sum(job.job.nbytes for job in jobs), 0
        plan = [job.job for job in jobs]
        reads = read_jobs(
            self._reader.path,
            plan,
            staging.take,
            ahead=staging.slots,
            reopen=self._reader.reopen,
        )
        with closing(reads):  # lanes have stopped before anybody frees their buffers
            for target, (job, buffer) in zip(jobs, reads, strict=True):
                staging.send(target.address, job.nbytes)
                self._compare(target, buffer)  # beside the copy, and the reads of the next jobs
                done += job.nbytes
                if progress is not None:
                    progress(done, total)
        if self.tensors.digests is not None:
            self.tensors.digests.finish()
        return staging

    def _compare(self, target: _Target, buffer: U8) -> None:
        """Hash what a job read. The pieces of a tensor come in order, so none has to be kept."""
        digests = self.tensors.digests
        if digests is None:
            return
        for run, entry, first, last in target.runs:
            row_bytes = run.nbytes // (last - first)
            digests.add(entry, first * row_bytes, buffer[run.at : run.at + run.nbytes])

    def _fill_small(self, device: Device, stream: Stream) -> None:
        """Copy what lies in memory that the device cannot copy from by itself."""
        with device.pinned(SMALL_BYTES) as staging:
            for place, make in self._small:
                values = np.frombuffer(make(), dtype=np.uint8)
                for at in range(0, values.nbytes, SMALL_BYTES):
                    part = values[at : at + SMALL_BYTES]
                    staging.array[: part.nbytes] = part
                    stream.upload(place.address + at, staging, part.nbytes)
                    stream.synchronize()  # before the staging is filled again, or freed

    def check_rows(self, runs: Sequence[tuple[Run, TensorEntry, int, int]], buffer: U8) -> None:
        """Check what a job read: runs of (where, tensor, first row, row behind the last)."""
        for run, entry, first, last in runs:
            part = buffer[run.at : run.at + run.nbytes]
            self.tensors.check_rows(entry, part, first, last)

    def _matrix_entry(self, name: str, shape: tuple[int, int]) -> TensorEntry:
        entry = self.tensors.matrix_entry(name, shape)
        self._check_columns(entry)
        self.tensors.bind([entry])
        return entry

    def _check_columns(self, entry: TensorEntry) -> None:
        if entry.shape[1] % COLUMNS:
            raise DeviceModelError(
                "the device's kernels cannot multiply rows of this length",
                path=self._reader.path,
                tensor=entry.name,
                expected=f"a multiple of {COLUMNS} columns",
                found=entry.shape[1],
            )

    def _placed(self, layout: Layout, entry: TensorEntry, first_row: int, rows: int) -> Matrix:
        row_bytes = type_of(entry.type_id).row_bytes(entry.shape[1])
        return self._described(
            entry, first_row, rows, layout.reserve(rows * row_bytes, MATRIX_ALIGN)
        )

    def _described(self, entry: TensorEntry, first_row: int, rows: int, place: Place) -> Matrix:
        coding, cols = self.tensors.coding(entry), entry.shape[1]
        return Matrix(
            entry,
            first_row,
            rows,
            cols,
            type_of(entry.type_id).row_bytes(cols),
            packing.decoder_of(entry.type_id, coding),
            self._books_of(entry.type_id, coding),
            place,
        )

    def _books_of(self, type_id: int, coding: Coding | None) -> Place | None:
        """Where the books of a type and coding lie; matrices that share them share the place."""
        books = packing.books_of(type_id, coding)
        if books is None:
            return None
        key = type_id, coding
        if key not in self._books:
            self._books[key] = self.table(len(books), lambda: books)
        return self._books[key]


@dataclass(frozen=True, slots=True)
class _Target:
    job: Job
    address: int
    runs: tuple[tuple[Run, TensorEntry, int, int], ...]  # where, tensor, rows from and to


def _jobs(label: str, matrices: Iterable[Matrix], source: DeviceSource) -> list[_Target]:
    """Reads of at most a piece each that fill the places of ``matrices``, which lie in order.

    A piece may hold the end of one matrix and the beginning of the next; gaps between them, a few
    bytes of alignment, are copied as they happen to be.
    """
    made: list[_Target] = []
    runs: list[tuple[Run, TensorEntry, int, int]] = []
    start = 0  # address of the piece

    def close() -> None:
        if runs:
            held = tuple(runs)
            job = Job(label, tuple(run for run, *_ in held), partial(source.check_rows, held))
            made.append(_Target(job, start, held))
            runs.clear()

    for matrix in matrices:
        row = 0
        while row < matrix.rows:
            address = matrix.place.address + row * matrix.row_bytes
            at = address - start if runs else 0
            room = (PIECE_BYTES - at) // matrix.row_bytes
            if runs and room < 1:
                close()
                continue
            if not runs:
                start = address
            rows = min(matrix.rows - row, max(1, room))
            first = matrix.first_row + row
            offset = matrix.entry.offset + first * matrix.row_bytes
            run = Run(offset, rows * matrix.row_bytes, address - start)
            runs.append((run, matrix.entry, first, first + rows))
            row += rows
    close()
    return made
