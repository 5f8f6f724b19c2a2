"""Owns the safetensors header: strict parsing and the dtype table. Reads no tensor data.

Format: https://github.com/safetensors/safetensors#format. Checks run in a fixed order: header
length against file size, JSON, each tensor alone, the layout as a whole, the end of the file.
Nothing is allocated from a length that has not been compared with the file's size.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import re
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

from ds4q.quantize.errors import (
    DuplicateNameError,
    HeaderError,
    HeaderLengthError,
    JsonFileError,
    LfsPointerError,
    SourceError,
    SourceReadError,
    TensorLayoutError,
    TensorSizeError,
    TrailingBytesError,
    TruncatedShardError,
    UnsupportedDtypeError,
)

LENGTH_BYTES = 8
# About 16 million tensors. Beside the file's size this bounds what a sparse file can make us read.
MAX_HEADER_BYTES = 1 << 30
MAX_DIMS = 255
MAX_DIM = 2**48
MAX_NESTING = 128
LFS_PREFIX = b"version https://git-lfs.github.com/spec/"

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

_INTERNED = {name: name for name in DTYPE_BITS}
_ENTRY_KEYS = ("dtype", "shape", "data_offsets")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class Entry(NamedTuple):
    """One tensor of a shard; ``start`` and ``stop`` are byte offsets into the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """A parsed header: tensors in file order, the strings of ``__metadata__``, its end."""

    entries: list[Entry]
    metadata: dict[str, str]
    data_offset: int


class _RawEntry(NamedTuple):
    """An entry whose JSON kinds are right; two million dicts would not fit into memory well."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _DuplicateKey(Exception):
    pass


class _ForbiddenNumber(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return out


def _compact(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _RawEntry:
    """A well-formed tensor entry as a small tuple, any other object as a dict."""
    if len(pairs) == 3:
        fields = dict(pairs)
        dtype, shape, span = map(fields.get, _ENTRY_KEYS)
        if (
            type(dtype) is str
            and type(shape) is list
            and type(span) is list
            and len(span) == 2
            and all(type(n) is int for n in shape)
            and type(span[0]) is type(span[1]) is int
        ):
            return _RawEntry(_INTERNED.get(dtype, dtype), tuple(shape), span[0], span[1])
    return _unique(pairs)


def _refuse_constant(word: str) -> NoReturn:
    raise _ForbiddenNumber(word)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _ForbiddenNumber(text)
    return value


def refuse_byte_order_mark(
    raw: bytes, path: object, error: type[SourceError] = JsonFileError
) -> None:
    """Refuse a text that an editor has saved in another encoding, or with a mark of its own."""
    if raw.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise error(
            f"{error.rule}: it begins with a byte-order mark",
            path=path,
            found=raw[:3].hex(" "),
            remedy="save it as UTF-8 without a byte-order mark (BOM), as JSON has none",
        )


def parse_json(
    raw: bytes, path: object, error: type[SourceError] = JsonFileError, hook: Any = _unique
) -> dict[str, Any]:
    """One strict JSON object: UTF-8, no key twice, no NaN or infinity, no lone surrogate."""
    what = f"{error.rule}: "
    refuse_byte_order_mark(raw, path, error)
    try:
        text = raw.decode("utf-8")
        parsed = json.loads(
            text, object_pairs_hook=hook, parse_constant=_refuse_constant, parse_float=_finite
        )
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as bad:
        raise error(what + "not UTF-8", path=path, found=f"byte {bad.start}") from None
    except UnicodeEncodeError:
        raise error(what + "lone surrogate in a string", path=path) from None
    except _DuplicateKey as bad:
        found = repr(str(bad))
        raise DuplicateNameError(
            "duplicate key in JSON", path=path, found=found, remedy=error.cure
        ) from None
    except _ForbiddenNumber as bad:
        raise error(what + "number that JSON forbids", path=path, found=str(bad)) from None
    except RecursionError:
        raise error(what + "nested too deeply", path=path) from None
    except ValueError as bad:  # JSONDecodeError, or an integer of more digits than Python converts
        raise error(what + f"not JSON ({bad})", path=path) from None
    if not isinstance(parsed, dict):
        raise error(what + "not a JSON object", path=path)
    return parsed


def nesting(value: Any) -> int:
    """How many levels of objects and arrays ``value`` has, counted up to MAX_NESTING + 1."""
    level, depth = [value], 0
    while depth <= MAX_NESTING:
        inner = [v for v in level if isinstance(v, (dict, list))]
        if not inner:
            return depth
        depth += 1
        level = [c for v in inner for c in (v.values() if isinstance(v, dict) else v)]
    return depth


def pread_exact(fd: int, n_bytes: int, offset: int, path: object) -> bytes:
    """``n_bytes`` at ``offset``; an error where the file gives fewer."""
    parts, got = [], 0
    while got < n_bytes:
        try:
            part = os.pread(fd, n_bytes - got, offset + got)
        except OSError as error:
            raise SourceReadError(f"read failed: {error.strerror}", path=path) from error
        if not part:
            raise SourceReadError(
                "file ended during a read", path=path, expected=f"{n_bytes} bytes", found=got
            )
        parts.append(part)
        got += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def refuse_lfs_pointer(first: bytes, path: object) -> None:
    """Raise LfsPointerError where a file begins like a git-lfs pointer."""
    if first.startswith(LFS_PREFIX):
        raise LfsPointerError(path=path)


def read_header(fd: int, size_bytes: int, path: object) -> Header:
    """Parse and check the header of an open shard of ``size_bytes``; no tensor data is read."""
    first = pread_exact(fd, min(size_bytes, len(LFS_PREFIX)), 0, path)
    refuse_lfs_pointer(first, path)
    room = size_bytes - LENGTH_BYTES
    if room < 0:
        raise HeaderLengthError(
            "no room for the header length",
            path=path,
            expected=f"at least {LENGTH_BYTES} bytes",
            found=f"a file of {size_bytes} bytes",
        )
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length == 0 or length > room:
        raise HeaderLengthError(
            path=path,
            expected=f"1 to {room} bytes in a file of {size_bytes} bytes",
            found=f"a claim of {length} bytes",
        )
    if length > MAX_HEADER_BYTES:
        raise HeaderLengthError(
            "header is longer than ds4q reads",
            path=path,
            expected=f"at most {MAX_HEADER_BYTES} bytes",
            found=f"{length} bytes",
            remedy="split the checkpoint into shards",
        )
    if first[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        found = repr(first[LENGTH_BYTES : LENGTH_BYTES + 1])
        raise HeaderError("header must begin with '{'", path=path, found=found)
    raw = pread_exact(fd, length, LENGTH_BYTES, path)
    return parse_header(raw, room - length, path)


def parse_header(raw: bytes, data_bytes: int, path: object) -> Header:
    """Check the header ``raw`` of a shard whose data section has ``data_bytes`` bytes."""
    fields = parse_json(raw, path, HeaderError, _compact)
    metadata = _metadata(fields.pop("__metadata__", {}), path)
    entries = [_entry(name, value, path) for name, value in fields.items()]
    entries.sort(key=itemgetter(3, 4))
    _check_layout(entries, data_bytes, path)
    return Header(entries, metadata, LENGTH_BYTES + len(raw))


def _metadata(value: Any, path: object) -> dict[str, str]:
    if isinstance(value, dict) and all(type(v) is str for v in value.values()):
        return value
    found = type(value).__name__
    raise HeaderError("__metadata__ must be an object of strings", path=path, found=found)


def _entry(name: str, value: Any, path: object) -> Entry:
    """One tensor, checked alone."""
    if not isinstance(value, _RawEntry):
        raise HeaderError(
            "entry must hold dtype, shape and two data_offsets, whole numbers, and nothing else",
            path=path,
            tensor=name,
            found=repr(value)[:80],
        )
    dtype, shape, start, stop = value
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise UnsupportedDtypeError(path=path, tensor=name, found=repr(dtype))
    if len(shape) > MAX_DIMS or any(not 0 <= n < MAX_DIM for n in shape):
        found = f"{len(shape)} dims" if len(shape) > MAX_DIMS else list(shape)
        raise TensorSizeError("impossible shape", path=path, tensor=name, found=found)
    if not 0 <= start <= stop:
        found = f"[{start}, {stop}]"
        raise TensorSizeError("byte range runs backwards", path=path, tensor=name, found=found)
    n_bits = math.prod(shape) * bits
    if n_bits % 8:
        count = f"odd element count {math.prod(shape)}" if bits == 4 else f"{n_bits} bits"
        raise TensorSizeError(
            f"{dtype} {list(shape)} does not fill whole bytes", path=path, tensor=name, found=count
        )
    if n_bits // 8 != stop - start:
        raise TensorSizeError(
            path=path,
            tensor=name,
            expected=f"{n_bits // 8} bytes for {dtype} {list(shape)}",
            found=f"{stop - start} bytes, [{start}, {stop}]",
        )
    return Entry(name, dtype, shape, start, stop)


def _check_layout(entries: list[Entry], data_bytes: int, path: object) -> None:
    """``entries``, sorted by range, must tile the data section without overlap or hole."""
    before, end = None, 0
    for entry in entries:
        if entry.start != end:
            mine = f"[{entry.start}, {entry.stop}]"
            if before is not None and entry.start < end:
                raise TensorLayoutError(
                    "two tensors claim the same bytes",
                    path=path,
                    tensor=entry.name,
                    found=f"{mine} over [{before.start}, {before.stop}] of {before.name}",
                )
            after = f" after {before.name} [{before.start}, {before.stop}]" if before else ""
            raise TensorLayoutError(
                "bytes that belong to no tensor",
                path=path,
                tensor=entry.name,
                found=f"[{end}, {entry.start}]{after}, before {mine}",
            )
        before, end = entry, entry.stop
    if end > data_bytes:
        raise TruncatedShardError(
            f"file is short by {end - data_bytes} bytes",
            path=path,
            expected=f"{end} data bytes",
            found=data_bytes,
        )
    if end < data_bytes:
        raise TrailingBytesError(
            path=path, expected=f"{end} data bytes", found=f"{data_bytes - end} more"
        )
