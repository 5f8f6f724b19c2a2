"""What the collector sums: the plain statistics, in an order that nothing else decides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.fastpath import reference_wanted
from ds4q.artifact.formats import codec_for
from ds4q.quantize.imatrix import LayerStatistics
from ds4q.runtime import collect
from ds4q.runtime.collect import Collector
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import CalibrationError
from tests.checks import check_parity, check_refused, same_bits
from tests.runtime.artifacts import DATA, Packed, config_of, pack

Array = npt.NDArray[Any]
RANDOM, TINY = DATA / "ds4-random", DATA / "ds4-tiny"
PROMPTS = {
    RANDOM: np.load(RANDOM / "prompt.npy")[:120],
    TINY: np.frombuffer((DATA / "text" / "scored.txt").read_bytes()[:120], np.uint8),
}


def watched(engine: Engine, ids: Array, threads: int = 1) -> Collector:
    collector = Collector(engine.config, threads)
    engine.forward(engine.new_state(), ids, observer=collector)
    return collector


def collected(engine: Engine, ids: Array) -> list[LayerStatistics]:
    return watched(engine, ids).statistics()


# ---------------------------------------------------------------- against plain numpy


def decoded(tensors: dict[str, Packed], name: str) -> Array:
    kind, shape, payload = tensors[name]
    return codec_for(kind.id).decode(payload, shape).astype(np.float64)


def plain(folder: Path, engine: Engine, ids: Array) -> list[tuple[Array, Array, Array, Array]]:
    """(counts, gain, gate_up, down) of each layer from traced activations, all in float64."""
    seen: dict[str, Array] = {}
    engine.forward(engine.new_state(), ids, trace=lambda name, values: seen.update({name: values}))
    config, tensors, found = config_of(folder), pack(folder), []
    experts = config["n_routed_experts"]
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}"
        before = seen[f"l{layer}.ffn_in"].astype(np.float64)
        rms = np.sqrt(np.square(before).mean(axis=1, keepdims=True) + config["rms_norm_eps"])
        x = before / rms * decoded(tensors, f"{name}.ffn_norm.weight")
        ids_, weights = seen[f"l{layer}.route_idx"], seen[f"l{layer}.route_w"]
        counts = np.bincount(ids_.ravel(), minlength=experts)
        gain = np.zeros(experts)
        gate_up = np.zeros((experts, config["hidden_size"]))
        down = np.zeros((experts, config["moe_intermediate_size"]))
        for expert in np.flatnonzero(counts):
            t, k = np.nonzero(ids_ == expert)
            w1, w3 = (
                decoded(tensors, f"{name}.ffn.experts.{expert}.{w}.weight") for w in ["w1", "w3"]
            )
            gate = np.minimum(x[t] @ w1.T, config["swiglu_limit"])
            up = np.clip(x[t] @ w3.T, -config["swiglu_limit"], config["swiglu_limit"])
            hidden = gate / (1 + np.exp(-gate)) * up
            gain[expert] = np.square(weights[t, k].astype(np.float64)).mean()
            gate_up[expert] = np.square(x[t]).mean(axis=0)
            down[expert] = np.square(hidden).mean(axis=0)
        found.append((counts, gain, gate_up, down))
    return found


@pytest.mark.parametrize("folder", [RANDOM, TINY], ids=lambda folder: folder.name)
def test_means_of_the_models_own_activations(
    folder: Path, random_engine: Engine, tiny_engine: Engine
) -> None:
    engine = random_engine if folder is RANDOM else tiny_engine
    found = collected(engine, PROMPTS[folder])
    expected = plain(folder, engine, PROMPTS[folder])
    share = engine.config.num_experts_per_tok
    for stats, (counts, gain, gate_up, down) in zip(found, expected, strict=True):
        assert stats.tokens.tolist() == counts.tolist()
        assert stats.tokens.sum() == len(PROMPTS[folder]) * share
        # float32 activations against float64 ones; a mean square doubles the relative error.
        np.testing.assert_allclose(stats.gain, gain, rtol=1e-6)
        np.testing.assert_allclose(stats.gate_up, gate_up, rtol=1e-5)
        np.testing.assert_allclose(stats.down, down, rtol=1e-4, atol=1e-9)
        for values in (stats.gain, stats.gate_up, stats.down):
            assert values.dtype == np.float32
            assert values.flags.c_contiguous


# ---------------------------------------------------------------- nothing else decides


@pytest.mark.parametrize(("threads", "batch"), [(1, 256), (3, 7), (2, 1)])
def test_threads_and_batches_never_show(
    random_path: Path, random_engine: Engine, threads: int, batch: int
) -> None:
    engine = Engine.load(random_path, threads=threads, batch_tokens=batch)
    ids = PROMPTS[RANDOM][:60]
    found, expected = watched(engine, ids, threads), watched(random_engine, ids)
    same_bits(found._tokens, expected._tokens)
    for name in ("_gain", "_gate_up", "_down"):  # means in float32 would hide another order
        a, b = getattr(found, name), getattr(expected, name)
        if reference_wanted():  # numpy's products depend on the batch's shape
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7)
        else:
            same_bits(a, b, what=name)


def test_sequences_add_up_in_order(random_engine: Engine) -> None:
    ids = PROMPTS[RANDOM]
    collector = Collector(random_engine.config, 1)
    for part in (ids[:50], ids[50:]):
        random_engine.forward(random_engine.new_state(), part, observer=collector)
    first, second = collected(random_engine, ids[:50]), collected(random_engine, ids[50:])
    for both, one, other in zip(collector.statistics(), first, second, strict=True):
        assert both.tokens.tolist() == (one.tokens + other.tokens).tolist()
        n, m = one.tokens[:, None], other.tokens[:, None]
        mean = (n * one.gate_up + m * other.gate_up) / np.maximum(n + m, 1)
        np.testing.assert_allclose(both.gate_up, mean, rtol=1e-5)


def test_looking_on_changes_nothing(random_engine: Engine) -> None:
    ids, calls = PROMPTS[RANDOM][:30], []

    def observer(layer: int, ids: Array, weights: Array, x: Array, experts: Any) -> None:
        calls.append((layer, ids.shape, weights.shape, x.shape, x.dtype))
        assert set(ids.ravel().tolist()) <= set(experts)

    plain_logits = random_engine.forward(random_engine.new_state(), ids, "all")
    seen_logits = random_engine.forward(random_engine.new_state(), ids, "all", observer=observer)
    same_bits(seen_logits, plain_logits)
    c = random_engine.config
    k = c.num_experts_per_tok
    shapes = ((30, k), (30, k), (30, c.hidden_size), np.dtype(np.float32))
    assert calls == [(layer, *shapes) for layer in range(c.num_hidden_layers)]


# ---------------------------------------------------------------- parts


def test_add_squares_in_both_paths() -> None:
    rng = np.random.default_rng(3)
    rows = (rng.standard_normal((40, 37)) * 10.0 ** rng.integers(-20, 19, (40, 37))).astype("f4")
    sums = rng.random(37)
    _, (added, _) = check_parity(collect.add_squares, (sums, rows))
    expected = sums.copy()
    for row in rows:
        expected = expected + row.astype(np.float64) * row.astype(np.float64)
    same_bits(added, expected)


def test_activate_in_both_paths() -> None:
    rng = np.random.default_rng(4)
    gate, up = rng.standard_normal((2, 30, 64), dtype=np.float32) * 6
    found = collect.activate.fast(gate, up, 7.0)
    expected = np.minimum(gate, 7.0) / (1 + np.exp(-np.minimum(gate, 7.0).astype(np.float64)))
    expected = expected * np.clip(up, -7, 7)
    for hidden in (found, collect.activate.reference(gate, up, 7.0)):
        np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-7)


def feed(
    engine: Engine, change: Callable[[Array, Array], None], ids: list[list[int]]
) -> list[LayerStatistics]:
    """One call by hand for layer 0, inputs and weights all 1 before ``change``."""
    collector, c = Collector(engine.config, 1), engine.config
    x = np.ones((len(ids), c.hidden_size), np.float32)
    weights = np.ones((len(ids), len(ids[0])), np.float32)
    change(x, weights)
    seen: dict[str, Any] = {}
    engine.forward(
        engine.new_state(), [0], observer=lambda *args: seen.setdefault("experts", args[-1])
    )
    with np.errstate(invalid="ignore"):  # numpy's products of what the tests spoil
        collector(0, np.array(ids), weights, x, seen["experts"])
    return collector.statistics()


def test_an_expert_may_be_chosen_twice_for_one_token(random_engine: Engine) -> None:
    def double(x: Array, weights: Array) -> None:
        weights[0] = 1, 3
        x[1] = 2

    stats = feed(random_engine, double, [[5, 5], [5, 2]])[0]
    assert stats.tokens[[5, 2, 0]].tolist() == [3, 1, 0]
    assert stats.gain[5] == pytest.approx((1 + 9 + 1) / 3)
    assert stats.gate_up[5] == pytest.approx(np.full(256, (1 + 1 + 4) / 3))
    assert not stats.gate_up[0].any()
    assert not stats.down[0].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_inputs_that_have_no_finite_mean(random_engine: Engine, value: float) -> None:
    def spoil(x: Array, weights: Array) -> None:
        x[0, 3] = value

    check_refused(
        CalibrationError,
        lambda: feed(random_engine, spoil, [[5, 2]]),
        says=["not finite", "inputs of expert 2 in layer 0"],
    )


def test_weights_that_have_no_finite_mean(random_engine: Engine) -> None:
    def spoil(x: Array, weights: Array) -> None:
        weights[0, 1] = np.nan

    check_refused(
        CalibrationError,
        lambda: feed(random_engine, spoil, [[5, 2]]),
        says=["weights of expert 2 in layer 0"],
    )
