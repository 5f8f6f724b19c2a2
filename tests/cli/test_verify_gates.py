"""ds4q verify --gate: what it reports, what it refuses, and when a gate does not run at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ds4q import api
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.cli import main
from ds4q.runtime.gates import Divergence, divergence, fidelity, loading, pagecache, yardstick
from ds4q.runtime.gates.forced import I64, Call, Engine
from tests.quantize import models
from tests.quantize.builders import TINY

SCORED = TINY.parent / "text" / "scored.txt"
SHORT = ["--text", str(SCORED), "--tokens", "300", "--window", "200"]


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ds4-tiny by recipe fp4-q8."""
    out = tmp_path_factory.mktemp("rounded") / "q8.hfq"
    api.quantize(TINY, out, recipe="fp4-q8", warn=lambda text: None)
    return out


def verify(*words: object) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, words)])


def checks_of(result: Result) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


# ---------------------------------------------------------------- reports


def test_divergence_is_a_check_of_the_report(tiny_artifact: Path, rounded: Path) -> None:
    words = [rounded, "--gate", "divergence", "--against", tiny_artifact, *SHORT]
    result = verify(*words, "--json")
    assert result.exit_code == 0, result.output
    assert "300 tokens; the reference's logits take 614,400 bytes in" in result.stderr
    assert json.loads(result.stdout)["ok"] is True
    checks = checks_of(result)
    assert list(checks) == ["structure", "inventory", "payload", "receipt", "divergence"]
    assert (checks["divergence"]["ok"], checks["divergence"]["judged"]) == (None, False)
    figures = checks["divergence"]["figures"]
    for name in ("kl", "top1", "nats", "nats_ref", "nats_diff"):
        assert isinstance(figures[name], float)
        assert isinstance(figures[f"{name}_se"], float)
    assert (figures["tokens"], figures["windows"], figures["failures"]) == (300, 2, 0)
    assert 0 < figures["kl"] < 0.02
    quiet = verify(*words, "--quiet")
    assert (quiet.exit_code, quiet.stderr) == (0, "")
    (line,) = [line for line in quiet.stdout.splitlines() if line.startswith("divergence")]
    assert f"kl {figures['kl']:.6g}, kl_se" in line
    assert "measured, not judged" in line
    assert quiet.stdout.splitlines()[-1].endswith(": ok; divergence measured, not judged")


def test_gates_run_in_their_order_and_reach_junit(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "FAST_IDENTIFIERS", 3)
    xml = tmp_path / "r.xml"
    result = verify(
        *(tiny_artifact, "--gate", "fidelity", "--gate", "divergence", "--gate", "fidelity"),
        *("--against", tiny_artifact, *SHORT, "--fast", "--junit", xml, "--json"),
    )
    assert result.exit_code == 0, result.output
    checks = checks_of(result)
    assert list(checks)[-2:] == ["fidelity", "divergence"]
    figures = checks["fidelity"]["figures"]
    assert (figures["exact"], figures["of"], figures["fast"]) == (3, 3, True)
    assert checks["divergence"]["figures"]["kl"] == 0
    (suite,) = ElementTree.parse(xml).getroot()
    assert [case.get("name") for case in suite][-2:] == ["fidelity", "divergence"]
    assert [outcome.tag for case in suite for outcome in case] == ["skipped"]
    assert suite.get("skipped") == "1"


def test_a_limit_that_is_missed_is_exit_1(tiny_artifact: Path, rounded: Path) -> None:
    words = [rounded, "--gate", "divergence", "--against", tiny_artifact, *SHORT]
    result = verify(*words, "--max-kl", "1e-9", "--min-top1", "1")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()[-2:]
    assert lines[0].startswith("divergence: kl is too large: expected at most 1e-09, found 0.0")
    assert lines[1].startswith("divergence: top1 is too low: expected at least 1.0, found 0.9")
    assert verify(*words, "--max-kl", "1", "--min-top1", "0.5").exit_code == 0


def test_misses_are_listed_as_failures(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"test_name_o0{number:03}" for number in range(200)]
    spoilt = [name.replace("o0", "00") for name in names[:3]] + names[3:]
    monkeypatch.setattr(fidelity, "_choose", lambda *_: fidelity.Drawn(names, 215, 5))
    for repeat, answers in (("fresh_process", spoilt), ("after_another", names)):
        monkeypatch.setattr(fidelity, f"_{repeat}", lambda *_, answers=answers: answers)
    monkeypatch.setattr(fidelity, "_smallest_cache", lambda *_: names)
    words = [tiny_artifact, "--gate", "fidelity", "--against", tiny_artifact, "--json"]
    result = verify(*words)
    assert result.exit_code == 1
    check = checks_of(result)["fidelity"]
    assert (check["figures"]["exact"], check["figures"]["drawn"]) == (197, 215)
    found = [(f["expected"], f["found"]) for f in check["failures"]]
    wanted = ("a share of at least 1", "197 of 200")
    assert found == [wanted, *zip(names[:3], spoilt[:3], strict=True)]
    assert verify(*words, "--min-exact", "0.985").exit_code == 0
    assert verify(*words, "--min-exact", "0.986").exit_code == 1
    measured = verify(*words, "--min-exact", "0")
    assert measured.exit_code == 0
    assert checks_of(measured)["fidelity"]["ok"] is None


def test_neutrality_is_a_check_of_the_report(random_artifact: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"ids": [5, 6, 7]}\n', encoding="utf-8")
    words = [random_artifact, "--gate", "neutrality", "--tokens", "6", "--prompts", prompts]
    result = verify(*words, "--cache-policy", "lru", "--cache-policy", "lfu", "--fast", "--json")
    assert result.exit_code == 0, result.output
    assert "1 prompts, 6 new tokens an arm" in result.stderr
    figures = checks_of(result)["neutrality"]["figures"]
    assert (figures["equal"], figures["of"], figures["layers"]) == (18, 18, 3)
    assert list(figures["arms"]) == ["fits", "thrashes (lru)", "thrashes (lfu)"]
    assert list(figures["layer_kinds"]) == ["0", "1", "2"]
    (note,) = figures["notes"]
    assert note.startswith("fast: only 3 of 6 layers ran, one of each kind: ")


@pytest.mark.slow
def test_load_time_is_a_check_of_the_report(random_artifact: Path) -> None:
    words = [random_artifact, "--gate", "load-time", "--runs", "1"]
    result = verify(*words, "--json")
    assert result.exit_code == 0, result.output
    figures = checks_of(result)["load-time"]["figures"]
    assert (figures["bytes"], figures["runs"]) == (random_artifact.stat().st_size, 1)
    assert figures["ratio"] > 0 < figures["seconds"]


def test_a_baseline_keeps_ids_and_an_undecided_verdict_has_its_own_word(
    random_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids that are kept, and those that are compared first, come from real loads.

    The times are made up, and so are the loads of the busy machine.
    """
    real, first = loading.measure, {}
    busy = 1.0

    def measure(path: Path, **options: Any) -> loading.Load:
        key = str(options["cache"])
        if key not in first or (options["prompts"] and busy == 1):
            first[key] = real(path, **options)
        return first[key]._replace(seconds=3.0 * busy)

    monkeypatch.setattr(loading, "measure", measure)
    monkeypatch.setattr(yardstick, "timed_read", lambda path, reads: (2.9, True))
    monkeypatch.setattr(
        yardstick, "fixed_work", lambda: yardstick.Work(0.1 * busy, 0.2 * busy, 1 / busy)
    )
    monkeypatch.setattr(pagecache, "drop", lambda path: True)
    baseline, gate = tmp_path / "b.json", [random_artifact, "--gate", "load-time"]
    result = verify(*gate, "--write-baseline", baseline, "--json")
    assert result.exit_code == 0, result.output
    kept = json.loads(baseline.read_bytes())
    assert (kept["format"], kept["schema_version"]) == ("ds4q load-time baseline", 2)
    assert {name: len(ids) for name, ids in kept["ids"].items()} == {"benchmark": 32, "free": 32}
    result = verify(*gate, "--baseline", baseline, "--json")
    figures = checks_of(result)["load-time"]["figures"]
    assert (result.exit_code, figures["outcome"], figures["ids"]) == (0, "pass", "compared")
    busy = 2.0
    result = verify(*gate, "--baseline", baseline, "--json")
    check = checks_of(result)["load-time"]
    assert (result.exit_code, check["ok"]) == (1, False)
    assert check["figures"]["outcome"] == "undecided"
    text = verify(*gate, "--baseline", baseline)
    assert text.exit_code == 1
    assert text.stdout.splitlines()[-1].endswith(": UNDECIDED")
    assert "load-time: undecided: the machine is too noisy: off: load time to that" in text.stderr


# ---------------------------------------------------------------- faults


def test_a_forced_list_shifted_by_one_makes_verify_fail(
    tiny_artifact: Path, rounded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artifact's arm reads the token before the one that it should: red, not a worse figure."""
    honest, runs = divergence.forced_calls, 0

    def late(engine: Engine, windows: Sequence[I64]) -> Iterator[Call]:
        nonlocal runs
        runs += 1
        shifted = [np.concatenate((window[:1], window[:-1])) for window in windows]
        return honest(engine, windows if runs == 1 else shifted)

    monkeypatch.setattr(divergence, "forced_calls", late)
    result = verify(rounded, "--gate", "divergence", "--against", tiny_artifact, *SHORT, "--json")
    assert result.exit_code == 1
    check = checks_of(result)["divergence"]
    assert not check["ok"]
    (failure,) = check["failures"]
    assert "fed another token than the forced one" in failure["message"]
    assert failure["expected"].endswith("at window 0 position 1")
    assert "kl" not in check["figures"]


@pytest.mark.parametrize(
    ("gate", "lacking"),
    [("divergence", "--against"), ("divergence", "--text"), ("fidelity", "--against")],
)
def test_a_file_that_is_not_there_is_a_failed_check(
    gate: str, lacking: str, tiny_artifact: Path, tmp_path: Path
) -> None:
    words = {"--against": tiny_artifact} | ({"--text": SCORED} if gate == "divergence" else {})
    words[lacking] = tmp_path / "gone"
    options = [word for pair in words.items() for word in pair]
    result = verify(tiny_artifact, "--gate", gate, *options, "--json")
    assert result.exit_code == 1
    failed = [check for check in checks_of(result).values() if not check["ok"]]
    assert [check["name"] for check in failed] == [gate]
    assert failed[0]["failures"][0]["message"] == f"{words[lacking]}: No such file or directory"


@pytest.mark.parametrize("gate", ["divergence", "fidelity"])
def test_a_partial_artifact_fails_by_name(gate: str, tiny_artifact: Path, tmp_path: Path) -> None:
    models.run(models.mini(tmp_path / "source"), tmp_path / "x.hfq")
    words = ["--text", SCORED] if gate == "divergence" else []
    result = verify(tmp_path / "x.hfq", "--gate", gate, "--against", tiny_artifact, *words)
    assert result.exit_code == 1
    assert f"{gate}: the artifact holds only part of a model" in result.stderr


@pytest.mark.parametrize("gate", ["divergence", "fidelity"])
def test_a_draft_fails_by_name(gate: str, random_artifact: Path) -> None:
    draft = random_artifact.with_name("ds4-random-dspark.hfq")
    words = ["--text", SCORED] if gate == "divergence" else []
    result = verify(draft, "--gate", gate, "--against", random_artifact, *words)
    assert result.exit_code == 1
    assert f"{gate}: this is the draft part of a model" in result.stderr


def test_gates_do_not_run_on_an_unsound_structure(tiny_artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.hfq"
    shutil.copy(tiny_artifact, path)
    with path.open("ab") as file:
        file.write(b"x")
    gate = Divergence(tiny_artifact, [SCORED], tokens=10)
    report = api.verify(path, gates=[gate])
    assert [check.name for check in report.checks] == ["structure", "inventory"]
    assert not report.ok


# ---------------------------------------------------------------- told before anything is read


@pytest.fixture(scope="module")
def of_another(random_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that were made of ds4-random, and of files that are broken."""
    folder = tmp_path_factory.mktemp("another")
    trace = folder / "trace"
    ran = ["--prompt-ids", "1,2,3,4,5", "--max-tokens", "3", "--trace-states", "--trace", trace]
    for words in (
        ["run", random_artifact, "--expert-cache", "3MB", *ran],
        ["adapter", "train", trace, "-o", folder / "adapter"],
        ["cache", "profile", trace, "-o", folder / "profile"],
    ):
        made = CliRunner().invoke(main, list(map(str, words)))
        assert made.exit_code == 0, made.output
    seconds = {name: [1.0] * 7 for name in ("load_s", "read_s", "one_s", "all_s")}
    arm = {"series": seconds, "reads": 1, "bytes": 1}
    kept: dict[str, Any] = {
        **{"format": "ds4q load-time baseline", "schema_version": 2, "state": {"artifact": "x"}},
        **{"numerics": 1, "prompts_version": 1, "ids": {"benchmark": [1], "free": [1]}},
        "arms": {"off": arm, "all": arm, "paged": arm},
    }
    (folder / "baseline").write_text(json.dumps(kept))
    (folder / "old").write_text(json.dumps({"format": "ds4q load-time baseline 1", "arms": {}}))
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "broken").write_text('{"text": "fine"}\n{"text"')
    arm["reads"] = float("inf")
    (folder / "infinite").write_text(json.dumps(kept))
    with (folder / "large").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    return folder


GONE = "No such file or directory"
REFUSED = [
    ("neutrality", "--prefetch gone", GONE),
    ("neutrality", "--prefetch broken", "not an expert predictor"),
    ("neutrality", "--prefetch adapter", "expert predictor of another "),
    ("neutrality", "--prompts gone", GONE),
    ("neutrality", "--prompts broken", "broken, line 2: not JSON"),
    ("neutrality", "--prompts large", "large: file is too long: expected at most 67,108,864 bytes"),
    ("neutrality", "--prompts pipe", "pipe: not a regular file: found a named pipe"),
    ("neutrality", "--prefetch pipe", "pipe: not a regular file: found a named pipe"),
    ("neutrality", "--cache 1", "leave it out for the smallest: expected at least 1,8"),
    ("neutrality", "--cache 100TB", "leave it out for the smallest: expected at most "),
    ("neutrality", "--cache 1GB", "not exercised: the cache holds all 16 experts of every layer"),
    ("neutrality", "--fast --cache 7MB", "not exercised: the cache holds all 16 experts"),
    ("load-time", "--cache 1", "leave it out for the smallest: expected at least 1,8"),
    ("load-time", "--cache 100TB", "leave it out for the smallest: expected at most "),
    ("load-time", "--cache 1GB", "not exercised: the cache holds all 16 experts of every layer"),
    ("load-time", "--baseline gone", GONE),
    ("load-time", "--baseline broken", "not a baseline of load times"),
    ("load-time", "--baseline infinite", "a damaged baseline of load times"),
    ("load-time", "--baseline old", "a baseline of another version of ds4q"),
    ("load-time", "--baseline large", "large: file is too long: expected at most 1,048,576 bytes"),
    ("load-time", "--baseline pipe", "pipe: not a regular file: found a named pipe"),
    ("load-time", "--cache-profile pipe", "pipe: not a regular file: found a named pipe"),
    ("load-time", "--baseline baseline", "the baseline was measured with another artifact"),
    ("load-time", "--cache-profile folder", "folder: not a regular file: found a folder"),
    ("load-time", "--cache-profile broken", "not a warm-start profile"),
    ("load-time", "--cache-profile profile", "profile of another model"),
    ("divergence", "--text gone", GONE),
    ("divergence", "--text pipe", "pipe: not a regular file: found a named pipe"),
    ("fidelity", "", "the reference is not lossless"),
]


@pytest.mark.parametrize(("gate", "options", "says"), REFUSED)
def test_what_cannot_run_is_told_before_a_tensor_is_read(
    gate: str,
    options: str,
    says: str,
    tiny_artifact: Path,
    rounded: Path,
    of_another: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(of_another)
    seen = watched(tiny_artifact, monkeypatch)
    words: list[object] = ["--gate", gate, *options.split()]
    if gate in ("divergence", "fidelity"):
        words += ["--against", rounded if gate == "fidelity" else tiny_artifact]
    result = verify(tiny_artifact, *words)
    assert result.exit_code == 1, result.output
    table = [line.split()[0] for line in result.stdout.splitlines()]
    assert table == ["check", "structure", "inventory", gate, f"{gate}:", f"{tiny_artifact}"]
    (line,) = result.stderr.splitlines()
    assert says in line
    assert "--expert-cache" not in line
    assert ("--cache" in line) == ("--cache " in options)
    assert f"{gate}: {api.NOTHING_READ}" in result.stdout
    assert seen() == 0


def test_one_gate_that_cannot_run_holds_up_the_others(
    tiny_artifact: Path, of_another: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watched(tiny_artifact, monkeypatch)
    words = ["--gate", "neutrality", "--gate", "load-time", "--baseline", of_another / "broken"]
    result = verify(tiny_artifact, *words, "--json")
    assert list(checks_of(result)) == ["structure", "inventory", "load-time"]
    assert seen() == 0
    assert verify(tiny_artifact).exit_code == 0
    assert seen() >= sum(entry.nbytes for entry in entries_of(tiny_artifact)), "it is watched"


def entries_of(path: Path) -> list[TensorEntry]:
    with Reader(path) as reader:
        return list(reader.tensors.values())


def watched(path: Path, patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Bytes of tensors of ``path`` that this process has read from now on."""
    first = min(entry.offset for entry in entries_of(path))
    for name in loading.Reads.CALLS:
        patch.setattr(os, name, getattr(os, name))  # so that it is put back
    reads = loading.Reads(str(path))
    reads.watch()
    return lambda: sum(max(0, at + n - max(at, first)) for at, n, _ in reads.take())


# ---------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gate", "divergence", "--text", "t"], "needs --against"),
        (["--gate", "fidelity"], "needs --against"),
        (["--gate", "divergence", "--against", "r"], "needs --text"),
        (["--against", "r"], "--against belongs to --gate divergence or fidelity"),
        (["--gate", "neutrality", "--against", "r"], "--against belongs to --gate divergence or"),
        (["--text", "t"], "--text belongs to --gate divergence"),
        (["--gate", "fidelity", "--against", "r", "--text", "t"], "--text belongs to"),
        (["--gate", "fidelity", "--against", "r", "--tokens", "5"], "--tokens belongs to"),
        (["--tokens", "5"], "--tokens belongs to --gate divergence or neutrality"),
        (["--gate", "fidelity", "--against", "r", "--max-kl", "0"], "--max-kl belongs to"),
        (["--window", "64"], "--window belongs to --gate divergence"),
        (["--min-exact", "0"], "--min-exact belongs to --gate fidelity"),
        (["--gate", "fidelity", "--against", "r", "--min-exact", "57"], "--min-exact"),
        (["--gate", "divergence", "--max-kl", "nan"], "nan is not a number"),
        (["--gate", "load-time", "--timeout", "inf"], "inf is not in the range"),
        (["--gate", "divergence", "--max-kl", "-1"], "--max-kl"),
        (["--gate", "divergence", "--min-top1", "1.5"], "--min-top1"),
        (["--gate", "divergence", "--tokens", "0"], "--tokens"),
        (["--gate", "divergence", "--window", "1"], "--window"),
        (["--gate", "neutral"], "'neutral' is not one of 'divergence', 'fidelity', 'neutrality', "),
        (["--gate", "neutrality", "--cache", "much"], "--cache"),
        (["--gate", "neutrality", "--cache-policy", "fifo"], "--cache-policy"),
        (["--gate", "load-time", "--fast"], "--fast belongs to --gate fidelity or neutrality"),
        (["--cache", "1GB"], "--cache belongs to --gate neutrality or load-time"),
        (["--cache-policy", "lru"], "--cache-policy belongs to --gate neutrality"),
        (["--prefetch", "a"], "--prefetch belongs to --gate neutrality"),
        (["--prompts", "p"], "--prompts belongs to --gate neutrality"),
        (["--gate", "neutrality", "--baseline", "b"], "--baseline belongs to --gate load-time"),
        (
            ["--gate", "neutrality", "--cache-profile", "b"],
            "--cache-profile belongs to --gate load",
        ),
        (["--write-baseline", "b"], "--write-baseline belongs to --gate load-time"),
        (["--gate", "load-time", "--max-ratio", "nan"], "nan is not a number"),
        (["--gate", "load-time", "--max-ratio", "0"], "--max-ratio"),
        (["--gate", "load-time", "--timeout", "0"], "--timeout"),
        (["--gate", "load-time", "--runs", "0"], "--runs"),
        (["--gate", "load-time", "--runs", "6", "--baseline", "b"], "--baseline needs --runs 7 or"),
        (["--gate", "load-time", "--write-baseline", "no/b.json"], "there is no folder 'no'"),
    ],
)
def test_wrong_usage_is_2(words: list[str], says: str, tiny_artifact: Path) -> None:
    result = verify(tiny_artifact, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
