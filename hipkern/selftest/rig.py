"""Owns one run of a kernel on fixed inputs: memory for them, the launch, the bytes that come back.

Knows no kernel; the cases are in the modules beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from ds4q.hipkern.driver import Device
from ds4q.hipkern.handles import Buffer
from ds4q.hipkern.kernels import Kernels
from ds4q.hipkern.selftest.inputs import Inputs

Array = npt.NDArray[Any]
SLACK_BYTES = 256  # behind every buffer: kernels may read whole words past a row's end
UNWRITTEN = 0xFF  # what outputs hold before a launch, so that their every byte is defined


class Rig:
    """Memory and launches of one case on one device; all of it is freed at the end."""

    def __init__(self, case: Case, device: Device, kernels: Kernels) -> None:
        self._case, self._device, self._kernels = case, device, kernels
        self.inputs = case.inputs()
        self._stream = device.stream()
        self._buffers: list[Buffer] = []
        self._outputs: list[tuple[Buffer, int]] = []

    def put(self, array: Array | bytes) -> int:
        """Address of a copy of ``array`` on the device."""
        data = np.frombuffer(
            bytes(array) if isinstance(array, bytes) else array.tobytes(), np.uint8
        )
        buffer = self._take(data.nbytes)
        self._stream.upload(buffer.address, data)
        return buffer.address

    def room(self, nbytes: int) -> int:
        """Address of memory that is not looked at afterwards."""
        return self._take(nbytes).address

    def output(self, nbytes: int) -> int:
        """Address of memory that the kernel writes and the digest covers."""
        buffer = self._take(nbytes)
        self._outputs.append((buffer, nbytes))
        return buffer.address

    def inout(self, array: Array) -> int:
        """As ``output``, with contents to begin with."""
        address = self.output(array.nbytes)
        self._stream.upload(address, np.ascontiguousarray(array))
        return address

    def launch(self, grid: tuple[int, int, int], *arguments: Any, kernel: str = "") -> None:
        """Run the case's kernel, or another one of its file."""
        name = kernel or self._case.name
        self._kernels.launch(
            self._stream, self._case.file, name, grid, *arguments, defines=self._case.defines
        )

    def results(self) -> list[npt.NDArray[np.uint8]]:
        """The outputs' bytes, once all is done."""
        found = []
        for buffer, nbytes in self._outputs:
            host = np.empty(nbytes, dtype=np.uint8)
            self._stream.download(host, buffer.address)
            found.append(host)
        return found

    def _take(self, nbytes: int) -> Buffer:
        buffer = self._device.alloc(nbytes + SLACK_BYTES)
        self._buffers.append(buffer)
        self._stream.fill(buffer.address, UNWRITTEN, nbytes + SLACK_BYTES)
        return buffer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for handle in (self._stream, *self._buffers):
            handle.free()


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel on one set of inputs. ``decoder`` is "" where the kernel reads no packed bytes."""

    file: str
    name: str
    body: Callable[[Rig], None]
    decoder: str = ""
    defines: Mapping[str, int] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        """As digests are listed: file and kernel."""
        return f"{self.file} {self.name}"

    def inputs(self) -> Inputs:
        """The numbers that it draws from, from their beginning."""
        return Inputs(f"{self.kernel} {self.decoder}")

    def digest(self, device: Device, kernels: Kernels) -> str:
        """xxh3-128 over the outputs."""
        with Rig(self, device, kernels) as rig:
            self.body(rig)
            hasher = xxhash.xxh3_128()
            for output in rig.results():
                hasher.update(output.data)
        return hasher.hexdigest()
