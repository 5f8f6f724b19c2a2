"""Reading requests beside the event loop: others are answered, and nobody waits for the rest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ds4q.runtime.serve.beside import Beside
from ds4q.runtime.serve.limits import Limits
from ds4q.runtime.text.tokenizer import Tokenizer
from tests.runtime.serve.served import PATIENCE_S, serving
from tests.runtime.serve.test_load import asking, until_cancelled


def test_results_and_errors_come_back() -> None:
    def broken() -> int:
        raise ValueError("no")

    async def run() -> int:
        beside = Beside(1)
        with pytest.raises(ValueError, match="no"):
            await beside.run(broken)
        return await beside.run(lambda: 7)

    assert asyncio.run(run()) == 7


def test_a_few_run_at_a_time_and_one_that_nobody_waits_for_keeps_its_place() -> None:
    async def run() -> None:
        beside, go_on = Beside(1), threading.Event()
        began: list[int] = []

        def work(number: int) -> int:
            began.append(number)
            assert go_on.wait(PATIENCE_S)
            return number

        first = asyncio.create_task(beside.run(lambda: work(1)))
        second = asyncio.create_task(beside.run(lambda: work(2)))
        while not began:
            await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled()
        assert began == [1]
        go_on.set()
        assert await second == 2
        assert began == [1, 2]

    asyncio.run(run())


class Slow:
    """A tokenizer that reads one text for as long as a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reading = threading.Event()
        self.go_on = threading.Event()
        encode = Tokenizer.encode

        def slowly(tokenizer: Tokenizer, text: str) -> list[int]:
            if text == "slow":
                self.reading.set()
                assert self.go_on.wait(PATIENCE_S)
            return encode(tokenizer, text)

        monkeypatch.setattr(Tokenizer, "encode", slowly)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow(monkeypatch)
    yield made
    made.go_on.set()


def test_others_are_answered_while_a_long_prompt_is_read(slow: Slow) -> None:
    with serving() as served, ThreadPoolExecutor(1) as pool:
        served.script("ok")
        answer = pool.submit(served.chat, "slow")
        assert slow.reading.wait(PATIENCE_S)
        assert served.http.get("/health").status_code == 200
        assert served.chat("fast").status_code == 200
        assert not answer.done()
        slow.go_on.set()
        assert answer.result().status_code == 200


def test_a_client_that_leaves_while_its_prompt_is_read_is_dropped(slow: Slow) -> None:
    with serving() as served:
        with asking(served, content="slow"):
            assert slow.reading.wait(PATIENCE_S)
        until_cancelled(served)
        scheduler = served.service.scheduler
        assert scheduler is not None
        slow.go_on.set()
        assert served.chat("fast").status_code == 200
        assert scheduler.stats().prompt_tokens == len("fast") + 4


def test_reading_a_prompt_takes_of_the_time_of_a_request(slow: Slow) -> None:
    with serving(limits=Limits(request_s=0.1)) as served:
        late = served.chat("slow")
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")


def test_a_server_ends_though_a_prompt_is_being_read(slow: Slow) -> None:
    with serving() as served:
        with asking(served, content="slow"):
            assert slow.reading.wait(PATIENCE_S)
        until_cancelled(served)
        served.server.should_exit = True
        served.thread.join(PATIENCE_S)
        assert not served.thread.is_alive()
        assert served.service.state == "draining"
