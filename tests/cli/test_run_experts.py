"""ds4q run with paged, owned and recorded experts, on real artifacts."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ds4q.cli import main
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.experts.trace import read_trace
from tests.runtime import mixed
from tests.runtime.artifacts import DATA, config_of, pack, write

RANDOM = DATA / "ds4-random"

ASK = ["--prompt-ids", "256,258,104,105,259,261", "--temp", "0", "--max-tokens", "12"]


def run(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", str(file), *ASK, *arguments])


def answer(file: Path, *arguments: str) -> dict[str, Any]:
    result = run(file, "--json", "--ignore-eos", *arguments)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def refused(file: Path, *arguments: str) -> str:
    """The one line of an error with status 1."""
    result = run(file, "-q", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("ds4q: error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(scope="module")
def resident(tiny_artifact: Path) -> dict[str, Any]:
    return answer(tiny_artifact)


@pytest.fixture(scope="module")
def least(tiny_artifact: Path) -> int:
    """The fewest bytes of slots that one token can do with."""
    words = refused(tiny_artifact, "--expert-cache", "0").split()
    return int(words[words.index("--expert-cache") + 1])


@pytest.mark.parametrize("policy", [None, "lru", "lfu", "slru", "auto"])
def test_paging_gives_the_same_ids(
    tiny_artifact: Path, resident: dict[str, Any], least: int, policy: str | None
) -> None:
    options = [] if policy is None else ["--cache-policy", policy]
    found = answer(tiny_artifact, "--expert-cache", str(least), *options)
    assert found["ids"] == resident["ids"]
    assert resident["cache"] is None
    cache = found["cache"]
    assert cache["paging"] is True
    assert cache["policy"] == (policy or "auto")
    assert cache["slots"] == 4
    for phase in ("prefill", "decode"):
        counts = cache[phase]
        met = ("hits", "warm_hits", "prefetched", "compulsory", "misses")
        assert sum(counts[name] for name in met) == counts["distinct"] > 0
        assert counts["evictions"] > 0
        assert sum(counts["shares"].values()) == pytest.approx(1)
        assert all(share > 0 for share in counts["shares"].values())
        assert 0 < counts["read_p50_us"] <= counts["read_p99_us"]
    reads = cache["reads"]
    demanded = sum(cache[phase]["bytes"] for phase in ("prefill", "decode"))
    assert reads["bytes_read"] == demanded + cache["prefetch"]["bytes"]
    assert reads["reads_checked"] == reads["reads"] > 0
    assert 0 < reads["read_p50_us"] <= reads["read_p99_us"]


def test_statistics_of_paging(tiny_artifact: Path, least: int, tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    result = run(tiny_artifact, "--expert-cache", str(least), "--stats", str(stats), "-v")
    assert result.exit_code == 0, result.output
    for phase in ("prefill", "decode"):
        (line,) = (x for x in result.stderr.splitlines() if x.startswith(f"experts, {phase}: "))
        for word in ("in memory", "first uses", "misses", "evictions", "read", "% io", "% rest"):
            assert word in line
    assert "expert reads: " in result.stderr
    assert "expert cache: 4 slots a layer by auto, 1.87 MB of which " in result.stderr
    (line,) = (x for x in result.stderr.splitlines() if x.startswith("loading: open "))
    for part in ("open", "audit", "dense", "tables", "pools", "first kernel"):
        assert f"{part} 0." in line or f"{part} 1." in line
    assert json.loads(stats.read_text(encoding="utf-8"))["cache"]["paging"] is True
    assert run(tiny_artifact, "--expert-cache", str(least), "-q").stderr == ""


@pytest.mark.parametrize("size", ["auto", "1GiB"])
def test_what_fits_is_not_paged_and_said_so(
    tiny_artifact: Path, resident: dict[str, Any], size: str
) -> None:
    result = run(tiny_artifact, "--json", "--ignore-eos", "--expert-cache", size)
    assert "all 16 experts of every layer fit: paging is off" in result.stderr
    document = json.loads(result.stdout)
    assert document["ids"] == resident["ids"]
    assert document["cache"] == {"paging": False}


@pytest.mark.parametrize("size", ["0", "1", "4kB"])
def test_a_cache_below_the_minimum_names_it(tiny_artifact: Path, least: int, size: str) -> None:
    text = refused(tiny_artifact, "--expert-cache", size)
    assert f"at least {least:,} bytes" in text
    assert "4 slots in every layer" in text


def test_a_cache_larger_than_memory_names_both(tiny_artifact: Path) -> None:
    text = refused(tiny_artifact, "--expert-cache", "100TB")
    assert text.startswith(f"ds4q: error: {tiny_artifact}: the expert cache is larger than memory")
    assert "larger than memory: expected at most " in text
    assert "100,000,000,000,000" in text


def test_receipts(tiny_artifact: Path, least: int, tmp_path: Path) -> None:
    bare = tmp_path / "bare.hfq"
    shutil.copy(tiny_artifact, bare)
    size = ["--expert-cache", str(least)]
    result = run(bare, *size)
    assert result.exit_code == 0
    assert result.stderr.count("no receipt") == 1
    assert "(0 checked)" in result.stderr
    assert run(bare).stderr.count("no receipt") == 1
    for given in (size, ["--expert-cache", "1GiB"], []):  # paged or not
        assert "receipt" in refused(bare, *given, "--require-receipt")
    assert answer(tiny_artifact, *size, "--require-receipt")["cache"]["reads"]["reads_checked"] > 0
    unchecked = answer(tiny_artifact, *size, "--no-check-reads")["cache"]["reads"]
    assert unchecked["reads_checked"] == 0 < unchecked["reads"]


@pytest.mark.parametrize("rank", [0, 1])
def test_hot_only(tiny_artifact: Path, resident: dict[str, Any], least: int, rank: int) -> None:
    owner = ["--expert-owner", f"{rank}/2"]
    hot = answer(tiny_artifact, *owner, "--cold", "none")
    assert hot["cache"] is None
    assert hot["ids"] != resident["ids"]
    assert answer(tiny_artifact, *owner, "--expert-cache", str(least))["ids"] == hot["ids"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--expert-owner", "16/17", "--cold", "none"],
            "rank 16 of 17 owns no expert: every layer",
        ),
        (["--expert-owner", "16/17", "--expert-cache", "1GB"], "at most 16 ranks, found 17 ranks"),
        (["--tensor-parallel", "2"], "there are no ranks yet"),
        (["--tensor-parallel", "2", "--expert-cache", "auto"], "guard goes when"),
        (["--device", "cpu,hip"], "layers routed over several devices (cpu, hip)"),
    ],
)
def test_refusals(tiny_artifact: Path, arguments: list[str], says: str) -> None:
    assert says in refused(tiny_artifact, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--expert-cache", "much"],
        ["--expert-owner", "2/2"],
        ["--expert-owner", "1"],
        ["--cold", "cpu"],
        ["--cache-policy", "fifo"],
        ["--tensor-parallel", "0"],
        ["--device", "cpu,tpu"],
        ["--prefetch-top", "0"],
    ],
)
def test_usage(tiny_artifact: Path, arguments: list[str]) -> None:
    result = run(tiny_artifact, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert arguments[0] in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cache-policy", "lru"], "--cache-policy belongs to --expert-cache"),
        (["--cache-profile", "p"], "--cache-profile belongs to --expert-cache"),
        (["--prefetch", "p"], "--prefetch belongs to --expert-cache"),
        (["--prefetch-top", "2", "--expert-cache", "3MB"], "--prefetch-top belongs to --prefetch"),
        (["--trace-states"], "--trace-states belongs to --trace"),
        (["--cold", "none"], "--cold belongs to --expert-owner"),
        (["--expert-owner", "0/2"], "--expert-owner needs --cold none"),
        (
            ["--expert-owner", "0/2", "--cold", "none", "--cache-policy", "lru"],
            "--cache-policy is for experts that are paged, not --cold none",
        ),
        (
            ["--require-receipt", "--no-check-reads"],
            "--require-receipt and --no-check-reads exclude each other",
        ),
        (["--trace", "X", "--stats", "X"], "--stats and --trace name the same file"),
        (["--trace", "X", "--stats", "./Y/../X"], "--stats and --trace name the same file"),
    ],
)
def test_an_option_without_what_it_belongs_to(
    arguments: list[str],
    says: str,
    tiny_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "Y").mkdir()
    monkeypatch.chdir(tmp_path)
    result = run(tiny_artifact, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["Y"]


def test_one_rank_is_as_none(tiny_artifact: Path, resident: dict[str, Any]) -> None:
    assert answer(tiny_artifact, "--tensor-parallel", "1")["ids"] == resident["ids"]


def test_a_trace_and_what_it_may_replace(
    tiny_artifact: Path, resident: dict[str, Any], least: int, tmp_path: Path
) -> None:
    path = tmp_path / "run.trace"
    size = ["--expert-cache", str(least), "--cache-policy", "lfu"]
    for _ in range(2):  # an earlier trace is replaced
        found = answer(tiny_artifact, *size, "--trace", str(path))
        assert found["ids"] == resident["ids"]
    trace = read_trace(path)
    assert (trace.header.policy, trace.header.slots) == ("lfu", 4)
    asked = sum(len(band.distinct) for band in trace.bands())
    assert asked == sum(found["cache"][phase]["distinct"] for phase in ("prefill", "decode"))
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    result = run(tiny_artifact, "--trace", str(other))
    assert (result.exit_code, other.read_text()) == (2, "mine")
    assert "--trace" in result.stderr


def test_a_read_error_is_one_line_after_what_was_said(
    tiny_artifact: Path, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, left = os.preadv, [1500]  # probes of the page cache are reads, too

    def flaky(fd: int, buffers: Any, *rest: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return honest(fd, buffers, *rest)

    monkeypatch.setattr(os, "preadv", flaky)
    result = run(tiny_artifact, "-q", "--ignore-eos", "--expert-cache", str(least))
    assert result.exit_code == 1
    assert result.stdout
    assert result.stderr.startswith(f"ds4q: error: {tiny_artifact}: ")
    assert result.stderr.count("\n") == 1
    assert "layers." in result.stderr
    assert os.strerror(errno.EIO) in result.stderr


HANGING = """
import itertools, os, threading
from ds4q.runtime.experts import cache, fillqueue, pager, reading

class Hanging:
    reads = itertools.count()

    def __getattr__(self, name):
        return getattr(os, name)

    def preadv(self, fd, buffers, offset, *flags):
        if not flags and next(self.reads) >= 40:
            threading.Event().wait()
        return os.preadv(fd, buffers, offset, *flags)

reading.os = Hanging()
cache.helpers_for = lambda reads: {helpers}
fillqueue.CLOSE_S = 0.1
pager.Pager.__init__.__kwdefaults__["timeout_s"] = 0.5

from ds4q.__main__ import entry
entry()
"""


@pytest.mark.parametrize("helpers", [0, 2])
def test_a_read_that_never_comes_back_ends_the_run_in_one_line(
    tiny_artifact: Path, least: int, tmp_path: Path, helpers: int
) -> None:
    script = tmp_path / "hanging.py"
    script.write_text(HANGING.replace("{helpers}", str(helpers)))
    words = [script, "run", tiny_artifact, *ASK, "-q", "--ignore-eos", "--expert-cache", least]
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"ds4q: error: {tiny_artifact}: layer ")
    assert "no read has come back for 0.5 s" in done.stderr
    assert done.stderr.count("\n") == 1


def test_files_of_another_model(
    tiny_artifact: Path, random_artifact: Path, least: int, tmp_path: Path
) -> None:
    trace, profile = tmp_path / "run.trace", tmp_path / "run.profile"
    answer(random_artifact, "--expert-cache", "3MB", "--trace", str(trace))
    made = CliRunner().invoke(main, ["cache", "profile", str(trace), "-o", str(profile)])
    assert made.exit_code == 0, made.output
    options = ["--expert-cache", "3MB", "--cache-profile", str(profile)]
    assert answer(random_artifact, *options)["cache"]["warm"]["issued"] > 0
    size = ["--expert-cache", str(least)]
    text = refused(tiny_artifact, *size, "--cache-profile", str(profile))
    assert "profile of another model" in text
    assert str(trace) in refused(tiny_artifact, *size, "--prefetch", str(trace))


def test_options_come_from_the_environment(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS4Q_RUN_EXPERT_CACHE", "1")
    assert "too small" in refused(tiny_artifact)


@pytest.fixture(scope="module")
def mixed_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ds4-random with experts of every type, of which two have decode tables."""
    made, _, metadata = mixed.encode(pack(RANDOM), "dual", "zero")
    path = tmp_path_factory.mktemp("mixed") / "mixed.hfq"
    return write(path, config_of(RANDOM), made, rocmfpx=metadata)


@pytest.mark.parametrize("rank", [0, 1])
def test_hot_only_with_decode_tables(mixed_artifact: Path, rank: int) -> None:
    owner = ["--expert-owner", f"{rank}/2"]
    hot = answer(mixed_artifact, *owner, "--cold", "none")
    paged = answer(mixed_artifact, *owner, "--expert-cache", "3MB")
    assert paged["ids"] == hot["ids"] != answer(mixed_artifact)["ids"]
    assert paged["cache"]["decode"]["evictions"] > 0


def test_prefetch_by_a_predictor(
    tiny_artifact: Path, resident: dict[str, Any], tmp_path: Path
) -> None:
    trace, predictor = tmp_path / "run.trace", tmp_path / "run.adapter"
    found = answer(tiny_artifact, "--trace", str(trace), "--trace-states", "--max-tokens", "40")
    assert found["cache"] is None
    command = ["adapter", "train", str(trace), "-o", str(predictor), "--rank", "8"]
    trained = CliRunner().invoke(main, command)
    assert trained.exit_code == 0, trained.output
    options = ["--expert-cache", "3MB", "--prefetch", str(predictor), "--prefetch-top", "2"]
    found = answer(tiny_artifact, *options)
    assert found["ids"] == resident["ids"]
    assert found["cache"]["speculative"]["issued"] > 0
    text = refused(tiny_artifact, *options[:-1], "17")
    assert "expected --prefetch-top of at most 16, found 17" in text


def test_a_rank_without_experts_is_named_on_a_device(sim: Control, tiny_artifact: Path) -> None:
    text = refused(tiny_artifact, "--device", "hip", "--expert-owner", "16/17", "--cold", "none")
    assert "rank 16 of 17 owns no expert: every layer has 16: expected at most 16 ranks" in text


def test_paging_on_a_device(
    sim: Control, tiny_artifact: Path, resident: dict[str, Any], least: int
) -> None:
    options = ["--max-tokens", "2", "--device", "hip", "--expert-cache", str(least)]
    found = answer(tiny_artifact, *options)
    assert found["ids"] == resident["ids"][:2]
    assert found["cache"]["paging"] is True
    assert found["cache"]["decode"]["evictions"] > 0
