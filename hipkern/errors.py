"""Owns the error classes of the way to a device. Message building belongs to the artifact room.

An error that a HIP call returned carries ``function``, ``code`` and ``code_name``.
"""

from __future__ import annotations

from typing import Any, Self

from ds4q.artifact.errors import Ds4qError


class HipError(Ds4qError):
    """A device, its library or its compiler cannot do what was asked."""

    rule = "the HIP device cannot be used"


class HipUsageError(HipError, ValueError):
    """A call that fits neither the device nor the kernel: sizes, kinds, a handle already freed."""

    rule = "wrong use of the device"


class HipLibraryError(HipError):
    """There is no HIP library, no Python binding for it, or not the one that was asked for."""

    rule = "HIP is not available"
    cure = (
        "install ROCm or set ROCM_PATH, or set DS4Q_HIP=sim for a simulated device, or use the CPU"
    )


class KernelBuildError(HipError):
    """The source of a kernel does not compile; ``path`` is the compiler's whole log."""

    rule = "the kernel does not compile"


class CodeObjectError(HipError, ValueError):
    """A code object that is absent, for another architecture, or breaks a gate."""

    rule = "the code object cannot be used"


class HipCallError(HipError):
    """A HIP function returned an error code."""

    rule = "a HIP call failed"
    function = ""
    code = 0
    code_name = ""

    @classmethod
    def of(cls, function: str, code: int, code_name: str, **where: Any) -> Self:
        """The error of ``function``, which returned ``code``."""
        error = cls(f"{function} failed with {code_name} ({code})", **where)
        error.function, error.code, error.code_name = function, code, code_name
        return error


class NoDeviceError(HipCallError):
    """The library is here, a device is not."""

    rule = "a HIP library is here, but no device"
    cure = (
        "check the driver and that this user may open /dev/kfd, or set DS4Q_HIP=sim for a "
        "simulated device, or use the CPU"
    )


class DeviceMemoryError(HipCallError, MemoryError):
    """The device has less free memory than is needed."""

    rule = "device out of memory"
    cure = "use a smaller artifact or context, or free the device's memory"


class DeviceLostError(HipCallError):
    """A kernel or the device failed; nothing that was on the device can be trusted any more."""

    rule = "the device was lost"
    cure = "run the command again; if it recurs, see the system log (dmesg) and use the CPU"
