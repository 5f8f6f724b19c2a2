"""Owns one conversation: its messages, each question's prompt, its answer. No terminal, no HTTP.

Answers come from a scheduler, so that a question goes on from a snapshot of what was said before.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from ds4q.quantize.encoding import Encoding
from ds4q.runtime.serve.job import Event, Failed, Finished, Job, Listener, NewToken, Ticket
from ds4q.runtime.serve.transcript import Piece, Transcript
from ds4q.runtime.text.chat import ChatPrompt, encode_chat
from ds4q.runtime.text.tokenizer import Tokenizer


class Submits(Protocol):
    """What takes jobs: the scheduler."""

    def submit(self, job: Job, listener: Listener) -> Ticket:
        """Queue ``job``; ``listener`` hears its events, from another thread."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How messages become a prompt, see ``encode_chat``; ``path`` is the artifact, for errors."""

    config: Mapping[str, Any]
    tokenizer: Tokenizer
    path: Path
    encoding: Encoding | None
    thinking: bool
    effort: str

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> ChatPrompt:
        """The prompt of ``messages``; raises as ``encode_chat``."""
        return encode_chat(
            self.config,
            self.tokenizer,
            messages,
            thinking=self.thinking,
            effort=self.effort,
            encoding=self.encoding,
            path=self.path,
        )


@dataclass(frozen=True, slots=True)
class Manner:
    """How each answer is drawn and ended, see ``Job``.

    Attributes
    ----------
    seed : of the first answer; each further one takes the next
    """

    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_ids: frozenset[int]
    ignore_stop: bool


class Conversation:
    """Questions and answers in turn.

    Attributes
    ----------
    messages : what was said so far, in the OpenAI shape
    finished : the end of the last answer; None before there is one, and where it was given up
    reasoning_tokens : of the last answer
    """

    def __init__(self, scheduler: Submits, chat_format: ChatFormat, manner: Manner) -> None:
        self._scheduler = scheduler
        self._format = chat_format
        self._manner = manner
        self._asked = 0
        self.messages: list[dict[str, str]] = []
        self.finished: Finished | None = None
        self.reasoning_tokens = 0

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = []

    def ask(self, text: str) -> Generator[Piece]:
        """The answer to ``text``, piece by piece.

        An iterator that is closed early stops the model; what it had given is the answer then.
        Question and answer are kept once there is an answer: one that fails, or is stopped before
        its first text, leaves the conversation as it was.

        Raises
        ------
        Ds4qError : the question cannot be asked, or the model failed
        """
        manner = self._manner
        self.finished, self.reasoning_tokens = None, 0
        question = {"role": "user", "content": text}
        prompt = self._format.prompt([*self.messages, question])
        job = Job(
            prompt_ids=prompt.ids,
            marks=prompt.marks,
            max_tokens=manner.max_tokens,
            temperature=manner.temperature,
            top_p=manner.top_p,
            seed=manner.seed + self._asked,
            stop_ids=manner.stop_ids,
            ignore_stop=manner.ignore_stop,
        )
        transcript = Transcript(
            self._format.tokenizer, stop_ids=manner.stop_ids, thinking=prompt.thinking
        )
        events: SimpleQueue[Event] = SimpleQueue()
        answer = Piece()
        ticket = self._scheduler.submit(job, events.put)
        self._asked += 1
        ended = False
        try:
            while not ended:
                event = events.get()
                ended = isinstance(event, Finished | Failed)
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, NewToken):
                    piece = transcript.take(event)
                elif isinstance(event, Finished):
                    self.finished = event
                    piece = transcript.end(event.reason)
                else:
                    continue
                self.reasoning_tokens = transcript.reasoning_tokens
                answer.add(piece)
                yield piece
        finally:
            ticket.cancel()
            while not ended:  # else the model would still be at it when the next question comes
                ended = isinstance(events.get(), Finished | Failed)
            if answer.content:
                said = {"role": "assistant", "content": answer.content}
                self.messages += [question, said]
