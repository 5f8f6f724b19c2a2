"""Rows on disk: the bits that went in, nothing with a name, a disk that fails is one line."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.runtime import rows as module
from ds4q.runtime.errors import SpoolError
from ds4q.runtime.rows import Rows
from tests.checks import check_refused, same_bits

VALUES = np.random.default_rng(3).normal(size=(20, 7)).astype(np.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_rows_come_back_as_they_went_in(folder: Path) -> None:
    with Rows(20, 7) as rows:
        assert list(folder.iterdir()) == []  # nor is anything left by a crash
        rows.write(0, VALUES[::2])  # not contiguous
        same_bits(rows.read(3, 4), VALUES[6:14:2])
        same_bits(rows.read(10, 10), np.zeros((10, 7), np.float32))
        places = np.array([1, 2, 3, 9, 19])
        rows.scatter(places, VALUES[:5])
        same_bits(rows.gather(places), VALUES[:5])
        same_bits(rows.gather(np.array([2, 2, 19])), VALUES[[1, 1, 4]])
        same_bits(rows.read(0, 1), VALUES[:1])


def test_short_writes_and_reads_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:5], at))
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: read(fd, [to[0][:3]], at))
    with Rows(20, 7) as rows:
        rows.write(0, VALUES)
        same_bits(rows.read(0, 20), VALUES)


def test_a_disk_that_fails_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with Rows(20, 7) as rows:
        monkeypatch.setattr(os, "pwrite", full)
        says = ["No space left", "TMPDIR"]
        check_refused(SpoolError, lambda: rows.write(0, VALUES), path=folder, says=says)
        os.truncate(rows._file.fileno(), 8)
        check_refused(SpoolError, lambda: rows.read(0, 1), path=folder, says=["ends early"])
    monkeypatch.setattr(module.os, "truncate", full)
    check_refused(SpoolError, lambda: Rows(20, 7), path=folder, says=["No space left"])
