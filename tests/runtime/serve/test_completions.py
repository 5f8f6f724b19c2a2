"""Text completions over HTTP: OpenAI's older form, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from ds4q.runtime.serve.documents import Completion
from tests.runtime.serve.scripted import BOS, EOS
from tests.runtime.serve.served import MODEL, Served, events

PROMPT = [BOS, *b"ab"]


def complete(served: Served, answer: bytes, **fields: Any) -> Any:
    """The response to ``ab``, which the model answers so."""
    served.engine.answers[tuple(PROMPT)] = list(answer)
    return served.http.post("/v1/completions", json={"prompt": "ab", **fields})


def choices_of(response: Any, *, stream: bool) -> list[dict[str, Any]]:
    """All choices, of chunks or of the whole, which are as the OpenAPI document says."""
    assert response.status_code == 200, response.text
    objects = events(response) if stream else [response.json()]
    for each in objects:
        Completion.model_validate(each)
    return [choice for each in objects for choice in each["choices"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["ab", ["ab"], PROMPT, [PROMPT]])
def test_a_text_or_its_ids_go_on(served: Served, prompt: Any, stream: bool) -> None:
    response = complete(served, "cd 😀".encode(), prompt=prompt, stream=stream)
    choices = choices_of(response, stream=stream)
    assert "".join(each["text"] for each in choices) == "cd 😀"
    assert choices[-1]["finish_reason"] == "stop"
    assert all(each["finish_reason"] is None for each in choices[:-1])


def test_the_whole_names_model_and_counts(served: Served) -> None:
    answer = complete(served, b"xyz", max_tokens=2).json()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 2, 5)


def test_usage_ends_a_stream_where_it_is_asked_for(served: Served) -> None:
    options = {"include_usage": True}
    chunks = events(complete(served, b"x", stream=True, stream_options=options))
    assert [each["usage"] is None for each in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text(served: Served, stream: bool) -> None:
    choices = choices_of(complete(served, b"one\ntwo", stop="\n", stream=stream), stream=stream)
    assert "".join(each["text"] for each in choices) == "one"
    assert choices[-1]["finish_reason"] == "stop"


def test_a_tool_block_or_a_think_tag_is_text(served: Served) -> None:
    (choice,) = choices_of(complete(served, b"a</think>b"), stream=False)
    assert choice["text"] == "a</think>b"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_offsets_into_the_text(served: Served, stream: bool) -> None:
    response = complete(served, "é!".encode(), logprobs=1, stream=stream)
    parts = [each["logprobs"] for each in choices_of(response, stream=stream)]
    told = {key: [x for part in parts if part for x in part[key]] for key in parts[0]}
    assert told["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert told["text_offset"] == [0, 0, 1]
    assert [list(each) for each in told["top_logprobs"]] == [[token] for token in told["tokens"]]
    assert all(-0.01 < each <= 0 for each in told["token_logprobs"])


def test_zero_logprobs_are_those_of_the_tokens_alone(served: Served) -> None:
    (choice,) = choices_of(complete(served, b"x", logprobs=0), stream=False)
    assert choice["logprobs"]["tokens"] == ["x"]
    assert choice["logprobs"]["top_logprobs"] == [{}]


def test_ids_are_told_to_those_who_ask(served: Served) -> None:
    (choice,) = choices_of(complete(served, b"x", return_token_ids=True), stream=False)
    assert choice["token_ids"] == [ord("x"), EOS]
