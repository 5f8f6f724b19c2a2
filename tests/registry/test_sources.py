"""A configured server is asked, its answer is kept for a day, and what fails is told."""

from __future__ import annotations

import hashlib
import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ds4q.registry import sources
from ds4q.registry.entries import check_document, load_registry, update_registry
from ds4q.registry.errors import DocumentError, SourceError
from ds4q.registry.schema import MAX_DOCUMENT_BYTES
from tests.checks import check_refused
from tests.registry.documents import document, entry, raw

COPY = "registry.cache.json"


class Site:
    """A server whose next answers a test sets; it counts and keeps what it was asked."""

    def __init__(self) -> None:
        self.body = raw(document({"theirs": entry()}))
        self.status = 200
        self.headers: dict[str, str] = {}
        self.asked: list[dict[str, str]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(dict(self.headers))
                self.send_response(site.status)
                headers = {"Content-Length": str(len(site.body))} | site.headers
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(site.body)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/r.json"


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS4Q_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(sources.URL_VARIABLE, raising=False)
    monkeypatch.delenv(sources.NO_FETCH_VARIABLE, raising=False)
    return tmp_path / "home"


@pytest.fixture
def configured(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv(sources.URL_VARIABLE, site.url)
    return site


def age(home: Path, seconds: float) -> None:
    """Have the copy be this old; less than 0 is the future."""
    kept = json.loads((home / COPY).read_text())
    kept["fetched_at"] = int((time.time() - seconds) * 1000)
    (home / COPY).write_text(json.dumps(kept))


def test_nothing_is_asked_where_nothing_is_configured(site: Site) -> None:
    assert load_registry().origin == sources.BUNDLED
    assert site.asked == []


def test_a_url_that_is_asked_for_is_read_without_credentials(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    registry = load_registry(site.url)
    assert list(registry.entries) == ["theirs"]
    assert registry.origin == site.url
    (asked,) = site.asked
    assert "Authorization" not in asked
    assert "hf_secret" not in str(asked)


def test_headers_that_nobody_knows_do_no_harm(site: Site) -> None:
    site.headers = {"RateLimit": '"default";r=50;t=30, "x";;=', "RateLimit-Policy": "\xff;;;"}
    assert list(load_registry(site.url).entries) == ["theirs"]


def test_a_copy_serves_for_a_day_and_then_the_server_is_asked_again(
    configured: Site, home: Path
) -> None:
    assert load_registry().origin == configured.url
    assert load_registry().origin == f"last copy of {configured.url}"
    assert len(configured.asked) == 1
    configured.body = raw(document({"newer": entry()}))
    for seconds in (25 * 3600, -60):  # too old, or from the future
        age(home, seconds)
        assert list(load_registry().entries) == ["newer"]
    assert len(configured.asked) == 3


def test_update_asks_whatever_is_kept(configured: Site) -> None:
    load_registry()
    assert list(update_registry().entries) == ["theirs"]
    assert list(update_registry(configured.url).entries) == ["theirs"]
    assert len(configured.asked) == 3


def test_the_copy_of_another_url_is_not_used(
    configured: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_registry()
    monkeypatch.setenv(sources.URL_VARIABLE, configured.url + "?2")
    assert load_registry().origin == configured.url
    assert len(configured.asked) == 2
    assert load_registry().origin == f"last copy of {configured.url}"


def test_a_server_that_fails_is_told_and_the_next_best_serves(configured: Site, home: Path) -> None:
    configured.status = 503
    registry = load_registry()
    assert registry.origin == sources.BUNDLED
    (warning,) = registry.warnings
    assert warning.startswith(f"{configured.url}: cannot get the registry: found HTTP 503 ")
    assert warning.endswith("; using the bundled registry")
    configured.status = 200
    load_registry()
    age(home, 48 * 3600)
    configured.status = 404
    registry = load_registry()
    assert registry.origin == f"stale copy of {configured.url}"
    assert "404" in registry.warnings[0]
    assert registry.warnings[0].endswith("; using the last copy")


def test_update_reports_a_failure_and_keeps_the_copy(configured: Site, home: Path) -> None:
    load_registry()
    before = (home / COPY).read_bytes()
    configured.status = 500
    check_refused(SourceError, update_registry, path=configured.url, says=["500"])
    configured.status, configured.body = 200, b"<html>sign in</html>"
    check_refused(DocumentError, update_registry, path=configured.url, says=["not JSON", "<html>"])
    assert (home / COPY).read_bytes() == before
    assert [path.name for path in home.iterdir()] == [COPY]


def test_an_answer_that_is_no_registry_is_refused_or_passed_over_with_a_warning(
    configured: Site,
) -> None:
    configured.body = b"<html>sign in</html>"
    check_refused(DocumentError, lambda: load_registry(configured.url), says=["not JSON"])
    registry = load_registry()
    assert registry.origin == sources.BUNDLED
    assert "not JSON" in registry.warnings[0]
    configured.body = raw(document({"theirs": entry(file="../x")}))
    check_refused(DocumentError, lambda: load_registry(configured.url), says=["plain file name"])


def test_an_answer_that_ends_early_is_not_believed(site: Site) -> None:
    site.headers = {"Content-Length": str(len(site.body) + 7)}
    found = f"{len(site.body)} of {len(site.body) + 7} bytes"
    check_refused(SourceError, lambda: load_registry(site.url), path=site.url, says=[found])


def test_an_answer_without_end_is_cut_off(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.body = b" " * (MAX_DOCUMENT_BYTES + 2)
    check_refused(DocumentError, lambda: load_registry(site.url), says=["longer than"])


def test_a_server_that_is_not_there_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        url = f"http://127.0.0.1:{there.getsockname()[1]}/r.json"
    check_refused(SourceError, lambda: load_registry(url), path=url, says=["Connection refused"])


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_that_takes_too_long_is_given_up(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "TIMEOUT_S", 0.3)
    left = threading.Event()

    def trickle() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(head)
            for _ in range(400):  # 20 s, a byte at a time
                connection.sendall(b"x")
                time.sleep(0.05)
            return
        left.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/r.json"
        serving = threading.Thread(target=trickle)
        serving.start()
        check_refused(SourceError, lambda: load_registry(url), says=["no whole answer in 0.3 s"])
        serving.join()
    assert left.is_set()  # the client hung up before the server was done


SECRETS = ("hunter2", "SECRET")


def test_a_secret_of_a_url_is_neither_told_nor_kept(
    site: Site, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sources.URL_VARIABLE, site.url + "?token=SECRET")
    said = [load_registry(offline=True).warnings, load_registry().origin, load_registry().origin]
    assert said[1:] == [site.url, f"last copy of {site.url}"]
    kept = (home / COPY).read_text()
    assert stat.S_IMODE((home / COPY).stat().st_mode) == 0o600
    age(home, 48 * 3600)
    site.body = raw(document({"theirs": entry(file="../x")}))
    said.append(load_registry().warnings)
    site.status = 404
    said.append(load_registry().warnings)
    said.append(str(check_refused(SourceError, update_registry, path=site.url)))
    assert not any(secret in str(words) for secret in SECRETS for words in [kept, *said])


def test_a_url_with_a_password_is_refused_without_telling_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = site.url.replace("://", "://user:hunter2@") + "?token=SECRET"
    monkeypatch.setenv(sources.URL_VARIABLE, whole)
    for call in (update_registry, lambda: load_registry(whole)):
        error = check_refused(SourceError, call, path=site.url, says=["must not hold credentials"])
        assert not any(secret in str(error) for secret in SECRETS)
    for other in (whole.replace("http:", "ftp:"), "http://user:hunter2@[::1/r.json?token=SECRET"):
        error = check_refused(SourceError, partial(load_registry, other))
        assert not any(secret in str(error) for secret in SECRETS)
    for offline in (True, False):
        registry = load_registry(offline=offline)
        assert registry.origin == sources.BUNDLED
        assert not any(secret in str(registry.warnings) for secret in SECRETS)
    assert site.asked == []


@pytest.mark.parametrize("where", [None, "dspark"])
def test_a_secret_that_an_entry_holds_is_not_told(where: str | None, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    bad = {"repo": "http://user:hunter2@host/a b?token=SECRET"}
    models = {"theirs": entry(**(bad if where is None else {where: [bad]}))}
    path.write_bytes(raw(document(models)))
    error = check_refused(DocumentError, lambda: load_registry(str(path)), says=["theirs", "host"])
    problems = check_document(path.read_bytes(), str(path))
    assert not any(secret in str(error) + str(problems) for secret in SECRETS)


def test_offline_opens_no_connection(configured: Site) -> None:
    registry = load_registry(offline=True)
    assert registry.origin == sources.BUNDLED
    assert "no copy yet" in registry.warnings[0]
    check_refused(
        SourceError,
        lambda: load_registry(configured.url, offline=True),
        path=configured.url,
        says=["does not call out", "ds4q registry update"],
    )
    assert configured.asked == []
    update_registry()
    assert list(load_registry(offline=True).entries) == ["theirs"]
    assert load_registry(configured.url, offline=True).origin == f"last copy of {configured.url}"
    assert len(configured.asked) == 1


def test_offline_takes_an_old_copy(configured: Site, home: Path) -> None:
    update_registry()
    age(home, 48 * 3600)
    assert load_registry(offline=True).origin == f"stale copy of {configured.url}"
    assert len(configured.asked) == 1


@pytest.mark.parametrize(
    "kept",
    [
        b"{",
        b"[]",
        b'{"url_sha256": "x"}',
        b'{"url_sha256": "DIGEST", "fetched_at": "now", "registry": {}}',
        b'{"url_sha256": "DIGEST", "fetched_at": 5, "registry": 5}',
        b'{"url_sha256": "DIGEST", "fetched_at": 5, "registry": {"models": 1}}',
    ],
)
def test_a_copy_that_cannot_be_used_is_as_none(configured: Site, home: Path, kept: bytes) -> None:
    home.mkdir()
    digest = hashlib.sha256(configured.url.encode()).hexdigest()
    (home / COPY).write_bytes(kept.replace(b"DIGEST", digest.encode()))
    assert load_registry(offline=True).origin == sources.BUNDLED
    assert load_registry().origin == configured.url
    assert load_registry().origin == f"last copy of {configured.url}"


def test_a_copy_that_cannot_be_kept_is_told(configured: Site, home: Path) -> None:
    home.write_text("not a folder")
    registry = load_registry()
    assert list(registry.entries) == ["theirs"]
    assert registry.warnings[0].endswith("the next command has to download it again")


def test_update_without_a_url_says_where_to_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused(SourceError, update_registry, says=["set DS4Q_REGISTRY_URL"])
    monkeypatch.setenv(sources.URL_VARIABLE, "/some/file.json")
    check_refused(SourceError, update_registry, says=["/some/file.json"])
