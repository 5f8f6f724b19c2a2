"""Owns the step block: all that a step tells the kernels, in one copy to an address that stays.

It holds the step's position, token ids, cos and sin of its positions, and the table of where each
layer of the active sequence keeps its rows. Launches refer to places in it and to nothing else that
changes from step to step.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

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

STEP = struct.Struct("<4i")  # ds4q_step: first, tokens
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Turns:
    """Offsets of cos and sin [T, pairs] of the tokens, and [windows, pairs] of finished windows."""

    cos: int
    sin: int
    window_cos: int
    window_sin: int


class StepBlock:
    """The block for steps of at most ``tokens`` tokens.

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
        self._step = self._part(STEP.size)
        self._layers = self._part(LAYER_STATE.size * config.num_hidden_layers)
        self._ids = self._part(4 * tokens)
        self._turned = self._end = self._part(0)
        self._turns = {ratio: self._turns_of(ratio) for ratio in frequencies}
        self._place = layout.reserve(self._end)
        self._pinned = device.pinned(self._end)
        self._copied: Event | None = None
        self._rotations = np.zeros((self._end - self._turned) // 4, np.float32)
        self._foreseen = (-1, 0)  # first and tokens

    @property
    def step(self) -> int:
        """Address of the ds4q_step."""
        return self._place.address + self._step

    @property
    def ids(self) -> int:
        """Address of the token ids [T]."""
        return self._place.address + self._ids

    def layer(self, number: int) -> int:
        """Address of a layer's ds4q_layer_state."""
        return self._place.address + self._layers + LAYER_STATE.size * number

    def turns(self, ratio: int) -> Turns:
        """Addresses of the cos and sin that layers of ``ratio`` rotate by."""
        at, base = self._turns[ratio], self._place.address
        return Turns(base + at.cos, base + at.sin, base + at.window_cos, base + at.window_sin)

    def send(self, stream: Stream, first: int, ids: npt.NDArray[np.int64], table: bytes) -> None:
        """Queue the copy of a step's block.

        Parameters
        ----------
        first : position of ``ids[0]``
        ids : int64 [T]
        table : of the active sequence, see ``DeviceState.table``
        """
        self._wait()
        raw = self._pinned.array
        STEP.pack_into(raw.data, self._step, first, len(ids), 0, 0)
        raw.data[self._layers : self._layers + len(table)] = table
        raw[self._ids : self._ids + 4 * len(ids)].view(np.int32)[:] = ids
        if self._foreseen != (first, len(ids)):
            self.foresee(first, len(ids))
        raw[self._turned :].view(np.float32)[:] = self._rotations
        stream.upload(self._place.address, self._pinned)
        self._copied = stream.record(self._copied)

    def _wait(self) -> None:
        """The last copy still reads the host's side until it has been made."""
        if self._copied is not None:
            self._copied.synchronize()

    def foresee(self, first: int, tokens: int) -> None:
        """Form what a step at ``first`` rotates by, while the device still works on another."""
        self._foreseen = first, tokens
        made: dict[int, tuple[F32, F32]] = {}  # ratios of one base share their frequencies
        for ratio, at in self._turns.items():
            frequencies = self._frequencies[ratio]
            key = id(frequencies)
            if key not in made:
                made[key] = rope.tables(frequencies, first, tokens)
            self._keep(at.cos, at.sin, made[key])
            if ratio:
                started, done = first // ratio, (first + tokens) // ratio
                if done > started:
                    turned = rope.tables(frequencies, started * ratio, done - started, ratio)
                    self._keep(at.window_cos, at.window_sin, turned)

    def _keep(self, cos_at: int, sin_at: int, turned: tuple[F32, F32]) -> None:
        for at, values in zip((cos_at, sin_at), turned, strict=True):
            start = (at - self._turned) // 4
            self._rotations[start : start + values.size] = values.reshape(-1)

    def _turns_of(self, ratio: int) -> Turns:
        row = 4 * self._pairs
        windows = self.tokens // ratio + 1 if ratio else 0
        return Turns(*(self._part(row * count) for count in (self.tokens,) * 2 + (windows,) * 2))

    def _part(self, nbytes: int) -> int:
        at = -(-self._end // _ALIGN) * _ALIGN
        self._end = at + nbytes
        return at
