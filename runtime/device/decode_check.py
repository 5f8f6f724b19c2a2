"""Owns the proof that a device decodes an artifact's tensors to the bits that the CPU gives.

A visitor of ``artifact.walk``: it sees the packed bytes that the other checks see, in pieces, so
its memory does not grow with the artifact. The CPU codec decodes a piece while the device does.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

from ds4q.artifact.codings import Codings
from ds4q.artifact.hfq import TensorEntry
from ds4q.artifact.report import Check, Failure
from ds4q.artifact.types import RAW, TIDI32, TYPES, TensorType
from ds4q.artifact.walk import TensorVisitor
from ds4q.hipkern import matrix
from ds4q.hipkern.driver import Device
from ds4q.hipkern.errors import HipError
from ds4q.hipkern.handles import Buffer, Pinned
from ds4q.hipkern.kernels import Kernels

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
NO_WEIGHTS = (TIDI32, RAW)
BLOCK = 32  # values; what a failure points at
FRONT_BYTES = 64  # a tensor's books lie in front of its rows, which are aligned to 16
SLACK_BYTES = 16  # behind the rows, where kernels may read
SIGN_LESS = 0x7FFFFFFF
INFINITY = 0x7F800000  # patterns above it are NaN


class _Twin:
    """Room for the same bytes here, pinned, and on the device."""

    host: Pinned
    there: Buffer

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: list[Pinned | Buffer] = []
        self._nbytes = 0

    def room(self, nbytes: int) -> None:
        """Hold at least ``nbytes``; contents are lost where that takes more memory."""
        if nbytes <= self._nbytes:
            return
        while self._held:
            self._held.pop().free()
        self._nbytes = 0
        self.host = self._device.pinned(nbytes)
        self._held.append(self.host)
        self.there = self._device.alloc(nbytes)
        self._held.append(self.there)
        self._nbytes = nbytes


class _Lane:
    """What one thread decodes with."""

    def __init__(self, device: Device) -> None:
        self.stream = device.stream()
        self.packed, self.values = _Twin(device), _Twin(device)


class DeviceDecoding:
    """A visitor of ``artifact.walk``: every weight as the device decodes it, and as its codec does.

    A device that fails is one failure of this check; the other checks of the walk go on. ``close``
    closes the device.
    """

    def __init__(self, check: Check, codings: Codings, device: Device, kernels: Kernels) -> None:
        self.check = check
        self.codings = codings
        self._device, self._kernels = device, kernels
        self._lock = threading.Lock()  # over what threads share: handles, kernels, sums
        self._lanes: list[_Lane] = []
        self._local = threading.local()
        self._begin = time.perf_counter()
        self._sums = dict.fromkeys(("tensors", "weights", "bytes", "without_weights"), 0)
        self._lost = False

    def begin(self, entry: TensorEntry, rows: int, k: int) -> TensorVisitor | None:
        if TYPES[entry.type_id] in NO_WEIGHTS:
            self.count(without_weights=1)
            return None
        return None if self._lost else _Decoded(self, entry, k)

    def start(self, entry: TensorEntry, packed: U8, rows: int, k: int) -> _Lane | None:
        """Have the device decode some rows of a tensor; None where it has failed."""
        try:
            with self._lock:
                return None if self._lost else self._start(entry, packed, rows, k)
        except HipError as error:
            self.give_up(error)
            return None

    def _start(self, entry: TensorEntry, packed: U8, rows: int, k: int) -> _Lane:
        lane: _Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            lane = self._local.lane = _Lane(self._device)
            self._lanes.append(lane)
        coding = self.codings.coding(entry.name)
        books = matrix.books_of(entry.type_id, coding)
        rows, k, row_bytes = _as_rows(TYPES[entry.type_id], rows, k)
        front = FRONT_BYTES + packed.nbytes
        lane.packed.room(FRONT_BYTES + rows * row_bytes + SLACK_BYTES)
        lane.values.room(4 * rows * k)
        host, there, out = lane.packed.host, lane.packed.there.address, lane.values.there.address
        if books is not None:
            host.array[: len(books)] = np.frombuffer(books, dtype=np.uint8)
        host.array[FRONT_BYTES:front] = packed
        lane.stream.upload(there, host, front)
        self._kernels.launch(
            lane.stream,
            "decode.hip",
            "decode_f32",
            matrix.decode_grid(rows, k),
            there + FRONT_BYTES,
            0 if books is None else there,
            out,
            rows,
            k,
            row_bytes,
            defines={"DS4Q_DECODER": matrix.decoder_of(entry.type_id, coding)},
        )
        lane.stream.download(lane.values.host, out, 4 * rows * k)
        return lane

    def finish(self, lane: _Lane, values: int) -> U32 | None:
        """The bits of the first ``values`` that were decoded; None where the device has failed.

        They are the lane's, until its next piece is started.
        """
        try:
            lane.stream.synchronize()
        except HipError as error:
            self.give_up(error)
            return None
        bits: U32 = lane.values.host.array[: 4 * values].view(np.uint32)
        return bits

    def give_up(self, error: HipError) -> None:
        """Nothing more is asked of the device."""
        with self._lock:
            if not self._lost:
                self._lost = True
                self.check.fail_with(error)

    def count(self, **amounts: int) -> None:
        """Add to the figures."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def close(self) -> None:
        """Close the device and fill in the figures."""
        device, seconds = self._device, time.perf_counter() - self._begin
        try:
            device.close()
        except HipError as error:
            self.give_up(error)
        self.check.figures |= {
            "device": device.name,
            "arch": device.arch,
            "kind": device.kind,
            **self._sums,
            "bytes_per_second": round(self._sums["bytes"] / seconds),
        }
        self.check.notes.extend(device.notes)


class _Decoded:
    """One tensor. Its first wrong value is told, and how many there are."""

    def __init__(self, owner: DeviceDecoding, entry: TensorEntry, k: int) -> None:
        self._owner, self._entry, self._k = owner, entry, k
        self._codec = owner.codings.codec(entry)
        self._values = 0  # compared
        self._wrong = 0
        self._first: tuple[int, int, int] | None = None  # value, and both its patterns
        self._whole = True

    def rows(self, first: int, count: int, packed: U8) -> None:
        lane = self._owner.start(self._entry, packed, count, self._k)
        if lane is None:
            self._whole = False
            return
        decoded = self._codec.decode(packed, (count, self._k))
        expected = np.ascontiguousarray(decoded, dtype=np.float32).reshape(-1).view(np.uint32)
        found = self._owner.finish(lane, expected.size)
        if found is None:
            self._whole = False
            return
        self._values += expected.size
        self._owner.count(weights=expected.size, bytes=packed.nbytes)
        wrong = _differences(found, expected)
        self._wrong += wrong.size
        if wrong.size and self._first is None:
            at = int(wrong[0])
            self._first = first * self._k + at, int(expected[at]), int(found[at])

    def done(self) -> list[Failure]:
        if self._whole:
            self._owner.count(tensors=1)
        if self._first is None:
            return []
        at, expected, found = self._first
        row, column = divmod(at, self._k)
        return [
            Failure(
                f"the device decodes {self._wrong:,} of {self._values:,} values to other bits, "
                f"first value {column % BLOCK} of the block",
                tensor=self._entry.name,
                row=row,
                block=column // BLOCK,
                expected=_bits_text(expected),
                found=_bits_text(found),
            )
        ]


def _as_rows(kind: TensorType, rows: int, k: int) -> tuple[int, int, int]:
    """Rows, columns and bytes of a row as the kernel is told them: columns are whole blocks of 32.

    Types whose blocks run across rows are one long row where a row of theirs is no whole blocks;
    it ends in values that nobody looks at.
    """
    if k % BLOCK:
        rows, k = 1, -(-rows * k // BLOCK) * BLOCK
    return rows, k, kind.row_bytes(k)


def _differences(found: U32, expected: U32) -> npt.NDArray[np.intp]:
    """Where the patterns differ. Any NaN is as good as another: no legal byte decodes to one."""
    if np.array_equal(found, expected):
        return np.empty(0, dtype=np.intp)
    numbers = ((found & SIGN_LESS) <= INFINITY) | ((expected & SIGN_LESS) <= INFINITY)
    return np.flatnonzero((found != expected) & numbers)


def _bits_text(bits: int) -> str:
    value = np.array(bits, dtype=np.uint32).view(np.float32)
    return f"{bits:#010x} ({value:.9g})"
