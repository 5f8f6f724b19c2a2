"""Owns ``encode_fp4``: which encoder serves a call, and what the compiled one is given.

Bytes are those of the codec's own encoder, always. Tables serve all that is met in practice; what
they cannot say, the codec does: errors beyond float32, ``affine`` with scales far from a model's.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import PayloadSizeError, TensorTypeError
from ds4q.artifact.fastpath import reference_wanted
from ds4q.artifact.formats import Coding, RowCodec, codec_for, hfp4g32
from ds4q.artifact.types import ROCMFP2, TensorType
from ds4q.quantize.exact import affine, kernel
from ds4q.quantize.exact.rules import F32Array, Scheme, scheme_of
from ds4q.quantize.exact.tables import affine_pages, scheme_pages

U8 = npt.NDArray[np.uint8]
AFFINE_E, AFFINE_E_END = 104, 136  # its pages are megabytes for each e
CODINGS_KEPT = 64  # pages of this many codings: experts under work bring their own books


class Tables:
    """A scheme, or None for ``affine``, with its pages."""

    def __init__(self, scheme: Scheme | None) -> None:
        self._scheme = scheme
        self._plain, self._weighted = (
            affine_pages(weighted) if scheme is None else scheme_pages(scheme, weighted)
            for weighted in (False, True)
        )

    def encode(self, codes: U8, scales: U8, importance: F32Array | None, out: U8) -> int:
        present = np.bincount(scales.reshape(-1), minlength=256) > 0
        if self._scheme is None and (present[:AFFINE_E].any() or present[AFFINE_E_END:].any()):
            return kernel.NOT_SERVED
        plain = self._plain.directory(present)
        weighted = plain if importance is None else self._weighted.directory(present)
        weights = np.empty(0, dtype=np.float32) if importance is None else importance
        if self._scheme is None:
            return affine.encode(codes, scales, plain, weighted, weights, out)
        return kernel.encode(
            codes,
            scales,
            plain,
            weighted,
            weights,
            self._scheme.row_weights,
            np.int64(self._scheme.bits),
            self._scheme.wide,
            out,
        )


@functools.lru_cache(maxsize=CODINGS_KEPT)
def tables_of(kind: TensorType, coding: Coding | None) -> Tables | None:
    """The tables of a type under a coding; None where there are none."""
    if kind is ROCMFP2 and coding == "affine":
        return Tables(None)
    scheme = scheme_of(kind, coding)
    return None if scheme is None else Tables(scheme)


def encode_fp4(
    codes: U8,
    scales: U8,
    target: TensorType,
    coding: Coding | None,
    importance: F32Array | None,
    out: U8,
) -> int:
    """Encode rows of FP4 source, byte for byte as the codec of ``target`` encodes their values.

    Parameters
    ----------
    codes : (M, K/2) uint8, two E2M1 codes a byte, low nibble = even column
    scales : (M, K/32) uint8, E8M0
    coding : the variant of types 102 and 107, the books of 105 and 106
    importance : (K,) float32, or None
    out : (M, row_bytes) uint8, written

    Returns
    -------
    How many groups had weights of zero throughout and were encoded without.

    Raises
    ------
    CodingError : as ``codec_for``
    PayloadSizeError : shapes that do not agree, or rows that the type cannot hold
    PayloadValueError : a value that is not finite, an error that overflows at every scale, an
        importance that is negative or not finite
    """
    codec = codec_for(target.id, coding)
    if not isinstance(codec, RowCodec):
        raise TensorTypeError(f"{target.name} has no encoder of rows")
    _check_arrays(codes, scales, target, out)
    tables = None if reference_wanted() else tables_of(target, coding)
    if tables is not None and _usable(importance, codes.shape[1] * 2):
        lost = tables.encode(codes, scales, importance, out)
        if lost != kernel.NOT_SERVED:
            return lost
    out[:], lost = codec.encode_rows(hfp4g32.source_values(codes, scales), importance)
    return lost


def _usable(importance: F32Array | None, k: int) -> bool:
    """Whether the compiled loops can read it; the codec says what is wrong with one that is not."""
    if importance is None:
        return True
    good = importance.shape == (k,) and importance.dtype == np.float32
    if not (good and importance.flags.c_contiguous):
        return False
    return not np.signbit(importance).any() and bool(np.isfinite(importance).all())


def _check_arrays(codes: U8, scales: U8, target: TensorType, out: U8) -> None:
    """The compiled loops take addresses: a wrong shape would reach beyond the arrays."""
    m, n = scales.shape if scales.ndim == 2 else (len(scales), 0)
    shapes = (m, 16 * n), (m, n), (m, target.row_bytes(32 * n))
    for array, shape in zip((codes, scales, out), shapes, strict=True):
        if array.shape != shape or array.dtype != np.uint8 or not array.flags.c_contiguous:
            raise PayloadSizeError(
                "codes, scales and rows must be uint8, contiguous, and agree",
                expected=shape,
                found=f"{array.dtype} {array.shape}, strides {array.strides}",
            )
