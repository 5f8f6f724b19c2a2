"""Owns small traces of router states: scores of a layer that follow from the layer before."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds4q.artifact.newfile import NewFile
from ds4q.runtime.experts.header import Header
from ds4q.runtime.experts.predict import best
from ds4q.runtime.experts.trace import Outcome, Recorder

D, E, K, LAYERS = 12, 10, 3, 4


class Truth(NamedTuple):
    """``scores = hidden of the layer before @ weights + offset``, exactly, plus noise."""

    weights: npt.NDArray[np.float64]  # [LAYERS, D, E]
    offset: npt.NDArray[np.float64]
    bias: npt.NDArray[np.float32]  # [E]


def truth(seed: int = 3, rank: int = D) -> Truth:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((LAYERS, D, rank)) @ rng.standard_normal((LAYERS, rank, E))
    return Truth(weights, rng.standard_normal(E), rng.standard_normal(E).astype(np.float32))


def header(artifact: str = "ab" * 16, hash_layers: int = 1, layers: int = LAYERS) -> Header:
    return Header(
        artifact=artifact,
        layers=layers,
        hash_layers=hash_layers,
        experts=E,
        owned=(0, E),
        top_k=K,
        hidden=D,
        slots=E,
        slot_bytes=(1,) * layers,
        expert_bytes=((1,),) * layers,
        policy="lru",
    )


def write_states(
    path: Path,
    model: Truth,
    *,
    tokens: int = 400,
    batch: int = 50,
    noise: float = 0.0,
    seed: int = 0,
    head: Header | None = None,
    skip: tuple[int, int] | None = None,
) -> Path:
    """A trace of one sequence, in batches; without the states of ``skip``: (batch, layer)."""
    rng = np.random.default_rng(seed)
    head = head or header()
    recorder = Recorder(NewFile(path), head)
    for layer in range(1, head.layers):
        recorder.router(layer, np.zeros((E, D), np.float32), model.bias)
    asked = range(K)
    recorder.dispatch(0, 0, "prefill", 0, 0, [[*asked]], asked, [Outcome.COMPULSORY] * K)
    for number in range(-(-tokens // batch)):
        first, count = number * batch, min(batch, tokens - number * batch)
        words = rng.integers(0, 50, count)
        before = np.zeros((count, D), np.float32)
        for layer in range(max(head.hash_layers - 1, 0), head.layers):
            scores = before @ model.weights[layer] + model.offset
            scores = (scores + noise * rng.standard_normal(scores.shape)).astype(np.float32)
            hidden = (rng.standard_normal((count, D)) + 2).astype(np.float16).astype(np.float32)
            ids = best(scores + model.bias, K)
            if skip != (number, layer):
                recorder.states(number, 0, "prefill", first, layer, words, ids, hidden, scores)
            before = hidden
    recorder.close()
    return path
