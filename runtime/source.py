"""Owns reading the tensors of an artifact for the model: checks first, then all bytes in parallel.

Building the model asks for every tensor it needs and gets buffers that are still empty, so what is
missing or misshapen is refused before the first large read; ``fill`` then reads them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds4q.artifact.binding import Compact, Owner, Registry, Slot
from ds4q.artifact.codings import Codings
from ds4q.artifact.formats import Codec, Coding
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.tables import expert_name, table_name
from ds4q.artifact.types import MIXED, TIDI32, check_entry, type_of
from ds4q.runtime.backend.decoders import FORMATS
from ds4q.runtime.backend.weights import Weight
from ds4q.runtime.digests import Digests
from ds4q.runtime.errors import BackendTypeError, ModelTensorError

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Progress = Callable[[int, int], None]

_LANES = 4  # more parallel reads were slower on every disk tried upstream (hipfire)
_PIECE_BYTES = 16 << 20


class Tensors:
    """The tensors of an open artifact: checked, located, told how they are decoded.

    Parameters
    ----------
    reader : stays open as long as tensors are read
    digests : every tensor that is read is compared with them; None: nothing is compared

    Raises
    ------
    CodingError, MetadataError : the artifact does not say how to read its ROCmFPX tensors
    """

    def __init__(self, reader: Reader, digests: Digests | None = None) -> None:
        self._reader = reader
        self.digests = digests
        self._codings = Codings.of(reader)
        self._registry = Registry(self._codings.tables)
        self._slots: dict[str, Slot] = {}  # of tensors whose slot is not their name

    def values(self, name: str, *shape: int) -> F32:
        """A small tensor of any decodable float type, read and decoded now."""
        return np.ascontiguousarray(self._decoded(self.values_entry(name, shape)), dtype=np.float32)

    def ids(self, name: str, rows: int, cols: int, below: int) -> npt.NDArray[np.int32]:
        """A table of ids in 0 .. below - 1, read now."""
        table = self._decoded(self.ids_entry(name, (rows, cols)))
        if int(table.max()) >= below:
            raise ModelTensorError(
                "id out of range",
                path=self._reader.path,
                tensor=name,
                expected=f"0..{below - 1}",
                found=int(table.max()),
            )
        return table.astype(np.int32)

    def values_entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        """As ``entry``, of numbers."""
        entry = self.entry(name, shape)
        if entry.type_id == TIDI32.id:
            raise ModelTensorError(
                "ids where numbers belong", path=self._reader.path, tensor=name, found=TIDI32.name
            )
        return entry

    def ids_entry(self, name: str, shape: tuple[int, int]) -> TensorEntry:
        """As ``entry``, of ids."""
        entry = self.entry(name, shape)
        if entry.type_id != TIDI32.id:
            raise ModelTensorError(
                "numbers where ids belong",
                path=self._reader.path,
                tensor=name,
                expected=TIDI32.name,
                found=type_of(entry.type_id).name,
            )
        return entry

    def entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        """The index entry of a tensor that must have this shape, and the length of its type."""
        path = self._reader.path
        entry = self._reader.tensors.get(name)
        if entry is None:
            raise ModelTensorError("tensor is missing", path=path, tensor=name)
        if entry.shape != shape:
            raise ModelTensorError(
                path=path, tensor=name, expected=list(shape), found=list(entry.shape)
            )
        check_entry(entry.type_id, shape, entry.group_size, entry.nbytes, path=path, tensor=name)
        return entry

    def matrix_entry(self, name: str, shape: tuple[int, int]) -> TensorEntry:
        """As ``entry``, of a type that there are kernels for."""
        entry = self.entry(name, shape)
        if entry.type_id not in FORMATS:
            raise BackendTypeError(
                path=self._reader.path, tensor=name, found=type_of(entry.type_id).name
            )
        return entry

    def bind(self, entries: Iterable[TensorEntry]) -> None:
        """Bind the tensors of mixed types among ``entries`` to their table rows, or none of them.

        A resident tensor has one buffer for as long as it lives, so its name is the slot.
        """
        mixed = (entry.name for entry in entries if type_of(entry.type_id) in MIXED)
        self._registry.bind_all((name, name) for name in mixed)

    def coding(self, entry: TensorEntry) -> Coding | None:
        """What the bytes of a bound tensor cannot be read without."""
        if type_of(entry.type_id) in MIXED:
            return self._registry.row(self._slots.get(entry.name, entry.name), entry.name)
        return self._codings.coding(entry.name)

    def check_rows(self, entry: TensorEntry, part: U8, first: int, last: int) -> None:
        """Refuse ``part``, rows ``first`` .. ``last - 1``, if the type forbids its bytes."""
        self._codec(entry).validate(
            part,
            (last - first, entry.shape[1]),
            first_row=first,
            path=self._reader.path,
            tensor=entry.name,
        )

    def check_whole(self, entry: TensorEntry, data: U8) -> None:
        """As ``check_rows``, of a whole matrix."""
        self.check_rows(entry, data, 0, entry.shape[0])

    def _codec(self, entry: TensorEntry) -> Codec:
        return self._codings.codec(entry)

    def _decoded(self, entry: TensorEntry) -> npt.NDArray[np.float32]:
        payload, codec = self._reader.read(entry.name), self._codec(entry)
        if self.digests is not None:
            self.digests.add(entry, 0, payload)
        codec.validate(payload, entry.shape, path=self._reader.path, tensor=entry.name)
        return codec.decode(payload, entry.shape)


class ArtifactSource(Tensors):
    """The tensors of an open artifact, as the model takes them: matrices in host memory.

    Parameters
    ----------
    reader : stays open until ``fill`` has returned
    digests : as in ``Tensors``
    """

    def __init__(self, reader: Reader, digests: Digests | None = None) -> None:
        super().__init__(reader, digests)
        self._planned: list[tuple[TensorEntry, U8]] = []

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        """A packed [rows, cols] matrix, whose bytes arrive with ``fill``."""
        entry = self.matrix_entry(name, (rows, cols))
        self.bind([entry])
        return self._plan(entry, np.empty(entry.nbytes, dtype=np.uint8))

    def matrices(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Weight]:
        """Packed matrices in one buffer, in the order of the file; bytes arrive with ``fill``."""
        entries = [self.matrix_entry(name, shape) for name, shape in shapes.items()]
        self.bind(entries)
        buffer = np.empty(sum(entry.nbytes for entry in entries), dtype=np.uint8)
        found, at = {}, 0
        for entry in sorted(entries, key=lambda entry: entry.offset):
            found[entry.name] = self._plan(entry, buffer[at : at + entry.nbytes])
            at += entry.nbytes
        return found

    def owned_matrices(
        self, layer: int, experts: Sequence[int], shapes: Mapping[str, tuple[int, int]]
    ) -> dict[str, Weight]:
        """Packed matrices of an owner's experts, a buffer per projection; bytes come with ``fill``.

        Those of mixed types stand first in it, and their decode tables are bound as those of an
        owner that has no other beside it.
        """
        ids: dict[str, tuple[int, ...]] = {}
        held: dict[str, Compact] = {}
        parts: list[tuple[TensorEntry, U8]] = []
        for projection, shape in shapes.items():
            entries = [self.matrix_entry(expert_name(layer, e, projection), shape) for e in experts]
            is_mixed = [type_of(entry.type_id) in MIXED for entry in entries]
            mixed = [entry for entry, is_ in zip(entries, is_mixed, strict=True) if is_]
            plain = [entry for entry, is_ in zip(entries, is_mixed, strict=True) if not is_]
            buffer = np.empty(sum(entry.nbytes for entry in entries), dtype=np.uint8)
            at = 0
            for entry in mixed + plain:
                parts.append((entry, buffer[at : at + entry.nbytes]))
                at += entry.nbytes
            if mixed:
                key = table_name(layer, projection)
                nbytes = sum(entry.nbytes for entry in mixed)
                ids[projection] = tuple(e for e, is_ in zip(experts, is_mixed, strict=True) if is_)
                held[projection] = Compact(key, mixed[0].type_id, (len(mixed), *shape), nbytes)
                self._slots |= {entry.name: (key, local) for local, entry in enumerate(mixed)}
        self._registry.bind_owners(layer, Owner(ids, held), Owner(), "none")
        return {entry.name: self._plan(entry, part) for entry, part in parts}

    @property
    def planned_bytes(self) -> int:
        """Bytes that ``fill`` is going to read."""
        return sum(entry.nbytes for entry, _ in self._planned)

    def fill(self, progress: Progress | None) -> None:
        """Read and check the bytes of every planned matrix.

        ``progress`` is called with (bytes done, bytes in all), in this thread.

        Raises
        ------
        DigestError, ReceiptError : a tensor differs from the receipt, or that cannot be used
        """
        total = self.planned_bytes
        done = 0
        pieces = [
            _Piece(entry, buffer, first, last)
            for entry, buffer in self._planned
            for first, last in row_pieces(entry)
        ]
        with ThreadPoolExecutor(_LANES, "ds4q-read") as pool:
            jobs = [
                pool.submit(self._read_piece, piece, pieces[n : n + 1])
                for n, piece in enumerate(pieces, _LANES)
            ]
            try:
                for job in as_completed(jobs):
                    done += job.result()
                    if progress is not None:
                        progress(done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._planned.clear()
        if self.digests is not None:
            self.digests.finish()

    def _plan(self, entry: TensorEntry, buffer: U8) -> Weight:
        self._planned.append((entry, buffer))
        rows, cols = entry.shape
        return Weight(entry.type_id, rows, cols, buffer, self.coding(entry))

    def _read_piece(self, piece: _Piece, following: Sequence[_Piece]) -> int:
        """Read and check a piece; the disk goes on with ``following`` while this one is checked."""
        for each in following:
            self._reader.expect(each.entry, *each.span)
        entry, buffer, first, last = piece
        start, nbytes = piece.span
        part = buffer[start : start + nbytes]
        self._reader.read_into(entry, part, start)
        if self.digests is not None:
            self.digests.add(entry, start, part)
        self.check_rows(entry, part, first, last)
        return nbytes


class _Piece(NamedTuple):
    """Rows ``first`` .. ``last - 1`` of a tensor whose bytes go into ``buffer``."""

    entry: TensorEntry
    buffer: U8
    first: int
    last: int

    @property
    def span(self) -> tuple[int, int]:
        """Where its bytes begin, and how many they are."""
        row_bytes = self.entry.nbytes // self.entry.shape[0]
        return self.first * row_bytes, (self.last - self.first) * row_bytes


def row_pieces(entry: TensorEntry) -> list[tuple[int, int]]:
    """Row ranges of about 16 MiB each that cover the tensor."""
    rows = entry.shape[0]
    step = max(1, _PIECE_BYTES * rows // entry.nbytes)
    return [(first, min(rows, first + step)) for first in range(0, rows, step)]
