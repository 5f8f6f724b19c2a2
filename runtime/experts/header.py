"""Owns the header of a trace: what a run was recorded under. Knows no record.

A zstd skippable frame, little-endian: magic, version, canonical JSON, and the xxh3-128 (big-endian)
of everything before it. ``zstd -d`` skips it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from ds4q.artifact.errors import MetadataError
from ds4q.artifact.files import beginning
from ds4q.artifact.metadata import canonical, parse_metadata
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.errors import TraceError
from ds4q.runtime.experts.catalogue import Catalogue

MAGIC = b"ds4q.trace"
VERSION = 3
VERSIONS_READ = (2, VERSION)  # version 2 does not name the source
MAX_HEADER_BYTES = 16 << 20

is_trace = beginning(rb"\x5e\x2a\x4d\x18.{4}ds4q\.trace(?s:.)\0")
"""Whether a file that begins so is a trace, of any version."""

_SKIPPABLE = 0x184D2A5E  # one of zstd's sixteen skippable magics
_FRAME = struct.Struct("<II")
_FRONT = struct.Struct("<10sH")
_DIGEST_BYTES = 16


class Identity(NamedTuple):
    """Which model something was made of.

    ``artifact`` is ``trace.artifact_identity``, ``source`` the fingerprint of the checkpoint that
    the artifact was made from, "" where that is not known.
    """

    artifact: str
    source: str

    def same_model(self, other: Identity) -> bool | None:
        """Whether both are of one checkpoint, however it is packed; None: unknown."""
        if self.source and other.source:
            return self.source == other.source
        return True if self.artifact == other.artifact else None


@dataclass(frozen=True, slots=True)
class Header:
    """What a trace was recorded under.

    ``expert_bytes`` holds per layer the bytes of each expert in the file, or of one where all are
    alike; ``slot_bytes`` the bytes of a slot of each layer. Of every layer the run held the experts
    from ``owned[0]`` on, up to ``owned[1]`` without it.
    """

    artifact: str  # ``trace.artifact_identity``
    layers: int
    hash_layers: int
    experts: int
    owned: tuple[int, int]
    top_k: int
    hidden: int
    slots: int
    slot_bytes: tuple[int, ...]
    expert_bytes: tuple[tuple[int, ...], ...]
    policy: str
    parameters: dict[str, float] = field(default_factory=dict)
    warm_start: str = ""  # digest of the profile
    limits: dict[str, int] = field(default_factory=dict)
    source: str = ""  # fingerprint of the checkpoint; not in version 2

    @classmethod
    def of(
        cls, model: Identity, config: ModelConfig, catalogue: Catalogue, slots: int, **rest: Any
    ) -> Header:
        """The header of a run; ``rest``: owned, policy, parameters, warm_start, limits."""
        sizes = [tuple(record.nbytes for record in layer) for layer in catalogue.records]
        return cls(
            artifact=model.artifact,
            source=model.source,
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

    @property
    def model(self) -> Identity:
        """Of the artifact that ran."""
        return Identity(self.artifact, self.source)

    @property
    def held(self) -> int:
        """Experts of a layer that the run could ask for: all, or those of its rank."""
        return self.owned[1] - self.owned[0]

    @property
    def least(self) -> int:
        """Fewest slots of a layer that serve any token."""
        return min(self.top_k, self.held)

    def bytes_of(self, layer: int, expert: int) -> int:
        """Bytes that reading an expert takes."""
        sizes = self.expert_bytes[layer]
        return sizes[expert] if len(sizes) > 1 else sizes[0]

    def encode(self) -> bytes:
        """The bytes that a trace begins with."""
        front = _FRONT.pack(MAGIC, VERSION) + canonical(asdict(self))
        front = _FRAME.pack(_SKIPPABLE, len(front) + _DIGEST_BYTES) + front
        return front + xxhash.xxh3_128(front).digest()


def read_header(file: BinaryIO, path: Path) -> Header:
    """The header that ``file`` begins with; the records follow.

    Raises ``TraceError``: no trace, one of another version, or a header that is damaged.
    """
    front = _FRAME.size + _FRONT.size
    raw = file.read(front)
    if raw[_FRAME.size :][: len(MAGIC)] != MAGIC:
        remedy = "record one with ds4q run --trace FILE"
        raise TraceError("not a trace, or one with a damaged header", path=path, remedy=remedy)
    if len(raw) < front:
        raise TraceError("cut short in its header", path=path, expected=front, found=len(raw))
    frame, length = _FRAME.unpack_from(raw)
    _, version = _FRONT.unpack_from(raw, _FRAME.size)
    if version not in VERSIONS_READ:
        raise TraceError(
            "trace of another version",
            path=path,
            expected=" or ".join(map(str, VERSIONS_READ)),
            found=version,
            remedy="record it again with this ds4q",
        )
    length -= _FRONT.size
    if frame != _SKIPPABLE or not _DIGEST_BYTES < length <= MAX_HEADER_BYTES:
        raise TraceError("damaged header", path=path)
    raw += file.read(length)
    if len(raw) < front + length:
        raise TraceError(
            "cut short in its header", path=path, expected=front + length, found=len(raw)
        )
    text, digest = raw[front:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if xxhash.xxh3_128(raw[:-_DIGEST_BYTES]).digest() != digest:
        raise TraceError("damaged header: its digest differs", path=path)
    try:
        document = parse_metadata(text, path)
    except MetadataError as error:
        raise TraceError("damaged header", path=path, found=error.what) from None
    known = {each.name for each in fields(Header)}
    if version != VERSION:
        known.remove("source")
    if other := document.keys() ^ known:
        raise TraceError("damaged header: fields of no trace", path=path, found=sorted(other))
    header = Header(**{name: _tuples(value) for name, value in document.items()})
    _check(header, path)
    return header


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def _check(header: Header, path: Path) -> None:
    kinds = {"int": int, "str": str, "dict": dict, "tuple": tuple}
    for each in fields(Header):
        value = getattr(header, each.name)
        if type(value) is not kinds[str(each.type).split("[")[0]]:
            found = json.dumps(value)[:80]
            raise TraceError(f"damaged header: bad {each.name}", path=path, found=found)

    def sizes(values: Sequence[Any]) -> bool:
        return all(type(value) is int and value > 0 for value in values)

    counts = (header.layers, header.experts, header.top_k, header.slots, header.hidden)
    sound = (
        sizes(counts)
        and 0 <= header.hash_layers <= header.layers
        and header.top_k <= header.experts <= 1 << 16
        and len(header.owned) == 2
        and all(type(value) is int for value in header.owned)
        and 0 <= header.owned[0] < header.owned[1] <= header.experts
        and len(header.slot_bytes) == len(header.expert_bytes) == header.layers
        and sizes(header.slot_bytes)
        and all(type(s) is tuple and len(s) in (1, header.experts) for s in header.expert_bytes)
        and all(map(sizes, header.expert_bytes))
        and all(type(value) is int for value in header.limits.values())
        and all(type(value) in (int, float) for value in header.parameters.values())
    )
    if not sound:
        raise TraceError("damaged header: sizes do not fit each other", path=path, found=counts)
