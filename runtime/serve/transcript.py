"""Owns what becomes of an answer's tokens: text by channel, tool calls, log probabilities, counts.

It knows no HTTP and no JSON shape; a whole answer is the sum of its pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ds4q.runtime.serve.job import NewToken
from ds4q.runtime.text.answer import AnswerStream, Channel, ToolCall
from ds4q.runtime.text.decode import TextStream
from ds4q.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log probability, and its likeliest alternatives.

    The mark that ends the reasoning is of neither channel, and is not told.
    """

    channel: Channel
    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Piece:
    """What one step adds to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def add(self, other: Piece) -> None:
        """Append what ``other`` adds."""
        self.reasoning += other.reasoning
        self.content += other.content
        self.calls += other.calls
        self.scored += other.scored
        self.ids += other.ids

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.reasoning or self.content or self.calls or self.scored or self.ids)


class Transcript:
    """One answer as its tokens come.

    Parameters
    ----------
    stop_ids : tokens without text, which end an answer
    thinking : the answer begins inside the reasoning
    tools : tool calls are told from text
    stops : strings that end the answer
    keep_ids : pieces carry token ids

    Attributes
    ----------
    tokens : number of tokens so far
    reasoning_tokens : those up to the end of the reasoning, its mark included
    stopped : a stop string came; nothing after it counts
    finish_reason : None until ``end``
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_ids: Collection[int],
        thinking: bool = False,
        tools: bool = False,
        stops: Sequence[str] = (),
        keep_ids: bool = False,
    ) -> None:
        self._stop_ids = stop_ids
        self._keep_ids = keep_ids
        self._text = TextStream(tokenizer.token_bytes)
        self._answer = AnswerStream(thinking=thinking, tools=tools, stop=stops)
        self.tokens = 0
        self.reasoning_tokens = 0
        self.stopped = False
        self.finish_reason: str | None = None

    def take(self, token: NewToken) -> Piece:
        """What ``token`` adds."""
        piece = Piece()
        self.tokens += 1
        if self._keep_ids:
            piece.ids.append(token.id)
        channel = self._answer.channel
        if channel == "reasoning":
            self.reasoning_tokens += 1
        if token.id in self._stop_ids:
            return piece
        self._sort(piece, self._answer.push(self._text.push(token.id)))
        self.stopped = self._answer.stopped
        if token.logprob is not None and self._answer.channel == channel:
            piece.scored.append(Scored(channel, token.id, token.logprob, token.top))
        return piece

    def end(self, reason: str) -> Piece:
        """What was held back, at an end for ``reason`` ("stop" or "length")."""
        piece = Piece()
        if not self.stopped:
            self._sort(piece, self._answer.push(self._text.finish()))
        self._sort(piece, self._answer.finish("stop" if self.stopped else reason))
        self.finish_reason = self._answer.finish_reason
        return piece

    def _sort(self, piece: Piece, parts: Sequence[tuple[Channel, str] | ToolCall]) -> None:
        for part in parts:
            if isinstance(part, ToolCall):
                piece.calls.append(part)
            elif part[0] == "reasoning":
                piece.reasoning += part[1]
            else:
                piece.content += part[1]
