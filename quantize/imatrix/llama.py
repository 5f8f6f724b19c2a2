"""Owns the files of llama.cpp: the older binary format, and the routed experts of either.

The older format: i32 entries; each i32 name length, name, i32 calls, i32 n, n x f32, sums over
``calls`` runs; then, in later versions, i32 runs, i32 length and the name of the text. A vector of
n_in numbers is shared by all experts, one of n_expert * n_in holds a row for each.

Experts are found by their names, ``blk.L.ffn_{gate,up,down}_exps.weight``; what else a file holds
is not needed. Neither format says which checkpoint it was measured on.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ds4q.quantize.config import Dims
from ds4q.quantize.errors import (
    ImatrixError,
    ImatrixMissingError,
    ImatrixModelError,
    ImatrixValueError,
)
from ds4q.quantize.imatrix.gguf import COUNTS, MAX_NAME_BYTES, Cursor, Vectors
from ds4q.quantize.imatrix.own import Layer, Means, Sizes, check_means
from ds4q.quantize.safetensors import pread_exact

F32 = npt.NDArray[np.float32]

PROJECTIONS = {"w1": "gate", "w2": "down", "w3": "up"}
NO_FINGERPRINT = "names no checkpoint, as files of llama.cpp do: only names and sizes were checked"

_MAX_ENTRIES = 1_000_000
_MAX_VECTOR = 1 << 24
_MAX_CALLS = (1 << 31) - 1
_EXPERTS = re.compile(r"blk\.(0|[1-9]\d{0,5})\.ffn_(gate|up|down)_exps\.weight", re.ASCII)


def read_legacy(file: BinaryIO, size_bytes: int, path: Path) -> dict[str, Vectors]:
    """Where an older llama.cpp imatrix keeps its vectors; every number is checked on the way."""
    cursor = Cursor(file, size_bytes, path)
    entries = cursor.number("i", "the number of entries")
    if not 1 <= entries <= _MAX_ENTRIES:
        raise ImatrixError(
            "not an imatrix", path=path, expected="a file of 'ds4q calibrate' or of llama-imatrix"
        )
    found: dict[str, Vectors] = {}
    for _ in range(entries):
        name = cursor.text("i", MAX_NAME_BYTES, "an entry's name", 1)
        if name in found:
            raise ImatrixError("entry appears twice", path=path, tensor=name)
        calls = cursor.count("i", _MAX_CALLS, f"calls of {name}", 1)
        n = cursor.count("i", _MAX_VECTOR, f"length of {name}", 1)
        found[name] = Vectors(n, 1, cursor.at, None, calls)
        values = np.frombuffer(cursor.take(4 * n, f"the numbers of {name}"), "<f4")
        check_means(values, path, name)
    if cursor.left:
        _read_trailer(cursor)
    return found


def _read_trailer(cursor: Cursor) -> None:
    """The number of runs and the name of the text; nothing else may follow the entries."""
    start, size_bytes = cursor.at, cursor.at + cursor.left
    try:
        cursor.count("i", _MAX_CALLS, "number of runs", 1)
        name = cursor.text("i", MAX_NAME_BYTES, "name of the text")
        if cursor.left or not name.isprintable():
            raise ImatrixError
    except ImatrixError:
        raise ImatrixError(
            "bytes after the last entry",
            path=cursor.path,
            expected=f"{start} bytes",
            found=size_bytes,
        ) from None


MAX_COUNT = 2.0**53  # far beyond any calibration, and exact as a float


class LlamaFile:
    """The experts' statistics of a file of llama.cpp; ``read`` gives a layer.

    Attributes
    ----------
    sizes : layers, experts, hidden size and expert width
    """

    def __init__(self, vectors: dict[str, Vectors], path: Path, dims: Dims | None) -> None:
        self._path = path
        self._vectors: dict[tuple[int, str], Vectors] = {}
        projection = {word: w for w, word in PROJECTIONS.items()}
        for name, found in vectors.items():
            if match := _EXPERTS.fullmatch(name):
                self._vectors[int(match[1]), projection[match[2]]] = found
        if not self._vectors:
            raise ImatrixMissingError("no routed expert in it", path=path)
        layers = max(layer for layer, _ in self._vectors) + 1
        self.sizes = self._checked_sizes(layers, dims)

    def _checked_sizes(self, layers: int, dims: Dims | None) -> Sizes:
        """Every layer whole, every vector of the model's length; rows are told apart here."""
        experts = max(found.rows for found in self._vectors.values())
        wanted: dict[str, int | None] = dict.fromkeys(PROJECTIONS)
        if dims is not None:
            experts = dims.experts or experts
            wanted = {"w1": dims.sizes["d"], "w2": dims.sizes["I"], "w3": dims.sizes["d"]}
        columns = {w: size or self._vector(0, w).columns for w, size in wanted.items()}
        for layer in range(layers):
            for w in PROJECTIONS:
                found = self._vector(layer, w)
                if found.counts_at is None and found.columns == experts * columns[w]:
                    found = found._replace(rows=experts, columns=columns[w])
                    self._vectors[layer, w] = found
                if found.rows not in (1, experts) or found.columns != columns[w]:
                    raise ImatrixModelError(
                        "sizes differ",
                        path=self._path,
                        tensor=_weight_name(layer, w),
                        expected=f"{experts} or 1 x {columns[w]}",
                        found=f"{found.rows} x {found.columns}",
                    )
        if columns["w1"] != columns["w3"]:
            raise ImatrixModelError("gate and up differ in size", path=self._path, found=columns)
        return Sizes(layers, experts, columns["w1"], columns["w2"])

    def _vector(self, layer: int, projection: str) -> Vectors:
        found = self._vectors.get((layer, projection))
        if found is None:
            raise ImatrixMissingError(path=self._path, tensor=_weight_name(layer, projection))
        return found

    def read(self, fd: int, layer: int) -> Layer:
        """One layer, its numbers checked.

        Where the file has no routing counts each expert counts 1. It never has gains: all are 1.
        """
        experts = self.sizes.experts
        means = {w: self._means(fd, layer, w) for w in PROJECTIONS}
        gate = self._vector(layer, "w1")
        counted = gate.counts_at is not None and gate.rows == experts
        tokens = means["w1"].counts if counted else np.ones(experts, np.int64)
        return Layer(means, tokens, np.ones(experts, np.float32))

    def _means(self, fd: int, layer: int, projection: str) -> Means:
        place, path = self._vector(layer, projection), self._path
        name = _weight_name(layer, projection)
        shape = (place.rows, place.columns)
        raw = pread_exact(fd, 4 * place.rows * place.columns, place.sums_at, path)
        sums: F32 = np.frombuffer(raw, "<f4").reshape(shape)
        check_means(sums, path, name)
        if place.counts_at is None:
            return Means(sums / np.float32(place.calls), np.ones(place.rows, np.int64))
        counts = np.frombuffer(pread_exact(fd, 4 * place.rows, place.counts_at, path), "<f4")
        legal = (counts >= 0) & (counts < MAX_COUNT) & (counts == np.floor(counts))
        bad = np.flatnonzero(~legal)
        if bad.size:
            raise ImatrixValueError(
                path=path,
                tensor=name + COUNTS,
                expected="whole numbers that are not negative, below 2^53",
                found=f"{counts[bad[0]]} at {bad[0]}",
            )
        idle = np.flatnonzero((counts == 0) & sums.any(axis=1))
        if idle.size:
            raise ImatrixValueError(
                "sums of an expert that saw no token", path=path, tensor=name, found=int(idle[0])
            )
        values = sums / np.maximum(counts, np.float32(1))[:, None]
        return Means(values, counts.astype(np.int64))


def _weight_name(layer: int, projection: str) -> str:
    return f"blk.{layer}.ffn_{PROJECTIONS[projection]}_exps.weight"
