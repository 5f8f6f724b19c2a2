"""Owns MQ2G256Lloyd: 256 rotated weights as four f16 levels and 2-bit indices. Read only.

A group is 8 bytes of levels, ascending, and 64 bytes of indices, least significant bits first. What
they give is the row after ``_fwht.rotate``. hipfire writes the type; ds4q reads it.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ds4q.artifact.errors import PayloadValueError
from ds4q.artifact.formats import U8, Codec, Values
from ds4q.artifact.formats._fwht import unrotate
from ds4q.artifact.types import MQ2_LLOYD, TensorType

LEVEL_BYTES = 8
MAGNITUDE = 0x7FFF
INFINITY = 0x7C00  # f16


def stored_values(units: U8) -> Values:
    """What the indices choose, float32 ``(n, 256)``: the weights as they are stored, rotated."""
    levels = np.ascontiguousarray(units[:, :LEVEL_BYTES]).view("<f2").astype(np.float32)
    packed = units[:, LEVEL_BYTES:, None] >> np.arange(0, 8, 2, dtype=np.uint8)
    codes = (packed & 3).reshape(len(units), -1).astype(np.intp)
    return np.take_along_axis(levels, codes, axis=1)


class Mq2LloydCodec(Codec):
    """Decode and validate; there is no encoder."""

    type: ClassVar[TensorType] = MQ2_LLOYD

    def decode_units(self, units: U8) -> Values:
        """The weights themselves: stored values turned back, rounded at each butterfly."""
        return unrotate(stored_values(units))

    def validate_units(self, units: U8, *, first: int, path: object, tensor: str | None) -> None:
        bits = np.ascontiguousarray(units[:, :LEVEL_BYTES]).view("<i2")
        magnitudes = bits & MAGNITUDE
        ordered = np.where(bits < 0, -magnitudes, magnitudes)  # as the floats, both zeros alike
        bad = np.flatnonzero(
            (magnitudes >= INFINITY).any(axis=1) | (ordered[:, 1:] < ordered[:, :-1]).any(axis=1)
        )
        if bad.size:
            levels = bits[bad[0]].view("<f2").tolist()
            raise PayloadValueError(
                f"bad levels of {self.type.name} in group {first + bad[0]}",
                path=path,
                tensor=tensor,
                expected="finite and ascending",
                found=", ".join(f"{level:g}" for level in levels),
            )


CODECS: dict[int, Codec] = {MQ2_LLOYD.id: Mq2LloydCodec()}
