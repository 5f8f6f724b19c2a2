"""Owns the chat of ``ds4q run`` on a terminal: lines in, answers out. No model code.

Everything of the conversation goes to stdout, which is the terminal; errors and figures to stderr.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from ds4q.artifact import stops
from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.stops import Terminated
from ds4q.cli.common import say, visible, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ds4q.runtime.serve.conversation import Conversation
    from ds4q.runtime.serve.job import Finished

PREFIX_CACHE_BYTES = 1 << 30  # of the states that a conversation goes on from
HELP = """\
/reset     begin a new conversation
/thinking  show what came before the last answer
/help      show this
/exit      end; Ctrl-D does so, too, but not during an answer
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one; pasted lines are one."""
_COMMANDS = ("/reset", "/thinking", "/help", "/exit")
_LIKE_A_COMMAND = re.compile(r"/[A-Za-z]+")
_LABEL = "thinking: "


def on_terminal() -> bool:
    """Whether somebody can type and read here."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


class Chat:
    """A conversation at the terminal, until the user ends it.

    Attributes
    ----------
    prefill_s, decode_s : what the model took for all answers
    """

    def __init__(self, conversation: Conversation, *, quiet: bool) -> None:
        self._conversation = conversation
        self._quiet = quiet
        self._style = _Style()
        self._reasoning = ""
        self.prefill_s = self.decode_s = 0.0

    def run(self) -> None:
        """Answer line after line; returns at /exit and at the end of the input."""
        self._edit_lines()
        if not self._quiet:
            say("/help lists commands, Ctrl-D ends.")
        try:
            self._talk()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise Terminated from error  # the terminal is gone, and its signal comes or has come

    def _edit_lines(self) -> None:
        """Editing and history for ``input``, where there is a library for it."""
        with suppress(ImportError):
            import readline

            # Python switches pasting off; libedit, which may stand in, does not know it.
            if self._style.escapes and "libedit" not in (readline.__doc__ or ""):
                readline.parse_and_bind("set enable-bracketed-paste on")

    def _talk(self) -> None:
        for text in self._questions():
            try:
                self._answer(text)
            except Ds4qError as error:
                say(f"ds4q: error: {error}")
            except Terminated:
                raise
            except KeyboardInterrupt:
                stops.go_on()
                self._note("stopped")

    def _questions(self) -> Iterator[str]:
        """What is to be answered; commands are done on the way."""
        while True:
            try:
                text = self._read()
            except EOFError:
                write_text("\n")
                return
            except Terminated:
                raise
            except KeyboardInterrupt:
                stops.go_on()
                write_text("\n")
                say("Ctrl-D or /exit ends the chat.")
                continue
            words = text.split()
            if words == ["/exit"]:
                return
            if not words or self._obeys(words):
                continue
            yield text

    def _read(self) -> str:
        """A question: a line or a paste, and the lines after it while each ends in a backslash."""
        lines = [input(self._style.prompt("> "))]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(self._style.prompt(". ")))
        return "\n".join(lines)

    def _obeys(self, words: list[str]) -> bool:
        """Do the command that these words are; whether they are one, or nearly so."""
        word = words[0]
        if len(words) == 1 and word in _COMMANDS:
            self._command(word)
        elif word.lower() in _COMMANDS:  # to send it might give a slip of the hand to the model
            say(
                f"not sent: the command is {word.lower()}, alone and in small letters; "
                "a question begins with another word"
            )
        elif len(words) == 1 and _LIKE_A_COMMAND.fullmatch(word):
            say(f"there is no command {word}; /help lists them")
        else:
            return False
        return True

    def _command(self, word: str) -> None:
        if word == "/reset":
            self._conversation.reset()
            self._reasoning = ""
            self._note("a new conversation")
        elif word == "/thinking":
            self._note(self._reasoning.strip() or "there was none")
        else:
            write_text(HELP + "\n")

    def _answer(self, text: str) -> None:
        thoughts = _Thoughts(self._style)
        last = "\n"
        try:
            with closing(self._conversation.ask(text)) as pieces:
                for piece in pieces:
                    thoughts.add(visible(piece.reasoning))
                    if content := visible(piece.content):
                        thoughts.fold(self._conversation.reasoning_tokens)
                        write_text(content)
                        last = content
        finally:
            thoughts.fold(self._conversation.reasoning_tokens)
            self._reasoning = thoughts.text
            if not last.endswith("\n"):
                write_text("\n")
        if (finished := self._conversation.finished) is not None:
            self._tell(finished)

    def _tell(self, finished: Finished) -> None:
        self.prefill_s += finished.first_token_s or 0.0
        self.decode_s += finished.decode_s or 0.0
        if finished.reason == "length":
            self._note("cut at the most tokens that --max-tokens or the context allows")
        if self._quiet:
            return
        made, first_s = finished.completion_tokens, finished.first_token_s or 0.0
        rate = f", {(made - 1) / finished.decode_s:.1f} tokens/s" if finished.decode_s else ""
        line = (
            f"{made:,} tokens{rate}, the first after {first_s:.2f} s; "
            f"prompt: {finished.prompt_tokens:,} tokens, {finished.cached_tokens:,} of them cached"
        )
        say(line, style=self._style.dim)

    def _note(self, text: str) -> None:
        write_text(self._style.dim(text) + "\n")


class _Style:
    """How text is set apart; plain where the terminal knows no escapes."""

    def __init__(self) -> None:
        self.escapes = os.environ.get("TERM", "dumb").lower() not in ("", "dumb", "unknown")

    def dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[22m" if self.escapes else text

    def prompt(self, text: str) -> str:
        """The marks tell line editing what takes no room."""
        return f"\x01\x1b[1m\x02{text}\x01\x1b[22m\x02" if self.escapes else text


class _Thoughts:
    """The thinking before an answer: one line that shows its end, then one that says how long."""

    def __init__(self, style: _Style) -> None:
        self._style = style
        self._began = time.monotonic()
        self._folded = True
        self.text = ""

    def add(self, text: str) -> None:
        """Show that it goes on; nothing for no text."""
        if not text:
            return
        self.text += text
        if self._style.escapes:
            write_text("\r\x1b[K" + self._style.dim(_LABEL + self._tail()))
        elif self._folded:
            write_text(_LABEL.rstrip(": ") + "\n")
        self._folded = False

    def _tail(self) -> str:
        """As much of the end as fits beside the label, on one line."""
        from rich.cells import cell_len

        room = shutil.get_terminal_size().columns - len(_LABEL) - 1
        tail = " ".join(self.text[-4 * max(room, 1) :].split())
        while tail and cell_len(tail) > room:
            tail = tail[max(1, (cell_len(tail) - room) // 2) :]
        return tail

    def fold(self, tokens: int) -> None:
        """Put a line in its place; a second call does nothing."""
        if self._folded:
            return
        self._folded = True
        seconds = time.monotonic() - self._began
        line = f"thought for {seconds:.1f} s, {tokens:,} tokens; /thinking shows it"
        write_text(("\r\x1b[K" if self._style.escapes else "") + self._style.dim(line) + "\n")
