"""Owns turning generated tokens into text, piece by piece. Knows no model and no prompt."""

from __future__ import annotations

import codecs
from collections.abc import Callable

from ds4q.runtime.text.pieces import THINK_END


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


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and content of text generated in thinking mode; all reasoning without the tag."""
    reasoning, _, content = text.partition(THINK_END)
    return reasoning, content
