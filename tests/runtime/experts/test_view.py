"""What a watcher sees: every choice of every token, and what is in memory by then."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.runtime.engine import Engine
from ds4q.runtime.experts.options import CacheOptions

EXPERTS, K, LAYERS = 16, 4, 6  # of ds4-random
IDS = [range(20), [7], [8], [9]]


def walk(engine: Engine) -> Counter[tuple[int, int]]:
    """A few steps; how often each expert of each layer was chosen, from the trace of values."""
    chosen: Counter[tuple[int, int]] = Counter()

    def see(name: str, values: Any) -> None:
        if name.endswith(".route_idx"):
            layer = int(name[1 : name.index(".")])
            chosen.update((layer, expert) for expert in values.ravel().tolist())

    state = engine.new_state()
    for ids in IDS:
        engine.forward(state, ids, trace=see)
    return chosen


@pytest.mark.parametrize(
    "options",
    [None, CacheOptions(slots=5), CacheOptions(owner=(1, 3), cold="none")],
    ids=["resident", "paged", "owned"],
)
def test_choices_are_counted(random_path: Path, options: CacheOptions | None) -> None:
    with Engine.load(random_path, threads=1, cache=options) as engine:
        assert not engine.experts_view().routed.any()
        chosen = walk(engine)
        before = engine.experts_view()
        assert before.routed.shape == before.resident.shape == (LAYERS, EXPERTS)
        found = {(int(n), int(e)): int(before.routed[n, e]) for n, e in np.argwhere(before.routed)}
        assert found == chosen
        assert before.routed.sum() == LAYERS * K * sum(map(len, IDS))
        engine.forward_many([(engine.new_state(), [1, 2, 3]), (engine.new_state(), [4])])
        assert engine.experts_view().routed.sum() - before.routed.sum() == LAYERS * K * 4


def test_what_is_resident(random_path: Path) -> None:
    with Engine.load(random_path, threads=1) as engine:
        assert engine.experts_view().resident.all()
    with Engine.load(
        random_path, threads=1, cache=CacheOptions(owner=(1, 3), cold="none")
    ) as engine:
        rows = engine.experts_view().resident
        assert (rows == np.isin(np.arange(EXPERTS), range(6, 11))).all()
    with Engine.load(random_path, threads=1, cache=CacheOptions(slots=5)) as engine:
        assert not engine.experts_view().resident.any()
        walk(engine)
        counters = engine.cache_counters()
        assert counters is not None
        held = engine.experts_view().resident.sum(axis=1)
        assert (held >= K).all()
        assert (held <= 5 + np.array(counters["quarantine"])).all()


def test_the_last_tokens_experts_are_there(random_path: Path) -> None:
    last: dict[str, Any] = {}
    with Engine.load(random_path, threads=1, cache=CacheOptions(slots=4)) as engine:
        state = engine.new_state()
        engine.forward(state, [1, 2, 3])
        engine.forward(state, [4], trace=last.__setitem__)
        resident = engine.experts_view().resident
    for layer in range(LAYERS):
        assert resident[layer, last[f"l{layer}.route_idx"][0]].all()
