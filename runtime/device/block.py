"""Owns the step block: all that a step tells the kernels, in one copy to an address that stays.

It holds where each token stands, token ids, cos and sin of its positions, and the tables of where
each layer of the step's sequences keeps its rows. Launches refer to places in it and to nothing
else that changes from step to step.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds4q.hipkern.driver import Device
from ds4q.hipkern.streams import Event, Stream
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.device.layout import Layout
from ds4q.runtime.device.state import LAYER_STATE
from ds4q.runtime.model import rope

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

TOKEN = struct.Struct("<4i")  # ds4q_token: position, row, states
_ALIGN = 64


class Run(NamedTuple):
    """Tokens of a step that follow each other in one sequence: ``tokens`` from ``first`` on."""

    first: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Turns:
    """Addresses of cos and sin [T, pairs] of the tokens, and of the windows that they complete."""

    cos: int
    sin: int
    window_cos: int
    window_sin: int


class StepBlock:
    """The block for steps of at most ``tokens`` tokens, of as many sequences.

    Parameters
    ----------
    device : gives the host's side, pinned
    layout : where the device's side gets its place
    frequencies : radians per position by ratio, see ``rope.layer_frequencies``
    """

    def __init__(
        self,
        device: Device,
        layout: Layout,
        config: ModelConfig,
        frequencies: Mapping[int, F64],
        tokens: int,
    ) -> None:
        self.tokens = tokens
        self._frequencies = frequencies
        self._end = 0
        self._pairs = config.qk_rope_head_dim // 2
        self._layers = config.num_hidden_layers
        self._stand = self._part(TOKEN.size * tokens)
        self._ids = self._part(4 * tokens)
        self._turned = self._part(0)
        self._turns = {ratio: self._turns_of(ratio) for ratio in frequencies}
        # Last, so that a step copies the tables of its own sequences and no more.
        self._tables = self._part(LAYER_STATE.size * self._layers * tokens)
        self._place = layout.reserve(self._end)
        self._pinned = device.pinned(self._end)
        self._copied: Event | None = None
        self._rotations = np.zeros((self._tables - self._turned) // 4, np.float32)
        self._foreseen: tuple[Run, ...] = ()
        self._positions = np.zeros(0, np.int64)

    @property
    def ids(self) -> int:
        """Address of the token ids [T]."""
        return self._place.address + self._ids

    def stand(self, first: int = 0) -> int:
        """Address of the ds4q_token of the step's token ``first``."""
        return self._place.address + self._stand + TOKEN.size * first

    def layer(self, number: int) -> int:
        """Address of a layer's ds4q_layer_state, of the first sequence."""
        return self._place.address + self._tables + LAYER_STATE.size * number

    def turns(self, ratio: int) -> Turns:
        """Addresses of the cos and sin that layers of ``ratio`` rotate by."""
        at, base = self._turns[ratio], self._place.address
        return Turns(base + at.cos, base + at.sin, base + at.window_cos, base + at.window_sin)

    def send(self, stream: Stream, runs: Sequence[Run], ids: I64, tables: Sequence[bytes]) -> None:
        """Queue the copy of a step's block.

        Parameters
        ----------
        runs : of each sequence, in the order of the step's tokens
        ids : int64 [T]
        tables : of each sequence, see ``DeviceState.table``
        """
        self._wait()
        raw, one = self._pinned.array, LAYER_STATE.size * self._layers
        if self._foreseen != tuple(runs):
            self.foresee(runs)
        stand = raw[self._stand : self._stand + TOKEN.size * len(ids)].view(np.int32)
        tokens, row = stand.reshape(len(ids), 4), 0
        tokens[:, 0], tokens[:, 3] = self._positions, 0
        for number, (run, table) in enumerate(zip(runs, tables, strict=True)):
            tokens[row : row + run.tokens, 1:3] = row, number * self._layers
            row += run.tokens
            start = self._tables + one * number
            raw.data[start : start + one] = table
        raw[self._ids : self._ids + 4 * len(ids)].view(np.int32)[:] = ids
        raw[self._turned : self._tables].view(np.float32)[:] = self._rotations
        stream.upload(self._place.address, self._pinned, self._tables + one * len(runs))
        self._copied = stream.record(self._copied)

    def _wait(self) -> None:
        """The last copy still reads the host's side until it has been made."""
        if self._copied is not None:
            self._copied.synchronize()

    def foresee(self, runs: Sequence[Run]) -> None:
        """Form what a step of ``runs`` rotates by, while the device still works on another."""
        self._foreseen = tuple(runs)
        self._positions = p = np.concatenate([np.arange(a, a + tokens) for a, tokens in runs])
        made: dict[int, tuple[F32, F32]] = {}  # ratios of one base share their frequencies
        for ratio, at in self._turns.items():
            frequencies = self._frequencies[ratio]
            key = id(frequencies)
            if key not in made:
                made[key] = rope.turns(frequencies, p)
            self._keep(at.cos, at.sin, slice(len(p)), made[key])
            if ratio:
                last = np.flatnonzero((p + 1) % ratio == 0)
                turned = rope.turns(frequencies, p[last] + 1 - ratio)
                self._keep(at.window_cos, at.window_sin, last, turned)

    def _keep(self, cos_at: int, sin_at: int, rows: slice | I64, turned: tuple[F32, F32]) -> None:
        for at, values in zip((cos_at, sin_at), turned, strict=True):
            start = (at - self._turned) // 4
            table = self._rotations[start : start + self.tokens * self._pairs]
            table.reshape(self.tokens, self._pairs)[rows] = values

    def _turns_of(self, ratio: int) -> Turns:
        nbytes = 4 * self._pairs * self.tokens
        windows = nbytes if ratio else 0
        return Turns(*(self._part(size) for size in (nbytes, nbytes, windows, windows)))

    def _part(self, nbytes: int) -> int:
        at = -(-self._end // _ALIGN) * _ALIGN
        self._end = at + nbytes
        return at
