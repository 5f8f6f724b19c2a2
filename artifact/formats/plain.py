"""Owns the types that are one number per element: F16, BF16, F32, TidI32, and raw bytes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import PayloadValueError
from ds4q.artifact.formats import U8, Codec, Values
from ds4q.artifact.numeric import bf16_to_f32
from ds4q.artifact.types import BF16, F16, F32, RAW, TIDI32, TensorType


def _refuse_non_finite(values: Values, name: str) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise PayloadValueError(
            f"{name} cannot hold this value", found=f"{values.reshape(-1)[bad[0]]} at {bad[0]}"
        )


class _FloatCodec(Codec):
    """Little-endian floats; ``encode`` and ``validate`` refuse NaN and infinity."""

    dtype: ClassVar[str]

    def decode_units(self, units: U8) -> Values:
        return units.reshape(-1).view(self.dtype).astype(np.float32).reshape(-1, 1)

    def encode_units(self, values: Values) -> U8:
        with np.errstate(over="ignore", invalid="ignore"):
            packed = np.asarray(values).astype(self.dtype)  # nearest-even
        _refuse_non_finite(packed, self.type.name)
        return packed.view(np.uint8).reshape(len(values), -1)

    def validate_units(self, units: U8, *, first: int, path: object, tensor: str | None) -> None:
        finite = np.isfinite(units.reshape(-1).view(self.dtype))
        if not finite.all():
            at = first + int(np.argmin(finite))
            raise PayloadValueError(
                "value is not finite", path=path, tensor=tensor, found=f"element {at}"
            )


class F16Codec(_FloatCodec):
    """IEEE half precision."""

    type: ClassVar[TensorType] = F16
    dtype: ClassVar[str] = "<f2"


class F32Codec(_FloatCodec):
    """IEEE single precision."""

    type: ClassVar[TensorType] = F32
    dtype: ClassVar[str] = "<f4"


class BF16Codec(Codec):
    """The upper 16 bits of a float32; rounds to nearest-even."""

    type: ClassVar[TensorType] = BF16

    def decode_units(self, units: U8) -> Values:
        return bf16_to_f32(units.reshape(-1).view("<u2")).reshape(-1, 1)

    def encode_units(self, values: Values) -> U8:
        with np.errstate(over="ignore"):
            bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        _refuse_non_finite(bits.view(np.float32), self.type.name)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        packed: npt.NDArray[np.uint16] = rounded.astype("<u2")
        _refuse_non_finite(bf16_to_f32(packed), self.type.name)
        return packed.view(np.uint8).reshape(len(values), -1)

    def validate_units(self, units: U8, *, first: int, path: object, tensor: str | None) -> None:
        # Of either sign, what is not finite is above all that is. Two maxima are four times as fast
        # as a mask, and every load of a model looks at gigabytes of these.
        bits = units.reshape(-1).view("<u2")
        if bits.max(initial=0) >= 0xFF80 or bits.view("<i2").max(initial=0) >= 0x7F80:
            at = first + int(np.argmax(bits & 0x7F80 == 0x7F80))
            raise PayloadValueError(
                "value is not finite", path=path, tensor=tensor, found=f"element {at}"
            )


class TidI32Codec(Codec):
    """Unsigned 32-bit ids (token id -> expert ids); integers, never weights."""

    type: ClassVar[TensorType] = TIDI32

    def decode_units(self, units: U8) -> Values:
        return units.reshape(-1).view("<u4").astype(np.int64).reshape(-1, 1)

    def encode_units(self, values: Values) -> U8:
        if values.dtype.kind not in "iu":
            raise PayloadValueError("ids are not integers", found=values.dtype)
        if values.size and (int(values.min()) < 0 or int(values.max()) > 0xFFFF_FFFF):
            raise PayloadValueError(
                "id out of range", expected="0..2^32-1", found=f"{values.min()}..{values.max()}"
            )
        return values.astype("<u4").view(np.uint8).reshape(len(values), -1)


class RawCodec(Codec):
    """Bytes as they are; what they mean is said where they are used (``artifact/tables.py``)."""

    type: ClassVar[TensorType] = RAW

    def decode_units(self, units: U8) -> Values:
        return units.copy()

    def encode_units(self, values: Values) -> U8:
        if values.dtype != np.uint8:
            raise PayloadValueError("raw bytes are not uint8", found=values.dtype)
        return values.reshape(len(values), -1).copy()


CODECS: dict[int, Codec] = {
    codec.type.id: codec
    for codec in (F16Codec(), F32Codec(), BF16Codec(), TidI32Codec(), RawCodec())
}
