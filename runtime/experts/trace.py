"""Owns the trace file: which experts each dispatch asked for, and what became of it. Decides none.

Layout, little-endian: a header (``header.py``), then one zstd frame of records, closed by a record
that counts them. ``zstd -d`` unpacks the records.
T tokens of a dispatch, K experts per token, D distinct experts of a band, d hidden size, E experts.
"""

from __future__ import annotations

import enum
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from ds4q.artifact.check import own_metadata
from ds4q.artifact.files import open_regular
from ds4q.artifact.hfq import Reader
from ds4q.artifact.newfile import NewFile
from ds4q.runtime.errors import TraceError
from ds4q.runtime.experts.header import Header, Identity, read_header

PHASES: tuple[Phase, ...] = ("prefill", "decode")
MAX_RECORD_BYTES = 256 << 20

Phase = Literal["prefill", "decode"]

_KIND = struct.Struct("<B")
_BAND = struct.Struct("<QIBIHIHHHHHQ")
_EXPERT = struct.Struct("<HH")
_STATES = struct.Struct("<QIBIHIHII")
_ROUTER = struct.Struct("<HII")
_END = struct.Struct("<Q")
_STEP_BYTES = 256  # of a forged frame, 4 bytes may stand for 128 KiB
_WINDOW_BYTES = 8 << 20


class Outcome(enum.IntEnum):
    """What a distinct expert of a band met."""

    HIT = 0  # it was resident
    COMPULSORY = 1  # never asked for before: read
    MISS = 2  # evicted before: read
    WARM = 3  # resident since the warm start, and never asked for before
    PREFETCHED = 4  # read ahead of this first use


class _Kind(enum.IntEnum):
    END = 0
    BAND = 1
    WARM = 2
    STATES = 3
    ROUTER = 4
    GONE = 5


class BandRecord(NamedTuple):
    """One band of a dispatch: ``ids`` [T, K] are those of the whole dispatch, in every band.

    Tokens of several sequences in one step are recorded as a sequence of their own, from 0.
    """

    number: int
    sequence: int
    phase: Phase
    token: int  # position of the first
    layer: int
    ids: npt.NDArray[np.uint16]
    distinct: npt.NDArray[np.uint16]  # [D] that the band serves, in order of first appearance
    outcomes: npt.NDArray[np.uint8]  # [D], ``Outcome``
    issued: int
    used: int
    dropped: int
    nbytes: int  # read for the band's misses


class WarmRecord(NamedTuple):
    """An expert that the warm start made resident."""

    layer: int
    expert: int


class GoneRecord(NamedTuple):
    """An expert whose read failed, after the dispatch that asked for it."""

    layer: int
    expert: int


class StatesRecord(NamedTuple):
    """What the router of a layer saw: ``hidden`` [T, d], and its scores before bias [T, E].

    ``tokens`` [T] are ids of the vocabulary, ``ids`` [T, K] the experts that were chosen.
    """

    number: int
    sequence: int
    phase: Phase
    token: int
    layer: int
    tokens: npt.NDArray[np.uint32]
    ids: npt.NDArray[np.uint16]
    hidden: npt.NDArray[np.float16]
    scores: npt.NDArray[np.float32]


class RouterRecord(NamedTuple):
    """The router of a layer that chooses by score: ``gate`` [E, d] and ``bias`` [E]."""

    layer: int
    gate: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]


Record = BandRecord | WarmRecord | GoneRecord | StatesRecord | RouterRecord


def artifact_identity(reader: Reader) -> str:
    """xxh3-128 (hex) of header, metadata and index: tells models of equal shapes apart."""
    return xxhash.xxh3_128(reader.header_raw + reader.metadata_raw + reader.index_raw).hexdigest()


def identity_of(reader: Reader) -> Identity:
    """Which model an artifact is: itself, and the checkpoint that it says it was made from."""
    source = (own_metadata(reader) or {}).get("source_fingerprint")
    return Identity(artifact_identity(reader), source if isinstance(source, str) else "")


class Recorder:
    """Writes a trace; any thread may add records. The file has its name once ``close`` is called.

    A trace in which no layer was asked for anything is dropped, and so is one whose last record was
    not written whole: what stood there stays.

    Parameters
    ----------
    file : nothing has been written to it

    Raises ``WriteError``, as all that writes here, where nothing more can be written; nothing is
    left then.
    """

    def __init__(self, file: NewFile, header: Header) -> None:
        self.header = header
        self._file = file
        self._lock = threading.Lock()
        self._records = 0
        self._empty = True
        self._whole = True
        self._open = True
        file.write(header.encode())
        packer = zstandard.ZstdCompressor(level=3, write_checksum=True)
        self._stream = packer.stream_writer(file, closefd=False)  # type: ignore[arg-type]

    def dispatch(
        self,
        number: int,
        sequence: int,
        phase: Phase,
        token: int,
        layer: int,
        ids: npt.ArrayLike,
        distinct: Sequence[int],
        outcomes: Sequence[int],
        *,
        issued: int = 0,
        used: int = 0,
        dropped: int = 0,
        nbytes: int = 0,
    ) -> None:
        """Add a band; see ``BandRecord``. ``ids`` [T, K] of any integer dtype."""
        chosen = np.ascontiguousarray(ids, dtype="<u2")
        tokens, k = chosen.shape
        head = _BAND.pack(
            number, sequence, PHASES.index(phase), token, layer, tokens, k,
            len(distinct), issued, used, dropped, nbytes,
        )  # fmt: skip
        served = np.asarray(distinct, dtype="<u2").tobytes()
        met = np.asarray(outcomes, dtype=np.uint8).tobytes()
        self._write(_Kind.BAND, head, chosen.tobytes(), served, met)
        self._empty = False

    def warm(self, layer: int, expert: int) -> None:
        """Add an expert that the warm start made resident."""
        self._write(_Kind.WARM, _EXPERT.pack(layer, expert))

    def gone(self, layer: int, expert: int) -> None:
        """Add an expert whose read failed: it is resident no longer."""
        self._write(_Kind.GONE, _EXPERT.pack(layer, expert))

    def states(
        self,
        number: int,
        sequence: int,
        phase: Phase,
        token: int,
        layer: int,
        tokens: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        hidden: npt.NDArray[np.float32],
        scores: npt.NDArray[np.float32],
    ) -> None:
        """Add what a router saw, see ``StatesRecord``; ``hidden`` is kept as float16."""
        parts = (tokens.astype("<u4"), ids.astype("<u2"), hidden.astype("<f2"), scores)
        head = _STATES.pack(
            number, sequence, PHASES.index(phase), token, layer, len(hidden), ids.shape[1],
            hidden.shape[1], scores.shape[1],
        )  # fmt: skip
        self._write(_Kind.STATES, head, *(part.tobytes() for part in parts))
        self._empty = False

    def router(
        self, layer: int, gate: npt.NDArray[np.float32], bias: npt.NDArray[np.float32]
    ) -> None:
        """Add a router, see ``RouterRecord``: once, before the states of its layer."""
        self._write(_Kind.ROUTER, _ROUTER.pack(layer, *gate.shape), gate.tobytes(), bias.tobytes())

    def close(self) -> None:
        """Finish the file and give it its name; a second call does nothing."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            if self._empty or not self._whole:  # of a load that failed, say
                self._file.discard()
                return
            self._stream.write(_KIND.pack(_Kind.END) + _END.pack(self._records))
            self._stream.close()
            self._file.publish()

    def drop(self) -> None:
        """Leave no trace, of a run that failed; what stood at its place stays."""
        with self._lock:
            self._open = False
            self._file.discard()

    def _write(self, kind: _Kind, *parts: bytes) -> None:
        with self._lock:
            if not self._open or not self._whole:
                raise TraceError("a record after the trace was closed", path=self._file.final)
            self._whole = False  # until it is: an interrupt may come at any time
            self._stream.write(b"".join((_KIND.pack(kind), *parts)))
            self._records += 1
            self._whole = True


class Trace:
    """A trace on disk; iterating reads it from the start, a record at a time.

    Raises ``TraceError`` where the file is cut short, altered, or of another version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open(open_regular(self.path), "rb") as file:
            self.header = read_header(file, self.path)
            self._start = file.tell()

    def __iter__(self) -> Iterator[Record]:
        with open(open_regular(self.path), "rb") as file:
            file.seek(self._start)
            yield from _Records(file, self.path, self.header)

    def bands(self) -> Iterator[BandRecord]:
        """The dispatches alone."""
        return (record for record in self if isinstance(record, BandRecord))


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Open a trace and check its header; records are checked as they are read."""
    return Trace(path)


class _Records:
    """The records behind the header, unpacked a step at a time."""

    def __init__(self, file: BinaryIO, path: Path, header: Header) -> None:
        self._file, self._path, self._header = file, path, header
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
        self._buffer = bytearray()
        self._count = 0

    def __iter__(self) -> Iterator[Record]:
        while True:
            (kind,) = self._unpack(_KIND)
            if kind == _Kind.BAND:
                yield self._band()
            elif kind == _Kind.WARM:
                yield WarmRecord(*self._expert())
            elif kind == _Kind.GONE:
                yield GoneRecord(*self._expert())
            elif kind == _Kind.STATES:
                yield self._states()
            elif kind == _Kind.ROUTER:
                yield self._router()
            elif kind == _Kind.END:
                self._end()
                return
            else:
                raise self._error("unknown kind of record", found=kind)
            self._count += 1

    def _band(self) -> BandRecord:
        header = self._header
        found = self._unpack(_BAND)
        number, sequence, phase, token, layer, tokens, k, d, issued, used, dropped, nbytes = found
        self._check(phase < len(PHASES), "phase", phase)
        self._check(layer < header.layers, "layer", layer)
        self._check(0 < k <= header.top_k, "experts per token", k)
        self._check(0 < tokens * k * 2 <= MAX_RECORD_BYTES, "tokens", tokens)
        self._check(d <= header.experts, "distinct experts", d)
        ids = np.frombuffer(self._take(tokens * k * 2), "<u2").reshape(tokens, k)
        distinct = np.frombuffer(self._take(d * 2), "<u2")
        outcomes = np.frombuffer(self._take(d), np.uint8)
        for name, values in (("expert", ids), ("distinct expert", distinct)):
            largest = int(values.max(initial=0))
            self._check(largest < header.experts, name, largest)
        worst = int(outcomes.max(initial=0))
        self._check(worst < len(Outcome), "outcome", worst)
        served = set(distinct.tolist())
        self._check(len(served) == d, "distinct experts named twice", d)
        self._check(served <= set(ids.ravel().tolist()), "expert that no token chose", distinct)
        self._check(served <= set(range(*header.owned)), "expert of another rank", distinct)
        return BandRecord(
            number, sequence, PHASES[phase], token, layer,
            ids, distinct, outcomes, issued, used, dropped, nbytes,
        )  # fmt: skip

    def _states(self) -> StatesRecord:
        header = self._header
        number, sequence, phase, token, layer, tokens, k, d, e = self._unpack(_STATES)
        self._check(phase < len(PHASES), "phase", phase)
        self._check(layer < header.layers, "layer", layer)
        self._check(k == header.top_k, "experts per token", k)
        self._check_router_shape(d, e)
        self._check(0 < tokens * (4 + 2 * k + 2 * d + 4 * e) <= MAX_RECORD_BYTES, "tokens", tokens)
        words = np.frombuffer(self._take(tokens * 4), "<u4")
        ids = np.frombuffer(self._take(tokens * k * 2), "<u2").reshape(tokens, k)
        self._check(int(ids.max()) < header.experts, "expert", int(ids.max()))
        hidden = np.frombuffer(self._take(tokens * d * 2), "<f2").reshape(tokens, d)
        scores = np.frombuffer(self._take(tokens * e * 4), "<f4").reshape(tokens, e)
        return StatesRecord(
            number, sequence, PHASES[phase], token, layer, words, ids, hidden, scores
        )

    def _router(self) -> RouterRecord:
        layer, e, d = self._unpack(_ROUTER)
        self._check(layer < self._header.layers, "layer", layer)
        self._check_router_shape(d, e)
        self._check(e * d * 4 <= MAX_RECORD_BYTES, "hidden size", d)
        gate = np.frombuffer(self._take(e * d * 4), "<f4").reshape(e, d)
        return RouterRecord(layer, gate, np.frombuffer(self._take(e * 4), "<f4"))

    def _check_router_shape(self, d: int, e: int) -> None:
        self._check(d == self._header.hidden, "hidden size", d)
        self._check(e == self._header.experts, "scores of a token", e)

    def _expert(self) -> tuple[int, int]:
        layer, expert = self._unpack(_EXPERT)
        self._check(layer < self._header.layers, "layer", layer)
        self._check(expert < self._header.experts, "expert", expert)
        return layer, expert

    def _end(self) -> None:
        (count,) = self._unpack(_END)
        if count != self._count:
            raise self._error("records are missing", expected=count, found=self._count)
        while not self._unpacker.eof and not self._buffer:
            self._more()
        if self._buffer or self._unpacker.unused_data or self._file.read(1):
            raise self._error("bytes follow the end")

    def _unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self._take(layout.size))

    def _take(self, nbytes: int) -> bytes:
        while len(self._buffer) < nbytes:
            self._more()
        taken = bytes(self._buffer[:nbytes])
        del self._buffer[:nbytes]
        return taken

    def _more(self) -> None:
        step = b"" if self._unpacker.eof else self._file.read(_STEP_BYTES)
        if not step:
            raise self._error("the trace is cut short")
        try:
            self._buffer += self._unpacker.decompress(step)
        except zstandard.ZstdError as error:
            raise self._error("the trace is damaged", found=error) from None

    def _check(self, holds: bool, what: str, found: object) -> None:
        if not holds:
            raise self._error(f"{what} out of range", found=found)

    def _error(self, what: str, **seen: Any) -> TraceError:
        where = f"{what}, in record {self._count} at byte {self._file.tell():,}"
        return TraceError(where, path=self._path, **seen)
