"""Owns where routed experts lie in an artifact, and how long their slots are. Reads no payload.

Built once, from the tensor index: a missing tensor, another shape or length, gate and up of
different types are refused here, before the first large read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ds4q.artifact.hfq import TensorEntry
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.experts.resident import check_gate_and_up
from ds4q.runtime.source import Tensors

if TYPE_CHECKING:
    from ds4q.runtime.experts.transform import ExpertFillTransform

ALIGN = 256  # of slots and of the matrices in them


class Key(NamedTuple):
    """A routed expert."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class Record:
    """A routed expert in the file: gate [width, d], up [width, d] and down [d, width]."""

    key: Key
    gate: TensorEntry
    up: TensorEntry
    down: TensorEntry

    @property
    def entries(self) -> tuple[TensorEntry, TensorEntry, TensorEntry]:
        """Gate, up, down."""
        return self.gate, self.up, self.down

    @property
    def nbytes(self) -> int:
        """Bytes that are read of the file."""
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The slots of a layer: as long as the longest of its experts, role by role.

    Slot i of a role lies at ``base + i * stride``. Up begins ``up_at`` bytes after gate.
    """

    up_at: int
    gate_up_stride: int
    down_stride: int

    @property
    def nbytes(self) -> int:
        """Bytes of a slot, both roles together."""
        return self.gate_up_stride + self.down_stride


class Catalogue:
    """All routed experts of an artifact.

    Parameters
    ----------
    path : named in errors
    bind : bind the decode tables of all experts in ``tensors``, see ``bind``
    transform : how slots come to hold something else than the file; None: they hold the same bytes

    Attributes
    ----------
    records : by layer, then by expert, as they lie in the file
    packed : the same, as slots hold them
    geometry : by layer
    number : maps a layer, counted among those that run, to its number in the checkpoint

    Raises
    ------
    ModelTensorError, BackendTypeError : an expert that cannot be run
    FillTransformError : an expert that cannot be transformed
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        *,
        path: object = None,
        transform: ExpertFillTransform | None = None,
        bind: bool = True,
    ) -> None:
        self.path = path
        self.number = config.number
        self.transform = transform
        self.records = tuple(
            _layer_records(config, tensors, layer, path)
            for layer in range(config.num_hidden_layers)
        )
        self.packed = self.records
        if transform is not None:
            self.packed = tuple(tuple(map(transform.packed, layer)) for layer in self.records)
        self.geometry = tuple(_geometry(layer) for layer in self.packed)
        if bind:
            self.bind(tensors)

    def bind(self, tensors: Tensors) -> None:
        """Bind the decode tables of the experts, by global id; they stay bound."""
        for layer in self.records:
            tensors.bind(entry for record in layer for entry in record.entries)

    def __getitem__(self, key: Key) -> Record:
        return self.records[key.layer][key.expert]

    def __iter__(self) -> Iterator[Record]:
        """Layer by layer, by id."""
        for layer in self.records:
            yield from layer

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return len(self.records[0])

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in every layer."""
        return sum(geometry.nbytes for geometry in self.geometry)

    @property
    def file_bytes(self) -> int:
        """Bytes of all experts in the file."""
        return sum(record.nbytes for record in self)

    def wasted_bytes(self, slots: int) -> int:
        """Bytes that ``slots`` slots a layer hold beyond what its mean expert needs."""
        return sum(
            slots * geometry.nbytes - slots * sum(r.nbytes for r in layer) // len(layer)
            for geometry, layer in zip(self.geometry, self.packed, strict=True)
        )


def _layer_records(
    config: ModelConfig, tensors: Tensors, layer: int, path: object
) -> tuple[Record, ...]:
    d, width = config.hidden_size, config.moe_intermediate_size
    found = []
    for expert in range(config.n_routed_experts):
        name = f"layers.{config.number(layer)}.ffn.experts.{expert}"
        gate = tensors.matrix_entry(f"{name}.w1.weight", (width, d))
        up = tensors.matrix_entry(f"{name}.w3.weight", (width, d))
        down = tensors.matrix_entry(f"{name}.w2.weight", (d, width))
        check_gate_and_up(name, gate.type_id, up.type_id, path)
        found.append(Record(Key(layer, expert), gate, up, down))
    return tuple(found)


def _geometry(records: Iterable[Record]) -> Geometry:
    up_at = down = 0
    for record in records:
        up_at = max(up_at, record.gate.nbytes)
        down = max(down, record.down.nbytes)
    return Geometry(_aligned(up_at), 2 * _aligned(up_at), _aligned(down))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
