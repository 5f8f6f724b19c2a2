"""What is told of a request with many faults: one of them, so that it costs nobody much."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ds4q.runtime.serve.schema import ChatRequest, CompletionRequest, Generation

MANY = 1000
HI = {"role": "user", "content": "hi"}
USER: dict[str, Any] = {"messages": [HI]}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
INFINITE = {"name": "f", "parameters": {"a": MANY * [float("inf")]}}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": MANY * [1]}),
        (ChatRequest, {"messages": MANY * [{}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": MANY * [1]}]}),
        (ChatRequest, {"messages": [{"role": "tool", "tool_call_id": "1", "content": MANY * [1]}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": MANY * [1]}]}),
        (ChatRequest, USER | {"tools": MANY * [1]}),
        (ChatRequest, USER | {"tools": [{"type": "function", "function": INFINITE}]}),
        (ChatRequest, USER | {"stop": MANY * [1]}),
        (ChatRequest, USER | {"logit_bias": {str(n): "a" for n in range(MANY)}}),
        (ChatRequest, USER | {str(n): 1 for n in range(MANY)}),
        (ChatRequest, {"messages": [HI | {str(n): 1 for n in range(MANY)}]}),
        (CompletionRequest, {"prompt": [1, *MANY * [""]]}),
        (CompletionRequest, {"prompt": [[1, *MANY * [""]]]}),
        (CompletionRequest, {"prompt": MANY * [""]}),
        (CompletionRequest, {"prompt": MANY * [-1]}),
    ],
    ids=range(15),
)
def test_one_fault_is_told_of_many(kind: type[Generation], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() == 1


def test_numbers_of_a_prompt_are_whole_however_they_are_written() -> None:
    assert CompletionRequest.model_validate({"prompt": [1, 2.0, 3e2]}).prompt == [1, 2, 300]
    with pytest.raises(ValidationError, match="integer"):
        CompletionRequest.model_validate({"prompt": [1, 2.5]})
