"""Owns the sums over what routed experts are given while a model runs. Knows no text and no file.

For each expert: how many tokens are routed to it, the mean square of its routing weight, and the
mean square of every input channel of its gate and up and of its down projection. Sums are float64
and grow token by token in the order of the texts, so that they depend neither on how many tokens
go through the layers together nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath, jit
from ds4q.quantize.imatrix import LayerStatistics
from ds4q.runtime.backend import kernels, reference
from ds4q.runtime.backend.cpu import CpuBackend
from ds4q.runtime.backend.weights import Expert
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.errors import CalibrationError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def add_squares_reference(sums: F64, rows: F32) -> None:
    """Add the squares of ``rows`` f32 [T, K] to ``sums`` f64 [K], row after row."""
    for row in rows:
        sums += np.square(row, dtype=np.float64)


@jit
def _add_squares_fast(sums: F64, rows: F32) -> None:
    for t in range(rows.shape[0]):
        row = rows[t]
        for i in range(sums.shape[0]):
            value = np.float64(row[i])
            sums[i] += value * value


def _activate_fast(gate: F32, up: F32, limit: float) -> F32:
    hidden: F32 = kernels.activate(np.concatenate((gate, up)), limit)
    return hidden


add_squares = FastPath(add_squares_reference, _add_squares_fast)
activate = FastPath(reference.activate, _activate_fast)


class Collector:
    """Sums over the tokens that each routed expert was given; an ``Observer`` of an engine.

    Parameters
    ----------
    threads : most threads that one product uses
    layers : of which to sum; None takes all
    """

    def __init__(self, config: ModelConfig, threads: int, layers: range | None = None) -> None:
        self._numbers = range(config.num_hidden_layers) if layers is None else layers
        shape = len(self._numbers), config.n_routed_experts
        self._limit = config.swiglu_limit
        self._backend = CpuBackend(threads)
        self._tokens = np.zeros(shape, np.int64)
        self._gain = np.zeros((*shape, 1))
        self._gate_up = np.zeros((*shape, config.hidden_size))
        self._down = np.zeros((*shape, config.moe_intermediate_size))

    def __call__(
        self, layer: int, ids: I64, weights: F32, x: F32, experts: Mapping[int, Expert]
    ) -> None:
        """Add one batch: experts ``ids`` [T, K] with ``weights`` [T, K] of the inputs ``x``.

        Ids that ``experts`` lacks come with another part of the batch.
        """
        flat, at = ids.ravel(), self._numbers.index(layer)
        for expert_id in np.unique(flat).tolist():
            if expert_id not in experts:
                continue
            slots = np.flatnonzero(flat == expert_id)
            expert, rows = experts[expert_id], x[slots // ids.shape[1]]
            hidden = activate(
                self._backend.linear(expert.gate, rows),
                self._backend.linear(expert.up, rows),
                self._limit,
            )
            self._add((at, expert_id), weights.reshape(-1, 1)[slots], rows, hidden)

    def computed(self, layer: int, ids: I64, weights: F32, x: F32, hidden: F32) -> None:
        """Add one batch whose ``hidden`` [T, K, w], the inputs of the downs, are known."""
        flat, at = ids.ravel(), self._numbers.index(layer)
        gains, downs = weights.reshape(-1, 1), hidden.reshape(len(flat), -1)
        for expert_id in np.unique(flat).tolist():
            slots = np.flatnonzero(flat == expert_id)
            self._add((at, expert_id), gains[slots], x[slots // ids.shape[1]], downs[slots])

    def _add(self, to: tuple[int, int], gains: F32, rows: F32, hidden: F32) -> None:
        """Add what the expert ``to`` (layer, expert) was given by some tokens."""
        self._tokens[to] += len(rows)
        add_squares(self._gain[to], gains)
        add_squares(self._gate_up[to], rows)
        add_squares(self._down[to], hidden)

    def statistics(self) -> list[LayerStatistics]:
        """The means so far, layer by layer; zero for an expert that saw no token.

        Raises
        ------
        CalibrationError : an expert saw a number that is not finite
        """
        found = []
        for at, tokens in enumerate(self._tokens):
            seen = np.maximum(tokens, 1)[:, None]
            with np.errstate(over="ignore"):  # found below
                gain, gate_up, down = (
                    (sums[at] / seen).astype(np.float32)
                    for sums in (self._gain, self._gate_up, self._down)
                )
            for what, means in (("inputs", gate_up), ("hidden values", down), ("weights", gain)):
                bad = np.flatnonzero(~np.isfinite(means).all(axis=1))
                if bad.size:
                    place = f"expert {bad[0]} in layer {self._numbers[at]}"
                    raise CalibrationError(found=f"{what} of {place}")
            found.append(LayerStatistics(tokens.copy(), gain[:, 0].copy(), gate_up, down))
        return found
