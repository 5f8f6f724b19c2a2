"""Resident experts: the right matrix in the right place, one buffer a layer, any mix of types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from ds4q.artifact.hfq import Reader
from ds4q.artifact.types import BF16, F32
from ds4q.runtime.backend.weights import Expert, Weight
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


def only(store: ResidentExperts, layer: int, ids: list[int]) -> Mapping[int, Expert]:
    """The experts of the one band that serves everything."""
    ((experts, where),) = store.bands(layer, np.array([ids]), "prefill")
    assert where is None
    return experts


def test_experts_are_in_their_places() -> None:
    source = Source()
    store = ResidentExperts(CONFIG, source)
    assert len(source.asked) == CONFIG.num_hidden_layers
    assert all(len(names) == 3 * 16 for names in source.asked)
    experts = only(store, 4, [3, 3, 9])
    for number in (3, 9):
        expert = experts[number]
        parts = (("w1", expert.gate), ("w3", expert.up), ("w2", expert.down))
        for role, weight in parts:
            name = f"layers.4.ffn.experts.{number}.{role}.weight"
            assert weight.data[0] == sum(map(ord, name)) % 251
            assert (weight.rows, weight.cols) == ((256, 128) if role == "w2" else (128, 256))


def test_experts_of_a_layer_may_differ_in_type() -> None:
    odd = "layers.2.ffn.experts.7.w2.weight"
    experts = only(ResidentExperts(CONFIG, Source(odd)), 2, [7])
    assert [experts[e].down.type_id for e in (6, 7, 8)] == [BF16.id, F32.id, BF16.id]
    assert experts[7].gate.type_id == BF16.id


@pytest.mark.parametrize(
    ("role", "expected", "found"), [("w1", "F32", "BF16"), ("w3", "BF16", "F32")]
)
def test_gate_and_up_of_two_types_are_refused(role: str, expected: str, found: str) -> None:
    odd = f"layers.2.ffn.experts.7.{role}.weight"
    check_refused(
        ModelTensorError,
        lambda: ResidentExperts(CONFIG, Source(odd), path="m.hfq"),
        path="m.hfq",
        tensor="layers.2.ffn.experts.7.w3.weight",
        says=[f"expected {expected}", f"found {found}"],
    )


def test_loaded_experts_are_the_packed_bytes(random_path: Path) -> None:
    """Still packed after loading, byte for byte, and in one buffer."""
    packed = pack(DATA / "ds4-random")
    with Reader(random_path) as reader:
        source = ArtifactSource(reader)
        experts = only(ResidentExperts(CONFIG, source), 3, [0])
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
