"""Owns the GGUF container: metadata values, tensor infos, layout. Knows no model.

Version 3, little-endian (github.com/ggml-org/ggml, docs/gguf.md). Writing is a plan: the bytes in
front of the tensors, and an offset for each of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds4q.quantize.export.names import NAME_BYTES
from ds4q.quantize.export.plan import ExportError

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
MAX_ARRAY_BYTES = 64 << 20

_U8, _U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 0, 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A tensor type of GGML: ``block`` elements of a row take ``block_bytes``."""

    id: int
    name: str
    block: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: ``shape`` (outermost first, as numpy has it) counts elements."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        count = self.type.block_bytes
        for n in self.shape[:-1]:
            count *= n
        return count * (self.shape[-1] // self.type.block)


def _scalar(kind: int, code: str, value: float) -> bytes:
    return struct.pack(f"<I{code}", kind, value)


def u32(value: int) -> bytes:
    """A value that readers take as uint32."""
    return _scalar(_U32, "I", value)


def f32(value: float) -> bytes:
    """A float32; what does not fit is rounded, as every number of a model's config."""
    return _scalar(_F32, "f", value)


def boolean(value: bool) -> bytes:
    """True or false."""
    return _scalar(_BOOL, "?", value)


def text(value: str) -> bytes:
    """A string."""
    return struct.pack("<I", _STRING) + _string(value)


def _string(value: str) -> bytes:
    raw = value.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IIQ", _ARRAY, kind, count) + data


def u8_array(data: bytes) -> bytes:
    """Raw bytes, of which readers take 64 MiB."""
    if not 0 < len(data) <= MAX_ARRAY_BYTES:
        expected = f"1 to {MAX_ARRAY_BYTES} bytes"
        raise ExportError("decode tables are too long", expected=expected, found=len(data))
    return _array(_U8, len(data), data)


def u32_array(values: Sequence[int]) -> bytes:
    """Numbers that are not negative."""
    return _array(_U32, len(values), struct.pack(f"<{len(values)}I", *values))


def i32_array(values: Sequence[int]) -> bytes:
    """Numbers with a sign."""
    return _array(_I32, len(values), struct.pack(f"<{len(values)}i", *values))


def f32_array(values: Sequence[float]) -> bytes:
    """Floats."""
    return _array(_F32, len(values), struct.pack(f"<{len(values)}f", *values))


def text_array(values: Sequence[str]) -> bytes:
    """Strings."""
    return _array(_STRING, len(values), b"".join(map(_string, values)))


def layout(
    keys: Mapping[str, bytes], tensors: Sequence[GgufTensor]
) -> tuple[bytes, list[int], int]:
    """What stands before the data, where each tensor begins in the file, and the file's length.

    ``keys`` are values as the functions of this module make them; ``general.alignment`` is added.

    Raises ``ExportError`` for a name that readers cut short, and for two tensors of one name.
    """
    seen: set[str] = set()
    infos, at, starts = [], 0, []
    for tensor in tensors:
        if tensor.name in seen or len(tensor.name.encode("utf-8")) > NAME_BYTES:
            what = "tensor name is used twice or too long"
            raise ExportError(what, tensor=tensor.name, expected=f"at most {NAME_BYTES} bytes")
        seen.add(tensor.name)
        infos.append(_info(tensor, at))
        starts.append(at)
        at = _aligned(at + tensor.nbytes)
    values = {"general.alignment": u32(ALIGNMENT), **keys}
    front = MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(values))
    front += b"".join(_string(key) + value for key, value in values.items())
    front += b"".join(infos)
    front += bytes(_aligned(len(front)) - len(front))
    return front, [len(front) + start for start in starts], len(front) + at


def _info(tensor: GgufTensor, offset: int) -> bytes:
    dims: Iterable[int] = reversed(tensor.shape)
    raw = _string(tensor.name) + struct.pack("<I", len(tensor.shape))
    return raw + struct.pack(f"<{len(tensor.shape)}QIQ", *dims, tensor.type.id, offset)


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT
