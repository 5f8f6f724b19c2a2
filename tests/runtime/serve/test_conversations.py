"""Conversations of several turns on ds4-tiny: what is computed again, and that nothing changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from ds4q.runtime.engine import Engine
from ds4q.runtime.generate import stop_ids
from ds4q.runtime.serve.job import Job, NewToken
from ds4q.runtime.serve.scheduler import Scheduler
from ds4q.runtime.text.answer import AnswerStream, ToolCall
from ds4q.runtime.text.chat import ChatPrompt, attach_tools, encode_chat
from ds4q.runtime.text.decode import TextStream
from ds4q.runtime.text.pieces import DSML, THINK_END, template
from ds4q.runtime.text.tokenizer import Tokenizer
from tests.runtime.serve.heard import Heard, ask, job
from tests.runtime.serve.scripted import EOS, ScriptedEngine

TURNS = 5
ROOM = 64 << 20
MODES = ("chat", "thinking", "thinking with tools")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Iterator[Engine]:
    with Engine.load(tiny_artifact, threads=2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def tokenizer(engine: Engine) -> Tokenizer:
    """ds4-tiny's, with the one token of tool blocks that it lacks, in place of an unused id."""
    parsed = json.loads(engine.metadata["tokenizer"])
    parsed["added_tokens"].append({**parsed["added_tokens"][-1], "id": 262, "content": DSML})
    return Tokenizer(json.dumps(parsed))


@pytest.fixture
def warm(engine: Engine) -> Iterator[Scheduler]:
    made = Scheduler(engine, prefix_cache_bytes=ROOM)
    yield made
    made.close()


@pytest.fixture
def cold(engine: Engine) -> Iterator[Scheduler]:
    made = Scheduler(engine, prefix_cache_bytes=0)
    yield made
    made.close()


@dataclass
class Talk:
    """A conversation as a client holds it, and as the model has read it so far."""

    config: Any
    tokenizer: Tokenizer
    mode: str
    name: str = "count"
    messages: list[dict[str, Any]] = field(default_factory=list)
    read: list[int] = field(default_factory=list)

    @property
    def thinking(self) -> bool:
        return "thinking" in self.mode

    def prompt(self) -> ChatPrompt:
        messages: Sequence[Any] = self.messages
        if "tools" in self.mode:
            messages = attach_tools(messages, TOOLS)
        return encode_chat(self.config, self.tokenizer, messages, thinking=self.thinking)

    def say(self, turn: int) -> Job:
        """The next user message, and the request that it makes."""
        text = f"Repeat exactly: {self.name}_{turn}" if turn % 2 else f"{self.name}=4{turn}; b=2; "
        self.messages.append({"role": "user", "content": text})
        prompt = self.prompt()
        sampled = {"temperature": 0.7, "seed": turn} if turn == 3 else {}
        ends = stop_ids({"config": self.config}, self.tokenizer)
        return job(
            prompt.ids, prompt.marks, max_tokens=14, top_logprobs=2, stop_ids=ends, **sampled
        )

    def unchanged(self, asked: Job) -> int:
        """Leading tokens that the model has read before."""
        pairs = zip(self.read, asked.prompt_ids, strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    def hear(self, asked: Job, heard: Heard) -> None:
        """The answer becomes a message, as a client sends it back."""
        self.read = [*asked.prompt_ids, *heard.ids]
        stream = AnswerStream(thinking=self.thinking, tools="tools" in self.mode)
        text = TextStream(self.tokenizer.token_bytes)
        pieces = [
            p for id in heard.ids if id not in asked.stop_ids for p in stream.push(text.push(id))
        ]
        pieces += stream.push(text.finish())
        pieces += stream.finish("length")
        said = {"reasoning": "", "content": ""}
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                function = {"name": piece.name, "arguments": piece.arguments}
                calls.append({"id": piece.id, "type": "function", "function": function})
            else:
                said[piece[0]] += piece[1]
        message: dict[str, Any] = {"role": "assistant", "content": said["content"]}
        if self.thinking:
            message["reasoning_content"] = said["reasoning"]
        self.messages.append(message)
        if calls:
            message["tool_calls"] = calls
            self.messages += [_result(call["id"]) for call in calls]

    def call(self, turn: int) -> None:
        """The client takes the last answer for a call, and brings a result."""
        function = {"name": "look_up", "arguments": json.dumps({"key": turn})}
        name = f"call_{turn}"
        call = {"id": name, "type": "function", "function": function}
        self.messages[-1]["tool_calls"] = [call]
        self.messages.append(_result(name))


def _result(call_id: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": "42"}


def told(heard: Heard) -> list[NewToken]:
    heard.finished()
    return [event for event in heard.events if isinstance(event, NewToken)]


@pytest.mark.parametrize("mode", MODES)
def test_only_what_is_new_is_computed_and_nothing_changes(
    engine: Engine, tokenizer: Tokenizer, warm: Scheduler, cold: Scheduler, mode: str
) -> None:
    talk = Talk(engine.metadata["config"], tokenizer, mode)
    unchanged = []
    for turn in range(TURNS):
        asked = talk.say(turn)
        heard, _ = ask(warm, asked)
        expected = told(heard)
        assert expected == told(ask(cold, asked)[0])  # logits' bits, not ids alone
        unchanged.append(talk.unchanged(asked))
        assert heard.cached >= unchanged[-1] - 1
        assert heard.cached <= max(0, unchanged[-1])
        talk.hear(asked, heard)
        if "tools" in mode and turn % 2:
            talk.call(turn)
    assert unchanged[0] == 0
    assert unchanged == sorted(unchanged)
    assert all(count > 15 for count in unchanged[1:])
    assert warm.stats().prefix.hits == TURNS - 1
    assert cold.stats().cached_tokens == 0


CALLING = f"""let me see{THINK_END}I look it up

<{DSML}tool_calls>
<{DSML}invoke name="look_up">
<{DSML}parameter name="key" string="true">naïve</{DSML}parameter>
</{DSML}invoke>
</{DSML}tool_calls>"""


def test_calls_that_come_back_as_they_were_made_are_not_read_again(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    parts = list(template(CALLING))
    said = [
        id
        for part in parts
        for id in (
            tokenizer.encode(part) if isinstance(part, str) else [tokenizer.control(part.text)]
        )
    ]
    scripted = ScriptedEngine(default=said)
    scheduler = Scheduler(scripted, prefix_cache_bytes=ROOM)
    talk = Talk(engine.metadata["config"], tokenizer, "thinking with tools")
    for turn in range(TURNS):
        asked = replace(talk.say(turn), max_tokens=1000)
        heard, _ = ask(scheduler, asked)
        told(heard)
        assert talk.unchanged(asked) == len(talk.read)  # the answer's last token included
        assert heard.cached == max(0, len(talk.read) - 1)
        assert heard.ids == [*said, EOS]
        talk.hear(asked, heard)
        assert talk.messages[-1]["role"] == "tool"
        assert talk.messages[-2]["tool_calls"][0]["function"]["arguments"] == '{"key": "naïve"}'
    scheduler.close()


def test_two_conversations_with_one_start_do_not_disturb_each_other(
    engine: Engine, tokenizer: Tokenizer, warm: Scheduler, cold: Scheduler
) -> None:
    first = Talk(engine.metadata["config"], tokenizer, "chat")
    asked = first.say(0)
    heard, _ = ask(warm, asked)
    told(heard)
    first.hear(asked, heard)
    second = Talk(first.config, tokenizer, "chat", "other", list(first.messages), first.read)
    for turn in range(1, TURNS):
        jobs = [talk.say(turn) for talk in (first, second)]
        both = [ask(warm, asked)[0] for asked in jobs]
        for talk, asked, heard in zip((first, second), jobs, both, strict=True):
            assert told(heard) == told(ask(cold, asked)[0])
            assert heard.cached >= talk.unchanged(asked) - 1
            talk.hear(asked, heard)
    assert first.messages[:2] == second.messages[:2]
    assert first.messages[2:] != second.messages[2:]
    assert warm.stats().prefix.hits == 2 * (TURNS - 1)


def test_a_snapshot_that_had_to_go_costs_time_and_nothing_else(
    engine: Engine, tokenizer: Tokenizer, cold: Scheduler
) -> None:
    talk = Talk(engine.metadata["config"], tokenizer, "chat")
    probe = Scheduler(engine, prefix_cache_bytes=ROOM)
    told(ask(probe, talk.say(0))[0])
    one = probe.stats().prefix.bytes // probe.stats().prefix.entries
    probe.close()
    small = Scheduler(engine, prefix_cache_bytes=2 * one)
    talk = Talk(engine.metadata["config"], tokenizer, "chat")
    for turn in range(3):
        asked = talk.say(turn)
        heard, _ = ask(small, asked)
        assert told(heard) == told(ask(cold, asked)[0])
        talk.hear(asked, heard)
        assert small.stats().prefix.bytes <= 2 * one
    assert small.stats().prefix.evictions > 0
    small.close()
