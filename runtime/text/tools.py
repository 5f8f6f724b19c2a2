"""Owns how tools and tool calls are written in a DeepSeek-V4 prompt. Parses no output.

The instruction text is DeepSeek's own, from ``encoding/`` of the DeepSeek-V4-Flash release (MIT,
Copyright (c) 2023 DeepSeek); the model was trained on these bytes, so a test holds their digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ds4q.runtime.errors import ChatError
from ds4q.runtime.text.pieces import DSML, THINK, THINK_END, Piece, Prompt, template

HEAD = f"""\
## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), \
pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), \
you MUST output your complete reasoning inside {THINK}...{THINK_END} \
BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_END} with tool calls or final response.

### Available Tool Schemas

"""

TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


def tool_block(tools: Sequence[Any]) -> list[Piece]:
    """The block that tells the model its tools: head, one line of JSON per tool, tail."""
    lines = "\n".join(to_json(_function(tool, "tool")) for tool in tools)
    return Prompt().extend(template(HEAD)).text(lines).extend(template(TAIL)).pieces


def tool_calls_block(calls: Sequence[Any]) -> list[Piece]:
    """The block that an assistant turn writes to call tools; no line feed after the last tag."""
    block = Prompt().extend(template(f"<{DSML}tool_calls>\n"))
    for call in calls:
        function = _function(call, "tool call")
        name = _name(function.get("name"), "a tool call")
        block.extend(template(f"<{DSML}invoke name="))
        block.text(f'"{name}">\n')
        for number, (key, value) in enumerate(_arguments(function)):
            is_string = isinstance(value, str)
            text = value if is_string else to_json(value)
            if DSML in text:
                raise ChatError(
                    f"argument {key!r} of tool {name!r} holds {DSML!r}",
                    remedy="the format has no escape for it",
                )
            block.text("\n" if number else "")
            block.extend(template(f"<{DSML}parameter name="))
            block.text(f'"{_name(key, f"an argument of tool {name!r}")}"')
            block.text(f' string="{"true" if is_string else "false"}">{text}')
            block.extend(template(f"</{DSML}parameter>"))
        block.extend(template(f"\n</{DSML}invoke>\n"))
    return block.extend(template(f"</{DSML}tool_calls>")).pieces


def to_json(value: Any) -> str:
    """JSON with ``, `` and ``: ``, key order kept, non-ASCII kept; NaN and infinity refused."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError("a value cannot be written as JSON", found=str(error)) from None


def _function(entry: Any, what: str) -> Mapping[str, Any]:
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping):
        raise ChatError(f"a {what} has no 'function' object", found=type(entry).__name__)
    return function


def _name(name: Any, what: str) -> str:
    if not isinstance(name, str) or not name:
        raise ChatError(f"{what} has no name", found=repr(name))
    if '"' in name or DSML in name:
        raise ChatError(
            f"the name of {what} holds '\"' or {DSML!r}",
            found=repr(name),
            remedy="the format has no escape for it",
        )
    return name


def _arguments(function: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The arguments in order; text that is not a JSON object becomes one raw ``arguments``."""
    raw = function.get("arguments")
    if not isinstance(raw, str):
        raise ChatError(
            "the arguments of a tool call must be a JSON string", found=type(raw).__name__
        )
    try:
        parsed = json.loads(raw)
        json.dumps(parsed, allow_nan=False)  # Python reads NaN, and 1e999 as infinity
    except (ValueError, RecursionError):
        return [("arguments", raw)]
    return list(parsed.items()) if isinstance(parsed, dict) else [("arguments", raw)]
