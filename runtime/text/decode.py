"""Owns turning generated tokens into text, piece by piece. Knows no model and no prompt."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Literal

from ds4q.runtime.text.pieces import THINK_END

Channel = Literal["reasoning", "content"]


class TextStream:
    """Text of a growing sequence of tokens; no piece ever ends inside a character.

    Parameters
    ----------
    token_bytes : the bytes of a token id, which may be a fraction of a character
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        """One U+FFFD where the tokens end inside a character, else nothing."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class ReasoningStream:
    """Splits generated text at the first ``</think>``: reasoning before it, content after it.

    A tail that could still become the tag is held back, so the joined pieces of each channel equal
    the split of the whole text.
    """

    def __init__(self) -> None:
        self._held = ""
        self.channel: Channel = "reasoning"

    def push(self, text: str) -> list[tuple[Channel, str]]:
        """The pieces that are certain after ``text``, in order.

        The first ``content`` piece may be empty: it says that the reasoning has ended.
        """
        if self.channel == "content":
            return [("content", text)] if text else []
        reasoning, tag, content = (self._held + text).partition(THINK_END)
        pieces: list[tuple[Channel, str]] = []
        if tag:
            self._held = ""
            self.channel = "content"
            pieces.append(("content", content))
        else:
            certain = len(reasoning) - _possible_start(reasoning, THINK_END)
            reasoning, self._held = reasoning[:certain], reasoning[certain:]
        return [("reasoning", reasoning), *pieces] if reasoning else pieces

    def finish(self) -> list[tuple[Channel, str]]:
        """What was held back: no tag came of it."""
        held, self._held = self._held, ""
        return [("reasoning", held)] if held else []


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and content of text generated in thinking mode; all reasoning without the tag."""
    reasoning, _, content = text.partition(THINK_END)
    return reasoning, content


def _possible_start(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that is a proper start of ``tag``."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
