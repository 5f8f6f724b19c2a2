"""Owns an export from begin to end: checks, plan, one pass over the payload, publishing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ds4q.artifact.codings import Codings
from ds4q.artifact.hfq import Reader, TensorEntry
from ds4q.artifact.receipt import find_receipt
from ds4q.artifact.report import Check, Failure
from ds4q.artifact.types import ROCMFP2, ROCMFP6
from ds4q.artifact.walk import LegalBytes, ReceiptDigests, TensorVisitor, Visitor, walk
from ds4q.quantize.export.plan import U8, ExportError, ExportPlan, Move
from ds4q.quantize.export.staging import Staging, check_place
from ds4q.quantize.inventory import fault_line, first_fault, ids_below

Format = Literal["safetensors", "gguf"]
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]

NO_RECEIPT = "no receipt: the payload could not be compared with its digests"


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote: the JSON of ``ds4q export``."""

    output: str
    format: Format
    plan: ExportPlan
    warnings: tuple[str, ...]
    seconds: float

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        types: dict[str, dict[str, int]] = {}
        for tensor in self.plan.tensors:
            entry = types.setdefault(tensor.type, {"tensors": 0, "bytes": 0})
            entry["tensors"] += 1
            entry["bytes"] += tensor.nbytes
        return {
            "output": self.output,
            "format": self.format,
            "bytes": self.plan.nbytes,
            "tensors": len(self.plan.tensors),
            "files": [{"name": file.name, "bytes": file.nbytes} for file in self.plan.files],
            "types": dict(sorted(types.items())),
            "left_out": dict(self.plan.left_out),
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 3),
        }


@contextmanager
def _silent(label: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda amount: None


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: Format,
    only_experts: bool = False,
    variant_107: str | None = None,
    fp6_code32: str | None = None,
    threads: int = 1,
    progress: Progress = _silent,
) -> Exported:
    """Write the artifact at ``path`` in another format, whole or not at all.

    Nothing is encoded or rounded. Everything is compared on the way: legal bytes, the receipt's
    digests where there is one, and each converted run of rows with its origin.

    Parameters
    ----------
    out : a file, or with ``safetensors`` a folder of shards unless it ends in ``.safetensors``;
        nothing may be there
    only_experts : leave out all but the routed experts
    variant_107, fp6_code32 : with ``gguf`` how the runtime takes types 107 and 102, which must be
        how the artifact has them; needed where it has such tensors

    Raises
    ------
    ExportError : it does not fit the format, or is damaged
    JobError, WriteError : the output cannot be placed or written
    """
    begin = time.perf_counter()
    out = Path(out)
    check_place(out)
    with Reader(path) as reader:
        fault = first_fault(reader)
        if fault is not None:
            raise _refusal(reader, fault)
        if to == "gguf":
            from ds4q.quantize.export.gguf import plan_gguf

            variants = {ROCMFP2.id: variant_107, ROCMFP6.id: fp6_code32}
            plan = plan_gguf(reader, out.name, only_experts=only_experts, variants=variants)
        else:
            from ds4q.quantize.export.safetensors import plan_safetensors

            plan = plan_safetensors(reader, out.name, only_experts=only_experts)
        payload_bytes = sum(entry.nbytes for entry in reader.tensors.values())
        with (
            Staging(out, plan.files, folder=plan.folder) as staging,
            progress("export", payload_bytes) as advance,
        ):
            told = _pass_over(reader, plan, staging, threads, advance)
            staging.publish()
    return Exported(os.fspath(out), to, plan, (*plan.warnings, *told), time.perf_counter() - begin)


def _refusal(reader: Reader, fault: str) -> ExportError:
    return ExportError(fault, path=reader.path, remedy="see what ds4q verify says of it")


def _refuse_faults(reader: Reader, checks: list[Check]) -> None:
    for check in checks:
        if not check.ok:
            raise _refusal(reader, fault_line(check))


def _pass_over(
    reader: Reader,
    plan: ExportPlan,
    staging: Staging,
    threads: int,
    advance: Callable[[int], None],
) -> list[str]:
    """Read every payload once, check it and write it; returns warnings."""
    checks = [Check("payload"), Check("receipt"), Check("export")]
    visitors: list[Visitor] = [LegalBytes(checks[0], Codings.of(reader), ids_below(reader))]
    receipt = find_receipt(reader)
    if receipt is not None:
        digests = ReceiptDigests(checks[1], receipt[1])
        digests.compare_front(reader)
        _refuse_faults(reader, checks)
        visitors.append(digests)
    visitors.append(_Writing(checks[2], reader, plan, staging))
    walk(reader, visitors, threads=threads, sha256=False, advance=advance)
    _refuse_faults(reader, checks)
    return [] if receipt is not None else [NO_RECEIPT]


class _Writing:
    """A visitor of ``artifact.walk`` that writes what it sees where the plan puts it."""

    def __init__(self, check: Check, reader: Reader, plan: ExportPlan, staging: Staging) -> None:
        self.check = check
        self._reader, self._plan, self._staging = reader, plan, staging

    def begin(self, entry: TensorEntry, rows: int, k: int) -> TensorVisitor | None:
        move = self._plan.moves.get(entry.name)
        return None if move is None else _Moving(self._reader, self._staging, entry, move, rows, k)


@dataclass(slots=True)
class _Moving:
    reader: Reader
    staging: Staging
    entry: TensorEntry
    move: Move
    tensor_rows: int
    k: int

    def rows(self, first: int, count: int, packed: U8) -> None:
        try:
            parts = self.move.convert(packed, first, count, self.k)
        except ExportError as error:
            raise error.located(path=self.reader.path, tensor=self.entry.name) from None
        for place, data in zip(self.move.places, parts, strict=True):
            # Whole: runs of rows begin at multiples of 32, where blocks do, too.
            start = place.nbytes * first // self.tensor_rows
            self.staging.pwrite(place.file, data, place.offset + start)

    def done(self) -> list[Failure]:
        return []
