"""Owns DeepSeek-V4's prompt format: messages to pieces. Parses no output, knows no HTTP.

Follows ``encoding/`` of the DeepSeek-V4 releases (its four test pairs render to the same bytes).
There is one format and no template: a ``chat_template`` beside the model is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds4q.quantize.config import MODEL_TYPE
from ds4q.quantize.encoding import EFFORTS, Encoding
from ds4q.runtime.errors import ChatError, EffortError, ResponseFormatError
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
    Control,
    Piece,
    Prompt,
    template,
)
from ds4q.runtime.text.tokenizer import Tokenizer
from ds4q.runtime.text.tools import to_json, tool_block, tool_calls_block

BLANK_LINE = "\n\n"
ROLES = ("system", "user", "developer", "latest_reminder", "assistant", "tool")
NEEDS_ENCODING = "it is part of a release: name its folder encoding/ with --encoding PATH"
LACKS_TEXT = "the release's encoding that is used has none"
ANSWERED = ("user", "developer", "latest_reminder", "tool")  # what stands before an answer
ASKING = ("user", "developer")  # the roles that a turn of the model answers


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model reads it.

    Attributes
    ----------
    ids : token ids
    marks : ascending numbers of leading ids: up to behind each Assistant token, where the next
        prompt of the conversation may differ (by its think token, and by reasoning left out)
    thinking : the answer begins inside the reasoning
    """

    ids: list[int]
    marks: tuple[int, ...]
    thinking: bool


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
    response_format: Any = None
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
    effort: str = "low",
    encoding: Encoding | None = None,
    drop_thinking: bool = True,
    path: object = None,
    fewer_than: int | None = None,
) -> ChatPrompt:
    """The prompt for an answer by the model that ``config`` describes: ``render``, in token ids.

    The last message may be the beginning of the answer: an assistant message with ``prefix: true``.
    It is then continued, in chat mode, whatever ``thinking`` says. ``fewer_than`` bounds the ids,
    see ``Prompt.encode``.

    Raises
    ------
    ChatError : what ``render`` refuses, a last message that asks for no answer, a prefix elsewhere
    ControlTokenError : the tokenizer lacks a control token
    """
    require_model_type(config, path=path)
    continued = _is_prefix(messages)
    rendered = render(
        [*messages[:-1], {**messages[-1], "wo_eos": True}] if continued else messages,
        thinking=thinking and not continued,
        effort=effort,
        encoding=encoding,
        drop_thinking=drop_thinking,
    )
    if not continued and messages[-1]["role"] not in ANSWERED:
        raise ChatError(
            f"the last message is of role {messages[-1]['role']!r}: it asks for no answer",
            expected="a message of the user, or of the assistant with prefix: true",
        )
    ids = rendered.encode(tokenizer, fewer_than=fewer_than)
    # The bare token: no text is ever encoded as it.
    assistant = tokenizer.controls.get(ASSISTANT)
    marks = tuple(place + 1 for place, token in enumerate(ids) if token == assistant)
    return ChatPrompt(ids, marks, thinking=rendered.pieces[-1] == Control(THINK))


def encode_raw(tokenizer: Tokenizer, text: str, *, fewer_than: int | None = None) -> list[int]:
    """Token ids of a text without a format: BOS, as in training, and the text."""
    return Prompt().control(BOS).text(text).encode(tokenizer, fewer_than=fewer_than)


def attach_tools(messages: Sequence[Any], tools: Sequence[Any]) -> list[Any]:
    """Messages with ``tools`` on the leading system message, which is added where there is none."""
    return _attach(messages, "tools", tools) if tools else list(messages)


def attach_response_format(
    messages: Sequence[Any], response_format: Mapping[str, Any] | None
) -> list[Any]:
    """Messages with ``response_format`` on the leading system message, as ``attach_tools`` does.

    None and ``{"type": "text"}`` ask for nothing.
    """
    if response_format is None or response_format.get("type") == "text":
        return list(messages)
    return _attach(messages, "response_format", response_format)


def _attach(messages: Sequence[Any], key: str, value: Any) -> list[Any]:
    first = messages[0] if messages else None
    if isinstance(first, Mapping) and first.get("role") == "system":
        return [{**first, key: value}, *messages[1:]]
    return [{"role": "system", "content": "", key: value}, *messages]


def render(
    messages: Sequence[Any],
    *,
    thinking: bool = False,
    drop_thinking: bool = True,
    effort: str = "low",
    encoding: Encoding | None = None,
) -> Prompt:
    """The prompt for a conversation.

    Parameters
    ----------
    messages : objects with ``role`` and ``content`` in the OpenAI shape, optionally
        ``reasoning_content``, ``tool_calls``, ``tool_call_id``, ``tools``, ``response_format``,
        ``task``, ``wo_eos``
    thinking : let the model reason first; otherwise the reasoning is closed before it begins
    drop_thinking : leave out the reasoning of turns before the last question (never with tools)
    effort : ``low``, ``high`` or ``max``: how much reasoning to ask for, in thinking mode
    encoding : the release's texts for more effort and for a response format

    Raises
    ------
    ChatError : no messages, an unknown role, content that the format cannot express, or an effort
        or response format whose text is not at hand
    """
    effort_text = _effort_text(effort, encoding) if thinking else []
    turns = _prepare(messages)
    dropping = thinking and drop_thinking and not any(turn.tools for turn in turns)
    if dropping:
        turns = _drop_developers(turns)
    last = _last_asking(turns)
    prompt = Prompt().control(BOS).extend(effort_text)
    for index, turn in enumerate(turns):
        following = turns[index + 1].role if index + 1 < len(turns) else None
        if turn.role == "assistant":
            after_task = index > 0 and turns[index - 1].task is not None
            shown = thinking and not after_task and (not dropping or index > last)
            _render_assistant(prompt, turn, shown)
            continue
        _render_input(prompt, turn, encoding)
        if turn.role in ASKING and following in (None, "assistant", "latest_reminder"):
            _render_opening(prompt, turn, thinking and (not dropping or index >= last))
    return prompt


def _effort_text(effort: str, encoding: Encoding | None) -> list[Piece]:
    """What follows BOS; least effort needs no text, and so no release's file."""
    if effort not in EFFORTS:
        raise ChatError("unknown effort", expected=", ".join(EFFORTS), found=repr(effort))
    text = "" if encoding is None and effort == EFFORTS[0] else None
    if encoding is not None:
        text = encoding.efforts.get(effort)
    if text is None:
        raise EffortError(
            f"no text for effort {effort!r}",
            expected=None if encoding is None else ", ".join(encoding.efforts),
            remedy=_missing(encoding),
        )
    return list(template(text))


def _missing(encoding: Encoding | None) -> str:
    """What to do where a text of the release is needed, and not there."""
    return NEEDS_ENCODING if encoding is None else LACKS_TEXT


def _is_prefix(messages: Sequence[Any]) -> bool:
    """Whether the last message is the beginning of the answer to the one before it."""
    marked = [m if isinstance(m, Mapping) else {} for m in messages]
    for number, message in enumerate(marked):
        prefix = message.get("prefix")
        if prefix is None or prefix is False:
            continue
        before = marked[number - 1].get("role") if number else None
        if (
            prefix is not True
            or message is not marked[-1]
            or message.get("role") != "assistant"
            or message.get("tool_calls")
            or before not in ANSWERED
        ):
            raise ChatError(
                f"message {number} cannot be a prefix",
                expected="prefix: true on a last message of the assistant that follows a question "
                "and calls no tool",
            )
        return True
    return False


def _render_input(prompt: Prompt, turn: _Turn, encoding: Encoding | None) -> None:
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
    if turn.response_format is not None:
        if encoding is None or encoding.response_format is None:
            raise ResponseFormatError("no text for a response format", remedy=_missing(encoding))
        prompt.text(BLANK_LINE).extend(template(encoding.response_format))
        prompt.text(to_json(turn.response_format))


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
    elif role in ("system", "developer"):
        turn.response_format = message.get("response_format")
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
