"""Whole layers in a row, from the prompt, against every array of the trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.runtime.engine import Engine
from tests.runtime.model.conftest import Trace

TRACE = 2e-4
PER_ENTRY = ("l1.compressed_kv", "l2.compressed_kv")
SETS = ("l0.route_idx", "l1.route_idx", "l2.route_idx", "l1.index_topk")
FROM_STREAMS = ("l5.streams_tail", "dspark.main_hidden_tail")


def test_every_array_of_the_trace(
    random_engine: Engine, trace: Trace, prompt: npt.NDArray[np.int64]
) -> None:
    batches: dict[str, list[npt.NDArray[Any]]] = {}

    def keep(name: str, values: npt.NDArray[Any]) -> None:
        batches.setdefault(name, []).append(values.copy())

    random_engine.forward(random_engine.new_state(), prompt, "all", trace=keep)
    assert len(batches["l0.attn_in"]) == 2  # 256 tokens and the rest
    found = {
        name: parts[-1] if name in PER_ENTRY else np.concatenate(parts)
        for name, parts in batches.items()
        if name != "l1.index_topk" and not name.endswith("index_topk")
    }
    streams = [found[f"l{layer}.streams"] for layer in (3, 4, 5)]
    found["l5.streams_tail"] = streams[-1][-32:]
    found["dspark.main_hidden_tail"] = np.concatenate(
        [layer[-32:].mean(axis=1) for layer in streams], axis=1
    )
    found["l1.index_topk"] = np.concatenate(
        [
            np.pad(part, ((0, 0), (0, 8 - part.shape[1])), constant_values=-1)
            for part in batches["l1.index_topk"]
        ]
    )
    weights = {name for name in trace if name.endswith("route_w")}
    for name in set(trace) - set(SETS) - weights:
        assert found[name].shape == trace[name].shape, name
        assert np.abs(found[name] - trace[name]).max() < TRACE, name
    for name in SETS:
        assert np.array_equal(np.sort(found[name], axis=1), np.sort(trace[name], axis=1)), name
    for name in weights:
        order = np.argsort(found[name.replace("_w", "_idx")], axis=1)
        expected = np.argsort(trace[name.replace("_w", "_idx")], axis=1)
        mine, known = (
            np.take_along_axis(array, by, 1)
            for array, by in ((found[name], order), (trace[name], expected))
        )
        assert np.abs(mine - known).max() < TRACE, name
