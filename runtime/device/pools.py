"""Owns the slots of routed experts on a device: their memory, and where each begins."""

from __future__ import annotations

from collections.abc import Sequence

from ds4q.runtime.device.layout import Layout, Place
from ds4q.runtime.experts.catalogue import Geometry


class ExpertPools:
    """Two buffers a layer, one of gate and up, one of down; planned first, sized later.

    Parameters
    ----------
    geometry : by layer

    Attributes
    ----------
    layouts : all of the memory
    """

    def __init__(self, geometry: Sequence[Geometry]) -> None:
        self._geometry = tuple(geometry)
        self._gate_up = [Layout() for _ in geometry]
        self._down = [Layout() for _ in geometry]
        self.layouts = [*self._gate_up, *self._down]

    def bases(self, layer: int) -> tuple[Place, Place, Place]:
        """Where gate, up and down of the first slot lie; before ``size`` is called."""
        gate_up, down = self._gate_up[layer], self._down[layer]
        return gate_up.reserve(0), gate_up.reserve(0), down.reserve(0)

    def size(self, slots: Sequence[int]) -> None:
        """Give every layer its number of slots."""
        for at, gate_up, down, count in zip(
            self._geometry, self._gate_up, self._down, slots, strict=True
        ):
            gate_up.reserve(count * at.gate_up_stride)
            down.reserve(count * at.down_stride)

    def addresses(self, layer: int, slot: int) -> tuple[int, int, int]:
        """Where gate, up and down of a slot lie; there must be memory."""
        at = self._geometry[layer]
        gate = self._gate_up[layer].address + slot * at.gate_up_stride
        down = self._down[layer].address + slot * at.down_stride
        return gate, gate + at.up_at, down
