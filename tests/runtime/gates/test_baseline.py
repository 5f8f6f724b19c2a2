"""A load-time baseline: verdicts by it, token ids under a version of numerics, refused files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds4q.runtime.gates import load_time
from ds4q.runtime.gates.baseline import NEW_TOKENS, PROMPTS, PROMPTS_VERSION, encoded_prompts
from ds4q.runtime.numerics import NUMERICS
from tests.runtime.gates.loads import Loads, lines


@pytest.fixture
def baseline(loads: Loads, run: Callable[..., Any], tmp_path: Path) -> Path:
    """What was written on a quiet machine."""
    path = tmp_path / "b.json"
    loads.spread = 0.01
    check = run(write_baseline=path)
    assert check.ok, lines(check)
    assert {arm["pairs"] for arm in check.figures["arms"].values()} == {14}
    loads.asked.clear()
    return path


def test_an_unchanged_load_passes_by_its_baseline(
    loads: Loads, run: Callable[..., Any], baseline: Path
) -> None:
    check = run(baseline=baseline)
    assert check.ok, lines(check)
    assert (check.figures["outcome"], check.figures["ids"]) == ("pass", "compared")
    off = check.figures["arms"]["off"]
    assert (off["outcome"], off["pairs"]) == ("pass", 7)
    assert off["slower_by"]["read_s"]["low"] < 1 < off["slower_by"]["read_s"]["high"]
    loads.plain_s = {name: 2 * seconds for name, seconds in loads.plain_s.items()}
    loads.seconds = {"off": 5, "all": 5, "paged": 2.15}
    assert run(baseline=baseline).figures["outcome"] == "pass", "the disk is slower, not the load"


def test_a_slower_load_fails_by_its_baseline(
    loads: Loads, run: Callable[..., Any], baseline: Path
) -> None:
    loads.seconds |= {"off": 3.6, "all": 3.6}
    check = run(baseline=baseline)
    assert (check.figures["outcome"], check.undecided) == ("fail", False)
    said = "load time to that of the baseline, in pairs with a plain read: expected at most 1.1"
    assert [line.partition(", found")[0] for line in lines(check)] == [
        f"{arm}: {said}" for arm in ("off", "all")
    ]
    assert run(baseline=baseline, max_ratio=1.3).ok


def test_a_machine_that_is_too_noisy_leaves_it_undecided(
    loads: Loads, run: Callable[..., Any], baseline: Path
) -> None:
    loads.processor, loads.share = 2, 0.5  # two others on two processors
    loads.seconds = {name: 1.5 * seconds for name, seconds in loads.seconds.items()}
    check = run(baseline=baseline, write_baseline=baseline.with_name("new.json"))
    assert (check.ok, check.undecided, check.figures["outcome"]) == (False, True, "undecided")
    assert {arm["outcome"] for arm in check.figures["arms"].values()} == {"undecided"}
    assert all("undecided: the machine is too noisy" in line for line in lines(check))
    assert len(loads.asked) == 3 * (1 + 14 + 7), "as often again before it gives up"
    assert any("took 50% of the processors" in note for note in check.notes)
    assert not baseline.with_name("new.json").exists()


def test_what_is_red_is_not_called_undecided(
    loads: Loads, run: Callable[..., Any], baseline: Path
) -> None:
    loads.processor = 2
    loads.later["off"] = loads.reads["off"][:1]
    check = run(baseline=baseline)
    assert (check.undecided, check.figures["outcome"]) == (False, "fail")


def test_calls_and_bytes_are_held_to_the_baseline(run: Callable[..., Any], baseline: Path) -> None:
    before = json.loads(baseline.read_bytes())
    before["arms"]["all"]["reads"] += 1
    baseline.write_text(json.dumps(before))
    assert lines(run(baseline=baseline)) == [
        "all: reads of a load are not the baseline's: expected 308, found 307"
    ]


def test_without_a_baseline_a_ratio_is_to_the_plain_read(
    loads: Loads, run: Callable[..., Any]
) -> None:
    check = run(max_ratio=1.5)
    assert (check.ok, check.figures["outcome"]) == (True, "pass")
    check = run(max_ratio=1.4)
    said = "load time to that of the plain read, in pairs with a plain read"
    assert lines(check) == [
        f"{arm}: {said}: expected at most 1.4, found 1.5 to 1.5 in {count} pairs"
        for arm, count in (("off", 14), ("all", 14))
    ]
    loads.share = 0.5
    assert run(max_ratio=1.4).figures["outcome"] == "undecided"


@pytest.mark.parametrize("option", ["baseline", "write_baseline", "max_ratio"])
def test_a_verdict_needs_seven_pairs(
    option: str, loads: Loads, run: Callable[..., Any], tmp_path: Path
) -> None:
    value = 2 if option == "max_ratio" else tmp_path / "b.json"
    (line,) = lines(run(**{option: value}, runs=6))
    assert line.startswith("too few loads for a verdict on their time; leave out --runs: expected")
    assert loads.asked == []


def test_a_run_that_fails_is_no_baseline(
    loads: Loads, run: Callable[..., Any], tmp_path: Path
) -> None:
    loads.seconds["paged"] = 9
    check = run(write_baseline=tmp_path / "b.json")
    assert not (tmp_path / "b.json").exists()
    assert any("was not written: the gate did not pass" in note for note in check.notes)


# ---------------------------------------------------------------- token ids


def test_other_token_ids_fail_by_prompt_and_position(
    loads: Loads, run: Callable[..., Any], baseline: Path
) -> None:
    assert json.loads(baseline.read_bytes())["numerics"] == NUMERICS
    loads.ids[1][5] = 9
    check = run(baseline=baseline)
    assert lines(check) == [
        "prompt 'free': other token ids than in the baseline from new token 5 on: "
        "expected 2, found 9"
    ]
    (asked,) = [options for _, options in loads.asked if options["prompts"]]
    assert (len(asked["prompts"]), asked["new_tokens"], asked["cache"]) == (2, NEW_TOKENS, None)


@pytest.mark.parametrize(
    ("key", "what"), [("numerics", "numerics"), ("prompts_version", "prompts")]
)
def test_ids_of_another_version_are_not_compared(
    key: str, what: str, loads: Loads, run: Callable[..., Any], baseline: Path
) -> None:
    before = json.loads(baseline.read_bytes())
    baseline.write_text(json.dumps(before | {key: 99}))
    loads.ids[1][5] = 9
    check = run(baseline=baseline)
    assert (check.ok, check.figures["ids"]) == (True, "not compared")
    what = key.removesuffix("_version")
    assert f"token ids were not compared: the baseline has version 99 of {what}" in check.notes[0]


def test_prompts_are_fixed_and_leave_room_for_new_tokens() -> None:
    seeded = encoded_prompts(None, 512, 1000)
    assert seeded == encoded_prompts(None, 512, 1000)
    assert [len(ids) for ids in seeded.values()] == [16, 16]
    assert seeded["benchmark"] != seeded["free"]
    assert [len(ids) for ids in encoded_prompts(None, 512, 40).values()] == [8, 8]
    digest = hashlib.sha256(json.dumps([PROMPTS, NEW_TOKENS]).encode()).hexdigest()
    assert (PROMPTS_VERSION, digest[:16]) == (1, "6f1a8da38f85b3b2"), (
        "raise PROMPTS_VERSION with the texts"
    )


# ---------------------------------------------------------------- files that are refused


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a baseline of load times"),
        ("[]", "not a baseline of load times"),
        ('{"format": "other", "schema_version": 2}', "not a baseline of load times"),
        ('{"format": "ds4q load-time baseline 1"}', "a baseline of another version of ds4q"),
        ('{"format": "ds4q load-time baseline", "schema_version": 3}', "another version of ds4q"),
        ('{"format": "ds4q load-time baseline", "schema_version": 2}', "a damaged baseline"),
    ],
)
def test_what_is_no_baseline_is_refused(
    text: str, says: str, loads: Loads, run: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    (line,) = lines(run(baseline=path))
    assert says in line
    assert "write a new one with --write-baseline" in line
    assert loads.asked == [], "before any load"


def damage(where: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *folders, name = where.split(".")

    def change(document: dict[str, Any]) -> None:
        for folder in folders:
            document = document[folder]
        document[name] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        damage("arms.off.series.load_s", [1.0] * 6),
        damage("arms.off.series.load_s", [1.0] * 13 + [0.0]),
        damage("arms.off.series.read_s", [float("nan")] * 14),
        damage("arms.off.reads", float("inf")),
        damage("arms.more", {}),
        damage("ids", {}),
        damage("ids.free", ["1"]),
        damage("numerics", "1"),
        damage("state", 5),
    ],
)
def test_a_damaged_baseline_is_refused(
    change: Callable[[dict[str, Any]], None], run: Callable[..., Any], baseline: Path
) -> None:
    document = json.loads(baseline.read_bytes())
    change(document)
    baseline.write_text(json.dumps(document))
    assert "a damaged baseline of load times" in lines(run(baseline=baseline))[0]


@pytest.mark.parametrize("key", ["artifact", "device", "threads", "cold"])
def test_a_baseline_of_something_else_is_refused(
    key: str, run: Callable[..., Any], baseline: Path
) -> None:
    document = json.loads(baseline.read_bytes())
    document["state"][key] = "another"
    baseline.write_text(json.dumps(document))
    assert f"the baseline was measured with another {key}" in lines(run(baseline=baseline))[0]


def test_a_baseline_of_another_payload_is_refused_where_receipts_tell(
    run: Callable[..., Any], baseline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_time, "_sha256", lambda path: "b" * 64)
    assert run(baseline=baseline).ok, "it was written without a receipt"
    document = json.loads(baseline.read_bytes())
    document["state"]["sha256"] = "a" * 64
    baseline.write_text(json.dumps(document))
    assert "the baseline was measured with another sha256" in lines(run(baseline=baseline))[0]
