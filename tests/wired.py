"""HTTP in this process without sockets: what a server sends to a lane, and requests to the app.

``Wired`` names a URL whose server sends given bytes, whatever is asked. ``App`` gives requests to
the application of ``ds4q serve`` with an engine that answers by a script.
"""

from __future__ import annotations

import asyncio
import http.client
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI

from ds4q.registry.answers import Response
from ds4q.registry.remote import HttpLane, Remote
from ds4q.runtime.serve.app import make_app
from ds4q.runtime.serve.documents import ErrorDocument
from ds4q.runtime.serve.refusal import Refusal
from ds4q.runtime.serve.scheduler import Scheduler
from ds4q.runtime.serve.service import Service
from ds4q.runtime.text.tokenizer import Tokenizer
from tests.runtime.serve.scripted import ScriptedEngine
from tests.runtime.serve.served import MODEL, PATIENCE_S, metadata

HOST = "http://localhost/a.fp4"


class _Wire:
    """The socket of a connection whose other end has sent all it ever will."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, mode: str, size: int = -1) -> io.BufferedReader:
        return io.BufferedReader(io.BytesIO(self._raw))

    def sendall(self, data: bytes) -> None:
        pass

    def settimeout(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


class _WiredLane(HttpLane):
    def __init__(self, remote: Remote, answers: Iterator[bytes]) -> None:
        super().__init__(remote)
        self._answers = answers

    def _connect(self, url: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("localhost")
        limited: Any = partial(Response, limits=self._limits)
        connection.response_class = limited
        wire: Any = _Wire(next(self._answers))
        connection.sock = wire
        return connection


class Wired(Remote):
    """A URL whose server sends ``answers``, one a connection, the last of them for ever."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__(HOST, {})
        self._given = answers

    def lane(self) -> HttpLane:
        def each() -> Iterator[bytes]:
            yield from self._given
            while True:
                yield self._given[-1]

        return _WiredLane(self, each())


Headers = Sequence[tuple[bytes, bytes]]


class App:
    """The application, asked in a loop of its own."""

    def __init__(self, app: FastAPI, loop: asyncio.AbstractEventLoop) -> None:
        self._app = app
        self._loop = loop

    def post(self, path: str, body: bytes) -> None:
        """Send a body; an answer of an error's form raises ``Refusal``."""
        self._ask("POST", path.encode(), [(b"host", b"localhost")], body)

    def request(self, head: bytes) -> None:
        """Send a request without a body, as uvicorn hands one over whose head is legal."""
        first, *lines = head.split(b"\r\n")
        method, _, target = first.partition(b" ")
        headers = []
        for line in lines:
            name, colon, value = line.partition(b":")
            if colon:
                headers.append((name.strip().lower(), value.strip()))
        self._ask(method.decode("latin-1").upper(), target.partition(b" ")[0], headers, b"")

    def _ask(self, method: str, target: bytes, headers: Headers, body: bytes) -> None:
        path, _, query = target.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": list(headers),
            "client": ("127.0.0.1", 5000),
            "server": ("127.0.0.1", 8000),
        }
        status, answer = self._loop.run_until_complete(self._answer(scope, body))
        if status >= 500:
            raise AssertionError(f"HTTP {status}: {answer[:500]!r}")
        if status >= 400:
            if method != "HEAD":
                ErrorDocument.model_validate_json(answer)
            raise Refusal(status, answer.decode())

    async def _answer(self, scope: dict[str, Any], body: bytes) -> tuple[int, bytes]:
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        status, answer = 0, b""

        async def receive() -> Any:
            if not unread:
                await asyncio.Event().wait()  # the client stays
            return unread.pop()

        async def send(message: Any) -> None:
            nonlocal status, answer
            status = message.get("status", status)
            answer += message.get("body", b"")

        await self._app(scope, receive, send)
        return status, answer


@contextmanager
def wired_app(tools: bool = True) -> Iterator[App]:
    """The application with a scripted engine that is ready."""
    described = metadata(tools=tools)
    tokenizer = Tokenizer.from_metadata(described)
    assert tokenizer is not None
    engine = ScriptedEngine(default=b"Hello <b>")
    service = Service(
        lambda report: engine,
        lambda made, told: Scheduler(
            made, queue=64, concurrent=8, prefix_cache_bytes=1 << 20, told=told
        ),
    )
    app = make_app(service, model_name=MODEL, tokenizer=tokenizer, metadata=described)
    loop = asyncio.new_event_loop()
    service.start()
    try:
        assert service.wait(PATIENCE_S)
        yield App(app, loop)
    finally:
        service.close()
        loop.close()
