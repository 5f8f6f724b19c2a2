"""The divergence: its sums against plain formulas and known values, its errors, its refusals."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.hipkern.sim.control import Control
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import ForcedTokenError, FreeRunError, GateError
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.gates import Divergence, divergence, pair
from ds4q.runtime.gates.divergence import SUMS, Comparison, compare
from ds4q.runtime.gates.forced import F32, I64, Call, forced_calls
from ds4q.runtime.text.corpus import read_windows
from tests.checks import check_refused
from tests.runtime.artifacts import DATA
from tests.runtime.gates.tiny import TINY, Made, Measure

SCORED = DATA / "text" / "scored.txt"
BOS, VOCAB = 256, 512


@pytest.fixture(scope="module")
def windows() -> list[I64]:
    """1,200 bytes of text, seen as ids: 255 of them in each window."""
    ids = list(SCORED.read_bytes()[:1200])
    return [np.array([BOS, *ids[at : at + 255]]) for at in range(0, len(ids), 255)]


def calls_of(logits: Sequence[F32], windows: Sequence[I64]) -> list[Call]:
    return [
        Call(number, 0, window[:-1], rows)
        for number, (rows, window) in enumerate(zip(logits, windows, strict=True))
    ]


# ---------------------------------------------------------------- figures


def plain_sums(p_logits: F32, q_logits: F32, following: I64) -> list[float]:
    """The five sums by the textbook, in Python's own floats."""
    sums = [0.0] * 5
    for p_row, q_row, token in zip(p_logits, q_logits, following, strict=True):
        tops = [max(range(len(row)), key=list(row).__getitem__) for row in (p_row, q_row)]
        p, q = ([math.exp(float(x)) for x in row] for row in (p_row, q_row))
        p, q = ([x / math.fsum(row) for x in row] for row in (p, q))
        nats, nats_ref = -math.log(q[token]), -math.log(p[token])
        kl = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        more = [kl, float(tops[0] == tops[1]), nats, nats_ref, nats - nats_ref]
        sums = [a + b for a, b in zip(sums, more, strict=True)]
    return sums


@pytest.mark.parametrize("chunk", [1, 50, 1 << 20])
def test_sums_are_those_of_the_textbook(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "_CHUNK_LOGITS", chunk)
    random = np.random.default_rng(5)
    script = [random.integers(0, 17, length) for length in (2, 9, 6)]
    first, second = (
        [random.normal(scale=3, size=(len(w) - 1, 17)).astype(np.float32) for w in script]
        for _ in range(2)
    )
    found = compare(script, calls_of(first, script), calls_of(second, script))
    assert found.tokens.tolist() == [1, 8, 5]
    for number, window in enumerate(script):
        expected = plain_sums(first[number], second[number], window[1:])
        np.testing.assert_allclose(found.sums[number], expected, rtol=1e-12, atol=1e-12)


def test_large_logits_overflow_nothing() -> None:
    script = [np.array([0, 1])]
    p = np.array([[3e38, -3e38, 0]], np.float32)
    q = np.array([[100, 0, -100]], np.float32)
    found = compare(script, calls_of([p], script), calls_of([q], script)).figures()
    assert found["kl"] == pytest.approx(0, abs=1e-30)
    assert (found["nats"], found["nats_ref"]) == (100, 2 * float(p[0, 0]))


def test_the_mean_loss_of_ds4_tiny_is_the_known_one(tiny_engine: Engine) -> None:
    known = json.loads((TINY / "expected.json").read_text("utf-8"))["_nats_per_byte"]
    rows = [np.array(row) for row in known["tokens"]]
    calls = list(forced_calls(tiny_engine, rows))
    figures = compare(rows, calls, calls).figures()
    assert figures["nats"] == figures["nats_ref"] == pytest.approx(known["value"], abs=1e-4)
    assert figures["tokens"] == 8 * 255


def figures_of(sums: npt.ArrayLike, tokens: npt.ArrayLike) -> dict[str, Any]:
    """Figures where all five sums of a window are the same."""
    column = np.asarray(sums, np.float64)[:, None]
    return Comparison(np.asarray(tokens, np.int64), np.repeat(column, len(SUMS), 1)).figures()


def test_figures_have_their_promised_names() -> None:
    found = list(figures_of([1, 2], [3, 3]))
    names = ["kl", "top1", "nats", "nats_ref", "nats_diff"]
    assert found == [n for name in names for n in (name, f"{name}_se")] + ["tokens", "windows"]


def test_the_standard_error_of_equal_windows_is_that_of_their_means() -> None:
    sums = np.array([3.0, 5.0, 4.0, 9.0])
    found = figures_of(sums, [10] * 4)
    assert found["kl"] == pytest.approx(0.525)
    assert found["kl_se"] == pytest.approx(np.std(sums / 10, ddof=1) / 2)


def test_the_standard_error_is_the_spread_of_repeated_measurements() -> None:
    """Windows of different lengths whose tokens lean the same way: 3,000 texts of 25 windows."""
    random = np.random.default_rng(11)
    tokens = np.array([511, 511, 511, 100, 37] * 5)
    means, errors = [], []
    for _ in range(3000):
        lean = random.normal(scale=0.3, size=len(tokens))
        sums = tokens * (1 + lean) + random.normal(size=len(tokens)) * np.sqrt(tokens)
        found = figures_of(sums, tokens)
        means.append(found["nats"])
        errors.append(found["nats_se"])
    spread = float(np.std(means))
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(spread, rel=0.06)
    assert 1 / math.sqrt(tokens.sum()) < spread / 4  # what counting tokens would have claimed


def test_one_window_has_no_standard_error() -> None:
    found = figures_of([4.0], [8])
    assert (found["kl"], found["kl_se"], found["nats_diff_se"]) == (0.5, None, None)


# ---------------------------------------------------------------- the arms must read the text


def test_a_model_agrees_with_itself(tiny_engine: Engine, windows: list[I64]) -> None:
    heard: list[int] = []
    first, second = (forced_calls(tiny_engine, windows) for _ in range(2))
    figures = compare(windows, first, second, heard.append).figures()
    assert (figures["kl"], figures["top1"], figures["nats_diff"]) == (0.0, 1.0, 0.0)
    assert (figures["tokens"], figures["windows"]) == (1200, 5) == (sum(heard), len(heard))


@pytest.mark.parametrize("arm", ["reference", "model"])
def test_a_forced_list_shifted_by_one_is_refused(
    arm: str, tiny_engine: Engine, windows: list[I64]
) -> None:
    """Fed one token early or late, the figures would look plausible: it must not pass."""
    for step in (1, -1):
        shifted = [np.roll(window, step) for window in windows]
        arms = {
            name: forced_calls(tiny_engine, shifted if name == arm else windows)
            for name in ("reference", "model")
        }
        check_refused(
            ForcedTokenError,
            lambda arms=arms: compare(windows, *arms.values()),  # type: ignore[misc]
            says=["another token than the forced one", f"in {arm}", "window 0 position"],
        )


def test_both_lists_shifted_by_one_are_refused(tiny_engine: Engine, windows: list[I64]) -> None:
    """The arms agree with each other, but not with the text that is scored."""
    shifted = [np.roll(window, 1) for window in windows]
    calls = list(forced_calls(tiny_engine, shifted))
    with pytest.raises(ForcedTokenError):
        compare(windows, calls, calls)


def free_run(engine: Engine, windows: Sequence[I64]) -> Iterator[Call]:
    """The first token of each window is the text's; what follows is the model's own."""
    for number, window in enumerate(windows):
        state, token = engine.new_state(), int(window[0])
        for position in range(len(window) - 1):
            fed = np.array([token])
            logits = engine.forward(state, fed, "all")
            yield Call(number, position, fed, logits)
            token = int(logits[0].argmax())


def test_a_free_running_arm_is_refused(tiny_engine: Engine, windows: list[I64]) -> None:
    short = [window[:20] for window in windows[:2]]
    check_refused(
        FreeRunError,
        lambda: compare(short, forced_calls(tiny_engine, short), free_run(tiny_engine, short)),
        says=["a model ran free", "in model"],
    )


def test_arms_of_different_length_are_refused(tiny_engine: Engine, windows: list[I64]) -> None:
    calls = list(forced_calls(tiny_engine, windows))
    for arms in (
        (calls, calls[:-1]),
        (calls[1:], calls),
        (calls, []),
        ([*calls, calls[-1]], calls),
    ):
        with pytest.raises(GateError, match=r"incomplete comparison|longer comparison"):
            compare(windows, *arms)


# ---------------------------------------------------------------- the gate


def test_the_gate_passes_an_artifact_against_itself(lossless: Path, measure: Measure) -> None:
    told: list[str] = []
    gate = Divergence(lossless, [SCORED], tokens=1000, max_kl=0)
    check = measure(gate, lossless, tell=told.append)
    assert check.verdict == "ok"
    figures = check.figures
    assert (figures["kl"], figures["kl_se"], figures["top1"]) == (0.0, 0.0, 1.0)
    assert (figures["tokens"], figures["windows"]) == (1000, 2)
    assert figures["against"] == lossless.name
    assert figures["nats"] == figures["nats_ref"] > 0.5
    assert len(told) == 1
    assert "take 2,048,000 bytes in" in told[0]


def test_rounded_dense_tensors_show(lossless: Path, rounded: Path, measure: Measure) -> None:
    check = measure(Divergence(lossless, [SCORED], tokens=1500), rounded)
    assert check.verdict == "not judged"
    figures = check.figures
    assert 1e-5 < figures["kl"] < 0.02
    assert 0.95 < figures["top1"] < 1
    assert 0 < figures["kl_se"] < figures["kl"]
    assert figures["nats_diff"] == pytest.approx(figures["nats"] - figures["nats_ref"], abs=1e-9)
    # Paired: what both models find hard is no part of the error of the difference.
    assert figures["nats_diff_se"] < figures["nats_se"] / 5


@pytest.mark.parametrize(
    ("limits", "fails"),
    [
        ({"max_kl": 1.0, "min_top1": 0.5}, []),
        ({"max_kl": 1e-6}, ["kl is too large"]),
        ({"min_top1": 1.0}, ["top1 is too low"]),
        ({"max_kl": 0.0, "min_top1": 1.0}, ["kl is too large", "top1 is too low"]),
        ({"max_kl": math.nan}, ["kl is too large"]),
    ],
)
def test_limits_fail_by_name(
    limits: dict[str, Any], fails: list[str], lossless: Path, rounded: Path, measure: Measure
) -> None:
    check = measure(Divergence(lossless, [SCORED], tokens=256, window=200, **limits), rounded)
    assert check.verdict == ("failed" if fails else "ok")
    assert [failure.message for failure in check.failures] == fails
    assert all(failure.expected and failure.found for failure in check.failures)


@pytest.mark.parametrize("limits", [{}, {"max_kl": math.inf}, {"min_top1": 0.0}])
def test_a_limit_that_nothing_misses_judges_nothing(
    limits: dict[str, Any], lossless: Path, rounded: Path, measure: Measure
) -> None:
    gate = Divergence(lossless, [SCORED], tokens=256, window=200, **limits)
    check = measure(gate, rounded)
    assert (check.ok, check.verdict) == (True, "not judged")


@pytest.mark.parametrize(
    ("options", "says", "found"),
    [
        ({"tokens": 3}, "too few tokens for a measurement", "3"),
        ({"tokens": 255, "window": 32}, "too few tokens for a measurement", "255"),
        ({"tokens": 300}, "one window has no standard error", "1, of 300 tokens"),
    ],
)
def test_a_text_that_is_no_measurement_is_refused_before_any_work(
    options: dict[str, int],
    says: str,
    found: str,
    lossless: Path,
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair.Engine, "load", lambda *_, **options: pytest.fail("loaded"))
    (failure,) = measure(Divergence(lossless, [SCORED], **options), lossless).failures
    assert f"{SCORED}: {says}; give a longer --text" in failure.message
    assert failure.found == found


def test_ids_and_texts_are_the_same_windows(
    lossless: Path, rounded: Path, measure: Measure, tmp_path: Path
) -> None:
    text = SCORED.read_bytes()[:700]
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "a.ids").write_text(" ".join(map(str, text)))
    checks = [
        measure(Divergence(lossless, [tmp_path / name], window=100), rounded)
        for name in ("a.txt", "a.ids")
    ]
    assert checks[0].figures == checks[1].figures
    assert checks[0].figures["windows"] == 8  # 99 tokens of text in each but the last


def test_ids_need_no_tokenizer(made: Made, measure: Measure, tmp_path: Path) -> None:
    bare = made(others={"tokenizer": "{}"})
    (tmp_path / "a.ids").write_text("100 101 102 " * 90)
    gate = Divergence(bare, [tmp_path / "a.ids"], window=100)
    assert measure(gate, bare).figures["tokens"] == 270
    check = measure(Divergence(bare, [SCORED]), bare)
    assert "no tokenizer to encode a text" in check.failures[0].message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"partial": True}, "holds only part of a model"),
        ({"others": {"tokenizer": None}}, "another tokenizer"),
        ({"config": {"vocab_size": 300}}, "another vocabulary"),
    ],
    ids=["partial", "tokenizer", "vocabulary"],
)
def test_pairs_that_cannot_be_compared_fail_before_any_work(
    change: dict[str, Any],
    says: str,
    lossless: Path,
    made: Made,
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair.Engine, "load", lambda *_, **options: pytest.fail("loaded"))
    other = made(**change)
    for path, against in ((other, lossless), (lossless, other)):
        (failure,) = measure(Divergence(against, [SCORED]), path).failures
        assert says in failure.message


def test_a_window_beyond_the_context_is_refused_before_any_work(
    lossless: Path, made: Made, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.Engine, "load", lambda *_, **options: pytest.fail("loaded"))
    short = made(config={"max_position_embeddings": 64})
    (failure,) = measure(Divergence(lossless, [SCORED], window=65), short).failures
    assert "a window is longer than the context; give a smaller --window" in failure.message
    assert (failure.expected, failure.found) == ("at most 64 tokens", "65")


def test_how_the_tokenizer_is_laid_out_makes_no_difference(
    lossless: Path, made: Made, measure: Measure
) -> None:
    source = json.loads((TINY / "tokenizer.json").read_text("utf-8"))
    other = made(others={"tokenizer": json.dumps(source, indent=3)})
    assert measure(Divergence(other, [SCORED], tokens=256, window=200), lossless).ok


def test_an_empty_text_is_a_failure(lossless: Path, measure: Measure, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (failure,) = measure(Divergence(lossless, [tmp_path / "empty.txt"]), lossless).failures
    assert "no tokens" in failure.message


def test_one_model_is_in_memory_at_a_time(
    lossless: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[weakref.ref[Engine]] = []
    load = Engine.load

    def watched(*arguments: Any, **options: Any) -> Engine:
        assert not any(engine() for engine in engines)
        engine = load(*arguments, **options)
        engines.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(pair.Engine, "load", watched)
    assert measure(Divergence(lossless, [SCORED], tokens=256, window=200), lossless).ok
    gc.collect()
    assert [engine() for engine in engines] == [None, None]


def test_figures_do_not_depend_on_what_is_in_memory(
    tiny_artifact: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[Any] = []
    load = Engine.load

    def watched(path: Path, **options: Any) -> Engine:
        caches.append(options["cache"])
        return load(path, **options)

    monkeypatch.setattr(pair.Engine, "load", watched)
    gate = Divergence(tiny_artifact, [SCORED], tokens=256, window=64)
    resident = measure(gate, tiny_artifact).figures
    assert measure(replace(gate, expert_cache=3_000_000), tiny_artifact).figures == resident
    assert caches == [None, None, *[CacheOptions(budget=3_000_000)] * 2]


@pytest.mark.slow
def test_models_run_on_the_device(
    sim: Control, tiny_artifact: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture sees that nothing is left there."""
    monkeypatch.setattr(pair.Engine, "load", lambda *_, **options: pytest.fail("on the CPU"))
    gate = Divergence(tiny_artifact, [SCORED], tokens=256, window=64, expert_cache=3_000_000)
    check = measure(gate, tiny_artifact, device="hip")
    assert (check.failures, check.figures["kl"], check.figures["tokens"]) == ([], 0, 256)


def test_windows_are_those_of_the_corpus(lossless: Path, measure: Measure) -> None:
    """The figures are those of a comparison by hand over the same windows."""
    from ds4q.runtime.text.tokenizer import Tokenizer

    tokenizer = Tokenizer((TINY / "tokenizer.json").read_text("utf-8"))
    script = read_windows(
        [SCORED], tokenizer=tokenizer, bos=BOS, vocab_size=VOCAB, window_tokens=64, limit_tokens=256
    )
    engine = Engine.load(lossless, threads=1)
    by_hand = compare(script, forced_calls(engine, script), forced_calls(engine, script))
    gate = Divergence(lossless, [SCORED], tokens=256, window=64)
    assert measure(gate, lossless).figures == by_hand.figures() | {"against": lossless.name}
