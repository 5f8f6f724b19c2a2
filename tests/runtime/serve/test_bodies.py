"""Requests that are wrong: each has a status, an error object that names it, and does no harm."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from ds4q.runtime.serve.documents import ErrorDocument
from ds4q.runtime.serve.limits import Limits
from ds4q.runtime.serve.refusal import Refusal
from tests.runtime.serve.served import PATIENCE_S, Served, one_answer, serving
from tests.wired import wired_app

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error object of a response, which must be what the OpenAPI document says."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    ErrorDocument.model_validate(response.json())
    error: dict[str, Any] = response.json()["error"]
    assert error["message"].isprintable()
    return error


@pytest.fixture(autouse=True)
def _still_answers(served: Served) -> Iterator[None]:
    yield
    served.script("yes")
    assert served.chat().json()["choices"][0]["message"]["content"] == "yes"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("max_tokens", [1]),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", "5"),
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("seed", 1 << 63),
        ("seed", 1.5),
        ("n", 2),
        ("n", 0),
        ("stop", ""),
        ("stop", 3),
        ("stop", ["x", ""]),
        ("stop", ["x"] * 17),
        ("stream", 1),
        ("stream", "true"),
        ("stream_options", {"include_usage": True}),
        ("top_logprobs", 2),
        ("top_logprobs", 21),
        ("logprobs", 1),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("parallel_tool_calls", False),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("thinking", {"type": "auto"}),
        ("thinking", True),
        ("reasoning_effort", "extreme"),
        ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "function", "function": {"name": 'a"b'}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "strict": True}}]),
        ("store", True),
        ("store", 0),
        ("store", 0.0),
        ("parallel_tool_calls", 1),
        ("parallel_tool_calls", 1.0),
        ("tools", [{"type": "function", "function": {"name": "f", "strict": 0}}]),
        ("messages", []),
        ("messages", "hi"),
        ("messages", {}),
        ("model", 5),
    ],
)
def test_a_field_with_a_value_that_cannot_be_is_named(
    served: Served, field: str, value: Any
) -> None:
    response = served.http.post(CHAT, json={"messages": HI, field: value})
    error = error_of(response, 400)
    assert field in (error["param"] or error["message"])
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n": 2}, "unsupported value of n: 2; only 1 is served"),
        ({"logit_bias": {"5": 1}}, "unsupported value of logit_bias: an object; only {} is served"),
        ({"tool_choice": "required"}, "tool_choice: should be 'auto' or 'none', not \"required\""),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.type: should be 'text' or 'json_object', not \"json_schema\"",
        ),
    ],
)
def test_what_is_not_done_is_told_as_such(
    served: Served, fields: dict[str, Any], says: str
) -> None:
    error = error_of(served.chat("hi", **fields), 400)
    assert (error["message"], error["code"]) == (says, "unsupported_value")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages: should not be empty"),
        ({"stop": ""}, "stop: should not be empty"),
        ({"stop": ["x"] * 17}, "stop: should have at most 16, not a list of 17"),
        ({"thinking": True}, "thinking: should be an object, not true"),
        ({"stream_options": 5}, "stream_options: should be an object, not 5"),
        ({"response_format": "text"}, 'response_format: should be an object, not "text"'),
        ({"tools": ["x"]}, 'tools[0]: should be an object, not "x"'),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters: should be an object, not a list of 0",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict: should be false, not true",
        ),
    ],
)
def test_what_a_value_should_be_is_told_in_words_of_json(
    served: Served, fields: dict[str, Any], says: str
) -> None:
    body = {"messages": HI, "stream": True, **fields}
    assert error_of(served.http.post(CHAT, json=body), 400)["message"] == says


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ],
)
def test_a_field_that_does_not_go_with_another_is_named(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    error = error_of(served.chat("hi", **fields), 400)
    assert error["param"] == param
    assert error["message"].startswith(param)


def test_half_a_surrogate_pair_is_told_as_such(served: Served) -> None:
    raw = b'{"messages":[{"role":"user","content":"\\ud800"}]}'
    error = error_of(served.http.post(CHAT, content=raw), 400)
    assert "half of a surrogate pair" in error["message"]


LONG = "x" * 20_000


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", CHAT, {"messages": HI, "model": LONG}),
        ("POST", CHAT, {"messages": HI, LONG: 1}),
        ("POST", CHAT, {"messages": HI, "reasoning_effort": LONG}),
        ("POST", TEXT, {"prompt": [10**4000]}),
        ("GET", f"/v1/models/{LONG}", None),
        ("GET", f"/page/{LONG}", None),
        ("GET", f"/{LONG}", None),
        (LONG, CHAT, None),
    ],
)
def test_what_is_long_does_not_come_back_whole(
    served: Served, method: str, path: str, body: Any
) -> None:
    response = served.http.request(method, path, json=body)
    assert 400 <= response.status_code < 500
    assert len(response.content) < 600
    assert "..." in response.text


@pytest.mark.parametrize("header", ["Host", "Origin"])
def test_a_long_name_of_a_site_does_not_come_back_whole(served: Served, header: str) -> None:
    response = served.http.get("/live", headers={header: LONG})
    assert "xxx..." in error_of(response, 403)["message"]
    assert len(response.content) < 600


@pytest.mark.parametrize(
    "field",
    ["functions", "audio", "modalities", "prediction", "min_p", "top_k", "guided_json", "é\n"],
)
def test_a_field_that_is_not_supported_is_refused_by_name(served: Served, field: str) -> None:
    error = error_of(served.chat("hi", **{field: 0}), 400)
    assert error["code"] == "unsupported_field"
    assert error["param"] == field
    assert "unsupported field" in error["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "developer", "content": "x"}, "messages[0].role"),
        ({"role": "latest_reminder", "content": "x"}, "messages[0].role"),
        ({"role": 7, "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        (5, "messages[0]"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "system", "content": None}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": "x", "task": "query"}, "messages[0].task"),
        ({"role": "user", "content": "x", "tools": []}, "messages[0].tools"),
        ({"role": "assistant", "content": "x", "wo_eos": True}, "messages[0].wo_eos"),
        ({"role": "assistant"}, "messages[0]"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
    ],
)
def test_a_message_that_cannot_be_is_named_by_its_place(
    served: Served, message: Any, param: str
) -> None:
    error = error_of(served.http.post(CHAT, json={"messages": [message]}), 400)
    assert error["param"] == param


@pytest.mark.parametrize(
    ("message", "says", "code"),
    [
        (
            {"role": "developer", "content": "x"},
            'messages[0].role: role must be system, user, assistant or tool, not "developer"',
            "unsupported_value",
        ),
        (
            {"role": 7, "content": "x"},
            "messages[0].role: role must be system, user, assistant or tool, not 7",
            "unsupported_value",
        ),
        ({"content": "x"}, "messages[0].role is missing", "missing_field"),
        ({"role": None, "content": "x"}, "messages[0].role is missing", "missing_field"),
        (["x"], "messages[0]: should be an object, not a list of 1", None),
    ],
)
def test_a_role_that_is_none_is_shown(
    served: Served, message: Any, says: str, code: str | None
) -> None:
    error = error_of(served.http.post(CHAT, json={"messages": [message]}), 400)
    assert (error["message"], error["code"]) == (says, code)


def test_a_conversation_that_asks_for_no_answer_is_refused(served: Served) -> None:
    messages = [*HI, {"role": "assistant", "content": "done"}]
    error = error_of(served.http.post(CHAT, json={"messages": messages}), 400)
    assert error["param"] == "messages"


@pytest.mark.parametrize("value", [None, 1_000_000_000, 1e9])
def test_a_limit_beyond_the_context_is_the_context(served: Served, value: Any) -> None:
    served.script("short")
    assert served.chat(max_tokens=value).json()["choices"][0]["finish_reason"] == "stop"


def test_what_clients_send_without_meaning_it_is_taken(served: Served) -> None:
    served.script("ok")
    response = served.chat(
        n=1,
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        user="me",
        store=False,
        parallel_tool_calls=True,
        tools=None,
        functions=None,
        stop=None,
        max_tokens=5,
        max_completion_tokens=5,
        service_tier="auto",
    )
    assert response.status_code == 200, response.text


def test_two_limits_that_differ_are_refused(served: Served) -> None:
    assert "differ" in error_of(served.chat(max_tokens=1, max_completion_tokens=2), 400)["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"[]",
        b"5",
        b"null",
        b'"x"',
        b"{",
        b'{"messages": [}',
        b'{"messages": 1,}',
        b"\xff\xfe{}",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "x": ' + b"[" * 100_000 + b"}",
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: body[:24].decode("latin-1"),
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_body_that_is_no_request_is_refused(served: Served, path: str, body: bytes) -> None:
    error_of(served.http.post(path, content=body), 400)


def test_an_absurd_limit_is_the_context(served: Served) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 4000 + b"}"
    assert served.http.post(CHAT, content=body).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_unknown_model_is_not_found(served: Served, path: str) -> None:
    body = {"model": "gpt-5", "messages": HI} if path == CHAT else {"model": "x", "prompt": "x"}
    error = error_of(served.http.post(path, json=body), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "scripted" in error["message"]


def test_a_path_or_a_method_that_is_none_has_an_error_object(served: Served) -> None:
    assert "no such path" in error_of(served.http.get("/v1/nothing"), 404)["message"]
    wrong = served.http.get(CHAT)
    assert error_of(wrong, 405)["message"] == f"this path takes POST: GET {CHAT}"
    assert wrong.headers["allow"] == "POST"
    error_of(served.http.get("/v1/models/other"), 404)
    error_of(served.http.get("/page/../app.py"), 404)
    error_of(served.http.get("/page/nothing.js"), 404)


def test_a_prompt_that_fills_the_context_is_refused(served: Served) -> None:
    error = error_of(served.chat("x" * 5000), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "4096" in error["message"]
    error = error_of(served.http.post(TEXT, json={"prompt": [1] * 4096}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_a_context_may_be_smaller_than_the_model_s() -> None:
    with serving(limits=Limits(max_context=10)) as served:
        served.script("0123456789")
        error_of(served.chat("1234567"), 400)
        answer = served.chat("12345").json()["choices"][0]
        assert answer["finish_reason"] == "length"
        assert answer["message"]["content"] == "0"
        assert served.http.get("/v1/models").json()["data"][0]["context_length"] == 10


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["a", "b"], "prompt"),
        ([[1], [2]], "prompt"),
        ([-1], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        (5, "prompt"),
        (None, "prompt"),
        ([512], "prompt"),
        ([1 << 70], "prompt[0]"),
    ],
)
def test_a_text_prompt_that_cannot_be_is_refused(served: Served, prompt: Any, param: str) -> None:
    assert error_of(served.http.post(TEXT, json={"prompt": prompt}), 400)["param"] == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 6),
        ("logprobs", True),
        ("echo", True),
        ("echo", 0),
        ("echo", -0.0),
        ("best_of", 2),
        ("suffix", "x"),
        ("messages", HI),
    ],
)
def test_what_completions_do_not_do_is_refused_by_name(
    served: Served, field: str, value: Any
) -> None:
    error = error_of(served.http.post(TEXT, json={"prompt": "x", field: value}), 400)
    assert field in error["param"]


# --- sizes and bytes that are no request --------------------------------------------------------


def parsed(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error object of one raw response."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head, answer
    found: dict[str, Any] = json.loads(body)["error"]
    return int(head.split()[1]), found


def test_a_body_that_is_too_large_is_refused_unread(served: Served) -> None:
    """Only the head is sent: whoever waits for the body would wait for ever."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n"
    )
    with socket.create_connection(served.address, timeout=PATIENCE_S) as connection:
        connection.sendall(head + b"\r\n{")
        answer = one_answer(connection)
    status, error = parsed(answer)
    assert (status, error["code"]) == (413, "request_too_large")
    assert "16,777,216" in error["message"]
    assert b"connection: close" in answer.lower()


def test_whoever_sends_a_body_that_is_too_large_reads_the_refusal(served: Served) -> None:
    with socket.create_connection(served.address, timeout=PATIENCE_S) as connection:
        size = 20 << 20
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()
        )
        connection.sendall(bytes(size))
        assert parsed(one_answer(connection))[0] == 413


def test_a_length_of_more_digits_than_python_reads_is_too_large() -> None:
    with wired_app() as app, pytest.raises(Refusal) as caught:
        app.request(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"1" * 5000)
    assert caught.value.status == 413


def test_a_body_without_a_length_is_refused_where_it_is_too_large(served: Served) -> None:
    with serving(limits=Limits(body_bytes=1000)) as small:
        response = small.http.post(CHAT, content=iter([b"x" * 999, b"xx"]))
        assert error_of(response, 413)["code"] == "request_too_large"
        error_of(small.http.post(CHAT, content=iter([b"x" * 999])), 400)
        error_of(small.http.post(CHAT, content=b"x" * 1001), 413)
        error_of(small.http.post(CHAT, content=b"x" * 1000), 400)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: two\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",  # no Host
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: " + b"y" * 100_000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
    ids=lambda raw: raw[:60].decode("latin-1"),
)
def test_bytes_that_are_no_http_have_an_error_object(served: Served, request_bytes: bytes) -> None:
    status, error = parsed(served.raw(request_bytes))
    assert (status, error["code"]) == (400, "invalid_http")


def test_two_ways_to_tell_the_length_are_one_too_many(served: Served) -> None:
    """Whoever believes the length sees a second request where others see the first one's body."""
    answer = served.raw(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    )
    status, error = parsed(answer)
    assert (status, error["code"]) == (400, "invalid_http")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer.lower()


def test_a_length_that_is_too_small_leaves_a_broken_request_behind(served: Served) -> None:
    body = json.dumps({"messages": HI, "x": 1}).encode()
    answer = served.raw(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n".encode()
        + body
        + b"\r\n\r\n"
    )
    assert answer.count(b"HTTP/1.1 400") == 2
    assert answer.count(b'{"error":') == 2


def test_a_length_that_is_too_large_ends_in_time() -> None:
    with serving(limits=Limits(body_idle_s=0.2)) as served:
        request = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{}}"
        with socket.create_connection(served.address, timeout=PATIENCE_S) as connection:
            connection.sendall(request.encode())
            status, error = parsed(one_answer(connection))
        assert (status, error["code"]) == (408, "request_timeout")


def test_no_length_at_all_is_an_empty_body(served: Served) -> None:
    answer = served.raw(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )
    assert parsed(answer)[0] == 400


def test_a_client_that_leaves_inside_its_body_is_forgotten(served: Served) -> None:
    request = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{}}"
    with socket.create_connection(served.address, timeout=PATIENCE_S) as connection:
        connection.sendall(request.encode())
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(65536) == b""


def test_a_head_that_does_not_come_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4q.runtime.serve.wire.HEAD_S", 0.2)
    with serving() as served, socket.create_connection(served.address, PATIENCE_S) as connection:
        connection.sendall(b"GET /health HTT")
        assert parsed(one_answer(connection))[0] == 408
        assert connection.recv(65536) == b""
