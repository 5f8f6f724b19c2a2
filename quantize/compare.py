"""Owns the proof against config and source: inventory, and every packed byte.

Compares bytes, not digests. FP4 codes and scale bytes are compared one by one, raw copies too; a
tensor that was converted through float32 is converted again and must give the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ds4q.artifact.check import own_metadata
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.readahead import ReadAhead
from ds4q.artifact.receipt import Receipt, SourceRecord, TensorRecord
from ds4q.artifact.report import Check, Failure
from ds4q.artifact.types import TYPES
from ds4q.artifact.walk import TensorVisitor
from ds4q.quantize.audit import Audit, Unit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.config import check_config
from ds4q.quantize.convert import comparable, compare
from ds4q.quantize.deepseek4 import Inventory, classify, find_draft
from ds4q.quantize.errors import SourceError
from ds4q.quantize.plan import PlannedTensor, source_metadata
from ds4q.quantize.recipe import RECIPES
from ds4q.quantize.rows import Buffers, RowReader, source_ranges

U8 = npt.NDArray[np.uint8]
_local = threading.local()


def place(name: str) -> dict[str, Any]:
    """Layer, expert and projection of a tensor name, for a failure."""
    info = classify(name)
    if info is None:
        return {}
    return {"layer": info.layer, "expert": info.expert, "projection": info.projection}


def _is_draft(name: str) -> bool:
    return name.startswith("mtp.")


def check_inventory(reader: Reader, check: Check) -> None:
    """The tensors are those that the artifact's own config implies, in the shapes it implies.

    A file marked as partial may lack tensors; none may be strange to the model.
    """
    ours = own_metadata(reader) or {}
    partial = bool(ours.get("partial"))
    config = reader.metadata.get("config")
    if not isinstance(config, dict):
        check.fail(Failure("metadata holds no config object"))
        return
    if partial and not config:
        config = {"model_type": "deepseek_v4"}
    try:
        dims = check_config(config, reader.path, allow_partial=partial)
        draft, stages = find_draft(reader.tensors, config)
        inventory = Inventory(dims, draft, stages)
    except SourceError as error:
        check.fail_with(error)
        return
    for entry in reader.tensors.values():
        try:
            shape = inventory.expected(entry.name, reader.path).shape
        except SourceError as error:
            check.fail_with(error)
            continue
        agree = len(shape) == len(entry.shape) and all(
            want in (None, found) for want, found in zip(shape, entry.shape, strict=True)
        )
        if not agree:
            check.fail(
                Failure(
                    "shape is not what the config implies",
                    tensor=entry.name,
                    expected=str(list(shape)),
                    found=str(list(entry.shape)),
                )
            )
    parts = {_is_draft(name) for name in reader.tensors}
    missing = 0
    for name in inventory.required():
        if _is_draft(name) in parts and name not in reader.tensors:
            missing += 1
            if not partial:
                check.fail(Failure("tensor is missing", tensor=name))
    check.figures |= {"tensors": len(reader.tensors), "missing": missing, "partial": partial}


class _AgainstSource:
    """Compares packed rows with source rows, and the source's digests with the receipt's."""

    def __init__(
        self, reader: RowReader, tensor: PlannedTensor, record: TensorRecord | None
    ) -> None:
        self._reader = reader
        self._tensor = tensor
        self._record = record
        self._hashers = [xxhash.xxh3_128(), xxhash.xxh3_128()]  # weight, scale
        self._failures: list[Failure] = []

    def rows(self, first: int, count: int, packed: U8) -> None:
        if self._failures:
            return
        name = self._tensor.entry.name
        rows, parts = self._reader.read(first, count)
        if self._record is not None:
            for hasher, part in zip(self._hashers, parts, strict=False):
                hasher.update(part.data)
        try:
            found = compare(rows, self._tensor.target, packed)
        except SourceError as error:
            self._failures.append(
                Failure(error.what, tensor=name, found=str(error.found), **place(name))
            )
            return
        if found is not None:
            what = "row header" if found.block < 0 else "packed block"
            self._failures.append(
                Failure(
                    f"{what} differs from the source",
                    tensor=name,
                    row=found.row,
                    block=found.block if found.block >= 0 else None,
                    expected=found.expected,
                    found=found.found,
                    **place(name),
                )
            )

    def done(self) -> list[Failure]:
        if not self._failures and self._record is not None:
            self._compare_sources(self._record)
        return self._failures

    def _compare_sources(self, record: TensorRecord) -> None:
        """What the receipt says of the source tensors is what they are."""
        if self._reader.whole_scale is not None:
            self._hashers[1].update(self._reader.whole_scale.data)
        unit = self._tensor.unit
        found = tuple(
            SourceRecord(t.name, t.dtype, t.shape, hasher.hexdigest())
            for t, hasher in zip(unit.tensors, self._hashers, strict=False)
        )
        if found != record.sources:
            name = self._tensor.entry.name
            self._failures.append(
                Failure(
                    "receipt records another source",
                    tensor=name,
                    expected=_source_text(record.sources),
                    found=_source_text(found),
                    **place(name),
                )
            )


def _source_text(sources: Iterable[SourceRecord]) -> str:
    return ", ".join(f"{s.name} {s.dtype} {list(s.shape)} {s.xxh3}" for s in sources)


class _Refused:
    def __init__(self, failure: Failure) -> None:
        self._failure = failure

    def rows(self, first: int, count: int, packed: U8) -> None:
        """Nothing to compare with."""

    def done(self) -> list[Failure]:
        return [self._failure]


class SourceComparison:
    """A visitor of ``artifact.walk``: the artifact equals what its source demands."""

    def __init__(
        self,
        check: Check,
        checkpoint: Checkpoint,
        audit: Audit,
        reader: Reader,
        receipt: Receipt | None = None,
    ) -> None:
        self.check = check
        records = () if receipt is None else receipt.tensors
        self._records = {record.name: record for record in records}
        self._checkpoint = checkpoint
        self._audit = audit
        self._artifact = reader
        self._recipe = RECIPES.get(str((own_metadata(reader) or {}).get("recipe")))
        self._units: dict[str, Unit] = {unit.name: unit for unit in audit.units}
        present = [self._units[name] for name in reader.tensors if name in self._units]
        self._number = {unit.name: number for number, unit in enumerate(present)}
        self._ahead = ReadAhead([source_ranges(checkpoint, unit) for unit in present])

    def begin(self, entry: TensorEntry, rows: int, k: int) -> TensorVisitor | None:
        unit = self._units.get(entry.name)
        where = place(entry.name)
        if unit is None:
            return _Refused(Failure("tensor is not in the source", tensor=entry.name, **where))
        if unit.info.logical_shape != entry.shape:
            return _Refused(
                Failure(
                    "shape differs from the source",
                    tensor=entry.name,
                    expected=str(list(unit.info.logical_shape)),
                    found=str(list(entry.shape)),
                    **where,
                )
            )
        found = TYPES[entry.type_id]
        if self._recipe is not None:
            wanted = self._recipe.type_for(unit.info, unit.kind)
            if found is not wanted:
                return _Refused(
                    Failure(
                        f"type is not what recipe {self._recipe.name} gives",
                        tensor=entry.name,
                        expected=wanted.name,
                        found=found.name,
                        **where,
                    )
                )
        elif not comparable(unit.kind, found):
            return _Refused(
                Failure(
                    "type cannot come from this source",
                    tensor=entry.name,
                    expected=unit.kind,
                    found=found.name,
                    **where,
                )
            )
        buffers = _local.__dict__.setdefault("buffers", Buffers())
        tensor = PlannedTensor(unit, entry, rows, k)
        try:
            reader = RowReader(
                self._checkpoint,
                self._audit,
                tensor,
                buffers,
                self._ahead.take(self._number[entry.name]),
            )
        except SourceError as error:
            return _Refused(Failure(str(error), tensor=entry.name, **where))
        return _AgainstSource(reader, tensor, self._records.get(entry.name))

    def compare_whole(self) -> None:
        """What no payload shows: tensors that are not there, and texts in the metadata."""
        reader = self._artifact
        ours = own_metadata(reader) or {}
        parts = {_is_draft(name) for name in reader.tensors}
        lacking = [
            name for name in self._units if name not in reader.tensors and _is_draft(name) in parts
        ]
        if not ours.get("partial"):
            for name in lacking:
                self.check.fail(
                    Failure("source tensor is not in the artifact", tensor=name, **place(name))
                )
        for key, wanted in source_metadata(self._checkpoint).items():
            if reader.metadata.get(key) != wanted:
                self.check.fail(Failure(f"metadata key '{key}' differs from the source"))
        self.check.figures |= {
            "tensors": len(reader.tensors),
            "source_bytes": sum(
                sum(tensor.nbytes for tensor in unit.tensors)
                for unit in self._units.values()
                if unit.name in reader.tensors
            ),
        }
