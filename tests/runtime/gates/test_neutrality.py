"""The neutrality gate: what it asks of each arm, what is a difference, and what proves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.hfq import Reader
from ds4q.runtime.config import parse_config
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import ExpertReadError, GateError, RunError
from ds4q.runtime.experts.adapter import (
    NORMALISATION,
    STATE,
    TARGET,
    About,
    Adapter,
    Entry,
)
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.trace import artifact_identity
from ds4q.runtime.gates import Neutrality, neutrality, pair
from ds4q.runtime.gates.neutrality import fast_layers
from ds4q.runtime.gates.pair import Model, Surroundings
from tests.checks import check_refused
from tests.quantize.builders import FLASH
from tests.runtime import artifacts
from tests.runtime.gates.tiny import TINY, Measure, write

VOCAB, LAYERS, EXPERTS = 512, 4, 16
LENGTHS = [1, 7, 63, 64, 65, 300]
Logits = npt.NDArray[np.float32]
Spoil = Callable[["Fake", Logits, npt.NDArray[np.int64], int], Logits]


@dataclass
class Fed:
    """Ids fed so far, and a running number made of them."""

    position: int = 0
    past: int = 0


@dataclass
class Fake:
    """An engine whose logits follow from all ids that it was fed; ``spoil`` changes them."""

    cache: CacheOptions | None
    spoil: Spoil
    touched: int = 9
    layers: int = LAYERS
    fewer: int = 0  # slots than it was asked for
    ahead: int = 7  # guesses that were read
    fed: list[list[int]] = field(default_factory=list)

    def new_state(self) -> Fed:
        return Fed()

    def forward(self, state: Fed, ids: npt.NDArray[np.int64], logits: str, *, trace: Any) -> Logits:
        assert logits == "all"
        self.fed.append(list(map(int, ids)))
        rows = []
        for token in ids:
            state.past = (state.past * 31 + int(token) + 1) % 99991
            rows.append(np.random.default_rng(state.past).standard_normal(VOCAB, np.float32))
        out = self.spoil(self, np.array(rows), ids, state.position)
        if trace is not None:
            for layer in range(self.layers):
                trace(f"l{layer}.route_idx", np.arange(len(ids)) * 7 % self.touched)
                # As if a wrong expert had been multiplied in layer 2, and was heard after it.
                wrong = (out != rows).any() and layer >= 2
                trace(f"l{layer}.routed_out", np.array(rows) + np.float32(wrong))
        state.position += len(ids)
        return out

    def cache_counters(self) -> dict[str, Any] | None:
        if self.cache is None:
            return None
        slots = (self.cache.slots or 5) - self.fewer
        many = {"evictions": 3 if slots < self.touched else 0, "misses": 2, "hits": 1}
        ahead = {"issued": self.ahead}
        return {"prefill": many, "decode": many, "speculative": ahead, "slots": slots}


def honest(engine: Fake, logits: Logits, ids: npt.NDArray[np.int64], position: int) -> Logits:
    """No change."""
    return logits


@dataclass
class Bench:
    """Runs the gate on fakes; ``engines`` in the order in which they were loaded."""

    measure: Callable[..., Any]
    path: Path
    patch: pytest.MonkeyPatch
    touched: int = 9
    fewer: int = 0
    ahead: int = 7
    engines: list[Fake] = field(default_factory=list)

    def run(self, gate: Neutrality, spoil: Spoil = honest, **where: Any) -> Any:
        @contextlib.contextmanager
        def running(
            model: Model,
            where: Surroundings,
            cache: CacheOptions | None,
            layers: Sequence[int] | None,
        ) -> Iterator[Fake]:
            count = LAYERS if layers is None else len(layers)
            engine = Fake(cache, spoil, self.touched, count, self.fewer, self.ahead)
            self.engines.append(engine)
            yield engine

        self.patch.setattr(Model, "running", running)
        return self.measure(gate, self.path, **where)


def predictor(path: Path, artifact: Path) -> Path:
    """Of the first layer of ``artifact``: it expects the same experts of every token."""
    a, b = np.zeros((1, 256), np.float32), np.zeros((EXPERTS, 1), np.float32)
    with Reader(artifact) as reader:
        about = About(artifact_identity(reader), STATE, TARGET, NORMALISATION, 1.0, 0, ())
    path.write_bytes(Adapter({0: Entry(a, b, np.zeros(EXPERTS, np.float32))}, about).encode())
    return path


@pytest.fixture
def bench(lossless: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(measure, lossless, monkeypatch)


# ---------------------------------------------------------------- equal arms


def test_three_arms_continue_each_prompt_by_their_own_tokens(bench: Bench) -> None:
    check = bench.run(Neutrality(tokens=5))
    assert check.ok, check.lines()
    assert [engine.cache for engine in bench.engines] == [
        None,
        CacheOptions(slots=9),
        CacheOptions(slots=4),
    ]
    first = bench.engines[0].fed
    assert [len(ids) for ids in first if len(ids) > 1] == LENGTHS[1:]
    assert len(first) == 6 * 5
    assert all(engine.fed == first for engine in bench.engines)
    figures = check.figures
    assert figures["prompt_tokens"] == LENGTHS
    assert (figures["tokens"], figures["equal"], figures["of"]) == (30, 60, 60)
    assert (figures["layers"], figures["fast"], figures["device"]) == (4, False, "cpu")
    assert figures["arms"]["thrashes"] == {
        "tokens": 30,
        "equal": 30,
        "logits": True,
        "slots": 4,
        "evictions": 6,
        "misses": 4,
        "hits": 2,
    }
    assert figures["arms"]["fits"]["evictions"] == 0


def test_policies_prefetch_size_and_layers_reach_the_arms(bench: Bench, tmp_path: Path) -> None:
    adapter = predictor(tmp_path / "a", bench.path)
    size = 3_000_000
    gate = Neutrality(tokens=1, cache=size, fast=True, policies=("lru", "slru"), adapter=adapter)
    check = bench.run(gate)
    assert [engine.cache for engine in bench.engines] == [
        None,
        CacheOptions(slots=9),
        CacheOptions(budget=size, policy="lru"),
        CacheOptions(budget=size, policy="slru"),
        CacheOptions(slots=9, adapter=adapter),
        CacheOptions(budget=size, adapter=adapter),
    ]
    assert list(check.figures["arms"]) == [
        *("fits", "thrashes (lru)", "thrashes (slru)", "fits, prefetch", "thrashes, prefetch")
    ]
    assert {engine.layers for engine in bench.engines} == {3}
    assert check.figures["arms"]["thrashes, prefetch"]["prefetched"] == 7
    assert (check.figures["layers"], check.figures["fast"]) == (3, True)
    assert check.figures["layer_kinds"] == {
        "0": ["hash-routed", "no compression"],
        "1": ["learned routing", "compress ratio 4"],
        "2": ["learned routing", "compress ratio 128"],
    }
    assert check.notes == [
        "fast: only 3 of 4 layers ran, one of each kind: layer 0: hash-routed, no compression; "
        "layer 1: learned routing, compress ratio 4; layer 2: learned routing, compress ratio 128"
    ]


def test_fast_takes_a_learned_layer_of_flash_and_each_compress_ratio() -> None:
    """Layers 0 to 2 of Flash are all hash-routed: they would never run a learned router."""
    config = parse_config(FLASH)
    assert fast_layers(config) == {
        0: ["hash-routed", "no compression"],
        2: ["hash-routed", "compress ratio 4"],
        3: ["learned routing", "compress ratio 128"],
    }
    short = config.shortened((0, 2, 3))
    assert (short.num_hidden_layers, short.num_hash_layers) == (3, 2)
    assert short.compress_ratios == (0, 4, 128)
    assert [short.number(layer) for layer in range(3)] == [0, 2, 3]


@pytest.mark.parametrize("layers", [(), (2, 0), (1, 1), (0, 4), (-1,)])
def test_layers_that_are_not_ascending_numbers_are_refused(
    layers: tuple[int, ...], lossless: Path
) -> None:
    config = Model.read(lossless).config
    check_refused(RunError, lambda: config.shortened(layers), says=["layers to run", "0 to 3"])


@pytest.mark.parametrize("cache", [None, CacheOptions(slots=4)])
def test_chosen_layers_run_as_a_model_of_these_layers(
    cache: CacheOptions | None, tmp_path: Path, lossless: Path
) -> None:
    """The same bits as an artifact whose layers 1 and 2 are the chosen ones under new numbers."""
    tensors = artifacts.pack(TINY)
    renamed = {
        name.replace("layers.2.", "layers.1.").replace("layers.3.", "layers.2."): packed
        for name, packed in tensors.items()
        if not name.startswith("layers.1.")
    }
    config = {"num_hidden_layers": 3, "compress_ratios": [0, 128, 4]}
    other = write(tmp_path / "x.hfq", renamed, config, {}, {})
    wanted, found = [
        Engine.load(path, threads=1, cache=cache, layers=layers)
        for path, layers in ((other, None), (lossless, (0, 2, 3)))
    ]
    ids = np.arange(70) * 5
    with wanted, found:
        pair = [engine.forward(engine.new_state(), ids, "all") for engine in (wanted, found)]
    assert (pair[0].view(np.uint32) == pair[1].view(np.uint32)).all()


def test_a_difference_in_a_chosen_layer_names_its_number(bench: Bench) -> None:
    def spoil(engine: Fake, logits: Logits, ids: npt.NDArray[np.int64], position: int) -> Logits:
        return -logits if thrashing(engine) else logits

    bench.patch.setattr(neutrality, "fast_layers", lambda config: {0: ["a"], 1: ["b"], 3: ["c"]})
    failures = bench.run(Neutrality(tokens=1, fast=True), spoil).failures
    assert {failure.layer for failure in failures} == {3}, "the third of those that ran"


def test_on_a_device_nothing_is_traced_and_all_experts_fit(bench: Bench) -> None:
    check = bench.run(Neutrality(tokens=1), device="hip")
    assert check.ok
    assert bench.engines[1].cache == CacheOptions(slots=EXPERTS)


def test_prompts_of_a_file_take_the_place_of_the_built_in_ones(
    bench: Bench, tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"ids": [3, 4, 5]}\n{"ids": [6]}\n', encoding="utf-8")
    check = bench.run(Neutrality(prompts=path, tokens=2))
    assert check.figures["prompt_tokens"] == [3, 1]
    assert [ids for ids in bench.engines[2].fed if len(ids) > 1] == [[3, 4, 5]]


@pytest.mark.parametrize(
    ("device", "says"), [("cpu", "larger than memory: expected at most 0 bytes"), ("hip", None)]
)
def test_memory_is_asked_of_the_host_that_the_experts_would_be_in(
    device: Literal["cpu", "hip"], says: str | None, lossless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "available_bytes", lambda: 0)
    gate, where = Neutrality(cache=3_000_000), Surroundings(device=device)
    if says is None:
        gate.prepare(lossless, where)
    else:
        check_refused(GateError, lambda: gate.prepare(lossless, where), says=[says, "--cache"])


# ---------------------------------------------------------------- differences


def thrashing(engine: Fake) -> bool:
    return engine.cache is not None and engine.cache.slots == 4


def test_another_token_is_named_with_arm_prompt_place_and_layer(bench: Bench) -> None:
    wrong: list[tuple[int, int]] = []

    def spoil(engine: Fake, logits: Logits, ids: npt.NDArray[np.int64], position: int) -> Logits:
        if not thrashing(engine) or position != 65:
            return logits
        changed = logits.copy()
        changed[-1, 17] = 100
        wrong.append((int(logits[-1].argmax()), 17))
        return changed

    check = bench.run(Neutrality(tokens=4), spoil)
    ids = [failure for failure in check.failures if "another token" in failure.message]
    assert check.failures[:3] == ids, "ids first"
    assert [(failure.expected, failure.found) for failure in ids] == wrong
    said = "token 66: another token than with all experts in memory"
    prompts = zip((2, 3, 4), LENGTHS[2:], strict=False)
    assert [failure.message for failure in ids] == [
        f"thrashes, prompt {number} of {length} tokens, {said}" for number, length in prompts
    ]
    assert [failure.message for failure in check.failures[3:]] == [
        failure.message.replace("token 66", "token 65").replace(
            "another token than with all experts in memory", "other bits in logit 17"
        )
        for failure in ids
    ]
    assert {failure.layer for failure in check.failures} == {2}
    arms = check.figures["arms"]
    # A prompt ends with its first other token.
    assert (arms["thrashes"]["tokens"], arms["thrashes"]["equal"]) == (24 - 0 - 1 - 2, 24 - 6)
    assert (arms["fits"]["tokens"], arms["fits"]["equal"]) == (24, 24)


def test_one_bit_of_a_logit_is_a_difference_though_tokens_are_equal(bench: Bench) -> None:
    def spoil(engine: Fake, logits: Logits, ids: npt.NDArray[np.int64], position: int) -> Logits:
        if not thrashing(engine) or len(ids) != 7:
            return logits
        changed = logits.copy()
        changed.view(np.uint32)[2, 40] ^= 1
        return changed

    check = bench.run(Neutrality(tokens=3), spoil)
    (failure,) = check.failures
    assert failure.message == "thrashes, prompt 1 of 7 tokens, token 2: other bits in logit 40"
    assert failure.layer == 2
    assert failure.expected != failure.found
    arm = check.figures["arms"]["thrashes"]
    assert (arm["equal"], arm["tokens"], arm["logits"]) == (18, 18, False)


def test_minus_zero_is_not_zero(bench: Bench) -> None:
    def spoil(engine: Fake, logits: Logits, ids: npt.NDArray[np.int64], position: int) -> Logits:
        logits[0, 9] = -0.0 if thrashing(engine) else 0.0
        return logits

    assert len(bench.run(Neutrality(tokens=1), spoil).failures) == 6


# ---------------------------------------------------------------- nothing proven


def test_a_cache_that_evicts_nothing_where_it_should_is_red(bench: Bench) -> None:
    bench.touched = 4
    (failure,) = bench.run(Neutrality(tokens=1)).failures
    assert failure.message.startswith("not exercised: thrashes evicted nothing; give it less")


def test_a_cache_that_evicts_where_it_should_hold_everything_is_red(bench: Bench) -> None:
    bench.fewer = 1
    (failure,) = bench.run(Neutrality(tokens=1)).failures
    assert failure.message.startswith("not exercised: fits evicted")
    assert failure.found == 6


def test_a_prefetch_that_reads_nothing_is_red(bench: Bench, tmp_path: Path) -> None:
    bench.ahead = 0
    gate = Neutrality(tokens=1, adapter=predictor(tmp_path / "a", bench.path))
    (failure,) = bench.run(gate).failures
    assert failure.message == "not exercised: thrashes, prefetch read nothing ahead"


def test_a_cache_that_pages_nothing_is_red(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "cache_counters", lambda self: None)
    messages = [failure.message for failure in bench.run(Neutrality(tokens=1)).failures]
    assert messages == [
        f"not exercised: {arm} paged nothing; all experts were in memory"
        for arm in ("fits", "thrashes")
    ]


def test_an_error_of_an_arm_is_the_failure_of_the_check(bench: Bench) -> None:
    def spoil(engine: Fake, logits: Logits, ids: npt.NDArray[np.int64], position: int) -> Logits:
        if thrashing(engine) and position > 64:
            raise ExpertReadError("the disk is gone", tensor="layers.1.ffn.experts.3")
        return logits

    (failure,) = bench.run(Neutrality(tokens=3), spoil).failures
    assert failure.line().startswith("layers.1.ffn.experts.3, layer 1, expert 3: the disk is gone")
