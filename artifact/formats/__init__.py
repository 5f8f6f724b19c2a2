"""Owns the codec contract and the lookup by type number. One codec per module; none reads files.

A codec turns units of packed bytes into values and back. A unit is a row for types with a row
header (HFP4G32) and a block otherwise, so both directions are pure functions between
``(n, unit_bytes)`` and ``(n, unit)``. Modules load on first use: numba is not imported before a
payload is touched.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import CodingError, PayloadSizeError
from ds4q.artifact.types import TensorType, decodable, matrix_shape

U8 = npt.NDArray[np.uint8]
Values = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class MixRow:
    """One tensor's row of a decode table, for types 105 and 106.

    ``mode`` 0: the fixed levels of types 104 and 107 dual, no books; 1: two books. ``books`` are
    2 x K bf16 patterns, little-endian, K = 8 (105) or 4 (106), book 0 first.
    """

    mode: int
    books: bytes

    @property
    def words(self) -> npt.NDArray[np.uint16]:
        """The bf16 patterns, uint16 ``(2, K)``."""
        return np.frombuffer(self.books, dtype="<u2").reshape(2, -1)


Coding = str | MixRow  # what ``TensorType.coding`` asks for


class Codec:
    """Packed bytes <-> values of one tensor type. Neither direction changes its input."""

    type: ClassVar[TensorType]

    def decode_units(self, units: U8) -> Values:
        """``(n, unit_bytes)`` uint8 -> ``(n, unit)`` values (float32, or int64 ids)."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def encode_units(self, values: Values) -> U8:
        """``(n, unit)`` values -> ``(n, unit_bytes)`` uint8; refuses what the type cannot hold."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def validate_units(self, units: U8, *, first: int, path: object, tensor: str | None) -> None:
        """Raise ``PayloadValueError`` at the first byte that the type forbids.

        ``first`` is the number of ``units[0]`` within its tensor, for the message.
        """

    def unit(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Elements and bytes of one unit of a tensor of ``shape``."""
        if self.type.row_header_bytes:
            return shape[-1], self.type.row_bytes(shape[-1])
        return self.type.block, self.type.block_bytes

    def units(self, payload: U8, shape: tuple[int, ...]) -> U8:
        """``payload`` viewed as ``(n, unit_bytes)``; its length must be what ``shape`` demands."""
        expected = self.type.payload_bytes(shape)
        if payload.nbytes != expected:
            raise PayloadSizeError(expected=expected, found=payload.nbytes)
        return payload.reshape(-1, self.unit(shape)[1])

    def decode(self, payload: U8, shape: tuple[int, ...]) -> Values:
        """Values of ``shape`` from a whole payload, or from whole rows of one."""
        return self.decode_units(self.units(payload, shape)).reshape(shape)

    def encode(self, values: Values) -> U8:
        """Payload (1-D uint8) of ``values``."""
        elements = self.unit(values.shape)[0]
        if values.size % elements:
            raise PayloadSizeError(
                f"{self.type.name} needs a multiple of {elements} values", found=values.shape
            )
        return self.encode_units(values.reshape(-1, elements)).reshape(-1)

    def validate(
        self,
        payload: U8,
        shape: tuple[int, ...],
        *,
        first_row: int = 0,
        path: object = None,
        tensor: str | None = None,
    ) -> None:
        """Check every byte of a payload, or of rows of one that begin at ``first_row``.

        A row is the last dim; a scalar or vector is one row. Raises ``PayloadValueError`` naming
        row, group or element within the whole tensor.
        """
        units = self.units(payload, shape)
        first = first_row * matrix_shape(shape)[1] // self.unit(shape)[0]
        self.validate_units(units, first=first, path=path, tensor=tensor)


class RowCodec(Codec):
    """A lossy type of 32-weight blocks whose encoder can weigh errors: rows in, rows out."""

    def encode_rows(self, values: Values, importance: Values | None = None) -> tuple[U8, int]:
        """``(M, K)`` float32 -> ``(M, row_bytes)`` uint8, and how many groups lost their weights.

        ``importance`` is ``(K,)`` float32, shared by all rows, finite and >= 0. A group whose
        weights are all zero is encoded as if there were none, and counted.

        Raises ``PayloadValueError`` for a value that is not finite, and for a group whose error
        overflows float32 at every scale.
        """
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def encode_units(self, values: Values) -> U8:
        return self.encode_rows(np.asarray(values, dtype=np.float32))[0]


def codec_for(
    type_id: int,
    coding: Coding | None = None,
    *,
    path: object = None,
    tensor: str | None = None,
) -> Codec:
    """The codec of a type number.

    Parameters
    ----------
    coding : the artifact's variant for types 102 and 107, the tensor's table row for 105 and 106;
        not looked at for other types

    Raises
    ------
    TensorTypeError : there is no codec for the type
    CodingError : the coding that the type needs is absent, of another kind or unknown. There is
        no default: a guess would decode to plausible garbage.
    """
    kind = decodable(type_id, path=path, tensor=tensor)
    module = importlib.import_module(f"ds4q.artifact.formats.{kind.codec}")
    if not kind.coding:
        codecs: dict[int, Codec] = module.CODECS
        return codecs[type_id]
    where: dict[str, Any] = {"path": path, "tensor": tensor}
    if kind.coding == "row":
        if not isinstance(coding, MixRow):
            what = f"no decode table row is bound to this {kind.name} tensor"
            raise CodingError.of("mix-unregistered", what, **where)
    elif not isinstance(coding, str) or not coding:
        what = f"the artifact names no variant of {kind.name}"
        raise CodingError.of("variant-missing", what, **where)
    try:
        found: Codec = module.codec(kind, coding)
    except CodingError as error:
        raise error.located(**where) from None
    return found
