"""Stops of every kind, at every step of a job, and what --resume makes of them.

After each stop nothing half-made has a final name, and going on ends in the bytes of a job that was
never disturbed.
"""

from __future__ import annotations

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks import flash_layer
from ds4q import api
from ds4q.quantize.journal import read_journal
from tests.quantize import models, traps
from tests.quantize.builders import RANDOM

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[traps.Server]:
    with traps.Server() as running:
        yield running


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.mini(tmp_path_factory.mktemp("mini"))


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """SHA-256 of the four files of a job that ran through."""
    folder = tmp_path_factory.mktemp("undisturbed")
    models.run(source, folder / "x.hfq")
    return models.digests(folder)


def final_names(folder: Path) -> dict[str, str]:
    """SHA-256 of what stands at final names."""
    found = models.digests(folder)
    return {n: d for n, d in found.items() if not n.endswith((".partial", ".journal"))}


def check_nothing_half_made(folder: Path, *whole: dict[str, str]) -> None:
    """Every file at a final name is one of a finished job's."""
    for name, digest in final_names(folder).items():
        assert digest in [files.get(name) for files in whole], f"{name} is not whole"


def kill_points(server: traps.Server, source: Path, folder: Path) -> list[tuple[str, int]]:
    """Every counted system call of an undisturbed run."""
    counts = server.job(source, folder / "counted.hfq", force=True)["counts"]
    assert all(counts.values()), counts
    return [(call, n) for call, count in counts.items() for n in range(1, count + 1)]


def test_killed_before_each_system_call(
    server: traps.Server, source: Path, undisturbed: dict[str, str], tmp_path: Path
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
        check_nothing_half_made(folder, undisturbed)
        ended = server.job(source, out, resume=True)
        assert ended["error"] is None, (call, n, ended)
        assert models.digests(folder) == undisturbed, (call, n)


def test_killed_while_replacing_finished_output(
    server: traps.Server, source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """With --force each final name holds the old file or the new one, whole."""
    other = models.mini(tmp_path / "other", seed=9)
    (tmp_path / "old").mkdir()
    models.run(other, tmp_path / "old" / "x.hfq")
    old = models.digests(tmp_path / "old")
    assert old.keys() == undisturbed.keys()
    seen = set()
    points = [("ftruncate", 1), ("write", 1), ("write", 3), ("fsync", 4)]
    for call, n in points + [("replace", n) for n in (1, 2, 3, 4)]:
        folder = tmp_path / f"{call}{n}"
        folder.mkdir()
        out = folder / "x.hfq"
        models.run(other, out)
        assert server.job(source, out, force=True, call=call, n=n)["killed"]
        check_nothing_half_made(folder, undisturbed, old)
        seen.add(sum(final_names(folder)[name] == undisturbed[name] for name in old))
        assert server.job(source, out, resume=True)["error"] is None, (call, n)
        assert models.digests(folder) == undisturbed
    assert seen == {0, 1, 2, 3}


def test_only_one_rename_happened(
    server: traps.Server, source: Path, undisturbed: dict[str, str], tmp_path: Path
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
    assert models.digests(tmp_path) == undisturbed


def test_killed_again_and_again(
    server: traps.Server, source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    steps = [("write", 3), ("pwrite", 2), ("write", 2), ("fsync", 2), ("replace", 2), ("unlink", 1)]
    for number, (call, n) in enumerate(steps):
        assert server.job(source, out, resume=number > 0, call=call, n=n)["killed"], (call, n)
        check_nothing_half_made(tmp_path, undisturbed)
    ended = server.job(source, out, resume=True)
    assert (ended["error"], ended["counts"]["pwrite"]) == (None, 0)  # all was there
    assert models.digests(tmp_path) == undisturbed


def test_a_finished_job_is_recognised(
    source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    assert not models.run(source, out).already_done
    before = out.stat().st_mtime_ns
    assert models.run(source, out, resume=True).already_done
    assert out.stat().st_mtime_ns == before
    assert models.digests(tmp_path) == undisturbed


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
        f_bavail, f_frsize = 0, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Full())
    models.run(source, out, resume=True)
    monkeypatch.setattr(os, "statvfs", real)
    assert api.verify(out, source=source).ok


@pytest.mark.parametrize("name", ["x.hfq", "x.hfq.receipt", "x-dspark.hfq", "x-dspark.hfq.receipt"])
def test_a_damaged_file_gets_no_final_name(
    name: str,
    server: traps.Server,
    source: Path,
    undisturbed: dict[str, str],
    tmp_path: Path,
) -> None:
    """Whatever happened to the finished files between the kill and --resume is packed again."""
    out = tmp_path / "x.hfq"
    server.job(source, out, call="replace", n=3)
    path = tmp_path / f"{name}.partial"
    path = path if path.exists() else tmp_path / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    assert server.job(source, out, resume=True)["error"] is None
    assert models.digests(tmp_path) == undisturbed


def test_starting_over_and_killed_before_the_new_journal(
    server: traps.Server, source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """An old journal says that only renames are left; the partial files are new and empty."""
    out = tmp_path / "x.hfq"
    server.job(source, out, call="replace", n=4)  # the trunk's partial file is left
    assert server.job(source, out, force=True, call="ftruncate", n=2)["killed"]
    assert (tmp_path / "x-dspark.hfq.partial").read_bytes() == b""
    assert server.job(source, out, resume=True)["error"] is None
    assert models.digests(tmp_path) == undisturbed


def test_old_output_is_not_taken_for_a_lost_partial_file(
    server: traps.Server, source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    other = models.mini(tmp_path / "other", seed=9)
    folder = tmp_path / "o"
    folder.mkdir()
    models.run(other, folder / "x.hfq")
    server.job(source, folder / "x.hfq", force=True, call="replace", n=1)
    for path in folder.glob("*.partial"):
        path.unlink()
    assert server.job(source, folder / "x.hfq", resume=True)["error"] is None
    assert models.digests(folder) == undisturbed


# ---------------------------------------------------------------- what changed in between


def half_done(server: traps.Server, source: Path, out: Path) -> None:
    """A job that was killed when all but the last tensor was in the partial files."""
    assert server.job(source, out, call="pwrite", n=11)["killed"]
    earlier = read_journal(out.with_name("x.hfq.journal"))
    assert earlier is not None
    assert len(earlier.blocks) == 10


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_byte_in_the_partial_file_is_packed_again(
    seed: int,
    server: traps.Server,
    source: Path,
    undisturbed: dict[str, str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    rng = random.Random(seed)
    path = tmp_path / "x.hfq.partial"
    data = bytearray(path.read_bytes())
    written = [at for at, byte in enumerate(data) if byte]
    data[rng.choice(written)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    ended = server.job(source, out, resume=True)
    assert ended["error"] is None
    assert ended["counts"]["pwrite"] == 4  # the changed one, the unwritten one, two fronts
    assert models.digests(tmp_path) == undisturbed


@pytest.mark.parametrize("loss", ["zeros", "short", "gone"])
def test_lost_data_is_packed_again(
    loss: str, server: traps.Server, source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """As after a power loss: the journal knows of blocks that the disk never got."""
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    for path in tmp_path.glob("*.partial"):
        size = path.stat().st_size
        if loss == "gone":
            path.unlink()
        else:
            os.truncate(path, 5000)
            os.truncate(path, size if loss == "zeros" else 5000)
    ended = server.job(source, out, resume=True)
    assert (ended["error"], ended["resumed_bytes"]) == (None, 0)
    assert models.digests(tmp_path) == undisturbed


def test_a_torn_line_costs_only_its_block(
    server: traps.Server, source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    path = tmp_path / "x.hfq.journal"
    path.write_bytes(path.read_bytes()[:-20])
    ended = server.job(source, out, resume=True)
    assert (ended["error"], ended["counts"]["pwrite"]) == (None, 2 + 2)
    assert models.digests(tmp_path) == undisturbed


@pytest.mark.parametrize("garbage", [b"", b"\0" * 4096, b"rubbish\n" * 10])
def test_a_garbage_journal_means_starting_over(
    garbage: bytes,
    server: traps.Server,
    source: Path,
    undisturbed: dict[str, str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    (tmp_path / "x.hfq.journal").write_bytes(garbage)
    with pytest.raises(api.Ds4qError, match="unfinished job lies here: found 0 of"):
        models.run(source, out)
    ended = server.job(source, out, resume=True)
    assert (ended["error"], ended["resumed_bytes"]) == (None, 0)
    assert models.digests(tmp_path) == undisturbed


def test_an_edited_journal_line_is_not_believed(
    server: traps.Server, source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """A source digest in it would end up in metadata and receipt."""
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    path = tmp_path / "x.hfq.journal"
    lines = path.read_bytes().splitlines(keepends=True)
    key = b'"sources":["'
    at = lines[3].index(key) + len(key)
    lines[3] = lines[3][:at] + b"0" * 32 + lines[3][at + 32 :]
    path.write_bytes(b"".join(lines))
    assert server.job(source, out, resume=True)["error"] is None
    assert models.digests(tmp_path) == undisturbed


def test_touched_shards_are_read_again_and_kept(
    server: traps.Server, source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    for shard in source.glob("*.safetensors"):
        os.utime(shard, (1, 1))
    ended = server.job(source, out, resume=True)
    assert (ended["error"], ended["counts"]["pwrite"]) == (None, 1 + 2)
    assert models.digests(tmp_path) == undisturbed


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.ffn.experts.0.w1.weight",
        "layers.0.ffn.experts.0.w1.scale",
        "layers.0.attn.wq_a.weight",
        "layers.0.attn.wq_a.scale",
        "layers.0.attn_norm.weight",
        "mtp.0.attn.wkv.scale",
    ],
)
@pytest.mark.parametrize("several_blocks", [False, True])
def test_changed_source_data_are_packed_again(
    name: str,
    several_blocks: bool,
    server: traps.Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights and scales lie in different shards; only the shard of one of them changes."""
    if several_blocks:
        monkeypatch.setattr("ds4q.quantize.pipeline.BLOCK_BYTES", 1)
    tensors = models.mini_tensors()
    source = models.save(tmp_path / "source", tensors)
    folder = tmp_path / "o"
    folder.mkdir()
    out = folder / "x.hfq"
    half_done_in_process(source, out, monkeypatch)
    data = bytearray(tensors[name].data)
    data[len(data) // 2] ^= 1
    changed = tensors | {name: tensors[name]._replace(data=bytes(data))}
    times = {path: path.stat().st_mtime_ns for path in source.glob("*.safetensors")}
    models.save(source, changed)
    for path, before in times.items():  # as if only the one shard had been written
        new = before + 1 if models.by_kind(name) in path.name else before
        os.utime(path, ns=(new, new))
    models.run(source, out, resume=True)
    (tmp_path / "fresh").mkdir()
    models.run(source, tmp_path / "fresh" / "x.hfq")
    assert models.digests(folder) == models.digests(tmp_path / "fresh")
    for path in (out, folder / "x-dspark.hfq"):
        assert api.verify(path, source=source).ok


def half_done_in_process(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that stops (as on Ctrl-C) when everything is packed, before it is sealed."""

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ds4q.quantize.job.seal", stop)
        with pytest.raises(KeyboardInterrupt):
            models.run(source, out)
    assert out.with_name("x.hfq.journal").exists()


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"recipe": "fp4-q8"}, "options"),
        ({"exclude": ["layers.0.attn_norm"]}, "options"),
        ({"draft": "keep"}, "options"),
    ],
)
def test_other_options_cannot_go_on(
    change: dict[str, Any], differs: str, server: traps.Server, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    before = models.digests(tmp_path)
    with pytest.raises(api.Ds4qError, match=rf"belongs to another job \({differs}\)"):
        models.run(source, out, resume=True, **change)
    assert models.digests(tmp_path) == before


def test_another_source_cannot_go_on(server: traps.Server, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    other = models.mini(tmp_path / "other", seed=1)  # other gates, so another fingerprint
    with pytest.raises(api.Ds4qError, match=r"another job \(source_fingerprint\)"):
        models.run(other, out, resume=True)


def test_another_version_cannot_go_on(
    server: traps.Server, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.hfq"
    half_done(server, source, out)
    monkeypatch.setattr(api, "__version__", "9.9.9")
    with pytest.raises(api.Ds4qError, match=r"another job \(tool_version\).*9\.9\.9"):
        models.run(source, out, resume=True)


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_the_last_line_of_a_stop_goes_on(
    number: int, status: int, source: Path, undisturbed: dict[str, str], tmp_path: Path
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
    assert models.digests(folder) == undisturbed


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
    real, lock, calls = getattr(os, call), threading.Lock(), [0]

    def wrapper(*arguments: Any, **options: Any) -> Any:
        with lock:
            calls[0] += 1
            due = calls[0] == n
        if due:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    patch.setattr(os, call, wrapper)


@pytest.mark.parametrize("call", traps.CALLS)
def test_interrupted_at_each_system_call(
    call: str, server: traps.Server, source: Path, undisturbed: dict[str, str], tmp_path: Path
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
        check_nothing_half_made(folder, undisturbed)
        assert list(folder.iterdir())
        models.run(source, folder / "x.hfq", resume=True)
        assert models.digests(folder) == undisturbed, n


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
