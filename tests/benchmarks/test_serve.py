"""The benchmark of serving: what it asks with, what it sees, and what it takes for wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.serve import copies, judge, percentile
from benchmarks.serve_client import Answer, Request, ask, ask_all, requests
from ds4q.runtime.errors import RunError
from tests.runtime.serve.scripted import EOS, ScriptedEngine
from tests.runtime.serve.served import Served, serving


def answer_of(prompt: list[int]) -> list[int]:
    """Ids that tell prompts apart."""
    return [*f"{sum(prompt) * len(prompt)}".encode()]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedEngine(default=answer_of)) as running:
        yield running


def chat(text: str) -> Request:
    return Request("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})


def port(served: Served) -> int:
    return served.address[1]


def test_many_at_once_get_the_ids_of_each_alone(served: Served) -> None:
    wanted = [chat("a" * length) for length in range(1, 17)]
    alone = ask_all(port(served), wanted, 1)
    together = ask_all(port(served), wanted, 8)
    expected = [answer.ids for answer in alone]
    assert len(set(expected)) == 16
    assert all(ids is not None and ids[-1] == EOS for ids in expected)
    assert judge("together", together, expected) == []
    assert all(0 < answer.first_s <= answer.total_s for answer in together)
    assert judge("mixed up", together, expected[::-1])[0].startswith("mixed up: request 0 got")


def test_what_is_refused_or_fails_is_lost(served: Served) -> None:
    refused = ask(port(served), Request("/v1/chat/completions", {"messages": []}))
    assert refused.ids is None
    assert refused.problem.startswith("400")
    served.engine.fails = lambda ids: RunError("a bad expert")
    try:
        failed = ask(port(served), chat("hi"))
    finally:
        served.engine.fails = lambda ids: None
    assert failed.ids is None
    (line,) = judge("one", [failed], [(1,)])
    assert line.startswith("one: request 0 is lost: ")
    assert ask(1, chat("hi")).problem.startswith("ConnectionRefusedError")


def test_who_leaves_is_not_lost_and_the_server_goes_on(served: Served) -> None:
    wanted = [chat("a" * length) for length in range(1, 9)]
    answers = ask_all(port(served), wanted, 8, [0, 1, 2, None] * 2)
    assert [answer.left for answer in answers] == [True, True, True, False] * 2
    expected = [None] * 8
    assert len(judge("left", answers, expected)) == 2  # those that stayed, and got ids
    assert ask(port(served), chat("hi")).ids is not None


def test_requests_differ_and_come_again_the_same() -> None:
    made = requests(200, seed=11)
    assert len({request.body for request in made}) == 200
    assert made == requests(200, seed=11)
    assert made != requests(200, seed=12)


def test_copies_are_all_that_share_their_ids() -> None:
    answers = [Answer(ids) for ids in ((1, 2), (3,), (1, 2), (4,), (3,), (1, 2))]
    assert copies(answers) == 5


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 0.50) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([3.0], 0.99) == 3
    assert percentile([1.0, 2.0, 3.0], 0.50) == 2
