"""Owns the CPU backend: checks a call, cuts it into rows and hands it to the kernels.

Not the arithmetic (``kernels.py``, ``reference.py``) and not where weights come from.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ds4q.artifact.fastpath import FastPath
from ds4q.artifact.types import type_of
from ds4q.runtime.backend import kernels, reference
from ds4q.runtime.backend.decoders import FORMATS
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
    if not workers.shares(rows * weight.row_bytes * tokens):
        kernels.multiply(weight.matrix, rows, x, out)
        return out
    matrices = np.array([weight.matrix])
    xs = kernels.spread(x, matrices)
    items, starts = np.arange(tokens), np.array([0, tokens])

    def piece(lo: int, hi: int, keep: Weight = weight) -> None:  # its bytes, see Workers.run
        kernels.multiply_rows(matrices, starts, items, items, lo, hi, rows, xs, out)

    workers.run(piece, rows)
    return out


_multiply = FastPath(_multiply_reference, _multiply_fast)


class _Routes:
    """The distinct experts of a call, and which slots (token * k + choice) each one serves."""

    __slots__ = ("experts", "share", "slots", "work_bytes")

    def __init__(self, ids: Array, experts: ExpertLookup, where: Array | None) -> None:
        by_id: dict[int, list[int]] = {}
        chosen: Iterable[tuple[int, int]] = enumerate(ids.ravel().tolist())
        if where is not None:
            chosen = zip(np.flatnonzero(where).tolist(), ids[where].tolist(), strict=True)
        for slot, expert_id in chosen:
            by_id.setdefault(expert_id, []).append(slot)
        self.share: int = ids.shape[1]
        self.slots = list(by_id.values())
        self.experts = [experts[expert_id] for expert_id in by_id]
        self.work_bytes = 0
        shape = self.experts[0].shape
        for expert_id, expert in zip(by_id, self.experts, strict=True):
            if expert.shape != shape:
                raise WeightError(
                    f"expert {expert_id} has another shape than its neighbour",
                    expected=f"gate {shape[0]} x {shape[1]}",
                    found=f"gate {expert.shape[0]} x {expert.shape[1]}",
                )
            for weight in (expert.gate, expert.down):
                if weight.decoder not in FORMATS:
                    raise _no_kernel(weight)
            self.work_bytes += expert.nbytes * len(by_id[expert_id])


def _feed_forward_reference(
    routes: _Routes, x: Array, limit: float, out: Array, workers: Workers
) -> None:
    for expert, own in zip(routes.experts, routes.slots, strict=True):
        tokens = np.array(own) // routes.share
        out[own] = reference.feed_forward(expert, x[tokens], limit)


def _feed_forward_fast(
    routes: _Routes, x: Array, limit: float, out: Array, workers: Workers
) -> None:
    experts, share = routes.experts, routes.share
    table = np.concatenate([expert.matrices for expert in experts]).reshape(len(experts), -1)
    slots = np.array([slot for own in routes.slots for slot in own])
    starts = np.array([0, *accumulate(map(len, routes.slots))])
    width, rows = experts[0].shape
    if not workers.shares(routes.work_bytes):
        kernels.feed_forward(table, starts, slots, share, width, limit, x, out)
        return
    matrices, both, reads, writes, downs = kernels.plan(table, starts, slots, share)
    xs = kernels.spread(x, matrices)
    gate_up = np.empty((len(writes), width), dtype=_F32)

    def gate_up_piece(lo: int, hi: int, keep: _Routes = routes) -> None:
        kernels.multiply_rows(matrices, both, reads, writes, lo, hi, width, xs, gate_up)

    workers.run(gate_up_piece, len(matrices) * width)
    hidden = kernels.spread(kernels.activate(gate_up, limit), downs)

    def down_piece(lo: int, hi: int, keep: _Routes = routes) -> None:
        kernels.multiply_rows(downs, starts, writes, slots, lo, hi, rows, hidden, out)

    workers.run(down_piece, len(downs) * rows)


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
        if w.decoder not in FORMATS:
            raise _no_kernel(w)
        return _multiply(w, _activations(x, w.cols), self._workers)

    def experts(
        self,
        x: Array,
        ids: Array,
        experts: ExpertLookup,
        limit: float,
        *,
        where: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        """Outputs of the chosen experts, unweighted, each (token, choice) in a row of its own.

        ``y(t, k) = down(silu(min(gate x_t, limit)) * clamp(up x_t, -limit, limit))`` with expert
        ``ids[t, k]``; the caller weights and adds the rows in the order of k.

        Parameters
        ----------
        x : f32 (T, d)
        ids : integers (T, k)
        experts : id -> Expert, all of one shape and each of its own types; each distinct id is
            looked up once
        limit : DeepSeek-V4's ``swiglu_limit``
        where : bool (T, k): the rows to compute; None computes all. The others are left alone
        out : f32 (T, k, d), written to and returned; None makes one

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
        if out is None:
            out = np.empty(shape, dtype=_F32)
        elif out.shape != shape or out.dtype != _F32 or not out.flags.carray:
            raise WeightError(
                "no place for the experts' outputs",
                expected=f"float32 {shape}, contiguous",
                found=f"{out.dtype} {out.shape}",
            )
        if not ids.size or (where is not None and not where.any()):
            return out
        routes = _Routes(ids, experts, where)
        x = _activations(x, routes.experts[0].gate.cols)
        rows = out.reshape(-1, shape[-1])  # a view
        _feed_forward(routes, x, float(limit), rows, self._workers)
        return out


def _no_kernel(w: Weight) -> BackendTypeError:
    names = ", ".join(dict.fromkeys(form.kind.name for form in FORMATS.values()))
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
