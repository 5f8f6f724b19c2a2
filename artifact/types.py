"""Owns the table of tensor types: number, name, block geometry. Every size derives from it.

Numbers below 54 are HFQ's (hipfire ``docs/quant-formats/qt-register.txt``), a different space from
GGML's: 21 is HFP4G32 here and IQ3_S there. Numbers 100 to 107 are ROCmFPX's GGML numbers (Lucebox's
meaning), 120 is ds4q's own. Nothing here decodes; codecs live in ``formats/``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ds4q.artifact.errors import IndexFieldError, PayloadSizeError, TensorTypeError

MAX_ROW_BLOCKS = 0xFFFF  # a row header counts its blocks in 16 bits


@dataclass(frozen=True, slots=True)
class TensorType:
    """One row of the table.

    ``block`` elements take ``block_bytes``. With ``row_header_bytes`` a tensor is rows of
    (header, K / block blocks); without, blocks run over the row-major data. ``block`` 0: the length
    of this upstream type is not known here. ``pad_blocks``: a row carries one more byte for each
    block that its number of blocks lacks to a multiple. ``group_size`` is what the index entry
    carries. ``codec`` names the module in ``formats/`` that decodes it, or is empty.
    ``row_multiple``: blocks do not run across rows, and a row's length must be a multiple of it.
    ``coding`` names what a payload cannot be read without: "variant" (one word for the artifact) or
    "row" (the tensor's row of a decode table).
    """

    id: int
    name: str
    block: int = 0
    block_bytes: int = 0
    row_header_bytes: int = 0
    tensor_header_bytes: int = 0
    pad_blocks: int = 1
    group_size: int = 0
    codec: str = ""
    row_multiple: int = 0
    coding: Literal["", "variant", "row"] = ""

    def row_bytes(self, k: int) -> int:
        """Bytes of one row of ``k`` elements, header included.

        Raises
        ------
        TensorTypeError : the length of this type is not known here
        PayloadSizeError : ``k`` is no multiple of the block, or exceeds the header's block count
        """
        if not self.block:
            raise TensorTypeError(f"the length of {self.name} is not known")
        expected: str | None = None
        if self.row_multiple and k % self.row_multiple:
            expected = f"a multiple of {self.row_multiple}"
        elif k <= 0 or k % self.block:
            expected = f"a multiple of {self.block}"
        elif self.row_header_bytes and k // self.block > MAX_ROW_BLOCKS:
            expected = f"at most {MAX_ROW_BLOCKS * self.block}"
        if expected:
            raise PayloadSizeError(
                f"{self.name} cannot hold rows of this length", expected=expected, found=k
            )
        n = k // self.block
        return self.row_header_bytes + n * self.block_bytes + -n % self.pad_blocks

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a whole tensor of logical ``shape`` (out, ..., in); ``()`` is one element."""
        rows, k = matrix_shape(shape)
        if not (self.row_header_bytes or self.row_multiple):
            return self.tensor_header_bytes + self.row_bytes(rows * k)
        return self.tensor_header_bytes + rows * self.row_bytes(k)

    def span(self, first: int, count: int, k: int) -> tuple[int, int]:
        """Offset and length in bytes of rows ``first`` .. ``first + count``, cut by ``row_runs``.

        A row of itself need not be whole blocks: types without a row header pack across rows.
        """
        return self.payload_bytes((first, k)) if first else 0, self.payload_bytes((count, k))


F16 = TensorType(1, "F16", 1, 2, codec="plain")
F32 = TensorType(2, "F32", 1, 4, codec="plain")
Q8F16 = TensorType(3, "Q8F16", 32, 34, group_size=32, codec="q8f16")
BF16 = TensorType(16, "BF16", 1, 2, codec="plain")
MQ2_LLOYD = TensorType(  # hipfire's: read, never written
    19, "MQ2G256Lloyd", 256, 72, group_size=256, codec="mq2lloyd", row_multiple=256
)
HFP4G32 = TensorType(21, "HFP4G32", 32, 17, row_header_bytes=16, group_size=32, codec="hfp4g32")
TIDI32 = TensorType(22, "TidI32", 1, 4, codec="plain")
RAW = TensorType(120, "Raw", 1, 1, codec="plain")  # bytes that are no weights: decode tables


def _rocmfpx(
    number: int,
    name: str,
    block_bytes: int,
    codec: str,
    coding: Literal["", "variant", "row"] = "",
    row_multiple: int = 32,
) -> TensorType:
    return TensorType(
        number,
        name,
        32,
        block_bytes,
        group_size=32,
        codec=codec,
        row_multiple=row_multiple,
        coding=coding,
    )


ROCMFP4 = _rocmfpx(100, "ROCmFP4", 18, "rocmfp4")
ROCMFP4_FAST = _rocmfpx(101, "ROCmFP4Fast", 17, "rocmfp4")
ROCMFP6 = _rocmfpx(102, "ROCmFP6", 26, "rocmfp6", "variant")
ROCMFP8 = _rocmfpx(103, "ROCmFP8", 33, "rocmfp8")
ROCMFP3 = _rocmfpx(104, "ROCmFP3", 14, "rocmfp3")
ROCMFP3_MIX = _rocmfpx(105, "ROCmFP3Mix", 14, "mix", "row")
ROCMFP2_MIX = _rocmfpx(106, "ROCmFP2Mix", 10, "mix", "row", 128)
ROCMFP2 = _rocmfpx(107, "ROCmFP2", 10, "rocmfp2", "variant", 128)

# Types that hipfire defines and ds4q can name and size, but does not decode.
_UPSTREAM = (
    TensorType(0, "Q4F16G64"),
    TensorType(4, "Q4K"),
    TensorType(5, "Q8HFQ"),
    TensorType(6, "HFQ4G256", 256, 136, group_size=256),
    TensorType(7, "HFQ4G128"),
    TensorType(8, "HFQ6G256"),
    TensorType(9, "HFQ2G256"),
    TensorType(10, "HFQ2G128"),
    TensorType(11, "HFQ3G256"),
    TensorType(12, "HFQ3G128"),
    TensorType(13, "MQ4G256", 256, 136, group_size=256),
    TensorType(14, "MQ8G256"),
    TensorType(15, "MQ6G256", 256, 200, group_size=256),
    TensorType(17, "MQ3G256", 256, 104, group_size=256),
    TensorType(18, "MQ2G256", 256, 72, group_size=256),
    TensorType(20, "MQ3G256Lloyd", 256, 112, group_size=256),
    TensorType(24, "MFP4G32", 32, 17, row_header_bytes=16, group_size=32),
    TensorType(28, "PARO4G128"),
    TensorType(29, "PARO4G128T"),
    TensorType(30, "MQ4G256Lloyd", 256, 160, group_size=256),
    TensorType(31, "MQ5G256", 256, 168, group_size=256),
    TensorType(
        32, "MFP4G32Lloyd", 32, 17, row_header_bytes=16, tensor_header_bytes=32, group_size=32
    ),
    TensorType(33, "MFP4G32P", 32, 17, row_header_bytes=16, group_size=32),
    TensorType(34, "MFP4G32E8", 32, 17, row_header_bytes=16, group_size=32),
    TensorType(35, "MFP4G32E8SOA", 32, 17, row_header_bytes=16, pad_blocks=16, group_size=32),
    TensorType(36, "MFP3G32E8", 32, 13, row_header_bytes=16, group_size=32),
    TensorType(37, "MFP2G32E8", 32, 9, row_header_bytes=16, group_size=32),
    TensorType(38, "MQ2G256GL", 256, 66, group_size=256),
    TensorType(39, "MQ3G256GL", 256, 98, group_size=256),
    TensorType(40, "TQ2G128", 128, 34, group_size=128),
    TensorType(41, "BQ1G128", 128, 18, group_size=128),
    TensorType(44, "MQ4G256V2", 256, 136, group_size=256),
    TensorType(45, "MQ4CG256", 256, 136, group_size=256),
    TensorType(47, "MQ6G256V2", 256, 200, group_size=256),
    TensorType(48, "MQ5G256V2", 256, 168, group_size=256),
    TensorType(49, "MQ3G256V2", 256, 104, group_size=256),
    TensorType(50, "MQ2G256V2", 256, 72, group_size=256),
    TensorType(51, "MQ2G256LloydU", 256, 72, group_size=256),
    TensorType(52, "MQ4G256V2Lloyd", 256, 136, group_size=256),
    TensorType(53, "MQ4G128V2"),
)

ROCMFPX = (
    ROCMFP4,
    ROCMFP4_FAST,
    ROCMFP6,
    ROCMFP8,
    ROCMFP3,
    ROCMFP3_MIX,
    ROCMFP2_MIX,
    ROCMFP2,
)
MIXED = (ROCMFP3_MIX, ROCMFP2_MIX)  # their books lie in decode tables
TYPES: dict[int, TensorType] = {
    t.id: t for t in (F16, F32, Q8F16, BF16, MQ2_LLOYD, HFP4G32, TIDI32, *ROCMFPX, RAW, *_UPSTREAM)
}
BY_NAME: dict[str, TensorType] = {t.name: t for t in TYPES.values()}

# Never to be assigned: upstream keeps them reserved, and 43 is burned.
RESERVED_IDS = frozenset({23, 25, 26, 27, 43})

PRIVATE = 100  # numbers from here on are not hipfire's: no reader of its own knows them
UPSTREAM_K = 256  # hipfire's kernels and loaders need HFP4G32 rows of a multiple of this
ROW_GRANULE = 32  # runs of rows begin at a multiple: no group of 32 crosses a border

if len(BY_NAME) != len(TYPES) or RESERVED_IDS & TYPES.keys():
    raise RuntimeError("artifact/types.py: a type name or number is used twice")
if HFP4G32.row_bytes(4096) != 2192 or HFP4G32.row_bytes(2048) != 1104:
    raise RuntimeError("artifact/types.py: HFP4G32 rows have a wrong length")


def type_of(type_id: int, *, path: object = None, tensor: str | None = None) -> TensorType:
    """The table row of ``type_id``; reserved and unknown numbers raise ``TensorTypeError``."""
    found = TYPES.get(type_id)
    if found is None:
        word = "reserved" if type_id in RESERVED_IDS else "unknown"
        what = f"qtype-unknown: {word} tensor type {type_id}"
        raise TensorTypeError(what, path=path, tensor=tensor)
    return found


def decodable(type_id: int, *, path: object = None, tensor: str | None = None) -> TensorType:
    """As ``type_of``, and refuses a type for which ds4q has no codec."""
    found = type_of(type_id, path=path, tensor=tensor)
    if not found.codec:
        what = f"qtype-unknown: ds4q has no codec for tensor type {found.id} ({found.name})"
        raise TensorTypeError(what, path=path, tensor=tensor)
    return found


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and row length of a tensor; a vector or a scalar is one row."""
    if len(shape) < 2:
        return 1, shape[0] if shape else 1
    return math.prod(shape[:-1]), shape[-1]


def row_runs(rows: int, row_bytes: int, limit_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut ``rows`` into (first, count) of about ``limit_bytes`` each."""
    count = max(ROW_GRANULE, limit_bytes // row_bytes)
    count -= count % ROW_GRANULE
    for first in range(0, rows, count):
        yield first, min(count, rows - first)


def check_entry(
    type_id: int,
    shape: tuple[int, ...],
    group_size: int,
    nbytes: int,
    *,
    path: object = None,
    tensor: str | None = None,
) -> None:
    """Compare group size and length with the table; a type of unknown length passes."""
    kind = type_of(type_id, path=path, tensor=tensor)
    if not kind.block:
        return
    if group_size != kind.group_size:
        raise IndexFieldError(
            f"wrong group size for {kind.name}",
            path=path,
            tensor=tensor,
            expected=kind.group_size,
            found=group_size,
        )
    try:
        expected = kind.payload_bytes(shape)
    except PayloadSizeError as error:
        raise error.located(path=path, tensor=tensor) from None
    if nbytes != expected:
        raise PayloadSizeError(
            path=path, tensor=tensor, expected=f"{expected} bytes", found=f"{nbytes} bytes"
        )
