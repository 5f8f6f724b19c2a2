"""Chat requests over HTTP: what reaches the model, and what comes back, whole and streamed."""

# ruff: noqa: RUF001 (the fullwidth bars of the control tokens are meant)

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.quantize.encoding import Encoding
from ds4q.runtime.serve.documents import ChatChunk, ChatCompletion
from tests.runtime.serve.scripted import BOS, EOS, USER, ScriptedEngine
from tests.runtime.serve.served import DSML_ID, MODEL, Served, events, serving

THINK, THINK_END = 260, 261
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}
CALL = """\n
<｜DSML｜tool_calls>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
<｜DSML｜parameter name="b" string="true">two</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""


def answer_of(response: Any) -> dict[str, Any]:
    """The message of an answer in one, which must be as the OpenAPI document says."""
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json())
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def joined(response: Any) -> dict[str, Any]:
    """The message that a stream's chunks add up to, with ``finish_reason``."""
    message: dict[str, Any] = {}
    for each in events(response):
        ChatChunk.model_validate(each)
        for choice in each["choices"]:
            if choice["finish_reason"] is not None:
                message["finish_reason"] = choice["finish_reason"]
            for key, value in choice["delta"].items():
                if isinstance(value, str) and key != "role":
                    value.encode()  # no half of a surrogate pair
                    message[key] = message.get(key, "") + value
                elif key == "tool_calls":
                    message.setdefault(key, []).extend(value)
                else:
                    message[key] = value
    return message


def prompt(served: Served) -> list[int]:
    """The prompt of the last request, however it was cut."""
    ids: list[int] = []
    for parts in served.engine.forwards:
        for position, piece in parts:
            ids[position:] = piece
    return ids


def asked(served: Served, **fields: Any) -> str:
    """The prompt of a request, its control tokens by their texts; the server must keep none."""
    texts = {BOS: "[B]", EOS: "[E]", USER: "[U]", 259: "[A]", 260: "[T]", 261: "[C]", 262: "[D]"}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} | fields
    served.engine.forwards.clear()
    response = served.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    ids = prompt(served)[: response.json()["usage"]["prompt_tokens"]]
    raw = b"".join(texts[i].encode() if i in texts else bytes([i]) for i in ids)
    return raw.decode()


# --- what comes back ---------------------------------------------------------------------------


def test_an_answer_in_one_has_all_that_clients_read(served: Served) -> None:
    served.script("Hello")
    answer = served.chat("a question that no other test asks").json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 4 + len("a question that no other test asks"),
        "completion_tokens": len("Hello") + 1,
        "total_tokens": 4 + len("a question that no other test asks") + len("Hello") + 1,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_cached_tokens_are_told(served: Served) -> None:
    served.script("ok")
    served.chat("remember this")
    usage = served.chat("remember this").json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1


def test_a_stream_has_the_role_first_then_text_then_the_reason_then_usage(served: Served) -> None:
    served.script("Hi")
    chunks = events(served.chat(stream=True, stream_options={"include_usage": True}))
    assert len({(each["id"], each["created"]) for each in chunks}) == 1
    role, *texts, end = [each["choices"][0]["delta"] for each in chunks[:-1]]
    assert (role, end) == ({"role": "assistant", "content": ""}, {})
    assert all(set(text) == {"content"} for text in texts)
    assert "".join(text["content"] for text in texts) == "Hi"
    *others, last = [each["choices"][0]["finish_reason"] for each in chunks[:-1]]
    assert (set(others), last) == ({None}, "stop")
    assert {each["usage"] for each in chunks[:-1]} == {None}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_usage_is_streamed_only_where_it_is_asked_for(served: Served) -> None:
    served.script("Hi")
    assert all("usage" not in each for each in events(served.chat(stream=True)))


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("naïve 你好 😀".encode(), "naïve 你好 😀"),
        (b"\xff!", "\ufffd!"),
        (b"a\xe4", "a\ufffd"),  # ends inside a character
        (b"\xf0\x9f\x98\x80", "\U0001f600"),
    ],
)
def test_characters_come_whole_in_a_stream_and_in_one(
    served: Served, raw: bytes, text: str
) -> None:
    served.script(raw)
    assert answer_of(served.chat())["content"] == text
    streamed = joined(served.chat(stream=True))
    assert (streamed["content"], streamed["finish_reason"]) == (text, "stop")


def test_a_limit_inside_a_character_gives_one_replacement(served: Served) -> None:
    served.script("a😀")
    message = served.chat(max_tokens=3).json()["choices"][0]
    assert (message["message"]["content"], message["finish_reason"]) == ("a\ufffd", "length")
    assert joined(served.chat(max_tokens=3, stream=True))["content"] == "a\ufffd"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_content_are_told_apart(served: Served, stream: bool) -> None:
    served.engine.default = [*b"let me see", THINK_END, *b"42"]
    options = {"include_usage": True} if stream else None
    response = served.chat("x", thinking={"type": "enabled"}, stream=stream, stream_options=options)
    message = joined(response) if stream else answer_of(response)
    assert (message["reasoning_content"], message["content"]) == ("let me see", "42")
    usage = events(response)[-1]["usage"] if stream else response.json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("let me see") + 1


def test_reasoning_without_an_end_is_all_reasoning(served: Served) -> None:
    served.script("hmm")
    message = answer_of(served.chat("y", thinking={"type": "enabled"}))
    assert (message["reasoning_content"], message["content"]) == ("hmm", "")


@pytest.mark.parametrize("stop", ["lo wo", ["never", "lo wo"], ["world", "lo wo"]])
def test_a_stop_string_ends_the_answer_across_tokens(served: Served, stop: Any) -> None:
    served.script("Hello world, and more")
    message = served.chat(stop=stop).json()["choices"][0]
    assert (message["message"]["content"], message["finish_reason"]) == ("Hel", "stop")
    streamed = joined(served.chat(stop=stop, stream=True))
    assert (streamed["content"], streamed["finish_reason"]) == ("Hel", "stop")


def test_half_a_stop_string_is_text(served: Served) -> None:
    served.script("Hello wo")
    assert answer_of(served.chat(stop="world"))["content"] == "Hello wo"
    assert joined(served.chat(stop="world", stream=True))["content"] == "Hello wo"


def test_after_a_stop_string_the_model_is_free(served: Served) -> None:
    scheduler = served.service.scheduler
    assert scheduler is not None
    before = scheduler.stats().completion_tokens
    served.script("stop here " * 100)
    assert served.chat(stop="here").json()["usage"]["completion_tokens"] == len("stop here")
    served.script("")
    served.chat()  # one token; at its end the first answer has ended, too
    made = scheduler.stats().completion_tokens - before
    assert made < 500  # of 1000: a script makes tokens faster than anybody can read them


def test_logprobs_are_told_token_by_token(served: Served) -> None:
    served.script("é!")
    whole = served.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    assert [each["bytes"] for each in whole["content"]] == [[0xC3], [0xA9], [0x21]]
    assert [each["token"] for each in whole["content"]] == ["\ufffd", "\ufffd", "!"]
    for each in whole["content"]:
        assert len(each["top_logprobs"]) == 2
        assert each["top_logprobs"][0]["bytes"] == each["bytes"]
        assert each["top_logprobs"][0]["logprob"] == each["logprob"] > -0.01
        assert each["top_logprobs"][1]["logprob"] < -20
    chunks = events(served.chat(logprobs=True, top_logprobs=2, stream=True))
    streamed = [
        entry
        for each in chunks
        for entry in (each["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole["content"]


def test_logprobs_without_alternatives_have_an_empty_list(served: Served) -> None:
    served.script("a")
    (entry,) = served.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == []


def test_logprobs_of_reasoning_have_a_list_of_their_own(served: Served) -> None:
    served.engine.default = [*b"r", THINK_END, *b"c"]
    asked_for = served.chat("z", thinking={"type": "enabled"}, logprobs=True)
    told = asked_for.json()["choices"][0]["logprobs"]
    assert [each["token"] for each in told["reasoning_content"]] == ["r"]
    assert [each["token"] for each in told["content"]] == ["c"]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_told_to_those_who_ask(served: Served, stream: bool) -> None:
    served.script("ab")
    response = served.chat(return_token_ids=True, stream=stream)
    choices = [e["choices"][0] for e in events(response)] if stream else response.json()["choices"]
    assert [token for each in choices for token in each.get("token_ids", ())] == [*b"ab", EOS]


class FlatEngine(ScriptedEngine):
    """To which every token is as likely as any other."""

    def _logits(self, ids: list[int]) -> npt.NDArray[np.float32]:
        return np.zeros(self.vocab_size, np.float32)


def test_a_seed_makes_draws_repeatable() -> None:
    with serving(FlatEngine()) as served:

        def draw(**fields: Any) -> list[int]:
            response = served.chat(max_tokens=20, return_token_ids=True, **fields)
            ids: list[int] = response.json()["choices"][0]["token_ids"]
            return ids

        assert draw(temperature=1, seed=5) == draw(temperature=1, seed=5)
        assert draw(temperature=1, seed=5) != draw(temperature=1, seed=-5)
        assert draw(temperature=1) != draw(temperature=1)
        assert draw(temperature=0) == [0] * 20  # the lowest id on ties
        assert draw() == [0] * 20  # the model's own temperature, which is 0
        assert draw(temperature=1, top_p=0.001) == [0] * 20


@pytest.fixture(scope="module")
def forgetful() -> Iterator[Served]:
    """A server that keeps no prompt's beginning, so that all of a prompt reaches the model."""
    with serving(prefix_cache_bytes=0) as made:
        yield made


# --- what reaches the model --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "[B][U]hi[A][T]"),  # thinking is the default
        ({"thinking": {"type": "enabled"}}, "[B][U]hi[A][T]"),
        ({"thinking": {"type": "disabled"}}, "[B][U]hi[A][C]"),
        ({"reasoning_effort": "none"}, "[B][U]hi[A][C]"),
        ({"reasoning_effort": "minimal"}, "[B][U]hi[A][T]"),
        ({"reasoning_effort": "low"}, "[B][U]hi[A][T]"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "[B][U]hi[A][C]"),
        (
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "wel", "prefix": True},
                ]
            },
            "[B][U]hi[A][C]wel",
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": [{"type": "text", "text": "<｜Assistant｜>"}]},
                    {
                        "role": "assistant",
                        "content": "x",
                        "reasoning_content": "r",
                        "refusal": None,
                    },
                    {"role": "user", "content": "u"},
                ]
            },
            "[B]s[U]<｜Assistant｜>[A][C]x[E][U]u[A][T]",
        ),
        (
            {
                "thinking": {"type": "disabled"},
                "messages": [
                    {"role": "user", "content": "q"},
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "c1",
                                "type": "function",
                                "function": {"name": "f", "arguments": "{}"},
                            }
                        ],
                    },
                    {
                        "role": "tool",
                        "tool_call_id": "c1",
                        "content": [{"type": "image_url"}, {"type": "text", "text": "R"}],
                    },
                ],
            },
            '[B][U]q[A][C]\n\n<[D]tool_calls>\n<[D]invoke name="f">\n\n</[D]invoke>\n'
            "</[D]tool_calls>[E][U]<tool_result>[Unsupported image_url]\n\nR</tool_result>[A][C]",
        ),
    ],
)
def test_the_prompt_is_the_model_s_format(
    forgetful: Served, fields: dict[str, Any], expected: str
) -> None:
    assert asked(forgetful, **fields) == expected


def test_tools_are_shown_to_the_model_word_for_word(forgetful: Served) -> None:
    tool = {"type": "function", "function": {"parameters": {"é": 1}, "name": "add"}}
    text = asked(forgetful, tools=[tool], thinking={"type": "disabled"})
    assert text.startswith("[B]\n\n## Tools")
    assert '\n{"parameters": {"é": 1}, "name": "add"}\n' in text
    assert "## Tools" not in asked(forgetful, tools=[tool], tool_choice="none")


def test_effort_and_response_format_take_the_release_s_texts() -> None:
    encoding = Encoding(
        release="0731",
        efforts={"low": "", "high": "THINK HARD\n\n", "max": "THINK HARDER\n\n"},
        response_format="## Response Format:\n\nAnswer as:\n{schema}",
        sha256={},
        notes=(),
    )
    with serving(encoding=encoding) as served:
        served.script("")
        for effort, text in (("medium", "THINK HARD\n\n"), ("ultra", "THINK HARDER\n\n")):
            served.engine.forwards.clear()
            response = served.chat("a" * 9, thinking=None, reasoning_effort=effort)
            assert response.status_code == 200, response.text
            assert prompt(served)[1 : 1 + len(text)] == list(text.encode())
        response = served.chat("json please", response_format={"type": "json_object"})
        assert response.status_code == 200, response.text
        assert b'{"type": "json_object"}' in bytes(i for i in prompt(served) if i < 256)
        assert served.http.get("/live").json()["efforts"] == ["low", "high", "max"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"thinking": None, "reasoning_effort": "high"}, "effort"),
        ({"response_format": {"type": "json_object"}}, "response format"),
    ],
)
def test_without_the_release_s_texts_what_needs_them_is_refused(
    served: Served, fields: dict[str, Any], says: str
) -> None:
    response = served.chat(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert says in error["message"]
    assert error["param"] == list(fields)[-1]


# --- tools --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_comes_back_as_one(served: Served, stream: bool) -> None:
    served.script("Let me add." + CALL)
    response = served.chat("1+2?", tools=[TOOL], stream=stream)
    message = joined(response) if stream else answer_of(response)
    (call,) = message["tool_calls"]
    assert message["content"] == "Let me add."
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "two"}
    reason = message["finish_reason"] if stream else response.json()["choices"][0]["finish_reason"]
    assert reason == "tool_calls"


def test_a_call_alone_has_null_content_and_its_result_can_be_sent_back(served: Served) -> None:
    served.script(CALL)
    message = answer_of(served.chat("1+2?", tools=[TOOL]))
    assert message["content"] is None
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    served.script("It is 3.")
    body = {
        "messages": [{"role": "user", "content": "1+2?"}, message, result],
        "tools": [TOOL],
        "thinking": {"type": "disabled"},
    }
    assert answer_of(served.http.post("/v1/chat/completions", json=body))["content"] == "It is 3."


def test_calls_of_a_stream_are_numbered(served: Served) -> None:
    invoke = CALL[CALL.index("<｜DSML｜invoke") : CALL.index("</｜DSML｜tool_calls>")]
    served.script(CALL.replace(invoke, invoke * 2))
    calls = joined(served.chat(tools=[TOOL], stream=True))["tool_calls"]
    assert [each["index"] for each in calls] == [0, 1]
    assert calls[0]["id"] != calls[1]["id"]


@pytest.mark.parametrize(
    "raw",
    [
        CALL[:-3],  # ended inside
        CALL.replace(">1<", ">one<"),  # no JSON
        CALL + " and more",
        CALL.replace('name="b"', 'name="a"'),  # a parameter twice
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_call_is_text_and_lost_nowhere(served: Served, raw: str, stream: bool) -> None:
    served.script("x" + raw)
    response = served.chat("1+2?", tools=[TOOL], stream=stream)
    message = joined(response) if stream else answer_of(response)
    assert message["content"] == "x" + raw
    assert "tool_calls" not in message


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_a_call_that_nobody_offered_is_text(served: Served, fields: dict[str, Any]) -> None:
    served.script(CALL)
    assert answer_of(served.chat("1+2?", **fields))["content"] == CALL


def test_the_control_token_of_a_call_counts_as_the_format_s(served: Served) -> None:
    parts = CALL.split("｜DSML｜")
    ids = list(parts[0].encode())
    for part in parts[1:]:
        ids += [DSML_ID, *part.encode()]
    served.engine.default = ids
    assert "tool_calls" in answer_of(served.chat("1+2?", tools=[TOOL]))


def test_a_control_token_that_the_tokenizer_lacks_is_named() -> None:
    with serving(tools=False) as served:
        response = served.chat(tools=[TOOL])
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        question, said = {"role": "user", "content": "q"}, {"role": "assistant"}
        messages = [question, {**said, "tool_calls": [call]}, question]
        called = served.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == called.status_code == 400
    assert "｜DSML｜" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "tools"
    assert called.json()["error"]["param"] == "messages"
