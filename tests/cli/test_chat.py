"""The chat of ds4q run: at a terminal of its own with ds4-tiny, and line by line with a script."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4q.artifact.stops import Terminated
from ds4q.cli.chat import HELP, Chat
from ds4q.runtime.errors import LogitsError
from ds4q.runtime.serve.conversation import Conversation
from ds4q.runtime.serve.scheduler import Scheduler
from tests.cli.terminal import plain, terminal
from tests.runtime.serve.scripted import ScriptedEngine
from tests.runtime.serve.test_conversation import manner, words

EXPECTED = json.loads(
    (Path(__file__).parents[1] / "data" / "ds4-tiny" / "expected.json").read_text("utf-8")
)
PROMPT = "> "
ENDLESS = ["--temp", "0", "--ignore-eos", "--max-tokens", "100000"]


def question(name: str) -> tuple[str, str]:
    """A question that ds4-tiny knows, and its answer."""
    case = EXPECTED[name]
    return bytes(case["prompt"][2:-2]).decode(), case["text"]


# ------------------------------------------------------------------ at a terminal


def test_a_chat_remembers_and_edits_and_ends_at_ctrl_d(tiny_artifact: Path) -> None:
    pytest.importorskip("readline")
    asked, answer = question("copy-snake")
    with terminal("run", str(tiny_artifact), "--temp", "0", "--max-tokens", "40") as user:
        user.until("/help lists commands, Ctrl-D ends.")
        user.until(PROMPT)
        user.type(asked + "\n")
        shown = plain(user.until(PROMPT)).splitlines()
        assert shown[1] == answer
        count = len(answer) + 1
        assert re.fullmatch(
            rf"{count} tokens, [\d.]+ tokens/s, the first after [\d.]+ s; "
            rf"prompt: {len(asked) + 4} tokens, 0 of them cached",
            shown[2],
        )
        user.type("\x1b[A")  # the line before
        user.until(asked)
        user.type("\x7f!\n")
        again = plain(user.until(PROMPT))
        cached = re.search(r"prompt: ([\d,]+) tokens, ([\d,]+) of them cached", again)
        assert cached is not None
        total, kept = (int(number.replace(",", "")) for number in cached.groups())
        assert total == 2 * (len(asked) + 4) + len(answer)
        assert kept >= len(asked) + 3
        user.type("\x04")
        user.end()
        assert user.process.returncode == 0


def test_lines_that_are_pasted_are_one_question(tiny_artifact: Path) -> None:
    readline = pytest.importorskip("readline")
    if "libedit" in readline.__doc__:
        pytest.skip("libedit knows no pasting")
    with terminal("run", str(tiny_artifact), "--temp", "0", "--max-tokens", "9") as user:
        assert "\x1b[?2004h" in user.until(PROMPT)
        user.type("\x1b[200~one\ntwo \\\rthree\x1b[201~\n")
        shown = plain(user.until(PROMPT))
        size = len("one\ntwo \\\nthree") + 4
        assert f"prompt: {size} tokens, 0 of them cached" in shown
        user.type("/exit\n")
        user.end()
        assert user.process.returncode == 0


def test_ctrl_d_in_an_answer_does_not_end_the_chat_after_it(tiny_artifact: Path) -> None:
    pytest.importorskip("readline")
    with terminal("run", str(tiny_artifact), "-q", *ENDLESS) as user:
        user.until(PROMPT)
        asked, answer = question("copy-snake")
        user.type(asked + "\n")
        user.until(asked)
        user.until(answer)  # and it goes on
        user.type("\x04~~~")
        user.until("~~~")
        user.process.send_signal(signal.SIGINT)  # the key would take back what was typed
        user.until("stopped")
        user.until(PROMPT)
        user.type("\x15/reset\n")
        user.until("a new conversation")
        user.until(PROMPT)
        user.type("\x04")
        user.end()
        assert user.process.returncode == 0


def test_ctrl_c_stops_an_answer_and_not_the_chat(tiny_artifact: Path) -> None:
    with terminal("run", str(tiny_artifact), "-q", "--think", *ENDLESS) as user:
        user.until(PROMPT)
        user.type("def f(\n")
        user.until("thinking: ")
        user.until("thinking: ")
        user.type("\x03")
        stopped = plain(user.until(PROMPT))
        assert re.search(
            r"thought for [\d.]+ s, \d+ tokens; /thinking shows it\nstopped\n", stopped
        )
        user.type("\x03\n")  # the second key wakes a line editor that was not waiting yet
        user.until("Ctrl-D or /exit ends the chat.")
        user.type("/thinking\n")
        user.until("\x1b[2m")
        assert len(user.until("\x1b[22m")) > len("\x1b[22m")
        user.type("/exit\n")
        user.end()
        assert user.process.returncode == 0


@pytest.mark.parametrize("busy", [False, True])
def test_sigterm_ends_it(tiny_artifact: Path, busy: bool) -> None:
    with terminal("run", str(tiny_artifact), "-q", *ENDLESS) as user:
        user.until(PROMPT)
        if busy:
            asked, answer = question("copy-snake")
            user.type(asked + "\n")
            user.until(asked)
            user.until(answer)  # and it goes on
        user.process.send_signal(signal.SIGTERM)
        if not busy:
            user.type("\n")  # wakes a line editor that was not waiting yet
        assert "ds4q: terminated" in user.end()
        assert user.process.returncode == 143


@pytest.mark.parametrize("busy", [False, True])
def test_a_terminal_that_closes_ends_it(tiny_artifact: Path, busy: bool) -> None:
    with terminal("run", str(tiny_artifact), "--think", *ENDLESS) as user:
        user.until(PROMPT)
        if busy:
            user.type("def f(\n")
            for _ in range(5):
                user.until("thinking: ")
        user.hang_up()
        assert user.process.returncode == 143


def test_a_terminal_without_escapes_gets_none(tiny_artifact: Path) -> None:
    asked, _ = question("copy-hex")
    with terminal("run", str(tiny_artifact), "--think", "--max-tokens", "9", term="dumb") as user:
        user.until(PROMPT)
        user.type(asked + "\n")
        user.until(PROMPT)
        user.type("/exit\n")
        user.end()
        assert user.process.returncode == 0
        assert "thought for" in user.shown
        assert "\x1b" not in user.shown


@pytest.mark.parametrize("options", [["--json"], ["--raw"], ["--stats", "s.json"]])
def test_what_is_for_one_prompt_is_refused(options: list[str]) -> None:
    with terminal("run", "no.hfq", *options) as user:
        assert "--raw, --json and --stats need a prompt" in " ".join(user.end().split())
        assert user.process.returncode == 2


# ------------------------------------------------------------------ line by line


class Keyboard:
    """Types lines, and remembers what it was prompted with; an error is what a key did."""

    def __init__(self, lines: list[str | BaseException]) -> None:
        self.lines: Iterator[str | BaseException] = iter(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self.lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line


class Room:
    """A chat with a scripted model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.engine = ScriptedEngine(default=b"ok")
        self.thinking = False
        self.max_tokens = 200
        self.keyboard = Keyboard([])
        self._patch, self._capsys = monkeypatch, capsys

    def chat(self, *lines: str | BaseException, quiet: bool = True) -> tuple[str, str]:
        """What stdout and stderr hold after these lines."""
        self.keyboard = Keyboard(list(lines))
        self._patch.setattr("builtins.input", self.keyboard)
        scheduler = Scheduler(self.engine, queue=1, concurrent=1, prefix_cache_bytes=1 << 20)
        words_of = words(thinking=self.thinking)
        self.conversation = Conversation(scheduler, words_of, manner(self.max_tokens))
        try:
            Chat(self.conversation, quiet=quiet).run()
        finally:
            scheduler.close()
        return self._capsys.readouterr()

    def asked(self) -> list[str]:
        return [each["content"] for each in self.conversation.messages if each["role"] == "user"]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Room:
    monkeypatch.setenv("TERM", "dumb")
    return Room(monkeypatch, capsys)


def test_answers_go_to_stdout_and_figures_to_stderr(room: Room) -> None:
    out, err = room.chat("hi", quiet=False)
    assert out == "ok\n\n"
    assert err.splitlines()[0] == "/help lists commands, Ctrl-D ends."
    assert err.splitlines()[1].startswith("3 tokens, ")
    assert room.chat("hi")[1] == ""


def test_commands(room: Room) -> None:
    out, err = room.chat("one", "/reset", "two", "/help", "/thinking", "/nothing", " /exit ", "no")
    assert room.asked() == ["two"]
    assert out == f"ok\na new conversation\nok\n{HELP}\nthere was none\n"
    assert err == "there is no command /nothing; /help lists them\n"


def test_only_a_word_is_a_command(room: Room) -> None:
    room.chat("/usr/bin is what?", "what is /help", "//", "/exit!", "", "   ")
    assert room.asked() == ["/usr/bin is what?", "what is /help", "//", "/exit!"]


@pytest.mark.parametrize("line", ["/Reset", "/reset now", " /RESET", "/Exit", "/help\nme"])
def test_what_is_nearly_a_command_is_not_sent(room: Room, line: str) -> None:
    word = line.split()[0].lower()
    out, err = room.chat("a", line, "b")
    assert room.asked() == ["a", "b"]
    assert out == "ok\nok\n\n"
    assert err == (
        f"not sent: the command is {word}, alone and in small letters; "
        "a question begins with another word\n"
    )


def test_a_backslash_goes_on_in_the_next_line(room: Room) -> None:
    room.chat("a\\", " b\\", "c", "d\\e")
    assert room.asked() == ["a\n b\nc", "d\\e"]
    assert room.keyboard.prompts == ["> ", ". ", ". ", "> ", "> "]


def test_ctrl_c_at_the_prompt_drops_the_line(room: Room) -> None:
    out, err = room.chat("a\\", KeyboardInterrupt(), "b")
    assert room.asked() == ["b"]
    assert out == "\nok\n\n"
    assert err == "Ctrl-D or /exit ends the chat.\n"
    with pytest.raises(Terminated):
        room.chat(Terminated())


def test_thinking_is_folded_and_shown_when_asked(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.engine.default = b"well,\nperhaps</think>Yes."
    room.thinking = True
    out, _ = room.chat("so?", "/thinking")
    assert re.fullmatch(
        r"thinking\nthought for [\d.]+ s, 21 tokens; /thinking shows it\nYes\.\n"
        r"well,\nperhaps\n\n",
        out,
    )
    assert room.conversation.messages[-1]["content"] == "Yes."
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "24")
    out, _ = room.chat("so?")
    lines = re.findall(r"\r\x1b\[K\x1b\[2m(.*?)\x1b\[22m", out)
    assert lines[-2] == "thinking: well, perhaps"
    assert lines[-1].startswith("thought for ")
    assert max(map(len, lines[:-1])) == 23


@pytest.mark.parametrize("columns", [8, 12, 30, 80])
def test_the_line_of_thoughts_never_wraps(
    room: Room, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    from rich.cells import cell_len

    room.engine.default = ("思考思考 thinking " * 9 + "</think>Yes.").encode()
    room.thinking, room.max_tokens = True, 1000
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    out, _ = room.chat("so?")
    lines = re.findall(r"\r\x1b\[K\x1b\[2m(thinking: ?.*?)\x1b\[22m", out)
    assert lines
    assert max(map(cell_len, lines)) < max(columns, len("thinking: ") + 1)


def test_an_answer_cannot_command_the_terminal(room: Room) -> None:
    room.engine.default = b"a\x1b[2J\x9b\x07\r\nb\tc\x7f"
    out, _ = room.chat("hi")
    assert out == "a\ufffd[2J\ufffd\ufffd\nb\tc\ufffd\n\n"


def test_an_answer_that_is_cut_says_so(room: Room) -> None:
    room.engine.default = b"x" * 100
    room.max_tokens = 5
    assert room.chat("hi")[0] == (
        "xxxxx\ncut at the most tokens that --max-tokens or the context allows\n\n"
    )


def test_a_failure_is_one_line_and_the_chat_goes_on(room: Room) -> None:
    room.engine.fails = lambda ids: LogitsError(found="nan") if ord("a") in ids else None
    out, err = room.chat("a", "b", "x" * 5000)
    assert room.asked() == ["b"]
    assert out == "ok\n\n"
    first, second = err.splitlines()
    assert first.startswith("ds4q: error: ")
    assert "nan" in first
    assert "context" in second
