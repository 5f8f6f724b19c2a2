"""Owns the store that holds every routed expert in memory, packed, one buffer per layer."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ds4q.artifact.types import type_of
from ds4q.runtime.backend.weights import Expert, Weight
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.errors import ModelTensorError
from ds4q.runtime.experts.store import Band, Phase


class MatrixSource(Protocol):
    """Where packed matrices come from."""

    def matrices(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Weight]:
        """Packed matrices by name, in one buffer."""


class ResidentExperts:
    """All experts of all layers. Nothing is fetched after construction.

    Parameters
    ----------
    source : asked once per layer for all of the layer's matrices
    path : named in errors
    """

    def __init__(self, config: ModelConfig, source: MatrixSource, *, path: object = None) -> None:
        self._layers = [
            _layer_experts(config, source, layer, path) for layer in range(config.num_hidden_layers)
        ]

    def bands(
        self, layer: int, ids: npt.NDArray[np.integer[Any]], phase: Phase
    ) -> Generator[Band, None, None]:
        """All experts of ``layer`` in one band; they stay valid."""
        yield Band(self._layers[layer], None)


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


def _layer_experts(
    config: ModelConfig, source: MatrixSource, layer: int, path: object
) -> dict[int, Expert]:
    d, width = config.hidden_size, config.moe_intermediate_size
    shapes = {"w1": (width, d), "w3": (width, d), "w2": (d, width)}
    names = [f"layers.{layer}.ffn.experts.{e}" for e in range(config.n_routed_experts)]
    found = source.matrices(
        {f"{name}.{w}.weight": shape for name in names for w, shape in shapes.items()}
    )
    for name in names:
        gate, up = (found[f"{name}.{w}.weight"] for w in ("w1", "w3"))
        check_gate_and_up(name, gate.type_id, up.type_id, path)
    return {
        e: Expert(*(found[f"{name}.{w}.weight"] for w in shapes)) for e, name in enumerate(names)
    }
