"""Owns order on a device: streams, events, and graphs captured from a stream.

A copy from or to pinned memory runs by itself; every other array is copied before the call returns,
because nothing else keeps it alive. Copies of pinned memory need it until they have completed.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ds4q.hipkern.errors import HipCallError, HipUsageError
from ds4q.hipkern.handles import Handle, Pinned

if TYPE_CHECKING:
    import numpy as np

    from ds4q.hipkern.driver import Device

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3  # hipMemcpyKind
NON_BLOCKING = 1  # hipStreamNonBlocking: does not wait for the null stream
NOT_READY = 600  # hipErrorNotReady
RELAXED = 2  # hipStreamCaptureModeRelaxed: modules may be loaded and memory allocated meanwhile


class Stream(Handle):
    """A queue of copies and kernels that run in order."""

    def __init__(self, device: Device) -> None:
        device.enter()
        self._handle = device.call("hipStreamCreateWithFlags", NON_BLOCKING)
        self.capturing = False
        super().__init__(device)

    @property
    def handle(self) -> Any:
        if self._handle is None:  # which the binding would take for the null stream
            raise self._freed()
        return self._handle

    def synchronize(self) -> None:
        """Wait until everything queued so far is done; what failed meanwhile is raised here."""
        self.device.call("hipStreamSynchronize", self.handle)

    def query(self) -> bool:
        """Whether everything queued so far is done."""
        return self.device.ready("hipStreamQuery", self.handle)

    def record(self, event: Event | None = None) -> Event:
        """Mark this point of the queue, with a new event or once more with ``event``."""
        if event is None:
            event = Event(self.device)
        self.device.call("hipEventRecord", event.handle, self.handle)
        return event

    def wait(self, event: Event) -> None:
        """Let what is queued from here on wait for ``event``."""
        self.device.call("hipStreamWaitEvent", self.handle, event.handle, 0)

    def upload(self, address: int, source: Pinned | np.ndarray, nbytes: int | None = None) -> None:
        """Copy ``nbytes`` (all, if None) of ``source`` to the device."""
        host, count, pinned = self._host(source, nbytes)
        self._copy(address, host, count, TO_DEVICE, pinned)

    def download(
        self, target: Pinned | np.ndarray, address: int, nbytes: int | None = None
    ) -> None:
        """Copy ``nbytes`` (what ``target`` holds, if None) from the device."""
        host, count, pinned = self._host(target, nbytes)
        if not isinstance(target, Pinned) and not target.flags.writeable:
            raise HipUsageError("the array to copy to is read-only")
        self._copy(host, address, count, TO_HOST, pinned)

    def move(self, to_address: int, from_address: int, nbytes: int) -> None:
        """Copy within the device; the two ranges do not overlap."""
        self._copy(to_address, from_address, nbytes, ON_DEVICE, True)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Set ``nbytes`` to ``byte``."""
        if not 0 <= byte <= 255:
            raise HipUsageError("not a byte", found=byte)
        self.device.call("hipMemsetAsync", address, byte, nbytes, self.handle)

    def capture(self) -> Capture:
        """``with stream.capture() as capture:`` records what is queued; nothing of it runs."""
        return Capture(self)

    def _host(self, array: Pinned | np.ndarray, nbytes: int | None) -> tuple[int, int, bool]:
        """Address, bytes to copy, and whether the memory is pinned."""
        if isinstance(array, Pinned):
            address, held, pinned = array.address, array.nbytes, True
        else:
            if not array.flags.c_contiguous:
                raise HipUsageError("the array is not contiguous", found=f"strides {array.strides}")
            address, held = array.__array_interface__["data"][0], array.nbytes
            pinned = self.device.is_pinned(address, held)
        if nbytes is None:
            nbytes = held
        elif not 0 <= nbytes <= held:
            raise HipUsageError(
                "copy outside the array", expected=f"at most {held} bytes", found=nbytes
            )
        return address, nbytes, pinned

    def _copy(self, to: int, source: int, nbytes: int, kind: int, by_itself: bool) -> None:
        if self.capturing and not by_itself:
            raise HipUsageError(
                "only copies of pinned memory can be captured", remedy="copy through device.pinned"
            )
        self.device.copy(to, source, nbytes, kind, self.handle)
        if not by_itself:
            self.synchronize()

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        self.device.call("hipStreamDestroy", handle)

    def __repr__(self) -> str:
        return "Stream"


class Event(Handle):
    """A point in a stream's queue that others can wait for, with a time stamp."""

    def __init__(self, device: Device) -> None:
        device.enter()
        self._handle = device.call("hipEventCreate")
        super().__init__(device)

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise self._freed()
        return self._handle

    def synchronize(self) -> None:
        """Wait until the stream has reached this point."""
        self.device.call("hipEventSynchronize", self.handle)

    def query(self) -> bool:
        """Whether the stream has reached this point."""
        return self.device.ready("hipEventQuery", self.handle)

    def elapsed_ms(self, later: Event) -> float:
        """Milliseconds of device time from here to ``later``; both have been reached."""
        return float(self.device.call("hipEventElapsedTime", self.handle, later.handle))

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        self.device.call("hipEventDestroy", handle)

    def __repr__(self) -> str:
        return "Event"


class Graph(Handle):
    """Recorded work that is launched as one. Addresses and scalars are those of the recording."""

    def __init__(self, device: Device, template: Any) -> None:
        self._handle = device.call("hipGraphInstantiateWithFlags", template, 0)
        super().__init__(device)

    def launch(self, stream: Stream) -> None:
        """Queue all of it on ``stream``."""
        if self._handle is None:
            raise self._freed()
        self.device.call("hipGraphLaunch", self._handle, stream.handle)

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        self.device.call("hipGraphExecDestroy", handle)

    def __repr__(self) -> str:
        return "Graph"


class Capture:
    """A recording in progress, then its graph. However it ends, the stream can be used again."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._graph: Graph | None = None

    def graph(self) -> Graph:
        """The recorded graph, once the block has ended; the caller frees it."""
        if self._graph is None:
            raise HipUsageError("there is no graph before the capture has ended well")
        return self._graph

    def __enter__(self) -> Self:
        stream = self._stream
        if stream.capturing:
            raise HipUsageError("this stream is being captured already")
        stream.device.enter()
        mode = stream.device.library.hip.hipStreamCaptureMode(RELAXED)
        stream.device.call("hipStreamBeginCapture", stream.handle, mode)
        stream.capturing = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        stream, device = self._stream, self._stream.device
        stream.capturing = False
        try:
            template = device.call("hipStreamEndCapture", stream.handle)
            try:
                if error is None:
                    self._graph = Graph(device, template)
            finally:
                if template is not None:
                    device.call("hipGraphDestroy", template)
        except HipCallError:
            if error is None:  # else the first error is the one to tell
                raise
