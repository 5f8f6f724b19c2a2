"""Owns the trace file: which experts each dispatch asked for, and what became of it. Decides none.

Layout, little-endian: a zstd skippable frame with the magic, the version and a JSON header; then
one zstd frame of records, closed by a record that counts them. ``zstd -d`` unpacks the records.
T tokens of a dispatch, K experts per token, D distinct experts of a band, d hidden size, E experts.
"""

from __future__ import annotations

import enum
import json
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from ds4q.artifact.errors import MetadataError
from ds4q.artifact.hfq import Reader
from ds4q.artifact.metadata import canonical, parse_metadata
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.errors import TraceError
from ds4q.runtime.experts.catalogue import Catalogue

MAGIC = b"ds4q.trace"
VERSION = 1
PHASES: tuple[Phase, ...] = ("prefill", "decode")
MAX_RECORD_BYTES = 256 << 20
MAX_HEADER_BYTES = 16 << 20

Phase = Literal["prefill", "decode"]

_SKIPPABLE = 0x184D2A5E  # one of zstd's sixteen skippable magics
_FRAME = struct.Struct("<II")
_FRONT = struct.Struct("<10sH")
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


@dataclass(frozen=True, slots=True)
class Header:
    """What a trace was recorded under.

    ``expert_bytes`` holds per layer the bytes of each expert in the file, or of one where all are
    alike; ``slot_bytes`` the bytes of a slot of each layer.
    """

    artifact: str  # ``artifact_identity``
    layers: int
    hash_layers: int
    experts: int
    top_k: int
    hidden: int
    slots: int
    slot_bytes: tuple[int, ...]
    expert_bytes: tuple[tuple[int, ...], ...]
    policy: str
    parameters: dict[str, float] = field(default_factory=dict)
    warm_start: str = ""  # digest of the profile
    limits: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, artifact: str, config: ModelConfig, catalogue: Catalogue, slots: int, **rest: Any
    ) -> Header:
        """The header of a run; ``rest``: policy, parameters, warm_start, limits."""
        sizes = [tuple(record.nbytes for record in layer) for layer in catalogue.records]
        return cls(
            artifact=artifact,
            layers=config.num_hidden_layers,
            hash_layers=config.num_hash_layers,
            experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            hidden=config.hidden_size,
            slots=slots,
            slot_bytes=tuple(geometry.nbytes for geometry in catalogue.geometry),
            expert_bytes=tuple(size[:1] if len(set(size)) == 1 else size for size in sizes),
            **rest,
        )

    def bytes_of(self, layer: int, expert: int) -> int:
        """Bytes that reading an expert takes."""
        sizes = self.expert_bytes[layer]
        return sizes[expert] if len(sizes) > 1 else sizes[0]


class BandRecord(NamedTuple):
    """One band of a dispatch: ``ids`` [T, K] are those of the whole dispatch, in every band."""

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


class Recorder:
    """Writes a trace; any thread may add records. The file has its name once ``close`` is called.

    A trace in which no layer was asked for anything is dropped, and what stood at ``path`` stays.

    Parameters
    ----------
    path : replaced if it exists
    """

    def __init__(self, path: str | os.PathLike[str], header: Header) -> None:
        self.header = header
        self._path = Path(path)
        self._partial = self._path.with_name(self._path.name + ".partial")
        self._lock = threading.Lock()
        self._records = 0
        self._empty = True
        self._file: BinaryIO | None = self._partial.open("wb")
        front = _FRONT.pack(MAGIC, VERSION) + canonical(asdict(header))
        self._file.write(_FRAME.pack(_SKIPPABLE, len(front)) + front)
        packer = zstandard.ZstdCompressor(level=3, write_checksum=True)
        self._stream = packer.stream_writer(self._file, closefd=False)

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
            file, self._file = self._file, None
            if file is None:
                return
            with file:
                self._stream.write(_KIND.pack(_Kind.END) + _END.pack(self._records))
                self._stream.close()
            if self._empty:  # of a load that failed, say
                self._partial.unlink()
            else:
                os.replace(self._partial, self._path)

    def _write(self, kind: _Kind, *parts: bytes) -> None:
        with self._lock:
            if self._file is None:
                raise TraceError("a record after the trace was closed", path=self._path)
            self._stream.write(b"".join((_KIND.pack(kind), *parts)))
            self._records += 1


class Trace:
    """A trace on disk; iterating reads it from the start, a record at a time.

    Raises ``TraceError`` where the file is cut short, altered, or of another version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            self.header = _read_header(file, self.path)
            self._start = file.tell()

    def __iter__(self) -> Iterator[Record]:
        with self.path.open("rb") as file:
            file.seek(self._start)
            yield from _Records(file, self.path, self.header)

    def bands(self) -> Iterator[BandRecord]:
        """The dispatches alone."""
        return (record for record in self if isinstance(record, BandRecord))


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Open a trace and check its header; records are checked as they are read."""
    return Trace(path)


def _read_header(file: BinaryIO, path: Path) -> Header:
    raw = file.read(_FRAME.size + _FRONT.size)
    if len(raw) < _FRAME.size + _FRONT.size or raw[_FRAME.size :][: len(MAGIC)] != MAGIC:
        raise TraceError("not a trace", path=path, remedy="record one with ds4q run --trace FILE")
    magic, length = _FRAME.unpack_from(raw)
    _, version = _FRONT.unpack_from(raw, _FRAME.size)
    if magic != _SKIPPABLE or version != VERSION:
        raise TraceError(
            "trace of another version",
            path=path,
            expected=VERSION,
            found=version,
            remedy="record it again with this ds4q",
        )
    length -= _FRONT.size
    if not 0 < length <= MAX_HEADER_BYTES:
        raise TraceError("header out of bounds", path=path, found=f"{length} bytes")
    text = file.read(length)
    if len(text) < length:
        raise TraceError("cut short in its header", path=path, expected=length, found=len(text))
    try:
        document = parse_metadata(text, path)
        header = Header(**{name: _tuples(value) for name, value in document.items()})
    except (MetadataError, TypeError) as error:
        raise TraceError("header cannot be read", path=path, found=error) from None
    _check_header(header, path)
    return header


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def _check_header(header: Header, path: Path) -> None:
    kinds = {"int": int, "str": str, "dict": dict, "tuple": tuple}
    for each in fields(Header):
        value = getattr(header, each.name)
        if type(value) is not kinds[str(each.type).split("[")[0]]:
            raise TraceError(f"header: bad {each.name}", path=path, found=json.dumps(value)[:80])

    def sizes(values: Sequence[Any]) -> bool:
        return all(type(value) is int and value > 0 for value in values)

    counts = (header.layers, header.experts, header.top_k, header.slots, header.hidden)
    sound = (
        sizes(counts)
        and 0 <= header.hash_layers <= header.layers
        and header.top_k <= header.experts <= 1 << 16
        and len(header.slot_bytes) == len(header.expert_bytes) == header.layers
        and sizes(header.slot_bytes)
        and all(type(s) is tuple and len(s) in (1, header.experts) for s in header.expert_bytes)
        and all(map(sizes, header.expert_bytes))
        and all(type(value) is int for value in header.limits.values())
        and all(type(value) in (int, float) for value in header.parameters.values())
    )
    if not sound:
        raise TraceError("header: sizes do not fit each other", path=path, found=counts)


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
