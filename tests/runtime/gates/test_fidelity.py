"""The fidelity gate: 60 of 60 for what copies, fewer for what does not, and honest refusals."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from ds4q.runtime.engine import Engine
from ds4q.runtime.gates import Fidelity, fidelity, pair
from ds4q.runtime.gates.asking import Asker
from ds4q.runtime.gates.identifiers import identifiers
from tests.runtime.gates.tiny import Made, Measure

SEED = 20260805


def test_the_lossless_artifact_copies_all(lossless: Path, measure: Measure) -> None:
    told: list[str] = []
    check = measure(Fidelity(lossless), lossless, tell=told.append)
    assert check.ok
    figures = check.figures
    assert (figures["exact"], figures["of"]) == (60, 60)
    assert figures["repeats"] == {"fresh-process": 20, "after-another": 20, "other-batches": 20}
    assert (figures["prompt"], figures["seed"]) == ("Repeat exactly: X", SEED)
    assert figures["top_k"] == 4
    # ds4-tiny misses one of the first 21 by itself, in exact arithmetic too.
    assert figures["drawn"] == 21
    assert [note.partition(" ")[0] for note in check.notes] == list(figures["repeats"])
    assert told == ["fidelity: asking a fresh process for 20 identifiers"]


def test_only_what_the_reference_copies_is_asked(lossless: Path) -> None:
    asker = Asker(Engine.load(lossless, threads=1))
    drawn = list(itertools.islice(identifiers(SEED), 21))
    answers = [asker.ask(f"Repeat exactly: {name}") for name in drawn]
    copied = [name for name, answer in zip(drawn, answers, strict=True) if name == answer]
    model = pair.Model.read(lossless)
    assert fidelity._choose(model, SEED, pair.Surroundings()) == (copied, 21)
    assert len(copied) == 20


def test_a_damaged_artifact_copies_fewer(lossless: Path, damaged: Path, measure: Measure) -> None:
    check = measure(Fidelity(lossless), damaged)
    assert not check.ok
    exact = check.figures["exact"]
    assert exact < 50
    assert check.figures["of"] == 60
    too_few, *misses = check.failures
    assert (too_few.message, too_few.expected) == ("too few exact copies", "60 of 60")
    assert too_few.found == str(exact)
    assert len(misses) == 60 - exact
    drawn = set(itertools.islice(identifiers(SEED), 21))
    for miss in misses:
        assert miss.message.startswith("not copied verbatim (")
        assert miss.expected in drawn
        assert miss.found != miss.expected


@pytest.mark.parametrize(("least", "ok"), [(None, False), (59, False), (58, True), (60, False)])
def test_fewer_pass_only_on_demand(
    least: int | None,
    ok: bool,
    lossless: Path,
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second repeat answers with a neighbour twice, as a cache that leaks would."""
    chosen = list(itertools.islice(identifiers(SEED), 20))
    leaked = [*chosen[:-2], chosen[0], chosen[1]]
    monkeypatch.setattr(fidelity, "_choose", lambda *_: (chosen, 20))
    monkeypatch.setattr(fidelity, "_fresh_process", lambda *_: chosen)
    monkeypatch.setattr(fidelity, "_after_another", lambda *_: leaked)
    monkeypatch.setattr(fidelity, "_other_batches", lambda *_: chosen)
    check = measure(Fidelity(lossless, min_exact=least), lossless)
    assert check.ok is ok
    assert check.figures["exact"] == 58
    assert check.figures["repeats"]["after-another"] == 18
    lines = check.notes if ok else [failure.line() for failure in check.failures]
    assert len([line for line in lines if "not copied verbatim (after-another)" in line]) == 2


def test_each_repeat_is_another_way_to_run(
    lossless: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[dict[str, Any]] = []
    asked: list[str] = []
    load, ask = Engine.load, Asker.ask

    def note_load(path: Any, **options: Any) -> Engine:
        loads.append({key: options[key] for key in ("threads", "batch_tokens")})
        return load(path, **options)

    def note_ask(self: Asker, question: str) -> str:
        asked.append(question)
        return ask(self, question)

    monkeypatch.setattr(pair.Engine, "load", note_load)
    monkeypatch.setattr(Asker, "ask", note_ask)
    assert measure(Fidelity(lossless), lossless, threads=2).ok
    assert loads == [
        {"threads": 2, "batch_tokens": 256},  # the reference
        {"threads": 2, "batch_tokens": 256},
        {"threads": 1, "batch_tokens": 7},
    ]
    after_another, other = asked[21:61], asked[61:]
    assert len(other) == 20  # and the 20 of the fresh process are asked elsewhere
    assert after_another[1::2] == other
    assert all(a != b for a, b in zip(after_another[::2], other, strict=True))
    assert sorted(after_another[::2]) == sorted(other)


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
    monkeypatch.setattr(fidelity, "MOST_DRAWN", 5)
    (failure,) = measure(Fidelity(lossless), lossless).failures
    assert "copies too few identifiers" in failure.message
    assert (failure.expected, failure.found) == ("20 of 5 drawn", "0")


def test_a_model_that_cannot_be_asked_is_a_failure(made: Made, measure: Measure) -> None:
    bare = made(others={"tokenizer": "{}"})
    (failure,) = measure(Fidelity(bare), bare).failures
    assert "no tokenizer" in failure.message
