"""Owns the stores that page nothing: all routed experts in memory, packed, or those of one rank."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ds4q.artifact.tables import expert_name
from ds4q.artifact.types import type_of
from ds4q.runtime.backend.weights import Expert, Weight
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.errors import ModelTensorError
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.store import Band, Phase


class MatrixSource(Protocol):
    """Where packed matrices come from."""

    def matrices(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Weight]:
        """Packed matrices by name, in one buffer."""


class OwnerSource(Protocol):
    """Where the packed matrices of an owner's experts come from."""

    def owned_matrices(
        self, layer: int, experts: Sequence[int], shapes: Mapping[str, tuple[int, int]]
    ) -> dict[str, Weight]:
        """Matrices by name, of the projections ``shapes``; other experts are nobody's here."""


class ResidentExperts:
    """All experts of all layers. Nothing is fetched after construction.

    Parameters
    ----------
    source : asked once per layer for all of the layer's matrices
    path : named in errors
    """

    def __init__(self, config: ModelConfig, source: MatrixSource, *, path: object = None) -> None:
        everyone = range(config.n_routed_experts)
        self._layers = [
            layer_experts(config, source, config.number(layer), everyone, path)
            for layer in range(config.num_hidden_layers)
        ]

    def bands(
        self, layer: int, ids: npt.NDArray[np.integer[Any]], phase: Phase
    ) -> Generator[Band, None, None]:
        """All experts of ``layer`` in one band; they stay valid."""
        yield Band(self._layers[layer], None)


class OwnedExperts:
    """The experts of one rank, all of them in memory; routes to others contribute zero.

    Parameters
    ----------
    source : asked once per layer for the matrices of the experts that are owned
    path : named in errors
    """

    def __init__(
        self,
        config: ModelConfig,
        source: OwnerSource,
        ownership: ExpertOwnership,
        *,
        path: object = None,
    ) -> None:
        self._owned = np.array([ownership.owns(e) for e in range(config.n_routed_experts)])
        self._layers = []
        for layer in range(config.num_hidden_layers):
            number = config.number(layer)
            found = source.owned_matrices(number, ownership.owned, _shapes(config))
            self._layers.append(_joined(number, ownership.owned, found, path))

    def bands(
        self, layer: int, ids: npt.NDArray[np.integer[Any]], phase: Phase
    ) -> Generator[Band, None, None]:
        """The experts of ``layer`` that are owned in one band, where any is asked for."""
        where = self._owned[ids]
        if where.any():
            yield Band(self._layers[layer], where)


def check_gate_and_up(expert: str, gate: int, up: int, path: object) -> None:
    """Refuse an expert whose gate and up differ in type number: they are multiplied together."""
    if up != gate:
        raise ModelTensorError(
            "gate and up of an expert differ in type",
            path=path,
            tensor=f"{expert}.w3.weight",
            expected=type_of(gate).name,
            found=type_of(up).name,
        )


def _shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    d, width = config.hidden_size, config.moe_intermediate_size
    return {"w1": (width, d), "w3": (width, d), "w2": (d, width)}


def layer_experts(
    config: ModelConfig, source: MatrixSource, layer: int, experts: Sequence[int], path: object
) -> dict[int, Expert]:
    """Some experts of a layer by id, asked of ``source`` together; ``path`` is named in errors."""
    shapes = _shapes(config)
    found = source.matrices(
        {expert_name(layer, e, w): shape for e in experts for w, shape in shapes.items()}
    )
    return _joined(layer, experts, found, path)


def _joined(
    layer: int, experts: Sequence[int], found: Mapping[str, Weight], path: object
) -> dict[int, Expert]:
    made = {}
    for e in experts:
        gate, up, down = (found[expert_name(layer, e, w)] for w in ("w1", "w3", "w2"))
        check_gate_and_up(f"layers.{layer}.ffn.experts.{e}", gate.type_id, up.type_id, path)
        made[e] = Expert(gate, up, down)
    return made
