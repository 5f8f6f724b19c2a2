"""Experts paged on the simulated device against all of them on it, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.hipkern.sim.control import Control
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.experts.options import CacheOptions
from tests.checks import same_bits
from tests.runtime.device.conftest import Load
from tests.runtime.device.micro import CONFIG

EXPERTS, CHOSEN = CONFIG["n_routed_experts"], CONFIG["num_experts_per_tok"]
VOCAB = CONFIG["vocab_size"]
PROMPT = [int(token) for token in np.random.default_rng(3).integers(2, VOCAB, 12)]
STEPS = 12


def walk(engine: HipEngine) -> npt.NDArray[np.float32]:
    """Logits of a prompt, and of a few steps of which each is fed the last one's greedy id."""
    state = engine.new_state()
    found = [engine.forward(state, PROMPT, "all")]
    for _ in range(STEPS):
        found.append(engine.forward(state, [int(found[-1][-1].argmax())]))
    return np.concatenate(found)


@pytest.mark.parametrize("slots", [CHOSEN, EXPERTS - 1, EXPERTS])
@pytest.mark.parametrize("replay", [True, False])
def test_bits_are_those_of_a_resident_model(
    load: Load, micro_path: Path, slots: int, replay: bool
) -> None:
    wanted = walk(load(micro_path, max_context=64, batch_tokens=8))
    paged = load(
        micro_path,
        max_context=64,
        batch_tokens=8,
        replay=replay,
        cache=CacheOptions(slots=slots),
    )
    same_bits(walk(paged), wanted)
    counts: Any = paged.cache_counters()
    evictions = counts["prefill"]["evictions"] + counts["decode"]["evictions"]
    assert (evictions > 0) == (slots < EXPERTS)
