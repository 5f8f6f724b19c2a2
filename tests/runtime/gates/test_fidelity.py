"""The fidelity gate: what is exact, what is set apart, when it stops, and what it refuses."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q import api
from ds4q.artifact.formats import MixRow
from ds4q.artifact.hfq import HEADER_BYTES, Reader
from ds4q.artifact.metadata import seal
from ds4q.artifact.tables import Table, mix_index_sha256, table_name
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import LogitsError
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.gates import Fidelity, fidelity, pair
from ds4q.runtime.gates.asking import Asker, Margin
from ds4q.runtime.gates.fidelity import wilson
from ds4q.runtime.gates.identifiers import identifiers
from tests.runtime.gates.tiny import TINY, Made, Measure

SEED = 20260805
FEW = 6
NEAR = 1  # of the first 21


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for six identifiers and look at the misses after two and four."""
    monkeypatch.setattr(fidelity, "IDENTIFIERS", FEW)
    monkeypatch.setattr(fidelity, "LOOKS", (2, 4))


@pytest.mark.usefixtures("few")
def test_the_lossless_artifact_copies_all_in_three_ways(
    lossless: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[tuple[int, int, Any]] = []
    asked: list[str] = []
    told: list[str] = []
    load, ask = Engine.load, Asker.ask

    def note_load(path: Any, **options: Any) -> Engine:
        loads.append((options["threads"], options["batch_tokens"], options["cache"]))
        return load(path, **options)

    def note_ask(self: Asker, question: str, *sampler: Any) -> str:
        asked.append(question)
        return ask(self, question, *sampler)

    monkeypatch.setattr(pair.Engine, "load", note_load)
    monkeypatch.setattr(Asker, "ask", note_ask)
    check = measure(Fidelity(lossless), lossless, threads=2, tell=told.append)
    assert check.verdict == "ok"
    figures = check.figures
    assert (figures["exact"], figures["of"], figures["share"]) == (FEW, FEW, 1.0)
    assert figures["repeats"] == {"after-another": 6, "fresh-process": 6, "smallest-cache": 6}
    assert (figures["prompt"], figures["seed"]) == ("Repeat exactly: X", SEED)
    assert (figures["top_k"], figures["stopped_early"]) == (4, False)
    assert (figures["share_low"], figures["share_high"]) == wilson(FEW, FEW)
    apart = figures["near_ties"] + figures["not_copied_by_reference"]
    assert figures["drawn"] == FEW + apart
    assert "exact 6 of 6: 100.0%, 95 % interval 61.0% to 100.0%" in check.notes[0]
    assert [note.partition(" ")[0] for note in check.notes[1:]] == list(figures["repeats"])
    assert told == ["fidelity: asking a fresh process for 6 identifiers"]
    # The reference, then two loads here; the fresh process loads and asks elsewhere.
    assert loads == [(2, 256, None), (2, 256, None), (1, 7, CacheOptions(slots=4))]
    after_another, smallest_cache = asked[-13:-6], asked[-6:]
    assert after_another[1:] == smallest_cache
    assert after_another[0] == smallest_cache[-1], "another one goes before the first"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "hip"])
def test_experts_may_be_paged_and_the_model_on_a_device(
    device: str, lossless: Path, measure: Measure, sim: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "IDENTIFIERS", 2)
    monkeypatch.setattr(fidelity, "LOOKS", ())
    check = measure(Fidelity(lossless, expert_cache=3_000_000), lossless, device=device)
    assert check.verdict == "ok"
    assert (check.figures["exact"], check.figures["of"]) == (2, 2)
    assert set(check.figures["repeats"].values()) == {2}


def test_near_ties_and_what_the_reference_does_not_copy_are_set_apart(lossless: Path) -> None:
    """Of the first 21, ds4-tiny misses one by itself, in exact arithmetic too."""
    engine = Engine.load(lossless, threads=1)
    asker = Asker(engine)
    drawn = list(itertools.islice(identifiers(SEED), 21))
    margins, copied = {}, []
    for name in drawn:
        margin = Margin()
        answer = asker.ask(f"Repeat exactly: {name}", margin)
        assert answer == asker.ask(f"Repeat exactly: {name}"), "the margin changes no answer"
        margins[name] = margin.least
        copied += [name] if answer == name else []
    assert len(copied) == 20
    clear = [name for name in copied if margins[name] >= fidelity.MARGIN_FLOOR]
    model = pair.Model.read(lossless)
    found = fidelity._choose(model, len(clear), SEED, pair.Surroundings())
    assert list(found.chosen) == clear
    assert found.near_ties == len(copied) - len(clear) == NEAR


def answering(
    monkeypatch: pytest.MonkeyPatch, count: int, **spoilt: dict[int, str]
) -> Callable[[], list[str]]:
    """A reference that chose ``count`` identifiers, and a model that copies all but ``spoilt``."""
    chosen = list(itertools.islice(identifiers(SEED), count))
    drawn = fidelity.Drawn(chosen, count + 5, 2)
    monkeypatch.setattr(fidelity, "_choose", lambda *_: drawn)

    class Answers:
        def __init__(self, *_: object, **__: object) -> None:
            self.turn = -1  # another one goes before the first

        def ask(self, question: str) -> str:
            self.turn += 1
            answer = question.removeprefix("Repeat exactly: ")
            return spoilt.get("after_another", {}).get(self.turn - 1, answer)

    def repeat(name: str) -> list[str]:
        return [spoilt.get(name, {}).get(n, each) for n, each in enumerate(chosen)]

    monkeypatch.setattr(fidelity, "Asker", Answers)
    monkeypatch.setattr(pair.Model, "load", lambda *_, **__: nullcontext())
    monkeypatch.setattr(fidelity, "_fresh_process", lambda *_: repeat("fresh_process"))
    monkeypatch.setattr(fidelity, "_smallest_cache", lambda *_: repeat("smallest_cache"))
    return lambda: chosen


@pytest.mark.parametrize(
    ("least", "verdict"), [(1.0, "failed"), (0.991, "failed"), (0.99, "ok"), (0.0, "not judged")]
)
def test_fewer_pass_only_on_demand(
    least: float,
    verdict: str,
    lossless: Path,
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some repeats miss what others copy, as a cache that leaks would."""
    spoilt = {"smallest_cache": {3: "leak", 7: "leak"}, "fresh_process": {7: "leak"}}
    answering(monkeypatch, 200, **spoilt)
    check = measure(Fidelity(lossless, min_exact=least), lossless)
    assert check.verdict == verdict
    figures = check.figures
    assert (figures["exact"], figures["of"], figures["stopped_early"]) == (198, 200, False)
    assert figures["repeats"] == {"after-another": 200, "fresh-process": 199, "smallest-cache": 198}
    assert (figures["drawn"], figures["near_ties"], figures["not_copied_by_reference"]) == (
        205,
        2,
        3,
    )
    lines = check.notes if verdict != "failed" else [failure.line() for failure in check.failures]
    assert [line.partition(":")[0] for line in lines if "not copied" in line] == [
        "not copied verbatim (smallest-cache)",
        "not copied verbatim (fresh-process, smallest-cache)",
    ]


@pytest.mark.parametrize(
    ("least", "misses", "asked"),
    [
        (1.0, [0], 20),  # one miss decides against "all of them"
        (1.0, [120], 150),
        (0.9, [*range(9)], 20),
        (0.9, [*range(6)], 200),  # P(6 or more of 20 at 0.1) = 1.1 %: not decided
        (0.9, [*range(6), *range(20, 35)], 50),
        (0.0, [*range(200)], 200),
    ],
)
def test_it_stops_where_the_misses_decide(
    least: float,
    misses: list[int],
    asked: int,
    lossless: Path,
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering(monkeypatch, 200, after_another=dict.fromkeys(misses, "x"))
    check = measure(Fidelity(lossless, min_exact=least), lossless)
    figures = check.figures
    assert (figures["of"], figures["stopped_early"]) == (asked, asked < 200)
    assert figures["exact"] == asked - len(misses)
    assert list(figures["repeats"]) == list(fidelity.REPEATS)[: 1 if asked < 200 else 3]
    if asked < 200:
        assert check.verdict == "failed"
        assert check.failures[0].found == f"{asked - len(misses)} of {asked}"
        assert f"stopped after {asked} of 200 identifiers" in check.notes[-1]


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95, 0.99, 0.999])
def test_a_model_at_the_limit_is_hardly_ever_stopped(share: float) -> None:
    """The exact chance to stop at any look, by walking through all counts of misses."""
    alive, stopped, before = {0: 1.0}, 0.0, 0
    for look in fidelity.LOOKS:
        steps = look - before
        after: dict[int, float] = {}
        weights = [
            math.comb(steps, n) * (1 - share) ** n * share ** (steps - n) for n in range(steps + 1)
        ]
        for misses, mass in alive.items():
            for more, weight in enumerate(weights):
                after[misses + more] = after.get(misses + more, 0.0) + mass * weight
        stopped += sum(m for n, m in after.items() if fidelity.decided(n, look, share))
        alive = {n: m for n, m in after.items() if not fidelity.decided(n, look, share)}
        before = look
    assert stopped <= len(fidelity.LOOKS) * fidelity.STOP_ERROR
    assert sum(alive.values()) + stopped == pytest.approx(1)


@pytest.mark.parametrize(("exact", "of"), [(200, 200), (197, 200), (19, 20), (10, 20), (0, 20)])
def test_the_interval_is_wilsons(exact: int, of: int) -> None:
    """By its definition: at both ends the share lies 1.96 standard errors of that end away."""
    low, high = wilson(exact, of)
    assert 0 <= low <= exact / of <= high <= 1
    for end in (low, high):
        away = 1.959964 * math.sqrt(end * (1 - end) / of)
        assert abs(exact / of - end) == pytest.approx(away, abs=1e-12)


def test_the_margin_is_the_least_of_all_steps() -> None:
    margin = Margin()
    assert margin(np.array([1, 5, 2.5], np.float32)) == 1
    assert margin(np.array([4, 2, 4], np.float32)) == 0
    assert margin.least == 0
    with pytest.raises(LogitsError):
        margin(np.array([np.nan, 1], np.float32))


@pytest.mark.slow
def test_the_default_asks_for_two_hundred(lossless: Path, measure: Measure) -> None:
    check = measure(Fidelity(lossless), lossless)
    figures = check.figures
    assert (check.verdict, figures["exact"], figures["of"]) == ("ok", 200, 200)
    assert figures["share_low"] == pytest.approx(0.98115, abs=1e-5)
    assert 0 < figures["near_ties"] < 10
    assert figures["drawn"] == 200 + figures["near_ties"] + figures["not_copied_by_reference"]


# ---------------------------------------------------------------- one damaged book


def damage_book(path: Path, layer: int, projection: str, expert: int) -> None:
    """Make the first book's levels of one expert eight times as large, and all digests right."""
    with Reader(path) as reader:
        entry = reader.entry(table_name(layer, projection))
        metadata = json.loads(reader.metadata_raw)
    index = metadata["rocmfpx"]["mix_tables"]
    (item,) = (item for item in index if item["table"] == entry.name)
    raw = bytearray(path.read_bytes())
    payload = slice(entry.offset, entry.offset + entry.nbytes)
    table = Table.decode(bytes(raw[payload]), item["qtype"], mixed=set(item["rows"].values()))
    books = np.frombuffer(table.row(expert).books, "<u2").reshape(2, -1).copy()
    books[0] += 3 << 7  # the exponent of bf16
    rows = list(table.rows)
    rows[expert] = MixRow(1, books.tobytes())
    raw[payload] = replace(table, rows=tuple(rows)).encode()
    item["sha256"] = hashlib.sha256(raw[payload]).hexdigest()
    metadata["rocmfpx"]["mix_index_sha256"] = mix_index_sha256(index)
    front = seal(metadata)
    raw[HEADER_BYTES : HEADER_BYTES + len(front)] = front
    path.write_bytes(raw)


def test_one_damaged_book_of_a_mixed_artifact_costs_copies(
    tiny_artifact: Path, tmp_path: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 384 books is wrong, and everything in the file agrees with it."""
    sound, damaged = tmp_path / "mix.hfq", tmp_path / "elsewhere" / "damaged.hfq"
    damaged.parent.mkdir()  # the receipt would tell
    api.quantize(TINY, sound, recipe="mix", warn=lambda text: None)
    shutil.copy(sound, damaged)
    damage_book(damaged, 0, "w2", 3)
    assert api.verify(damaged).failure_lines() == []
    monkeypatch.setattr(fidelity, "FAST_IDENTIFIERS", 10)
    drawn = list(itertools.islice(identifiers(SEED), 12))
    asker = Asker(Engine.load(sound, threads=2))
    copied = [name for name in drawn if asker.ask(fidelity.PROMPT.format(name)) == name]
    assert len(copied) >= 9
    after = measure(Fidelity(tiny_artifact, fast=True), damaged)
    assert (after.figures["of"], after.figures["fast"]) == (10, True)
    assert after.figures["exact"] <= len(copied) - 4
    assert not after.ok
    too_few, *misses = after.failures
    assert (too_few.message, too_few.expected) == ("too few exact copies", "a share of at least 1")
    assert too_few.found == f"{after.figures['exact']} of 10"
    # All repeats agree: the fault is in the weights.
    assert len(misses) == 10 - after.figures["exact"]
    for miss in misses:
        assert miss.message.startswith("not copied verbatim (after-another, fresh-process, small")
        assert miss.expected in drawn
        assert miss.found != miss.expected


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        ({"recipe": "fp4-q8"}, "the reference is not lossless"),
        ({"recipe": None}, "no recipe in its metadata"),
        ({"source_fingerprint": "0" * 64}, "made from another checkpoint"),
        ({"partial": True}, "holds only part of a model"),
    ],
)
def test_a_reference_that_proves_nothing_is_refused(
    ours: dict[str, Any],
    says: str,
    lossless: Path,
    made: Made,
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair.Engine, "load", lambda *_, **options: pytest.fail("loaded"))
    (failure,) = measure(Fidelity(made(**ours)), lossless).failures
    assert says in failure.line()


def test_a_reference_that_copies_nothing_is_refused(
    lossless: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "PROMPT", "{} is what?")
    monkeypatch.setattr(fidelity, "DRAWN_BEFORE_REFUSAL", 5)
    (failure,) = measure(Fidelity(lossless), lossless).failures
    assert "copies too few identifiers" in failure.message
    assert (failure.expected, failure.found) == ("20% of those drawn", "0 of 5, and 0 near ties")


def test_a_model_that_cannot_be_asked_is_a_failure(made: Made, measure: Measure) -> None:
    bare = made(others={"tokenizer": "{}"})
    (failure,) = measure(Fidelity(bare), bare).failures
    assert "no tokenizer" in failure.message
