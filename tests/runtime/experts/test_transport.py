"""Filling host slots: each fill ends once, in order of need, and closing leaves nothing behind."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.hfq import Reader
from ds4q.runtime.config import parse_config
from ds4q.runtime.errors import ExpertReadError, TransportClosedError
from ds4q.runtime.experts import fillqueue
from ds4q.runtime.experts.catalogue import Catalogue, Key, Record
from ds4q.runtime.experts.reading import ExpertReader, Fill, Purpose
from ds4q.runtime.experts.runs import runs
from ds4q.runtime.experts.transform import Parts
from ds4q.runtime.experts.transport import HostTransport
from ds4q.runtime.source import Tensors
from tests.runtime.experts.test_reading import PREADV, check_bytes, says

U8 = npt.NDArray[np.uint8]


class HostSlots:
    """A buffer for each (expert, slot) that is asked for."""

    def __init__(self) -> None:
        self.held: dict[tuple[Key, int], Parts] = {}

    def views(self, record: Record, slot: int) -> Parts:
        gate, up, down = (np.zeros(entry.nbytes, np.uint8) for entry in record.entries)
        return self.held.setdefault((record.key, slot), (gate, up, down))


class Log:
    """What ``done`` was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Fill, BaseException | None]] = []
        self.threads: set[int] = set()
        self._one = threading.Semaphore(0)

    def __call__(self, fill: Fill, error: BaseException | None) -> None:
        self.calls.append((fill, error))
        self.threads.add(threading.get_ident())
        self._one.release()

    def wait(self, n: int) -> None:
        for _ in range(n):
            assert self._one.acquire(timeout=300)


@pytest.fixture
def tiny(tiny_path: Path) -> Iterator[tuple[Reader, Catalogue]]:
    with Reader(tiny_path) as reader:
        config = parse_config(reader.metadata["config"], path=tiny_path)
        yield reader, Catalogue(config, Tensors(reader), path=tiny_path)


def test_a_transport_fills_all_slots(tiny: tuple[Reader, Catalogue]) -> None:
    reader, catalogue = tiny
    before, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    slots, log = HostSlots(), Log()
    experts = ExpertReader(reader, catalogue, bounces=3)
    transport = HostTransport(catalogue, experts, slots, threads=3)
    fills = [Fill(record.key, n, Purpose.DEMAND) for n, record in enumerate(catalogue)]
    random.Random(1).shuffle(fills)
    for first in range(0, len(fills), 7):
        transport.start(fills[first : first + 7], log)
    log.wait(len(fills))
    assert sorted(fill for fill, error in log.calls if error is None) == sorted(fills)
    assert threading.get_ident() not in log.threads
    for fill in fills:
        check_bytes(slots.held[fill.key, fill.slot], catalogue[fill.key], reader)
    assert transport.counters()["reads"] == len(fills)
    assert transport.counters()["bytes_read"] == catalogue.file_bytes
    transport.close()
    transport.close()
    assert set(os.listdir("/proc/self/fd")) <= before
    assert set(threading.enumerate()) <= threads
    with pytest.raises(TransportClosedError):
        transport.start(fills[:1], log)
    assert len(log.calls) == len(fills)


class Gate:
    """Holds every read until it is let through; remembers the order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[Key] = []
        self.entered = threading.Semaphore(0)
        self.passing = threading.Semaphore(0)
        monkeypatch.setattr(ExpertReader, "read", self._read)

    def _read(self, record: Record, *parts: U8) -> None:
        self.order.append(record.key)
        self.entered.release()
        assert self.passing.acquire(timeout=300)

    def let(self, n: int) -> None:
        for _ in range(n):
            self.passing.release()


def test_what_is_waited_for_is_read_first(
    tiny: tuple[Reader, Catalogue], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, catalogue = tiny
    gate, log = Gate(monkeypatch), Log()
    transport = HostTransport(catalogue, ExpertReader(reader, catalogue), HostSlots(), threads=1)
    transport.start([Fill(Key(0, 0), 0, Purpose.WARM)], log)
    assert gate.entered.acquire(timeout=300)
    purposes = (
        Purpose.WARM,
        Purpose.SPECULATIVE,
        Purpose.CERTAIN,
        Purpose.DEMAND,
        Purpose.DEMAND,
        Purpose.WARM,
    )
    transport.start([Fill(Key(1, e), 0, p) for e, p in enumerate(purposes)], log)
    transport.hurry([Key(1, 5), Key(0, 0), Key(3, 3)])
    gate.let(7)
    log.wait(7)
    # Demands in the order of their arrival, also the one that became a demand later.
    assert [key.expert for key in gate.order[1:]] == [3, 4, 5, 2, 1, 0]
    transport.start([Fill(Key(2, e), 0, Purpose.WARM) for e in range(9)], log)
    for _ in range(6):
        assert gate.entered.acquire(timeout=300)
    assert gate.entered.acquire(timeout=300)
    transport.hurry([Key(2, 8), Key(2, 6)])
    gate.let(9)
    log.wait(9)
    assert [key.expert for key in gate.order[7:]] == [0, 6, 8, 1, 2, 3, 4, 5, 7]
    transport.close()


def test_closing_finishes_what_runs_and_refuses_what_waits(
    tiny: tuple[Reader, Catalogue], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, catalogue = tiny
    gate, log = Gate(monkeypatch), Log()
    transport = HostTransport(catalogue, ExpertReader(reader, catalogue), HostSlots(), threads=2)
    fills = [Fill(Key(0, e), 0, Purpose.DEMAND) for e in range(6)]
    transport.start(fills, log)
    for _ in range(2):
        assert gate.entered.acquire(timeout=300)
    closing = threading.Thread(target=transport.close)
    closing.start()
    gate.let(2)
    closing.join(300)
    assert not closing.is_alive()
    ended = {fill.key.expert: error for fill, error in log.calls}
    assert len(log.calls) == 6
    assert all(ended[e] is None for e in (0, 1))
    assert all(isinstance(ended[e], TransportClosedError) for e in (2, 3, 4, 5))


class Hang:
    """The first read of a file by so many threads comes back when it is let go, and not before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reads: int = 1) -> None:
        self.entered = threading.Semaphore(0)
        self._over = threading.Event()
        self._left = iter(range(reads))
        monkeypatch.setattr(os, "preadv", self._preadv)
        monkeypatch.setattr(fillqueue, "CLOSE_S", 0.05)

    def _preadv(self, fd: int, buffers: Sequence[Any], offset: int, *flags: int) -> int:
        if not flags and next(self._left, None) is not None:
            self.entered.release()
            assert self._over.wait(300)
        return PREADV(fd, buffers, offset, *flags)

    def let_go(self, threads: set[threading.Thread]) -> None:
        """Let the reads come back, and wait for all threads but ``threads``."""
        self._over.set()
        for thread in set(threading.enumerate()) - threads:
            thread.join(300)


@pytest.mark.parametrize("helpers", [0, 2])
@pytest.mark.parametrize("cached", [True, False])
def test_closing_gives_up_a_read_that_hangs_and_takes_nothing_from_it(
    tiny: tuple[Reader, Catalogue], monkeypatch: pytest.MonkeyPatch, helpers: int, cached: bool
) -> None:
    reader, catalogue = tiny
    says(monkeypatch, cached=cached)
    files, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    hang, slots, log = Hang(monkeypatch), HostSlots(), Log()
    experts = ExpertReader(reader, catalogue, bounces=1, helpers=helpers)
    open_files = set(os.listdir("/proc/self/fd"))
    transport = HostTransport(catalogue, experts, slots, threads=1)
    fills = [Fill(Key(0, e), e, Purpose.DEMAND) for e in range(3)]
    transport.start(fills, log)
    assert hang.entered.acquire(timeout=300)
    for _ in range(2):
        closing = threading.Thread(target=transport.close)
        closing.start()
        closing.join(300)
        assert not closing.is_alive()
        errors = {fill: type(error) for fill, error in log.calls}
        assert errors == dict.fromkeys(fills, TransportClosedError) | {fills[0]: ExpertReadError}
        assert open_files - files <= set(os.listdir("/proc/self/fd"))
        experts.close()  # as whoever made it does
    hang.let_go(threads)
    assert len(log.calls) == len(fills)
    check_bytes(slots.held[fills[0].key, 0], catalogue[fills[0].key], reader)
    assert set(os.listdir("/proc/self/fd")) <= files
    assert set(threading.enumerate()) <= threads


def test_closing_does_not_wait_again_for_a_read_that_was_waited_for(
    tiny: tuple[Reader, Catalogue], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, catalogue = tiny
    threads, hang, log = set(threading.enumerate()), Hang(monkeypatch), Log()
    monkeypatch.setattr(fillqueue, "CLOSE_S", 500)
    experts = ExpertReader(reader, catalogue, bounces=2)
    transport = HostTransport(catalogue, experts, HostSlots(), threads=2)
    transport.start([Fill(Key(0, 0), 0, Purpose.DEMAND)], log)
    assert hang.entered.acquire(timeout=300)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 501)
    monkeypatch.setattr(fillqueue, "time", later)
    closing = threading.Thread(target=transport.close, daemon=True)
    closing.start()
    closing.join(300)
    assert not closing.is_alive()
    log.wait(1)
    hang.let_go(threads)
    assert set(threading.enumerate()) <= threads


def test_errors_come_with_their_fill_and_the_threads_go_on(
    tiny: tuple[Reader, Catalogue], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, catalogue = tiny
    says(monkeypatch, cached=True)
    experts, slots, log = ExpertReader(reader, catalogue, bounces=2), HostSlots(), Log()
    bad = catalogue[Key(1, 4)]

    def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
        if offset == next(runs(bad)).offset:
            raise OSError(errno.EIO, "Input/output error")
        return PREADV(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    transport = HostTransport(catalogue, experts, slots, threads=2)
    fills = [Fill(record.key, 0, Purpose.DEMAND) for record in catalogue] * 2
    transport.start(fills, log)
    log.wait(len(fills))
    transport.close()
    failed = [(fill.key, type(error)) for fill, error in log.calls if error is not None]
    assert failed == [(bad.key, ExpertReadError)] * 2


def test_a_read_may_be_asked_for_when_another_is_done(tiny: tuple[Reader, Catalogue]) -> None:
    reader, catalogue = tiny
    transport = HostTransport(
        catalogue, ExpertReader(reader, catalogue, bounces=1), HostSlots(), threads=1
    )
    log = Log()

    def next_one(fill: Fill, error: BaseException | None) -> None:
        log(fill, error)
        if fill.key.expert < 3:
            transport.start([fill._replace(key=Key(0, fill.key.expert + 1))], next_one)

    transport.start([Fill(Key(0, 0), 0, Purpose.WARM)], next_one)
    log.wait(4)
    transport.close()
    assert [(fill.key.expert, error) for fill, error in log.calls] == [(e, None) for e in range(4)]
