"""Owns the imatrix format of ds4q and its strict reading. Writing is ``writing.py``.

A safetensors file. ``__metadata__`` holds ``format``, ``source_fingerprint`` (the artifact's
``ds4q.source_fingerprint``), ``tensors_xxh3`` (xxh3-128 in hex of all bytes after the header),
``texts`` (a JSON list of the SHA-256 of each text), ``tokens`` (positions that went through the
model, each window's BOS among them) and ``window_tokens``. The tensors of each layer, E experts, d
hidden size::

    layers.L.ffn.experts.tokens   I64 [E]         tokens that were routed to the expert
    layers.L.ffn.experts.gain     F32 [E]         mean square of those tokens' routing weights
    layers.L.ffn.experts.gate_up  F32 [E, d]      mean square of every input of w1 and w3
    layers.L.ffn.experts.down     F32 [E, width]  mean square of every input of w2

The statistics of an expert without tokens are zero. ``reading.py`` says what the numbers are for.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ds4q.quantize.config import Dims
from ds4q.quantize.errors import (
    ImatrixError,
    ImatrixMissingError,
    ImatrixModelError,
    ImatrixValueError,
    SourceError,
)
from ds4q.quantize.safetensors import LENGTH_BYTES, Entry, parse_json, pread_exact, read_header

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

FORMAT = "ds4q.imatrix.v1"
MAX_HEADER_BYTES = 16 << 20  # some 30,000 layers
BEGINNING = b'{"__metadata__":{"format":"' + FORMAT.encode() + b'"'
_KEYS = {"format", "source_fingerprint", "tensors_xxh3", "texts", "tokens", "window_tokens"}
DTYPES = {"tokens": "I64", "gain": "F32", "gate_up": "F32", "down": "F32"}
_NAME = re.compile(r"layers\.(0|[1-9]\d{0,5})\.ffn\.experts\.(tokens|gain|gate_up|down)", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_COUNT = re.compile(r"[1-9]\d{0,17}", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class LayerStatistics:
    """What was seen at the routed experts of one layer.

    ``tokens`` i64 [E], ``gain`` f32 [E], ``gate_up`` f32 [E, d], ``down`` f32 [E, width]: see the
    module's first lines.
    """

    tokens: I64
    gain: F32
    gate_up: F32
    down: F32


class Means(NamedTuple):
    """Mean squares f32 [R, K] of a projection's inputs over ``counts`` i64 [R] tokens.

    R is the number of experts, or 1 where all of them share one vector.
    """

    values: F32
    counts: I64


class Layer(NamedTuple):
    """One layer as read: means by projection, routing counts i64 [E], gains f32 [E]."""

    means: Mapping[str, Means]
    tokens: I64
    gain: F32


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model's imatrix must measure; ``chosen`` experts see each token, if that is known."""

    layers: int
    experts: int
    hidden: int
    width: int
    chosen: int | None = None


def demand_sizes(dims: Dims | None, found: Sizes, path: object) -> None:
    """Refuse an imatrix of other sizes than the model's; unknown sizes of a part are no ground."""
    if dims is None:
        return
    pairs = (
        ("number of layers", dims.layers, found.layers),
        ("number of experts", dims.experts, found.experts),
        ("hidden size", dims.sizes["d"], found.hidden),
        ("expert width", dims.sizes["I"], found.width),
    )
    for what, expected, has in pairs:
        if expected is not None and has != expected:
            raise ImatrixModelError(f"{what} differs", path=path, expected=expected, found=has)


def check_means(values: F32, path: object, tensor: str) -> None:
    """Refuse a mean square that is NaN, infinite or negative."""
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        place = [int(i) for i in np.argwhere(bad)[0]]
        raise ImatrixValueError(
            path=path,
            tensor=tensor,
            expected="finite numbers that are not negative",
            found=f"{values[tuple(place)]} at {place}",
        )


class OwnFile:
    """The header of a file of ours, checked; ``read`` gives its layers.

    Attributes
    ----------
    sizes : layers, experts, hidden size and expert width
    fingerprint : of the checkpoint that the statistics belong to
    total_tokens : positions that went through the model
    """

    def __init__(self, fd: int, size_bytes: int, path: Path, chosen: int | None) -> None:
        length = int.from_bytes(pread_exact(fd, LENGTH_BYTES, 0, path), "little")
        if length > MAX_HEADER_BYTES:
            raise ImatrixError(
                "header is longer than that of an imatrix",
                path=path,
                expected=f"at most {MAX_HEADER_BYTES} bytes",
                found=length,
            )
        try:
            header = read_header(fd, size_bytes, path)
        except SourceError as error:
            raise _as_imatrix_error(error) from None
        self._path = path
        self._data_offset = header.data_offset
        self._read_metadata(header.metadata)
        self._entries = {entry.name: entry for entry in header.entries}
        self.sizes = self._checked_sizes(chosen)

    def _read_metadata(self, fields: dict[str, str]) -> None:
        path = self._path
        if fields.get("format") != FORMAT:
            found = repr(fields.get("format"))
            raise ImatrixError(path=path, expected=f"format {FORMAT!r}", found=found)
        if fields.keys() != _KEYS:
            raise ImatrixError(
                "metadata keys differ", path=path, expected=sorted(_KEYS), found=sorted(fields)
            )
        for key in ("tokens", "window_tokens"):
            if not _COUNT.fullmatch(fields[key]):
                found = repr(fields[key][:40])
                raise ImatrixError(
                    f"metadata key {key}", path=path, expected="a count", found=found
                )
        if not _DIGEST.fullmatch(fields["source_fingerprint"]):
            raise ImatrixError(
                "metadata key source_fingerprint",
                path=path,
                expected="a SHA-256 in hex",
                found=repr(fields["source_fingerprint"][:80]),
            )
        try:
            texts = parse_json(b'{"texts":' + fields["texts"].encode() + b"}", path)["texts"]
        except SourceError as error:
            raise _as_imatrix_error(error) from None
        if not isinstance(texts, list) or not texts or not all(map(_is_digest, texts)):
            raise ImatrixError("metadata key texts", path=path, expected="a list of SHA-256 in hex")
        self.fingerprint = fields["source_fingerprint"]
        self._tensors_xxh3 = fields["tensors_xxh3"]
        self.total_tokens = int(fields["tokens"])

    def demand_digest(self, fd: int) -> None:
        """Refuse numbers other than those that were written; reads all of them."""
        with os.fdopen(os.dup(fd), "rb") as file:
            file.seek(self._data_offset)
            found = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        if found != self._tensors_xxh3:
            raise ImatrixError(
                "imatrix differs from its digest",
                path=self._path,
                expected=f"xxh3-128 {self._tensors_xxh3[:80]!r}",
                found=repr(found),
            )

    def _checked_sizes(self, chosen: int | None) -> Sizes:
        """Names, dtypes and shapes: whole layers of one size and nothing else."""
        path, layers = self._path, 0
        for name in self._entries:
            match = _NAME.fullmatch(name)
            if match is None:
                raise ImatrixError("unknown tensor", path=path, tensor=name)
            layers = max(layers, int(match[1]) + 1)
        if not layers:
            raise ImatrixMissingError("no layer at all", path=path)
        shapes = {part: self._entry(0, part).shape for part in ("gate_up", "down")}
        if any(len(shape) != 2 or 0 in shape for shape in shapes.values()):
            raise ImatrixModelError("impossible shapes of layer 0", path=path, found=shapes)
        (experts, hidden), (_, width) = shapes.values()
        wanted: dict[str, tuple[int, ...]] = {"tokens": (experts,), "gain": (experts,)}
        wanted |= {"gate_up": (experts, hidden), "down": (experts, width)}
        for layer in range(layers):
            for part, shape in wanted.items():
                entry = self._entry(layer, part)
                if (entry.dtype, entry.shape) != (DTYPES[part], shape):
                    raise ImatrixModelError(
                        "type or shape differs",
                        path=path,
                        tensor=entry.name,
                        expected=f"{DTYPES[part]} {list(shape)}",
                        found=f"{entry.dtype} {list(entry.shape)}",
                    )
        return Sizes(layers, experts, hidden, width, chosen)

    def _entry(self, layer: int, part: str) -> Entry:
        name = f"layers.{layer}.ffn.experts.{part}"
        if name not in self._entries:
            raise ImatrixMissingError(path=self._path, tensor=name)
        return self._entries[name]

    def _array(self, fd: int, layer: int, part: str) -> npt.NDArray[Any]:
        entry = self._entry(layer, part)
        raw = pread_exact(fd, entry.stop - entry.start, self._data_offset + entry.start, self._path)
        stored = np.frombuffer(raw, "<i8" if part == "tokens" else "<f4").reshape(entry.shape)
        return stored.copy()  # writable, so that compiled encoders see one type of array

    def read(self, fd: int, layer: int) -> Layer:
        """One layer, its numbers checked."""
        stored = LayerStatistics(*(self._array(fd, layer, part) for part in DTYPES))
        self._check_numbers(stored, layer)
        gate_up = Means(stored.gate_up, stored.tokens)
        means = {"w1": gate_up, "w3": gate_up, "w2": Means(stored.down, stored.tokens)}
        return Layer(means, stored.tokens, stored.gain)

    def _check_numbers(self, stored: LayerStatistics, layer: int) -> None:
        path, prefix = self._path, f"layers.{layer}.ffn.experts"
        tokens, total = stored.tokens, self.total_tokens
        bad = np.flatnonzero((tokens < 0) | (tokens > total))
        if bad.size:
            raise ImatrixValueError(
                path=path,
                tensor=f"{prefix}.tokens",
                expected=f"0 to {total}, the tokens in all",
                found=f"{tokens[bad[0]]} of expert {bad[0]}",
            )
        routed, chosen = sum(tokens.tolist()), self.sizes.chosen
        if routed % total or not routed or (chosen is not None and routed != chosen * total):
            raise ImatrixValueError(
                "routing counts do not add up",
                path=path,
                tensor=f"{prefix}.tokens",
                expected=f"{total} tokens x {'a number of' if chosen is None else chosen} experts",
                found=routed,
            )
        for part in ("gain", "gate_up", "down"):
            values = getattr(stored, part)
            check_means(values, path, f"{prefix}.{part}")
            idle = np.flatnonzero((tokens == 0) & values.reshape(len(tokens), -1).any(axis=1))
            if idle.size:
                raise ImatrixValueError(
                    "statistics of an expert that saw no token",
                    path=path,
                    tensor=f"{prefix}.{part}",
                    found=f"expert {idle[0]}",
                )


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _as_imatrix_error(error: SourceError) -> ImatrixError:
    return ImatrixError(
        error.what,
        path=error.path,
        tensor=error.tensor,
        expected=error.expected,
        found=error.found,
    )
