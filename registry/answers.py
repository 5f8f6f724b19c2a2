"""Reads HTTP answers within limits of time and size, whatever the server sends.

Which requests are made, and what an answer means: ``remote.py``.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import time
from typing import Any

TIMEOUT_S = 30.0  # without a single byte
MAX_HEAD_BYTES = 256 << 10  # of one head; of what surrounds a piece of a body, too
_HEAD_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:|HTTP/|\r?\n?\Z")


class LimitError(OSError):
    """The server exceeded a limit of time or size; the message says what it did."""


class Limits:
    """How long a lane waits, and how much it reads, until a head or a piece of a body is there.

    The time-out of a socket restarts with every byte, so alone it would let a server that sends
    one byte at a time hold its client for ever.
    """

    def __init__(self) -> None:
        self._what, self._within_s, self._until_s, self._left = "answer", 0.0, 0.0, 0
        self._heard = False

    def start(self, what: str, within_s: float) -> None:
        """Begin to wait for ``what``."""
        self._what, self._within_s = what, within_s
        self._until_s = time.monotonic() + within_s
        self._heard = False
        self.allow(0)

    def allow(self, nbytes: int) -> None:
        """Let ``nbytes`` be read, and as much again as a head may have."""
        self._left = nbytes + MAX_HEAD_BYTES

    def wait_s(self) -> float:
        """Seconds that the next operation of the socket may take."""
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise LimitError(f"the server sent no whole {self._what} in {self._within_s:g} s")
        return min(left_s, TIMEOUT_S)

    def silent(self) -> bool:
        """Whether not a single byte came since ``start``."""
        return not self._heard

    def read(self, nbytes: int) -> None:
        """Count bytes that were read."""
        self._heard = True
        self._left -= nbytes
        if self._left < 0:
            most = f"{MAX_HEAD_BYTES >> 10} KiB"
            raise LimitError(f"the server sent more than {most} without a whole {self._what}")


class _Limited(io.RawIOBase):
    """The bytes of a connection, within limits."""

    def __init__(self, inner: Any, sock: socket.socket, limits: Limits) -> None:
        self._inner, self._sock, self._limits = inner, sock, limits

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        self._sock.settimeout(self._limits.wait_s())
        try:
            n: int = self._inner.readinto(out)
        except TimeoutError:
            if not self._limits.silent():
                self._limits.wait_s()
            raise
        self._limits.read(n)
        return n

    def close(self) -> None:
        self._inner.close()
        super().close()


class _CleanLines:
    """The head of an answer without lines that are no header field.

    The library stops at the first such line, and what follows would be lost.
    """

    def __init__(self, inner: io.BufferedIOBase) -> None:
        self._inner = inner
        self._first = True  # the status line, which the library judges

    def readline(self, limit: int) -> bytes:
        line = self._inner.readline(limit)
        while not self._first and len(line) < limit and not _HEAD_LINE.match(line):
            line = self._inner.readline(limit)
        self._first = False
        return line

    def close(self) -> None:
        self._inner.close()


class Response(http.client.HTTPResponse):
    """Tolerates malformed header lines; reads head, body and trailer within limits."""

    def __init__(self, sock: socket.socket, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        whole: Any = self.fp
        self.fp = io.BufferedReader(_Limited(whole.detach(), sock, limits))

    def read1(self, n: int = -1) -> bytes:
        """As the library does it, which takes a chunk of negative length for a piece of any."""
        try:
            data = super().read1(n)
        except OverflowError:
            data = None
        if data is None or (isinstance(self.chunk_left, int) and self.chunk_left < 0):
            raise http.client.HTTPException("the length of a chunk is negative")
        return data

    def begin(self) -> None:
        inner = self.fp
        clean: Any = _CleanLines(inner)
        self.fp = clean
        try:
            super().begin()
        finally:
            if self.fp is clean:
                self.fp = inner
