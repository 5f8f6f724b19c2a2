"""SHA-256 of a stream: equal to hashlib's, each chunk shown once, reading errors passed on."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from ds4q.artifact import digest
from ds4q.artifact.digest import sha256_stream
from tests.checks import Array

DATA = np.random.default_rng(1).integers(0, 256, 1000, dtype=np.uint8)


def pread_into(out: Array, offset: int) -> None:
    out[:] = DATA[offset : offset + len(out)]


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 64, 999, 1000])
@pytest.mark.parametrize("chunk", [1, 8, 1000, 5000])
def test_equals_hashlib(nbytes: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK_BYTES", chunk)
    expected = hashlib.sha256(DATA[:nbytes].tobytes()).hexdigest()
    assert sha256_stream(pread_into, nbytes) == expected


def test_every_chunk_is_announced_and_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK_BYTES", 300)
    events: list[tuple[str, int, int]] = []
    shown = []

    def read(out: Array, offset: int) -> None:
        events.append(("read", offset, len(out)))
        pread_into(out, offset)

    def seen(offset: int, chunk: Array) -> None:
        events.append(("seen", offset, len(chunk)))
        shown.append(chunk.tobytes())

    sha256_stream(read, 1000, before=lambda nbytes: events.append(("before", 0, nbytes)), seen=seen)
    assert b"".join(shown) == DATA.tobytes()
    steps = [(0, 300), (300, 300), (600, 300), (900, 100)]
    assert events == [
        event
        for offset, length in steps
        for event in (("before", 0, length), ("read", offset, length), ("seen", offset, length))
    ]


def test_read_error_is_passed_on() -> None:
    def fail(out: Array, offset: int) -> None:
        raise OSError(5, "I/O error")

    with pytest.raises(OSError, match="I/O error"):
        sha256_stream(fail, 10)


def test_a_stopped_stream_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK_BYTES", 10)
    reads: list[int] = []

    def read(out: Array, offset: int) -> None:
        reads.append(offset)
        pread_into(out, offset)

    def stop(nbytes: int) -> None:
        if len(reads) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sha256_stream(read, 1000, before=stop)
    assert reads == [0, 10, 20]
