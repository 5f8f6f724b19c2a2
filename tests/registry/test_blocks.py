"""What a download keeps on disk: journal, whose partial file it is, the final name."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ds4q.artifact.files import ForeignFileError
from ds4q.artifact.locks import LockedError
from ds4q.registry.blocks import BLOCK_BYTES, MARK, About, Blocks
from ds4q.registry.errors import ExistsError, UnfinishedError
from tests.checks import check_refused

ABOUT = About("http://host/a.fp4", 3 * BLOCK_BYTES, '"v1"', "a" * 64)
DIGEST = "0123456789abcdef" * 2


def test_blocks_are_remembered(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path / "a.fp4")
    assert blocks.about is None
    blocks.start(ABOUT)
    blocks.record(2, DIGEST)
    blocks.record(0, DIGEST[::-1])
    blocks.close()
    again = Blocks(tmp_path / "a.fp4")
    assert again.about == ABOUT
    assert again.digests == {2: DIGEST, 0: DIGEST[::-1]}
    again.close()


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        (b"1 0123", {2}),  # torn
        (b"1 0123\n", {2}),
        (b"x " + DIGEST.encode() + b"\n", {2}),
        (b"-1 " + DIGEST.encode() + b"\n", {2}),
        (b"\0" * 40 + b"\n1 " + DIGEST.encode() + b"\n", {2}),
        (b"1 " + DIGEST.encode() + b"\n", {1, 2}),
    ],
)
def test_nothing_behind_a_damaged_line_is_believed(
    tail: bytes, kept: set[int], tmp_path: Path
) -> None:
    blocks = Blocks(tmp_path / "a.fp4")
    blocks.start(ABOUT)
    blocks.record(2, DIGEST)
    blocks.close()
    with blocks.journal.open("ab") as file:
        file.write(tail)
    again = Blocks(tmp_path / "a.fp4")
    assert set(again.digests) == kept
    again.record(0, DIGEST)  # goes behind what is believed
    again.close()
    last = Blocks(tmp_path / "a.fp4")
    assert set(last.digests) == kept | {0}
    last.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "ds4q.blocks.v2"},
        {"block_bytes": 1 << 20},
        {"size_bytes": 0},
        {"size_bytes": "12"},
        {"size_bytes": True},
        {"url": None},
        {"more": 1},
    ],
)
def test_a_journal_of_another_kind_is_not_ours(changes: dict[str, object], tmp_path: Path) -> None:
    blocks = Blocks(tmp_path / "a.fp4")
    blocks.start(ABOUT)
    blocks.file.pwrite(b"data", 0)
    blocks.close()
    head = json.loads(blocks.journal.read_text())
    blocks.journal.write_text(json.dumps(head | changes) + "\n")
    check_refused(ForeignFileError, lambda: Blocks(tmp_path / "a.fp4"), path=blocks.file.path)
    assert blocks.file.path.read_bytes()[:4] == b"data"
    blocks.file.path.write_bytes(MARK + b"data")
    with pytest.raises((UnfinishedError, ForeignFileError)):
        Blocks(tmp_path / "a.fp4")
    assert blocks.file.path.read_bytes() == MARK + b"data"


@pytest.mark.parametrize("text", [b"a user's notes\n", b"", b"{}", b'{"format": "x"}\n'])
def test_somebody_elses_journal_is_kept(text: bytes, tmp_path: Path) -> None:
    journal = tmp_path / "a.fp4.partial.blocks"
    journal.write_bytes(text)
    check_refused(ForeignFileError, lambda: Blocks(tmp_path / "a.fp4"), path=journal)
    assert os.listdir(tmp_path) == [journal.name]
    assert journal.read_bytes() == text


@pytest.mark.parametrize("length", [40, 10_000])
def test_a_journal_of_ours_that_is_torn_is_begun_anew(length: int, tmp_path: Path) -> None:
    blocks = Blocks(tmp_path / "a.fp4")
    blocks.start(ABOUT)
    blocks.close()
    whole = blocks.journal.read_bytes()
    blocks.journal.write_bytes(whole.rstrip()[:length])
    again = Blocks(tmp_path / "a.fp4")
    again.start(ABOUT)
    again.close()
    assert again.journal.read_bytes() == whole


@pytest.mark.parametrize("suffix", [".partial", ".partial.blocks"])
@pytest.mark.parametrize("kind", ["a symbolic link", "a folder", "a named pipe"])
def test_what_is_no_file_is_no_download(suffix: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.fp4{suffix}"
    if kind == "a symbolic link":
        path.symlink_to("nowhere")
    elif kind == "a folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    says = [f"found {kind}", "move it away"]
    check_refused(ForeignFileError, lambda: Blocks(tmp_path / "a.fp4"), path=path, says=says)
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("changes", "goes_on"),
    [
        ({}, True),
        ({"sha256": "b" * 64}, True),  # the entry was corrected; the server's file is the same
        ({"validator": '"v2"'}, False),
        ({"size_bytes": 5}, False),
        ({"url": "http://mirror/a.fp4", "validator": '"x"'}, True),
        ({"url": "http://mirror/a.fp4", "sha256": "b" * 64}, False),
        ({"url": "http://mirror/a.fp4", "sha256": ""}, False),
        ({"validator": ""}, True),
        ({"validator": "", "sha256": ""}, False),
    ],
)
def test_what_may_continue_what(changes: dict[str, object], goes_on: bool) -> None:
    now = replace(ABOUT, **changes)  # type: ignore[arg-type]
    assert now.continues(ABOUT) is goes_on


def test_one_process_holds_the_file(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path / "a.fp4")
    check_refused(LockedError, lambda: Blocks(tmp_path / "a.fp4"), path=blocks.file.path)
    blocks.close()
    Blocks(tmp_path / "a.fp4").close()


def test_a_file_with_nothing_in_it_goes(tmp_path: Path) -> None:
    Blocks(tmp_path / "a.fp4").close()
    assert os.listdir(tmp_path) == []


def test_publishing_never_replaces_unasked(tmp_path: Path) -> None:
    to = tmp_path / "a.fp4"
    blocks = Blocks(to)
    blocks.start(ABOUT)
    blocks.file.pwrite(b"new", 0)
    to.symlink_to(tmp_path / "nowhere")
    check_refused(ExistsError, lambda: blocks.publish(replace=False), path=to)
    assert to.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a.fp4", "a.fp4.partial", "a.fp4.partial.blocks"]
    blocks.publish(replace=True)
    blocks.close()
    assert to.read_bytes()[:3] == b"new"
    assert to.stat().st_size == ABOUT.size_bytes
    assert os.listdir(tmp_path) == ["a.fp4"]
