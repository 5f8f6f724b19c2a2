"""What the kernel is told to read next: each byte once, in time, and never much too early."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from ds4q.artifact import readahead
from ds4q.artifact.readahead import Range, ReadAhead

Advice = list[tuple[int, int, int]]


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> Advice:
    """Calls of posix_fadvise as (fd, offset, length); limits of 100, 300 and 20 bytes."""
    calls: Advice = []

    def record(fd: int, offset: int, length: int, what: int) -> None:
        assert what == os.POSIX_FADV_WILLNEED
        assert length > 0
        calls.append((fd, offset, length))

    monkeypatch.setattr(os, "posix_fadvise", record)
    monkeypatch.setattr(readahead, "WITHIN_BYTES", 100)
    monkeypatch.setattr(readahead, "AHEAD_BYTES", 300)
    monkeypatch.setattr(readahead, "STEP_BYTES", 20)
    return calls


def test_taking_an_item_asks_for_its_beginning_and_for_what_follows(advice: Advice) -> None:
    ahead = ReadAhead([[Range(3, 1000 * n, 150)] for n in range(9)])
    ahead.take(0)
    assert advice == [(3, 0, 100), (3, 1000, 100), (3, 2000, 100)]
    advice.clear()
    ahead.take(1)
    assert advice == [(3, 3000, 100)]


def test_progress_asks_for_the_rest_in_steps(advice: Advice) -> None:
    reached = ReadAhead([[Range(3, 5000, 250)]]).take(0)
    assert advice == [(3, 5000, 100)]
    for done in (0, 10, 19):
        reached(done)
    assert len(advice) == 1
    reached(20)
    assert advice[1:] == [(3, 5100, 20)]
    reached(145)
    assert advice[2:] == [(3, 5120, 125)]
    reached(149)
    assert len(advice) == 3
    reached(150)
    assert advice[3:] == [(3, 5245, 5)]  # the end, however short
    reached(250)
    assert len(advice) == 4


def test_companion_ranges_come_with_the_beginning(advice: Advice) -> None:
    items = [[Range(3, 0, 50), Range(4, 700, 8)], [Range(3, 50, 50), Range(4, 708, 8)]]
    ahead = ReadAhead(items)
    ahead.take(0)
    assert advice == [(3, 0, 50), (4, 700, 8), (3, 50, 50), (4, 708, 8)]
    ahead.take(1)
    assert len(advice) == 4


def test_every_byte_is_asked_for_once(advice: Advice) -> None:
    sizes = [5, 500, 1, 99, 100, 101, 0, 250]
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    ahead = ReadAhead([[Range(3, at, n)] for at, n in zip(starts, sizes, strict=True)])
    for number, size in enumerate(sizes):
        reached = ahead.take(number)
        for done in range(0, size, 30):
            reached(done)
    covered = sorted((offset, offset + length) for _, offset, length in advice)
    assert covered[0][0] == 0
    assert covered[-1][1] == sum(sizes)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(covered))


def test_prime_asks_for_the_beginning_of_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, int, int]] = []

    def record(fd: int, offset: int, length: int, what: int) -> None:
        asked.append((os.readlink(f"/proc/self/fd/{fd}"), offset, length, what))

    monkeypatch.setattr(os, "posix_fadvise", record)
    files = [tmp_path / "a", tmp_path / "none", tmp_path / "b"]
    for file in (files[0], files[2]):
        file.write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    readahead.prime(files)
    advice = (0, readahead.PRIME_BYTES, os.POSIX_FADV_WILLNEED)
    assert asked == [(str(files[0]), *advice), (str(files[2]), *advice)]
    assert len(os.listdir("/proc/self/fd")) <= before


def test_prime_leaves_complaints_to_the_reader(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    readahead.prime([fifo, tmp_path, tmp_path / "none"])
