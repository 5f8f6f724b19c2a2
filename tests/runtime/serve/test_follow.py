"""Following one answer: fairness to others, and when a client hears that it is still waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ds4q.runtime.errors import RunError
from ds4q.runtime.serve import follow
from ds4q.runtime.serve.follow import ClientLeftError, Follower, Waiting, while_connected
from ds4q.runtime.serve.job import (
    Event,
    Failed,
    Finished,
    Job,
    Listener,
    NewToken,
    Prefilled,
    Started,
    Ticket,
)
from ds4q.runtime.serve.mailbox import Mailbox
from ds4q.runtime.serve.refusal import Refusal
from ds4q.runtime.serve.transcript import Piece, Transcript
from ds4q.runtime.text.tokenizer import Tokenizer
from tests.runtime.serve.scripted import EOS
from tests.runtime.serve.served import metadata

JOB = Job([256, 65], (), 100, 0.0, 1.0, 0, frozenset({EOS}))
END = Finished("stop", 2, 1, 0, 0.1, 0.0)


class Told:
    """A scheduler that tells what a test says, each time all of it together."""

    def __init__(self, *events: Event) -> None:
        self.events = events
        self.mailbox = Mailbox()
        self.cancelled = 0
        self._listener: Listener = lambda event: None

    def submit(self, job: Job, listener: Listener) -> Ticket:
        self._listener = listener
        self.tell(*self.events)
        return Ticket(self._cancel)

    def tell(self, *events: Event) -> None:
        for event in events:
            self._listener(event)
        self.mailbox.deliver()

    def _cancel(self) -> None:
        self.cancelled += 1


def follower(told: Told, *, keep_alive_s: float = 10, limit_s: float | None = None) -> Follower:
    tokenizer = Tokenizer.from_metadata(metadata())
    assert tokenizer is not None
    transcript = Transcript(tokenizer, stop_ids=JOB.stop_ids)
    return Follower(
        told,
        told.mailbox,
        JOB,
        transcript,
        keep_alive_s=keep_alive_s,
        limit_s=limit_s,
        began=follow.time.monotonic(),
    )


class Clock:
    """The time, as a test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(follow.time, "monotonic", lambda: self.now)


async def some(pieces: Any, count: int) -> Sequence[Piece | Waiting]:
    return [await anext(pieces) for _ in range(count)]


def test_an_answer_that_comes_fast_leaves_others_their_turn() -> None:
    async def read() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        watching = asyncio.create_task(other())
        told = Told(NewToken(65))
        followed, content = follower(told), ""
        async for piece in followed.pieces():  # a next token is there before one is asked for
            assert isinstance(piece, Piece)
            content += piece.content
            followed._hear(NewToken(65) if len(content) < 500 else END)
        watching.cancel()
        assert content == 500 * "A"
        return turns

    assert asyncio.run(read()) >= 500


def test_what_has_gathered_is_one_piece() -> None:
    async def read() -> list[Piece | Waiting]:
        told = Told(Started(1), Prefilled(2, 2), NewToken(65), NewToken(66), NewToken(EOS), END)
        followed = follower(told)
        pieces = [piece async for piece in followed.pieces()]
        assert (followed.cached_tokens, followed.transcript.tokens) == (1, 3)
        return pieces

    first, last = asyncio.run(read())
    assert isinstance(first, Piece)
    assert isinstance(last, Piece)
    assert (first.content, last.empty) == ("AB", True)


def test_what_came_before_a_failure_is_told() -> None:
    async def read() -> None:
        pieces = follower(Told(NewToken(65), Failed(RunError("broken")))).pieces()
        (piece,) = await some(pieces, 1)
        assert isinstance(piece, Piece)
        assert piece.content == "A"
        with pytest.raises(Refusal, match="broken"):
            await anext(pieces)

    asyncio.run(read())


def test_nobody_is_told_to_wait_while_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(clock: Clock) -> None:
        told = Told(NewToken(65), Prefilled(1, 2))
        pieces = follower(told).pieces()
        clock.now += 9
        (piece,) = await some(pieces, 1)
        assert isinstance(piece, Piece)
        assert piece.content == "A"
        clock.now += 9  # 18 s after the beginning, and 9 after the last token
        told.tell(NewToken(66))
        (piece,) = await some(pieces, 1)
        assert isinstance(piece, Piece)
        assert piece.content == "B"

    asyncio.run(read(Clock(monkeypatch)))


def test_progress_alone_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scheduler tells in between does not put off what the client hears."""

    async def read(clock: Clock) -> None:
        told = Told(Prefilled(1, 2))
        pieces = follower(told).pieces()
        await asyncio.sleep(0)  # so that it is there
        clock.now += 10
        assert await some(pieces, 1) == [Waiting(1, 2)]
        clock.now += 10
        assert await some(pieces, 1) == [Waiting(1, 2)]

    asyncio.run(read(Clock(monkeypatch)))


def test_a_limit_holds_however_fast_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(clock: Clock) -> None:
        told = Told(NewToken(65))
        pieces = follower(told, limit_s=5).pieces()
        await some(pieces, 1)
        clock.now += 6
        told.tell(NewToken(65))
        with pytest.raises(Refusal, match="within 5 s"):
            await some(pieces, 1)

    asyncio.run(read(Clock(monkeypatch)))


def test_times_are_those_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(clock: Clock) -> None:
        told = Told(NewToken(65))
        followed = follower(told)
        assert (followed.first_token_s, followed.token_s) == (None, None)
        pieces = followed.pieces()
        clock.now += 2
        await some(pieces, 1)
        assert (followed.first_token_s, followed.token_s) == (2, None)
        for _ in range(4):
            clock.now += 0.5
            told.tell(NewToken(66))
            await some(pieces, 1)
        assert (followed.first_token_s, followed.token_s) == (2, 0.5)

    asyncio.run(read(Clock(monkeypatch)))


def test_a_loop_that_has_ended_hears_nothing() -> None:
    told = Told()

    async def begin() -> None:
        follower(told)

    asyncio.run(begin())
    told.tell(NewToken(65))  # from the model's thread, which must not be disturbed


def receiver(*kinds: str) -> Callable[[], Any]:
    """An ASGI ``receive`` that tells these, and then waits."""
    left = list(kinds)

    async def receive() -> dict[str, str]:
        if not left:
            await asyncio.Event().wait()
        return {"type": left.pop(0)}

    return receive


def test_work_is_cancelled_when_its_client_leaves() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    with pytest.raises(ClientLeftError):
        asyncio.run(while_connected(receiver("http.request", "http.disconnect"), work()))
    assert ended == ["work"]


def test_work_that_ends_returns_and_what_it_raises_is_raised() -> None:
    async def work() -> int:
        return 7

    async def broken() -> int:
        raise Refusal(400, "no")

    assert asyncio.run(while_connected(receiver(), work())) == 7
    with pytest.raises(Refusal, match="no"):
        asyncio.run(while_connected(receiver(), broken()))
