"""The scheduler over a scripted engine: order, batches, snapshots, leaving, failing, ending."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ds4q.runtime.errors import (
    ContextError,
    DrainingError,
    EngineError,
    LogitsError,
    QueueFullError,
    RunError,
    SamplingError,
    ServeError,
    TokenError,
)
from ds4q.runtime.serve.job import Event, Failed, Finished, NewToken, Prefilled, Started
from ds4q.runtime.serve.scheduler import Scheduler
from tests.checks import check_refused
from tests.runtime.serve.heard import Heard, answer, ask, job
from tests.runtime.serve.scripted import (
    ASSISTANT,
    BOS,
    EOS,
    PATIENCE_S,
    ScriptedEngine,
    ScriptedSnapshot,
    ScriptedState,
)

ROOM = 1 << 20
HI = [BOS, 1, 2, ASSISTANT, 261]
ANSWER = [10, 11, 12]


def chat(*words: int) -> list[int]:
    return [BOS, *words, ASSISTANT, 261]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(default=ANSWER)


@pytest.fixture
def scheduler(engine: ScriptedEngine) -> Iterator[Scheduler]:
    made = Scheduler(engine, queue=4, concurrent=3, prefix_cache_bytes=ROOM)
    yield made
    made.close()
    assert engine.live_states == 0, "a sequence was never closed"
    assert engine.live_snapshots == 0


# ---- one request ---------------------------------------------------------------------------------


def test_a_request_is_told_from_start_to_end(scheduler: Scheduler) -> None:
    heard = answer(scheduler, job(HI, marks=[4]))
    assert heard.events[:-1] == [
        Started(0),
        Prefilled(4, 5),
        Prefilled(5, 5),
        *map(NewToken, [*ANSWER, EOS]),
    ]
    last = heard.finished()
    assert (last.reason, last.prompt_tokens, last.completion_tokens) == ("stop", 5, 4)
    assert last.cached_tokens == 0
    assert last.first_token_s is not None
    assert last.decode_s is not None
    assert last.first_token_s > 0
    assert last.decode_s > 0


def test_it_ends_at_the_limit_of_tokens_and_of_the_context() -> None:
    engine = ScriptedEngine(default=range(10, 40), max_context=20)
    scheduler = Scheduler(engine, prefix_cache_bytes=0)
    short = answer(scheduler, job(HI, max_tokens=2))
    assert short.ids == [10, 11]
    assert short.finished().reason == "length"
    long = answer(scheduler, job(HI, max_tokens=1000))
    assert long.ids == list(range(10, 25))
    assert long.finished().reason == "length"
    assert answer(scheduler, job(HI, max_tokens=1)).finished().decode_s == 0
    scheduler.close()


def test_a_stop_token_can_be_ignored(scheduler: Scheduler) -> None:
    heard = answer(scheduler, job(HI, ignore_stop=True, max_tokens=6))
    assert heard.ids == [*ANSWER, EOS, EOS, EOS]
    assert heard.finished().reason == "length"


def test_log_probabilities_are_those_of_the_raw_logits(
    scheduler: Scheduler, engine: ScriptedEngine
) -> None:
    heard = answer(scheduler, job(HI, top_logprobs=2, max_tokens=1, temperature=2.0, seed=3))
    (token,) = [event for event in heard.events if isinstance(event, NewToken)]
    logits = engine._logits(HI).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    assert token.logprob == pytest.approx(expected[token.id])
    assert [place for place, _ in token.top] == [10, 0]
    assert [value for _, value in token.top] == pytest.approx([expected[10], expected[0]])
    assert math.exp(token.top[0][1]) == pytest.approx(1)
    none = answer(scheduler, job(HI, top_logprobs=0, max_tokens=1))
    (token,) = [event for event in none.events if isinstance(event, NewToken)]
    assert token.logprob is not None
    assert token.top == ()


def test_the_likeliest_come_first_and_the_lower_id_on_ties(
    scheduler: Scheduler, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = np.zeros(512, np.float32)
    logits[[7, 300]] = 1
    monkeypatch.setattr(engine, "_logits", lambda ids: logits)
    heard = answer(scheduler, job(HI, top_logprobs=4, max_tokens=1))
    (token,) = [event for event in heard.events if isinstance(event, NewToken)]
    assert [place for place, _ in token.top] == [7, 300, 0, 1]


def test_draws_follow_the_seed_of_each_request(
    scheduler: Scheduler, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_logits", lambda ids: np.zeros(512, np.float32))
    hot: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8, "stop_ids": frozenset()}
    alone = [answer(scheduler, job(HI, seed=seed, **hot)).ids for seed in (1, 2)]
    assert alone[0] != alone[1]
    together = [ask(scheduler, job(HI, seed=seed, **hot))[0] for seed in (1, 2)]
    for heard in together:
        heard.finished()
    assert [heard.ids for heard in together] == alone


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ({"max_tokens": 0}, SamplingError),
        ({"temperature": math.nan}, SamplingError),
        ({"top_p": 0.0}, SamplingError),
        ({"seed": -1}, SamplingError),
        ({"prompt_ids": []}, TokenError),
        ({"prompt_ids": [512]}, TokenError),
        ({"prompt_ids": [-1]}, TokenError),
        ({"prompt_ids": [1] * 4096}, ContextError),
    ],
)
def test_a_job_that_cannot_be_run_is_refused_at_once(
    scheduler: Scheduler, bad: dict[str, Any], kind: type[RunError]
) -> None:
    wanted = job(**{"prompt_ids": HI, **bad})
    check_refused(kind, lambda: scheduler.submit(wanted, Heard()))
    assert scheduler.stats().waiting == 0


@pytest.mark.parametrize(
    "bad", [{"queue": 0}, {"concurrent": 0}, {"concurrent": 65}, {"prefix_cache_bytes": -1}]
)
def test_numbers_that_cannot_be_are_refused(engine: ScriptedEngine, bad: dict[str, Any]) -> None:
    check_refused(ServeError, lambda: Scheduler(engine, **{"prefix_cache_bytes": 0, **bad}))


# ---- many requests -------------------------------------------------------------------------------


def test_answers_share_a_step_and_none_is_mixed_up(engine: ScriptedEngine) -> None:
    prompts = [chat(word) for word in range(20)]
    for word, prompt in enumerate(prompts):
        engine.answers[tuple(prompt)] = [100 + word] * (1 + word % 5)
    scheduler = Scheduler(engine, queue=20, concurrent=8, prefix_cache_bytes=ROOM)
    with engine.held():
        heard = [ask(scheduler, job(prompt, marks=[3]))[0] for prompt in prompts]
        engine.await_held()
    for word, each in enumerate(heard):
        assert each.finished().reason == "stop"
        assert each.ids == [*[100 + word] * (1 + word % 5), EOS]
    scheduler.close()
    assert max(len(parts) for parts in engine.forwards) == 8


def test_prompts_are_cut_at_the_batch_and_answers_go_on_between(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    engine.answers[tuple(HI)] = [10] * 50
    long = chat(*[5] * 150)
    with engine.held():
        first, ticket = ask(scheduler, job(HI))
        engine.await_held()
        second, _ = ask(scheduler, job(long))
        for _ in range(4):
            engine.step()
        ticket.cancel()
    first.finished()
    second.finished()
    assert engine.forwards[:4] == [
        [(0, HI)],
        [(5, [10]), (0, long[:63])],
        [(6, [10]), (63, long[63:126])],
        [(7, [10]), (126, long[126:])],
    ]


def test_prompts_share_a_batch_in_the_order_in_which_they_came(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    with engine.held():
        held, _ = ask(scheduler, job(HI, max_tokens=1))
        engine.await_held()
        prompts = [chat(*[word] * 40) for word in (1, 2, 3)]
        others = [ask(scheduler, job(prompt))[0] for prompt in prompts]
    for each in (held, *others):
        each.finished()
    first, second = engine.forwards[1:3]
    assert first == [(0, prompts[0]), (0, prompts[1][:21])]
    assert second == [(43, [10]), (21, prompts[1][21:]), (0, prompts[2][:41])]


def test_no_more_run_than_may(engine: ScriptedEngine, scheduler: Scheduler) -> None:
    with engine.held():
        heard = [ask(scheduler, job(chat(word)))[0] for word in range(6)]
        engine.await_held()
        engine.step()
        stats = scheduler.stats()
        assert (stats.running, stats.waiting) == (3, 3)
        assert engine.live_states == 3
    for each in heard:
        each.finished()
    assert max(len(parts) for parts in engine.forwards) == 3


def test_a_full_queue_says_when_to_come_again(engine: ScriptedEngine, scheduler: Scheduler) -> None:
    with engine.held():
        tickets = [ask(scheduler, job(HI)) for _ in range(7)]
        engine.await_held()
        error = check_refused(QueueFullError, lambda: ask(scheduler, job(HI)), says=["4 waiting"])
        assert error.retry_after_s >= 1
        tickets[-1][1].cancel()  # its place is free at once, though nothing has moved
        tickets.append(ask(scheduler, job(HI)))
        check_refused(QueueFullError, lambda: ask(scheduler, job(HI)))
    for heard, _ in tickets:
        heard.finished()
    assert answer(scheduler, job(HI)).ids == [*ANSWER, EOS]


def test_the_estimate_follows_the_queue_and_how_long_requests_take(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    assert scheduler.stats().retry_after_s == 1
    scheduler._mean_s = 30.0
    with engine.held():
        heard = [ask(scheduler, job(HI))[0]]
        engine.await_held()
        heard += [ask(scheduler, job(HI))[0] for _ in range(6)]
        assert scheduler.stats().waiting == 6
        assert scheduler.stats().retry_after_s == 30 * 6 / 3
    for each in heard:
        each.finished()
    assert scheduler._mean_s is not None
    assert scheduler._mean_s < 30


# ---- snapshots -----------------------------------------------------------------------------------


def test_a_conversation_goes_on_from_its_last_answer(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    prompt, unchanged = chat(1), 0
    cached = []
    for turn in range(5):
        marks = [place + 1 for place, token in enumerate(prompt) if token == ASSISTANT]
        heard = answer(scheduler, job(prompt, marks=marks))
        cached.append(heard.cached)
        assert heard.ids == [*ANSWER, EOS]
        assert heard.cached == max(0, unchanged - 1)
        unchanged = len(prompt) + len(heard.ids)
        prompt = [*prompt, *heard.ids, 258, turn, ASSISTANT, 261]
        assert heard.finished().cached_tokens == heard.cached
    stats = scheduler.stats()
    assert (stats.prefix.queries, stats.prefix.hits) == (5, 4)
    assert stats.cached_tokens == sum(cached)


def test_a_prompt_that_parts_at_the_think_token_goes_on_from_the_mark(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    first = answer(scheduler, job([BOS, 1, ASSISTANT, 260], marks=[3]))
    assert first.cached == 0
    second = [BOS, 1, ASSISTANT, 261, 12, EOS, 258, 2, ASSISTANT, 260]
    heard = answer(scheduler, job(second, marks=[3, 9]))
    assert heard.cached == 3
    assert [parts for parts in engine.forwards if parts[0][0] == 3][-1] == [(3, second[3:9])]
    third = [*second[:9], 261, 12, EOS, 258, 3, ASSISTANT, 260]
    assert answer(scheduler, job(third, marks=[3, 9, 15])).cached == 9


def test_the_same_prompt_again_computes_one_token(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    answer(scheduler, job(HI, marks=[4]))
    before = len(engine.forwards)
    again = answer(scheduler, job(HI, marks=[4]))
    assert again.cached == 4
    assert engine.forwards[before] == [(4, [261])]
    assert again.ids == [*ANSWER, EOS]


def test_what_is_held_already_is_not_copied_again(
    engine: ScriptedEngine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    sound = engine.snapshot

    def snapshot(state: ScriptedState) -> ScriptedSnapshot:
        taken.append(state.position)
        return sound(state)

    monkeypatch.setattr(engine, "snapshot", snapshot)
    for _ in range(2):
        answer(scheduler, job(HI, marks=[4]))
    assert taken == [4, 5, 8]


def test_without_marks_the_end_of_the_prompt_and_of_the_answer_are_kept(
    scheduler: Scheduler,
) -> None:
    answer(scheduler, job(HI))
    assert scheduler.stats().prefix.entries == 2
    assert answer(scheduler, job([*HI, 99])).cached == 5  # another answer than the one that came
    assert answer(scheduler, job([*HI, *ANSWER, EOS, 5])).cached == 8


def test_two_conversations_with_one_start_do_not_disturb_each_other(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    answer(scheduler, job(HI, marks=[4]))
    prompts = [[*HI, *ANSWER, EOS, 258, word, ASSISTANT, 261] for word in (1, 2)]
    for word, prompt in enumerate(prompts):
        engine.answers[tuple(prompt)] = [100 + word] * 5
    with engine.held():
        both = [ask(scheduler, job(prompt, marks=[4, len(prompt) - 1]))[0] for prompt in prompts]
        engine.await_held()
    for word, heard in enumerate(both):
        heard.finished()
        assert heard.cached == 8
        assert heard.ids == [*[100 + word] * 5, EOS]


def test_snapshots_stay_under_their_limit(engine: ScriptedEngine) -> None:
    scheduler = Scheduler(engine, prefix_cache_bytes=400)  # 12 bytes a token
    for word in range(30):
        answer(scheduler, job(chat(word), marks=[3]))
        assert scheduler.stats().prefix.bytes <= 400
    assert scheduler.stats().prefix.evictions > 50
    assert engine.live_snapshots == scheduler.stats().prefix.entries <= 10
    scheduler.close()


def test_without_a_prefix_cache_a_prompt_is_not_cut(engine: ScriptedEngine) -> None:
    scheduler = Scheduler(engine, prefix_cache_bytes=0)
    for _ in range(2):
        assert answer(scheduler, job(HI, marks=[2, 4])).cached == 0
    assert engine.forwards[0] == [(0, HI)]
    assert engine.live_snapshots == 0
    scheduler.close()


def test_a_snapshot_that_cannot_be_taken_is_counted_and_harms_nobody(
    engine: ScriptedEngine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(state: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine, "snapshot", full)
    assert answer(scheduler, job(HI, marks=[4])).ids == [*ANSWER, EOS]
    assert scheduler.stats().prefix.refused == 3
    assert answer(scheduler, job(HI, marks=[4])).cached == 0


# ---- leaving -------------------------------------------------------------------------------------


def test_leaving_while_queued(engine: ScriptedEngine, scheduler: Scheduler) -> None:
    with engine.held():
        heard = [ask(scheduler, job(chat(word))) for word in range(5)]
        engine.await_held()
        heard[4][1].cancel()
        heard[4][1].cancel()  # twice is once
    assert heard[4][0].finished() == Finished("cancelled", 4, 0, 0, None, None)
    assert heard[4][0].events == [heard[4][0].end()]
    for each, _ in heard[:4]:
        assert each.finished().reason == "stop"
    assert all((0, chat(4)) not in parts for parts in engine.forwards)


def test_leaving_in_prefill(engine: ScriptedEngine, scheduler: Scheduler) -> None:
    long = chat(*[5] * 300)
    with engine.held():
        heard, ticket = ask(scheduler, job(long))
        engine.await_held()
        engine.step()
        ticket.cancel()
    last = heard.finished()
    assert (last.reason, last.completion_tokens, last.first_token_s) == ("cancelled", 0, None)
    assert heard.events[1:-1] == [Prefilled(64, 303), Prefilled(128, 303)]
    assert len(engine.forwards) == 2
    assert answer(scheduler, job(HI)).ids == [*ANSWER, EOS]
    assert engine.live_states == 0


def test_leaving_while_others_are_answered_computes_no_more_of_the_prompt(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    engine.answers[tuple(HI)] = [10] * 90
    with engine.held():
        first, _ = ask(scheduler, job(HI, max_tokens=9))
        engine.await_held()
        second, ticket = ask(scheduler, job(chat(*[5] * 300)))
        while len(engine.forwards) < 3:
            engine.step()
        assert engine.forwards[1][1][0] == 0  # its prompt has begun
        ticket.cancel()
    assert second.finished().reason == "cancelled"
    assert first.finished().reason == "length"
    assert all(len(ids) == 1 for parts in engine.forwards[3:] for _, ids in parts)
    assert len(engine.forwards) > 3


def test_leaving_while_answered(engine: ScriptedEngine, scheduler: Scheduler) -> None:
    engine.answers[tuple(HI)] = [10] * 90
    with engine.held():
        heard, ticket = ask(scheduler, job(HI))
        other, _ = ask(scheduler, job(chat(7)))
        engine.await_held()
        while len(heard.ids) < 5:
            engine.step()
        ticket.cancel()
    last = heard.finished()
    assert last.reason == "cancelled"
    assert last.completion_tokens == len(heard.ids) in (5, 6)
    assert other.finished().reason == "stop"
    going_on = answer(scheduler, job([*HI, *[10] * (len(heard.ids) - 1), 3]))
    assert going_on.cached == len(HI) + len(heard.ids) - 1  # what was said is kept


def test_a_listener_that_raises_has_left(engine: ScriptedEngine, scheduler: Scheduler) -> None:
    told: list[Event] = []

    def listener(event: Event) -> None:
        told.append(event)
        if isinstance(event, NewToken):
            raise RuntimeError("the event loop is closed")

    engine.answers[tuple(HI)] = [10] * 90
    scheduler.submit(job(HI), listener)
    assert answer(scheduler, job(chat(7))).ids == [*ANSWER, EOS]
    assert scheduler.drain(60)
    assert sum(isinstance(event, NewToken) for event in told) == 1
    assert isinstance(told[-1], Finished)
    assert told[-1].reason == "cancelled"


# ---- failing -------------------------------------------------------------------------------------


def test_one_that_cannot_go_on_fails_alone(engine: ScriptedEngine, scheduler: Scheduler) -> None:
    engine.fails = lambda ids: RunError("a bad expert") if 13 in ids[:2] else None
    prompts = [chat(12), chat(13), chat(14)]
    with engine.held():
        heard = [ask(scheduler, job(prompt))[0] for prompt in prompts]
        engine.await_held()
    assert str(heard[1].failed()) == "a bad expert"
    for each in (heard[0], heard[2]):
        assert each.finished().reason == "stop"
        assert each.ids == [*ANSWER, EOS]
    assert engine.live_states == 0


def test_one_that_fails_in_its_answer_fails_alone(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    engine.fails = lambda ids: MemoryError("no room") if ids[1] == 13 and 11 in ids else None
    with engine.held():
        bad, _ = ask(scheduler, job(chat(13)))
        good, _ = ask(scheduler, job(chat(2)))
        engine.await_held()
    error = bad.failed()
    assert type(error) is EngineError
    assert "MemoryError: no room" in str(error)
    assert isinstance(error.__cause__, MemoryError)
    assert bad.ids == [10, 11]
    assert good.finished().completion_tokens == 4
    assert good.ids == [*ANSWER, EOS]


def test_logits_that_are_not_finite_fail_one(
    engine: ScriptedEngine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = engine._logits
    monkeypatch.setattr(engine, "_logits", lambda ids: sound(ids) * (np.nan if ids[1] == 13 else 1))
    bad, _ = ask(scheduler, job(chat(13)))
    good, _ = ask(scheduler, job(chat(2)))
    assert type(bad.failed()) is LogitsError
    assert good.finished().reason == "stop"


@pytest.mark.parametrize("broken", ["new_state", "restore"])
def test_a_sequence_that_cannot_be_made_fails_its_request(
    engine: ScriptedEngine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    answer(scheduler, job(HI, marks=[4]))

    def full(*_: object) -> None:
        raise RunError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine, broken, full)
        heard, _ = ask(scheduler, job(HI if broken == "restore" else [7, *HI]))
        assert str(heard.failed()) == "no memory"
    assert answer(scheduler, job(HI)).ids == [*ANSWER, EOS]


def test_a_sequence_that_cannot_be_freed_is_told(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(engine, prefix_cache_bytes=0)
    make = engine.new_state

    def stuck() -> object:
        state = make()

        def close() -> None:
            raise RunError("cannot free")

        state.close = close  # type: ignore[method-assign]
        return state

    monkeypatch.setattr(engine, "new_state", stuck)
    heard, _ = ask(scheduler, job(HI))
    assert str(heard.failed()) == "cannot free"
    engine.fails = lambda ids: RunError("the first error")
    heard, _ = ask(scheduler, job(HI))
    assert str(heard.failed()) == "the first error"
    scheduler.close()


def test_nobody_waits_for_ever_when_a_turn_itself_fails(
    engine: ScriptedEngine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = engine.forward_many
    with monkeypatch.context() as patch:
        patch.setattr(engine, "forward_many", lambda parts: sound(parts)[:0])  # too few rows
        heard, _ = ask(scheduler, job(HI))
        assert type(heard.failed()) is EngineError
    assert answer(scheduler, job(HI)).ids == [*ANSWER, EOS]


# ---- ending --------------------------------------------------------------------------------------


def test_draining_finishes_what_there_is_and_takes_nothing_new(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    done: list[bool] = []
    with engine.held():
        heard = [ask(scheduler, job(chat(word)))[0] for word in range(6)]
        engine.await_held()
        drainer = threading.Thread(target=lambda: done.append(scheduler.drain(60)))
        drainer.start()
        while not scheduler._draining:
            pass
        check_refused(DrainingError, lambda: ask(scheduler, job(HI)))
        assert not done
    drainer.join()
    assert done == [True]
    assert all(each.ended for each in heard)
    assert all(each.finished().reason == "stop" for each in heard)


def test_what_is_left_after_the_time_is_cancelled(
    engine: ScriptedEngine, scheduler: Scheduler
) -> None:
    engine.answers[tuple(HI)] = [10] * 90
    with engine.held():
        heard = [ask(scheduler, job(HI))[0] for _ in range(5)]
        engine.await_held()
        done: list[bool] = []
        drainer = threading.Thread(target=lambda: done.append(scheduler.drain(0)))
        drainer.start()
        while not all(each.ticket.cancelled for each in (*scheduler._running, *scheduler._waiting)):
            pass
    drainer.join()
    assert done == [False]
    assert all(each.ended for each in heard)
    assert {each.finished().reason for each in heard} == {"cancelled"}
    assert engine.live_states == 0
    assert scheduler.drain(0)


def test_it_is_not_idle_before_the_last_event_is_told(scheduler: Scheduler) -> None:
    told, go_on = threading.Event(), threading.Event()

    def listener(event: Event) -> None:
        if isinstance(event, Finished):
            told.set()
            assert go_on.wait(PATIENCE_S)

    scheduler.submit(job(HI), listener)
    assert told.wait(PATIENCE_S)
    assert scheduler.stats().running == 0
    with scheduler._changed:
        assert not scheduler._idle()
    go_on.set()
    assert scheduler.drain(PATIENCE_S)


def test_closing_ends_all_and_frees_all(engine: ScriptedEngine) -> None:
    scheduler = Scheduler(engine, prefix_cache_bytes=ROOM)
    answer(scheduler, job(HI, marks=[4]))
    assert engine.live_snapshots == 3
    with engine.held():
        heard = [ask(scheduler, job(HI))[0] for _ in range(3)]
        engine.await_held()
        closer = threading.Thread(target=scheduler.close)
        closer.start()
        while not scheduler._closed:
            pass
    closer.join()
    assert {each.finished().reason for each in heard} == {"cancelled"}
    assert (engine.live_states, engine.live_snapshots) == (0, 0)
    check_refused(DrainingError, lambda: ask(scheduler, job(HI)))
    scheduler.close()


# ---- counting ------------------------------------------------------------------------------------


def test_what_it_counts(engine: ScriptedEngine, scheduler: Scheduler) -> None:
    answer(scheduler, job(HI, marks=[4]))
    answer(scheduler, job(HI, marks=[4]))
    stats = scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens) == (10, 4, 8)
    assert stats.tokens_per_s > 0
    assert (stats.running, stats.waiting) == (0, 0)
    prefix = stats.prefix
    assert (prefix.entries, prefix.queries, prefix.hits) == (3, 2, 1)
    assert prefix.limit_bytes == ROOM
    assert prefix.bytes == 12 * (4 + 5 + 8)


def test_the_rate_forgets_what_is_long_ago(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("ds4q.runtime.serve.scheduler.time.perf_counter", lambda: now)
    scheduler._recent.clear()
    scheduler._count(10)
    assert scheduler.stats().tokens_per_s == 2
    now = 1004.0
    scheduler._count(5)
    assert scheduler.stats().tokens_per_s == 3
    now = 1006.0
    assert scheduler.stats().tokens_per_s == 1
    assert len(scheduler._recent) == 1


def test_failed_events_carry_one_clean_line(engine: ScriptedEngine, scheduler: Scheduler) -> None:
    engine.fails = lambda ids: ValueError("two\nlines")
    heard, _ = ask(scheduler, job(HI))
    last = heard.end()
    assert isinstance(last, Failed)
    assert str(last.error).isprintable()
