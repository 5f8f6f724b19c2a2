"""Stops of every kind, at every step of a job, and what --resume makes of them.

After each stop nothing half-made has a final name, and going on ends in the bytes of a job that was
never disturbed.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks import flash_layer
from ds4q import api
from ds4q.artifact import stops
from ds4q.artifact.files import ForeignFileError
from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import read_receipt
from ds4q.artifact.stops import Terminated
from ds4q.quantize.finished import DamagedOutputError
from ds4q.quantize.journal import read_journal
from ds4q.quantize.outputs import MARK
from tests.checks import check_refused
from tests.quantize import models, traps
from tests.quantize.builders import RANDOM
from tests.quantize.damage import flip, new_receipt

ROOT = Path(__file__).parents[2]


def final_names(folder: Path) -> dict[str, str]:
    """SHA-256 of what stands at final names."""
    found = models.digests(folder)
    return {n: d for n, d in found.items() if not n.endswith((".partial", ".journal"))}


def check_nothing_half_made(folder: Path, *whole: dict[str, str]) -> None:
    """Every file at a final name is one of a finished job's."""
    for name, digest in final_names(folder).items():
        assert digest in [files.get(name) for files in whole], f"{name} is not whole"


def kill_points(server: traps.Server, source: Path, folder: Path) -> list[tuple[str, int]]:
    """Every counted system call of an expected run."""
    counts = server.job(source, folder / "counted.hfq", force=True)["counts"]
    assert all(counts.values()), counts
    return [(call, n) for call, count in counts.items() for n in range(1, count + 1)]


def test_killed_before_each_system_call(
    server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """Packing, journal, sync, the published line, each rename, the removal of the journal."""
    (tmp_path / "count").mkdir()
    points = kill_points(server, source, tmp_path / "count")
    reached = {call for call, _ in points}
    assert reached == set(traps.CALLS)
    for number, (call, n) in enumerate(points):
        folder = tmp_path / str(number)
        folder.mkdir()
        out = folder / "x.hfq"
        killed = server.job(source, out, call=call, n=n)
        assert killed["killed"], (call, n)
        check_nothing_half_made(folder, expected)
        ended = server.job(source, out, resume=True)
        assert ended["error"] is None, (call, n, ended)
        assert models.digests(folder) == expected, (call, n)


def test_killed_while_replacing_finished_output(
    server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """With --force each final name holds the old file or the new one, whole."""
    other = models.mini(tmp_path / "other", seed=9)
    (tmp_path / "old").mkdir()
    models.run(other, tmp_path / "old" / "x.hfq")
    old = models.digests(tmp_path / "old")
    assert old.keys() == expected.keys()
    seen = set()
    points = [("ftruncate", 1), ("write", 4), ("write", 6), ("fsync", 5)]  # behind the journal
    for call, n in points + [("replace", n) for n in (1, 2, 3, 4)]:
        folder = tmp_path / f"{call}{n}"
        folder.mkdir()
        out = folder / "x.hfq"
        models.run(other, out)
        assert server.job(source, out, force=True, call=call, n=n)["killed"]
        check_nothing_half_made(folder, expected, old)
        seen.add(sum(final_names(folder)[name] == expected[name] for name in old))
        assert server.job(source, out, resume=True)["error"] is None, (call, n)
        assert models.digests(folder) == expected
    assert seen == {0, 1, 2, 3}


def test_only_one_rename_happened(
    server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """A reader finds receipts ahead of their artifacts, never an artifact without its receipt."""
    out = tmp_path / "x.hfq"
    for n, names in enumerate(
        [[], ["x-dspark.hfq.receipt"], ["x-dspark.hfq"], ["x.hfq.receipt"]], start=1
    ):
        server.job(source, out, force=True, call="replace", n=n)
        standing = final_names(tmp_path)
        assert set(names) <= standing.keys()
        assert "x.hfq" not in standing
        for path in tmp_path.glob("*.hfq"):
            assert api.verify(path).ok
            assert (tmp_path / f"{path.name}.receipt").exists()
    assert server.job(source, out, resume=True)["error"] is None
    assert models.digests(tmp_path) == expected


def test_killed_again_and_again(
    server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    steps = [("write", 3), ("pwrite", 2), ("write", 2), ("fsync", 2), ("replace", 2), ("unlink", 1)]
    for number, (call, n) in enumerate(steps):
        assert server.job(source, out, resume=number > 0, call=call, n=n)["killed"], (call, n)
        check_nothing_half_made(tmp_path, expected)
    ended = server.job(source, out, resume=True)
    assert (ended["error"], ended["counts"]["pwrite"]) == (None, 2)  # the fronts; the rest is there
    assert models.digests(tmp_path) == expected


def zeros_behind_the_front(path: Path) -> None:
    with Reader(path) as reader:
        start, end = reader.data_offset, reader.file_bytes
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(end - start))


def flip_the_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def another_digest(path: Path) -> None:
    """A receipt that contradicts the payload, and one that contradicts itself."""
    receipt = read_receipt(path)
    first = dataclasses.replace(receipt.tensors[0], xxh3="0" * 32)
    path.write_bytes(dataclasses.replace(receipt, tensors=(first, *receipt.tensors[1:])).encode())


def another_source(path: Path) -> None:
    receipt = read_receipt(path)
    tensor = receipt.tensors[0]
    first = dataclasses.replace(
        tensor, sources=tuple(dataclasses.replace(s, xxh3="0" * 32) for s in tensor.sources)
    )
    path.write_bytes(dataclasses.replace(receipt, tensors=(first, *receipt.tensors[1:])).encode())


@pytest.mark.parametrize("stem", ["x.hfq", "x-dspark.hfq"])
@pytest.mark.parametrize(
    ("change", "suffix"),
    [
        (zeros_behind_the_front, ""),
        (flip_the_last_bit, ""),
        (another_digest, ".receipt"),
        (another_source, ".receipt"),
    ],
)
def test_a_finished_job_is_read_whole(
    stem: str, change: Callable[[Path], None], suffix: str, source: Path, tmp_path: Path
) -> None:
    """Its front alone, or its receipt alone, shows nothing."""
    out = tmp_path / "x.hfq"
    models.run(source, out)
    change(tmp_path / f"{stem}{suffix}")
    before = models.digests(tmp_path)
    check_refused(
        DamagedOutputError, lambda: models.run(source, out, resume=True), says=["--force"]
    )
    assert models.digests(tmp_path) == before


def test_a_finished_job_is_recognised(
    source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    assert not models.run(source, out).already_done
    before = out.stat().st_mtime_ns
    assert models.run(source, out, resume=True).already_done
    assert out.stat().st_mtime_ns == before
    assert models.digests(tmp_path) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": "fp4-f16"},
        {"exclude": ["layers.0.attn_norm"]},
        # The same file length, but other tensors: 96 rows of 256 are in experts 0 and 10.
        {"exclude": ["layers.0.ffn.experts.10."]},
    ],
)
def test_another_job_is_not_taken_for_finished(
    change: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    models.run(source, out, exclude=["layers.0.ffn.experts.0."])
    with pytest.raises(api.Ds4qError, match="output exists"):
        models.run(source, out, resume=True, **change)


def test_the_receipt_of_other_data_is_not_taken_for_this_jobs(source: Path, tmp_path: Path) -> None:
    """Headers and routers are equal, so the fingerprint is too; an expert is not."""
    tensors = models.mini_tensors()
    name = "layers.0.ffn.experts.0.w1.weight"
    held = tensors[name]
    tensors[name] = held._replace(data=bytes(len(held.data)))
    models.run(models.save(tmp_path / "s", tensors), tmp_path / "y.hfq")
    out = tmp_path / "x.hfq"
    models.run(source, out)
    shutil.copy(tmp_path / "y.hfq.receipt", tmp_path / "x.hfq.receipt")
    with pytest.raises(api.Ds4qError, match="output exists"):
        models.run(source, out, resume=True)


# ---------------------------------------------------------------- renames that were cut off


def test_space_is_not_asked_for_again_when_only_renames_are_left(
    server: traps.Server, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.hfq"
    server.job(source, out, call="replace", n=4)
    real = os.statvfs

    class Full:
        f_blocks, f_bavail, f_frsize = 1, 0, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Full())
    models.run(source, out, resume=True)
    monkeypatch.setattr(os, "statvfs", real)
    assert api.verify(out, source=source).ok


@pytest.mark.parametrize("name", ["x.hfq", "x.hfq.receipt", "x-dspark.hfq", "x-dspark.hfq.receipt"])
def test_a_damaged_file_gets_no_final_name(
    name: str,
    server: traps.Server,
    source: Path,
    expected: dict[str, str],
    tmp_path: Path,
) -> None:
    """What happened to the finished files between the kill and --resume is packed again.

    Those that have their final name are not written to: they may be the user's by now.
    """
    out = tmp_path / "x.hfq"
    server.job(source, out, call="replace", n=3)
    path = tmp_path / f"{name}.partial"
    path = path if path.exists() else tmp_path / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    if path.name == name:
        before = final_names(tmp_path)
        error = server.job(source, out, resume=True)["error"]
        assert f"{path}: " in error
        assert "not what this job makes" in error
        assert "move it away, then run the command again with --resume" in error
        assert final_names(tmp_path) == before
        path.unlink()
    assert server.job(source, out, resume=True)["error"] is None
    assert models.digests(tmp_path) == expected


def test_nor_does_a_file_that_agrees_with_its_receipt_alone(
    server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """A journal that says "published" proves nothing of what lies in the partial files."""
    out, aside = tmp_path / "x.hfq", tmp_path / "aside"
    server.job(source, out, call="replace", n=1)
    aside.mkdir()
    for name in ("x.hfq", "x.hfq.receipt"):
        (tmp_path / f"{name}.partial").rename(aside / name)
    with Reader(aside / "x.hfq") as reader:
        name = "layers.0.ffn.experts.0.w1.weight"
        end = reader.tensors[name].offset + reader.tensors[name].nbytes
    flip(aside / "x.hfq", end - 1, 0x11)
    new_receipt(aside / "x.hfq")
    assert api.verify(aside / "x.hfq").ok  # nothing but the source tells
    for path in aside.iterdir():
        path.rename(tmp_path / f"{path.name}.partial")
    aside.rmdir()
    assert server.job(source, out, resume=True)["error"] is None
    assert models.digests(tmp_path) == expected


@pytest.mark.parametrize("option", ["resume", "force"])
def test_a_sealed_file_that_was_cut_is_packed_again(
    option: str, server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """As after a power loss."""
    out = tmp_path / "x.hfq"
    server.job(source, out, call="replace", n=1)
    os.truncate(tmp_path / "x.hfq.partial", 5000)
    assert (
        server.job(source, out, resume=option == "resume", force=option == "force")["error"] is None
    )
    assert models.digests(tmp_path) == expected


def test_another_artifact_in_its_place_is_kept(
    server: traps.Server, source: Path, tmp_path: Path
) -> None:
    out, others = tmp_path / "x.hfq", tmp_path / "others"
    server.job(source, out, call="replace", n=1)
    others.mkdir()
    models.run(models.mini(tmp_path / "s", seed=9), others / "x.hfq", draft="drop")
    path = tmp_path / "x.hfq.partial"
    shutil.copy(others / "x.hfq", path)
    os.truncate(path, path.stat().st_size - 1)
    before = path.read_bytes()
    for options in ({"resume": True}, {"force": True}):
        with pytest.raises(ForeignFileError, match=r"x\.hfq\.partial"):
            models.run(source, out, **options)
    assert path.read_bytes() == before


def test_starting_over_and_killed_before_the_new_journal(
    server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """An old journal says that only renames are left; the partial files are new and empty.

    Nothing says any more that the user allowed replacing what the old job had published.
    """
    out = tmp_path / "x.hfq"
    server.job(source, out, call="replace", n=4)  # the trunk's partial file is left
    assert server.job(source, out, force=True, call="link", n=2)["killed"]
    assert (tmp_path / "x-dspark.hfq.partial").read_bytes() == MARK
    before = models.digests(tmp_path)
    assert "output exists" in server.job(source, out, resume=True)["error"]
    assert models.digests(tmp_path) == before
    assert server.job(source, out, force=True)["error"] is None
    assert models.digests(tmp_path) == expected


def test_old_output_is_not_taken_for_a_lost_partial_file(
    server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    other = models.mini(tmp_path / "other", seed=9)
    folder = tmp_path / "o"
    folder.mkdir()
    models.run(other, folder / "x.hfq")
    server.job(source, folder / "x.hfq", force=True, call="replace", n=1)
    for path in folder.glob("*.partial"):
        path.unlink()
    assert server.job(source, folder / "x.hfq", resume=True)["error"] is None
    assert models.digests(folder) == expected


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_the_last_line_of_a_stop_goes_on(
    number: int, status: int, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """The printed words work as they are in a shell, in the folder of the first run."""
    folder = tmp_path / "with space & more"
    folder.mkdir()
    words = ["quantize", str(source), "-o", "x.hfq", "--allow-partial", "--threads", "1"]
    stopped = subprocess.run(
        [sys.executable, traps.__file__, str(int(number)), "pwrite", "5", *words],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert stopped.returncode == status, stopped.stderr
    assert (folder / "x.hfq.partial").exists()
    assert final_names(folder) == {}
    said, command = stopped.stderr.splitlines()[-2:]
    assert said in ("ds4q: interrupted", "ds4q: terminated")
    assert command.startswith("continue with: ds4q quantize ")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    resumed = subprocess.run(
        ["sh", "-c", command.removeprefix("continue with: ")],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PATH": path},
    )
    assert resumed.returncode == 0, resumed.stderr
    assert re.search(r"[\d,]{5,} bytes from an earlier run", resumed.stdout)
    assert models.digests(folder) == expected


def fails_in_a_lock() -> None:
    """What a second signal made of a stop: this error instead of it."""
    try:
        raise Terminated
    finally:
        raise RuntimeError("release unlocked lock")


def full_disk_at_a_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)  # not raised yet: the test holds it back
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def too_little_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize("end", [fails_in_a_lock, full_disk_at_a_stop, too_little_memory])
def test_an_error_that_is_a_stop_or_unforeseen_discards_nothing(
    end: Any, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    def work() -> None:
        with stops.caught(), stops.held():
            models.run(source, tmp_path / "x.hfq")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds4q.quantize.job.seal", lambda *arguments: end())
        with pytest.raises(MemoryError if end is too_little_memory else Terminated):
            work()
    assert models.run(source, tmp_path / "x.hfq", resume=True).resumed_bytes
    assert models.digests(tmp_path) == expected


@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_stop_while_work_is_handed_out_ends_the_job(
    at: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for tensors that were already queued, nor for the thread that syncs."""
    real, calls = ThreadPoolExecutor.submit, 0

    def submit(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > at:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        models.run(source, tmp_path / "x.hfq")
    monkeypatch.undo()
    assert not (tmp_path / "x.hfq").exists()
    models.run(source, tmp_path / "x.hfq", resume=True)
    assert api.verify(tmp_path / "x.hfq", source=source).ok


def interrupt_at(patch: pytest.MonkeyPatch, call: str, n: int) -> None:
    """The ``n``-th call of ``os.<call>`` is a Ctrl-C."""
    lock, calls = threading.Lock(), [0]
    for module, attribute in traps.places(call):
        real = getattr(module, attribute)

        def wrapper(*arguments: Any, real: Any = real, **options: Any) -> Any:
            with lock:
                calls[0] += 1
                due = calls[0] == n
            if due:
                raise KeyboardInterrupt
            return real(*arguments, **options)

        patch.setattr(module, attribute, wrapper)


@pytest.mark.parametrize("call", traps.CALLS)
def test_interrupted_at_each_system_call(
    call: str, server: traps.Server, source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """Whatever step a stop hits, nothing is removed that --resume needs."""
    (tmp_path / "count").mkdir()
    points = kill_points(server, source, tmp_path / "count")
    for n in (n for name, n in points if name == call):
        folder = tmp_path / str(n)
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, call, n)
            with pytest.raises(KeyboardInterrupt):
                models.run(source, folder / "x.hfq")
        check_nothing_half_made(folder, expected)
        assert list(folder.iterdir()) or n == 1
        models.run(source, folder / "x.hfq", resume=True)
        assert models.digests(folder) == expected, n


# ---------------------------------------------------------------- real models, real size


@pytest.fixture(scope="module")
def random_files(random_artifact: Path) -> dict[str, str]:
    return models.digests(random_artifact.parent)


@pytest.mark.parametrize("seed", range(3))
def test_ds4_random_killed_twice(
    seed: int, server: traps.Server, random_files: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "ds4-random.hfq"
    rng = random.Random(seed)
    first, second = sorted(rng.sample(range(21_000_000), 2))
    options: dict[str, Any] = {"allow_partial": False, "threads": 1 + seed}
    assert server.job(RANDOM, out, at_bytes=first, **options)["killed"]
    assert server.job(RANDOM, out, at_bytes=second, resume=True, **options)["killed"]
    check_nothing_half_made(tmp_path, random_files)
    assert server.job(RANDOM, out, resume=True, **options)["error"] is None
    assert models.digests(tmp_path) == random_files


def kill_at(process: subprocess.Popen[bytes], journal: Path, lines: int, delay_s: float) -> None:
    """Kill a job from outside, ``delay_s`` after its journal has that many lines."""
    while process.poll() is None:
        with suppress(FileNotFoundError):
            if journal.read_bytes().count(b"\n") >= lines:
                break
        time.sleep(0.001)
    time.sleep(delay_s)
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_200_mb_job_survives_24_kills(tmp_path: Path) -> None:
    """The real command, killed from outside at seeded moments between its start and its end."""
    source = tmp_path / "source"
    flash_layer.write(source, experts=16, embedding=False)
    whole = tmp_path / "whole"
    whole.mkdir()
    ds4q = [sys.executable, "-m", "ds4q", "quantize", str(source), "--allow-partial", "-q"]
    subprocess.run([*ds4q, "-o", str(whole / "x.hfq")], check=True, capture_output=True)
    expected = models.digests(whole)
    assert (whole / "x.hfq").stat().st_size > 200_000_000
    rng = random.Random(20)
    done_when_killed = []
    for number in range(24):
        folder = tmp_path / str(number)
        folder.mkdir()
        out = folder / "x.hfq"
        process = subprocess.Popen(
            [*ds4q, "-o", str(out), "--threads", str(1 + number % 3)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # The journal has its own first line and one a tensor; then comes sealing, for the last few.
        lines = min(round(number * 48 / 18), 49)
        kill_at(
            process, folder / "x.hfq.journal", lines, rng.random() * (0.02 if lines < 49 else 0.6)
        )
        check_nothing_half_made(folder, expected)
        earlier = read_journal(folder / "x.hfq.journal")
        done_when_killed.append(0 if earlier is None else earlier.nbytes)
        resumed = subprocess.run(
            [*ds4q, "-o", str(out), "--resume", "--json"], capture_output=True, text=True
        )
        assert resumed.returncode == 0, resumed.stderr
        assert json.loads(resumed.stdout)["sha256"] == expected["x.hfq"]
        assert models.digests(folder) == expected
        for path in folder.iterdir():
            path.unlink()
    assert len(set(done_when_killed)) >= 10, done_when_killed


@pytest.mark.slow
def test_a_200_mb_job_killed_at_each_step(server: traps.Server, tmp_path: Path) -> None:
    """At seeded bytes of progress, during each fsync, and between each two renames."""
    source = tmp_path / "source"
    flash_layer.write(source, experts=16, embedding=False)
    whole = tmp_path / "whole"
    whole.mkdir()
    counts = server.job(source, whole / "x.hfq")["counts"]
    expected = models.digests(whole)
    rng = random.Random(21)
    kills: list[dict[str, Any]] = [{"at_bytes": rng.randrange(216_000_000)} for _ in range(12)]
    for call in ("fsync", "replace", "unlink"):
        kills += [{"call": call, "n": n + 1} for n in range(counts[call])]
    kills.append({"call": "write", "n": counts["write"]})
    for number, kill in enumerate(kills):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert server.job(source, folder / "x.hfq", **kill)["killed"], kill
        check_nothing_half_made(folder, expected)
        assert server.job(source, folder / "x.hfq", resume=True)["error"] is None, kill
        assert models.digests(folder) == expected, kill
        for path in folder.iterdir():
            path.unlink()
