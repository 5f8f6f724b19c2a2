"""Owns which table row each resident buffer is decoded by. Holds no bytes and moves none.

A binding goes by identity, not by address: a slot (any name of a buffer that is unique while it
lives) is bound to a tensor when the tensor's bytes are in it, and unbound before they leave. What
was moved or overwritten is therefore unbound, and decoding it is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from ds4q.artifact.errors import CodingError
from ds4q.artifact.formats import MixRow
from ds4q.artifact.tables import MAX_MODE, Table, expert_name, expert_of, table_name
from ds4q.artifact.types import TYPES

Slot = Hashable
ColdBackend = Literal["none", "gpu", "cpu"]
ORDER = ("w1", "w3", "w2")  # gate and up bind first, then down


def refuse(what: str, **where: Any) -> NoReturn:
    """Raise the refusal of a binding that contradicts the tables or another binding."""
    raise CodingError.of("mix-binding", what, **where)


@dataclass(frozen=True, slots=True)
class Compact:
    """An owner's experts of one projection, stacked in one resident buffer.

    ``key`` names the buffer; local slot n of it becomes ``(key, n)``. ``shape`` is (experts, out,
    in), ``nbytes`` what is resident of it.
    """

    key: Hashable
    type_id: int
    shape: tuple[int, int, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Owner:
    """Who computes some experts of a layer.

    ``experts`` and ``tensors`` go by projection: global expert ids in local slot order, and the
    buffer that holds them. A projection without experts of a mixed type has neither.
    """

    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tensors: Mapping[str, Compact | None] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether it has neither experts nor buffers."""
        return not any(self.experts.values()) and not any(self.tensors.values())


@dataclass(frozen=True, slots=True)
class _Bound:
    name: str
    row: MixRow


class Registry:
    """The bindings of one artifact's mixed tensors. Any thread may call any method.

    Parameters
    ----------
    tables : the artifact's decode tables (``Codings.tables``)
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = {(table.layer, table.projection): table for table in tables}
        self._bound: dict[Slot, _Bound] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many slots are bound."""
        return len(self._bound)

    def bind(self, slot: Slot, name: str) -> None:
        """Bind a slot that now holds the bytes of tensor ``name``.

        Raises ``CodingError`` where the slot is still bound, or no table has a row for ``name``.
        """
        self.bind_all([(slot, name)])

    def bind_all(self, pairs: Iterable[tuple[Slot, str]]) -> None:
        """Bind every (slot, tensor name), or none: an error undoes them, the last one first."""
        with self._lock, ExitStack() as undo:
            for slot, name in pairs:
                if slot in self._bound:
                    found = self._bound[slot].name
                    refuse("the slot is bound already", tensor=name, expected="free", found=found)
                self._bound[slot] = _Bound(name, self._row(name))
                undo.callback(self._release, slot)
            undo.pop_all()

    def bind_owners(
        self, layer: int, hot: Owner, cold: Owner, cold_backend: ColdBackend = "gpu"
    ) -> None:
        """Bind one layer of an artifact whose experts are split among two owners, or nothing.

        ``cold_backend`` "none": the cold experts are computed by somebody else, and ``cold`` is
        empty. "cpu" is refused as soon as there are tables: mixed experts are never decoded there.

        Raises ``CodingError`` (``mix-binding``) for ids without a buffer or a buffer without ids, a
        buffer of another type, size or length than its table and ids say, an id that is out of
        range or stands twice, and a row that cannot be decoded.
        """
        if cold_backend == "cpu" and self._tables:
            refuse("a cold owner on the CPU cannot hold mixed experts", found=f"layer {layer}")
        if cold_backend == "none" and not cold.empty:
            refuse("there is no cold owner, but it is given experts", found=f"layer {layer}")
        self.bind_all(
            pair
            for projection in ORDER
            for owner in (hot, cold)
            for pair in self._pairs(layer, projection, owner)
        )

    def unbind(self, slot: Slot) -> None:
        """Forget a slot before its bytes leave; refuses one that is not bound."""
        with self._lock:
            if slot not in self._bound:
                refuse("the slot is not bound", found=slot)
            self._release(slot)

    def row(self, slot: Slot, name: str) -> MixRow:
        """The row that decodes tensor ``name`` in ``slot``.

        Raises ``CodingError`` (``mix-unregistered``) where the slot is not bound to that tensor.
        """
        bound = self._bound.get(slot)
        if bound is None or bound.name != name:
            found = "none" if bound is None else f"that of {bound.name}"
            what = "no table row is bound to the buffer of this tensor"
            raise CodingError.of("mix-unregistered", what, tensor=name, found=found)
        return bound.row

    def _release(self, slot: Slot) -> None:
        del self._bound[slot]

    def _row(self, name: str) -> MixRow:
        place = expert_of(name)
        table = None if place is None else self._tables.get((place[0], place[2]))
        if place is None or table is None:
            refuse("there is no decode table for this tensor", tensor=name)
        row = table.row(place[1])
        if not 0 <= row.mode <= MAX_MODE:
            refuse("mode is neither 0 nor 1", tensor=name, found=row.mode)
        return row

    def _pairs(self, layer: int, projection: str, owner: Owner) -> Iterator[tuple[Slot, str]]:
        """The slots of one owner's compact buffer, in local order, once all of it is right."""
        ids, held = owner.experts.get(projection, ()), owner.tensors.get(projection)
        where = {"tensor": table_name(layer, projection)}
        if held is None:
            if ids:
                refuse("experts are assigned, but there is no tensor", found=list(ids), **where)
            return
        table = self._tables.get((layer, projection))
        if not ids or table is None:
            what = "no decode table" if ids else "no experts"
            refuse(f"there is a tensor, but {what}", found=held.key, **where)
        shape = (len(ids), table.out, table.in_)
        payload_bytes = len(ids) * TYPES[table.type_id].payload_bytes(shape[1:])
        legal = range(len(table.rows))
        rules: tuple[tuple[str, bool, object, object], ...] = (
            ("type", held.type_id == table.type_id, table.type_id, held.type_id),
            ("shape", held.shape == shape, shape, held.shape),
            ("length", held.nbytes == payload_bytes, f"{payload_bytes} bytes", held.nbytes),
            ("expert ids", all(n in legal for n in ids), f"below {len(legal)}", list(ids)),
            ("expert ids", len(set(ids)) == len(ids), "each once", list(ids)),
        )
        for word, good, expected, found in rules:
            if not good:
                what = f"wrong {word} of the owner's tensor"
                refuse(what, expected=expected, found=found, **where)
        for local, expert in enumerate(ids):
            yield (held.key, local), expert_name(layer, expert, projection)
