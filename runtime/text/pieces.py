"""Owns a prompt as a list of pieces, control tokens and text, and the names of control tokens.

Keeping the two apart until encoding is what stops caller text from becoming a control token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ds4q.runtime.errors import ContextError
from ds4q.runtime.text.tokenizer import Tokenizer

BAR = "\uff5c"  # fullwidth vertical line, not ASCII
LOW = "\u2581"  # lower one eighth block, where other tokenizers write a space


def _token(name: str) -> str:
    return f"<{BAR}{name}{BAR}>"


BOS = _token(f"begin{LOW}of{LOW}sentence")
EOS = _token(f"end{LOW}of{LOW}sentence")
USER = _token("User")
ASSISTANT = _token("Assistant")
LATEST_REMINDER = _token("latest_reminder")
THINK = "<think>"
THINK_END = "</think>"
DSML = f"{BAR}DSML{BAR}"
USER_TASKS = {name: _token(name) for name in ("action", "query", "authority", "domain", "read_url")}
TITLE_TASK = _token("title")


@dataclass(frozen=True, slots=True)
class Control:
    """One control token, by its text."""

    text: str


Piece = Control | str


_IN_TEMPLATES = re.compile(f"({DSML}|{THINK}|{THINK_END})")


def template(text: str) -> Iterator[Piece]:
    """Pieces of the format's own text: what spells a control token here is one."""
    for part in _IN_TEMPLATES.split(text):
        yield Control(part) if _IN_TEMPLATES.fullmatch(part) else part


class Prompt:
    """Pieces in order; text that follows text is joined, so that it is encoded as one run."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def control(self, text: str) -> Prompt:
        """Append the control token spelled ``text``."""
        self.pieces.append(Control(text))
        return self

    def text(self, text: str) -> Prompt:
        """Append ordinary text."""
        if not text:
            return self
        if self.pieces and isinstance(self.pieces[-1], str):
            self.pieces[-1] += text
        else:
            self.pieces.append(text)
        return self

    def extend(self, pieces: Iterable[Piece]) -> Prompt:
        """Append ``pieces``."""
        for piece in pieces:
            if isinstance(piece, Control):
                self.pieces.append(piece)
            else:
                self.text(piece)
        return self

    def __str__(self) -> str:
        """The string form, in which the difference between text and control tokens is lost."""
        return "".join(p.text if isinstance(p, Control) else p for p in self.pieces)

    def encode(self, tokenizer: Tokenizer, *, fewer_than: int | None = None) -> list[int]:
        """Token ids.

        Parameters
        ----------
        fewer_than : bound of the ids; a prompt that its bytes show to be longer is not tokenized

        Raises
        ------
        ControlTokenError : the tokenizer lacks a control token
        PromptError : as ``Tokenizer.encode_parts``
        ContextError : there are ``fewer_than`` ids or more; they need not have been counted
        """
        if fewer_than is not None:
            least = sum(
                1 if isinstance(piece, Control) else tokenizer.least_tokens(piece)
                for piece in self.pieces
            )
            if least >= fewer_than:
                raise _too_long(fewer_than, least)
        ids: list[int] = []
        for piece in self.pieces:
            if isinstance(piece, Control):
                ids.append(tokenizer.control(piece.text))
                continue
            for part in tokenizer.encode_parts(piece, bounded=fewer_than is not None):
                if fewer_than is not None and len(ids) >= fewer_than:
                    raise _too_long(fewer_than, len(ids))
                ids += part
        return ids


def _too_long(fewer_than: int, least: int) -> ContextError:
    return ContextError(
        "the prompt fills the context",
        expected=f"fewer than {fewer_than} tokens",
        found=f"at least {least}",
        remedy="shorten the prompt",
    )
