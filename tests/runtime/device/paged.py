"""Owns what tests of paged experts share: a walk through the micro model, and what it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.device.state import DeviceState
from ds4q.runtime.experts.options import CacheOptions
from tests.runtime.device.micro import CONFIG

F32 = npt.NDArray[np.float32]
Logits = F32

EXPERTS, CHOSEN = CONFIG["n_routed_experts"], CONFIG["num_experts_per_tok"]
LAYERS, VOCAB = CONFIG["num_hidden_layers"], CONFIG["vocab_size"]
PROMPT = [int(token) for token in np.random.default_rng(3).integers(2, VOCAB, 12)]
STEPS = 12
THRASH = CacheOptions(slots=CHOSEN)
TOLERANCE = 1e-4  # as in test_engine
DELAY_US = 3000


def walk(engine: Any) -> Logits:
    """Logits of a prompt, and of a few steps of which each is fed the last one's greedy id."""
    state = engine.new_state()
    found = [engine.forward(state, PROMPT, "all")]
    for _ in range(STEPS):
        found.append(engine.forward(state, [int(found[-1][-1].argmax())]))
    return np.concatenate(found)


def many_steps(engine: HipEngine, state: DeviceState) -> None:
    """So many that an expert must be read."""
    for token in range(2, 40):
        engine.next_id(state, [token])


@pytest.fixture(scope="module")
def resident(micro_path: Path) -> Logits:
    """Logits of the walk with all experts on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS4Q_HIP", "sim")
        with HipEngine.load(micro_path, max_context=64, batch_tokens=8) as engine:
            return walk(engine)


def counts_of(engine: HipEngine) -> dict[str, Any]:
    """What paging counted."""
    found = engine.cache_counters()
    assert found is not None
    return found
