"""Owns a device: its memory, its streams, its modules, and what a failed call means.

Goes through hip-python alone. Every return code is checked; every handle is freed by its owner or
with the device. Building kernels belongs to ``kernels``.
"""

from __future__ import annotations

import bisect
import re
import threading
from types import TracebackType
from typing import Any, Self

from ds4q.hipkern.errors import (
    DeviceLostError,
    DeviceMemoryError,
    HipCallError,
    HipLibraryError,
    HipUsageError,
    NoDeviceError,
)
from ds4q.hipkern.handles import Buffer, Handle, Module, Pinned
from ds4q.hipkern.library import Library, open_library, told
from ds4q.hipkern.probe import NO_DEVICE
from ds4q.hipkern.streams import NOT_READY, ON_DEVICE, TO_DEVICE, TO_HOST, Event, Graph, Stream

BUILT_ARCHS = ("gfx1100", "gfx1151", "gfx1201", "gfx942", "gfx950")
"""AMD architectures that every kernel is compiled for by the tests."""

OUT_OF_MEMORY = 2
LOST = frozenset({214, 700, 702, 709, 710, 719})
"""hipErrorECCNotCorrectable, IllegalAddress, LaunchTimeOut, ContextIsDestroyed, Assert,
LaunchFailure: after these every later call on the device fails."""

REMEDIES = {
    1: "a size, an address or a direction is wrong; please report this",
    98: "the code was built for another device; delete the kernels in the cache folder",
    209: "the code object is for another architecture; build it for this one",
    500: "the module holds no kernel of this name; please report this",
    801: "this HIP library cannot do that; install a newer ROCm",
}
USUAL_REMEDY = "run the command again; if it recurs, report this, and use the CPU"
FREED_IN_ORDER: tuple[type[Handle], ...] = (Graph, Event, Stream, Module, Buffer, Pinned)

_current = threading.local()  # the device that HIP takes for this thread's


class Device:
    """One opened device. ``close`` frees all that was made on it.

    Attributes
    ----------
    kind : "amd", "sim" (simulated on this CPU) or "cuda" (through NVIDIA's driver)
    arch : "gfx1151", "sim", "sm_90"
    unified : whether its memory is the host's (an integrated GPU)
    lost : whether a call has reported that the device failed
    """

    def __init__(self, library: Library, index: int) -> None:
        self.library = library
        self.index = index
        self.lost = False
        self._closed = False
        ways = library.hip.hipMemcpyKind  # the binding refuses plain numbers
        self._ways = {kind: ways(kind) for kind in (TO_DEVICE, TO_HOST, ON_DEVICE)}
        self._lock = threading.Lock()
        self._owned: dict[Handle, None] = {}
        self._pinned: list[tuple[int, int]] = []  # (first, past the end), sorted
        properties = self.call("hipGetDeviceProperties", index)
        self.name = str(properties.name)
        self.total_bytes = int(properties.totalGlobalMem)
        self.unified = bool(properties.integrated)
        self.arch = str(properties.gcnArchName).split(":")[0]  # gfx942:sramecc+:xnack-
        self.kind = _kind(self.arch, library)
        self.enter()

    @classmethod
    def open(cls, index: int = 0) -> Self:
        """Open device ``index`` of the library that ``library.open_library`` finds.

        Raises
        ------
        HipLibraryError : no library
        NoDeviceError : a library without a device
        HipUsageError : fewer devices
        """
        library = open_library()
        count = _count(library)
        if not 0 <= index < count:
            raise HipUsageError("no such device", expected=f"0 to {count - 1}", found=index)
        return cls(library, index)

    # ---- what is here ----------------------------------------------------------------------------

    @property
    def notes(self) -> tuple[str, ...]:
        """What somebody who reads results of this device has to know."""
        if self.kind == "sim":
            return ("the device is simulated on this CPU: for correctness, not for speed",)
        if self.kind == "cuda":
            return ("the device is an NVIDIA GPU behind HIP's names: a test vehicle",)
        notes = ["no kernel of ds4q has run on AMD hardware so far"]
        if self.arch not in BUILT_ARCHS:
            built = ", ".join(BUILT_ARCHS)
            notes.append(f"ds4q's kernels were never compiled for {self.arch}, only for {built}")
        return tuple(notes)

    def free_bytes(self) -> int:
        """Memory that is free now, as the device reports it.

        An integrated GPU may report less than it can allocate (ROCm/hip#3892).
        """
        self.enter()
        return int(self.call("hipMemGetInfo")[0])

    # ---- what it makes ---------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> Buffer:
        """Device memory, its contents undefined."""
        return Buffer(self, self._allocate("hipMalloc", nbytes), nbytes)

    def pinned(self, nbytes: int) -> Pinned:
        """Host memory for copies that run by themselves, its contents undefined."""
        return Pinned(self, self._allocate("hipHostMalloc", nbytes, 0), nbytes)

    def stream(self) -> Stream:
        return Stream(self)

    def module(self, image: bytes, name: str) -> Module:
        """Load a code object; ``name`` stands for it in messages."""
        self.enter()
        return Module(self, image, name)

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        self.enter()
        self.call("hipDeviceSynchronize")

    def _allocate(self, function: str, nbytes: int, *flags: int) -> Any:
        if nbytes < 1:
            raise HipUsageError("an allocation needs a size", found=nbytes)
        self.enter()
        try:
            return self.call(function, nbytes, *flags)
        except DeviceMemoryError as error:
            if function == "hipMalloc":
                where = {
                    "expected": f"{nbytes:,} bytes on the device",
                    "found": f"{self.free_bytes():,} bytes free on the device",
                }
            else:
                where = {
                    "expected": f"{nbytes:,} bytes of host memory that can be pinned",
                    "remedy": "free memory of the host, or raise its limit (ulimit -l)",
                }
            raise DeviceMemoryError.of(function, error.code, error.code_name, **where) from None

    # ---- calls -----------------------------------------------------------------------------------

    def call(self, function: str, *arguments: Any, about: str = "") -> Any:
        """What ``function`` of the binding gives back besides its code.

        Raises
        ------
        HipCallError : or the subclass that fits the code; ``about`` names what it concerned
        """
        if self._closed:
            raise HipUsageError(f"{function} on a device that was closed")
        try:
            result = getattr(self.library.hip, function)(*arguments)
        except RuntimeError as error:  # the binding could not look the symbol up
            raise HipLibraryError(
                f"{function} cannot be called: {told(error)}",
                path=self.library.path,
                remedy="install a newer ROCm",
            ) from None
        except ValueError as error:  # a code that the binding's enumeration lacks
            number = re.match(r"(\d+) is not a valid hipError_t", str(error))
            if number is None:
                raise
            raise self.failure(function, int(number[1]), about) from None
        if result[0]:
            raise self.failure(function, result[0], about)
        return result[1] if len(result) == 2 else result[1:]

    def copy(self, to: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        if nbytes:
            self.call("hipMemcpyAsync", to, source, nbytes, self._ways[kind], stream)

    def ready(self, function: str, handle: Any) -> bool:
        """Ask a query function: 0 is yes, ``hipErrorNotReady`` is no."""
        try:
            self.call(function, handle)
        except HipCallError as error:
            if error.code != NOT_READY:
                raise
            return False
        return True

    def failure(self, function: str, code: Any, about: str = "") -> HipCallError:
        """The error for ``code``, which ``function`` returned; remembers that a device was lost."""
        number = int(code)
        name = getattr(code, "name", "unknown to hip-python")
        where = about or f"device {self.index} ({getattr(self, 'name', 'unnamed')})"
        if number in LOST:
            self.lost = True
            return DeviceLostError.of(function, number, name, path=where)
        if number == OUT_OF_MEMORY:
            return DeviceMemoryError.of(function, number, name, path=where)
        if number in NO_DEVICE:
            return NoDeviceError.of(function, number, name)
        remedy = REMEDIES.get(number, USUAL_REMEDY)
        return HipCallError.of(function, number, name, path=where, remedy=remedy)

    def enter(self) -> None:
        """Make this the device that HIP takes for this thread's."""
        if getattr(_current, "index", None) != self.index:
            self.call("hipSetDevice", self.index)
            _current.index = self.index

    # ---- ownership -------------------------------------------------------------------------------

    def adopt(self, handle: Handle) -> None:
        with self._lock:
            self._owned[handle] = None
            if isinstance(handle, Pinned):
                bisect.insort(self._pinned, (handle.address, handle.address + handle.nbytes))

    def disown(self, handle: Handle) -> bool:
        """Whether ``handle`` was still to be freed; from now on it is not."""
        with self._lock:
            if handle not in self._owned:
                return False
            del self._owned[handle]
            if isinstance(handle, Pinned):
                self._pinned.remove((handle.address, handle.address + handle.nbytes))
            return True

    def is_pinned(self, address: int, nbytes: int) -> bool:
        """Whether a range of host memory lies in one ``Pinned`` of this device."""
        with self._lock:
            at = bisect.bisect_right(self._pinned, (address, 1 << 64)) - 1
            return at >= 0 and address + nbytes <= self._pinned[at][1]

    def live(self) -> tuple[str, ...]:
        """What nobody has freed yet, modules apart, for tests that look for leaks."""
        with self._lock:
            return tuple(repr(h) for h in self._owned if not isinstance(h, Module))

    def close(self) -> None:
        """Free everything. Closing again does nothing; after a lost device nothing is raised."""
        self._close(quiet=self.lost)

    def _close(self, quiet: bool) -> None:
        if self._closed:
            return
        first: HipCallError | None = None
        handles = list(self._owned)
        ends = [h.synchronize for h in handles if isinstance(h, Stream)]
        for kind in FREED_IN_ORDER:  # work first, then what it uses
            ends += [h.free for h in handles if isinstance(h, kind)]
        for end in ends:
            try:
                end()
            except HipCallError as error:
                first = first or error
        self._closed = True
        if first is not None and not quiet:
            raise first

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._close(quiet=error is not None or self.lost)


def _count(library: Library) -> int:
    code, count = library.hip.hipGetDeviceCount()
    if int(code) in NO_DEVICE or not (code or count):
        raise NoDeviceError(path=library.path)
    if code:
        raise HipCallError.of("hipGetDeviceCount", int(code), code.name, path=library.path)
    return int(count)


def _kind(arch: str, library: Library) -> str:
    for prefix, kind in (("gfx", "amd"), ("sm_", "cuda"), ("sim", "sim")):
        if arch.startswith(prefix):
            return kind
    raise HipLibraryError(
        "the library names an architecture that ds4q does not know",
        path=library.path,
        expected="gfx...",
        found=repr(arch),
    )
