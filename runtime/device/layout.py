"""Owns places in device memory: planned before the memory exists, with an address once it does."""

from __future__ import annotations

from ds4q.hipkern.driver import Device
from ds4q.hipkern.handles import Buffer
from ds4q.runtime.errors import RunError

ALIGN_BYTES = 256
SLACK_BYTES = 256  # readable behind the last place: kernels load whole words past a row's end


class Place:
    """``nbytes`` of a layout's buffer."""

    __slots__ = ("_layout", "nbytes", "offset")

    def __init__(self, layout: Layout, offset: int, nbytes: int) -> None:
        self._layout = layout
        self.offset = offset
        self.nbytes = nbytes

    @property
    def address(self) -> int:
        """Where it lies on the device."""
        return self._layout.address + self.offset


class Layout:
    """One device buffer, cut up before it is allocated; contents are undefined at first."""

    def __init__(self) -> None:
        self._end = 0
        self._buffer: Buffer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self._end + SLACK_BYTES

    @property
    def address(self) -> int:
        """Of the first byte; there must be one."""
        if self._buffer is None:
            raise RunError("a place on the device has no memory behind it; this is a bug in ds4q")
        return self._buffer.address

    def reserve(self, nbytes: int, align: int = ALIGN_BYTES) -> Place:
        """The next place; nothing can be reserved any more once there is memory."""
        if self._buffer is not None:
            raise RunError("this device memory is laid out already; this is a bug in ds4q")
        offset = -(-self._end // align) * align
        self._end = offset + nbytes
        return Place(self, offset, nbytes)

    def floats(self, *shape: int) -> Place:
        """A place for an f32 array."""
        count = 1
        for extent in shape:
            count *= extent
        return self.reserve(4 * count)

    def allocate(self, device: Device) -> None:
        """Take the memory."""
        self._buffer = device.alloc(self.nbytes)

    def free(self) -> None:
        """Give the memory back, if there is any."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.free()
