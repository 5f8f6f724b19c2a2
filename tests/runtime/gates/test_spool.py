"""Logits on disk: the same bits back, nothing left behind, a full disk is one line."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.runtime.errors import SpoolError
from ds4q.runtime.gates import spool as module
from ds4q.runtime.gates.forced import Call
from ds4q.runtime.gates.spool import Spool
from tests.checks import check_refused, same_bits

RANDOM = np.random.default_rng(3)


def a_call(window: int, position: int, tokens: int, vocab: int = 13) -> Call:
    logits = RANDOM.normal(size=(tokens, vocab)).astype(np.float32)
    return Call(window, position, RANDOM.integers(0, vocab, tokens), logits)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary files go where the test can see them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def test_calls_come_back_as_they_went_in(folder: Path) -> None:
    calls = [a_call(0, 0, 5), a_call(0, 5, 1), a_call(1, 0, 3, vocab=7)]
    calls[1] = Call(0, 5, calls[1].fed, calls[0].logits.T[:1, ::-1])  # not contiguous
    with Spool(1000) as spool:
        assert spool.folder == str(folder)
        for call in calls:
            spool.write(call)
        assert list(folder.iterdir()) == []  # a crash leaves nothing either
        for _ in range(2):
            for found, expected in zip(spool.calls(), calls, strict=True):
                assert (found.window, found.position) == (expected.window, expected.position)
                same_bits(found.fed, expected.fed)
                same_bits(found.logits, expected.logits)


def test_the_file_is_gone_after_an_error() -> None:
    def fail() -> None:
        with Spool(10) as spool:
            spool.write(a_call(0, 0, 2))
            raise KeyError

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyError):
        fail()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_too_little_room_is_told_before_any_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(folder)._replace(free=99_999)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    says = ["expected 100,000 bytes free, found 99,999 bytes", "TMPDIR", "--tokens"]
    check_refused(SpoolError, lambda: Spool(100_000), path=folder, says=says)
    with Spool(99_999):
        pass


def test_a_disk_that_fills_up_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: Any) -> Any:
        return open("/dev/full", "w+b", buffering=options["buffering"])

    monkeypatch.setattr(module.tempfile, "TemporaryFile", full)
    with Spool(10) as spool:
        call = a_call(0, 0, 2)
        check_refused(SpoolError, lambda: spool.write(call), path=folder, says=["No space left"])


def test_a_file_that_ends_early_is_refused() -> None:
    with Spool(10) as spool:
        spool.write(a_call(0, 0, 2))
        os.truncate(spool._file.fileno(), 100)
        check_refused(SpoolError, lambda: list(spool.calls()), says=["ends early"])
