"""Owns the CPU backend: checks a call, cuts it into rows and hands it to the kernels.

Not the arithmetic (``kernels.py``, ``reference.py``) and not where weights come from.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath
from ds4q.artifact.types import type_of
from ds4q.runtime.backend import kernels, reference
from ds4q.runtime.backend.weights import Expert, Weight
from ds4q.runtime.backend.workers import Workers
from ds4q.runtime.errors import BackendTypeError, WeightError

__all__ = ["CpuBackend", "Expert", "ExpertLookup", "Weight"]

Array = npt.NDArray[Any]

_F32 = np.dtype(np.float32)


class ExpertLookup(Protocol):
    """Anything that finds an expert by id: a dict, a list, a store."""

    def __getitem__(self, expert_id: int, /) -> Expert: ...


def _multiply_reference(weight: Weight, x: Array, workers: Workers) -> Array:
    return reference.multiply(weight, x)


def _multiply_fast(weight: Weight, x: Array, workers: Workers) -> Array:
    tokens, rows = len(x), weight.rows
    out = np.empty((tokens, rows), dtype=_F32)
    kind, row_bytes = weight.type_id, weight.row_bytes
    if not workers.shares(rows * row_bytes * tokens):
        kernels.multiply(kind, weight.address, rows, row_bytes, x, out)
        return out
    xs = kernels.spread(x, kind)
    items = np.arange(tokens)
    addresses, starts = np.array([weight.address]), np.array([0, tokens])

    def piece(lo: int, hi: int, keep: Weight = weight) -> None:  # its bytes, see Workers.run
        kernels.multiply_rows(
            kind, addresses, starts, items, items, lo, hi, rows, row_bytes, xs, out
        )

    workers.run(piece, rows)
    return out


_multiply = FastPath(_multiply_reference, _multiply_fast)


class _Routes:
    """The distinct experts of a call, and which slots (token * k + choice) each one serves."""

    __slots__ = ("experts", "share", "slots")

    def __init__(self, ids: Array, experts: ExpertLookup) -> None:
        by_id: dict[int, list[int]] = {}
        for slot, expert_id in enumerate(ids.ravel().tolist()):
            by_id.setdefault(expert_id, []).append(slot)
        self.share: int = ids.shape[1]
        self.slots = list(by_id.values())
        self.experts = [experts[expert_id] for expert_id in by_id]
        first = self.experts[0]
        for expert_id, expert in zip(by_id, self.experts, strict=True):
            if expert.layout != first.layout:
                raise WeightError(
                    f"expert {expert_id} has another type or shape than its neighbour",
                    expected=_describe(first),
                    found=_describe(expert),
                )


def _feed_forward_reference(routes: _Routes, x: Array, limit: float, workers: Workers) -> Array:
    slots = sum(map(len, routes.slots))
    out = np.empty((slots, x.shape[1]), dtype=_F32)
    for expert, own in zip(routes.experts, routes.slots, strict=True):
        tokens = np.array(own) // routes.share
        out[own] = reference.feed_forward(expert, x[tokens], limit)
    return out


def _feed_forward_fast(routes: _Routes, x: Array, limit: float, workers: Workers) -> Array:
    experts, layout = routes.experts, routes.experts[0].layout
    table = np.array([expert.addresses for expert in experts])
    slots = np.array([slot for own in routes.slots for slot in own])
    starts = np.array([0, *accumulate(map(len, routes.slots))])
    out = np.empty((len(slots), x.shape[1]), dtype=_F32)
    gate_kind, width, gate_bytes, down_kind, rows, down_bytes = layout
    if not workers.shares(len(slots) * (2 * width * gate_bytes + rows * down_bytes)):
        kernels.feed_forward(layout, table, starts, slots, routes.share, limit, x, out)
        return out
    addresses, both, reads, writes = kernels.plan_gate_up(table, starts, slots, routes.share)
    xs = kernels.spread(x, gate_kind)
    gate_up = np.empty((len(writes), width), dtype=_F32)

    def gate_up_piece(lo: int, hi: int, keep: _Routes = routes) -> None:
        kernels.multiply_rows(
            gate_kind, addresses, both, reads, writes, lo, hi, width, gate_bytes, xs, gate_up
        )

    workers.run(gate_up_piece, len(addresses) * width)
    hidden = kernels.spread(kernels.activate(gate_up, limit), down_kind)
    downs = np.ascontiguousarray(table[:, 2])

    def down_piece(lo: int, hi: int, keep: _Routes = routes) -> None:
        kernels.multiply_rows(
            down_kind, downs, starts, slots, slots, lo, hi, rows, down_bytes, hidden, out
        )

    workers.run(down_piece, len(experts) * rows)
    return out


_feed_forward = FastPath(_feed_forward_reference, _feed_forward_fast)


class CpuBackend:
    """Products of packed weights with float32 activations on the CPU.

    A result row never depends, bit for bit, on the number of tokens in the call or of threads.

    Parameters
    ----------
    threads : most threads that one call uses; 1 or more
    """

    def __init__(self, threads: int) -> None:
        self._workers = Workers(threads)

    @property
    def threads(self) -> int:
        return self._workers.threads

    def linear(self, w: Weight, x: Array) -> Array:
        """``x W^T``: f32 (T, rows) of f32 (T, cols)."""
        if w.type_id not in kernels.FORMATS:
            raise _no_kernel(w)
        return _multiply(w, _activations(x, w.cols), self._workers)

    def experts(self, x: Array, ids: Array, experts: ExpertLookup, limit: float) -> Array:
        """Outputs of the chosen experts, unweighted, each (token, choice) in a row of its own.

        ``y(t, k) = down(silu(min(gate x_t, limit)) * clamp(up x_t, -limit, limit))`` with expert
        ``ids[t, k]``; the caller weights and adds the rows in the order of k.

        Parameters
        ----------
        x : f32 (T, d)
        ids : integers (T, k)
        experts : id -> Expert, all of one layout; each distinct id is looked up once
        limit : DeepSeek-V4's ``swiglu_limit``

        Returns
        -------
        f32 (T, k, d)
        """
        if ids.ndim != 2 or len(ids) != len(x):
            raise WeightError(
                "expert ids do not match the activations",
                expected=f"({len(x)}, k)",
                found=ids.shape,
            )
        shape = (*ids.shape, x.shape[-1])
        if not ids.size:
            return np.empty(shape, dtype=_F32)
        routes = _Routes(ids, experts)
        first = routes.experts[0]
        for w in (first.gate, first.down):
            if w.type_id not in kernels.FORMATS:
                raise _no_kernel(w)
        x = _activations(x, first.gate.cols)
        return _feed_forward(routes, x, float(limit), self._workers).reshape(shape)


def _describe(expert: Expert) -> str:
    return ", ".join(
        f"{name} {type_of(w.type_id).name} {w.rows} x {w.cols}"
        for name, w in (("gate", expert.gate), ("down", expert.down))
    )


def _no_kernel(w: Weight) -> BackendTypeError:
    names = ", ".join(form.kind.name for form in kernels.FORMATS.values())
    return BackendTypeError(expected=f"one of {names}", found=type_of(w.type_id).name)


def _activations(x: Array, columns: int) -> Array:
    """``x`` as the one array type the kernels are compiled for; refuses another shape or dtype."""
    if x.dtype != _F32 or x.ndim != 2 or x.shape[1] != columns:
        raise WeightError(
            "activations do not fit the weight",
            expected=f"float32 (T, {columns})",
            found=f"{x.dtype} {x.shape}",
        )
    if not x.flags.carray:
        x = np.array(x, order="C")
    return x
