"""The scheduler over a simulated device: the ids of each request alone, and all memory back."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ds4q.hipkern.sim.control import Control
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.serve.scheduler import Scheduler
from tests.runtime.device.micro import CONFIG, write_micro
from tests.runtime.serve.heard import Heard, answer, ask, job

ANSWERED = 5


def prompt(seed: int, tokens: int) -> list[int]:
    draw = np.random.default_rng(seed)
    return [int(token) for token in draw.integers(2, CONFIG["vocab_size"], tokens)]


def alone(engine: HipEngine, ids: list[int]) -> list[int]:
    """What the engine itself goes on with."""
    state = engine.new_state()
    said = [engine.next_id(state, ids)]
    while len(said) < ANSWERED:
        said.append(engine.next_id(state, said[-1:]))
    state.close()
    return said


def test_requests_together_are_answered_as_alone_and_leave_nothing(
    sim: Control, tmp_path: Path
) -> None:
    with HipEngine.load(write_micro(tmp_path / "micro.hfq"), batch_tokens=16) as engine:
        engine.forward(engine.new_state(), prompt(0, 3))  # what is made once is there
        before = sim.get("live_allocations")
        prompts = [prompt(seed, tokens) for seed, tokens in ((1, 5), (2, 21), (3, 12), (4, 9))]
        expected = [alone(engine, ids) for ids in prompts]
        scheduler = Scheduler(engine, concurrent=3, prefix_cache_bytes=1 << 22)
        wanted = [
            job(ids, [3, len(ids) - 1], max_tokens=ANSWERED, stop_ids=frozenset())
            for ids in prompts
        ]
        heard: list[Heard] = [ask(scheduler, each)[0] for each in wanted]
        for each, ids in zip(heard, expected, strict=True):
            assert each.finished().reason == "length"
            assert each.ids == ids
        again = [answer(scheduler, each) for each in wanted]
        assert [each.ids for each in again] == expected
        assert [each.cached for each in again] == [len(ids) - 1 for ids in prompts]
        longer = [*prompts[1], *expected[1], 7]
        assert answer(scheduler, job(longer, stop_ids=frozenset(), max_tokens=1)).cached == 25
        scheduler.close()
        assert sim.get("live_allocations") == before
