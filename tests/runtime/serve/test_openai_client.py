"""The official ``openai`` client, as programs use it, against the running server."""

# ruff: noqa: RUF001 (the fullwidth bars of the control tokens are meant)

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.runtime.serve.served import MODEL, PATIENCE_S, Served, serving

KEY = "sk-test"
HI: Any = [{"role": "user", "content": "hi"}]
PLAIN: Any = {"thinking": {"type": "disabled"}}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" '
    'string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)


@pytest.fixture(scope="module")
def served_with_key() -> Iterator[Served]:
    with serving(api_key=KEY) as made:
        yield made


@pytest.fixture(scope="module")
def client(served_with_key: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served_with_key.base}/v1",
        api_key=KEY,
        max_retries=0,
        timeout=PATIENCE_S,
    ) as made:
        yield made


@pytest.fixture
def script(served_with_key: Served) -> Any:
    return served_with_key.script


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).owned_by == "ds4q"


def test_a_chat(client: openai.OpenAI, script: Any) -> None:
    script("Hello!")
    answer = client.chat.completions.create(model=MODEL, messages=HI, extra_body=PLAIN)
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens_details is not None


def test_a_stream_with_usage(client: openai.OpenAI, script: Any) -> None:
    script("Hello 😀!")
    with client.chat.completions.create(
        model=MODEL,
        messages=HI,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=PLAIN,
    ) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello 😀!"
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_reasoning(client: openai.OpenAI, served_with_key: Served) -> None:
    served_with_key.engine.default = [*b"hm", 261, *b"yes"]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "think"}], reasoning_effort="low"
    )
    message = answer.choices[0].message
    assert message.content == "yes"
    assert message.model_extra == {"reasoning_content": "hm"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3


def test_stop_and_limits(client: openai.OpenAI, script: Any) -> None:
    script("one two three")
    create = client.chat.completions.create
    stopped = create(model=MODEL, messages=HI, stop=["two"], extra_body=PLAIN).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("one ", "stop")
    cut = create(model=MODEL, messages=HI, max_completion_tokens=3, extra_body=PLAIN).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("one", "length")


def test_logprobs(client: openai.OpenAI, script: Any) -> None:
    script("ok")
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, logprobs=True, top_logprobs=3, extra_body=PLAIN
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [each.token for each in told.content] == ["o", "k"]
    assert all(len(each.top_logprobs) == 3 for each in told.content)


def test_tools_there_and_back(client: openai.OpenAI, script: Any) -> None:
    script("Let me look." + CALL)
    messages: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="auto", extra_body=PLAIN
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    script("Sunny.")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    last = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, extra_body=PLAIN
    )
    assert last.choices[0].message.content == "Sunny."


def test_tools_in_a_stream(client: openai.OpenAI, script: Any) -> None:
    script(CALL)
    with client.chat.completions.create(
        model=MODEL, messages=HI, tools=TOOLS, stream=True, extra_body=PLAIN
    ) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream]
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert call.index == 0
    assert call.function is not None
    assert call.function.name == "weather"


def test_completions(client: openai.OpenAI, served_with_key: Served) -> None:
    served_with_key.engine.answers[(256, *b"2+2=")] = list(b"4")
    answer = client.completions.create(model=MODEL, prompt="2+2=", max_tokens=5, temperature=0)
    assert answer.choices[0].text == "4"
    with client.completions.create(model=MODEL, prompt="2+2=", stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == "4"


def test_errors_are_the_client_s_own(client: openai.OpenAI, served_with_key: Served) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as refused:
        create(model=MODEL, messages=HI, n=2)
    assert refused.value.param == "n"
    with pytest.raises(openai.BadRequestError, match="unsupported field: best_guess"):
        create(model=MODEL, messages=HI, extra_body={"best_guess": 1})
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        create(model="gpt-5", messages=HI)
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_an_error_inside_a_stream_is_raised(
    client: openai.OpenAI, served_with_key: Served, script: Any
) -> None:
    from ds4q.runtime.errors import LogitsError

    script("abc")
    served_with_key.engine.fails = lambda ids: LogitsError() if ids[-1:] == [98] else None
    try:
        stream = client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, extra_body=PLAIN
        )
        with stream, pytest.raises(openai.APIError, match="not finite"):
            list(stream)
    finally:
        served_with_key.engine.fails = lambda ids: None
