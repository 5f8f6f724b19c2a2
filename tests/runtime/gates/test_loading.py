"""A load in a process of its own: every read is counted, and what goes wrong there is told here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds4q.artifact.hfq import Reader
from ds4q.runtime.errors import GateError
from ds4q.runtime.gates import loading


def test_a_load_in_a_process_of_its_own_tells_every_read(
    lossless: Path,
) -> None:
    load = loading.measure(lossless, threads=1)
    with Reader(lossless) as reader:
        tensors = [[entry.offset, entry.nbytes, 0] for entry in reader.tensors.values()]
    assert sorted(load.reads.tolist())[-len(tensors) :] == sorted(tensors)
    assert int(load.reads[:, 1].sum()) == lossless.stat().st_size
    assert len({offset for offset, _, _ in load.reads.tolist()}) == len(load.reads)
    assert len(load.later) == 0
    assert load.paged is None
    assert 0 < load.seconds < load.first_token_s
    paged = loading.measure(lossless, threads=1, cache={"slots": 4})
    assert paged.paged is not None
    assert paged.paged["slots"] == 4
    assert len(paged.reads) < len(load.reads)
    assert len(paged.later) > 0, "of the first token"


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    path = tmp_path / "x.hfq"
    path.write_bytes(b"HFQM")
    with pytest.raises(GateError, match=r"the process that loads it failed.*x\.hfq"):
        loading.measure(path, threads=1)


def test_a_process_that_hangs_is_ended(lossless: Path) -> None:
    with pytest.raises(GateError, match="did not end: expected at most"):
        loading.measure(lossless, threads=1, limit_s=0.01)


def test_every_way_to_read_is_counted_and_other_files_are_not(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(bytes(10_000))
    other.write_bytes(bytes(10))
    names = {name: getattr(os, name) for name in loading.Reads.CALLS}
    reads = loading.Reads(os.fspath(path))
    try:
        reads.watch()
        for file in (path, other):
            fd = os.open(file, os.O_RDONLY)
            os.pread(fd, 5, 3)
            os.preadv(fd, [bytearray(4), bytearray(2)], 4)
            os.read(fd, 2)
            os.readv(fd, [bytearray(1)])
            os.close(fd)
        assert reads.take() == [(3, 5, 0), (4, 6, 0), (0, 2, 0), (2, 1, 0)]
        assert reads.take() == []
    finally:
        for name, call in names.items():
            setattr(os, name, call)
