"""What is checked of every request before an endpoint sees it: key, host, origin."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from ds4q.runtime.serve.limits import Limits, is_loopback
from tests.runtime.serve.served import PATIENCE_S, Served, serving

KEY = "sk-a.b-c_1"
GUARDED = ("/live", "/metrics", "/v1/models", "/v1/models/scripted", "/v1/nothing", "/nothing")
OPEN = ("/", "/health", "/openapi.json", "/docs", "/page/page.css")


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    with serving(api_key=KEY) as served:
        yield served


def bare(served: Served, path: str, **headers: str) -> httpx.Response:
    """A GET with these headers only."""
    return httpx.get(served.base + path, headers=headers, timeout=PATIENCE_S)


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer sk-a.b-c_", f"Bearer {KEY}x", f"Basic {KEY}", KEY],
)
def test_a_key_that_is_missing_or_wrong_is_refused(
    keyed: Served, path: str, header: str | None
) -> None:
    response = bare(keyed, path, **({} if header is None else {"Authorization": header}))
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
    assert ("wrong" in error["message"]) == (header is not None)


def test_a_key_that_is_no_ascii_is_refused(keyed: Served) -> None:
    response = httpx.get(
        keyed.base + "/live", headers=[(b"authorization", b"Bearer \xff\xe9")], timeout=PATIENCE_S
    )
    assert response.status_code == 401


def test_a_request_with_a_wrong_key_reaches_no_model(keyed: Served) -> None:
    before = len(keyed.engine.forwards)
    response = httpx.post(
        keyed.base + "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hi"}]},
        headers={"Authorization": "Bearer wrong"},
        timeout=PATIENCE_S,
    )
    assert (response.status_code, len(keyed.engine.forwards)) == (401, before)


@pytest.mark.parametrize("path", ["/live", "/metrics", "/v1/models", "/v1/models/scripted"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_the_key_opens(keyed: Served, path: str, scheme: str) -> None:
    assert bare(keyed, path, Authorization=f"{scheme} {KEY}").status_code == 200


@pytest.mark.parametrize("path", OPEN)
def test_what_holds_nothing_secret_needs_no_key(keyed: Served, path: str) -> None:
    assert bare(keyed, path).status_code == 200


def test_with_a_key_any_host_is_answered(keyed: Served) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Host": "models.example", "Origin": "http://a.b"}
    assert bare(keyed, "/v1/models", **headers).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil",
        "[",
        "[127.0.0.1",
        "a b",
        "",
        ":8000",
        "evil@127.0.0.1",
        "127.0.0.1#evil.example",
        "127.0.0.1/evil.example",
        "127.0.0.1?evil.example",
        "evil.example\\@127.0.0.1",
        "localhost:abc",
        "localhost:80:80",
    ],
)
def test_without_a_key_another_host_is_refused(served: Served, host: str) -> None:
    """A name that an attacker points to 127.0.0.1 makes a browser take it for the attacker's."""
    response = bare(served, "/v1/models", Host=host)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.2", "[::1]:8000", "[::1]"]
)
def test_without_a_key_this_machine_is_answered(served: Served, host: str) -> None:
    assert bare(served, "/v1/models", Host=host).status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://127.0.0.1:1",
        "x",
        "",
        "http://[",
        "ftp://HOST",
        "//HOST",
        "HOST",
        "http://HOST/",
        "http://evil@HOST",
        "http://HOST#evil.example",
    ],
)
def test_without_a_key_another_site_s_page_is_refused(served: Served, origin: str) -> None:
    origin = origin.replace("HOST", served.base.removeprefix("http://"))
    response = httpx.post(
        served.base + "/v1/completions",
        content='{"prompt": "x"}',
        headers={"Origin": origin, "Content-Type": "text/plain"},
        timeout=PATIENCE_S,
    )
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"


@pytest.mark.parametrize(
    "path", ["/", "/live", "/metrics", "/v1/models", "/health", "/openapi.json"]
)
@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site", "x"])
def test_without_a_key_a_get_for_another_site_s_page_is_refused(
    served: Served, path: str, site: str
) -> None:
    """A browser sends no Origin with an image, a script or a frame."""
    for mode, dest in (("no-cors", "script"), ("navigate", "iframe"), ("no-cors", "document")):
        sent = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
        response = bare(served, path, **sent)
        assert response.status_code == 403, sent
        assert response.json()["error"]["code"] == "origin_not_allowed"


def test_without_a_key_a_link_to_the_page_works_and_so_does_the_page(served: Served) -> None:
    follows = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    for site in ("cross-site", "same-site", "none", "same-origin"):
        assert bare(served, "/", **{"Sec-Fetch-Site": site}, **follows).status_code == 200
    own = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}
    assert bare(served, "/live", **own).status_code == 200
    posted = served.http.post(
        "/v1/completions", headers={"Sec-Fetch-Site": "cross-site", **follows}
    )
    assert posted.status_code == 403


def test_with_a_key_another_site_is_answered(keyed: Served) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Sec-Fetch-Site": "cross-site"}
    assert bare(keyed, "/v1/models", **headers).status_code == 200


def test_without_a_key_the_server_s_own_page_is_answered(served: Served) -> None:
    assert bare(served, "/live", Origin=served.base).status_code == 200
    https = served.base.replace("http:", "https:")  # a proxy on this machine
    assert bare(served, "/live", Origin=https).status_code == 200


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/v1/models", "localhost", 200),
        ("HTTP://127.0.0.1:8000/v1/models/scripted?x=http://a/b", "evil.example", 200),
        ("https://localhost", "localhost", 200),
        ("http://evil.example/v1/models", "localhost", 403),
        ("http://evil@localhost/v1/models", "localhost", 403),
        ("http:///v1/models", "localhost", 403),
        ("ftp://localhost/v1/models", "localhost", 404),
    ],
)
def test_a_target_that_is_a_whole_url_names_the_host_itself(
    served: Served, target: str, host: str, status: int
) -> None:
    head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    assert served.raw(head.encode()).split()[1] == str(status).encode()


def test_a_whole_url_needs_the_key_that_its_path_needs(keyed: Served) -> None:
    head = "GET http://localhost/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert keyed.raw(head.encode()).startswith(b"HTTP/1.1 401 ")


def test_where_everybody_may_come_any_host_is_answered() -> None:
    with serving(limits=Limits(local_only=False)) as served:
        assert bare(served, "/v1/models", Host="models.example").status_code == 200
        assert bare(served, "/v1/models", Origin="http://a.b").status_code == 403


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("a.localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.168.0.1", False),
        ("localhost.example", False),
        ("::ffff:10.0.0.1", False),
    ],
)
def test_loopback_names_are_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(("path", "status"), [("/v1/", 401), ("/page/", 404), ("/health/", 401)])
def test_what_a_path_holds_reaches_no_terminal(
    caplog: pytest.LogCaptureFixture, path: str, status: int
) -> None:
    caplog.set_level("INFO", "ds4q.serve")
    with serving(api_key=KEY) as served:  # its end has all lines written
        bare(served, f"{path}%1b[2J%0d%0a%00%c2%9b%e2%80%ae%7f?%1b%0a")
    lines = [record.getMessage() for record in caplog.records]
    # The server that other tests share may still write the line of their last request.
    (line,) = [each for each in lines if "[2J" in each]
    shown = f"GET {path}\\x1b[2J\\x0d\\x0a\\x00\\x9b\\u202e\\x7f {status}, "
    assert line.startswith(shown)
    assert line.isprintable()


def test_a_bug_s_line_in_the_log_is_one_line(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("ds4q.runtime.serve.serving.Serving.check_model", broken)
    assert bare(served, "/v1/models/%1b[2J%0a").status_code == 500
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert line == "internal error at /v1/models/\\x1b[2J\\x0a"


def test_a_line_of_the_log_is_one_line(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ds4q.serve")
    bare(served, "/v1/x%0aGET%20/v1/forged%20200")
    served.chat("a secret question")
    last = "POST /v1/chat/completions 200, "  # written when the client has its answer already
    for _ in range(int(PATIENCE_S / 0.01)):
        lines = [record.getMessage() for record in caplog.records]
        if any(line.startswith(last) for line in lines):
            break
        threading.Event().wait(0.01)
    assert lines[-1].startswith(last)
    assert any("/v1/x\\x0aGET /v1/forged 200 404" in line for line in lines)
    assert not any("secret" in line for line in lines)
