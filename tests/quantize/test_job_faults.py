"""Disks and sources that fail during a job: each failing call, full disks, changing shards."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.locks import WriteError
from ds4q.quantize.errors import ChangedSourceError, JobError, SourceReadError
from ds4q.quantize.job import SpaceError
from tests.checks import check_refused
from tests.faults import Faults
from tests.quantize import models

CALLS = ("pwrite", "write", "fsync", "ftruncate", "link")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty output folder."""
    (tmp_path / "o").mkdir()
    return tmp_path / "o"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(autouse=True, scope="module")
def links() -> Iterator[None]:
    """A file system without RENAME_NOREPLACE, so that publishing calls ``os.link``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds4q.artifact.files._renameat2", lambda old, new: False)
        yield


@pytest.fixture(scope="module")
def counts(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """How often a job that runs through makes each call."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("counts")
        faults = Faults(patch, folder, calls=CALLS)
        models.run(source, folder / "x.hfq")
    return faults.counts


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "io"])
@pytest.mark.parametrize("replacing", [False, True], ids=["fresh", "replacing"])
def test_each_failing_call_is_one_error_and_leaves_nothing_behind(
    call: str,
    code: int,
    replacing: bool,
    source: Path,
    counts: Counter[str],
    expected: dict[str, str],
    tmp_path: Path,
) -> None:
    """Up to the first rename everything is removed, and old output stays as it was.

    From then on only --resume can put things right, so what it needs stays.
    """
    other = models.mini(tmp_path / "other", seed=9)
    assert counts[call]
    for n in range(1, counts[call] + 1):
        folder = tmp_path / str(n)
        folder.mkdir()
        if replacing:
            models.run(other, folder / "x.hfq")
        before = models.digests(folder)
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, folder, call, n, code, calls=CALLS)
            with pytest.raises(WriteError) as caught:
                models.run(source, folder / "x.hfq", force=replacing)
        text = str(caught.value)
        assert text.isprintable()
        assert os.strerror(code) in text
        if code == errno.ENOSPC:
            needed = models.run(source, tmp_path / "z.hfq", dry_run=True).plan.file_bytes
            assert f"needs {needed:,} bytes" in text
        found = models.digests(folder)
        if found == before:
            assert "nothing was left behind" in text
            continue
        assert call in ("link", "fsync"), n
        assert n > 1
        assert "again with --resume" in text
        for name in expected:
            assert found.get(name) in (before.get(name), expected[name]), name
        models.run(source, folder / "x.hfq", resume=True)
        assert models.digests(folder) == expected


def close_fails(patch: pytest.MonkeyPatch, folder: Path, n: int) -> None:
    """The ``n``-th close of a file in ``folder`` reports a full disk."""
    real, calls = os.close, Counter[str]()

    def close(fd: int) -> None:
        where = os.readlink(f"/proc/self/fd/{fd}")
        real(fd)
        calls["ours"] += where.startswith(f"{folder}/")
        if calls["ours"] == n and where.startswith(f"{folder}/"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, "close", close)


def test_a_failing_close_is_an_error_or_harmless(
    source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """Some file systems tell of a lost write when a file is closed: before it has its name."""
    errors = 0
    for n in range(1, 18):
        folder = tmp_path / str(n)
        folder.mkdir()
        text = ""
        with pytest.MonkeyPatch.context() as patch:
            close_fails(patch, folder, n)
            try:
                models.run(source, folder / "x.hfq")
            except WriteError as error:
                text = str(error)
        if text:
            errors += 1
            assert "No space left on device; the job needs" in text
        assert models.digests(folder) == ({} if text else expected)
    assert errors == 5  # journal, two receipts, two artifacts; not those that only were read


def test_a_file_size_limit_is_reported(
    source: Path, folder: Path, expected: dict[str, str]
) -> None:
    """The limit of the shell (ulimit -f) shows first where the files get their length."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, before[1]))
    try:
        with pytest.raises(WriteError) as caught:
            models.run(source, folder / "x.hfq")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    needed = models.run(source, folder / "x.hfq", dry_run=True).plan.file_bytes
    assert "File too large" in str(caught.value)
    assert f"needs {needed:,} bytes" in str(caught.value)
    assert names(folder) == []


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 200 KiB; the small model needs a little more."""
    if os.geteuid() or not models.mount("-t", "tmpfs", "-o", "size=200k", "none", folder):
        pytest.skip("cannot mount a small file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_seen_before_work(source: Path, small_disk: Path) -> None:
    with pytest.raises(SpaceError, match="No space left"):
        models.run(source, small_disk / "x.hfq")
    assert names(small_disk) == []


def test_a_disk_that_fills_up_meanwhile(
    source: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        f_blocks, f_bavail, f_frsize = 1, 1 << 30, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Disk())
    with pytest.raises(WriteError, match="No space left on device; the job needs"):
        models.run(source, small_disk / "x.hfq")
    assert names(small_disk) == []


def test_failing_clean_up_does_not_hide_what_went_wrong(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, folder, "pwrite", 2, errno.EIO, calls=CALLS)
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(WriteError, match="Input/output error"):
            models.run(source, folder / "x.hfq")


# ---------------------------------------------------------------- a source that does not hold still


@pytest.mark.parametrize("threads", [1, 4])
def test_a_shard_that_is_cut_while_it_is_read(
    threads: int, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.mini(tmp_path / "s")
    shard = source / "model-weights.safetensors"
    real = os.pwrite

    def cut(*arguments: Any) -> int:
        os.truncate(shard, 10)
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", cut)
    check_refused(
        SourceReadError,
        lambda: models.run(source, folder / "x.hfq", threads=threads),
        path=shard,
        says=["shard ended during a read"],
    )
    assert names(folder) == []


@pytest.mark.parametrize("how", ["written", "replaced", "removed"])
def test_a_shard_that_changes_while_it_is_read(
    how: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.mini(tmp_path / "s")
    shard = source / "model-scales.safetensors"
    real, once = os.pwrite, threading.Event()

    def change(*arguments: Any) -> int:
        if not once.is_set():
            once.set()
            data = shard.read_bytes()
            if how == "written":
                shard.write_bytes(data)
                os.utime(shard, (1, 1))
            else:
                shard.unlink()
            if how == "replaced":
                shard.write_bytes(data)
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", change)
    check_refused(
        ChangedSourceError,
        lambda: models.run(source, folder / "x.hfq"),
        path=shard,
        says=["source changed while it was read"],
    )
    assert names(folder) == []


def test_a_disk_that_fails_to_read(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    calls = Counter[str]()

    def preadv(fd: int, *more: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("weights.safetensors"):
            calls["reads"] += 1
            if calls["reads"] == 6:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *more)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(SourceReadError, match="read failed: Input/output error"):
        models.run(source, folder / "x.hfq")
    assert names(folder) == []


def test_an_error_of_the_plan_writes_nothing(source: Path, folder: Path) -> None:
    with pytest.raises(JobError):
        models.run(source, folder / "x.hfq", include=["no.such"])
    with pytest.raises(Ds4qError):
        models.run(source.parent / "no-such", folder / "x.hfq")
    assert names(folder) == []
