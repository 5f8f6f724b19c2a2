"""Reading experts: every byte in its place, however the kernel serves it, or one clear error."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from ds4q.artifact.errors import ChangedError, PayloadValueError, TruncatedError
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.runtime.digests import Digests
from ds4q.runtime.errors import CacheError, DigestError, ExpertReadError
from ds4q.runtime.experts.catalogue import Key, Record
from ds4q.runtime.experts.reading import ExpertReader
from ds4q.runtime.experts.runs import PAGE, runs, staging_bytes
from ds4q.runtime.experts.transform import Parts
from tests.artifact.build import File, Tensor
from tests.checks import check_refused

U8 = npt.NDArray[np.uint8]
ORDERS = {
    "one run": ("w2", "w1", "w3"),
    "a stranger behind the first": ("w1", "-", "w3", "w2"),
    "strangers between all": ("w3", "-", "w1", "-", "w2"),
}
ROWS = {"w1": 1501, "w3": 2003, "w2": 3011, "-": 7}  # nothing begins or ends at a page
Read = Callable[[ExpertReader, Record], Parts]
PREADV = os.preadv


def back_to_back(record: Record) -> bool:
    """Whether an expert's matrices are one run of the file, in any order."""
    ordered = sorted(record.entries, key=lambda entry: entry.offset)
    return all(a.offset + a.nbytes == b.offset for a, b in pairwise(ordered))


@pytest.fixture(params=list(ORDERS))
def artifact(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Three experts of three odd tensors, and others in between; the last ends the file."""
    rng = np.random.default_rng(5)
    tensors = [
        Tensor(f"{expert}.{role}.{n}", 1, (ROWS[role],), 0, rng.bytes(2 * ROWS[role]))
        for expert in range(3)
        for n, role in enumerate(ORDERS[request.param])
    ]
    return File(tensors).write(tmp_path)


def records(reader: Reader) -> list[Record]:
    """The experts of ``artifact``."""
    by_role = {
        tuple(name.split(".")[:2]): entry
        for name, entry in reader.tensors.items()
        if "-" not in name
    }
    return [
        Record(Key(0, e), *(by_role[str(e), role] for role in ("w1", "w3", "w2"))) for e in range(3)
    ]


def read_parts(reader: ExpertReader, record: Record) -> Parts:
    gate, up, down = (np.full(entry.nbytes, 255, np.uint8) for entry in record.entries)
    reader.read(record, gate, up, down)
    return gate, up, down


def stage_parts(reader: ExpertReader, record: Record) -> Parts:
    """In a buffer that begins anywhere, and beyond which nothing is written."""
    around = np.full(reader.staging_bytes + 200, 77, np.uint8)
    parts = reader.stage(record, around[100:-100])
    assert (around[:100] == 77).all()
    assert (around[-100:] == 77).all()
    assert all(np.shares_memory(part, around) for part in parts)
    return parts


READS = pytest.mark.parametrize("read", [read_parts, stage_parts], ids=["read", "stage"])
CACHED = pytest.mark.parametrize("cached", [True, False], ids=["cached", "cold"])
HELPED = pytest.mark.parametrize("helpers", [0, 2], ids=["alone", "helped"])


def says(monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """The page cache holds all or nothing, whatever it really holds."""
    monkeypatch.setattr(ExpertReader, "_cached", lambda self, record: cached)


def check_bytes(parts: Parts, record: Record, reader: Reader) -> None:
    for part, entry in zip(parts, record.entries, strict=True):
        assert part.tobytes() == reader.read(entry.name).tobytes(), entry.name


def serves_direct_reads(path: Path) -> bool:
    """Of a page, into a page; a file system in memory may refuse."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.preadv(fd, [mmap.mmap(-1, PAGE)], 0) > 0
    except OSError:
        return False
    finally:
        os.close(fd)


@READS
@CACHED
@HELPED
def test_every_byte_is_in_its_place(
    artifact: Path, read: Read, cached: bool, helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, cached)
    with Reader(artifact) as reader:
        found = records(reader)
        experts = ExpertReader(reader, found, bounces=1, helpers=helpers)
        for record in reversed(found):
            check_bytes(read_parts(experts, record), record, reader)
        counts = experts.counters()
        experts.close()
    n = sum(len(list(runs(record))) for record in found)
    assert counts["bytes_read"] == sum(record.nbytes for record in found)
    served = serves_direct_reads(artifact)
    assert counts["reads"] == n
    assert counts["reads_buffered" if cached or not served else "reads_direct"] == n
    assert served <= (counts["direct_refused"] == 0)


def test_an_expert_in_one_piece_is_one_read(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []

    def counted(fd: int, buffers: Sequence[Any], offset: int, *flags: int) -> int:
        calls.append((offset, sum(map(len, buffers))))
        return PREADV(fd, buffers, offset, *flags)

    with Reader(artifact) as reader:
        record = records(reader)[1]
        experts = ExpertReader(reader, [record], bounces=1)
        for cached in (True, False):
            says(monkeypatch, cached)
            calls.clear()
            monkeypatch.setattr(os, "preadv", counted)
            read_parts(experts, record)
            monkeypatch.setattr(os, "preadv", PREADV)
            whole = list(runs(record))
            assert (len(whole) == 1) == back_to_back(record)
            wanted = [(r.offset, r.nbytes) if cached else r.aligned for r in whole]
            assert calls == wanted
        experts.close()


def test_a_buffer_for_staging_is_long_enough(artifact: Path) -> None:
    with Reader(artifact) as reader:
        for record in records(reader):
            pages = sum(run.aligned[1] for run in runs(record))
            assert pages + PAGE - 1 <= staging_bytes(record) <= record.nbytes + 2**15


@READS
@CACHED
@HELPED
def test_short_reads_go_on(
    artifact: Path, read: Read, cached: bool, helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may return fewer bytes than it was asked for, and is asked for the rest."""
    says(monkeypatch, cached)
    lengths = random.Random(3)

    def short(fd: int, buffers: Sequence[Any], offset: int) -> int:
        n = min(lengths.randrange(1, 3000), sum(map(len, buffers)))
        data = os.pread(path_fd, n, offset)
        for buffer in buffers:
            part, data = data[: len(buffer)], data[len(buffer) :]
            buffer[: len(part)] = part
        return n

    path_fd = os.open(artifact, os.O_RDONLY)
    with Reader(artifact) as reader:
        found = records(reader)
        experts = ExpertReader(reader, found, bounces=1, helpers=helpers)
        for record in found[:2]:
            monkeypatch.setattr(os, "preadv", short)
            parts = read(experts, record)
            monkeypatch.setattr(os, "preadv", PREADV)
            check_bytes(parts, record, reader)
        experts.close()
    os.close(path_fd)


@READS
@CACHED
@HELPED
def test_a_file_that_is_cut_while_open(
    artifact: Path, read: Read, cached: bool, helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, cached)
    with Reader(artifact) as reader:
        found = records(reader)
        experts = ExpertReader(reader, found, bounces=1, helpers=helpers)
        last = max(found[2].entries, key=lambda entry: entry.offset)
        os.truncate(artifact, last.offset + 1000)
        check_refused(ChangedError, lambda: read(experts, found[1]), path=artifact)
        check_refused(
            TruncatedError,
            lambda: read(experts, found[2]),
            path=artifact,
            tensor=last.name,
            says=["1000 bytes" if len(list(runs(found[2]))) == 3 else "bytes at offset"],
        )
        os.truncate(artifact, 100)
        check_refused(TruncatedError, lambda: read(experts, found[0]), path=artifact)
        experts.close()


@READS
@CACHED
@HELPED
def test_a_disk_that_fails(
    artifact: Path, read: Read, cached: bool, helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One clear error; the reader reads on where the disk does, with no buffer lost."""
    says(monkeypatch, cached)

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with Reader(artifact) as reader:
        found = records(reader)
        experts = ExpertReader(reader, found, bounces=1, helpers=helpers)
        monkeypatch.setattr(os, "preadv", fails)
        alone = not (cached and helpers)
        first = next(runs(found[0])).entries[0] if alone else found[0].gate
        for _ in range(3):
            check_refused(
                ExpertReadError,
                lambda: read(experts, found[0]),
                path=artifact,
                tensor=first.name,
                says=["Input/output error"],
            )
        monkeypatch.setattr(os, "preadv", PREADV)
        check_bytes(read(experts, found[0]), found[0], reader)
        experts.close()


@READS
@pytest.mark.parametrize("at_open", [True, False], ids=["at open", "at a read"])
def test_a_file_system_without_direct_reads(
    artifact: Path, read: Read, at_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, said once, and read through the page cache; another error at open is an error."""
    says(monkeypatch, cached=False)
    opened, real = set(), os.open

    def refusing(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT and at_open:
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real(path, flags & ~os.O_DIRECT, *rest)
        if flags & os.O_DIRECT:
            opened.add(fd)
        return fd

    def preadv(fd: int, *rest: Any) -> int:
        if fd in opened:
            raise OSError(errno.EINVAL, "Invalid argument")
        return PREADV(fd, *rest)

    with Reader(artifact) as reader:
        found = records(reader)
        monkeypatch.setattr(os, "open", refusing)
        experts = ExpertReader(reader, found, bounces=1)
        monkeypatch.setattr(os, "preadv", preadv)
        parts = [read(experts, record) for record in found]
        monkeypatch.undo()
        for part, record in zip(parts, found, strict=True):
            check_bytes(part, record, reader)
        counts = experts.counters()
        assert counts["reads_direct"] == 0
        assert counts["reads_buffered"] == counts["reads"] > 0
        assert counts["direct_refused"] >= 1
        assert len(experts.notes) == 1
        assert "O_DIRECT" in experts.notes[0]
        experts.close()


def test_what_is_cached_is_found_out(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages asked for are there: buffered. One is not: direct. Nobody can tell: buffered."""
    asked: list[int] = []
    missing: set[int] = set()
    trouble: list[OSError] = []

    def preadv(fd: int, buffers: Sequence[Any], offset: int, *flags: int) -> int:
        if not flags:
            return PREADV(fd, buffers, offset)
        assert flags == (os.RWF_NOWAIT,)
        assert sum(map(len, buffers)) == 1
        asked.append(offset)
        if trouble:
            raise trouble[0]
        if len(asked) in missing:
            raise BlockingIOError(errno.EAGAIN, "not cached")
        return 1

    monkeypatch.setattr(os, "preadv", preadv)
    with Reader(artifact) as reader:
        record = records(reader)[1]
        low = min(entry.offset for entry in record.entries)
        high = max(entry.offset + entry.nbytes for entry in record.entries)
        experts = ExpertReader(reader, [record], bounces=1)
        n = len(list(runs(record)))

        def kind() -> str:
            before = experts.counters()
            check_bytes(read_parts(experts, record), record, reader)
            after = experts.counters()
            direct = after["reads_direct"] - before["reads_direct"]
            buffered = after["reads_buffered"] - before["reads_buffered"]
            assert sorted((direct, buffered)) == [0, n]
            return "direct" if direct else "buffered"

        assert kind() == "buffered"
        assert len(set(asked)) > 12
        assert all(low <= offset < high for offset in asked)
        if serves_direct_reads(artifact):
            first = list(asked)
            asked.clear()
            missing.add(9)
            assert kind() == "direct"
            assert len(asked) == 9  # the first that is missing decides
            assert not set(asked) & set(first)  # asking brings pages in: ask for others
            trouble.append(OSError(errno.EOPNOTSUPP, "not supported"))
            assert kind() == "buffered"
            trouble[0] = OSError(errno.EIO, "Input/output error")
            check_refused(ExpertReadError, kind, path=artifact)
        experts.close()


@READS
@CACHED
@HELPED
def test_altered_bytes_are_refused(
    artifact: Path, read: Read, cached: bool, helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, cached)
    with Reader(artifact) as reader:
        found = records(reader)
        told = {name: xxhash.xxh3_128(reader.read(name).data).digest() for name in reader.tensors}
        experts = ExpertReader(
            reader, found, digests=Digests(lambda: told, artifact, []), bounces=1, helpers=helpers
        )
        check_bytes(read(experts, found[0]), found[0], reader)
        once = experts.counters()
        assert once["reads_checked"] == once["reads"] == len(list(runs(found[0])))
        for entry in found[1].entries:
            right = told[entry.name]
            told[entry.name] = bytes(16)
            check_refused(
                DigestError,
                lambda: read(experts, found[1]),
                path=artifact,
                tensor=entry.name,
                says=["ds4q verify"],
            )
            told[entry.name] = right
        check_bytes(read(experts, found[1]), found[1], reader)
        assert experts.counters()["reads_checked"] == 2 * once["reads"]
        experts.close()


@READS
@HELPED
def test_without_a_receipt_bytes_must_be_legal_and_are_looked_at_once(
    artifact: Path, read: Read, helpers: int
) -> None:
    looked: list[str] = []
    wrong: set[str] = set()

    def legal(entry: TensorEntry, data: U8) -> None:
        looked.append(entry.name)
        if entry.name in wrong:
            raise PayloadValueError("not legal", tensor=entry.name)

    with Reader(artifact) as reader:
        found = records(reader)
        experts = ExpertReader(reader, found, legal=legal, bounces=1, helpers=helpers)
        for _ in range(2):
            check_bytes(read(experts, found[0]), found[0], reader)
        assert sorted(looked) == sorted(entry.name for entry in found[0].entries)
        wrong.add(found[1].up.name)
        for _ in range(2):  # what is not legal is not taken the second time either
            check_refused(
                PayloadValueError, lambda: read(experts, found[1]), tensor=found[1].up.name
            )
        assert experts.counters()["reads_checked"] == 0
        experts.close()


def test_another_file_in_its_place_is_not_read(artifact: Path) -> None:
    """The open file still has its bytes, even before the experts' own handles are opened."""
    with Reader(artifact) as reader:
        found = records(reader)
        artifact.unlink()
        artifact.write_bytes(b"another")
        experts = ExpertReader(reader, found, bounces=1)
        for record in found:
            check_bytes(read_parts(experts, record), record, reader)
        (note,) = [note for note in experts.notes if "O_DIRECT" not in note]
        assert note.startswith(f"{artifact}: the path now leads to another file")
        experts.close()


@pytest.mark.parametrize("helpers", [0, 2])
def test_a_write_to_the_file_is_an_error(artifact: Path, helpers: int) -> None:
    """Also where no digest vouches for the bytes, and where only bytes of others were written."""
    os.utime(artifact, ns=(1, 1))
    with Reader(artifact) as reader:
        found = records(reader)
        experts = ExpertReader(reader, found, bounces=1, helpers=helpers)
        check_bytes(read_parts(experts, found[0]), found[0], reader)
        with open(artifact, "r+b") as file:
            file.seek(found[-1].down.offset)
            file.write(b"\0")
        for record in found[:2]:
            check_refused(
                ChangedError,
                lambda record=record: read_parts(experts, record),  # type: ignore[misc]
                path=artifact,
                says=["written to while it was in use"],
            )
        experts.close()


def test_one_run_in_any_order(artifact: Path) -> None:
    with Reader(artifact) as reader:
        for record in records(reader):
            found = list(runs(record))
            assert (len(found) == 1) == back_to_back(record)
            assert sum(run.nbytes for run in found) == record.nbytes
            for run in found:
                start, nbytes = run.aligned
                assert start % PAGE == nbytes % PAGE == 0
                assert start <= run.offset < start + PAGE
                assert 0 <= start + nbytes - (run.offset + run.nbytes) < PAGE


def test_matrices_are_read_and_compared_side_by_side(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three are under way at once, and nothing is over before all of them are."""
    says(monkeypatch, cached=True)
    under_way = threading.Barrier(3)
    over: list[int] = []

    def begin(number: int, part: U8) -> None:
        under_way.wait(300)
        if number == 0:
            raise RuntimeError("cannot begin")
        time.sleep(0.02)
        over.append(number)

    with Reader(artifact) as reader:
        found = records(reader)
        experts = ExpertReader(reader, found, helpers=2)
        staging = np.empty(experts.staging_bytes, np.uint8)
        with pytest.raises(RuntimeError, match="cannot begin"):
            experts.stage(found[0], staging, begin)
        assert sorted(over) == [1, 2]
        experts.close()


@pytest.mark.parametrize("reads", [0, -1])
def test_a_reader_that_may_not_read_is_refused(artifact: Path, reads: int) -> None:
    with Reader(artifact) as reader:
        found = records(reader)
        check_refused(
            CacheError,
            lambda: ExpertReader(reader, found, reads=reads),
            path=artifact,
            says=["reads at a time: expected 1 or more", str(reads)],
        )


@CACHED
def test_reading_without_a_buffer_is_refused_whatever_the_page_cache_holds(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    says(monkeypatch, cached=cached)
    with Reader(artifact) as reader:
        found = records(reader)
        experts = ExpertReader(reader, found)
        check_refused(
            CacheError,
            lambda: read_parts(experts, found[0]),
            path=artifact,
            says=["no buffers", "bounces"],
        )
        stage_parts(experts, found[0])  # which brings its own
        experts.close()


@READS
@CACHED
def test_no_more_reads_at_a_time_than_the_disk_likes(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, read: Read, cached: bool
) -> None:
    says(monkeypatch, cached)
    lock = threading.Lock()
    running: list[int] = []
    most: list[int] = []

    def counted(*arguments: Any) -> int:
        with lock:
            running.append(0)
            most.append(len(running))
        time.sleep(0.002)
        n = PREADV(*arguments)
        with lock:
            running.pop()
        return n

    monkeypatch.setattr(os, "preadv", counted)
    with Reader(artifact) as open_file:
        experts = records(open_file)
        reader = ExpertReader(open_file, experts, reads=2, bounces=6)
        with ThreadPoolExecutor(6) as pool:
            parts = list(pool.map(lambda n: read(reader, experts[n % 3]), range(18)))
        for n, found in enumerate(parts):
            check_bytes(found, experts[n % 3], open_file)
        reader.close()
    assert max(most) == 2


def test_the_disk_is_asked_while_others_copy(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one read at a time, an expert that is being copied does not hold up the next one."""
    if not serves_direct_reads(artifact):
        pytest.skip("the file system refuses O_DIRECT")
    says(monkeypatch, cached=False)
    second = threading.Event()
    with Reader(artifact) as open_file:
        experts = records(open_file)
        reader = ExpertReader(open_file, experts, reads=1)

        def wait_for_second(number: int, part: U8) -> None:
            assert second.wait(300), "the second expert is not read while the first is copied"

        def stage(n: int) -> None:
            staging = np.empty(reader.staging_bytes, np.uint8)
            reader.stage(experts[n], staging, wait_for_second if n == 0 else None)
            if n:
                second.set()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(stage, range(2)))
        reader.close()
