"""Owns reading an answer while it is generated: reasoning, content, tool calls, stop strings.

Takes text, not tokens: a tag is several tokens, and its first may be fused with what is before it.
Knows no HTTP and executes nothing.

What comes out depends on the text alone, however it is cut into pieces: nothing is told before it
is certain.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ds4q.runtime.errors import ChatError
from ds4q.runtime.text.pieces import DSML, THINK_END
from ds4q.runtime.text.tools import to_json

Channel = Literal["reasoning", "content"]

MOST_LINE_FEEDS = 2  # directly before a block of calls: they belong to it

# Tags as they must be written; None is an attribute's value.
_Tag = tuple[str | None, ...]
_CALLS = f"<{DSML}tool_calls>"
_CALLS_END: _Tag = (f"</{DSML}tool_calls>",)
_CALL: _Tag = (f'<{DSML}invoke name="', None, '">')
_CALL_END: _Tag = (f"</{DSML}invoke>",)
_PARAMETER: _Tag = (f'<{DSML}parameter name="', None, '" string="', None, '">')
_VALUE_END = f"</{DSML}parameter>"
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes; ``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


class AnswerStream:
    """Sorts the text of one answer into reasoning, content and tool calls, piece by piece.

    Parameters
    ----------
    thinking : the prompt ended inside the reasoning
    tools : the caller offered tools: a block of calls is taken out of the content. Otherwise, and
        inside the reasoning, it is text.
    stop : texts before which the answer ends. They are looked for in the content alone: not in the
        reasoning, which is no part of the answer, and not inside a block of calls. The one that is
        complete first counts; of several, the longest.

    Attributes
    ----------
    channel : where the text that was pushed last belongs
    stopped : a stop string was found: nothing that follows belongs to the answer
    finish_reason : after ``finish``: ``tool_calls``, ``stop`` or ``length``

    Raises
    ------
    ChatError : an empty stop string
    """

    def __init__(self, *, thinking: bool, tools: bool, stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise ChatError("a stop string is empty", expected="at least one character")
        self.channel: Channel = "reasoning" if thinking else "content"
        self.stopped = False
        self.finish_reason: str | None = None
        self._tools = tools
        self._stop = tuple(stop)
        self._held = ""  # not certain yet
        self._block: _Block | None = None

    def push(self, text: str) -> list[tuple[Channel, str] | ToolCall]:
        """The pieces that are certain after ``text``, in order; none is empty, none is a call."""
        pieces: list[tuple[Channel, str] | ToolCall] = []
        while text and not self.stopped:
            channel = self.channel
            if self._block is not None:
                shown, text = self._in_block(self._block, text)
            elif channel == "reasoning":
                shown, text = self._in_reasoning(text)
            else:
                shown, text = self._in_content(text)
            if shown:
                pieces.append((channel, shown))
        return pieces

    def finish(self, reason: str) -> list[tuple[Channel, str] | ToolCall]:
        """What was held back, now that nothing follows: the calls, or text.

        Calls wait for the end since text behind their block makes it malformed.

        Parameters
        ----------
        reason : why the generation ended, ``stop`` or ``length``
        """
        self.finish_reason = "stop" if self.stopped else reason
        block, self._block = self._block, None
        if block is not None and block.closed:
            self.finish_reason = "tool_calls"
            return list(block.calls)
        held, self._held = self._held if block is None else block.text(), ""
        return [(self.channel, held)] if held else []

    # Each of these takes new text and returns what is certain, and what is left for the state that
    # it has changed to.

    def _in_reasoning(self, text: str) -> tuple[str, str]:
        shown, tag, rest = (self._held + text).partition(THINK_END)
        if tag:
            self.channel = "content"
            self._held = ""
            return shown, rest
        certain = len(shown) - _possible_start(shown, THINK_END)
        self._held = shown[certain:]
        return shown[:certain], ""

    def _in_content(self, text: str) -> tuple[str, str]:
        text, self._held = self._held + text, ""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        tag = text.find(_CALLS) if self._tools else -1
        if tag >= 0 and all(tag + len(_CALLS) < end for end, _ in found):
            start = tag - _line_feeds(text, tag)
            self._block = _Block(text[start : tag + len(_CALLS)])
            return text[:start], text[tag + len(_CALLS) :]
        if found:
            self.stopped = True
            return text[: min(found)[1]], ""
        certain = len(text) - self._uncertain(text)
        self._held = text[certain:]
        return text[:certain], ""

    def _in_block(self, block: _Block, text: str) -> tuple[str, str]:
        rest = block.push(text)
        if rest is None:
            return "", ""
        self._block = None
        self._tools = False  # after a block that is none, no other is one
        return block.text(), rest

    def _uncertain(self, text: str) -> int:
        """Length of the end of ``text`` that may be part of a tag or a stop string."""
        lengths = [_possible_start(text, stop) for stop in self._stop]
        if self._tools:
            started = _possible_start(text, _CALLS)
            lengths.append(started + _line_feeds(text, len(text) - started))
        return max(lengths, default=0)


class _Block:
    """A block of calls, read from behind its opening tag to its end, or to its first fault.

    Parameters
    ----------
    opening : its raw text so far: the opening tag with the line feeds before it

    Attributes
    ----------
    calls : those that are complete
    closed : the block is whole, and only white space has followed
    """

    def __init__(self, opening: str) -> None:
        self.calls: list[ToolCall] = []
        self.closed = False
        self._read = [opening]
        self._rest = ""  # the beginning of what is read next
        self._call = ""  # the name of the one that is open; no name is empty
        self._arguments: dict[str, str] = {}  # name -> JSON
        self._parameter = ""  # the name of the one that is open
        self._is_string = False
        self._value: list[str] = []

    def text(self) -> str:
        """All of it so far, as it was written."""
        return "".join(self._read) + self._rest

    def push(self, text: str) -> str | None:
        """Read on; None while the block can be well-formed.

        Otherwise what was not read, from the first tag on that is out of place.
        """
        self._rest += text
        more: bool | None = True
        while more:
            more = self._read_value() if self._parameter else self._read_tag()
        if more is None:
            rest, self._rest = self._rest, ""
            return rest
        return None

    def _take(self, length: int) -> str:
        """Move so much from the rest to what was read."""
        taken, self._rest = self._rest[:length], self._rest[length:]
        self._read.append(taken)
        return taken

    # These say whether to go on at once: True, False until there is more text, None for a fault.

    def _read_tag(self) -> bool | None:
        self._take(len(self._rest) - len(self._rest.lstrip(_SPACE)))
        if not self._rest:
            return False
        for tag, act in self._expected().items():
            found = _match(tag, self._rest)
            if found is not None:
                length, attributes = found
                self._take(length)
                return act(*attributes) if length else False
        return None

    def _expected(self) -> dict[_Tag, Callable[..., bool | None]]:
        """What may stand here, and what it does."""
        if self.closed:
            return {}
        if self._call:
            return {_PARAMETER: self._open_parameter, _CALL_END: self._close_call}
        return {_CALL: self._open_call} | ({_CALLS_END: self._close} if self.calls else {})

    def _open_call(self, name: str) -> bool:
        self._call, self._arguments = name, {}
        return True

    def _open_parameter(self, name: str, is_string: str) -> bool | None:
        if name in self._arguments or is_string not in ("true", "false"):
            return None
        self._parameter, self._is_string, self._value = name, is_string == "true", []
        return True

    def _read_value(self) -> bool | None:
        """A value runs to the next closing tag, white space included."""
        end = self._rest.find(_VALUE_END)
        if end < 0:
            self._value.append(
                self._take(len(self._rest) - _possible_start(self._rest, _VALUE_END))
            )
            return False
        value = "".join([*self._value, self._take(end)])
        self._take(len(_VALUE_END))
        if not self._is_string and not _is_json(value):
            return None
        self._arguments[self._parameter] = to_json(value) if self._is_string else value
        self._parameter = ""
        return True

    def _close_call(self) -> bool:
        members = ", ".join(f"{to_json(name)}: {value}" for name, value in self._arguments.items())
        self.calls.append(ToolCall(f"call_{uuid.uuid4().hex}", self._call, f"{{{members}}}"))
        self._call = ""
        return True

    def _close(self) -> bool:
        self.closed = True
        return True


def _match(tag: _Tag, text: str) -> tuple[int, list[str]] | None:
    """Length of ``tag`` at the start of ``text``, and its attributes; None where it is not there.

    The length is 0 while ``text`` is only the beginning of the tag. No attribute is empty.
    """
    at, attributes = 0, []
    for part in tag:
        if part is None:
            end = text.find('"', at)
            value = text[at:] if end < 0 else text[at:end]
            if DSML in value or end == at:
                return None
            if end < 0:
                return 0, []
            attributes.append(value)
            at = end
        elif text.startswith(part, at):
            at += len(part)
        else:
            return (0, []) if part.startswith(text[at:]) else None
    return at, attributes


def _is_json(text: str) -> bool:
    """Whether it is one JSON value; numbers of any length are."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> None:
    raise ValueError(word)  # NaN and infinity are Python's, not JSON's


def _line_feeds(text: str, end: int) -> int:
    """How many line feeds before ``end`` belong to a block that begins there."""
    before = text[max(end - MOST_LINE_FEEDS, 0) : end]
    return len(before) - len(before.rstrip("\n"))


def _possible_start(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that is a proper start of ``tag``."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
