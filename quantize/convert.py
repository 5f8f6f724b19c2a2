"""Owns the arithmetic from source rows to packed rows, and the comparison back. Reads no files.

One function packs a run of rows, one says where packed rows differ from what their source demands.
FP4 codes and raw copies are compared byte by byte with the source; a conversion through float32 is
made again and its bytes compared. The table-driven encoder of FP4 sources is held against the
general one in the first row of each run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import ArtifactError
from ds4q.artifact.fastpath import FastPath, jit
from ds4q.artifact.formats import Coding, RowCodec, codec_for, hfp4g32
from ds4q.artifact.numeric import E4M3, E8M0, bf16_to_f32
from ds4q.artifact.types import (
    BF16,
    F16,
    F32,
    HFP4G32,
    Q8F16,
    ROCMFPX,
    TIDI32,
    TensorType,
)
from ds4q.quantize.audit import Kind
from ds4q.quantize.errors import InexactError, SourceValueError
from ds4q.quantize.exact import encode_fp4
from ds4q.quantize.measure import ErrorSums
from ds4q.quantize.saturation import saturated_blocks

U8 = npt.NDArray[np.uint8]
F32Array = npt.NDArray[np.float32]
NAN_E4M3 = 127


@dataclass(frozen=True, slots=True)
class Rows:
    """Source bytes of rows ``first`` .. ``first + count`` of a tensor with ``k`` elements a row.

    ``weight`` is the rows' bytes; ``scale`` their scale rows (FP4) or the tensor's whole grid (FP8,
    already float32, ``(ceil(M/bm), ceil(K/bk))`` for ``block`` = (bm, bk)). Ids must be below
    ``ids_below``, the number of experts, where the config says it.
    """

    kind: Kind
    first: int
    count: int
    k: int
    weight: U8
    scale: U8 | F32Array | None = None
    block: tuple[int, int] = (1, 1)
    ids_below: int | None = None


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a lossy type is written: what its bytes are read by, and how errors are weighed.

    ``importance`` is float32 ``(K,)``, one weight a column; None weighs all alike.
    """

    coding: Coding | None = None
    importance: F32Array | None = None


PLAIN = Encoding()


@dataclass(slots=True)
class Events:
    """Counts of what a conversion met; ``max_error`` is the largest error of a dense value.

    ``saturated_blocks`` are FP4 blocks outside the range of their ROCmFPX type (see
    ``saturation.py``); ``unweighted_groups`` had weights of zero throughout and were encoded
    without weights.
    """

    inexact: int = 0
    max_error: float = 0.0
    tiny_scales: int = 0
    overflow_scales: int = 0
    saturated_blocks: int = 0
    unweighted_groups: int = 0

    @classmethod
    def of(cls, document: Mapping[str, float]) -> Events:
        """The events of a journal line or a receipt; a later version's other counts are left."""
        known = {name: document[name] for name in cls.__slots__ if name in document}
        return cls(**known)  # type: ignore[arg-type]  # counts come back as the integers they were

    def add(self, other: Events) -> None:
        """Merge ``other`` into this."""
        self.inexact += other.inexact
        self.max_error = max(self.max_error, other.max_error)
        self.tiny_scales += other.tiny_scales
        self.overflow_scales += other.overflow_scales
        self.saturated_blocks += other.saturated_blocks
        self.unweighted_groups += other.unweighted_groups

    def document(self) -> dict[str, float]:
        """The events that happened."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name))}


def _fp8_reference(
    codes: U8, grid: F32Array, first: int, block: tuple[int, int], out: F32Array
) -> None:
    rows = (first + np.arange(out.shape[0])) // block[0]
    columns = np.arange(out.shape[1]) // block[1]
    with np.errstate(over="ignore", invalid="ignore"):
        out[:] = E4M3[codes] * grid[rows][:, columns]


@jit
def _fp8_fast(codes: U8, grid: F32Array, first: int, block: tuple[int, int], out: F32Array) -> None:
    for r in range(out.shape[0]):
        grid_row = grid[(first + r) // block[0]]
        for b in range(grid.shape[1]):
            scale = grid_row[b]
            for c in range(b * block[1], min((b + 1) * block[1], out.shape[1])):
                out[r, c] = E4M3[codes[r, c]] * scale


_fp8_values = FastPath(_fp8_reference, _fp8_fast)


def _all_finite_reference(words: npt.NDArray[Any], mask: int) -> bool:
    return not bool(((words & words.dtype.type(mask)) == mask).any())


@jit
def _all_finite_fast(words: npt.NDArray[Any], mask: int) -> bool:
    bad = 0
    for i in range(words.shape[0]):
        bad |= (words[i] & mask) == mask
    return bad == 0


_all_finite = FastPath(_all_finite_reference, _all_finite_fast)


def scale_grid(raw: U8, dtype: str, shape: tuple[int, ...]) -> F32Array:
    """FP8 scales as float32: E8M0 or raw U8 exponents, or F32 as stored."""
    if dtype == "F32":
        grid = raw.view("<f4").astype(np.float32)
    else:
        if (raw == hfp4g32.NAN_SCALE).any():
            at = int(np.argmax(raw == hfp4g32.NAN_SCALE))
            raise SourceValueError("NaN scale byte", found=f"0xff at scale {at}")
        grid = E8M0[raw]
    if not (np.isfinite(grid).all() and (grid > 0).all()):
        raise SourceValueError("scale is not a positive finite number")
    return grid.reshape(shape)


def source_values(rows: Rows) -> npt.NDArray[Any]:
    """Values ``(count, k)`` of the source: float32, or int64 ids."""
    shape = (rows.count, rows.k)
    if rows.kind == "fp4":
        return hfp4g32.source_values(*fp4_views(rows))
    if rows.kind == "fp8":
        codes = rows.weight.reshape(shape)
        nan = (codes & 127) == NAN_E4M3
        if nan.any():
            at = int(np.argmax(nan.reshape(-1)))
            raise SourceValueError(
                "FP8 NaN", found=f"row {rows.first + at // rows.k}, column {at % rows.k}"
            )
        grid = rows.scale
        if grid is None:
            raise SourceValueError("FP8 weight without a scale grid")
        values = np.empty(shape, dtype=np.float32)
        _fp8_values(codes, np.ascontiguousarray(grid, np.float32), rows.first, rows.block, values)
        return values
    if rows.kind == "bf16":
        return bf16_to_f32(rows.weight.view("<u2")).reshape(shape)
    if rows.kind in ("i64", "i32"):
        ids = rows.weight.view("<i8" if rows.kind == "i64" else "<i4").astype(np.int64)
        _check_ids(rows, ids)
        return ids.reshape(shape)
    dtype = "<f2" if rows.kind == "f16" else "<f4"
    return rows.weight.view(dtype).astype(np.float32).reshape(shape)


def _check_ids(rows: Rows, ids: npt.NDArray[np.int64]) -> None:
    limit = 1 << 32 if rows.ids_below is None else rows.ids_below
    bad = (ids < 0) | (ids >= limit)
    if bad.any():
        at = int(np.argmax(bad))
        raise SourceValueError(
            "id out of range",
            expected=f"0..{limit - 1}",
            found=f"{ids[at]} at row {rows.first + at // rows.k}, column {at % rows.k}",
        )


_RAW_COPIES = {"bf16": BF16, "f16": F16, "f32": F32}
_EXPONENT_MASK = {"bf16": 0x7F80, "f16": 0x7C00, "f32": 0x7F80_0000}  # all ones: not finite


def is_raw_copy(kind: Kind, target: TensorType) -> bool:
    """Whether the packed bytes are the source bytes."""
    return _RAW_COPIES.get(kind) is target


def pack(
    rows: Rows, target: TensorType, out: U8, *, lossless: bool, encoding: Encoding = PLAIN
) -> Events:
    """Write the packed bytes of ``rows`` to ``out`` (1-D, exact length) and compare them back.

    ``encoding`` is for the types that need it; ``lossless`` is about dense values.

    Raises
    ------
    SourceValueError : NaN scale byte, NaN or infinity, an id that names no expert
    InexactError : ``lossless``, and a value that ``target`` does not hold
    """
    if target is HFP4G32:
        return _pack_fp4(rows, out)
    if target in ROCMFPX:
        return _pack_rocmfpx(rows, target, out, encoding)
    if is_raw_copy(rows.kind, target):
        words = rows.weight.view(f"<u{target.block_bytes}")
        mask = _EXPONENT_MASK[rows.kind]
        if not _all_finite(words, mask):
            bad = int(np.argmax((words & words.dtype.type(mask)) == mask))
            where = f"row {rows.first + bad // rows.k}, column {bad % rows.k}"
            raise SourceValueError("value is not finite", found=where)
        out[:] = rows.weight
        return Events()
    return _pack_values(rows, target, out, lossless)


def _pack_fp4(rows: Rows, out: U8) -> Events:
    codes, scales = fp4_views(rows)
    packed = hfp4g32.repack(codes, scales, out.reshape(rows.count, -1))
    at = hfp4g32.first_difference(codes, scales, packed)
    if at is not None:
        raise ArtifactError(
            "packed block differs from its source", found=f"row {rows.first + at[0]}, block {at[1]}"
        )
    # The edges are rare: one look at the scale bytes saves a pass over the codes.
    if int(scales.min()) > 1 and int(scales.max()) < 253:
        return Events()
    first_nan, tiny, overflow = hfp4g32.scan(packed)
    if first_nan >= 0:
        raise _nan_scale(rows, *divmod(first_nan, scales.shape[1]))
    return Events(tiny_scales=tiny, overflow_scales=overflow)


def _nan_scale(rows: Rows, row: int, block: int) -> SourceValueError:
    where = f"0xff in row {rows.first + row}, block {block}"
    return SourceValueError("NaN scale byte", expected="E8M0 below 0xff", found=where)


def _pack_rocmfpx(rows: Rows, target: TensorType, out: U8, encoding: Encoding) -> Events:
    codes, scales = fp4_views(rows)
    first_nan = int(np.argmax(scales == hfp4g32.NAN_SCALE))
    if scales.flat[first_nan] == hfp4g32.NAN_SCALE:
        raise _nan_scale(rows, *divmod(first_nan, scales.shape[1]))
    packed = out.reshape(rows.count, -1)
    how = encoding.coding, encoding.importance
    unweighted = encode_fp4(codes, scales, target, *how, packed)
    codec = codec_for(target.id, encoding.coding)
    if not isinstance(codec, RowCodec):
        raise ArtifactError(f"{target.name} has no encoder of rows")
    general, _ = codec.encode_rows(hfp4g32.source_values(codes[:1], scales[:1]), how[1])
    if not np.array_equal(general[0], packed[0]):
        raise ArtifactError(
            f"two encoders of {target.name} disagree",
            found=f"row {rows.first}",
            remedy="this is a bug in ds4q, or bad memory: please report it",
        )
    saturated = saturated_blocks(codes, scales, packed, target, encoding.coding)
    return Events(saturated_blocks=saturated, unweighted_groups=unweighted)


def fp4_views(rows: Rows) -> tuple[U8, U8]:
    """Codes ``(count, k/2)`` and scale bytes ``(count, k/32)`` of FP4 rows."""
    if rows.scale is None:
        raise SourceValueError("FP4 weight without scales")
    scales = rows.scale.view(np.uint8).reshape(rows.count, rows.k // hfp4g32.BLOCK)
    return rows.weight.reshape(rows.count, rows.k // 2), scales


def _pack_values(rows: Rows, target: TensorType, out: U8, lossless: bool) -> Events:
    values = source_values(rows)
    codec = codec_for(target.id)
    try:
        out[:] = codec.encode(values)
    except ArtifactError as error:
        where = f"rows {rows.first}..{rows.first + rows.count - 1}"
        raise SourceValueError(error.what, found=f"{error.found} in {where}") from error
    back = codec.decode(out, values.shape)
    if target is TIDI32:
        if not np.array_equal(back, values):
            raise ArtifactError("packed ids differ from their source")
        return Events()
    return _rounding(rows, values, back, target, lossless)


def _rounding(
    rows: Rows, values: F32Array, back: F32Array, target: TensorType, lossless: bool
) -> Events:
    # Bits, not values: the sign of a zero counts as a difference.
    differs = np.ascontiguousarray(values).view(np.uint32) != back.view(np.uint32)
    inexact = int(np.count_nonzero(differs))
    if not inexact:
        return Events()
    if lossless:
        at = int(np.argmax(differs.reshape(-1)))
        row, column = divmod(at, rows.k)
        raise InexactError(
            f"{target.name} does not hold this value exactly",
            expected=float(values[row, column]),
            found=f"{float(back[row, column])} at row {rows.first + row}, column {column}",
        )
    error = np.abs(values.astype(np.float64) - back)
    return Events(inexact=inexact, max_error=float(error.max()))


@dataclass(frozen=True, slots=True)
class Difference:
    """Where packed rows are not what the source demands. ``block`` -1 is a row header."""

    row: int
    block: int
    expected: str
    found: str


def comparable(kind: Kind, target: TensorType) -> bool:
    """Whether packed rows of ``target`` can have come from a source of ``kind``."""
    if kind == "fp4" or target is HFP4G32 or target in ROCMFPX:
        return kind == "fp4" and (target is HFP4G32 or target in ROCMFPX)
    if kind in ("i64", "i32") or target is TIDI32:
        return kind in ("i64", "i32") and target is TIDI32
    return target in (F16, BF16, F32, Q8F16)


def add_errors(
    rows: Rows, target: TensorType, packed: U8, encoding: Encoding, sums: ErrorSums
) -> None:
    """Add errors and saturated blocks of ``packed`` (1-D) rows of a ROCmFPX type to ``sums``."""
    decoded = codec_for(target.id, encoding.coding).decode(packed, (rows.count, rows.k))
    sums.add(source_values(rows), decoded, encoding.importance)
    codes, scales = fp4_views(rows)
    sums.saturated_blocks += saturated_blocks(
        codes, scales, packed.reshape(rows.count, -1), target, encoding.coding
    )


def compare(
    rows: Rows, target: TensorType, packed: U8, encoding: Encoding = PLAIN
) -> Difference | None:
    """The first place where ``packed`` (1-D) is not what ``rows`` demand; None where equal."""
    if target is HFP4G32:
        codes, scales = fp4_views(rows)
        found = packed.reshape(rows.count, -1)
        at = hfp4g32.first_difference(codes, scales, found)
        if at is None:
            return None
        wanted = hfp4g32.repack(codes[at[0] : at[0] + 1], scales[at[0] : at[0] + 1])[0]
        return _difference(rows.first + at[0], at[1], wanted, found[at[0]])
    if is_raw_copy(rows.kind, target):
        wanted_all = rows.weight
    else:
        wanted_all = np.empty_like(packed)
        pack(rows, target, wanted_all, lossless=False, encoding=encoding)
    if np.array_equal(wanted_all, packed):
        return None
    at_byte = int(np.argmax(wanted_all != packed))
    element = at_byte // target.block_bytes * target.block
    row, column = divmod(element, rows.k)
    unit = slice(
        at_byte // target.block_bytes * target.block_bytes,
        (at_byte // target.block_bytes + 1) * target.block_bytes,
    )
    return Difference(
        rows.first + row,
        column // target.block,
        wanted_all[unit].tobytes().hex(),
        packed[unit].tobytes().hex(),
    )


def _difference(row: int, block: int, wanted: U8, found: U8) -> Difference:
    start = 0 if block < 0 else hfp4g32.ROW_HEADER_BYTES + block * hfp4g32.BLOCK_BYTES
    stop = hfp4g32.ROW_HEADER_BYTES if block < 0 else start + hfp4g32.BLOCK_BYTES
    return Difference(
        row, block, wanted[start:stop].tobytes().hex(), found[start:stop].tobytes().hex()
    )
