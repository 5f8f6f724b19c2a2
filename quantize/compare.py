"""Compares an artifact with its source, byte by byte.

Compares bytes, not digests. FP4 codes and scale bytes are compared one by one, raw copies too; a
tensor that was converted through float32, or encoded in a lossy type, is made again and must give
the same bytes, its books included. What a lossy type cost is measured on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from ds4q.artifact.check import own_metadata
from ds4q.artifact.codings import Codings
from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.formats import MixRow
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.readahead import ReadAhead
from ds4q.artifact.receipt import (
    SATURATED,
    Receipt,
    SourceRecord,
    TensorRecord,
    saturation_note,
)
from ds4q.artifact.report import NOT_JUDGED, Check, Failure
from ds4q.artifact.types import RAW, ROCMFPX, TYPES, TensorType
from ds4q.artifact.walk import TensorVisitor
from ds4q.quantize.audit import Audit, Unit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.convert import Encoding, add_errors, comparable, compare
from ds4q.quantize.encoding import KEY, encoding_in
from ds4q.quantize.errors import BooksError, SourceError
from ds4q.quantize.fitting import Fitting
from ds4q.quantize.inventory import is_draft
from ds4q.quantize.measure import ErrorSums
from ds4q.quantize.plan import PlannedTensor, importance_of, source_metadata
from ds4q.quantize.recipe import RECIPES
from ds4q.quantize.rows import Buffers, RowReader, source_ranges

if TYPE_CHECKING:
    from ds4q.quantize.imatrix import Imatrix

U8 = npt.NDArray[np.uint8]
WORST_LISTED = 10
_local = threading.local()


@dataclass(frozen=True, slots=True)
class Demands:
    """What is asked of lossy types.

    ``imatrix`` is the one that the artifact was made with. ``errors_only`` measures the errors and
    does not encode again: for an artifact whose imatrix is lost.
    """

    imatrix: Imatrix | None = None
    errors_only: bool = False


class _AgainstSource:
    """Compares packed rows with source rows, and the source's digests with the receipt's.

    ``sums`` takes the errors of a lossy type; with ``errors_only`` nothing else is asked of it.
    """

    def __init__(
        self,
        reader: RowReader,
        tensor: PlannedTensor,
        record: TensorRecord | None,
        encoding: Encoding,
        sums: ErrorSums | None,
        errors_only: bool,
    ) -> None:
        self._reader = reader
        self._tensor = tensor
        self._record = record
        self._encoding = encoding
        self._sums = sums
        self._errors_only = errors_only and sums is not None
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
        kind = self._tensor.target
        try:
            if self._sums is not None:
                add_errors(rows, kind, packed, self._encoding, self._sums)
            if self._errors_only:
                return
            found = compare(rows, kind, packed, self._encoding)
        except SourceError as error:
            self._failures.append(Failure(error.what, tensor=name, found=str(error.found)))
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
                )
            )

    def done(self) -> list[Failure]:
        if not self._failures and self._record is not None:
            self._compare_sources(self._record)
        return self._failures

    def _compare_sources(self, record: TensorRecord) -> None:
        """Compare the receipt's source tensors, and its count of saturated blocks."""
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
                )
            )
        recorded = record.events.get(SATURATED)
        if self._sums is not None and recorded not in (None, self._sums.saturated_blocks):
            self._failures.append(
                Failure(
                    "receipt records another number of saturated blocks",
                    tensor=record.name,
                    expected=str(recorded),
                    found=str(self._sums.saturated_blocks),
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
    """A visitor of ``artifact.walk``: the artifact equals what its source demands.

    ``errors`` holds what each tensor of a lossy type lost, by name, once it was seen.
    """

    def __init__(
        self,
        check: Check,
        checkpoint: Checkpoint,
        audit: Audit,
        reader: Reader,
        codings: Codings,
        receipt: Receipt | None = None,
        demands: Demands | None = None,
    ) -> None:
        self.check = check
        self.errors: dict[str, ErrorSums] = {}
        self._demands = demands or Demands()
        self._codings = codings
        self._fitting = Fitting(checkpoint, audit, self._demands.imatrix)
        records = () if receipt is None else receipt.tensors
        self._records = {record.name: record for record in records}
        self._checkpoint = checkpoint
        self._audit = audit
        self._artifact = reader
        ours = own_metadata(reader) or {}
        # A recipe of rules may have any name; its digest tells it from ours.
        named = "recipe_sha256" not in ours
        self._recipe = RECIPES.get(str(ours.get("recipe"))) if named else None
        self._units: dict[str, Unit] = {unit.name: unit for unit in audit.units}
        present = [self._units[name] for name in reader.tensors if name in self._units]
        self._number = {unit.name: number for number, unit in enumerate(present)}
        self._ahead = ReadAhead([source_ranges(checkpoint, unit) for unit in present])

    def begin(self, entry: TensorEntry, rows: int, k: int) -> TensorVisitor | None:
        if entry.type_id == RAW.id:
            return None  # a decode table: its books are compared with their tensors
        unit = self._units.get(entry.name)
        if unit is None:
            return _Refused(Failure("tensor is not in the source", tensor=entry.name))
        if unit.info.logical_shape != entry.shape:
            return _Refused(
                Failure(
                    "shape differs from the source",
                    tensor=entry.name,
                    expected=str(list(unit.info.logical_shape)),
                    found=str(list(entry.shape)),
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
                    )
                )
        elif not comparable(unit.kind, found):
            return _Refused(
                Failure(
                    "type cannot come from this source",
                    tensor=entry.name,
                    expected=unit.kind,
                    found=found.name,
                )
            )
        buffers = _local.__dict__.setdefault("buffers", Buffers())
        tensor = PlannedTensor(unit, entry, rows, k)
        try:
            encoding = self._encoding(unit, found)
            reader = RowReader(
                self._checkpoint,
                self._audit,
                unit,
                buffers,
                self._ahead.take(self._number[entry.name]),
            )
        except Ds4qError as error:
            return _Refused(Failure(str(error), tensor=entry.name))
        sums = None
        if found in ROCMFPX:
            sums = self.errors[entry.name] = ErrorSums.zero()
        record, errors_only = self._records.get(entry.name), self._demands.errors_only
        return _AgainstSource(reader, tensor, record, encoding, sums, errors_only)

    def _encoding(self, unit: Unit, kind: TensorType) -> Encoding:
        """How the artifact says that a tensor was encoded; books must be those that a fit gives."""
        if kind not in ROCMFPX:
            return Encoding()
        coding = self._codings.coding(unit.name)
        if isinstance(coding, MixRow) and not self._demands.errors_only:
            fitted = self._fitting.books(unit, kind).row
            if fitted != coding:
                raise BooksError(expected=fitted.books.hex(), found=coding.books.hex())
        return Encoding(coding, importance_of(self._demands.imatrix, unit.info))

    def check_imatrix(self) -> bool:
        """Whether the imatrix at hand is the one that the artifact names; a failure if not."""
        wanted = (own_metadata(self._artifact) or {}).get("imatrix_sha256")
        imatrix = self._demands.imatrix
        found = None if imatrix is None else imatrix.sha256
        if wanted == found or (self._demands.errors_only and found is None):
            return True
        if wanted is None:
            message = "the artifact was made without an imatrix; leave out --imatrix"
        elif found is None:
            message = (
                "the artifact was made with an imatrix; name it with --imatrix, or ask for the "
                "errors alone with --errors-only"
            )
        else:
            message = "the artifact was made with another imatrix"
        self.check.fail(Failure(message, expected=wanted, found=found))
        return False

    def report_errors(self) -> None:
        """Figures of what lossy types cost: over all, and the tensors that lost most."""
        if not self.errors:
            return
        whole = ErrorSums.zero()
        for name in sorted(self.errors):
            whole.sums += self.errors[name].sums
        saturated = [sums.saturated_blocks for sums in self.errors.values()]
        note = saturation_note(saturated)
        if note is not None:
            self.check.notes.append(note)
        if self._demands.errors_only:
            self.check.unjudged = NOT_JUDGED
            self.check.notes.append(
                f"{len(self.errors):,} re-encoded tensors were measured, not judged; "
                "all others were compared"
            )
        worst = sorted(self.errors, key=lambda name: (-self.errors[name].nrmse, name))
        self.check.figures |= {
            "nrmse": round(whole.nrmse, 6),
            "cosine": round(whole.cosine, 6),
            "lossy_tensors": len(self.errors),
            SATURATED: sum(saturated),
            "reencoded": not self._demands.errors_only,
            "worst": [
                {
                    "tensor": name,
                    "nrmse": round(self.errors[name].nrmse, 6),
                    "cosine": round(self.errors[name].cosine, 6),
                }
                for name in worst[:WORST_LISTED]
            ],
        }

    def compare_whole(self) -> None:
        """What no payload shows: tensors that are not there, and texts in the metadata."""
        reader = self._artifact
        ours = own_metadata(reader) or {}
        parts = {is_draft(name) for name in reader.tensors}
        lacking = [
            name for name in self._units if name not in reader.tensors and is_draft(name) in parts
        ]
        if not ours.get("partial"):
            for name in lacking:
                self.check.fail(Failure("source tensor is not in the artifact", tensor=name))
        for key, wanted in source_metadata(self._checkpoint).items():
            if reader.metadata.get(key) != wanted:
                self.check.fail(Failure(f"metadata key '{key}' differs from the source"))
        encoding = encoding_in(self._checkpoint.folder)
        if KEY not in ours and encoding is not None:  # as versions that did not copy it left it
            self.check.notes.append("the texts of the source's encoding/ are not in the artifact")
        elif ours.get(KEY) != (None if encoding is None else encoding.document()):
            self.check.fail(Failure(f"metadata key 'ds4q.{KEY}' differs from the source"))
        self.check.figures |= {
            "tensors": len(reader.tensors),
            "source_bytes": sum(
                sum(tensor.nbytes for tensor in unit.tensors)
                for unit in self._units.values()
                if unit.name in reader.tensors
            ),
        }
