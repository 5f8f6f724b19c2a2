"""What tests of the dense kernels share: a simulated device with arrays on it, and error units."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.hipkern.driver import Device
from ds4q.hipkern.kernels import Kernels
from ds4q.hipkern.source import FOLDER
from ds4q.runtime.kvtype import STORED, KvType, narrow

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

U = 2.0**-24
"""Largest relative error of one rounding to float32."""

STATE = (
    "window", "values", "gates", "entries", "index_values", "index_gates", "index_entries",
    "window_rows", "ring_rows", "index_ring_rows", "capacity",
)  # fmt: skip
"""Fields of ds4q_layer_state."""


class Rig:
    """An open device, and addresses for arrays. What a test puts there stays until the end."""

    def __init__(self, device: Device, folder: Path = FOLDER) -> None:
        self._device = device
        self._kernels = Kernels(device, folder)
        self._stream = device.stream()

    def put(self, array: npt.ArrayLike, dtype: Any = np.float32) -> int:
        """Address of a copy of ``array``."""
        data = np.ascontiguousarray(array, dtype)
        buffer = self._device.alloc(max(data.nbytes, 16))
        if data.nbytes:
            self._stream.upload(buffer.address, data)
        self._stream.synchronize()
        return buffer.address

    def keep(self, rows: F32, kind: KvType) -> int:
        """Address of ``rows`` as a sequence of KV type ``kind`` keeps them."""
        return self.put(narrow(rows, STORED[kind]), STORED[kind])

    def room(self, *shape: int) -> int:
        """Address of memory for f32 ``shape``, each byte 0xFF: NaN."""
        nbytes = 4 * int(np.prod(shape))
        address = self._device.alloc(nbytes).address
        self._stream.fill(address, 0xFF, nbytes)
        return address

    def get(self, address: int, *shape: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
        """The array of ``shape`` at ``address``."""
        out = np.empty(shape, dtype)
        self._stream.download(out, address)
        self._stream.synchronize()
        return out

    def write(self, address: int, array: npt.NDArray[Any]) -> None:
        """Replace what lies at ``address``."""
        self._stream.upload(address, np.ascontiguousarray(array))
        self._stream.synchronize()

    def run(
        self, file: str, kernel: str, grid: tuple[int, int, int], *arguments: Any, **defines: int
    ) -> None:
        self._kernels.launch(self._stream, file, kernel, grid, *arguments, defines=defines)
        self._stream.synchronize()

    def state(self, **fields: int) -> int:
        """Address of a ds4q_layer_state; fields that are not given are 0."""
        return self.states(fields)

    def states(self, *each: dict[str, int]) -> int:
        """Address of a ds4q_layer_state for each sequence, one behind the other."""
        packed = b""
        for fields in each:
            assert set(fields) <= set(STATE)
            packed += struct.pack("<7Q4i", *(fields.get(name, 0) for name in STATE))
        return self.put(np.frombuffer(packed, np.uint8), np.uint8)

    def tokens(self, *runs: tuple[int, int]) -> int:
        """Address of the ds4q_token of each token of ``runs``, (first position, tokens).

        Layer states of the runs follow each other.
        """
        rows: list[tuple[int, int, int, int]] = []
        for number, (first, count) in enumerate(runs):
            start = len(rows)
            rows += [(first + t, start, number, 0) for t in range(count)]
        return self.put(rows, np.int32)


@contextmanager
def open_rig(folder: Path = FOLDER) -> Iterator[Rig]:
    """A rig on the simulated device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS4Q_HIP", "sim")
        with Device.open() as device:
            yield Rig(device, folder)


def turns(first: int, count: int, pairs: int, step: int = 1) -> tuple[F32, F32]:
    """cos and sin [count, pairs] at positions ``first, first + step, ..``."""
    angles = (first + step * np.arange(count))[:, None] * 100.0 ** -(np.arange(pairs) / pairs)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def check_same(found: npt.NDArray[Any], want: npt.NDArray[Any]) -> None:
    """Bit for bit."""
    np.testing.assert_array_equal(found.view(np.uint32), want.view(np.uint32))


def check_within(found: F32, want: F64, bound: F64 | float) -> None:
    """Each |found - want| at most ``bound``; a NaN in what was found is never within."""
    excess = np.abs(found - want) - bound
    assert (excess <= 0).all(), f"worst excess {np.nanmax(excess)}, NaN {np.isnan(found).sum()}"
