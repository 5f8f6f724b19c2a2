"""Owns DeepSeek-V4's prompt format: messages to pieces. Parses no output, knows no HTTP.

Follows ``encoding/`` of the DeepSeek-V4 releases (its four test pairs render to the same bytes).
There is one format and no template: a ``chat_template`` beside the model is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds4q.quantize.config import MODEL_TYPE
from ds4q.runtime.errors import ChatError
from ds4q.runtime.text.pieces import (
    ASSISTANT,
    BOS,
    EOS,
    LATEST_REMINDER,
    THINK,
    THINK_END,
    TITLE_TASK,
    USER,
    USER_TASKS,
    Prompt,
)
from ds4q.runtime.text.tokenizer import Tokenizer
from ds4q.runtime.text.tools import tool_block, tool_calls_block

BLANK_LINE = "\n\n"
ROLES = ("system", "user", "developer", "latest_reminder", "assistant", "tool")
ASKING = ("user", "developer")  # the roles that a turn of the model answers


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a user turn; ``call`` is the id of the call that a tool result answers."""

    text: str
    is_result: bool = False
    call: str | None = None


@dataclass(slots=True)
class _Turn:
    """A message after preparation: tool messages are merged into user turns."""

    role: str
    text: str = ""
    blocks: list[_Block] = field(default_factory=list)
    reasoning: str = ""
    tools: Sequence[Any] = ()
    calls: Sequence[Any] = ()
    task: str | None = None
    eos: bool = True


def require_model_type(config: Mapping[str, Any], *, path: object = None) -> None:
    """Refuse every model but ``deepseek_v4``: a related name is another format."""
    found = config.get("model_type")
    if found != MODEL_TYPE:
        raise ChatError(
            "no prompt format for this model type",
            path=path,
            expected=MODEL_TYPE,
            found=repr(found),
            remedy="pass --prompt-ids, or --raw for text without a format",
        )


def encode_chat(
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    *,
    thinking: bool = False,
    path: object = None,
) -> list[int]:
    """Token ids of ``render(messages)`` for the model that ``config`` describes."""
    require_model_type(config, path=path)
    return render(messages, thinking=thinking).encode(tokenizer)


def encode_raw(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text without a format: BOS, as in training, and the text."""
    return Prompt().control(BOS).text(text).encode(tokenizer)


def attach_tools(messages: Sequence[Any], tools: Sequence[Any]) -> list[Any]:
    """Messages with ``tools`` on the leading system message, which is added where there is none."""
    if not tools:
        return list(messages)
    first = messages[0] if messages else None
    if isinstance(first, Mapping) and first.get("role") == "system":
        return [{**first, "tools": tools}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": tools}, *messages]


def render(
    messages: Sequence[Any],
    *,
    thinking: bool = False,
    drop_thinking: bool = True,
    effort: str = "low",
) -> Prompt:
    """The prompt for a conversation.

    Parameters
    ----------
    messages : objects with ``role`` and ``content`` in the OpenAI shape, optionally
        ``reasoning_content``, ``tool_calls``, ``tool_call_id``, ``tools``, ``task``, ``wo_eos``
    thinking : let the model reason first; otherwise the reasoning is closed before it begins
    drop_thinking : leave out the reasoning of turns before the last question (never with tools)
    effort : only ``low`` here; the texts for more are part of a release, not of this program

    Raises
    ------
    ChatError : no messages, an unknown role, or content that the format cannot express
    """
    if thinking and effort != "low":
        raise ChatError(
            f"effort {effort!r} needs the text of a release's encoding file",
            expected="effort 'low'",
        )
    turns = _prepare(messages)
    dropping = thinking and drop_thinking and not any(turn.tools for turn in turns)
    if dropping:
        turns = _drop_developers(turns)
    last = _last_asking(turns)
    prompt = Prompt().control(BOS)
    for index, turn in enumerate(turns):
        following = turns[index + 1].role if index + 1 < len(turns) else None
        if turn.role == "assistant":
            after_task = index > 0 and turns[index - 1].task is not None
            shown = thinking and not after_task and (not dropping or index > last)
            _render_assistant(prompt, turn, shown)
            continue
        _render_input(prompt, turn)
        if turn.role in ASKING and following in (None, "assistant", "latest_reminder"):
            _render_opening(prompt, turn, thinking and (not dropping or index >= last))
    return prompt


def _render_input(prompt: Prompt, turn: _Turn) -> None:
    if turn.role in ASKING:
        prompt.control(USER)
    elif turn.role == "latest_reminder":
        prompt.control(LATEST_REMINDER)
    if turn.role == "user":
        prompt.text(BLANK_LINE.join(block.text for block in turn.blocks))
    else:
        prompt.text(turn.text)
    if turn.tools:
        prompt.text(BLANK_LINE).extend(tool_block(turn.tools))


def _render_opening(prompt: Prompt, turn: _Turn, thinks: bool) -> None:
    """What hands the word to the model; a task of the search pipeline takes its place."""
    if turn.task is not None and turn.task != "action":
        prompt.control(USER_TASKS[turn.task])
        return
    prompt.control(ASSISTANT).control(THINK if thinks else THINK_END)
    if turn.task is not None:
        prompt.control(USER_TASKS[turn.task])


def _render_assistant(prompt: Prompt, turn: _Turn, reasoning: bool) -> None:
    if reasoning:
        prompt.text(turn.reasoning).control(THINK_END)
    prompt.text(turn.text)
    if turn.calls:
        prompt.text(BLANK_LINE).extend(tool_calls_block(turn.calls))
    if turn.eos:
        prompt.control(EOS)
    if turn.task is not None:
        prompt.control(TITLE_TASK)


def _last_asking(turns: Sequence[_Turn]) -> int:
    return max((i for i, turn in enumerate(turns) if turn.role in ASKING), default=-1)


def _drop_developers(turns: Sequence[_Turn]) -> list[_Turn]:
    last = _last_asking(turns)
    return [turn for i, turn in enumerate(turns) if i >= last or turn.role != "developer"]


# ------------------------------------------------------------------ messages to turns


def _prepare(messages: Sequence[Any]) -> list[_Turn]:
    if not messages:
        raise ChatError("there are no messages", expected="at least one")
    turns: list[_Turn] = []
    order: dict[str, int] = {}  # ids of the latest calls -> their place
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            found = message.get("role") if isinstance(message, Mapping) else message
            raise ChatError(
                f"message {number} has an unknown role",
                expected=", ".join(ROLES),
                found=repr(found),
            )
        turn = _turn(message, number)
        if turn.role != "user" or not _merge(turns, turn, is_result=message["role"] == "tool"):
            turns.append(turn)
    for turn in turns:
        if turn.calls:
            order = _call_order(turn.calls)
        elif turn.role == "user":
            turn.blocks = _sort_results(turn.blocks, order)
    return turns


def _merge(turns: list[_Turn], turn: _Turn, *, is_result: bool) -> bool:
    """Add a user turn's blocks to the user turn before it, where the two are one."""
    if not turns or turns[-1].role != "user" or (turns[-1].task is not None and not is_result):
        return False
    turns[-1].blocks += turn.blocks
    turns[-1].task = turns[-1].task or turn.task
    return True


def _turn(message: Mapping[str, Any], number: int) -> _Turn:
    role = message["role"]
    content = message.get("content")
    if role == "tool":
        text = f"<tool_result>{_result_text(content, number)}</tool_result>"
        call = message.get("tool_call_id")
        known = call if isinstance(call, str) else None
        return _Turn("user", blocks=[_Block(text, is_result=True, call=known)])
    if role == "user":
        parts = _texts(content, number)
        return _Turn("user", blocks=[_Block(part) for part in parts], task=_task(message, number))
    turn = _Turn(role)
    if content is not None or role not in ("system", "assistant"):
        turn.text = BLANK_LINE.join(_texts(content, number))
    turn.tools = _list(message, "tools", number)
    if role == "assistant":
        turn.calls = _list(message, "tool_calls", number)
        turn.reasoning = _reasoning(message, number)
        turn.task = _task(message, number)
        turn.eos = not message.get("wo_eos")
    elif message.get("response_format") is not None:
        raise ChatError(
            f"message {number} asks for a response_format",
            remedy="its wording is part of a release's encoding file, which is not read yet",
        )
    return turn


def _task(message: Mapping[str, Any], number: int) -> str | None:
    task = message.get("task")
    known = tuple(USER_TASKS) if message["role"] == "user" else ("title",)
    if task is not None and task not in known:
        raise ChatError(
            f"message {number} has an unknown task", expected=", ".join(known), found=repr(task)
        )
    return task


def _list(message: Mapping[str, Any], key: str, number: int) -> Sequence[Any]:
    value = message.get(key) or ()
    if not isinstance(value, list | tuple):
        raise ChatError(f"{key} of message {number} is not a list", found=type(value).__name__)
    return value


def _reasoning(message: Mapping[str, Any], number: int) -> str:
    value = message.get("reasoning_content")
    if value is not None and not isinstance(value, str):
        raise ChatError(
            f"reasoning_content of message {number} is not text", found=type(value).__name__
        )
    return value or ""


def _texts(content: Any, number: int) -> list[str]:
    """The blocks of a message's content: one string, or a list of text parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        raise ChatError(
            f"content of message {number} is not text",
            expected="a string or a list of text parts",
            found=type(content).__name__,
        )
    return [_part_text(part, number) for part in content]


def _part_text(part: Any, number: int) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str) or part.get("type") != "text":
        raise ChatError(
            f"message {number} has a part that is not text",
            found=repr(part.get("type") if isinstance(part, Mapping) else part),
            remedy="DeepSeek-V4 takes text only",
        )
    return text


def _result_text(content: Any, number: int) -> str:
    """A tool result: parts that are not text are named in their place, not refused."""
    if not isinstance(content, list | tuple):
        return _texts(content, number)[0]
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        texts.append(_part_text(part, number) if kind == "text" else f"[Unsupported {kind}]")
    return BLANK_LINE.join(texts)


def _call_order(calls: Sequence[Any]) -> dict[str, int]:
    ids = (call.get("id") if isinstance(call, Mapping) else None for call in calls)
    return {call: place for place, call in enumerate(ids) if isinstance(call, str)}


def _sort_results(blocks: Sequence[_Block], order: Mapping[str, int]) -> list[_Block]:
    """Tool results in the order of their calls, among the places that results hold."""
    results = [block for block in blocks if block.is_result]
    results.sort(key=lambda block: order.get(block.call, 0) if block.call else 0)
    in_order = iter(results)
    return [next(in_order) if block.is_result else block for block in blocks]
