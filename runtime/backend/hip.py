"""Owns an open HIP device as a step uses it: its kernels, one stream for steps, one for copies.

It runs lists of launches, directly or recorded as a graph. Knows no layers, no weights, no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from ds4q.hipkern.driver import Device
from ds4q.hipkern.kernels import Kernels
from ds4q.hipkern.streams import Graph
from ds4q.runtime.device.layout import Place


@dataclass(frozen=True, slots=True)
class Shown:
    """What somebody who traces a step sees after a launch: ``count`` values of ``place``."""

    name: str
    place: Place
    shape: tuple[int, ...]
    dtype: str = "f4"


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. Its arguments are addresses and sizes that no later step changes."""

    file: str
    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[int | float, ...]
    defines: Mapping[str, int] = field(default_factory=dict)
    shows: tuple[Shown, ...] = ()


class HipBackend:
    """A device with what runs on it; ``close`` frees all of it.

    Attributes
    ----------
    stream : what steps run on
    copies : what weights are copied on, beside it
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.closed = False
        self.kernels = Kernels(device)
        self.stream = device.stream()
        self.copies = device.stream()

    @classmethod
    def open(cls, index: int = 0) -> HipBackend:
        """Open a device of the HIP library that is found here; raises ``HipError``."""
        device = Device.open(index)
        try:
            return cls(device)
        except BaseException:
            device.close()
            raise

    def facts(self) -> dict[str, str]:
        """Name, architecture and kind of the device, for reports."""
        device = self.device
        return {"name": device.name, "arch": device.arch, "kind": device.kind}

    def prepare(self, launches: Iterable[Launch]) -> None:
        """Build and load what ``launches`` need, several files at a time."""
        builds = {(x.file, tuple(x.defines.items())): (x.file, x.defines) for x in launches}
        self.kernels.prepare(builds.values())

    def run(self, launches: Iterable[Launch]) -> None:
        """Queue ``launches`` one by one."""
        for x in launches:
            self.kernels.launch(
                self.stream, x.file, x.kernel, x.grid, *x.arguments, defines=x.defines
            )

    def capture(self, launches: Iterable[Launch]) -> Graph:
        """Record ``launches`` as a graph; nothing runs."""
        with self.stream.capture() as capture:
            self.run(launches)
        return capture.graph()

    def close(self) -> None:
        """Free everything on the device; closing again does nothing."""
        self.closed = True
        self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()
