"""A conversation: what is sent, what is kept, what is reused; stopping and failing on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import ChatError, ContextError, LogitsError
from ds4q.runtime.generate import metadata_object, stop_ids
from ds4q.runtime.serve.conversation import ChatFormat, Conversation, Manner
from ds4q.runtime.serve.job import Finished, Job, Listener, Ticket
from ds4q.runtime.serve.scheduler import Scheduler
from ds4q.runtime.text.tokenizer import Tokenizer
from tests.runtime.serve.scripted import ScriptedEngine
from tests.runtime.serve.served import metadata

DESCRIBED = metadata(tools=False)
TOKENIZER = Tokenizer.from_metadata(DESCRIBED)
assert TOKENIZER is not None
STOPS = stop_ids(DESCRIBED, TOKENIZER)


def words(*, thinking: bool = False, effort: str = "low") -> ChatFormat:
    assert TOKENIZER is not None
    config = metadata_object(DESCRIBED, "config")
    return ChatFormat(config, TOKENIZER, Path("m.hfq"), None, thinking, effort)


def manner(max_tokens: int = 200) -> Manner:
    return Manner(max_tokens, 0.0, 1.0, 7, STOPS, ignore_stop=False)


def echo(prompt: list[int]) -> bytes:
    """An answer that depends on all of the prompt."""
    return f"{len(prompt)}.{sum(prompt)}".encode()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(default=echo)


@pytest.fixture
def scheduler(engine: ScriptedEngine) -> Iterator[Scheduler]:
    made = Scheduler(engine, queue=1, concurrent=1, prefix_cache_bytes=1 << 20)
    yield made
    made.close()
    assert engine.live_states == 0


def said(conversation: Conversation, text: str) -> tuple[str, str]:
    """Reasoning and content of the whole answer."""
    pieces = list(conversation.ask(text))
    return "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)


def ended(conversation: Conversation) -> Finished:
    assert conversation.finished is not None
    return conversation.finished


@pytest.mark.parametrize("thinking", [False, True])
def test_each_question_goes_on_from_what_was_said(
    engine: ScriptedEngine, scheduler: Scheduler, thinking: bool
) -> None:
    def answer(prompt: list[int]) -> bytes:
        return (b"so</think>" if thinking else b"") + echo(prompt)

    engine.default = answer
    conversation = Conversation(scheduler, words(thinking=thinking), manner())
    messages: list[dict[str, str]] = []
    unchanged = 0
    for number in range(5):
        text = f"question {number}"
        messages.append({"role": "user", "content": text})
        prompt = words(thinking=thinking).prompt(messages)
        reasoning, content = said(conversation, text)
        assert content == echo(list(prompt.ids[: prompt.marks[-1] + 1])).decode()
        assert reasoning == ("so" if thinking else "")
        assert conversation.reasoning_tokens == (len("so</think>") if thinking else 0)
        messages.append({"role": "assistant", "content": content})
        assert conversation.messages == messages
        assert ended(conversation).prompt_tokens == len(prompt.ids)
        assert ended(conversation).cached_tokens >= unchanged - 1
        unchanged = prompt.marks[-1]


def test_answers_are_those_of_a_cold_model(tiny_artifact: Path) -> None:
    with Engine.load(tiny_artifact, threads=1) as engine:
        texts = []
        for cache_bytes in (1 << 30, 0):
            made = Scheduler(engine, queue=1, concurrent=1, prefix_cache_bytes=cache_bytes)
            conversation = Conversation(made, words(), manner(12))
            texts.append([said(conversation, text)[1] for text in ("def f(", "and", "so?")])
            assert (ended(conversation).cached_tokens > 0) == (cache_bytes > 0)
            made.close()
    assert texts[0] == texts[1]
    assert all(texts[0])


def test_reset_forgets(scheduler: Scheduler) -> None:
    conversation = Conversation(scheduler, words(), manner())
    first = said(conversation, "a")
    assert said(conversation, "a") != first
    conversation.reset()
    assert conversation.messages == []
    assert said(conversation, "a") == first


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_went(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    engine.default = b"x" * 1000
    conversation = Conversation(scheduler, words(), manner(2000))
    pieces = conversation.ask("go")
    got = "".join(next(pieces).content for _ in range(3))
    pieces.close()
    assert got == "xxx"
    assert conversation.messages[-1] == {"role": "assistant", "content": "xxx"}
    assert conversation.finished is None
    assert len(engine.forwards) < 900
    assert scheduler.stats().running == 0
    engine.default = b"ok"
    assert said(conversation, "next") == ("", "ok")


def test_a_question_without_any_answer_is_not_kept(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    engine.default = b"thinking and thinking"
    conversation = Conversation(scheduler, words(thinking=True), manner())
    pieces = conversation.ask("go")
    assert next(pieces).reasoning == "t"
    pieces.close()
    assert conversation.messages == []
    assert said(conversation, "go") == ("thinking and thinking", "")
    assert conversation.messages == []


def test_a_failure_leaves_the_conversation_as_it_was(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    conversation = Conversation(scheduler, words(), manner())
    said(conversation, "a")
    before = list(conversation.messages)
    error = LogitsError(found="nan")
    engine.fails = lambda ids: error
    with pytest.raises(LogitsError):
        said(conversation, "b")
    engine.fails = lambda ids: None
    with pytest.raises(ContextError):
        said(conversation, "c" * 5000)
    assert conversation.messages == before
    assert said(conversation, "b")[1]


def test_what_the_format_refuses_is_raised_before_anything_runs(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    conversation = Conversation(scheduler, words(thinking=True, effort="max"), manner())
    with pytest.raises(ChatError):
        said(conversation, "a")
    assert engine.forwards == []


def test_each_answer_has_a_seed_of_its_own(scheduler: Scheduler) -> None:
    jobs: list[Job] = []

    class Noting:
        def submit(self, job: Job, listener: Listener) -> Ticket:
            jobs.append(job)
            return scheduler.submit(job, listener)

    conversation = Conversation(Noting(), words(), manner())
    said(conversation, "a")
    said(conversation, "b")
    assert [job.seed for job in jobs] == [7, 8]
    assert {job.stop_ids for job in jobs} == {STOPS}
