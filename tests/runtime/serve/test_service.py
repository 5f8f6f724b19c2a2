"""A model from the first byte of loading to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ds4q.runtime.errors import DrainingError, EngineError, RunError
from ds4q.runtime.serve.scheduler import Scheduler
from ds4q.runtime.serve.service import ServedEngine, Service, warm_up
from ds4q.runtime.source import Progress
from tests.checks import check_refused
from tests.runtime.serve.heard import answer, ask, job
from tests.runtime.serve.scripted import ASSISTANT, BOS, EOS, PATIENCE_S, ScriptedEngine

HI = [BOS, 1, ASSISTANT, 261]


def schedule(engine: ServedEngine, told: Callable[[], None]) -> Scheduler:
    return Scheduler(engine, concurrent=2, prefix_cache_bytes=0, told=told)


class SlowLoad:
    """Loads a scripted engine in two steps; each waits to be let go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.engine = ScriptedEngine(default=[10])
        self.error = error
        self.ended = False
        self._told = threading.Semaphore(0)
        self._go_on = threading.Semaphore(0)

    def __call__(self, progress: Progress) -> ServedEngine:
        try:
            for done in (1, 2):
                progress(done, 2)
                self._told.release()
                assert self._go_on.acquire(timeout=PATIENCE_S)
        finally:
            self.ended = True
        if self.error is not None:
            raise self.error
        return self.engine

    def await_told(self) -> None:
        assert self._told.acquire(timeout=PATIENCE_S)

    def go_on(self) -> None:
        self._go_on.release()


@contextmanager
def serving(load: SlowLoad) -> Iterator[Service]:
    service = Service(load, schedule)
    service.start()
    try:
        yield service
    finally:
        for _ in range(2):
            load.go_on()
        service.close()


def test_it_tells_how_far_loading_is_and_then_serves() -> None:
    load = SlowLoad()
    with serving(load) as service:
        load.await_told()
        assert (service.state, service.progress) == ("loading", (1, 2))
        assert service.engine is service.scheduler is None
        load.go_on()
        load.await_told()
        assert (service.state, service.progress) == ("loading", (2, 2))
        assert not service.wait(0)
        load.go_on()
        assert service.wait(PATIENCE_S)
        assert service.state == "ready"
        assert service.engine is load.engine
        assert service.scheduler is not None
        assert answer(service.scheduler, job(HI)).ids == [10, EOS]
    assert load.engine.closed


def test_a_load_that_fails_says_why() -> None:
    load = SlowLoad(RunError("no such model"))
    with serving(load) as service:
        load.go_on()
        load.go_on()
        assert service.wait(PATIENCE_S)
        assert service.state == "failed"
        assert service.error is load.error
        assert service.scheduler is None


def test_an_error_that_no_rule_foresees_is_told_in_one_line() -> None:
    load = SlowLoad(MemoryError("no room\n for it"))
    with serving(load) as service:
        load.go_on()
        load.go_on()
        assert service.wait(PATIENCE_S)
        assert type(service.error) is EngineError
        assert str(service.error).startswith("the model cannot be loaded: found MemoryError")
        assert str(service.error).isprintable()
        assert service.error.__cause__ is load.error


def test_a_model_without_a_scheduler_is_freed() -> None:
    engine = ScriptedEngine()

    def refuse(_: ServedEngine, __: Callable[[], None]) -> Scheduler:
        raise RunError("too many at once")

    service = Service(lambda progress: engine, refuse)
    service.start()
    assert service.wait(PATIENCE_S)
    assert (service.state, str(service.error)) == ("failed", "too many at once")
    assert engine.closed
    service.close()


@pytest.mark.parametrize("end", ["close", "drain"])
def test_ended_while_loading_it_gives_up_at_the_next_progress(end: str) -> None:
    load = SlowLoad()
    with serving(load) as service:
        load.await_told()
        ender = threading.Thread(
            target=service.close if end == "close" else service.drain, args=[1] * (end == "drain")
        )
        ender.start()
        while service.state != "draining":
            pass
        load.go_on()
        assert service.wait(PATIENCE_S)
        ender.join()
        assert load.ended
        assert (service.state, service.error, service.scheduler) == ("draining", None, None)
        assert service.progress == (2, 2)


def test_ended_behind_the_last_progress_it_frees_what_was_loaded() -> None:
    load = SlowLoad()
    with serving(load) as service:
        load.await_told()
        load.go_on()
        load.await_told()
        assert service.drain(0)
        load.go_on()
        assert service.wait(PATIENCE_S)
        assert service.state == "draining"
    assert load.engine.closed


def test_drained_it_lets_requests_end_and_takes_no_new_one() -> None:
    engine = ScriptedEngine(default=[10])
    service = Service(lambda progress: engine, schedule)
    service.start()
    assert service.wait(PATIENCE_S)
    assert service.scheduler is not None
    scheduler = service.scheduler
    heard, _ = ask(scheduler, job(HI))
    assert service.drain(PATIENCE_S)
    assert service.state == "draining"
    assert heard.finished().reason == "stop"
    check_refused(DrainingError, lambda: ask(scheduler, job(HI)))
    assert not engine.closed
    service.close()
    assert engine.closed
    assert service.engine is None
    service.close()


def test_warming_up_takes_steps_of_both_kinds_and_leaves_nothing() -> None:
    engine = ScriptedEngine(default=[10])
    warm_up(engine)
    assert [[len(ids) for _, ids in parts] for parts in engine.forwards] == [[2], [1]]
    assert engine.live_states == 0
    engine.fails = lambda ids: RunError("a step fails")
    check_refused(RunError, lambda: warm_up(engine))
    assert engine.live_states == 0
