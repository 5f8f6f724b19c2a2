"""Opening a cache of experts: what an engine keeps beside it is left room for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds4q.runtime.engine import Engine, expected_state_bytes
from ds4q.runtime.experts import cache
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.kvtype import KvType

CONTEXT, BATCH = 200, 16
FREE_BYTES = 17 << 20  # with room for some of the experts


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What planning hears is needed beside the slots."""
    heard: list[int] = []
    honest = cache.plan_slots

    def plan(*args: Any, needed: int, available: Any, **options: Any) -> Any:
        heard.append(needed)
        return honest(*args, needed=needed, available=lambda: FREE_BYTES, **options)

    monkeypatch.setattr(cache, "plan_slots", plan)
    return heard


def slots(path: Path, **options: Any) -> int:
    """Slots of a layer that an automatic cache gets."""
    auto = CacheOptions(budget="auto")
    sizes: dict[str, Any] = {"max_context": CONTEXT, "batch_tokens": BATCH}
    with Engine.load(path, threads=1, cache=auto, **sizes, **options) as engine:
        counters = engine.cache_counters()
    assert counters is not None
    return int(counters["slots"])


@pytest.mark.parametrize("kv_type", ["f32", "bf16"])
def test_room_is_left_for_sequences_and_what_stands_beside(
    random_path: Path, needs: list[int], kv_type: KvType
) -> None:
    with Engine.load(random_path, threads=1) as engine:
        one = expected_state_bytes(engine.config, CONTEXT, BATCH, kv_type)
    alone = slots(random_path, kv_type=kv_type)
    three = slots(random_path, kv_type=kv_type, sequences=3)
    beside = slots(random_path, kv_type=kv_type, sequences=3, beside_bytes=1 << 20)
    assert needs[1] - needs[0] == 2 * one
    assert needs[2] - needs[1] == 1 << 20
    assert alone > three > beside
