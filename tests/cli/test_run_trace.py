"""ds4q run --trace: whose file it is, and what becomes of it when a run fails."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ds4q.artifact.hfq import Reader
from ds4q.artifact.locks import LockedError
from ds4q.artifact.writer import UNFINISHED
from ds4q.cli import main
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import RunError
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.profile import Profile
from ds4q.runtime.experts.replay import Workload
from ds4q.runtime.experts.trace import artifact_identity, read_trace

ASK = ["--prompt-ids", "256,258,104", "--temp", "0", "--max-tokens", "4", "--ignore-eos"]
IDS = [256, 258, 104]
PAGED = ["--expert-cache", "3MB"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.trace"


def run(file: Path, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["run", str(file), *ASK, *map(str, arguments)])


def failed(result: Result, *says: object) -> None:
    """One line of an error with status 1."""
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1, result.stderr
    for words in says:
        assert str(words) in result.stderr


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir())


def test_of_two_runs_at_once_the_second_is_refused_and_the_first_keeps_all(
    tiny_artifact: Path, path: Path
) -> None:
    with Engine.load(tiny_artifact, threads=1, cache=CacheOptions(trace=path)) as engine:
        engine.forward(engine.new_state(), IDS)
        result = run(tiny_artifact, "-q", "--trace", path)
        failed(result, f"{path}.partial: another ds4q process", "wait for it")
        assert result.stdout == ""
    assert Workload.of(read_trace(path)).tokens == {"prefill": len(IDS), "decode": 0}
    assert names(path) == [path.name]


@pytest.mark.parametrize("paged", [[], PAGED])
def test_a_file_that_is_in_the_way_stays(tiny_artifact: Path, path: Path, paged: list[str]) -> None:
    mine = path.with_name("run.trace.partial")
    mine.write_text("mine")
    result = run(tiny_artifact, "-q", *paged, "--trace", path)
    failed(result, f"{mine}: ", "move it away, or choose another output")
    assert result.stdout == ""
    assert mine.read_text() == "mine"
    assert names(path) == [mine.name]


def test_a_trace_without_a_name_is_wrong_usage(tiny_artifact: Path) -> None:
    result = run(tiny_artifact, "--trace", "")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Invalid value for '--trace': it is empty" in result.stderr


def test_a_trace_is_written_through_its_link(tiny_artifact: Path, path: Path) -> None:
    there = path.with_name("disk")
    there.mkdir()
    path.symlink_to(Path("disk") / "there")
    for _ in range(2):  # then there is one
        assert run(tiny_artifact, "--trace", path).exit_code == 0
        assert path.is_symlink()
        assert list(read_trace(there / "there"))
    assert names(there / "there") == ["there"]


def test_what_a_killed_run_left_is_replaced(tiny_artifact: Path, path: Path) -> None:
    path.with_name("run.trace.partial").write_bytes(UNFINISHED + bytes(50))
    assert run(tiny_artifact, "--trace", path).exit_code == 0
    assert list(read_trace(path))
    assert names(path) == [path.name]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may be longer than 30,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_trace_that_no_longer_fits_is_one_line(
    tiny_artifact: Path, path: Path, small_files: None
) -> None:
    path.write_bytes(b"")
    result = run(tiny_artifact, "-q", "--max-tokens", 200, "--trace", path, "--trace-states")
    failed(result, f"{path}: cannot be written: {os.strerror(errno.EFBIG)}; choose another")
    assert path.read_bytes() == b""
    assert names(path) == [path.name]


def flaky(monkeypatch: pytest.MonkeyPatch, reads: int) -> None:
    """After so many reads the disk fails."""
    honest, left = os.preadv, [reads]

    def preadv(fd: int, buffers: Any, *rest: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return honest(fd, buffers, *rest)

    monkeypatch.setattr(os, "preadv", preadv)


def test_a_run_that_fails_leaves_an_earlier_trace(
    tiny_artifact: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*PAGED, "--trace", path]
    assert run(tiny_artifact, *options).exit_code == 0
    before = path.read_bytes()
    flaky(monkeypatch, 1500)
    result = run(tiny_artifact, "-q", "--max-tokens", 200, *options)
    failed(result, os.strerror(errno.EIO))
    assert result.stdout  # so it had begun
    assert path.read_bytes() == before
    assert names(path) == [path.name]


def use(engine: Any, stop: BaseException | None) -> None:
    with engine:
        engine.forward(engine.new_state(), IDS)
        if stop is not None:
            raise stop


@pytest.mark.parametrize("stop", [None, KeyboardInterrupt(), RunError("failed"), OSError("failed")])
@pytest.mark.parametrize("device", ["cpu", "hip"])
def test_only_a_failure_costs_the_trace(
    tiny_artifact: Path, path: Path, sim: Control, device: str, stop: BaseException | None
) -> None:
    options = CacheOptions(slots=5, trace=path)
    engine: Engine | HipEngine
    if device == "cpu":
        engine = Engine.load(tiny_artifact, threads=1, cache=options, layers=range(2))
    else:
        engine = HipEngine.load(tiny_artifact, cache=options, layers=range(2))
    if stop is None:
        use(engine, stop)
    else:
        with pytest.raises(type(stop)):
            use(engine, stop)
    if isinstance(stop, Exception):
        assert names(path) == []
    else:
        assert Workload.of(read_trace(path)).tokens == {"prefill": len(IDS), "decode": 0}
        assert names(path) == [path.name]


def test_a_server_keeps_its_trace_after_an_answer_that_failed(
    tiny_artifact: Path, path: Path
) -> None:
    options = CacheOptions(slots=5, trace=path)
    with Engine.load(tiny_artifact, threads=1, cache=options, layers=range(1)) as engine:
        engine.forward(engine.new_state(), IDS)
        with pytest.raises(RunError):
            engine.forward(engine.new_state(), [-1])
        engine.forward(engine.new_state(), IDS)
    assert Workload.of(read_trace(path)).tokens == {"prefill": 2 * len(IDS), "decode": 0}


def test_a_device_refuses_a_trace_that_is_being_written_before_it_reads_weights(
    tiny_artifact: Path, path: Path, sim: Control
) -> None:
    options = CacheOptions(slots=5, trace=path)
    with Engine.load(tiny_artifact, threads=1, cache=options, layers=range(1)) as first:
        first.forward(first.new_state(), IDS)
        read: list[int] = []
        with pytest.raises(LockedError):
            HipEngine.load(
                tiny_artifact, cache=options, progress=lambda done, total: read.append(done)
            )
        assert read == []
    assert list(read_trace(path))


def test_a_device_that_holds_all_experts_leaves_no_file(
    tiny_artifact: Path, path: Path, sim: Control
) -> None:
    result = run(tiny_artifact, "-q", "--device", "hip", "--expert-cache", "1GB", "--trace", path)
    failed(result, "cannot be traced")
    assert names(path) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", [["--cold", "none"], PAGED])
def test_a_trace_says_which_experts_its_rank_holds(
    tiny_artifact: Path, path: Path, rank: int, how: list[str]
) -> None:
    result = run(tiny_artifact, "--expert-owner", f"{rank}/2", *how, "--trace", path)
    assert result.exit_code == 0, result.stderr
    header = read_trace(path).header
    assert (header.experts, header.owned) == (16, (8 * rank, 8 * rank + 8))
    replayed = CliRunner().invoke(main, ["cache", "replay", str(path)])
    assert replayed.exit_code == 0, replayed.stderr
    assert f"of the rank with experts {8 * rank} to {8 * rank + 7}" in replayed.stdout


def test_a_profile_of_other_ranks_experts_alone_is_told_once(
    tiny_artifact: Path, tmp_path: Path
) -> None:
    with Reader(tiny_artifact) as reader:
        identity = artifact_identity(reader)
    profile = tmp_path / "p"
    profile.write_bytes(Profile(identity, ((15, 9),) * 4, ((2, 1),) * 4).encode())
    options = [*PAGED, "--cache-profile", profile]
    for rank, told in ((0, 1), (1, 0)):
        result = run(tiny_artifact, "--expert-owner", f"{rank}/2", *options)
        assert result.exit_code == 0, result.stderr
        says = f"{profile}: names no expert of this rank, which holds 0 to 7 of 16"
        assert result.stderr.count(says) == told


def test_a_rank_begins_with_its_own_experts_whatever_stands_before_them(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Reader(tiny_artifact) as reader:
        identity = artifact_identity(reader)
    profile = tmp_path / "p"
    ranked = (*range(8, 16), *range(4))
    profile.write_bytes(Profile(identity, (ranked,) * 4, (ranked,) * 4).encode())
    options = CacheOptions(slots=4, owner=(0, 2), profile=profile)
    asked: list[list[int]] = []
    monkeypatch.setattr(Pager, "prefetch", lambda _, layer, ids, purpose: asked.append(list(ids)))
    Engine.load(tiny_artifact, threads=1, cache=options).close()
    assert asked == [[0, 1, 2, 3]] * 4
