"""Owns reading a GGUF imatrix: where it keeps the statistics of each weight. Reads none of them.

llama.cpp, tools/imatrix: ``general.type`` is ``imatrix``; for a weight ``NAME`` the tensor
``NAME.in_sum2`` f32 [n_in, n_expert] (fastest dimension first) holds sums of squares of the inputs
and ``NAME.counts`` f32 [1, n_expert] the tokens behind them.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ds4q.quantize.errors import ImatrixError, ImatrixMissingError

GGUF_MAGIC = b"GGUF"
COUNTS = ".counts"
MAX_NAME_BYTES = 4096

_SUMS = ".in_sum2"
_VERSION = 3
_MAX_TENSORS = 1 << 20
_MAX_KEYS = 1 << 16
_MAX_KEY_BYTES = 65535
_MAX_TEXT_BYTES = 1 << 20
_MAX_ITEMS = 1 << 20
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMS = 4
_MAX_DIM = 1 << 40
_STRING, _ARRAY = 8, 9
_SCALARS = {  # value types of GGUF -> struct codes
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B"},
    **{10: "Q", 11: "q", 12: "d"},
}
_F32_TYPE = 0


class Vectors(NamedTuple):
    """Where a weight's sums of squares lie: ``rows`` x ``columns`` f32 at ``sums_at``.

    They are sums over the f32 counts at ``counts_at``, one for each row, or over ``calls``.
    """

    columns: int
    rows: int
    sums_at: int
    counts_at: int | None
    calls: int = 1


class _Tensor(NamedTuple):
    """An F32 tensor of a GGUF file: dimensions, fastest first, and where it begins in the data."""

    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)


class Cursor:
    """Reads a file from front to back and never past its end."""

    def __init__(self, file: BinaryIO, size_bytes: int, path: Path) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self.path = path
        self.at = 0

    @property
    def left(self) -> int:
        """Bytes from here to the end."""
        return self._size_bytes - self.at

    def take(self, n_bytes: int, what: str) -> bytes:
        """The next bytes; ``what`` names them should the file end before."""
        if n_bytes > self.left:
            raise ImatrixError(
                f"file ends within {what}",
                path=self.path,
                expected=f"{n_bytes} bytes at {self.at}",
                found=self.left,
            )
        data = self._file.read(n_bytes)
        if len(data) != n_bytes:
            raise ImatrixError("file ended during a read", path=self.path)
        self.at += n_bytes
        return data

    def number(self, code: str, what: str) -> Any:
        """The next little-endian number of that ``struct`` code."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def count(self, code: str, most: int, what: str, least: int = 0) -> int:
        """The next number, which must lie in ``least`` .. ``most``."""
        value = self.number(code, what)
        if not least <= value <= most:
            raise ImatrixError(
                what, path=self.path, expected=f"{least} to {most}", found=f"{value} at {self.at}"
            )
        return int(value)

    def text(self, code: str, most: int, what: str, least: int = 0) -> str:
        """A string behind its length, UTF-8."""
        raw = self.take(self.count(code, most, f"length of {what}", least), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ImatrixError(
                f"{what} is not UTF-8", path=self.path, found=repr(raw[:40])
            ) from None


def read_gguf(file: BinaryIO, size_bytes: int, path: Path) -> dict[str, Vectors]:
    """Where a GGUF imatrix keeps the statistics of each weight; strict, up to the last byte."""
    cursor = Cursor(file, size_bytes, path)
    cursor.take(len(GGUF_MAGIC), "the magic")
    cursor.count("I", _VERSION, "GGUF version", _VERSION)
    n_tensors = cursor.count("Q", _MAX_TENSORS, "number of tensors")
    n_keys = cursor.count("Q", _MAX_KEYS, "number of metadata keys")
    alignment = _read_keys(cursor, n_keys)
    tensors: dict[str, _Tensor] = {}
    end = padded = 0
    for _ in range(n_tensors):
        name, tensor = _read_tensor(cursor, padded)
        if name in tensors:
            raise ImatrixError("tensor appears twice", path=path, tensor=name)
        tensors[name] = tensor
        end = tensor.offset + tensor.nbytes
        padded = _aligned(end, alignment)
    data = _aligned(cursor.at, alignment)
    if size_bytes not in (data + end, data + padded):  # some writers leave out the last padding
        raise ImatrixError(
            "file is too short" if size_bytes < data + end else "bytes after the last tensor",
            path=path,
            expected=f"{data + padded} bytes",
            found=size_bytes,
        )
    return _pair(tensors, data, path)


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _pair(tensors: dict[str, _Tensor], data: int, path: Path) -> dict[str, Vectors]:
    """Sums and counts of each weight, for data that begin at ``data``."""
    found = {}
    for name, sums in tensors.items():
        if not name.endswith(_SUMS):
            continue
        weight = name.removesuffix(_SUMS)
        counts = tensors.get(weight + COUNTS)
        if counts is None:
            raise ImatrixMissingError(path=path, tensor=weight + COUNTS)
        columns, rows = (*sums.shape, 1)[:2]
        if math.prod(sums.shape) != columns * rows or math.prod(counts.shape) != rows:
            raise ImatrixError(
                "shapes of sums and counts do not fit",
                path=path,
                tensor=weight,
                found=f"{list(sums.shape)} and {list(counts.shape)}",
            )
        found[weight] = Vectors(columns, rows, data + sums.offset, data + counts.offset)
    return found


def _read_keys(cursor: Cursor, n_keys: int) -> int:
    """Read past the metadata; return the alignment. The file must say that it is an imatrix."""
    seen: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.text("Q", _MAX_KEY_BYTES, "a metadata key", 1)
        if key in seen:
            raise ImatrixError("metadata key appears twice", path=cursor.path, found=repr(key))
        seen[key] = _read_value(cursor, cursor.number("I", "a value type"), key)
    if seen.get("general.type") != "imatrix":
        raise ImatrixError(
            "this GGUF file is no imatrix",
            path=cursor.path,
            expected="general.type 'imatrix'",
            found=repr(seen.get("general.type")),
            remedy="name a file that llama-imatrix wrote",
        )
    alignment = seen.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment % 8:
        raise ImatrixError(
            "general.alignment", path=cursor.path, expected="a multiple of 8", found=repr(alignment)
        )
    return alignment


def _read_value(cursor: Cursor, kind: int, key: str) -> Any:
    """A value; of an array only that it is there."""
    what = f"metadata key {key}"
    if kind == _STRING:
        return cursor.text("Q", _MAX_TEXT_BYTES, what)
    if kind == _ARRAY:
        inner = cursor.number("I", what)
        items = cursor.count("Q", _MAX_ITEMS, f"{what}, number of items")
        if inner == _STRING:
            for _ in range(items):
                cursor.text("Q", _MAX_TEXT_BYTES, what)
            return None
        if inner in _SCALARS:
            cursor.take(items * struct.calcsize(f"<{_SCALARS[inner]}"), what)
            return None
    elif kind in _SCALARS:
        return cursor.number(_SCALARS[kind], what)
    raise ImatrixError(f"{what} has an unknown type", path=cursor.path, found=kind)


def _read_tensor(cursor: Cursor, at: int) -> tuple[str, _Tensor]:
    """Name and place of the next tensor, whose data must begin at ``at``."""
    name = cursor.text("Q", MAX_NAME_BYTES, "a tensor name", 1)
    n_dims = cursor.count("I", _MAX_DIMS, f"number of dimensions of {name}", 1)
    dims = [cursor.count("Q", _MAX_DIM, f"dimension of {name}", 1) for _ in range(n_dims)]
    kind = cursor.number("I", f"type of {name}")
    offset = cursor.number("Q", f"offset of {name}")
    if (kind, offset) != (_F32_TYPE, at):
        raise ImatrixError(
            "tensor is not F32, or not where the one before it ends",
            path=cursor.path,
            tensor=name,
            expected=f"type {_F32_TYPE} at {at}",
            found=f"type {kind} at {offset}",
        )
    return name, _Tensor(tuple(dims), offset)
