"""ds4q cache: prices of a trace, its profile, and one line for what cannot be read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ds4q.artifact.hfq import Reader
from ds4q.cli import main
from ds4q.runtime.experts.profile import read_profile
from ds4q.runtime.experts.trace import artifact_identity
from tests.quantize.page.pages import Page
from tests.runtime.experts import streams

LAYERS, EXPERTS, K, SLOTS = 2, 32, 3, 6
SLOT = 12 * LAYERS  # bytes of a slot in every layer


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    made = streams.header(experts=EXPERTS, top_k=K, slots=SLOTS, policy="slru")
    ids = streams.skewed(1, LAYERS, 60, EXPERTS, K)
    return streams.record(tmp_path / "run.trace", ids, made, prompt=10)


def ds4q(*words: object) -> Result:
    return CliRunner().invoke(main, ["cache", *map(str, words)])


def replay(*words: object) -> dict[str, Any]:
    result = ds4q("replay", *words, "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_the_run_comes_first_and_then_every_policy_at_every_budget(trace: Path) -> None:
    budgets = ["--budget", 4 * SLOT, "--budget", f"{8 * SLOT + 5}B", "--budget", "1GiB"]
    found = replay(trace, *budgets, "--policy", "lfu:0.9", "--policy", "slru")
    assert found["tokens"] == {"prefill": 10, "decode": 50}
    run = found["run"]
    assert (run["policy"], run["slots"]) == ("slru", SLOTS)
    assert run["counters"]["decode"]["distinct"] == 50 * K * LAYERS
    rows = [(row["slots"], row["policy"]) for row in found["replays"]]
    assert rows == [(n, p) for n in (4, 8, 32) for p in ("lfu:0.9", "slru", "belady")]
    for row in found["replays"]:
        assert row["budget_bytes"] == row["slots"] * SLOT
        assert row["bytes"] == 10 * row["reads"]
        assert row["bytes_per_token"] == row["bytes"] // 60
        assert row["reads"] >= row["compulsory"]
    assert {row["gap"] for row in found["replays"] if row["policy"] == "belady"} == {1, None}


def test_by_default_the_runs_own_budget_is_priced_and_shares_of_the_experts(trace: Path) -> None:
    rows = replay(trace)["replays"]
    assert sorted({row["slots"] for row in rows}) == [3, 6, 12]  # 1 is fewer than a token needs
    assert [row["policy"] for row in rows[:5]] == ["auto", "lru", "lfu", "slru", "belady"]


def test_the_runs_own_row_is_the_run(trace: Path) -> None:
    found = replay(trace, "--policy", "slru", "--budget", SLOTS * SLOT)
    assert found["replays"][0]["phases"] == found["run"]["counters"]


def test_people_get_a_table_and_a_page(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    result = ds4q("replay", trace, "--html", page)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "10 tokens of prompts, 50 generated; slru with 6 slots a layer" in lines[0]
    assert sum("belady" in line for line in lines) == 3
    held = Page(page.read_text("utf-8"))
    assert "ds4q cache replay" in held.text()
    assert "over LRU" in held.text()
    row = replay(trace)["replays"][0]
    assert f"{row['reads']:,}" in held.text()


def test_a_profile_is_written_and_read(trace: Path, tmp_path: Path) -> None:
    result = ds4q("profile", trace, "-o", tmp_path / "p", "--json")
    assert result.exit_code == 0, result.stderr
    made = read_profile(tmp_path / "p", streams.header().model, LAYERS, EXPERTS)
    assert json.loads(result.stdout)["digest"] == made.digest
    again = ds4q("profile", trace, "-o", tmp_path / "p")
    assert again.exit_code == 0, "an earlier profile is replaced"
    assert f"{tmp_path / 'p'}: {LAYERS} layers" in again.stdout


def test_no_other_file_is_replaced_by_a_profile(trace: Path) -> None:
    before = trace.read_bytes()
    assert ds4q("profile", trace, "-o", trace).exit_code == 2
    assert trace.read_bytes() == before


def test_the_artifact_must_be_the_traced_one(trace: Path, tiny_artifact: Path) -> None:
    result = ds4q("replay", trace, "--artifact", tiny_artifact)
    assert result.exit_code == 1
    with Reader(tiny_artifact) as reader:
        assert artifact_identity(reader) in result.stderr
    assert "trace of another artifact" in result.stderr


def test_the_traced_artifact_is_taken(trace: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    with Reader(tiny_artifact) as reader:
        made = replace(streams.header(), artifact=artifact_identity(reader))
    ids = streams.skewed(1, LAYERS, 5, 16, K)
    own = streams.record(tmp_path / "own.trace", ids, made)
    assert replay(own, "--artifact", tiny_artifact)["artifact"] == made.artifact


def test_a_budget_that_is_too_small_is_one_line(trace: Path) -> None:
    result = ds4q("replay", trace, "--budget", 2 * SLOT)
    assert result.exit_code == 1
    assert f"needs 3 slots in every layer: expected at least {3 * SLOT}" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("mru", "no such cache policy"),
        ("", "no such cache policy"),
        ("lfu:2", "bad decay of lfu"),
        ("lfu:0", "bad decay of lfu"),
    ],
)
def test_what_is_no_policy_is_wrong_usage(trace: Path, policy: str, says: str) -> None:
    result = ds4q("replay", trace, "--policy", policy)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert "--policy" in result.stderr


@pytest.mark.parametrize(("start", "stop"), [(0, 16), (16, 32)])
def test_a_ranks_trace_is_priced_by_what_the_rank_holds(
    start: int, stop: int, tmp_path: Path
) -> None:
    from dataclasses import replace

    made = replace(streams.header(experts=EXPERTS, top_k=K, slots=SLOTS), owned=(start, stop))
    ids = start + streams.skewed(1, LAYERS, 60, stop - start, K)
    path = streams.record(tmp_path / "rank.trace", ids, made)
    found = replay(path)
    assert (found["run"]["experts"], found["run"]["owned"]) == (EXPERTS, [start, stop])
    assert sorted({row["slots"] for row in found["replays"]}) == [3, 6]  # 20 % and 40 % of 16
    assert {row["slots"] for row in replay(path, "--budget", "1GiB")["replays"]} == {16}
    shown = ds4q("replay", path, "--budget", "1GiB").stdout
    assert f"6 slots a layer, of the rank with experts {start} to {stop - 1}, reprod" in shown


def test_a_rank_with_few_experts_needs_no_more_slots(tmp_path: Path) -> None:
    from dataclasses import replace

    made = replace(streams.header(experts=EXPERTS, top_k=K, slots=2), owned=(4, 6))
    ids = 4 + streams.skewed(1, LAYERS, 9, 2, 2)
    path = streams.record(tmp_path / "rank.trace", ids, made)
    assert {row["slots"] for row in replay(path, "--budget", 2 * SLOT)["replays"]} == {2}
    assert "needs 2 slots" in ds4q("replay", path, "--budget", SLOT).stderr


def test_a_file_that_is_in_the_way_of_a_profile_stays(trace: Path, tmp_path: Path) -> None:
    mine = tmp_path / "p.partial"
    mine.write_text("mine")
    result = ds4q("profile", trace, "-o", tmp_path / "p")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{mine}: " in result.stderr
    assert "move it away, or choose another output" in result.stderr
    assert mine.read_text() == "mine"
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("command", [["replay"], ["profile", "-o", "x"]])
def test_a_trace_cut_short_is_one_line(trace: Path, command: list[str], tmp_path: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-40])
    words = [str(tmp_path / word) if word == "x" else word for word in command]
    result = ds4q(words[0], trace, *words[1:])
    assert result.exit_code == 1
    assert f"{trace}: the trace is cut short, in record" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", [["replay"], ["profile", "-o", "x"]])
def test_a_trace_is_not_read_from_a_pipe(trace: Path, command: list[str], tmp_path: Path) -> None:
    out, into = os.pipe()
    os.write(into, trace.read_bytes()[:1000])
    words = [str(tmp_path / word) if word == "x" else word for word in command]
    result = ds4q(words[0], f"/dev/fd/{out}", *words[1:])
    os.close(out)
    os.close(into)
    assert (result.exit_code, result.stdout) == (1, "")
    says = f"/dev/fd/{out}: not a regular file: found a named pipe\n"
    assert result.stderr == f"ds4q: error: {says}"
    assert not (tmp_path / "x").exists()


def test_inspect_knows_a_trace(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    result = CliRunner().invoke(main, ["inspect", str(trace), "--json", "--html", str(page)])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["kind"] == "trace"
    assert found["tokens"] == {"prefill": 10, "decode": 50}
    assert found["records"]["band"] >= 51 * LAYERS
    assert found["metadata"]["policy"] == "slru"
    assert "ds4q inspect" in Page(page.read_text("utf-8")).text()
    shown = CliRunner().invoke(main, ["inspect", str(trace)])
    assert "10 tokens of prompts, 50 generated" in shown.stdout
    trace.write_bytes(trace.read_bytes()[:-9])
    cut = CliRunner().invoke(main, ["inspect", str(trace)])
    assert cut.exit_code == 1
    assert "cut short" in cut.stderr


@pytest.mark.parametrize(
    ("at", "says"),
    [
        (0, "damaged header"),
        (5, "damaged header"),
        (9, "damaged header"),
        (18, "damaged header"),
        (60, "damaged header"),
    ],
)
@pytest.mark.parametrize("command", [["inspect"], ["cache", "replay"], ["cache", "profile", "-o"]])
def test_a_damaged_header_is_told_as_such(
    trace: Path, command: list[str], at: int, says: str, tmp_path: Path
) -> None:
    raw = trace.read_bytes()
    trace.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    words = [*command, *([str(tmp_path / "p")] if "-o" in command else []), str(trace)]
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{trace}: " in result.stderr
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
