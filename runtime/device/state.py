"""Owns what a sequence keeps on the device, and how kernels find it.

The rows are those of ``runtime/kv.py``. Kernels reach them through a table of addresses that every
step brings along, so another sequence, or a cache that has moved, needs no other launch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from ds4q.hipkern.errors import HipError
from ds4q.runtime.backend.hip import HipBackend
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.device.layout import Layout, Place
from ds4q.runtime.engine import UNSIZED_CONTEXT_TOKENS
from ds4q.runtime.errors import SequenceError
from ds4q.runtime.kv import overlap, ring_rows, window_rows
from ds4q.runtime.kvtype import STORED, KvType

LAYER_STATE = struct.Struct("<7Q4i")  # ds4q_layer_state
FIRST_TOKENS = 4096  # room of a sequence whose length nobody has said


@dataclass(frozen=True, slots=True)
class _Rings:
    """Window and raw rows of a layer; index_* are None where the layer has no indexer."""

    window: Place
    values: Place | None
    gates: Place | None
    index_values: Place | None
    index_gates: Place | None


class Caches:
    """The sizes of a model's sequences, for steps of at most ``batch`` tokens.

    Parameters
    ----------
    limit_tokens : most tokens of a sequence
    sized : whether a sequence gets that room at once; else it grows
    kv_type : how window rows and entries are kept; raw rows and the indexer's stay f32
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        limit_tokens: int,
        sized: bool,
        kv_type: KvType = "f32",
    ) -> None:
        self.config = config
        self._row_bytes = STORED[kv_type].itemsize * config.head_dim
        self.batch = batch
        self.limit_tokens = limit_tokens
        self.first_tokens = limit_tokens if sized else min(limit_tokens, FIRST_TOKENS)

    @property
    def first_bytes(self) -> int:
        """Device memory of a new sequence."""
        return self._bytes_of(self.first_tokens)

    @property
    def expected_bytes(self) -> int:
        """Device memory that is left to a sequence where nobody says how long it gets."""
        usual = min(self.limit_tokens, UNSIZED_CONTEXT_TOKENS)
        return self._bytes_of(max(usual, self.first_tokens))

    def _bytes_of(self, tokens: int) -> int:
        return self.rings()[0].nbytes + self.entries(tokens)[0].nbytes

    def rings(self) -> tuple[Layout, list[_Rings]]:
        """Places of what does not grow."""
        c, layout, found = self.config, Layout(), []
        for ratio in c.compress_ratios:
            window = layout.reserve(window_rows(c, self.batch) * self._row_bytes)
            raw: list[Place | None] = [None] * 4
            widths = {0: (), 4: (c.head_dim, c.index_head_dim)}.get(ratio, (c.head_dim,))
            for i, width in enumerate(widths):
                for part in range(2):
                    rows = ring_rows(ratio, self.batch)
                    raw[2 * i + part] = layout.floats(rows, overlap(ratio) * width)
            found.append(_Rings(window, *raw))
        return layout, found

    def entries(self, tokens: int) -> tuple[Layout, list[tuple[Place | None, Place | None]]]:
        """Places of the entries, and of the indexer's, of ``tokens`` tokens by layer."""
        c, layout = self.config, Layout()
        found: list[tuple[Place | None, Place | None]] = []
        for ratio in c.compress_ratios:
            rows = self.rows(ratio, tokens)
            own = layout.reserve(rows * self._row_bytes) if ratio else None
            index = layout.floats(rows, c.index_head_dim) if ratio == 4 else None
            found.append((own, index))
        return layout, found

    def rows(self, ratio: int, tokens: int) -> int:
        """Entries that ``tokens`` tokens may complete."""
        return max(1, tokens // ratio) if ratio else 0


class DeviceState:
    """One sequence on the device: ``position`` tokens are committed.

    ``close`` frees its memory; so does dropping the last reference, or closing the engine.

    Attributes
    ----------
    table : the contents of kernels' array of ds4q_layer_state
    number : of the sequence, among those of its engine
    """

    def __init__(self, backend: HipBackend, caches: Caches, number: int = 0) -> None:
        self.position = 0
        self.number = number
        self._backend = backend
        self._caches = caches
        self._ring_layout, self._rings = caches.rings()
        self._entry_layout, self._entries = caches.entries(caches.first_tokens)
        self._room_tokens = caches.first_tokens
        self._ring_layout.allocate(backend.device)
        try:
            self._entry_layout.allocate(backend.device)
        except BaseException:
            self._ring_layout.free()
            raise
        self.table = self._pack()
        self._closed = False

    def check_of(self, backend: HipBackend) -> None:
        """Refuse a sequence whose memory is freed, or lies where this engine's kernels do not.

        Raises
        ------
        SequenceError : it is closed, or another engine's
        """
        if self._closed:
            raise SequenceError("the sequence was closed")
        if self._backend is not backend:
            raise SequenceError()

    @property
    def nbytes(self) -> int:
        """Device memory that it holds."""
        return self._ring_layout.nbytes + self._entry_layout.nbytes

    def reserve(self, tokens: int) -> None:
        """Have room for so many tokens: entries move to a larger buffer, what they hold is kept."""
        if tokens <= self._room_tokens:
            return
        caches, stream = self._caches, self._backend.stream
        room = min(caches.limit_tokens, max(tokens, 2 * self._room_tokens))
        layout, entries = caches.entries(room)
        layout.allocate(self._backend.device)
        try:
            for old, new in zip(self._entries, entries, strict=True):
                for source, target in zip(old, new, strict=True):
                    if source is not None and target is not None:
                        stream.move(target.address, source.address, source.nbytes)
            stream.synchronize()  # before the old rows go
        except BaseException:
            layout.free()
            raise
        self._entry_layout.free()
        self._entry_layout, self._entries, self._room_tokens = layout, entries, room
        self.table = self._pack()

    def rows(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) of what later steps can read, oldest rows first: from ``position`` on.

        Two sequences of one engine at one position have rows of the same sizes, in one order.
        """
        caches, end = self._caches, self.position
        config = caches.config
        slots, oldest = window_rows(config, caches.batch), max(0, end + 1 - config.sliding_window)
        for ratio, rings, entries in zip(
            config.compress_ratios, self._rings, self._entries, strict=True
        ):
            yield from _ring(rings.window, slots, oldest, end)
            if not ratio:
                continue
            # A window in work, and at ratio 4 the one before it.
            first = max(0, end // ratio + 1 - overlap(ratio)) * ratio
            raw = rings.values, rings.gates, rings.index_values, rings.index_gates
            for place in raw:
                if place is not None:
                    yield from _ring(place, ring_rows(ratio, caches.batch), first, end)
            for place in entries:
                if place is not None and end >= ratio:
                    row_bytes = place.nbytes // caches.rows(ratio, self._room_tokens)
                    yield place.address, end // ratio * row_bytes

    def close(self) -> None:
        """Free the memory, once no step uses it any more."""
        self._closed = True
        if self._backend.closed:
            return
        try:
            self._backend.stream.synchronize()
        except HipError:
            if not self._backend.device.lost:
                raise
        finally:
            self._ring_layout.free()
            self._entry_layout.free()

    def _pack(self) -> bytes:
        caches, packed = self._caches, []
        for ratio, rings, (own, index) in zip(
            caches.config.compress_ratios, self._rings, self._entries, strict=True
        ):
            raw = ring_rows(ratio, caches.batch) if ratio else 0
            places = (
                rings.window,
                rings.values,
                rings.gates,
                own,
                rings.index_values,
                rings.index_gates,
                index,
            )
            packed.append(
                LAYER_STATE.pack(
                    *(0 if place is None else place.address for place in places),
                    window_rows(caches.config, caches.batch),
                    raw,
                    raw if index is not None else 0,
                    caches.rows(ratio, self._room_tokens),
                )
            )
        return b"".join(packed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A sequence that is abandoned in mid-generation has no other end.
        if hasattr(self, "table"):
            self.close()


def _ring(place: Place, slots: int, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Where the rows of positions ``first`` to ``end - 1`` lie in a ring: (address, bytes)."""
    row_bytes, at, count = place.nbytes // slots, first % slots, end - first
    ahead = min(count, slots - at)
    if ahead:
        yield place.address + at * row_bytes, ahead * row_bytes
    if count > ahead:
        yield place.address, (count - ahead) * row_bytes
