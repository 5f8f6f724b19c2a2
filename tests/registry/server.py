"""Owns a file server that misbehaves as told. Knows nothing of what fetches from it.

    python -m tests.registry.server FOLDER [--rate MB_PER_S]

prints its port and serves until it is ended. In a test, ``serving(folder)`` gives a ``Server``
whose ``fault`` says what goes wrong with which request, and which counts what it sent.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PIECE_BYTES = 256 << 10
CREDIT_S = 0.05


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one answer; the defaults are no fault at all."""

    status: int = 0  # answer with this status in place of the file
    headers: tuple[tuple[str, str], ...] = ()  # sent besides
    lines: tuple[bytes, ...] = ()  # raw lines of the head
    location: str = ""  # redirect there
    stop_after: int | None = None  # bytes of the body, then the connection ends
    reset: bool = False  # ... by a reset
    stall: bool = False  # ... not at all: silence until the client leaves
    flip_at: int | None = None  # byte of the body that is inverted
    add_total: int = 0  # to the length that the head tells
    shift: int = 0  # of the range that is sent, against the one that was asked for
    limit: int | None = None  # bytes of a range that is longer
    range_status: int = 206  # of the answer to a range
    whole: bool = False  # the whole file, whatever range was asked for
    body: bytes = b""  # of an answer with a status of its own
    trickle_s: float = 0.0  # pause after each 64 bytes
    etag: str | None = None  # another entity tag; empty: none


GOOD = Fault()


@dataclass
class Request:
    """What was asked."""

    path: str
    headers: dict[str, str]
    range: tuple[int, int] | None
    number: int


@dataclass
class Server:
    """A running server: set ``fault``, read the counters."""

    folder: Path
    port: int = 0
    fault: Callable[[Request], Fault] = lambda request: GOOD
    pages: dict[str, Callable[[Request], tuple[int, dict[str, str], bytes]]] = field(
        default_factory=dict
    )
    requests: list[Request] = field(default_factory=list)
    sent_bytes: int = 0
    rate_bytes_per_s: float = 0.0
    scheme: str = "http"
    lock: threading.Lock = field(default_factory=threading.Lock)
    busy: int = 0
    _free_at_s: float = 0.0

    def url(self, name: str) -> str:
        """Where a file of the folder is served."""
        return f"{self.scheme}://127.0.0.1:{self.port}/{name}"

    def count(self, nbytes: int) -> None:
        """Count bytes of a body, and hold the thread back to the rate that all share."""
        with self.lock:
            self.sent_bytes += nbytes
            if not self.rate_bytes_per_s:
                return
            now_s = time.monotonic()
            # A late wake-up may be made up for: else one connection alone stays below the rate.
            self._free_at_s = max(self._free_at_s, now_s - CREDIT_S)
            self._free_at_s += nbytes / self.rate_bytes_per_s
            pause_s = self._free_at_s - now_s
        time.sleep(max(pause_s, 0.0))

    def settle(self) -> None:
        """Wait until no answer is being sent, and count anew."""
        while self.busy:
            time.sleep(0.001)
        self.requests.clear()
        self.sent_bytes = 0

    def script(self, *faults: Fault) -> None:
        """One fault for each request in turn; what follows is answered well."""
        left = list(faults)

        def next_one(request: Request) -> Fault:
            with self.lock:
                return left.pop(0) if left else GOOD

        self.fault = next_one


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    plan: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        with self.plan.lock:
            self.plan.busy += 1
        try:
            with suppress(ConnectionError):
                self._answer()
        finally:
            with self.plan.lock:
                self.plan.busy -= 1

    do_HEAD = do_GET

    def _answer(self) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        wanted = (int(match[1]), int(match[2]) + 1) if match else None
        with self.plan.lock:
            number = len(self.plan.requests)
            request = Request(
                self.path, {k.lower(): v for k, v in self.headers.items()}, wanted, number
            )
            self.plan.requests.append(request)
        path = urlsplit(self.path).path
        if path in self.plan.pages:
            self._short(*self.plan.pages[path](request))
            return
        fault = self.plan.fault(request)
        if fault.location:
            self._short(
                fault.status or 302, {"Location": fault.location, **dict(fault.headers)}, b""
            )
        elif fault.status:
            self._short(fault.status, dict(fault.headers), fault.body)
        else:
            self._file(self.plan.folder / unquote(path).lstrip("/"), request, fault)

    def _short(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _file(self, path: Path, request: Request, fault: Fault) -> None:
        try:
            file = path.open("rb")
        except OSError:
            self._short(404, {}, b"no such file")
            return
        with file:
            status = os.fstat(file.fileno())
            size = status.st_size
            etag = f'"{size:x}-{status.st_mtime_ns:x}"' if fault.etag is None else fault.etag
            changed = request.headers.get("if-range", etag) != etag
            start, stop = 0, size
            if request.range is not None and not fault.whole and not changed:
                start, stop = request.range[0], min(request.range[1], size)
                if fault.limit is not None:
                    stop = min(stop, start + fault.limit)
                if start >= size:
                    self._short(416, {"Content-Range": f"bytes */{size}"}, b"")
                    return
                self._begin(fault.range_status, fault)
                first = start + fault.shift
                told = f"bytes {first}-{stop - 1 + fault.shift}/{size + fault.add_total}"
                self.send_header("Content-Range", told)
                self.send_header("Content-Length", str(stop - start))
            else:
                self._begin(200, fault)
                self.send_header("Content-Length", str(size + fault.add_total))
            self.send_header("Last-Modified", formatdate(status.st_mtime, usegmt=True))
            if etag:
                self.send_header("ETag", etag)
            for name, value in fault.headers:
                self.send_header(name, value)
            self.end_headers()
            self._body(file, start, stop, fault)

    def _begin(self, status: int, fault: Fault) -> None:
        """The status, and in front of what matters the lines that may disturb a reader."""
        self.send_response(status)
        for line in fault.lines:
            self._headers_buffer.append(line + b"\r\n")  # type: ignore[attr-defined]

    def _body(self, file: Any, start: int, stop: int, fault: Fault) -> None:
        end = stop if fault.stop_after is None else min(stop, start + fault.stop_after)
        at = start
        while at < end:
            n = min(64 if fault.trickle_s else PIECE_BYTES, end - at)
            if fault.flip_at is not None and at <= start + fault.flip_at < at + n:
                data = bytearray(os.pread(file.fileno(), n, at))
                data[start + fault.flip_at - at] ^= 0xFF
                self.wfile.write(data)
            else:
                self.connection.sendfile(file, at, n)
            at += n
            self.plan.count(n)
            time.sleep(fault.trickle_s)
        if end < stop:
            self._leave(fault)

    def _leave(self, fault: Fault) -> None:
        if fault.stall:
            self.connection.settimeout(60)
            with suppress(OSError):
                self.connection.recv(1)  # nothing comes until the client leaves
        if fault.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def shutdown_request(self, request: Any) -> None:
        """No polite end before the close: a reset has to be one."""
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error of the server."""


@contextmanager
def serving(
    folder: Path, *, rate_bytes_per_s: float = 0.0, tls: ssl.SSLContext | None = None
) -> Iterator[Server]:
    """A server of the files in ``folder`` on 127.0.0.1."""
    plan = Server(folder, rate_bytes_per_s=rate_bytes_per_s, scheme="https" if tls else "http")
    handler = type("Handler", (_Handler,), {"plan": plan})
    listener = _Listener(("127.0.0.1", 0), handler)
    plan.port = listener.server_address[1]
    if tls is not None:
        listener.socket = tls.wrap_socket(
            listener.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield plan
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


@contextmanager
def sending(answer: Callable[[], Iterable[bytes]]) -> Iterator[str]:
    """A server of raw bytes: each request is sent what ``answer()`` yields until its client leaves.

    Gives its address, ``http://127.0.0.1:PORT``.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                for piece in answer():
                    connection.sendall(piece)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=float, default=0.0, metavar="MB_PER_S")
    arguments = parser.parse_args()
    with serving(arguments.folder, rate_bytes_per_s=arguments.rate * 1e6) as server:
        print(server.port, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
