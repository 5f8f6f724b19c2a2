"""Owns what lies on a device until it is freed: memory, pinned memory, modules and functions.

Streams, events and graphs are in ``streams``. Every handle belongs to its device, which frees what
its owner did not.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ds4q.hipkern.errors import HipCallError, HipUsageError

if TYPE_CHECKING:
    import numpy as np

    from ds4q.hipkern.driver import Device
    from ds4q.hipkern.streams import Stream

KINDS = {"pointer": "Q", "int": "i", "ds4q_u32": "I", "float": "f", "ds4q_u64": "Q"}
"""Kinds of kernel arguments and how ``struct`` packs each, at its natural alignment."""

LAUNCH_BUFFER, LAUNCH_SIZE, LAUNCH_END = 1, 2, 3  # HIP_LAUNCH_PARAM_*
LOWEST_ADDRESS = 4096  # a pointer below is a count that was passed in its place


class Handle:
    """One thing that has to be freed, once; freeing it again does nothing."""

    def __init__(self, device: Device) -> None:
        self.device = device
        device.adopt(self)

    def free(self) -> None:
        """Give it back. After a lost device there is nothing left to fail."""
        if not self.device.disown(self):
            return
        was_lost = self.device.lost
        try:
            self._release()
        except HipCallError:
            if not was_lost:
                raise

    def _release(self) -> None:
        raise NotImplementedError

    def _freed(self) -> HipUsageError:
        return HipUsageError(f"this {type(self).__name__} was freed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.free()
        except HipCallError:
            if error is None:  # else the first error is the one to tell
                raise


class Buffer(Handle):
    """Memory on the device; an argument of kind pointer may be the buffer itself."""

    def __init__(self, device: Device, handle: Any, nbytes: int) -> None:
        self._address = int(handle)
        self.nbytes = nbytes
        super().__init__(device)

    @property
    def address(self) -> int:
        if not self._address:
            raise self._freed()
        return self._address

    def __index__(self) -> int:  # so that struct packs it as a pointer
        return self.address

    def _release(self) -> None:
        address, self._address = self._address, 0
        self.device.call("hipFree", address)

    def __repr__(self) -> str:
        return f"Buffer of {self.nbytes} bytes"


class Pinned(Handle):
    """Host memory that the device copies from and to by itself.

    ``array`` shows it as bytes; no view of it may be used after ``free``.
    """

    def __init__(self, device: Device, handle: Any, nbytes: int) -> None:
        import numpy as np

        self._address = int(handle)
        self.nbytes = nbytes
        self._array: np.ndarray | None = np.ctypeslib.as_array(
            (ctypes.c_uint8 * nbytes).from_address(self._address)
        )
        super().__init__(device)

    @property
    def address(self) -> int:
        if not self._address:
            raise self._freed()
        return self._address

    @property
    def array(self) -> np.ndarray:
        if self._array is None:
            raise self._freed()
        return self._array

    def _release(self) -> None:
        address, self._address, self._array = self._address, 0, None
        self.device.call("hipHostFree", address)

    def __repr__(self) -> str:
        return f"Pinned of {self.nbytes} bytes"


class Module(Handle):
    """A loaded code object. Its functions live as long as it does."""

    def __init__(self, device: Device, image: bytes, name: str) -> None:
        self._handle = device.call("hipModuleLoadData", image, about=name)
        self._image = image  # a library may read it as late as at the first launch
        self.name = name
        super().__init__(device)

    def function(self, name: str, threads: int, kinds: Sequence[str]) -> Function:
        """The kernel ``name``, launched with blocks of ``threads`` and arguments of ``kinds``."""
        if self._handle is None:
            raise self._freed()
        handle = self.device.call(
            "hipModuleGetFunction", self._handle, name.encode(), about=f"{self.name}: {name}"
        )
        return Function(self, handle, name, threads, kinds)

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        self.device.call("hipModuleUnload", handle)

    def __repr__(self) -> str:
        return f"Module {self.name}"


class Function:
    """A kernel that can be launched; its argument buffer is packed here, not by the binding."""

    def __init__(
        self, module: Module, handle: Any, name: str, threads: int, kinds: Sequence[str]
    ) -> None:
        from rocm.bindings._hip_helpers import HipModuleLaunchKernel_extra
        from rocm.bindings.util.types import ListOfPointer

        self.name = f"{module.name}: {name}"
        self.threads = threads
        self.kinds = tuple(kinds)
        self._module = module
        self._device = module.device
        self._handle = handle
        self._packer = argument_struct(kinds)
        self._accepted: set[tuple[type, ...]] = set()
        self._lock = threading.Lock()  # the buffer below is one for all launches
        self._buffer = (ctypes.c_uint64 * (self._packer.size // 8 + 1))()
        self._size = ctypes.c_size_t(self._packer.size)
        self._config = (ctypes.c_void_p * 5)(
            LAUNCH_BUFFER,
            ctypes.addressof(self._buffer),
            LAUNCH_SIZE,
            ctypes.addressof(self._size),
            LAUNCH_END,
        )
        # In the binding's own types, which it would otherwise make of the arguments at each launch.
        self._extra = HipModuleLaunchKernel_extra(ctypes.addressof(self._config))
        self._no_parameters = ListOfPointer(None)
        self._start = module.device.library.hip.hipModuleLaunchKernel

    def launch(self, stream: Stream, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Run ``grid`` blocks on ``stream``; arguments are copied before this returns.

        Raises
        ------
        HipUsageError : arguments that differ in number or kind from the kernel's declaration
        """
        types = tuple(map(type, arguments))
        if types not in self._accepted:
            self._check(arguments)
            self._accepted.add(types)
        x, y, z = grid
        self._device.enter()
        with self._lock:
            try:
                self._packer.pack_into(self._buffer, 0, *arguments)
            except (struct.error, TypeError, OverflowError):
                self._check(arguments)  # says which
                raise
            if x < 1 or y < 1 or z < 1:
                raise HipUsageError(f"{self.name}: a grid without blocks: {grid}")
            size = (x, y, z, self.threads, 1, 1, 0)  # grid, block, dynamic shared memory
            code = self._start(
                self._handle, *size, stream.handle, self._no_parameters, self._extra
            )[0]
        if code:
            raise self._device.failure("hipModuleLaunchKernel", code, about=self.name)

    def _check(self, arguments: Sequence[Any]) -> None:
        """Whether they fit the declaration; done once for each combination of Python types."""
        if len(arguments) != len(self.kinds):
            raise HipUsageError(
                f"{self.name}: wrong number of arguments",
                expected=f"{len(self.kinds)} ({', '.join(self.kinds)})",
                found=len(arguments),
            )
        for i, (kind, value) in enumerate(zip(self.kinds, arguments, strict=True)):
            try:
                struct.pack(KINDS[kind], value)
                fits = (kind == "float") == isinstance(value, float)
                fits &= kind != "pointer" or not 0 < operator.index(value) < LOWEST_ADDRESS
            except (struct.error, TypeError, OverflowError):
                fits = False
            if not fits:
                raise HipUsageError(
                    f"{self.name}: argument {i} is of the wrong kind",
                    expected=kind,
                    found=f"{value!r:.60} ({type(value).__name__})",
                )


def argument_struct(kinds: Sequence[str]) -> struct.Struct:
    """How arguments of ``kinds`` lie in a launch's buffer: in order, each aligned to its size."""
    return struct.Struct("@" + "".join(KINDS[kind] for kind in kinds))
