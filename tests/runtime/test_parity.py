"""The whole model against expected values that transformers computed from the same checkpoints.

Tolerances are those of the models' READMEs: 2e-3 for logits (float32 sums in another order; two
independent programs agree within 7e-5), equal ids wherever the margin is not tiny.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.runtime.engine import Engine
from tests.runtime.artifacts import DATA

RANDOM, TINY = DATA / "ds4-random", DATA / "ds4-tiny"
LOGITS = 2e-3
EXPECTED_RANDOM = json.loads((RANDOM / "expected.json").read_text())
EXPECTED_TINY = json.loads((TINY / "expected.json").read_text())
TINY_LOGITS = np.load(TINY / "expected_logits.npz")
PROMPTS = list(TINY_LOGITS)
F32Array = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def random_logits(random_engine: Engine) -> F32Array:
    """ds4-random over its prompt."""
    return random_engine.forward(random_engine.new_state(), EXPECTED_RANDOM["prompt"], "all")


def test_random_logits(random_logits: F32Array) -> None:
    expected = np.load(RANDOM / "logits.npy")
    assert random_logits.shape == expected.shape == (300, 512)
    assert np.abs(random_logits - expected).max() < LOGITS


def test_random_argmax(random_logits: F32Array) -> None:
    clear = np.array(EXPECTED_RANDOM["margin_per_pos"]) >= 2 * LOGITS
    assert clear.sum() == 298
    expected = np.array(EXPECTED_RANDOM["argmax_per_pos"])
    assert np.array_equal(random_logits.argmax(axis=1)[clear], expected[clear])


def test_random_greedy(random_engine: Engine) -> None:
    expected, ids = np.load(RANDOM / "greedy_logits.npy"), []
    state = random_engine.new_state()
    logits = random_engine.forward(state, EXPECTED_RANDOM["prompt"])
    for row in expected:
        assert np.abs(logits[0] - row).max() < LOGITS
        ids.append(int(logits.argmax()))
        logits = random_engine.forward(state, ids[-1:])
    assert ids == EXPECTED_RANDOM["greedy"]


def test_both_paths_agree(random_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy in place of numba, through the first ratio-128 window; decode after prefill."""
    prompt = EXPECTED_RANDOM["prompt"]

    def run() -> F32Array:
        state = random_engine.new_state()
        parts = [random_engine.forward(state, prompt[:135], "all")]
        parts += [random_engine.forward(state, [token]) for token in prompt[135:140]]
        return np.concatenate(parts)

    monkeypatch.delenv("DS4Q_REFERENCE", raising=False)
    fast = run()
    monkeypatch.setenv("DS4Q_REFERENCE", "1")
    reference = run()
    assert np.abs(reference - fast).max() < 1e-4
    assert not np.array_equal(reference, fast)  # it was another path


@pytest.mark.parametrize("name", PROMPTS)
def test_tiny_logits(tiny_engine: Engine, name: str) -> None:
    prompt = EXPECTED_TINY[name]["prompt"]
    logits = tiny_engine.forward(tiny_engine.new_state(), prompt, "all")
    assert logits.shape == TINY_LOGITS[name].shape
    assert np.abs(logits - TINY_LOGITS[name]).max() < LOGITS


@pytest.mark.parametrize("name", PROMPTS)
def test_tiny_greedy_fed_the_expected_ids(tiny_engine: Engine, name: str) -> None:
    expected = EXPECTED_TINY[name]
    state = tiny_engine.new_state()
    logits = tiny_engine.forward(state, expected["prompt"])
    checked = 0
    for token, margin in zip(expected["greedy"], expected["margins"], strict=True):
        if margin > 0.01:
            assert int(logits.argmax()) == token
            checked += 1
        logits = tiny_engine.forward(state, [token])
    assert checked > len(expected["greedy"]) // 2


@pytest.mark.parametrize("name", PROMPTS)
def test_tiny_greedy_running_free(tiny_engine: Engine, name: str) -> None:
    expected = EXPECTED_TINY[name]
    sure = next(
        (i for i, margin in enumerate(expected["margins"]) if margin <= 0.01),
        len(expected["margins"]),
    )
    assert sure > 5
    state, ids = tiny_engine.new_state(), []
    logits = tiny_engine.forward(state, expected["prompt"])
    for _ in range(sure):
        ids.append(int(logits.argmax()))
        logits = tiny_engine.forward(state, ids[-1:])
    assert ids == expected["greedy"][:sure]


def nats_per_byte(engine: Engine, ids: list[int]) -> float:
    """Mean cross-entropy of ids[1:] given what stands before each."""
    logits: Any = engine.forward(engine.new_state(), ids[:-1], "all").astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    return float(np.mean(total - logits[np.arange(len(ids) - 1), ids[1:]]))


def test_tiny_nats_per_byte(tiny_engine: Engine) -> None:
    expected = EXPECTED_TINY["_nats_per_byte"]
    found = np.mean([nats_per_byte(tiny_engine, ids) for ids in expected["tokens"]])
    assert abs(found - expected["value"]) < 1e-5
