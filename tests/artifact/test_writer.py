"""The planned layout, the partial file and its lock, durable writes."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact import writer
from ds4q.artifact.errors import (
    Ds4qError,
    DuplicateTensorError,
    HeaderError,
    IndexFieldError,
    MetadataError,
    PayloadSizeError,
    TensorTypeError,
)
from ds4q.artifact.files import AppearedError, ForeignFileError
from ds4q.artifact.hfq import Reader
from ds4q.artifact.locks import LockedError, WriteError
from ds4q.artifact.writer import UNFINISHED, PartialFile, TensorSpec, layout
from tests.artifact.build import METADATA
from tests.checks import check_refused

ONE = TensorSpec("a", 1, (4,))

# ------------------------------------------------------------------ layout


@given(st.integers(2, 9000), st.integers(0, 40))
def test_payload_begins_at_the_next_4096(metadata_bytes: int, tensors: int) -> None:
    specs = [TensorSpec(f"t{n:03}", 1, (3,)) for n in range(tensors)]
    plan = layout(specs, metadata_bytes, arch_id=9)
    end = 32 + metadata_bytes + 4 + tensors * (16 + 4 + 4)
    assert plan.data_offset % 4096 == 0
    assert 0 <= plan.data_offset - end < 4096
    assert plan.file_bytes == plan.data_offset + 6 * tensors
    assert [e.offset for e in plan.entries] == [plan.data_offset + 6 * n for n in range(tensors)]
    assert struct.unpack("<4sIIIQQ", plan.header) == (b"HFQM", 1, 9, tensors, 32, plan.data_offset)
    front = plan.front(b"{" + b" " * (metadata_bytes - 2) + b"}")
    assert len(front) == plan.data_offset
    assert not any(front[end:])


def test_no_padding_where_the_index_ends_aligned() -> None:
    plan = layout([ONE], 4096 - 32 - 4 - 21, arch_id=9)
    assert plan.data_offset == 4096
    plan = layout([ONE], 4096 - 32 - 4 - 20, arch_id=9)
    assert plan.data_offset == 8192


def test_what_is_planned_is_what_is_read(tmp_path: Path) -> None:
    specs = [
        TensorSpec("scalar", 2, ()),
        TensorSpec("ü.weight", 21, (2, 3, 64)),
        TensorSpec("q", 3, (2, 16)),
        TensorSpec("ids", 22, (5, 6)),
        TensorSpec("x" * 65535, 16, (1,) * 255),
    ]
    plan = layout(specs, len(METADATA), arch_id=9)
    path = tmp_path / "x.hfq"
    path.write_bytes(plan.front(METADATA) + bytes(plan.file_bytes - plan.data_offset))
    with Reader(path) as reader:
        assert tuple(reader.tensors.values()) == plan.entries
        assert reader.header_raw == plan.header
        assert reader.index_raw == plan.index
        assert reader.payload_end == plan.file_bytes


def test_front_refuses_metadata_of_another_length() -> None:
    plan = layout([ONE], len(METADATA), arch_id=9)
    plan.front(METADATA)
    for length in (4097, 10**6):
        check_refused(IndexFieldError, lambda n=length: plan.front(b" " * n), says=["planning"])  # type: ignore[misc]
    near = layout([ONE], 5000, arch_id=9)
    check_refused(IndexFieldError, lambda: near.front(METADATA), says=["planning"])


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        (TensorSpec("", 1, (4,)), IndexFieldError, "name must have 1 to 65535"),
        (TensorSpec("x" * 65536, 1, (4,)), IndexFieldError, "name must have 1 to 65535"),
        (TensorSpec("ü" * 32768, 1, (4,)), IndexFieldError, "name must have 1 to 65535"),
        (TensorSpec("a\0b", 1, (4,)), IndexFieldError, "name must have"),
        (TensorSpec("a\nb", 1, (4,)), IndexFieldError, "name must have"),
        (TensorSpec("a\x7f", 1, (4,)), IndexFieldError, "name must have"),
        (TensorSpec("a\x85", 1, (4,)), IndexFieldError, "name must have"),
        (TensorSpec("a\ud800", 1, (4,)), IndexFieldError, "name must have"),
        (TensorSpec("a", 1, (1,) * 256), IndexFieldError, "at most 255 dims"),
        (TensorSpec("a", 1, (4, 0)), IndexFieldError, "dims of 1 to"),
        (TensorSpec("a", 21, (4, 0)), IndexFieldError, "dims of 1 to"),
        (TensorSpec("a", 1, (2**32,)), IndexFieldError, "dims of 1 to"),
        (TensorSpec("a", 1, (-1,)), IndexFieldError, "dims of 1 to"),
        (TensorSpec("a", 21, (3, 48)), PayloadSizeError, "multiple of 32"),
        (TensorSpec("a", 21, (1, 2_097_152)), PayloadSizeError, "2097120"),
        (TensorSpec("a", 23, (4,)), TensorTypeError, "reserved tensor type 23"),
        (TensorSpec("a", 99, (4,)), TensorTypeError, "unknown tensor type 99"),
        (TensorSpec("a", 4, (4,)), TensorTypeError, "Q4K"),
    ],
)
def test_tensor_that_may_not_be_written(
    spec: TensorSpec, kind: type[Ds4qError], words: str
) -> None:
    first = TensorSpec("first", 1, (4,))
    name = None if "name" in words else spec.name
    check_refused(kind, lambda: layout([first, spec], 13, arch_id=9), tensor=name, says=[words])


def test_longest_legal_entry() -> None:
    layout([TensorSpec("ü" * 32767, 1, (2**32 - 1,) + (1,) * 254)], 13, arch_id=9)


def test_duplicate_name_names_both_entries() -> None:
    specs = [ONE, TensorSpec("b", 1, (4,)), TensorSpec("a", 2, (1,))]
    check_refused(
        DuplicateTensorError,
        lambda: layout(specs, 13, arch_id=9),
        tensor="a",
        says=["entries 0 and 2"],
    )


def test_what_the_reader_would_find_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    layout([ONE], 256 << 20, arch_id=9)
    check_refused(
        MetadataError, lambda: layout([ONE], (256 << 20) + 1, arch_id=9), says=["too long"]
    )
    monkeypatch.setattr(writer, "MAX_FRONT_BYTES", 8160)
    layout([ONE], 8192 - 32 - 4 - 21, arch_id=9)
    check_refused(HeaderError, lambda: layout([ONE], 8192 - 32, arch_id=9), says=["too long"])


# ------------------------------------------------------------------ the partial file


def opened(tmp_path: Path, nbytes: int = 1000) -> PartialFile:
    file = PartialFile(tmp_path / "x.hfq", nbytes)
    file.allocate()
    return file


def test_partial_file_has_a_fixed_name_and_its_final_length(tmp_path: Path) -> None:
    file = opened(tmp_path)
    assert file.path == tmp_path / "x.hfq.partial"
    assert file.path.stat().st_size == 1000
    assert os.listdir(tmp_path) == ["x.hfq.partial"]
    file.close()
    file.close()
    assert file.path.exists()


def test_writes_are_positioned(tmp_path: Path) -> None:
    file = opened(tmp_path, 20)
    file.pwrite(np.arange(6, dtype=np.uint8).reshape(2, 3), 10)
    file.pwrite(b"ab", 0)
    file.pwrite(memoryview(b"xyz")[1:], 18)
    file.pwrite(b"", 5)
    file.pwrite(np.empty((0, 3), dtype=np.uint8), 5)
    file.sync()
    out = np.full((4, 5), 9, dtype=np.uint8)
    file.pread_into(out, 0)
    assert out.tobytes() == b"ab" + UNFINISHED[2:10] + bytes(range(6)) + b"\0\0yz"
    file.discard()
    assert os.listdir(tmp_path) == []


def test_short_writes_and_reads_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view of a matrix counts rows: bytes taken for rows would leave holes."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: pwrite(fd, view[:7], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    data = np.random.default_rng(1).integers(0, 256, (10, 100), dtype=np.uint8)
    file = opened(tmp_path)
    file.pwrite(data, 0)
    out = np.zeros_like(data)
    file.pread_into(out, 0)
    assert (out == data).all()
    assert file.path.read_bytes() == data.tobytes()
    file.close()


def test_scattered_array_is_not_written(tmp_path: Path) -> None:
    file = opened(tmp_path)
    with pytest.raises((TypeError, BufferError)):
        file.pwrite(np.zeros((4, 6), dtype=np.uint8)[:, ::2], 0)
    file.close()


def test_a_write_that_makes_no_progress_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened(tmp_path)
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: 0)
    with pytest.raises(OSError, match="returned 0 bytes"):
        file.pwrite(b"abc", 0)
    file.close()


def test_partial_file_cut_by_someone_else(tmp_path: Path) -> None:
    file = opened(tmp_path)
    os.truncate(file.path, 10)
    with pytest.raises(OSError, match="shorter than planned"):
        file.pread_into(np.zeros(20, dtype=np.uint8), 0)
    file.close()


def test_what_an_earlier_run_wrote_is_kept(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.pwrite(b"kept", 990)
    file.close()
    again = PartialFile(tmp_path / "x.hfq", 1000)
    again.allocate()
    out = np.zeros(4, dtype=np.uint8)
    again.pread_into(out, 990)
    assert out.tobytes() == b"kept"
    again.close()


# ------------------------------------------------------------------ the lock


def test_second_writer_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.pwrite(b"first", 0)
    check_refused(
        LockedError, lambda: PartialFile(tmp_path / "x.hfq", 5), path=file.path, says=["another"]
    )
    assert file.path.stat().st_size == 1000
    assert file.path.read_bytes()[:5] == b"first"
    file.close()
    PartialFile(tmp_path / "x.hfq", 5, recognize=lambda head: head.startswith(b"first")).close()


def test_second_process_is_refused(tmp_path: Path) -> None:
    file = opened(tmp_path)
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ds4q.artifact.locks import LockedError\n"
        "from ds4q.artifact.writer import PartialFile\n"
        "try:\n"
        "    PartialFile(Path(sys.argv[1]), 5)\n"
        "except LockedError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x.hfq")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"{file.path}: another ds4q process")
    file.close()


def test_lock_of_a_file_that_was_published_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder renames and releases between our open and our lock: it is no longer ours."""
    final = tmp_path / "x.hfq"
    flock = fcntl.flock

    def late(fd: int, how: int) -> None:
        os.replace(final.with_name("x.hfq.partial"), final)
        flock(fd, how)

    final.with_name("x.hfq.partial").write_bytes(UNFINISHED + b"artifact")
    monkeypatch.setattr(fcntl, "flock", late)
    check_refused(LockedError, lambda: PartialFile(final, 5))
    assert final.read_bytes() == UNFINISHED + b"artifact"


def test_a_refused_lock_leaks_no_descriptor(tmp_path: Path) -> None:
    file = opened(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(LockedError):
            PartialFile(tmp_path / "x.hfq", 5)
    assert len(os.listdir("/proc/self/fd")) <= before
    file.close()


# ------------------------------------------------------------------ whose file it is


def test_under_its_name_the_file_always_has_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed at any system call leaves no nameless partial file."""
    seen: list[bytes] = []

    def look(*_: object) -> None:
        path = tmp_path / "x.hfq.partial"
        seen.append(path.read_bytes() if path.exists() else b"")

    for name in ("fsync", "pwrite", "unlink", "link", "ftruncate"):
        call = getattr(os, name)

        def spied(*given: object, call: Callable[..., object] = call, **named: object) -> object:
            look()
            done = call(*given, **named)
            look()
            return done

        monkeypatch.setattr(os, name, spied)
    file = PartialFile(tmp_path / "x.hfq", 100, mark=b"mark")
    file.allocate()
    file.pwrite(b"data", 50)
    file.reset()
    file.close()
    assert len(seen) > 6
    assert all(raw[:4] in (b"", b"mark") for raw in seen)
    assert (tmp_path / "x.hfq.partial").read_bytes() == b"mark"


def test_a_partial_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.hfq.partial"
    for mine in (b"", b"notes", b"HFQM" + bytes(100), b"ds4q.unfinished.job\n"):
        path.write_bytes(mine)
        check_refused(ForeignFileError, lambda: PartialFile(tmp_path / "x.hfq", 5), path=path)
        assert path.read_bytes() == mine
    PartialFile(tmp_path / "x.hfq", 5, recognize=lambda head: head == mine).close()
    file = PartialFile(tmp_path / "y.hfq", 5)
    file.close()
    os.link(file.path, tmp_path / "other")
    check_refused(ForeignFileError, lambda: PartialFile(tmp_path / "y.hfq", 5), says=["2 hard"])
    (tmp_path / "other").unlink()
    inputs = [file.path.stat()]
    check_refused(
        ForeignFileError, lambda: PartialFile(tmp_path / "y.hfq", 5, inputs=inputs), says=["input"]
    )


def test_another_file_of_that_name_is_neither_published_nor_removed(tmp_path: Path) -> None:
    for end in ("publish", "discard"):
        file = opened(tmp_path)
        file.path.unlink()
        file.path.write_bytes(b"mine")
        if end == "publish":
            check_refused(WriteError, file.publish, path=file.path, says=["another program"])
        file.discard()
        assert file.path.read_bytes() == b"mine"
        assert os.listdir(tmp_path) == [file.path.name]
        file.path.unlink()


def test_publishing_keeps_what_appeared(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.final.write_bytes(b"mine")
    check_refused(AppearedError, file.publish, path=file.final)
    assert file.final.read_bytes() == b"mine"
    file.publish(replace=True)
    file.close()
    assert os.listdir(tmp_path) == ["x.hfq"]
    assert file.final.stat().st_size == 1000
