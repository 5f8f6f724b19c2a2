"""Packed reads: order, content and refusals, with the vectors of the format's description."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from ds4q.artifact.errors import PayloadValueError, TruncatedError
from ds4q.runtime.device import reads
from ds4q.runtime.device.reads import LANES, Job, Run, packed, read_jobs
from ds4q.runtime.errors import PackedReadError
from tests.checks import check_refused

GOLDEN = {
    "first": [(16, 8), (0, 4)],
    "second": [(80, 12)],
    "third": [(40, 3), (60, 5), (120, 8)],
    "fourth": [(8, 8)],
}


def empty(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, dtype=np.uint8)


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    path = tmp_path / "counted"
    path.write_bytes(bytes(range(128)))
    return path


def test_order_and_content_are_kept(counted: Path) -> None:
    jobs = [packed(label, places) for label, places in GOLDEN.items()]
    found = [(job.label, buffer.tobytes()) for job, buffer in read_jobs(counted, jobs, empty)]
    assert found == [
        (label, b"".join(bytes(range(at, at + n)) for at, n in places))
        for label, places in GOLDEN.items()
    ]


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"\x00\x01\x02\x03")
    jobs = [packed("all", [(2, 8)])]
    check_refused(TruncatedError, lambda: list(read_jobs(path, jobs, empty)), path=path)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ([], "nothing to read"),
        ([(4, 0)], "0 bytes at 4"),
        ([(-1, 4)], "4 bytes at -1"),
        ([((1 << 63) - 4, 4 + 1)], "bad run"),
    ],
)
def test_what_no_file_holds_is_refused(places: list[tuple[int, int]], says: str) -> None:
    check_refused(PackedReadError, lambda: packed("gates", places), says=["gates", says])


def test_runs_that_overlap_are_refused() -> None:
    runs = (Run(0, 8, 0), Run(8, 8, 7))
    check_refused(PackedReadError, lambda: Job("gates", runs), says=["overlap"])


def test_gaps_are_left_alone(counted: Path) -> None:
    job = Job("padded", (Run(5, 3, 0), Run(9, 2, 16)))
    (_, buffer), *more = read_jobs(counted, [job], lambda n: np.full(n, 0xEE, dtype=np.uint8))
    assert buffer.tobytes() == bytes([5, 6, 7]) + b"\xee" * 13 + bytes([9, 10])
    assert not more


def test_a_lane_has_a_handle_of_its_own_and_there_are_at_most_four(
    counted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, used = reads.pread_all, set()
    together = threading.Barrier(LANES, timeout=300)

    def pread_all(handle: int, out: np.ndarray, offset: int, *, path: object) -> None:
        used.add((threading.get_ident(), handle))
        if offset < LANES:
            together.wait()  # passes only if four lanes read at once
        real(handle, out, offset, path=path)

    monkeypatch.setattr(reads, "pread_all", pread_all)
    jobs = [packed(str(n), [(n, 1)]) for n in range(100)]
    found = [buffer[0] for _, buffer in read_jobs(counted, jobs, empty)]
    assert found == list(range(100))
    assert len({handle for _, handle in used}) == LANES
    assert len({thread for thread, _ in used}) == LANES


def test_buffers_are_asked_for_no_earlier_than_promised(counted: Path) -> None:
    taken: list[int] = []
    had = 0

    def take(nbytes: int) -> np.ndarray:
        assert len(taken) - had < 3
        taken.append(nbytes)
        return empty(nbytes)

    jobs = [packed(str(n), [(n, 1)]) for n in range(20)]
    for _ in read_jobs(counted, jobs, take, ahead=3):
        had += 1
    assert had == len(taken) == 20


def test_a_failed_check_ends_the_reading(counted: Path) -> None:
    calls = []

    def check(buffer: np.ndarray) -> None:
        calls.append(buffer)
        raise PayloadValueError("bad byte", tensor="t")

    jobs = [Job(str(n), (Run(n, 1, 0),), check) for n in range(100)]
    check_refused(PayloadValueError, lambda: list(read_jobs(counted, jobs, empty)), tensor="t")
    assert len(calls) <= 2 * LANES
