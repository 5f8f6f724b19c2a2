"""What a server does when much is asked of it, or when those who ask leave; and at its end."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from ds4q.runtime.errors import ExpertReadError, LogitsError
from ds4q.runtime.serve.limits import Limits
from tests.runtime.serve.scripted import ScriptedEngine
from tests.runtime.serve.served import PATIENCE_S, Served, events, serving

CHAT = "/v1/chat/completions"


def body(content: str = "hi", **fields: Any) -> dict[str, Any]:
    """A chat request without reasoning."""
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "thinking": {"type": "disabled"}, **fields}


@contextmanager
def asking(served: Served, **fields: Any) -> Iterator[socket.socket]:
    """A connection on which a request has been sent."""
    raw = json.dumps(body(**fields)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection(served.address, timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + raw)
        yield connection


def until(served: Served, what: Callable[[Any], bool]) -> None:
    """Wait until the scheduler's figures say so; it tells no event of it."""
    scheduler = served.service.scheduler
    assert scheduler is not None
    for _ in range(int(PATIENCE_S / 0.01)):
        if what(scheduler.stats()):
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"in vain: {scheduler.stats()}")


@contextmanager
def busy(served: Served, requests: int) -> Iterator[list[Future[httpx.Response]]]:
    """So many requests under way, none of which can go on before the block is left."""
    with ThreadPoolExecutor(requests) as pool, served.engine.held():
        yield [pool.submit(served.chat, f"busy {n}") for n in range(requests)]


def counted(served: Served, outcome: str) -> float:
    """Chat requests that ended so."""
    name = f'ds4q_requests_total{{endpoint="{CHAT}",outcome="{outcome}"}} '
    lines = served.http.get("/metrics").text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


# --- the queue -----------------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_back() -> None:
    with serving(queue=2, concurrent=1) as served:
        served.script("ok")
        with busy(served, 3) as others:
            until(served, lambda stats: stats.running + stats.waiting == 3)
            refused = served.chat("one too many")
            streamed = served.chat("one too many", stream=True)
        assert [each.result().status_code for each in others] == [200, 200, 200]
        for each in (refused, streamed):
            assert each.status_code == 503
            assert int(each.headers["retry-after"]) >= 1
            assert each.json()["error"]["code"] == "queue_full"
        assert served.chat().status_code == 200
        assert counted(served, "refused_503") == 2


def test_requests_at_once_get_their_own_answers(served: Served) -> None:
    served.engine.default = lambda ids: [token + 1 for token in ids if token < 256]
    words = [f"word {n}" for n in range(32)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda word: served.chat(word, stream=len(word) > 6), words))
    texts = [
        "".join(each["choices"][0]["delta"].get("content", "") for each in events(answer))
        if "event-stream" in answer.headers["content-type"]
        else answer.json()["choices"][0]["message"]["content"]
        for answer in answers
    ]
    assert texts == ["".join(chr(ord(c) + 1) for c in word) for word in words]


def test_two_requests_with_one_beginning_do_not_disturb_each_other(served: Served) -> None:
    served.engine.default = lambda ids: ids[-3:-2]
    first = {"role": "user", "content": "the same beginning"}
    for word in "ab":
        messages = [first, {"role": "assistant", "content": "x"}, {"role": "user", "content": word}]
        request = {"messages": messages, "thinking": {"type": "disabled"}}
        with ThreadPoolExecutor(2) as pool:
            posted = [pool.submit(served.http.post, CHAT, json=request) for _ in range(2)]
        for answer in posted:
            assert answer.result().json()["choices"][0]["message"]["content"] == word


# --- leaving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_queued_costs_nothing(stream: bool) -> None:
    with serving(concurrent=1) as served:
        served.script("ok")
        with busy(served, 1):
            until(served, lambda stats: stats.running == 1)
            with asking(served, content="leaves", stream=stream):
                until(served, lambda stats: stats.waiting == 1)
            until(served, lambda stats: stats.waiting == 0)
        until(served, lambda stats: stats.running == 0)
        fed = [piece for parts in served.engine.forwards for _, piece in parts]
        assert not any(bytes(i for i in piece if i < 256) == b"leaves" for piece in fed)
        until_cancelled(served)
        assert served.chat().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_in_prefill_frees_the_model(stream: bool) -> None:
    with serving() as served:
        with served.engine.held():
            with asking(served, content="x" * 2000, stream=stream):
                served.engine.await_held()
            until_cancelled(served)
        until(served, lambda stats: stats.running == 0)
        assert len(served.engine.forwards) < 2000 // served.engine.batch_tokens
        assert served.engine.live_states == 0
        assert counted(served, "cancelled") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_is_answered_frees_the_model(stream: bool) -> None:
    with serving() as served:
        served.script("never-ending " * 200)
        served.engine.delay_s = 0.02  # a minute in all
        with asking(served, content="x", stream=stream) as connection:
            if stream:
                assert b"200 OK" in connection.recv(65536)
            else:
                until(served, lambda stats: stats.completion_tokens > 3)
        until(served, lambda stats: stats.running == 0)
        until_cancelled(served)
        assert counted(served, "stop") == 0
        served.engine.delay_s = 0
        served.script("ok")
        assert served.chat().status_code == 200


def until_cancelled(served: Served) -> None:
    """Wait until the server has heard that the one client left."""
    for _ in range(int(PATIENCE_S / 0.01)):
        if counted(served, "cancelled"):
            return
        threading.Event().wait(0.01)
    raise AssertionError("nobody noticed")


# --- long waits, and errors ----------------------------------------------------------------------


def test_a_long_wait_is_bridged_by_comments() -> None:
    with serving(limits=Limits(keep_alive_s=0.05)) as served, ExitStack() as stack:
        served.script("ok")
        held = stack.enter_context(ExitStack())
        held.enter_context(served.engine.held())
        request = body("x" * 100, stream=True)
        response = stack.enter_context(served.http.stream("POST", CHAT, json=request))
        lines = response.iter_lines()
        assert any(line == ": keep-alive, 0 of 104 prompt tokens" for line in lines)
        served.engine.await_held()
        served.engine.step()  # a first batch of the prompt
        assert any(line == ": keep-alive, 64 of 104 prompt tokens" for line in lines)
        held.close()
        *_, last, done = [line for line in lines if line.startswith("data: ")]
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"


def test_an_answer_that_takes_too_long_is_given_up() -> None:
    limits = Limits(request_s=2, keep_alive_s=0.01)  # time for a comment, and then none
    with serving(limits=limits) as served, ThreadPoolExecutor(2) as pool:
        with served.engine.held():
            answers = [pool.submit(served.chat, "x", stream=stream) for stream in (False, True)]
            late, streamed = [answer.result() for answer in answers]
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        assert streamed.status_code in (200, 504)
        if streamed.status_code == 504:  # so slow that no comment came before
            assert streamed.json()["error"]["code"] == "timeout"
            return
        last = streamed.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        until(served, lambda stats: stats.running == stats.waiting == 0)


def test_a_client_that_does_not_read_is_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities make an answer of hundreds of kilobytes, more than these sockets hold."""
    monkeypatch.setattr("ds4q.runtime.serve.wire.STALLED_READER_S", 0.1)
    with serving(ScriptedEngine(default=b"abc " * 900)) as served:
        served.engine.delay_s = 0.001  # so that there is more to say when it notices
        raw = json.dumps(body(stream=True, logprobs=True, top_logprobs=20, max_tokens=3500))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
        served.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # as accepted ones
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(served.address)
            connection.sendall((head + raw).encode())
            until_cancelled(served)
        assert counted(served, "length") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_fails_at_once_is_told_by_the_status(served: Served, stream: bool) -> None:
    served.engine.fails = lambda ids: LogitsError(found="nan") if ids[-3:-2] == [33] else None
    try:
        response = served.chat("!", stream=stream)
    finally:
        served.engine.fails = lambda ids: None
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "LogitsError")
    served.script("ok")
    assert served.chat("!").status_code == 200


def test_a_model_that_fails_later_ends_the_stream_with_an_error(served: Served) -> None:
    served.script("abcdef")
    served.engine.fails = lambda ids: (
        ExpertReadError("disk", path="/secret/model.hfq", tensor="w1") if ids[-1:] == [99] else None
    )
    try:
        response = served.chat("?", stream=True)
    finally:
        served.engine.fails = lambda ids: None
    parts = response.text.strip().split("\n\n")
    assert response.status_code == 200
    told = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert "".join(each["choices"][0]["delta"]["content"] for each in told[:-1]) == "abc"
    error = told[-1]["error"]
    assert error["code"] == "ExpertReadError"
    assert "w1" in error["message"]
    assert "/secret" not in error["message"]


@pytest.mark.parametrize(
    ("error", "level", "traced"),
    [
        (ExpertReadError("the file ends early"), "WARNING", False),
        (ExpertReadError("the file ends early"), "INFO", True),
        (IndexError("a bug"), "WARNING", True),
    ],
)
def test_a_failure_is_one_line_of_the_log_and_only_a_bug_has_a_traceback(
    served: Served, caplog: pytest.LogCaptureFixture, error: Exception, level: str, traced: bool
) -> None:
    error.__cause__ = OSError("what it came from")
    caplog.set_level(level, "ds4q.serve")
    served.engine.fails = lambda ids: error
    try:
        assert served.chat("?").status_code == 500
    finally:
        served.engine.fails = lambda ids: None
    (record,) = [each for each in caplog.records if "failed" in each.getMessage()]
    assert str(error) in record.getMessage()
    assert (record.exc_info and record.exc_info[1]) == (error if traced else None)


def test_a_bug_is_an_error_object_and_a_line_in_the_log(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("ds4q.runtime.serve.chat_api.encode_chat", broken)
    response = served.chat()
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error; the server's log has more"
    assert "ZeroDivisionError" in caplog.text


# --- loading, and the end ------------------------------------------------------------------------


def test_while_it_loads_a_server_says_how_far_it_is() -> None:
    told, go_on = threading.Event(), threading.Event()
    engine = ScriptedEngine(default=b"ok")

    def load(report: Callable[[int, int], None]) -> Any:
        report(25, 100)
        told.set()
        assert go_on.wait(PATIENCE_S)
        return engine

    with serving(load=load, wait=False) as served:
        assert told.wait(PATIENCE_S)
        health = served.http.get("/health")
        assert health.status_code == 503
        assert health.json() == {
            "status": "loading",
            "progress": {"done": 25, "total": 100},
            "error": None,
        }
        assert int(health.headers["retry-after"]) >= 1
        refused = served.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
        assert "25 %" in refused.json()["error"]["message"]
        assert served.http.get("/v1/models").json()["data"][0]["context_length"] is None
        live = served.http.get("/live").json()
        assert (live["state"], live["progress"]) == ("loading", [25, 100])
        assert 'ds4q_state{state="loading"} 1.0' in served.http.get("/metrics").text
        go_on.set()
        assert served.service.wait(PATIENCE_S)
        assert served.http.get("/health").status_code == 200
        assert served.chat().status_code == 200


def test_a_server_whose_model_cannot_be_loaded_ends() -> None:
    def load(report: Callable[[int, int], None]) -> Any:
        raise LogitsError("this file is broken")

    with serving(load=load, wait=False) as served:
        assert served.service.wait(PATIENCE_S)
        served.thread.join(PATIENCE_S)
        assert not served.thread.is_alive()
        assert "this file is broken" in str(served.service.error)


def test_at_its_end_a_server_lets_requests_end_and_takes_no_new_ones() -> None:
    with serving() as served:
        served.script("all of it")
        with ThreadPoolExecutor(2) as pool:
            with served.engine.held():
                whole = pool.submit(served.chat, "a")
                stream = pool.submit(served.chat, "b", stream=True)
                until(served, lambda stats: stats.running + stats.waiting == 2)
                served.server.should_exit = True
                served.await_closed()
            answer = whole.result().json()["choices"][0]
            assert answer["message"]["content"] == "all of it"
            deltas = [each["choices"][0]["delta"] for each in events(stream.result())]
            assert "".join(delta.get("content", "") for delta in deltas) == "all of it"
        served.thread.join(PATIENCE_S)
        assert not served.thread.is_alive()


def test_what_does_not_end_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4q.runtime.serve.server.DRAIN_S", 0.2)
    with serving() as served:
        served.script("a long story " * 200)
        served.engine.delay_s = 0.02
        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(served.chat, "a")
            stream = pool.submit(served.chat, "b", stream=True)
            until(served, lambda stats: stats.completion_tokens > 4)
            served.server.should_exit = True
            refused = whole.result()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            last = json.loads(stream.result().text.strip().split("\n\n")[-1].removeprefix("data: "))
            assert last["error"]["code"] == "draining"
        served.thread.join(PATIENCE_S)
        assert not served.thread.is_alive()


def test_a_second_signal_does_not_wait() -> None:
    with serving() as served:
        served.script("a long story " * 200)
        served.engine.delay_s = 0.05
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(served.chat, "a")
            until(served, lambda stats: stats.completion_tokens > 1)
            served.server.handle_exit(15, None)
            served.await_closed()
            served.server.handle_exit(15, None)
            served.thread.join(PATIENCE_S)
            assert not served.thread.is_alive()
            assert served.server.forced
            assert answer.result().status_code == 503
        served.server._captured_signals.clear()  # in a thread nobody raises them again
