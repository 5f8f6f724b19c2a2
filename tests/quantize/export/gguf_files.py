"""Owns reading GGUF files with gguf-py, which knows no type number that ROCmFPX added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ds4q.artifact.types import ROCMFPX

U8 = npt.NDArray[np.uint8]


def _teach() -> None:
    """Add the numbers that gguf-py lacks: it refuses a file with one that it does not know."""
    known: Any = gguf.GGMLQuantizationType
    for kind in ROCMFPX:
        member = int.__new__(known, kind.id)
        member._name_, member._value_ = kind.name, kind.id
        known._member_map_[kind.name] = member
        known._value2member_map_[kind.id] = member
        gguf.GGML_QUANT_SIZES[member] = (kind.block, kind.block_bytes)


_teach()


class Gguf:
    """A file as gguf-py reads it.

    Attributes
    ----------
    keys : name -> value; arrays as lists
    types, shapes : tensor name -> type name; shape as numpy has it, outermost first, in elements
    data : tensor name -> its bytes
    """

    def __init__(self, path: Path) -> None:
        reader: Any = gguf.GGUFReader(path)
        self.keys = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("GGUF.")
        }
        self.types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        self.shapes = {t.name: tuple(int(n) for n in t.shape[::-1]) for t in reader.tensors}
        self.data: dict[str, bytes] = {t.name: np.array(t.data).tobytes() for t in reader.tensors}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.offsets = {tensor.name: int(tensor.data_offset) for tensor in reader.tensors}

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """The values of a tensor of a type that gguf-py decodes."""
        tensor = self._tensors[name]
        found: npt.NDArray[np.float32] = gguf.dequantize(tensor.data, tensor.tensor_type)
        return found.reshape(self.shapes[name])
