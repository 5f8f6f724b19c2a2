"""Owns short messages for tests of the prompt format, and the names of its control tokens."""

# ruff: noqa: RUF001 (the fullwidth bars of the control tokens are meant)

from __future__ import annotations

from typing import Any

from ds4q.runtime.text.chat import render
from ds4q.runtime.text.tools import HEAD, TAIL

B, E = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
U, A = "<｜User｜>", "<｜Assistant｜>"
T, C = "<think>", "</think>"
CONFIG = {"model_type": "deepseek_v4"}
TOOL = {"type": "function", "function": {"name": "f"}}
TOOL_BLOCK = HEAD + '{"name": "f"}' + TAIL
CALLS = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    "\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)

Message = dict[str, Any]


def user(content: Any, **more: Any) -> Message:
    return {"role": "user", "content": content, **more}


def system(content: Any, **more: Any) -> Message:
    return {"role": "system", "content": content, **more}


def developer(content: Any, **more: Any) -> Message:
    return {"role": "developer", "content": content, **more}


def assistant(content: Any, reasoning: str | None = None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, **more}


def reminder(content: Any) -> Message:
    return {"role": "latest_reminder", "content": content}


def result(content: Any, call: Any = None) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call}


def call(name: str = "f", number: str | None = None) -> Message:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}


def text(messages: list[Any], mode: str = "chat", **more: Any) -> str:
    """The prompt as a string, without BOS."""
    rendered = str(render(messages, thinking=mode == "thinking", **more))
    assert rendered.startswith(B)
    return rendered[len(B) :]


X = assistant("x", "r")
