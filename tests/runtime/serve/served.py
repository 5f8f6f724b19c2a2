"""A real server on a port of its own, in a thread, with an engine that answers by a script."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ds4q.quantize.encoding import Encoding
from ds4q.runtime.serve.app import make_app
from ds4q.runtime.serve.limits import Limits
from ds4q.runtime.serve.listening import listen, url
from ds4q.runtime.serve.scheduler import Scheduler
from ds4q.runtime.serve.server import Server
from ds4q.runtime.serve.service import Service
from ds4q.runtime.text.pieces import DSML
from ds4q.runtime.text.tokenizer import Tokenizer
from tests.runtime.serve.scripted import EOS, ScriptedEngine

TINY = Path(__file__).parents[2] / "data" / "ds4-tiny"
MODEL = "scripted"
DSML_ID = 262
PATIENCE_S = 300.0  # only broken code waits so long
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # not used, and fast: no certificates are read


def metadata(*, tools: bool = True) -> dict[str, Any]:
    """Of ds4-tiny, whose tokens are bytes; ``tools`` adds the control token that tools need."""
    tokenizer = json.loads((TINY / "tokenizer.json").read_text("utf-8"))
    if tools:
        tokenizer["added_tokens"].append(
            {**tokenizer["added_tokens"][0], "id": DSML_ID, "content": DSML}
        )
    return {
        "config": json.loads((TINY / "config.json").read_text("utf-8")),
        "tokenizer": json.dumps(tokenizer, ensure_ascii=False),
        "generation_config": {"eos_token_id": EOS, "temperature": 0},
    }


class Served:
    """What tests ask a running server with.

    Attributes
    ----------
    base : its address
    http : a client of it
    thread : in which it runs
    listening : its socket
    """

    def __init__(
        self,
        base: str,
        engine: ScriptedEngine,
        service: Service,
        server: Server,
        thread: threading.Thread,
        listening: socket.socket,
        key: str | None,
    ) -> None:
        self.base = base
        self.engine = engine
        self.service = service
        self.server = server
        self.thread = thread
        self.listening = listening
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=base, headers=headers, timeout=PATIENCE_S, verify=NO_TLS)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.base.removeprefix("http://").rpartition(":")
        return host, int(port)

    def await_closed(self) -> None:
        """Return once the server takes no connection any more."""
        for _ in range(int(PATIENCE_S / 0.01)):
            try:
                socket.create_connection(self.address, timeout=PATIENCE_S).close()
            except ConnectionRefusedError:
                return
            threading.Event().wait(0.01)
        raise AssertionError("the server still listens")

    def script(self, answer: str | bytes) -> None:
        """Answer every chat with these bytes."""
        self.engine.default = list(answer.encode() if isinstance(answer, str) else answer)

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        """Ask without reasoning."""
        body = {"messages": [{"role": "user", "content": content}], **fields}
        body.setdefault("thinking", {"type": "disabled"})
        return self.http.post("/v1/chat/completions", json=body)

    def raw(self, request: bytes) -> bytes:
        """All that the server sends back to these bytes, until it closes the connection."""
        with socket.create_connection(self.address, timeout=PATIENCE_S) as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(65536), b""))


def one_answer(connection: socket.socket) -> bytes:
    """The bytes of the next answer on a connection, which must tell its length."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += _some(connection)
    head = found[: found.index(b"\r\n\r\n")].lower()
    length = int(head.partition(b"content-length: ")[2].split()[0])
    while len(found) < len(head) + 4 + length:
        found += _some(connection)
    return found


def _some(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    assert data, "the connection was closed inside an answer"
    return data


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream that ended as it should."""
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines), response.text
    assert lines[-1] == "data: [DONE]", response.text
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextmanager
def serving(
    engine: ScriptedEngine | None = None,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    encoding: Encoding | None = None,
    tools: bool = True,
    described: Mapping[str, Any] | None = None,
    queue: int = 64,
    concurrent: int = 8,
    prefix_cache_bytes: int = 1 << 20,
    load: Callable[[Callable[[int, int], None]], Any] | None = None,
    wait: bool = True,
    about: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """A server with ``engine``; ``load`` replaces how it is loaded, ``described`` the metadata."""
    engine = engine or ScriptedEngine()
    described = described or metadata(tools=tools)
    tokenizer = Tokenizer.from_metadata(described)
    assert tokenizer is not None
    service = Service(
        load or (lambda report: engine),
        lambda made, told: Scheduler(
            made,
            queue=queue,
            concurrent=concurrent,
            prefix_cache_bytes=prefix_cache_bytes,
            told=told,
        ),
    )
    app = make_app(
        service,
        model_name=MODEL,
        tokenizer=tokenizer,
        metadata=described,
        limits=limits,
        api_key=api_key,
        encoding=encoding,
        about=about,
    )
    server = Server(app, service)
    listening = listen("127.0.0.1", 0)
    base = url(listening)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    service.start()
    thread.start()
    served = Served(base, engine, service, server, thread, listening, api_key)
    try:
        if wait:
            assert service.wait(PATIENCE_S)
        yield served
    finally:
        served.http.close()
        server.should_exit = True
        thread.join(PATIENCE_S)
        service.close()
    assert not thread.is_alive()
