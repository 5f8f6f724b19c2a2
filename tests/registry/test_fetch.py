"""Fetching one file: faults of the server, stops, resume, what is on the disk meanwhile."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ds4q.artifact.files import ForeignFileError
from ds4q.artifact.locks import LockedError
from ds4q.artifact.writer import PartialFile
from ds4q.registry import remote, transfer
from ds4q.registry.errors import (
    DigestError,
    ExistsError,
    RefusedError,
    SizeError,
    SpaceError,
    TransferError,
)
from ds4q.registry.fetch import Wanted, fetch
from tests.checks import check_refused
from tests.registry.server import Fault, Request, Server, serving

BLOCK_BYTES = 256 << 10  # smaller than what users have, so that little has to be fetched
SIZE = 7 * BLOCK_BYTES + 12_345


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    data = np.random.default_rng(6).integers(0, 256, SIZE, dtype=np.uint8)
    (folder / "a.fp4").write_bytes(data.tobytes())
    return folder


@pytest.fixture(scope="module")
def digest(source: Path) -> str:
    return hashlib.sha256((source / "a.fp4").read_bytes()).hexdigest()


@pytest.fixture
def server(source: Path) -> Iterator[Server]:
    with serving(source) as running:
        yield running


SCALED: dict[str, dict[str, float]] = {
    "blocks": {"BLOCK_BYTES": BLOCK_BYTES},
    "fetch": {"BLOCK_BYTES": BLOCK_BYTES, "LEAST_SPAN_BYTES": 2 * BLOCK_BYTES},
    "transfer": {
        "BLOCK_BYTES": BLOCK_BYTES,
        "LEAST_SPAN_BYTES": 2 * BLOCK_BYTES,
        "READ_BYTES": 16 << 10,
        "PROGRESS_BYTES": 4 << 10,
        "PAUSE_S": 0.001,
    },
}


@pytest.fixture(autouse=True)
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, values in SCALED.items():
        for name, value in values.items():
            monkeypatch.setattr(import_module(f"ds4q.registry.{module}"), name, value)


def wanted(server: Server, digest: str | None, **headers: str) -> Wanted:
    return Wanted(server.url("a.fp4"), SIZE, digest, headers)


def same(to: Path, source: Path) -> bool:
    return to.read_bytes() == (source / "a.fp4").read_bytes()


def left(to: Path) -> int:
    """Bytes that the journal of an unfinished download does not hold."""
    lines = to.with_name(to.name + ".partial.blocks").read_bytes().split(b"\n")[1:-1]
    numbers = [int(line.split()[0]) for line in lines]
    return SIZE - sum(size_of(number) for number in numbers)


def size_of(block: int) -> int:
    return min(BLOCK_BYTES, SIZE - block * BLOCK_BYTES)


def test_a_file_is_fetched_whole_by_several_connections(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    heard: list[tuple[int, int]] = []
    to = tmp_path / "a.fp4"
    found = fetch(wanted(server, digest), to, progress=lambda done, of: heard.append((done, of)))
    assert found == digest
    assert same(to, source)
    assert os.listdir(tmp_path) == ["a.fp4"]
    assert server.sent_bytes == SIZE
    assert len(server.requests) > 2
    assert heard[-1] == (SIZE, SIZE)
    assert heard == sorted(heard)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(stop_after=100_000),
        Fault(stop_after=100_000, reset=True),
        Fault(stop_after=0),
        Fault(status=500),
        Fault(status=503, headers=(("Retry-After", "0"),)),
        Fault(status=429),
        Fault(status=416),
        Fault(status=416, headers=(("Content-Range", f"bytes */{SIZE}"),)),
        Fault(add_total=-1),
        Fault(add_total=4096),
        Fault(shift=1),
        Fault(whole=True),
        Fault(headers=(("Content-Encoding", "gzip"),)),
        Fault(status=206, body=b"no content range"),
        Fault(status=302),
        Fault(etag='"another"'),
    ],
    ids=lambda fault: str({k: v for k, v in vars(fault).items() if getattr(Fault(), k) != v}),
)
def test_a_fault_that_passes_costs_little(
    fault: Fault, server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    good = Fault()
    server.script(good, fault, good, fault)
    to = tmp_path / "a.fp4"
    assert fetch(wanted(server, digest), to, tell=lines.append) == digest
    assert same(to, source)
    assert os.listdir(tmp_path) == ["a.fp4"]
    assert len(lines) == 2
    assert all(line.isprintable() and server.url("a.fp4") in line for line in lines)


@pytest.mark.parametrize("stop_after", [0, 1, 7_000, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_what_came_before_a_drop_is_not_fetched_again(
    stop_after: int, server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    server.script(*[Fault(stop_after=stop_after)] * 3)
    to = tmp_path / "a.fp4"
    assert fetch(wanted(server, digest), to, ranges=1) == digest
    assert same(to, source)
    assert server.sent_bytes == SIZE


def test_a_server_may_offer_less_than_it_is_asked_for(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    server.fault = lambda request: Fault(limit=100_001)
    lines: list[str] = []
    to = tmp_path / "a.fp4"
    assert fetch(wanted(server, digest), to, tell=lines.append) == digest
    assert same(to, source)
    assert server.sent_bytes == SIZE
    assert lines == []


def test_header_lines_that_are_none_are_passed_over(
    server: Server, digest: str, tmp_path: Path
) -> None:
    lines = (
        b'RateLimit: "api";r=499;t=118',
        b'RateLimit-Policy: "fixed window";"api";q=500;w=300',
        b"Rate Limit : 12",
        b"no field at all",
        b": empty name",
        b"X-Bytes: \xff\xfe",
    )
    server.fault = lambda request: Fault(lines=lines)
    assert fetch(wanted(server, digest), tmp_path / "a.fp4") == digest
    assert server.sent_bytes == SIZE


def test_a_server_without_ranges_is_read_from_the_start(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    whole = Fault(whole=True)
    given = iter([Fault(whole=True, stop_after=600_000)])
    server.fault = lambda request: next(given, whole)
    to = tmp_path / "a.fp4"
    assert fetch(wanted(server, digest), to) == digest
    assert same(to, source)
    assert len(server.requests) == 2


def test_a_server_without_ranges_that_always_drops_is_given_up(
    server: Server, digest: str, tmp_path: Path
) -> None:
    server.fault = lambda request: Fault(whole=True, stop_after=100_000)
    with pytest.raises(TransferError, match=r"ended early.*; pull again$"):  # from its first byte
        fetch(wanted(server, digest), tmp_path / "a.fp4")
    assert len(server.requests) <= transfer.TRIES + 1


def test_an_outage_is_waited_for_and_then_given_up(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    to = tmp_path / "a.fp4"
    server.fault = lambda request: Fault(status=503) if request.number > 2 else Fault()
    error = check_refused(TransferError, lambda: fetch(wanted(server, digest), to))
    assert "HTTP 503" in str(error)
    assert "goes on where it stopped" in str(error)
    assert sorted(os.listdir(tmp_path)) == ["a.fp4.partial", "a.fp4.partial.blocks"]
    server.fault = lambda request: Fault()
    server.settle()
    rest = left(to)
    assert rest < SIZE
    assert fetch(wanted(server, digest), to) == digest
    assert same(to, source)
    assert server.sent_bytes == rest


def test_a_wrong_address_is_told_soon(tmp_path: Path) -> None:
    with serving(tmp_path) as gone:
        url = gone.url("a.fp4")
        missing = Wanted(url, SIZE, None)
        error = check_refused(RefusedError, lambda: fetch(missing, tmp_path / "a.fp4"), path=url)
        assert "HTTP 404" in str(error)
        assert len(gone.requests) == 1
    lines: list[str] = []
    with pytest.raises(TransferError, match=r"refused; pull again$"):  # nothing had come
        fetch(Wanted(url, SIZE, None), tmp_path / "a.fp4", tell=lines.append)
    assert len(lines) == transfer.FIRST_TRIES - 1
    assert os.listdir(tmp_path) == []


# --- stops ------------------------------------------------------------------------------------

CHILD = f"""
import importlib, sys, time
from pathlib import Path
from ds4q.registry.fetch import Wanted, fetch
for module, values in {SCALED}.items():
    vars(importlib.import_module(f"ds4q.registry.{{module}}")).update(values)
url, size, digest, to = sys.argv[1:]

def wait_to_be_killed(done, total):
    if done >= 3 * {BLOCK_BYTES}:
        print("begun", flush=True)
        time.sleep(600)

fetch(Wanted(url, int(size), digest), Path(to), progress=wait_to_be_killed)
"""


def test_a_killed_download_goes_on(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    to = tmp_path / "a.fp4"
    server.rate_bytes_per_s = 2e6
    command = [sys.executable, "-c", CHILD, server.url("a.fp4"), str(SIZE), digest, str(to)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert not to.exists()
    server.settle()
    server.rate_bytes_per_s = 0.0
    rest = left(to)
    assert rest < SIZE
    lines: list[str] = []
    assert fetch(wanted(server, digest), to, tell=lines.append) == digest
    assert same(to, source)
    assert server.sent_bytes == rest
    assert lines == ["a.fp4: goes on with what an earlier run fetched"]
    assert all("if-range" in request.headers for request in server.requests)


def stopped(server: Server, digest: str | None, to: Path, blocks: int = 4) -> None:
    """A download that Ctrl-C ends after some blocks."""

    def stop(done: int, total: int) -> None:
        if done >= blocks * BLOCK_BYTES:
            raise KeyboardInterrupt

    server.rate_bytes_per_s = 4e6
    with pytest.raises(KeyboardInterrupt):
        fetch(wanted(server, digest), to, progress=stop)
    server.rate_bytes_per_s = 0.0
    server.settle()


def test_a_stop_leaves_the_partial_file_and_no_thread(
    server: Server, digest: str, tmp_path: Path
) -> None:
    to = tmp_path / "a.fp4"
    stopped(server, digest, to)
    assert left(to) < SIZE
    assert not to.exists()
    assert [t.name for t in threading.enumerate() if t.name == "ds4q-fetch"] == []


def test_a_stop_does_not_wait_for_a_silent_server(
    server: Server, digest: str, tmp_path: Path
) -> None:
    server.fault = lambda request: Fault(stop_after=10_000, stall=True)

    def stop(done: int, total: int) -> None:
        if len(server.requests) > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(wanted(server, digest), tmp_path / "a.fp4", progress=stop)
    assert [t.name for t in threading.enumerate() if t.name == "ds4q-fetch"] == []


def test_a_torn_journal_costs_its_torn_lines(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    to = tmp_path / "a.fp4"
    stopped(server, digest, to)
    journal = tmp_path / "a.fp4.partial.blocks"
    raw = journal.read_bytes()
    journal.write_bytes(raw[:-7])
    rest = left(to)
    assert fetch(wanted(server, digest), to) == digest
    assert same(to, source)
    assert server.sent_bytes == rest


def test_a_block_that_the_disk_lost_is_fetched_again(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    to = tmp_path / "a.fp4"
    stopped(server, digest, to)
    journal = (tmp_path / "a.fp4.partial.blocks").read_text().splitlines()
    number = int(journal[1].split()[0])
    with (tmp_path / "a.fp4.partial").open("r+b") as file:
        file.seek(number * BLOCK_BYTES + 17)
        file.write(bytes(4096))
    rest = left(to)
    assert fetch(wanted(server, digest), to) == digest
    assert same(to, source)
    assert server.sent_bytes == rest + size_of(number)


def test_a_partial_file_that_was_cut_is_completed(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    to = tmp_path / "a.fp4"
    stopped(server, digest, to)
    os.truncate(tmp_path / "a.fp4.partial", 0)
    assert fetch(wanted(server, digest), to) == digest
    assert same(to, source)
    assert server.sent_bytes == SIZE


def test_another_version_of_the_file_starts_over(source: Path, digest: str, tmp_path: Path) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.fp4").write_bytes((source / "a.fp4").read_bytes())
    to = tmp_path / "a.fp4"
    with serving(folder) as server:
        stopped(server, None, to)
        newer = (folder / "a.fp4").read_bytes()[::-1]
        (folder / "a.fp4").write_bytes(newer)
        found = fetch(wanted(server, None), to)
        assert found == hashlib.sha256(newer).hexdigest()
        assert to.read_bytes() == newer
        assert any(request.range for request in server.requests[2:])  # in ranges again


def test_a_file_that_changes_meanwhile_is_never_mixed(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.fp4").write_bytes((source / "a.fp4").read_bytes())

    def change(request: Request) -> Fault:
        if request.number == 3:
            (folder / "a.fp4").write_bytes(bytes(SIZE))
        return Fault()

    with serving(folder) as server:
        server.fault = change
        with pytest.raises(TransferError, match="has changed"):
            fetch(wanted(server, None), tmp_path / "a.fp4")
    assert not (tmp_path / "a.fp4").exists()


def test_the_same_content_from_elsewhere_goes_on(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    to = tmp_path / "a.fp4"
    stopped(server, digest, to)
    rest = left(to)
    heard: list[int] = []
    mirror = Wanted((source / "a.fp4").as_uri(), SIZE, digest)
    assert fetch(mirror, to, progress=lambda at, total: heard.append(at)) == digest
    assert same(to, source)
    assert heard[0] >= SIZE - rest


# --- size and digest --------------------------------------------------------------------------


def test_a_size_that_differs_is_told_before_anything_is_fetched(
    server: Server, digest: str, tmp_path: Path
) -> None:
    stale = Wanted(server.url("a.fp4"), SIZE + 1, digest)
    error = check_refused(SizeError, lambda: fetch(stale, tmp_path / "a.fp4"))
    assert (error.expected, error.found) == (SIZE + 1, SIZE)
    assert os.listdir(tmp_path) == []


def test_a_range_under_the_status_of_a_whole_file_is_believed_as_stated(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    server.fault = lambda request: Fault(range_status=200)
    to = tmp_path / "a.fp4"
    assert fetch(wanted(server, digest), to) == digest
    assert same(to, source)
    assert server.sent_bytes == SIZE


def test_a_server_that_contradicts_itself_is_the_one_that_is_named(
    server: Server, digest: str, tmp_path: Path
) -> None:
    server.fault = lambda request: Fault(range_status=200, shift=5)
    error = check_refused(TransferError, lambda: fetch(wanted(server, digest), tmp_path / "a.fp4"))
    assert error.path == server.url("a.fp4")
    assert "the server was asked for bytes from 0 on, and answers HTTP 200" in str(error)
    assert "entry" not in str(error)


def test_a_web_page_is_called_one(server: Server, digest: str, tmp_path: Path) -> None:
    page = b"<!DOCTYPE html>" + b" " * (SIZE - 15)
    server.pages["/a.fp4"] = lambda request: (200, {"Content-Type": "text/html"}, page)
    short = Wanted(server.url("a.fp4"), SIZE + 1, digest)
    error = check_refused(SizeError, lambda: fetch(short, tmp_path / "a.fp4"))
    assert "the server sends a web page" in str(error)
    wrong = check_refused(DigestError, lambda: fetch(wanted(server, digest), tmp_path / "a.fp4"))
    assert f"the server {server.url('a.fp4')} sends a web page" in str(wrong)
    assert "entry" not in str(wrong)


def test_one_odd_length_is_asked_again(server: Server, digest: str, tmp_path: Path) -> None:
    server.script(Fault(add_total=1))
    assert fetch(wanted(server, digest), tmp_path / "a.fp4") == digest


def test_a_digest_that_differs_keeps_what_came(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    to = tmp_path / "a.fp4"
    stale = Wanted(server.url("a.fp4"), SIZE, "0" * 64)
    error = check_refused(DigestError, lambda: fetch(stale, to), path=to)
    assert (error.expected, error.found) == ("0" * 64, digest)
    assert "a.fp4.partial is kept" in str(error)
    assert not to.exists()
    asked = len(server.requests)
    check_refused(DigestError, lambda: fetch(stale, to), path=to)
    assert len(server.requests) == asked  # all bytes are there: hashed again, not fetched
    assert fetch(wanted(server, digest), to) == digest  # the entry was corrected
    assert len(server.requests) == asked
    assert same(to, source)


def test_replace_fetches_a_whole_wrong_partial_file_anew(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    to = tmp_path / "a.fp4"
    server.script(Fault(flip_at=100))
    check_refused(DigestError, lambda: fetch(wanted(server, digest), to))
    server.sent_bytes = 0
    assert fetch(wanted(server, digest), to, replace=True) == digest
    assert server.sent_bytes == SIZE
    assert same(to, source)


def test_bytes_that_are_known_to_be_wrong_are_fetched_again(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    to = tmp_path / "a.fp4"
    server.script(Fault(), Fault(flip_at=100))

    def damaged(partial: Path) -> list[tuple[int, int]]:
        have = np.frombuffer(partial.read_bytes(), dtype=np.uint8)
        good = np.frombuffer((source / "a.fp4").read_bytes(), dtype=np.uint8)
        return [(int(at), 1) for at in np.flatnonzero(have != good)]

    assert fetch(wanted(server, digest), to, damaged=damaged) == digest
    assert same(to, source)
    assert server.sent_bytes == SIZE + BLOCK_BYTES


def test_each_round_of_a_repair_fetches_what_it_was_told(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    to = tmp_path / "a.fp4"
    server.script(Fault(flip_at=100), Fault(flip_at=100))
    check_refused(DigestError, lambda: fetch(wanted(server, digest), to, ranges=1))
    server.settle()
    told = iter([[(0, BLOCK_BYTES)], [(2 * BLOCK_BYTES, BLOCK_BYTES)]])
    assert fetch(wanted(server, digest), to, damaged=lambda partial: next(told)) == digest
    assert same(to, source)
    assert server.sent_bytes == 2 * BLOCK_BYTES


def test_a_repair_that_does_not_help_ends(server: Server, tmp_path: Path) -> None:
    stale = Wanted(server.url("a.fp4"), SIZE, "0" * 64)
    with pytest.raises(DigestError):
        fetch(stale, tmp_path / "a.fp4", damaged=lambda partial: [(0, 10)])
    assert server.sent_bytes == SIZE + 3 * BLOCK_BYTES


def test_upper_case_digests_mean_the_same(server: Server, digest: str, tmp_path: Path) -> None:
    assert fetch(wanted(server, digest.upper()), tmp_path / "a.fp4") == digest


# --- the disk ---------------------------------------------------------------------------------


def test_what_stands_there_is_never_overwritten_unasked(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    to = tmp_path / "a.fp4"
    to.write_bytes(b"mine")
    check_refused(ExistsError, lambda: fetch(wanted(server, digest), to), path=to)
    assert to.read_bytes() == b"mine"
    assert server.requests == []
    assert fetch(wanted(server, digest), to, replace=True) == digest
    assert same(to, source)


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_meanwhile_is_kept(
    links: bool, server: Server, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "a.fp4"
    if not links:

        def no_link(source: Path, to: Path, **how: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(to))

        monkeypatch.setattr(os, "link", no_link)

    def appear(done: int, total: int) -> None:
        to.write_bytes(b"mine")

    check_refused(ExistsError, lambda: fetch(wanted(server, digest), to, progress=appear), path=to)
    assert to.read_bytes() == b"mine"
    to.unlink()
    server.requests.clear()
    assert fetch(wanted(server, digest), to) == digest  # nothing was lost
    assert server.requests == []
    assert os.listdir(tmp_path) == ["a.fp4"]


def test_two_downloads_of_one_file_do_not_meet(
    server: Server, digest: str, source: Path, tmp_path: Path
) -> None:
    to = tmp_path / "a.fp4"
    refused: list[LockedError] = []

    def again(done: int, total: int) -> None:
        if not refused:
            refused.append(check_refused(LockedError, lambda: fetch(wanted(server, digest), to)))

    assert fetch(wanted(server, digest), to, progress=again) == digest
    assert "another ds4q process" in str(refused[0])
    assert same(to, source)


@pytest.mark.parametrize("journal", [None, b"", b"{}\n", b'{"format": "ds4q.blocks.v1"}\n'])
def test_somebody_elses_partial_file_is_kept(
    journal: bytes | None, server: Server, digest: str, tmp_path: Path
) -> None:
    partial = tmp_path / "a.fp4.partial"
    partial.write_bytes(b"half a quantize job")
    if journal is not None:
        (tmp_path / "a.fp4.partial.blocks").write_bytes(journal)
    check_refused(
        ForeignFileError,
        lambda: fetch(wanted(server, digest), tmp_path / "a.fp4"),
        says=["a.fp4.partial", "did not write", "move it away"],
    )
    assert partial.read_bytes() == b"half a quantize job"
    assert server.requests == []


def test_nothing_is_written_through_a_link(server: Server, digest: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / "a.fp4.partial").symlink_to(tmp_path / "elsewhere")
    check_refused(
        ForeignFileError,
        lambda: fetch(wanted(server, digest), tmp_path / "a.fp4"),
        path=tmp_path / "a.fp4.partial",
        says=["a symbolic link", "move it away"],
    )
    assert (tmp_path / "elsewhere").read_bytes() == b""
    assert server.requests == []


def test_room_is_checked_before_anything_is_fetched(
    server: Server, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SimpleNamespace(f_blocks=1, f_bavail=SIZE // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    error = check_refused(
        SpaceError, lambda: fetch(wanted(server, digest), tmp_path / "a.fp4"), path=tmp_path
    )
    assert error.expected == f"{SIZE:,} bytes"
    assert os.listdir(tmp_path) == []
    room.f_bavail += 1
    assert fetch(wanted(server, digest), tmp_path / "a.fp4") == digest


def test_a_full_disk_keeps_what_is_there(
    server: Server, digest: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "a.fp4"
    with monkeypatch.context() as patch:
        written = 0
        pwrite = PartialFile.pwrite

        def full(self: PartialFile, data: bytes, offset: int) -> None:
            nonlocal written
            written += len(data)
            if written > 5 * BLOCK_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            pwrite(self, data, offset)

        patch.setattr(PartialFile, "pwrite", full)
        check_refused(
            SpaceError,
            lambda: fetch(wanted(server, digest), to),
            path=tmp_path / "a.fp4.partial",
            says=["No space left", "what came is kept"],
        )
    assert not to.exists()
    server.settle()
    rest = left(to)
    assert fetch(wanted(server, digest), to) == digest
    assert same(to, source)
    assert server.sent_bytes == rest


def test_a_flush_that_fails_is_an_error(
    server: Server, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(transfer, "FLUSH_BYTES", 1)
    server.rate_bytes_per_s = 4e6  # or all might be there before the first flush
    monkeypatch.setattr(os, "fdatasync", lost)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        fetch(wanted(server, digest), tmp_path / "a.fp4")
    assert caught.value.filename == str(tmp_path / "a.fp4.partial")
    assert not (tmp_path / "a.fp4").exists()


def test_a_folder_that_is_not_there(server: Server, digest: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fetch(wanted(server, digest), tmp_path / "absent" / "a.fp4")
    assert server.requests == []


# --- slow servers -----------------------------------------------------------------------------


def test_silence_ends_a_connection(
    server: Server, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.2)
    server.script(Fault(stop_after=10_000, stall=True))
    lines: list[str] = []
    assert fetch(wanted(server, digest), tmp_path / "a.fp4", tell=lines.append) == digest
    assert any("no answer for 0.2 s" in line for line in lines)


def test_a_silent_lane_does_not_keep_idle_ones_waiting(
    server: Server, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "TIMEOUT_S", 600.0)
    monkeypatch.setattr(transfer, "HURRY_S", 0.05)
    server.script(Fault(), Fault(stop_after=10_000, stall=True))
    assert fetch(wanted(server, digest), tmp_path / "a.fp4") == digest


def test_a_trickle_ends_a_connection(
    server: Server, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SLOW_AFTER_S", 0.1)
    monkeypatch.setattr(transfer, "HURRY_S", 0.1)
    server.script(Fault(trickle_s=0.02))
    lines: list[str] = []
    assert fetch(wanted(server, digest), tmp_path / "a.fp4", tell=lines.append) == digest
    assert any("slow: " in line for line in lines)
