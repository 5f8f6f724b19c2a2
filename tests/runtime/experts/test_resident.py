"""Resident experts: the right matrix in the right place, one buffer a layer, one type a role."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from ds4q.artifact.hfq import Reader
from ds4q.artifact.types import BF16, F32
from ds4q.runtime.backend.weights import Weight
from ds4q.runtime.config import parse_config
from ds4q.runtime.errors import ModelTensorError
from ds4q.runtime.experts.resident import ResidentExperts
from ds4q.runtime.source import ArtifactSource
from tests.checks import check_refused
from tests.runtime.artifacts import DATA, config_of, pack

CONFIG = parse_config(config_of(DATA / "ds4-random"))


class Source:
    """Matrices whose bytes tell their name; ``odd`` is F32 among BF16."""

    def __init__(self, odd: str = "") -> None:
        self.asked: list[list[str]] = []
        self.odd = odd

    def matrices(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Weight]:
        self.asked.append(list(shapes))
        made = {}
        for name, (rows, cols) in shapes.items():
            kind = F32 if name == self.odd else BF16
            mark = sum(map(ord, name)) % 251
            data = np.full(kind.payload_bytes((rows, cols)), mark, dtype=np.uint8)
            made[name] = Weight(kind.id, rows, cols, data)
        return made


def test_experts_are_in_their_places() -> None:
    source = Source()
    store = ResidentExperts(CONFIG, source)
    assert len(source.asked) == CONFIG.num_hidden_layers
    assert all(len(names) == 3 * 16 for names in source.asked)
    experts = store.get(4, np.array([3, 3, 9]))
    for number in (3, 9):
        expert = experts[number]
        parts = (("w1", expert.gate), ("w3", expert.up), ("w2", expert.down))
        for role, weight in parts:
            name = f"layers.4.ffn.experts.{number}.{role}.weight"
            assert weight.data[0] == sum(map(ord, name)) % 251
            assert (weight.rows, weight.cols) == ((256, 128) if role == "w2" else (128, 256))


@pytest.mark.parametrize("role", ["w1", "w2", "w3"])
def test_mixed_types_in_a_layer_are_refused(role: str) -> None:
    odd = f"layers.2.ffn.experts.7.{role}.weight"
    check_refused(
        ModelTensorError,
        lambda: ResidentExperts(CONFIG, Source(odd), path="m.hfq"),
        path="m.hfq",
        tensor=odd,
        says=["expected BF16", "found F32"],
    )


def test_loaded_experts_are_the_packed_bytes(random_path: Path) -> None:
    """Still packed after loading, byte for byte, and in one buffer."""
    packed = pack(DATA / "ds4-random")
    with Reader(random_path) as reader:
        source = ArtifactSource(reader)
        experts = ResidentExperts(CONFIG, source).get(3, np.array([0]))
        source.fill(None)
    buffers = set()
    for number in range(CONFIG.n_routed_experts):
        expert = experts[number]
        for role, weight in (("w1", expert.gate), ("w3", expert.up), ("w2", expert.down)):
            expected = packed[f"layers.3.ffn.experts.{number}.{role}.weight"]
            assert weight.type_id == expected[0].id
            assert np.array_equal(weight.data, expected[2])
            buffers.add(id(weight.data.base))
    assert len(buffers) == 1
