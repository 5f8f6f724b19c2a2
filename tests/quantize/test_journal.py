"""The journal: what it gives back, and what of a damaged one is believed."""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ds4q.artifact.files import ForeignFileError
from ds4q.quantize import journal
from ds4q.quantize.journal import (
    BlockRecord,
    Earlier,
    Journal,
    JournalError,
    ResumeError,
    read_journal,
)
from tests.checks import check_refused

IDENTITY: dict[str, Any] = {"options": {"recipe": "fp4"}, "outputs": [["x.hfq", 9]], "k": "v"}
SHARDS = {"a.safetensors": [100, 5]}


def block(number: int) -> BlockRecord:
    return BlockRecord(0, number, 0, 1000 + number, f"{number:032x}", ("1" * 32, "2" * 32), {})


def write(path: Path, blocks: int = 3, *, published: bool = False) -> bytes:
    """A journal of ``blocks`` blocks; its bytes."""
    made = Journal.create(path, IDENTITY, SHARDS, {})
    for number in range(blocks):
        made.record(block(number))
    if published:
        made.publish()
    made.close()
    return path.read_bytes()


def blocks_of(earlier: Earlier) -> list[BlockRecord]:
    return list(earlier.blocks.values())


def read(path: Path) -> Earlier:
    earlier = read_journal(path)
    assert earlier is not None
    return earlier


def test_what_was_recorded_comes_back(tmp_path: Path) -> None:
    raw = write(tmp_path / "j")
    earlier = read(tmp_path / "j")
    assert (earlier.identity, earlier.shards) == (IDENTITY, SHARDS)
    assert blocks_of(earlier) == [block(0), block(1), block(2)]
    assert earlier.nbytes == 3003
    assert (earlier.published, earlier.valid_bytes) == (False, len(raw))


def test_events_survive(tmp_path: Path) -> None:
    made = Journal.create(tmp_path / "j", IDENTITY, SHARDS, {})
    events = {"inexact": 12, "max_error": 0.1 + 0.2}
    made.record(BlockRecord(1, 2, 3, 4, "0" * 32, ("1" * 32,), events))
    made.close()
    assert blocks_of(read(tmp_path / "j"))[0].events == events


def test_published_is_the_last_word(tmp_path: Path) -> None:
    raw = write(tmp_path / "j", published=True)
    earlier = read(tmp_path / "j")
    assert earlier.published
    assert len(earlier.blocks) == 3
    assert earlier.valid_bytes == len(raw)  # who goes on still knows which names may be taken


def test_no_journal_is_none(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "j") is None


def test_each_cut_keeps_the_whole_lines_before_it(tmp_path: Path) -> None:
    path = tmp_path / "j"
    raw = write(path, published=True)
    ends = [at + 1 for at, byte in enumerate(raw) if byte == ord("\n")]
    for length in range(len(raw) + 1):
        path.write_bytes(raw[:length])
        whole = sum(end <= length for end in ends)
        if whole == 0:  # a journal has its first line from its first moment
            with pytest.raises((ForeignFileError, JournalError)):
                read_journal(path)
            continue
        earlier = read(path)
        assert len(earlier.blocks) == min(whole - 1, 3), length
        assert earlier.published == (whole == 5), length
        assert earlier.valid_bytes == ends[whole - 1], length


def test_each_changed_byte_ends_the_belief(tmp_path: Path) -> None:
    path = tmp_path / "j"
    raw = write(path)
    ends = [at + 1 for at, byte in enumerate(raw) if byte == ord("\n")]
    for at in range(len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        line = sum(end <= at for end in ends)
        if line == 0:
            with pytest.raises((ForeignFileError, JournalError)):
                read_journal(path)
        else:
            earlier = read(path)
            assert blocks_of(earlier) == [block(n) for n in range(line - 1)], at
            assert earlier.valid_bytes == ends[line - 1], at


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\n",
        b"\0" * 5000 + b"\n",
        b"no journal at all\n" * 9,
        b"[" * 100_000 + b"\n",
        json.dumps({"format": journal.FORMAT}).encode() + b"\n",
        journal._line({"another": "document"}),
    ],
)
def test_a_file_that_does_not_begin_as_a_journal_is_not_ours(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(raw)
    check_refused(ForeignFileError, lambda: read_journal(tmp_path / "j"), path=tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == raw


HEAD: dict[str, Any] = {"format": journal.FORMAT, "identity": IDENTITY, "shards": SHARDS}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "ds4q.journal.v0"},
        {"identity": None},
        {"identity": [1]},
        {"identity": {}},
        {"identity": {"outputs": [["x", "9"]]}},
        {"identity": {"outputs": [["../x", 9]]}},
        {"identity": {"outputs": [["/etc/passwd", 9]]}},
        {"identity": {"outputs": [["..", 9]]}},
        {"identity": {"outputs": [["x", -1]]}},
        {"identity": {"outputs": [["x", 9, 9]]}},
        {"identity": {"outputs": [{"x": 9}]}},
        {"shards": 5},
        {"shards": {"a": [1.5]}},
        {"shards": {"a": "b"}},
        {"replaces": [1]},
        {"replaces": {"x.hfq": [None]}},
    ],
)
def test_a_first_line_that_is_wrong_is_an_error(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(journal._line(HEAD | changes))
    before = path.read_bytes()
    check_refused(
        JournalError, lambda: read_journal(path), path=path, says=["cannot be used", "--force"]
    )
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key in ("output", "tensor", "block", "nbytes")
        for value in ("0", None, 1.0, True, -1, [0])
    ]
    + [("packed", 5), ("sources", "abc"), ("sources", [1]), ("events", []), ("books", 7)]
    + [("events", "deep"), ("more", 1)],
)
def test_a_line_with_a_wrong_type_is_an_error(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "j"
    document = asdict(block(1)) | {key: value}
    path.write_bytes(journal._line(HEAD) + journal._line(asdict(block(0))))
    assert blocks_of(read(path)) == [block(0)]
    with path.open("ab") as file:
        file.write(journal._line(document))
    check_refused(JournalError, lambda: read_journal(path), path=path, says=["a line has"])


def test_a_long_journal_does_not_fill_memory(tmp_path: Path) -> None:
    """A sparse file of 3 GiB that begins as a journal does."""
    path = tmp_path / "j"
    raw = write(path)
    os.truncate(path, 3 << 30)
    tracemalloc.start()
    earlier = read(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (blocks_of(earlier), earlier.valid_bytes) == ([block(0), block(1), block(2)], len(raw))
    assert peak_bytes < 8 << 20


def test_a_line_that_nests_too_deeply_ends_the_belief(tmp_path: Path) -> None:
    path = tmp_path / "j"
    raw = write(path)
    text = b"[" * 100_000
    path.write_bytes(raw + f"{xxhash.xxh3_64_hexdigest(text)} ".encode() + text + b"\n")
    assert blocks_of(read(path)) == [block(0), block(1), block(2)]


def test_nothing_behind_lost_data_is_believed(tmp_path: Path) -> None:
    """A power loss may leave zeros in the middle and a later line behind them."""
    path = tmp_path / "j"
    raw = write(path)
    lines = raw.splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + b"\0" * len(lines[2]) + lines[3])
    earlier = read(path)
    assert blocks_of(earlier) == [block(0)]
    assert earlier.valid_bytes == len(lines[0] + lines[1])


def test_reopening_cuts_off_what_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "j"
    raw = write(path)
    path.write_bytes(raw + b'0123456789abcdef {"torn')
    again = Journal.reopen(path, read(path))
    again.record(block(7))
    again.close()
    assert path.read_bytes().startswith(raw)
    assert blocks_of(read(path)) == [block(0), block(1), block(2), block(7)]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Journal.create(tmp_path / "j", IDENTITY, SHARDS, {})
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:7]))
    made.record(block(1))
    monkeypatch.undo()
    made.close()
    assert blocks_of(read(tmp_path / "j")) == [block(1)]


@pytest.mark.parametrize("key", ["options", "outputs", "k", "new", "gone"])
def test_another_job_is_refused_by_the_first_difference(key: str, tmp_path: Path) -> None:
    path = tmp_path / "x.hfq.journal"
    write(path)
    earlier = read(path)
    journal.check_identity(earlier, dict(IDENTITY), path)
    other = dict(IDENTITY) | {key: "other"}
    if key == "gone":
        del other["gone"]
        earlier.identity["gone"] = 1
    check_refused(
        ResumeError,
        lambda: journal.check_identity(earlier, other, path),
        path=path,
        says=[f"({key})", "belongs to another job", "--force"],
    )


def test_the_journal_lies_beside_the_output() -> None:
    assert journal.journal_path(Path("a/b.hfq")) == Path("a/b.hfq.journal")
