"""Range requests: redirects, tokens, proxies, local files, what is refused."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds4q.registry.errors import RefusedError
from ds4q.registry.remote import MAX_HOPS, HttpLane, Remote, TryAgain, shown
from tests.checks import check_refused
from tests.registry.server import Fault, Server, serving

DATA = bytes(range(256)) * 40
TOKEN = {"Authorization": "Bearer secret"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "a.fp4").write_bytes(DATA)
    with serving(tmp_path) as running:
        yield running


def read(url: str, headers: dict[str, str], start: int = 0, stop: int = len(DATA)) -> bytes:
    lane = Remote(url, headers).lane()
    try:
        answer = lane.open(start, stop, "")
        parts = []
        while part := answer.read(1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        lane.reset()


def test_a_range_is_read(server: Server) -> None:
    lane = Remote(server.url("a.fp4"), {}).lane()
    answer = lane.open(10, 300, "")
    assert (answer.start, answer.stop, answer.total, answer.ranged) == (10, 300, len(DATA), True)
    assert answer.read(4) == DATA[10:14]
    assert lane.open(20, 30, answer.validator).read(100) == DATA[20:30]
    lane.reset()


def test_a_connection_is_used_again(server: Server) -> None:
    opened: list[Any] = []
    lane = HttpLane(Remote(server.url("a.fp4"), {}))
    for start in (0, 10, 20):
        answer = lane.open(start, start + 10, "")
        while answer.read(10):
            pass
        opened.append(lane._socket)
    lane.reset()
    assert opened[0] is opened[1] is opened[2]


def test_a_token_stays_with_its_host(server: Server, tmp_path: Path) -> None:
    with serving(tmp_path) as other:
        server.fault = lambda request: Fault(location=other.url("a.fp4?signature=x"))
        assert read(server.url("a.fp4"), TOKEN) == DATA
        assert server.requests[0].headers["authorization"] == "Bearer secret"
        assert "authorization" not in other.requests[0].headers


def test_a_token_goes_along_on_its_host(server: Server) -> None:
    server.script(Fault(location="/a.fp4?again", status=307))
    assert read(server.url("a.fp4"), TOKEN) == DATA
    assert [r.headers["authorization"] for r in server.requests] == ["Bearer secret"] * 2


def test_a_redirect_is_asked_once_until_it_expires(server: Server, tmp_path: Path) -> None:
    with serving(tmp_path) as other:
        server.fault = lambda request: Fault(location=other.url(f"a.fp4?n={request.number}"))
        lane = Remote(server.url("a.fp4"), {}).lane()
        for start in (0, 10, 20):
            lane.open(start, start + 10, "").read(10)
        assert (len(server.requests), len(other.requests)) == (1, 3)
        other.fault = lambda request: Fault(status=403 if request.path.endswith("n=0") else 0)
        assert lane.open(30, 40, "").read(10) == DATA[30:40]
        assert (len(server.requests), len(other.requests)) == (2, 5)
        lane.reset()


def test_redirects_in_a_circle_end(server: Server) -> None:
    server.fault = lambda request: Fault(location=server.url("a.fp4"))
    with pytest.raises(TryAgain, match="redirects"):
        read(server.url("a.fp4"), {})
    assert len(server.requests) == MAX_HOPS


@pytest.mark.parametrize(
    "to", ["ftp://127.0.0.1/a", "file:///etc/passwd", "javascript:1", "http://[::1"]
)
def test_a_redirect_leads_to_servers_only(to: str, server: Server) -> None:
    server.fault = lambda request: Fault(location=to)
    error = check_refused(RefusedError, lambda: read(server.url("a.fp4?key=1"), {}))
    assert error.path == server.url("a.fp4")


def test_a_redirect_does_not_leave_https(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(self: HttpLane, url: str, headers: dict[str, str]) -> Any:
        leads = {"Location": "http://example.invalid/a"}
        return SimpleNamespace(status=302, getheader=leads.get, close=lambda: None)

    monkeypatch.setattr(HttpLane, "_send", sent)
    lane = Remote("https://example.invalid/a", {}).lane()
    check_refused(RefusedError, lambda: lane.open(0, 1, ""), says=["no secure way"])


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/a",
        "/a/path",
        "http:///a",
        "http://host:0/a",
        "http://host:99999/a",
        "http://host/a b",
        "http://host/a\r\nX: y",
        "http://höst/a",
        "http://[::1/a",
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    check_refused(RefusedError, lambda: Remote(url, {}))


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    error = check_refused(RefusedError, lambda: Remote("http://me:secret@host/a?sig=1", {}))
    assert "secret" not in str(error)
    assert shown("http://me:secret@host:8/a?sig=1") == "http://host:8/a"


def test_a_proxy_of_the_environment_is_used(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://me:pa%20ss@127.0.0.1:{server.port}")
    monkeypatch.setenv("no_proxy", "nowhere")
    assert read("http://example.invalid/a.fp4", {}) == DATA
    request = server.requests[0]
    assert request.path == "http://example.invalid/a.fp4"
    assert request.headers["host"] == "example.invalid"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert read(server.url("a.fp4"), {}) == DATA
    assert server.requests[1].path == "/a.fp4"


def test_a_proxy_is_given_its_credentials(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://me:pa%20ss@127.0.0.1:{server.port}")
    monkeypatch.setenv("no_proxy", "nowhere")
    read("http://example.invalid/a.fp4", {})
    assert server.requests[0].headers["proxy-authorization"] == "Basic bWU6cGEgc3M="


@pytest.mark.parametrize(
    "proxy",
    ["http://h:99999", "http://h:" + "1" * 5000, "http://[", "h:x", "socks5://h:1", "http://"],
)
def test_a_proxy_that_cannot_be_is_named(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", "nowhere")
    call = partial(read, "http://example.invalid/a.fp4", {})
    check_refused(RefusedError, call, says=["http_proxy", "http://HOST:PORT"])


def test_a_server_that_asks_for_time_is_heard(server: Server) -> None:
    server.fault = lambda request: Fault(status=429, headers=(("Retry-After", "7"),))
    with pytest.raises(TryAgain) as caught:
        read(server.url("a.fp4"), {})
    assert caught.value.after_s == 7.0


@pytest.mark.parametrize("status", [401, 403, 404, 410, 204])
def test_a_refusal_is_final(status: int, server: Server) -> None:
    server.fault = lambda request: Fault(status=status)
    error = check_refused(RefusedError, lambda: read(server.url("a.fp4"), TOKEN))
    assert f"HTTP {status}" in str(error)
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH-2"),
        (b"HTTP/1.1 503 \x1b[31m\x07\0\r\n\r\n", "HTTP 503 \\x1b[31m\\x07\\x00"),
        (b"\x1b[31mHTTP\r\n", "\\x1b[31mHTTP"),
    ],
)
def test_an_answer_that_is_none_is_told_without_escapes(raw: bytes, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(raw)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TryAgain) as caught:
            read(f"http://127.0.0.1:{listener.getsockname()[1]}/a.fp4", {})
        thread.join()
    assert says in str(caught.value)
    assert str(caught.value).isprintable()


# --- local files ------------------------------------------------------------------------------


def test_a_local_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a b%.fp4"
    path.write_bytes(DATA)
    assert read(path.as_uri(), TOKEN, 5, 99) == DATA[5:]
    assert read(f"file://localhost{path.as_uri()[7:]}", {}) == DATA


def test_what_is_no_local_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for url in (
        (tmp_path / "absent").as_uri(),
        tmp_path.as_uri(),
        (tmp_path / "pipe").as_uri(),
        "file://elsewhere/a",
        "file:///a%00b",
    ):
        check_refused(RefusedError, partial(read, url, {}))
