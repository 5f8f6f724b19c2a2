"""Owns the tables through which kernels find routed experts in slots, and when they go up.

A table holds a ``ds4q_matrix`` for gate, up and down of every expert. Books, decoder and sizes are
the expert's and never change; the address is its slot's.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from ds4q.hipkern.driver import Device
from ds4q.hipkern.matrix import MATRIX_BYTES
from ds4q.hipkern.streams import Stream
from ds4q.runtime.device.layout import Place

_ADDRESS = struct.Struct("<Q")
_EXPERT_BYTES = 3 * MATRIX_BYTES


class PointerTables:
    """The tables of all layers with a copy of each on the host, pinned.

    Parameters
    ----------
    stream : what the kernels run on
    tables : by layer: where the table lies on the device, and what has been copied there

    Attributes
    ----------
    uploads : how many tables went up
    nbytes : of all tables
    """

    def __init__(
        self, device: Device, stream: Stream, tables: Sequence[tuple[Place, bytes]]
    ) -> None:
        self._stream = stream
        self._places = [place for place, _ in tables]
        self._starts: list[int] = []
        held = b""
        for _, contents in tables:
            self._starts.append(len(held))
            held += contents
        self.nbytes = len(held)
        self._pinned = device.pinned(self.nbytes)
        self._pinned.array.data[:] = held
        self._stale = [False] * len(tables)
        self.uploads = 0

    def point(self, layer: int, addresses: Mapping[int, tuple[int, int, int]]) -> None:
        """Let experts' gate, up and down be at ``addresses``, for what is queued from now on.

        A table is stale from its first change until a copy of it was queued: whatever fails in
        between, the next call makes up for. A copy under way is not waited for: an expert that is
        still to be read from its slot has no other.
        """
        shadow, start = self._pinned.array.data, self._starts[layer]
        for expert, trio in addresses.items():
            for i, address in enumerate(trio):
                at = start + expert * _EXPERT_BYTES + i * MATRIX_BYTES
                if _ADDRESS.unpack_from(shadow, at)[0] != address:
                    self._stale[layer] = True
                    _ADDRESS.pack_into(shadow, at, address)
        if self._stale[layer]:
            self._upload(layer)
            self._stale[layer] = False

    def _upload(self, layer: int) -> None:
        place, start = self._places[layer], self._starts[layer]
        self._stream.upload(place.address, self._pinned.array[start : start + place.nbytes])
        self.uploads += 1
