"""Many threads, late reads and wrong ones: no wrong byte, no deadlock, no leak."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from ds4q.artifact.errors import TruncatedError
from ds4q.runtime.experts.catalogue import Key
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.policy import DEFAULT_POLICY
from ds4q.runtime.experts.reading import Purpose
from tests.runtime.experts.fakes import PATIENCE_S, ByThread, Memory, Numbered

THREADS = 8
EXPERTS = 64
SLOTS = 4
QUARANTINE = 2
ERRORS = 0.02
DELAY_S = 0.0003


class Stress:
    """Threads that get, hold and release, beside one that reads ahead."""

    def __init__(self, rounds: int, policy: str) -> None:
        catalogue: Any = Numbered(EXPERTS)
        self.memory = Memory(catalogue, SLOTS + QUARANTINE)
        self.transport = ByThread(self.memory, threads=4, seed=11, delay_s=DELAY_S, errors=ERRORS)
        self.pager = Pager(
            catalogue,
            SLOTS,
            self.transport,
            policy=policy,
            quarantine=[QUARANTINE],
            timeout_s=PATIENCE_S,
        )
        self.rounds = rounds
        self.served = 0
        self.wrong: list[Any] = []
        self._lock = threading.Lock()
        self._over = threading.Event()

    def run(self) -> dict[str, Any]:
        """The pager's counters when all is over."""
        callers = [threading.Thread(target=self._call, args=(n,)) for n in range(THREADS)]
        guesser = threading.Thread(target=self._guess)
        for thread in (guesser, *callers):
            thread.start()
        for thread in callers:
            thread.join()
        self._over.set()
        guesser.join()
        self.transport.settle()
        counters = self.pager.counters()
        self.pager.close()
        return counters

    def _call(self, number: int) -> None:
        draw = random.Random(number)
        served = 0
        try:
            for _ in range(self.rounds):
                served += self._once(draw)
        except BaseException as error:
            self.wrong.append(error)
        with self._lock:
            self.served += served

    def _once(self, draw: random.Random) -> bool:
        wanted = draw.sample(range(EXPERTS), draw.choice((1, 1, 1, 2, 3)))
        try:
            lease = self.pager.acquire(0, wanted, "decode")
        except TruncatedError:
            return False
        with lease:
            for turn in range(2):
                for expert, slot in lease.slots.items():
                    if not self.memory.holds(Key(0, expert), slot):
                        self.wrong.append((expert, slot, turn))
        return True

    def _guess(self) -> None:
        draw = random.Random(THREADS)
        try:
            while not self._over.wait(0.0002):
                purpose = draw.choice((Purpose.CERTAIN, Purpose.SPECULATIVE, Purpose.WARM))
                self.pager.prefetch(0, draw.sample(range(EXPERTS), 2), purpose)
        except BaseException as error:
            self.wrong.append(error)


def check(rounds: int, policy: str) -> None:
    stress = Stress(rounds, policy)
    counters = stress.run()
    demand = counters["decode"]
    assert stress.wrong == []
    assert stress.served + demand["failed"] == THREADS * rounds
    assert 0 < demand["failed"] < THREADS * rounds / 4
    assert (counters["leased"], counters["loading"], counters["loading_bytes"]) == (0, 0, 0)
    assert counters["prefetch"]["used"] > 0
    layer = stress.pager._layers[0]
    places = [entry.slot for entry in (*layer._residents.values(), *layer._aside.values())]
    assert sorted(places + layer._free) == list(range(SLOTS + QUARANTINE))


@pytest.mark.parametrize("policy", ["lru", DEFAULT_POLICY])
def test_no_thread_reads_a_wrong_byte(policy: str) -> None:
    check(rounds=120, policy=policy)


@pytest.mark.slow
def test_no_thread_reads_a_wrong_byte_in_ten_thousand_rounds() -> None:
    check(rounds=10_000, policy=DEFAULT_POLICY)
