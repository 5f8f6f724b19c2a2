"""The load-time gate: reads counted to the byte, seconds judged where a disk decides them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.artifact.hfq import Reader
from ds4q.artifact.report import Check
from ds4q.runtime.experts.header import Identity
from ds4q.runtime.experts.profile import Profile
from ds4q.runtime.gates import load_time, loading, yardstick
from ds4q.runtime.gates.load_time import Front
from ds4q.runtime.gates.loading import Load
from ds4q.runtime.gates.pairs import Arm
from tests.runtime.gates.loads import EXPERT_BYTES, Loads, as_reads, lines, reads_of

# ---------------------------------------------------------------- sound loads


def test_each_kind_is_loaded_in_turn_beside_a_plain_read_and_fixed_work(
    loads: Loads, run: Callable[..., Any]
) -> None:
    check = run(runs=3)
    assert check.ok, lines(check)
    arms = ("off", "all", "paged")
    there = [step for arm in arms for step in (arm, "work", "plain")]
    back = [step for arm in arms for step in ("plain", "work", arm)]
    assert loads.order == [*arms, *there, *back, *there]
    caches = {name: options["cache"] for name, options in loads.asked}
    assert caches == {"off": None, "all": {"budget": EXPERT_BYTES}, "paged": {"slots": 4}}
    assert {options["threads"] for _, options in loads.asked} == {2}
    assert not any(options["prompts"] for _, options in loads.asked)
    figures = check.figures
    assert (figures["ratio"], figures["seconds"], figures["runs"]) == (1.5, 3, 3)
    assert figures["bytes"] == loads.path.stat().st_size
    assert "outcome" not in figures, "nothing was judged"
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
    path.write_bytes(
        Profile(identity.artifact, ranked, tuple((1,) * len(ids) for ids in ranked)).encode()
    )
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
        assert set(said) == {"paged: reads of experts by a load: expected 0, found 3"}
    read(3)
    assert set(lines(run(runs=1))) == {"paged: reads of experts by a load: expected 0, found 3"}


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
        ({"all": 3.16}, "all: seconds to those without a cache: expected at most 1.05, found 1.05"),
        ({"off": 121}, "off: seconds of a load: expected at most 120, found 121"),
    ],
)
def test_a_slow_load_is_red(
    seconds: dict[str, float], says: str, loads: Loads, run: Callable[..., Any]
) -> None:
    loads.seconds |= seconds
    assert any(line.startswith(says) for line in lines(run()))


def test_a_ratio_to_a_plain_read_is_not_judged_on_a_busy_machine(
    loads: Loads, run: Callable[..., Any]
) -> None:
    loads.seconds["paged"], loads.share = 1.21, 0.5
    check = run()
    assert check.ok
    assert "took 50% of the processors meanwhile" in check.notes[-1]


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
    arms = [Arm(name, None) for name in ("off", "all", "paged")]
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
    pread = yardstick.pread_all

    def note(fd: int, out: Any, offset: int, *, path: object) -> None:
        pieces.append((offset, len(out)))
        pread(fd, out, offset, path=path)

    monkeypatch.setattr(yardstick, "pread_all", note)
    monkeypatch.setattr(yardstick, "PIECE_BYTES", 16)
    reads = as_reads([[50, 10, 0], [0, 20, 0], [20, 5, 1], [55, 10, 0]])
    assert yardstick.plain_read(path, reads) > 0
    assert sorted(pieces) == [(0, 16), (16, 9), (50, 15)]


def test_bytes_read_twice_are_counted_once_each() -> None:
    twice = load_time.read_twice
    assert twice(as_reads([])) == 0
    assert twice(as_reads([[0, 10, 0], [10, 5, 0]])) == 0
    assert twice(as_reads([[10, 5, 0], [0, 30, 0], [14, 10, 0]])) == 15
    assert twice(as_reads([[0, 10, 0], [8, 10, 0]])) == 2


def test_direct_reads_may_have_pages_of_neighbours() -> None:
    spans = np.array([[5000, 15000], [15000, 25000]], np.int64)
    front = Front(Identity("x", ""), spans, np.array([[0, 1], [2, 3]], np.int64))
    reads = [[0, 5000, 0], [0, 5001, 0], [0, 8192, 1], [4096, 12288, 1], [24576, 4096, 1]]
    assert front.of_experts(as_reads(reads)).tolist() == [False, True, False, True, False]
    assert front.of_experts(as_reads(reads), [(0, 1)]).tolist() == [False] * 5
    assert front.of_experts(as_reads([[0, 15001, 0]]), [(0, 1)]).tolist() == [True]
    assert front.expert_bytes == 20000
