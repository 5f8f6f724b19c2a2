"""The load-time gate: reads counted to the byte, seconds judged where a disk decides them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.artifact.hfq import Reader
from ds4q.artifact.report import Check
from ds4q.runtime.experts.profile import Profile
from ds4q.runtime.gates import LoadTime, load_time, loading
from ds4q.runtime.gates.load_time import Front
from ds4q.runtime.gates.loading import I64, Load
from tests.runtime.gates.tiny import Measure

EXPERT_BYTES = 192 * 38912  # 4 layers of 16 experts of three matrices


def reads_of(path: Path, *, experts: bool = True) -> list[list[int]]:
    """One read of the front, and one of each tensor."""
    with Reader(path) as reader:
        entries = [e for e in reader.tensors.values() if experts or ".experts." not in e.name]
        first = min(entry.offset for entry in reader.tensors.values())
        return [[0, first, 0], *([entry.offset, entry.nbytes, 0] for entry in entries)]


@dataclass
class Loads:
    """Stands in for the processes: what they read, and how long they and the disk take."""

    path: Path
    reads: dict[str, list[list[int]]]
    seconds: dict[str, float] = field(default_factory=lambda: {"off": 3, "all": 3, "paged": 1.15})
    plain_s: dict[str, float] = field(default_factory=lambda: {"off": 2, "all": 2, "paged": 1})
    later: dict[str, list[list[int]]] = field(default_factory=dict)
    paged: dict[str, Any] = field(default_factory=lambda: {"paged": {"slots": 4}})
    cold: bool = True
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    def measure(self, path: Path, **options: Any) -> Load:
        cache = options["cache"]
        name = (
            "off" if cache is None else "all" if cache.get("budget", 0) >= EXPERT_BYTES else "paged"
        )
        self.asked.append((name, options))
        self.order.append(name)
        return Load(
            self.seconds[name],
            self.seconds[name] / 2,
            self.seconds[name] + 1,
            as_reads(self.reads[name]),
            as_reads(self.later.get(name, [])),
            self.paged.get(name),
        )

    def plain_read(self, path: Path, reads: I64) -> float:
        """Of the whole file before the first load, then of what the last load read."""
        self.order.append("plain")
        if reads.tolist() == [[0, path.stat().st_size, 0]]:
            return self.plain_s["off"]
        name = self.asked[-1][0]
        assert reads.tolist() == self.reads[name]
        return self.plain_s[name]

    def drop(self, path: Path) -> bool:
        self.order.append("drop")
        return self.cold


def as_reads(rows: list[list[int]]) -> I64:
    return np.array(rows, np.int64).reshape(-1, 3)


@pytest.fixture
def loads(lossless: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    whole = reads_of(lossless)
    found = Loads(
        lossless, {"off": whole, "all": whole, "paged": reads_of(lossless, experts=False)}
    )
    monkeypatch.setattr(loading, "measure", found.measure)
    monkeypatch.setattr(load_time, "plain_read", found.plain_read)
    monkeypatch.setattr(load_time, "drop", found.drop)
    return found


@pytest.fixture
def run(loads: Loads, measure: Measure) -> Callable[..., Any]:
    """Runs the gate over ``loads``."""
    return lambda **options: measure(LoadTime(**options), loads.path)


def lines(check: Any) -> list[str]:
    return [failure.line() for failure in check.failures]


# ---------------------------------------------------------------- sound loads


def test_each_kind_is_loaded_cold_and_in_turn_beside_a_plain_read(
    loads: Loads, run: Callable[..., Any]
) -> None:
    check = run(runs=3)
    assert check.ok, lines(check)
    turn = [step for arm in ("off", "all", "paged") for step in ("drop", arm, "drop", "plain")]
    assert loads.order == ["drop", "plain", *turn, *turn, *turn]
    caches = {name: options["cache"] for name, options in loads.asked}
    assert caches == {"off": None, "all": {"budget": EXPERT_BYTES}, "paged": {"slots": 4}}
    assert {options["threads"] for _, options in loads.asked} == {2}
    figures = check.figures
    assert (figures["ratio"], figures["seconds"], figures["runs"]) == (1.5, 3, 3)
    assert figures["bytes"] == loads.path.stat().st_size
    arms = figures["arms"]
    assert [arms[name]["reads_of_experts"] for name in arms] == [192, 192, 0]
    assert arms["paged"]["bytes"] == figures["bytes"] - EXPERT_BYTES
    assert (arms["paged"]["first_token_s"], arms["paged"]["plain_s"]) == (2.15, 1)
    assert check.notes == []


def test_small_files_are_counted_and_not_timed(loads: Loads, run: Callable[..., Any]) -> None:
    loads.plain_s = {"off": 0.01, "all": 0.01, "paged": 0.01}
    loads.seconds |= {"all": 30, "paged": 30}
    check = run(runs=1)
    assert check.ok
    assert [note.partition(":")[0] for note in check.notes] == ["all", "paged"]


def test_a_file_that_stays_in_memory_is_told(loads: Loads, run: Callable[..., Any]) -> None:
    loads.cold = False
    check = run(runs=1)
    assert (check.ok, check.figures["cold"]) == (True, False)
    assert "stayed in the page cache" in check.notes[0]


# ---------------------------------------------------------------- reads


def change(
    arm: str, how: Callable[[list[list[int]], list[list[int]]], list[list[int]]]
) -> Callable[[Loads], None]:
    def apply(loads: Loads) -> None:
        loads.reads[arm] = how(loads.reads[arm], reads_of(loads.path))

    return apply


def later(arm: str) -> Callable[[Loads], None]:
    def apply(loads: Loads) -> None:
        loads.later[arm] = [reads_of(loads.path)[-1]]

    return apply


def paging(arm: str, counters: Any) -> Callable[[Loads], None]:
    def apply(loads: Loads) -> None:
        loads.paged[arm] = counters

    return apply


def expert_in(reads: list[list[int]], whole: list[list[int]]) -> list[int]:
    return next(read for read in whole if read not in reads)


FAULTS: dict[str, tuple[Callable[[Loads], None], list[str]]] = {
    "a store that touches experts while off": (
        later("off"),
        ["off: reads after the load: expected 0, found 1"],
    ),
    "an expert read twice while off": (
        change("off", lambda reads, whole: [*reads, next(r for r in reads if r[1] == 38912)]),
        [
            "off: bytes that a load reads twice: expected 0, found 38912",
            "all: reads of a load: expected 308, found 307",
            "all: bytes of a load",
        ],
    ),
    "a cache for everything that reads in smaller pieces": (
        change("all", lambda reads, whole: [*reads[:-1], *halves(reads[-1])]),
        ["all: reads of a load: expected 307, found 308"],
    ),
    "a cache for everything that pages": (
        paging("all", {"slots": 16}),
        ["all: experts are paged, though all of them fit"],
    ),
    "each expert read singly at load": (
        change("paged", lambda reads, whole: whole),
        ["paged: reads of experts by a load: expected 0, found 192"],
    ),
    "one expert too many": (
        change("paged", lambda reads, whole: [*reads, expert_in(reads, whole)]),
        ["paged: reads of experts by a load: expected 0, found 1"],
    ),
    "one expert too many, past the page cache": (
        change("paged", lambda reads, whole: [*reads, pages(expert_in(reads, whole))]),
        ["paged: reads of experts by a load: expected 0, found 1"],
    ),
    "a dense tensor that is left for later": (
        change("paged", lambda reads, whole: reads[:-1]),
        ["paged: bytes of all but experts"],
    ),
    "a small cache that pages nothing": (
        paging("paged", None),
        ["not exercised: paged: all experts are in memory"],
    ),
}


def halves(read: list[int]) -> list[list[int]]:
    offset, nbytes, direct = read
    return [[offset, nbytes // 2, direct], [offset + nbytes // 2, nbytes - nbytes // 2, direct]]


def pages(read: list[int]) -> list[int]:
    start = read[0] // 4096 * 4096
    return [start, -(-(read[0] + read[1] - start) // 4096) * 4096, 1]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_load_that_reads_something_else_is_red(
    fault: str, loads: Loads, run: Callable[..., Any]
) -> None:
    spoil, says = FAULTS[fault]
    spoil(loads)
    check = run(runs=1)
    for line in says:
        assert any(found.startswith(line) for found in lines(check)), lines(check)


def test_a_small_cache_may_begin_with_as_many_experts_of_its_profile_as_it_has_slots(
    loads: Loads, run: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "profile"
    identity = Front.read(loads.path).identity
    ranked = ((3, 9, 8, 7, 5), (), (), ())
    path.write_bytes(Profile(identity, ranked, tuple((1,) * len(ids) for ids in ranked)).encode())
    with Reader(loads.path) as reader:
        entries = {
            expert: [reader.tensors[f"layers.0.ffn.experts.{expert}.w{w}.weight"] for w in "123"]
            for expert in (*ranked[0], 4)
        }
    dense = loads.reads["paged"]

    def read(*experts: int) -> None:
        tensors = [entry for expert in experts for entry in entries[expert]]
        loads.reads["paged"] = [*dense, *([entry.offset, entry.nbytes, 0] for entry in tensors)]

    read(3, 9, 8, 7)
    check = run(runs=1, profile=path)
    assert check.ok, lines(check)
    assert loads.asked[-1][1]["cache"] == {"slots": 4, "profile": str(path)}
    for other in (5, 4):
        read(3, other)
        said = lines(run(runs=1, profile=path))
        assert said == ["paged: reads of experts by a load: expected 0, found 3"]
    read(3)
    assert lines(run(runs=1)) == ["paged: reads of experts by a load: expected 0, found 3"]


def test_what_one_run_reads_all_runs_read(
    loads: Loads, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = loads.measure

    def sometimes(path: Path, **options: Any) -> Load:
        load = honest(path, **options)
        if [name for name, _ in loads.asked] != ["off", "all", "paged", "off"]:
            return load
        loads.reads["off"] = loads.reads["off"][:-1]
        return load._replace(reads=load.reads[:-1])

    monkeypatch.setattr(loading, "measure", sometimes)
    assert "off: reads of a load: expected 307, found 306" in lines(run(runs=2))


# ---------------------------------------------------------------- seconds


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ({"paged": 1.21}, "paged: load over plain read: expected at most 1.2, found 1.21"),
        ({"all": 3.16}, "all: median seconds, 1.05 times those without a cache or their slowest"),
        ({"off": 121}, "off: seconds of a load: expected at most 120, found 121"),
    ],
)
def test_a_slow_load_is_red(
    seconds: dict[str, float], says: str, loads: Loads, run: Callable[..., Any]
) -> None:
    loads.seconds |= seconds
    assert any(line.startswith(says) for line in lines(run(runs=1)))


def test_no_load_is_faster_than_the_disk(loads: Loads, run: Callable[..., Any]) -> None:
    loads.seconds |= {"off": 210, "all": 210}
    loads.plain_s |= {"off": 200, "all": 200}
    check = run(runs=1)
    assert check.ok
    assert check.notes[0] == (
        "off: the disk cannot do it in 120 s: a plain read of the same bytes takes 200.0 s"
    )
    check = run(runs=1, timeout_s=205)
    assert [line.partition(":")[0] for line in lines(check)] == ["off", "all"]


def test_ratios_are_held_to_a_baseline(
    loads: Loads, run: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "b.json"
    assert run(runs=1, write_baseline=path).ok
    assert json.loads(path.read_bytes())["arms"]["off"]["ratio"] == 1.5
    loads.seconds |= {"off": 3.7, "all": 3.7}
    assert run(runs=1, baseline=path).ok
    loads.seconds |= {"off": 3.8, "all": 3.8}
    check = run(runs=1, baseline=path)
    assert lines(check)[0] == (
        "off: load over plain read, 1.25 times the baseline's: expected at most 1.875, found 1.9"
    )
    assert run(runs=1, baseline=path, max_ratio=2).ok
    before = json.loads(path.read_bytes())
    before["arms"]["all"]["reads"] += 1
    path.write_text(json.dumps(before))
    check = run(runs=1, baseline=path, max_ratio=2)
    assert lines(check) == ["all: reads of a load are not the baseline's: expected 308, found 307"]


def test_without_a_baseline_a_ratio_is_to_the_plain_read(
    loads: Loads, run: Callable[..., Any]
) -> None:
    assert run(runs=1, max_ratio=1.5).ok
    assert lines(run(runs=1, max_ratio=1.4)) == [
        f"{arm}: load over plain read: expected at most 1.4, found 1.5" for arm in ("off", "all")
    ]


def test_a_run_that_fails_is_no_baseline(
    loads: Loads, run: Callable[..., Any], tmp_path: Path
) -> None:
    loads.seconds["paged"] = 9
    check = run(runs=1, write_baseline=tmp_path / "b.json")
    assert not (tmp_path / "b.json").exists()
    assert any("was not written: the gate failed" in note for note in check.notes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a baseline of load times"),
        ("[]", "not a baseline of load times"),
        ('{"format": "ds4q load-time baseline 1", "arms": {}}', "not a baseline of load times"),
    ],
)
def test_what_is_no_baseline_is_refused(
    text: str, says: str, loads: Loads, run: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    assert says in lines(run(baseline=path))[0]
    assert loads.asked == [], "before any load"


@pytest.mark.parametrize("key", ["artifact", "device", "cold"])
def test_a_baseline_of_something_else_is_refused(
    key: str, loads: Loads, run: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "b.json"
    run(runs=1, write_baseline=path)
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {key: "another"}))
    assert f"the baseline is of another {key}" in lines(run(runs=1, baseline=path))[0]


# ---------------------------------------------------------------- real processes and files

MUTANTS = {
    "a store that touches experts while off": (
        "off",
        """
from ds4q.runtime.experts.resident import ResidentExperts

honest = ResidentExperts.bands

def bands(self, layer, ids, phase):
    with Reader(PATH) as reader:
        reader.read("layers.0.ffn.experts.0.w1.weight")
    yield from honest(self, layer, ids, phase)

ResidentExperts.bands = bands
""",
        "off: reads after the load: expected 0, found ",
    ),
    "each expert read singly at load": (
        "paged",
        """
from ds4q.runtime.experts.cache import ExpertCache

honest = ExpertCache.attach

def attach(self, routers):
    for layer in range(len(routers)):
        for expert in range(16):
            self.store.pager.acquire(layer, [expert], "prefill").release()
    honest(self, routers)

ExpertCache.attach = attach
""",
        "paged: reads of experts by a load: expected 0, found ",
    ),
}


@pytest.fixture(scope="module")
def honest(lossless: Path) -> dict[str, Load]:
    return {
        "off": loading.measure(lossless, threads=1),
        "paged": loading.measure(lossless, threads=1, cache={"slots": 4}),
    }


def judged(path: Path, found: dict[str, Load]) -> list[str]:
    """What the gate says of these loads; the cache for everything is as if there were none."""
    arms = [load_time.Arm(name, None) for name in ("off", "all", "paged")]
    for arm in arms:
        arm.loads.append(found.get(arm.name, found["off"]))
    check = Check("load-time")
    load_time.judge_reads(check, Front.read(path), arms, ())
    return lines(check)


def test_real_loads_are_green(lossless: Path, honest: dict[str, Load]) -> None:
    assert judged(lossless, honest) == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_real_loads_of_a_mutant_are_red(
    mutant: str,
    lossless: Path,
    honest: dict[str, Load],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process finds a module in its path that changes the package before it is measured."""
    name, code, says = MUTANTS[mutant]
    front = f"from ds4q.artifact.hfq import Reader\nPATH = {os.fspath(lossless)!r}\n"
    (tmp_path / "sitecustomize.py").write_text(front + code)
    monkeypatch.syspath_prepend(tmp_path)
    cache = {"slots": 4} if name == "paged" else None
    load = loading.measure(lossless, threads=1, cache=cache)
    assert any(line.startswith(says) for line in judged(lossless, honest | {name: load}))


def test_a_plain_read_covers_what_a_load_read(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    pieces: list[tuple[int, int]] = []
    pread = load_time.pread_all

    def note(fd: int, out: Any, offset: int, *, path: object) -> None:
        pieces.append((offset, len(out)))
        pread(fd, out, offset, path=path)

    monkeypatch.setattr(load_time, "pread_all", note)
    monkeypatch.setattr(load_time, "PIECE_BYTES", 16)
    reads = as_reads([[50, 10, 0], [0, 20, 0], [20, 5, 1], [55, 10, 0]])
    assert load_time.plain_read(path, reads) > 0
    assert sorted(pieces) == [(0, 16), (16, 9), (50, 15)]


def test_bytes_read_twice_are_counted_once_each() -> None:
    twice = load_time.read_twice
    assert twice(as_reads([])) == 0
    assert twice(as_reads([[0, 10, 0], [10, 5, 0]])) == 0
    assert twice(as_reads([[10, 5, 0], [0, 30, 0], [14, 10, 0]])) == 15
    assert twice(as_reads([[0, 10, 0], [8, 10, 0]])) == 2


def test_direct_reads_may_have_pages_of_neighbours() -> None:
    spans = np.array([[5000, 15000], [15000, 25000]], np.int64)
    front = Front("x", spans, np.array([[0, 1], [2, 3]], np.int64))
    reads = [[0, 5000, 0], [0, 5001, 0], [0, 8192, 1], [4096, 12288, 1], [24576, 4096, 1]]
    assert front.of_experts(as_reads(reads)).tolist() == [False, True, False, True, False]
    assert front.of_experts(as_reads(reads), [(0, 1)]).tolist() == [False] * 5
    assert front.of_experts(as_reads([[0, 15001, 0]]), [(0, 1)]).tolist() == [True]
    assert front.expert_bytes == 20000
