"""Reads ahead: what is asked for and when, when guesses are given up, and that no token changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.hfq import Reader
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import AdapterError
from ds4q.runtime.experts.adapter import (
    NORMALISATION,
    STATE,
    TARGET,
    About,
    Adapter,
    Entry,
)
from ds4q.runtime.experts.fit import train
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.paged import PagedExperts
from ds4q.runtime.experts.predict import (
    MAX_BYTES_IN_FLIGHT,
    AdapterGuess,
    Guess,
    Oracle,
    Prefetcher,
    best,
)
from ds4q.runtime.experts.reading import Purpose
from ds4q.runtime.experts.trace import BandRecord, artifact_identity, read_trace
from tests.checks import check_refused, same_bits

F32 = npt.NDArray[np.float32]
CERTAIN, SPECULATIVE = Purpose.CERTAIN, Purpose.SPECULATIVE
PROMPT = [256, *b"def main(argv):\n    return"]


@dataclass
class Asked:
    """A pager that notes what it is asked, and counts what a test says."""

    calls: list[tuple[int, list[int], Purpose, int | None]] = field(default_factory=list)
    wasted: int = 0
    looked: int = 0

    def prefetch(
        self, layer: int, ids: Sequence[int], purpose: Purpose, *, most_bytes: int | None = None
    ) -> int:
        self.calls.append((layer, list(ids), purpose, most_bytes))
        return len(ids)

    def counters(self) -> dict[str, Any]:
        """Of 100 guesses of a byte each, 40 were of use; 60 bytes were read otherwise."""
        self.looked += 1
        return {
            "prefill": {"bytes": 10},
            "decode": {"bytes": 30},
            "certain": {"bytes": 20},
            "speculative": {"issued": 100, "bytes": 100, "bytes_used": 40, "dropped": self.wasted},
        }


class Fixed:
    """Guesses the same for every token: experts 3 and 1, for one token or two."""

    needs_state = False

    def __init__(self, tokens: int = 1) -> None:
        self._found = np.array([[3, 1], [4, 3]][:tokens])

    def candidates(self, layer: int, x: F32 | None) -> npt.NDArray[np.int64] | None:
        return self._found


NOTHING = np.zeros((1, 0), np.float32)
ONE = np.zeros(1, np.int64)


def token(prefetcher: Prefetcher, layers: int = 3) -> None:
    """One decoded token through all layers."""
    prefetcher.begin(ONE, "decode")
    for layer in range(layers):
        prefetcher.see(layer, ONE[None], NOTHING, NOTHING)
        prefetcher.issue(layer, "decode")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_what_hash_layers_choose_is_asked_for_at_once(phase: Any) -> None:
    pager = Asked()
    first, second = np.arange(12).reshape(6, 2), np.arange(12).reshape(6, 2) + 20
    prefetcher = Prefetcher(pager, {1: second.astype(np.int32), 0: first.astype(np.int32)})
    assert not prefetcher.needs_state
    prefetcher.begin(np.array([4, 1]), phase)
    prefetcher.issue(0, phase)
    assert pager.calls == [
        (0, [8, 9, 2, 3], CERTAIN, None),
        (1, [28, 29, 22, 23], CERTAIN, None),
    ]


def test_guesses_follow_the_demand_of_a_layer_and_skip_what_is_certain() -> None:
    pager = Asked()
    prefetcher = Prefetcher(pager, {1: np.zeros((6, 2), np.int32)}, Fixed())
    token(prefetcher)
    guesses = [call for call in pager.calls if call[2] is SPECULATIVE]
    assert guesses == [
        (2, [3, 1], SPECULATIVE, MAX_BYTES_IN_FLIGHT),
        (3, [3, 1], SPECULATIVE, MAX_BYTES_IN_FLIGHT),
    ]


def test_the_best_guess_of_each_token_comes_first() -> None:
    pager = Asked()
    Prefetcher(pager, {}, Fixed(2)).issue(0, "decode")
    assert pager.calls[0][1] == [3, 4, 1, 3]


def test_nothing_is_guessed_while_a_prompt_is_read() -> None:
    pager = Asked()
    Prefetcher(pager, {}, Fixed()).issue(0, "prefill")
    assert pager.calls == []


def adapter(sign: float = 1.0) -> Adapter:
    """Layer 0 alone: the score of expert i is h[i]."""
    eye = np.eye(4, dtype=np.float32)
    return Adapter({0: Entry(sign * eye, eye, np.zeros(4, np.float32))}, None)


def test_an_adapter_guesses_the_best_of_score_and_bias() -> None:
    pager = Asked()
    biases = {n: np.array([0, 0, 5, 0], np.float32) for n in (1, 2)}
    prefetcher = Prefetcher(pager, {}, AdapterGuess(adapter(), biases, 3))
    assert prefetcher.needs_state
    x = np.array([[4, 2, 0, 3]], np.float32)
    for layer in (0, 1):  # of layer 1 it says nothing
        prefetcher.see(layer, ONE[None], NOTHING, x)
        prefetcher.issue(layer, "decode")
    assert [call[:2] for call in pager.calls] == [(1, [2, 0, 3])]
    assert AdapterGuess(adapter(), {}, 3).candidates(0, x) is None  # layer 1 looks its experts up
    assert AdapterGuess(adapter(), biases, 3).candidates(0, None) is None


@pytest.mark.parametrize("top", [0, -1])
def test_guessing_nothing_is_refused(top: int) -> None:
    check_refused(AdapterError, lambda: AdapterGuess(adapter(), {}, top), says=["1 or more"])


@pytest.mark.parametrize(("wasted", "off"), [(0, False), (10, False), (11, True), (60, True)])
def test_guesses_that_cost_too_much_are_given_up_once(wasted: int, off: bool) -> None:
    pager, said = Asked(wasted=wasted), list[str]()
    table = {0: np.zeros((6, 2), np.int32)}
    prefetcher = Prefetcher(pager, table, Fixed(), say=said.append)
    for _ in range(31):
        token(prefetcher)
    assert pager.looked == 0  # too early to judge
    token(prefetcher)
    assert pager.looked == 1
    assert len(said) == off
    pager.calls.clear()
    for _ in range(100):
        token(prefetcher)
    assert len(said) == off
    assert any(call[2] is SPECULATIVE for call in pager.calls) is not off
    assert sum(call[2] is CERTAIN for call in pager.calls) == 100  # these go on
    if off:
        assert f"{wasted / 100:.0%} more" in said[0]
        assert "limit is 10%" in said[0]


def band(phase: Any, place: int, layer: int, *ids: int) -> BandRecord:
    chosen = np.array([ids], np.uint16)
    met = np.zeros(len(ids), np.uint8)
    return BandRecord(0, 0, phase, place, layer, chosen, chosen[0], met, 0, 0, 0, 0)


def test_an_oracle_knows_the_next_layer_of_each_decoded_token() -> None:
    bands = [band("prefill", 0, n, 9, 9) for n in range(3)]
    bands += [band("decode", place, n, 10 * place, n) for place in (5, 6) for n in range(3)]
    oracle = Oracle(bands)

    def asked() -> list[list[int] | None]:
        found = [oracle.candidates(n, None) for n in range(3)]
        return [None if ids is None else ids[0].tolist() for ids in found]

    assert asked() == [[50, 1], [50, 2], None]
    assert asked() == [[60, 1], [60, 2], None]
    assert asked() == [None, None, None]


def test_best_takes_the_lower_id_of_equals() -> None:
    merit = np.array([[1, 3, 3, 2], [0, 0, 0, 0]], np.float32)
    assert best(merit, 3).tolist() == [[1, 2, 3], [0, 1, 2]]


# ---------------------------------------------------------------- with a model


@dataclass
class Ran:
    ids: list[int]
    logits: F32
    counts: dict[str, Any]
    notes: list[str]


def decode(
    path: Path, options: CacheOptions | None, tokens: int, guess: Guess | None = None
) -> Ran:
    """Greedy decoding; ``guess`` takes the place of what the options make."""
    with Engine.load(path, threads=2, cache=options) as engine:
        cache = engine._cache
        if guess is not None and cache is not None and isinstance(cache.store, PagedExperts):
            table = engine._blocks[0].router.by_token
            assert table is not None
            tables = {0: table}
            cache.store.predictor = Prefetcher(cache.store.pager, tables, guess)
        state, ids = engine.new_state(), list(PROMPT)
        rows = [engine.forward(state, PROMPT)]
        for _ in range(tokens):
            ids.append(int(rows[-1][-1].argmax()))
            rows.append(engine.forward(state, ids[-1:]))
        return Ran(ids, np.concatenate(rows), engine.cache_counters() or {}, engine.notes)


def residents(counts: dict[str, Any]) -> tuple[int, ...]:
    """What reads ahead must leave as it is: hits, new experts however they came, evictions."""
    demands = [counts[phase] for phase in ("prefill", "decode")]
    new = sum(d[n] for d in demands for n in ("compulsory", "misses", "prefetched"))
    return sum(d["hits"] for d in demands), new, sum(d["evictions"] for d in demands)


SLOTS = 5
TOKENS = 40


@pytest.fixture(scope="module")
def plain(tiny_path: Path) -> Ran:
    """All experts in memory."""
    return decode(tiny_path, None, TOKENS)


@pytest.fixture(scope="module")
def traced(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """Paged, with certain reads only, and its trace."""
    trace = tmp_path_factory.mktemp("predict") / "t.trace"
    options = CacheOptions(slots=SLOTS, trace=trace, trace_states=True, policy="lru")
    return trace, decode(tiny_path, options, TOKENS)


class Wild:
    """Guesses whatever comes, of the four layers of ds4-tiny."""

    needs_state = False

    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)

    def candidates(self, layer: int, x: F32 | None) -> npt.NDArray[np.int64] | None:
        return self._rng.permutation(16)[None, :4] if layer < 3 else None


@pytest.mark.parametrize("kind", ["adapter", "wild", "oracle"])
def test_guesses_change_no_token_and_displace_nobody(
    tiny_path: Path, tmp_path: Path, plain: Ran, traced: tuple[Path, Ran], kind: str
) -> None:
    trace, before = traced
    (tmp_path / "a").write_bytes(train([trace]).encode())
    made: dict[str, Guess] = {"oracle": Oracle(read_trace(trace).bands()), "wild": Wild()}
    options = CacheOptions(slots=SLOTS, adapter=tmp_path / "a", prefetch_top=4, policy="lru")
    ran = decode(tiny_path, options, TOKENS, made.get(kind))
    for other in (before, ran):
        assert other.ids == plain.ids
        same_bits(other.logits, plain.logits)
    assert residents(ran.counts) == residents(before.counts)
    guesses = ran.counts["speculative"]
    assert guesses["issued"] > 0
    assert before.counts["speculative"]["issued"] == 0
    assert before.counts["certain"]["used"] > 0
    demanded = [
        sum(c[p]["bytes"] for p in ("prefill", "decode")) for c in (ran.counts, before.counts)
    ]
    certain = [c["certain"]["bytes_used"] for c in (ran.counts, before.counts)]
    # what was of use was one demand less, byte for byte
    assert demanded[0] + certain[0] + guesses["bytes_used"] == demanded[1] + certain[1]
    if kind == "oracle":
        assert guesses["used"] > 0.5 * before.counts["decode"]["misses"]
        assert guesses["dropped"] == 0
    else:
        assert guesses["dropped"] > 0


def test_each_sequence_of_a_step_counts() -> None:
    """Guesses are judged by tokens, however many are decoded together."""
    pager = Asked(wasted=60)
    said: list[str] = []
    prefetcher = Prefetcher(pager, {}, Fixed(), say=said.append)
    for step in range(1, 9):
        prefetcher.begin(np.zeros(5, np.int64), "decode")
        assert pager.looked == (step >= 7), step
    assert said[0].startswith("prefetch by prediction is off: after 35 tokens")


def test_an_engine_gives_guesses_up_and_says_so_once(
    tiny_path: Path, tmp_path: Path, plain: Ran
) -> None:
    (tmp_path / "a").write_bytes(random_adapter(tiny_path).encode())
    options = CacheOptions(slots=4, adapter=tmp_path / "a", prefetch_top=1, policy="lru")
    ran = decode(tiny_path, options, TOKENS)
    assert ran.ids == plain.ids
    same_bits(ran.logits, plain.logits)
    assert len([note for note in ran.notes if "prediction is off" in note]) == 1


def random_adapter(path: Path) -> Adapter:
    """Of this model, and no better than chance: every state gets another expert."""
    rng = np.random.default_rng(5)
    with Reader(path) as reader:
        about = About(artifact_identity(reader), STATE, TARGET, NORMALISATION, 1.0, 0, ())
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((16, 256), (16, 16)))
    return Adapter({n: Entry(a, 50 * b, np.zeros(16, np.float32)) for n in range(3)}, about)
