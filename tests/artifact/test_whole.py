"""A small file that is there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds4q.artifact.whole import write_whole


def test_text_is_written_whole_beside_what_others_left(tmp_path: Path) -> None:
    target = tmp_path / "r.json"
    left = tmp_path / f".r.json.part.{os.getpid()}.0"
    left.write_text("of another run")
    write_whole(target, "ü")
    write_whole(target, "new")
    assert target.read_text() == "new"
    assert left.read_text() == "of another run"
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "r.json"]


def test_a_full_disk_leaves_the_old_text_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "r.json"
    target.write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(target, "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("r.json", "old")]
