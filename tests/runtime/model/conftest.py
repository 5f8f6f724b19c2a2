"""Owns what operator tests share: both paths, the operators of ds4-random, and its trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.artifact.hfq import Reader
from ds4q.runtime.backend.cpu import CpuBackend
from ds4q.runtime.backend.workers import Workers
from ds4q.runtime.config import ModelConfig, parse_config
from ds4q.runtime.experts.resident import ResidentExperts
from ds4q.runtime.kv import new_state
from ds4q.runtime.model.attention import Attention
from ds4q.runtime.model.head import Embedding, Head
from ds4q.runtime.model.hyper import HyperConnection
from ds4q.runtime.model.moe import MoE
from ds4q.runtime.model.parts import Parts, Span, Step
from ds4q.runtime.model.rope import layer_frequencies
from ds4q.runtime.source import ArtifactSource
from tests.runtime.artifacts import DATA

Trace = dict[str, npt.NDArray[Any]]


class Operators:
    """Every operator of ds4-random by itself, outside the engine."""

    def __init__(self, parts: Parts) -> None:
        self.config: ModelConfig = parts.config
        layers = range(parts.config.num_hidden_layers)
        self.frequencies = {
            ratio: layer_frequencies(parts.config, layer)
            for layer, ratio in enumerate(parts.config.compress_ratios)
        }
        self.embedding = Embedding(parts)
        self.head = Head(parts)
        self.around_attention = [
            HyperConnection(parts, f"layers.{n}.hc_attn", f"layers.{n}.attn_norm.weight")
            for n in layers
        ]
        self.around_experts = [
            HyperConnection(parts, f"layers.{n}.hc_ffn", f"layers.{n}.ffn_norm.weight")
            for n in layers
        ]
        self.attention_norms = [
            parts.source.values(f"layers.{n}.attn_norm.weight", self.config.hidden_size)
            for n in layers
        ]
        self.attention = [Attention(parts, n) for n in layers]
        self.experts = [MoE(parts, n) for n in layers]

    def step(self, ids: npt.NDArray[np.int64], trace: Any = None) -> Step:
        """All of ``ids`` as one batch of a new sequence."""
        state = new_state(self.config, len(ids), None)
        return Step.of(
            ids, [Span(slice(0, len(ids)), 0, state.layers)], self.frequencies, trace=trace
        )


@pytest.fixture(scope="session")
def operators(random_path: Path) -> Operators:
    """The operators, with weights."""
    with Reader(random_path) as reader:
        config = parse_config(reader.metadata["config"])
        source = ArtifactSource(reader)
        experts = ResidentExperts(config, source)
        made = Operators(Parts(config, source, experts, CpuBackend(2), Workers(2)))
        source.fill(None)
    return made


@pytest.fixture(scope="session")
def trace() -> Trace:
    """Intermediate values of the prefill of ds4-random, by transformers."""
    with np.load(DATA / "ds4-random" / "trace.npz") as arrays:
        return {name: arrays[name] for name in arrays}


@pytest.fixture(scope="session")
def prompt() -> npt.NDArray[np.int64]:
    """The 300 token ids that the trace belongs to."""
    ids: npt.NDArray[np.int64] = np.load(DATA / "ds4-random" / "prompt.npy")
    return ids


@pytest.fixture(params=["fast", "reference"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test on the compiled kernels and on numpy."""
    monkeypatch.setenv("DS4Q_REFERENCE", "1" if request.param == "reference" else "0")
    name: str = request.param
    return name
