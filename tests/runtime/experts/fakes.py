"""Owns what pager tests run on: a catalogue of numbered experts, transports by hand and by thread.

Expert i of any layer is ``NBYTES`` bytes of value i + 1, so that memory tells whose it is.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from ds4q.artifact.errors import TruncatedError
from ds4q.runtime.errors import TransportClosedError
from ds4q.runtime.experts.catalogue import Geometry, Key
from ds4q.runtime.experts.ledger import Dispatch
from ds4q.runtime.experts.pager import Lease, Pager
from ds4q.runtime.experts.reading import Done, Fill, Purpose
from ds4q.runtime.experts.slots import HostSlots

PART_BYTES = 1280
NBYTES = 3 * PART_BYTES
PATIENCE_S = 300  # for what must come; only broken code waits so long


class Numbered:
    """A catalogue of ``layers`` times ``experts`` experts that lie nowhere."""

    path = "model.hfq"

    def __init__(self, experts: int, layers: int = 1) -> None:
        self.experts = experts
        self.geometry = (Geometry(PART_BYTES, 2 * PART_BYTES, PART_BYTES),) * layers
        part = SimpleNamespace(nbytes=PART_BYTES)
        self.records = tuple(
            tuple(
                SimpleNamespace(key=Key(layer, e), gate=part, up=part, down=part, nbytes=NBYTES)
                for e in range(experts)
            )
            for layer in range(layers)
        )

    def __getitem__(self, key: Key) -> Any:
        return self.records[key.layer][key.expert]

    def number(self, layer: int) -> int:
        return layer


class Memory:
    """Slots of a numbered catalogue, and whose bytes they hold."""

    def __init__(self, catalogue: Numbered, slots: int) -> None:
        self._catalogue = catalogue
        self._slots = HostSlots(catalogue.geometry, [slots] * len(catalogue.geometry))

    def write(self, fill: Fill, between: Callable[[], None] = lambda: None) -> None:
        """The expert's bytes, down first; ``between`` is called when half of them are there."""
        gate, up, down = self._slots.views(self._catalogue[fill.key], fill.slot)
        value = fill.key.expert + 1
        down[:] = value
        between()
        up[:] = value
        gate[:] = value

    def holds(self, key: Key, slot: int) -> bool:
        """Whether every byte of ``slot`` is the expert's."""
        parts = self._slots.views(self._catalogue[key], slot)
        return all(bool(np.all(part == key.expert + 1)) for part in parts)


class ByHand:
    """Queues fills until a test serves them."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.queue: list[Fill] = []
        self.started: list[Fill] = []
        self.hurried: list[Key] = []
        self.refuse: BaseException | None = None
        self.closed = False
        self._done: dict[Key, Done] = {}
        self._change = threading.Condition()

    def start(self, fills: Sequence[Fill], done: Done) -> None:
        if self.refuse is not None:
            raise self.refuse
        with self._change:
            self.queue += fills
            self.started += fills
            self._done |= {fill.key: done for fill in fills}
            self._change.notify_all()

    def hurry(self, keys: Sequence[Key]) -> None:
        self.hurried += keys

    def counters(self) -> dict[str, int]:
        return {"reads": len(self.started)}

    def close(self) -> None:
        self.closed = True
        for fill in list(self.queue):
            self.serve(fill.key.expert, fill.key.layer, TransportClosedError())

    def serve(self, expert: int, layer: int = 0, error: BaseException | None = None) -> None:
        """Bring a queued expert, or its error; waits until it is queued."""
        with self._change:
            assert self._change.wait_for(lambda: self._queued(expert, layer), PATIENCE_S)
            fill = next(f for f in self.queue if f.key == (layer, expert))
            self.queue.remove(fill)
        if error is None:
            self.memory.write(fill)
        self._done[fill.key](fill, error)

    def serve_all(self) -> None:
        """Bring all that is queued, also what is queued meanwhile."""
        while self.queue:
            self.serve(self.queue[0].key.expert, self.queue[0].key.layer)

    def _queued(self, expert: int, layer: int) -> bool:
        return any(fill.key == (layer, expert) for fill in self.queue)


class ByThread:
    """Serves fills by worker threads, by purpose; late, and wrong now and then, if asked to."""

    def __init__(
        self,
        memory: Memory,
        *,
        threads: int = 1,
        seed: int = 0,
        delay_s: float = 0,
        errors: float = 0,
    ) -> None:
        self._memory = memory
        self._random = random.Random(seed)
        self._delay_s, self._errors = delay_s, errors
        self._change = threading.Condition()
        self._queues: dict[Purpose, deque[tuple[Fill, Done]]] = {p: deque() for p in Purpose}
        self._running = 0
        self._closed = False
        self._threads = [threading.Thread(target=self._work) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def start(self, fills: Sequence[Fill], done: Done) -> None:
        with self._change:
            if self._closed:
                raise TransportClosedError()
            for fill in fills:
                self._queues[fill.purpose].append((fill, done))
            self._change.notify_all()

    def hurry(self, keys: Sequence[Key]) -> None:
        """Not at all: order is no matter of correctness."""

    def counters(self) -> dict[str, int]:
        return {}

    def settle(self) -> None:
        """Wait until nothing is queued or running."""
        with self._change:
            assert self._change.wait_for(self._quiet, PATIENCE_S)

    def close(self) -> None:
        self.settle()
        with self._change:
            self._closed = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join()

    def _quiet(self) -> bool:
        return not self._running and not any(self._queues.values())

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or any(self._queues.values()))
                if self._closed:
                    return
                fill, done = next(q for q in self._queues.values() if q).popleft()
                self._running += 1
                wait, fails = self._draw(), self._random.random() < self._errors
            self._memory.write(fill, partial(time.sleep, wait) if wait else lambda: None)
            done(fill, TruncatedError("cut", path="model.hfq") if fails else None)
            with self._change:
                self._running -= 1
                self._change.notify_all()

    def _draw(self) -> float:
        return self._random.random() * self._delay_s if self._random.random() < 0.3 else 0


class Caller:
    """A thread that acquires once and holds what it got."""

    def __init__(
        self, pager: Pager, ids: Sequence[int], layer: int = 0, dispatch: Dispatch | None = None
    ) -> None:
        self.lease: Lease | None = None
        self.error: BaseException | None = None
        self._pager = pager
        self._asked = layer, ids, dispatch
        self._thread = threading.Thread(target=self._acquire)
        self._thread.start()

    def got(self) -> Lease:
        """The lease, when it has come."""
        self.join()
        assert self.error is None, f"no lease: {self.error!r}"
        assert self.lease is not None
        return self.lease

    def failed(self) -> BaseException:
        """What was raised, when it has come."""
        self.join()
        assert self.error is not None, "the caller got a lease"
        return self.error

    def waits(self) -> bool:
        """Whether nothing has come yet."""
        return self.lease is None and self.error is None

    def over(self) -> bool:
        """Whether something has come; gives it a moment."""
        self._thread.join(0.0005)
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the caller waits for ever"

    def _acquire(self) -> None:
        layer, ids, dispatch = self._asked
        try:
            self.lease = self._pager.acquire(layer, ids, "decode", dispatch)
        except BaseException as error:
            self.error = error


class Bench:
    """A pager by hand."""

    def __init__(
        self,
        slots: int,
        *,
        experts: int = 16,
        layers: int = 1,
        quarantine: int = 0,
        timeout_s: float | None = None,
        **rest: Any,
    ) -> None:
        catalogue: Any = Numbered(experts, layers)
        self.memory = Memory(catalogue, slots + quarantine)
        self.transport = ByHand(self.memory)
        self.callers: list[Caller] = []
        self.pager = Pager(
            catalogue,
            slots,
            self.transport,
            policy=rest.pop("policy", "lru"),
            quarantine=[quarantine] * layers,
            timeout_s=3 * PATIENCE_S if timeout_s is None else timeout_s,
            **rest,
        )

    def ask(self, *ids: int, layer: int = 0, dispatch: Dispatch | None = None) -> Caller:
        """Ask in a thread of its own."""
        caller = Caller(self.pager, ids, layer, dispatch)
        self.callers.append(caller)
        return caller

    def hold(self, *ids: int, layer: int = 0, dispatch: Dispatch | None = None) -> Lease:
        """Ask, serve what is to be read, and check what came."""
        begun = len(self.transport.started)
        caller = self.ask(*ids, layer=layer, dispatch=dispatch)
        while not caller.over():
            self.transport.serve_all()
        lease = caller.got()
        for expert, slot in lease.slots.items():
            assert self.memory.holds(Key(layer, expert), slot)
        self.read = [fill.key.expert for fill in self.transport.started[begun:]]
        return lease

    def use(self, *ids: int, layer: int = 0) -> list[int]:
        """Ask, and give back at once; which experts were read for it."""
        self.hold(*ids, layer=layer).release()
        return self.read

    def asleep(self, callers: int = 1) -> None:
        """Wait until so many callers wait for the pager to change."""
        change: Any = self.pager._change
        self.reach(lambda: len(change._waiters) >= callers)

    def reach(self, met: Callable[[], bool]) -> None:
        """Wait until ``met``."""
        end = time.monotonic() + PATIENCE_S
        while not met():
            assert time.monotonic() < end, "what was waited for never came"
            time.sleep(0.0005)

    def close(self) -> None:
        """End the pager and the threads that still wait for it."""
        self.pager.close()
        for caller in self.callers:
            caller.join()


@contextmanager
def bench(slots: int, **rest: Any) -> Iterator[Bench]:
    """A pager by hand, closed whatever happens."""
    made = Bench(slots, **rest)
    try:
        yield made
    finally:
        made.close()
