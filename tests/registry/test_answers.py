"""Answers without an end, or byte by byte: each ends by a limit, and the error says which."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds4q.registry import answers, hub, remote, transfer
from ds4q.registry.errors import HubError, TransferError
from ds4q.registry.fetch import Wanted, fetch
from ds4q.registry.hub import look_up
from ds4q.registry.remote import Remote, TryAgain
from tests.checks import check_refused
from tests.registry.server import sending

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
LATE_HEAD, LATE_BODY = "no whole head of an answer in 0.2 s", "no whole piece of its body in 0.2 s"
TOO_MUCH = "more than 256 KiB without a whole"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up in a fraction of the time."""
    monkeypatch.setattr(remote, "HEAD_S", 0.2)
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(transfer, "PAUSE_S", 0.001)


def drip(*before: bytes) -> Iterator[bytes]:
    """A byte now and then, for 20 s: less than any time-out of a socket lies between."""
    yield from before
    for _ in range(1000):
        yield b"x"
        time.sleep(0.02)


Answers = dict[str, tuple[Callable[[], Iterator[bytes]], str]]
DRIPPING: Answers = {
    "status": (lambda: drip(), LATE_HEAD),
    "header": (lambda: drip(OK, b"X-Slow: "), LATE_HEAD),
    "chunk-size": (lambda: drip(CHUNKED, b"5;"), LATE_BODY),
    "trailer": (lambda: drip(CHUNKED, b"0\r\n"), LATE_BODY),
}
ENDLESS: Answers = {
    "headers": (lambda: chain([OK], repeat(b"X-A: b\r\n" * 100)), "more than 100 headers"),
    "one-header": (lambda: chain([OK, b"X: "], repeat(b"x" * 4096)), "more than 65536 bytes"),
    "no-headers": (lambda: chain([OK], repeat(b"no field\r\n" * 100)), TOO_MUCH),
    "100-continue": (lambda: repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 50), TOO_MUCH),
    "trailers": (lambda: chain([CHUNKED, b"0\r\n"], repeat(b"X-A: b\r\n" * 100)), TOO_MUCH),
}


def check_given_up(answer: Callable[[], Iterator[bytes]], says: str) -> None:
    with sending(answer) as url:
        lane = Remote(f"{url}/a.fp4", {}).lane()

        def read_all() -> None:
            found = lane.open(0, 10, "")
            while found.read(100):
                pass

        with pytest.raises(TryAgain, match=says):
            read_all()
        lane.reset()


@pytest.mark.parametrize("size", [b"-5", b"-" + b"f" * 400])
def test_an_impossible_length_of_a_chunk_is_another_try(size: bytes) -> None:
    check_given_up(lambda: iter([CHUNKED, size + b"\r\nhello\r\n"]), "length of a chunk")


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("name", DRIPPING)
def test_an_answer_that_drips_holds_no_lane(name: str) -> None:
    check_given_up(*DRIPPING[name])


@pytest.mark.parametrize("name", ENDLESS)
def test_an_answer_without_end_holds_no_lane(name: str) -> None:
    check_given_up(*ENDLESS[name])


@pytest.mark.usefixtures("soon")
def test_a_proxy_that_drips_holds_no_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "nowhere")
    with sending(lambda: drip(b"HTTP/1.1 200 OK\r\nX: ")) as url:
        monkeypatch.setenv("https_proxy", url)
        with pytest.raises(TryAgain, match=LATE_HEAD):
            Remote("https://example.invalid/a.fp4", {}).lane().open(0, 10, "")


def test_redirects_share_the_time_of_one_head(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter(range(0, 1000, 9))
    clock = SimpleNamespace(monotonic=lambda: float(next(now_s)))
    monkeypatch.setattr(answers, "time", clock)
    body = b"HTTP/1.1 302 Found\r\nLocation: /a.fp4?again\r\nContent-Length: 0\r\n\r\n"
    with sending(lambda: iter([body])) as url, pytest.raises(TryAgain, match="no whole head"):
        Remote(f"{url}/a.fp4", {}).lane().open(0, 10, "")


@pytest.mark.usefixtures("soon")
def test_a_fetch_that_meets_only_drips_names_the_server(tmp_path: Path) -> None:
    with sending(lambda: drip(OK, b"X-Slow: ")) as url:
        wanted = Wanted(f"{url}/a.fp4", 10, None)
        check_refused(
            TransferError,
            lambda: fetch(wanted, tmp_path / "a.fp4"),
            path=f"{url}/a.fp4",
            says=[LATE_HEAD],
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("soon")
def test_a_body_that_drips_ends_with_the_count_of_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SLOW_AFTER_S", 0.05)
    monkeypatch.setattr(transfer, "TRIES", 3)
    monkeypatch.setattr(remote, "HEAD_S", 30.0)
    monkeypatch.setattr(remote, "TIMEOUT_S", 30.0)
    whole = OK + b"Content-Length: 1000\r\n\r\n"
    with sending(lambda: drip(whole)) as url:
        wanted = Wanted(f"{url}/a.fp4", 1000, None)
        check_refused(
            TransferError,
            lambda: fetch(wanted, tmp_path / "a.fp4"),
            path=f"{url}/a.fp4",
            says=["slow: "],
        )


def test_a_hub_that_drips_or_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MAX_ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.3)
    for answer, says in (
        (lambda: drip(OK, b"Content-Type: application/json\r\n\r\n"), "no whole answer in 0.3 s"),
        (lambda: chain([OK, b"\r\n"], repeat(b" " * 65536)), "more than 1 MiB"),
    ):
        with sending(answer) as url:
            monkeypatch.setenv("HF_ENDPOINT", url)
            error = check_refused(HubError, lambda: look_up("owner/name", None), says=[says])
            assert says == "more than 1 MiB" or url in str(error)
