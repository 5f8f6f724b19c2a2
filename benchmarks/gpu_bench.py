"""Owns how a kernel is timed on a device: graph replays between two events, beside a plain copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Recorder, Times
from ds4q.hipkern.driver import Device
from ds4q.hipkern.handles import Buffer
from ds4q.hipkern.kernels import Kernels

COPY_BYTES = 4 << 30
REPEATS = 9
SLACK_BYTES = 256  # behind packed rows: kernels read whole words


class Bench:
    """An open device with what the parts of the benchmark share.

    Attributes
    ----------
    copy_rate : bytes read and written a second by a large copy on the device, the median
    issue_rate : instructions of whole warps that all multiprocessors can start a second
    medians : seconds of what was timed as a rate so far, and bytes, by measure
    """

    def __init__(self, device: Device, arguments: list[str]) -> None:
        self.device = device
        self.kernels = Kernels(device)
        self.stream = device.stream()
        self.record = Recorder("gpu", arguments, device.name)
        self.medians: dict[str, tuple[float, int]] = {}
        self.copy_rate = self._copy_rate()
        self.issue_rate = self._issue_rate()

    def put(self, array: npt.NDArray[Any] | bytes) -> Buffer:
        """A copy of ``array`` on the device."""
        raw = np.frombuffer(array, np.uint8) if isinstance(array, bytes) else array
        buffer = self.device.alloc(raw.nbytes + SLACK_BYTES)
        self.stream.upload(buffer.address, np.ascontiguousarray(raw))
        return buffer

    def take(self, buffer: Buffer, count: int) -> npt.NDArray[np.float32]:
        """The first ``count`` floats of ``buffer``."""
        found = np.empty(count, np.float32)
        self.stream.download(found, buffer.address)
        return found

    def replayed(self, launch: Callable[[int], None], count: int) -> Times:
        """Seconds of one of ``count`` launches, recorded as one graph and replayed."""
        with self.stream.capture() as capture:
            for i in range(count):
                launch(i)
        with capture.graph() as graph:
            return self.events(lambda: graph.launch(self.stream), count)

    def events(self, queue: Callable[[], None], count: int = 1, repeats: int = REPEATS) -> Times:
        """Device seconds of one of the ``count`` parts that ``queue`` queues."""
        queue()
        self.stream.synchronize()
        times = Times()
        with self.stream.record() as first, self.stream.record() as last:
            for _ in range(repeats):
                cpu = time.process_time()
                self.stream.record(first)
                queue()
                self.stream.record(last)
                last.synchronize()
                times.cpu.append((time.process_time() - cpu) / count)
                times.wall.append(first.elapsed_ms(last) / 1000 / count)
        return times

    def add_rate(self, measure: str, times: Times, nbytes: int) -> float:
        """Rows for terabytes a second and for their part of the copy's; returns that part."""
        self.medians[measure] = times.median, nbytes
        self.record.add(measure, times, "TB/s", nbytes / 1e12)
        parts = Times([nbytes / each / self.copy_rate for each in times.wall], times.cpu)
        self.record.add(f"{measure}, of copy", parts, "x")
        return statistics.median(parts.wall)

    def add_value(self, measure: str, value: float, unit: str) -> None:
        """A row for one figure that follows from others."""
        self.record.add(measure, Times([value], [value]), unit)

    def _copy_rate(self) -> float:
        with self.device.alloc(COPY_BYTES) as source, self.device.alloc(COPY_BYTES) as target:
            self.stream.fill(source.address, 0x5A, COPY_BYTES)
            times = self.events(
                lambda: self.stream.move(target.address, source.address, COPY_BYTES)
            )
        self.record.add("device copy, read + written", times, "TB/s", 2 * COPY_BYTES / 1e12)
        return 2 * COPY_BYTES / times.median

    def _issue_rate(self) -> float:
        code, properties = self.device.library.hip.hipGetDeviceProperties(self.device.index)
        if code:
            raise RuntimeError(f"hipGetDeviceProperties: {code}")
        hertz = 1000 * properties.clockRate
        return float(4 * properties.multiProcessorCount * hertz)  # four schedulers each


def close(found: npt.NDArray[Any], wanted: npt.NDArray[Any], bound: float, what: str) -> None:
    """Refuse to time a kernel that computes something else."""
    worst = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    if not worst <= bound:  # also where it is NaN
        raise SystemExit(f"{what}: off by {worst:.3g} of the largest value, expected {bound:g}")
