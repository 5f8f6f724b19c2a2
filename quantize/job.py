"""A whole quantize run: preflight, fresh start or resume, sealing, publishing, clean-up.

A file at a final name is always whole. A stop leaves the partial files and the journal for
``--resume``; a failure removes them, unless the first file already has its final name.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4q.artifact import stops
from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.files import AppearedError, ForeignFileError, free_bytes, read_small
from ds4q.artifact.locks import LockedError, WriteError
from ds4q.artifact.receipt import Receipt, receipt_path
from ds4q.artifact.report import json_text
from ds4q.artifact.types import RAW, TYPES
from ds4q.quantize.audit import Audit
from ds4q.quantize.checkpoint import CONFIG, OBJECTS, TEXTS, Checkpoint
from ds4q.quantize.convert import Events
from ds4q.quantize.deepseek4 import Part
from ds4q.quantize.errors import JobError, SaturationError
from ds4q.quantize.finished import planned_receipts, whole_receipts
from ds4q.quantize.generation import not_applied
from ds4q.quantize.index import INDEX
from ds4q.quantize.journal import Earlier, Journal, JournalError, check_identity, read_journal
from ds4q.quantize.outputs import (
    RECIPE_SUFFIX,
    REPORT_SUFFIX,
    OutputFile,
    OutputFiles,
    StandingFile,
    UnfinishedError,
    partial_path,
)
from ds4q.quantize.pipeline import Packed, Pipeline, seal, source_digest
from ds4q.quantize.plan import Output, Plan, sidecar_path

if TYPE_CHECKING:
    from ds4q.quantize.budget import BudgetPlan

RECEIPT_BYTES_PER_TENSOR = 512  # generous: a compressed row takes about 150
Advance = Callable[[int], None]
Progress = Callable[[str, int], AbstractContextManager[Advance]]


class SpaceError(JobError):
    """Not enough free space for what the plan says."""

    rule = "not enough free space (No space left on device)"
    cure = "free some space, or write to another disk"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run made, or would make: the JSON of ``ds4q quantize``."""

    plan: Plan
    budget: BudgetPlan | None = None
    receipts: tuple[Receipt, ...] = ()
    seconds: float = 0.0
    resumed_bytes: int = 0
    already_done: bool = False
    warnings: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """The JSON document; keys of the trunk at the top, sidecars in a list."""
        parts = [_describe(output) for output in self.plan.outputs]
        for part, receipt in zip(parts, self.receipts, strict=False):
            part["sha256"] = receipt.sha256
        events = Events()
        for receipt in self.receipts:
            for tensor in receipt.tensors:
                events.add(Events.of(tensor.events))
        generation = self.plan.trunk.metadata["generation_config"] or {}
        return (
            parts[0]
            | {
                "seconds": round(self.seconds, 3),
                "source_bytes": self.plan.source_bytes,
                "recipe": self.plan.options.recipe.name,
                "lossless": self.plan.lossless,
                "partial": self.plan.partial,
                "sidecars": parts[1:],
                "skipped": len(self.plan.skipped),
                "events": events.document(),
                "resumed_bytes": self.resumed_bytes,
                "already_done": self.already_done,
                "sampling": {"not_applied": not_applied(generation)},
                "warnings": list(self.warnings),
            }
            | ({} if self.budget is None else {"budget": self.budget.report()})
        )


def left_over(plan: Plan) -> list[str]:
    """Files with the names of drafts that this job will not write."""
    trunk, *sidecars = (output.path for output in plan.outputs)
    parts: tuple[Part, ...] = ("dspark", "mtp")
    old = [sidecar_path(trunk, part) for part in parts]
    return [
        f"{path} is there already and stays as it is: this job does not write it"
        for path in old
        if os.path.lexists(path) and path not in sidecars  # False for a name that is too long
    ]


def _describe(output: Output) -> dict[str, Any]:
    types: dict[str, dict[str, int]] = {}
    expert_bytes = expert_weights = 0
    for tensor in output.tensors:
        entry = types.setdefault(TYPES[tensor.entry.type_id].name, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.entry.nbytes
        if tensor.is_routed_expert:
            expert_bytes += tensor.entry.nbytes
            expert_weights += tensor.rows * tensor.k
    for table in output.tables:
        entry = types.setdefault(RAW.name, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += table.entry.nbytes
    return {
        "output": str(output.path),
        "bytes": output.layout.file_bytes,
        "tensors": len(output.layout.entries),
        "types": dict(sorted(types.items())),
        "bpw_experts": round(8 * expert_bytes / expert_weights, 6) if expert_weights else None,
    }


@dataclass(slots=True)
class Job:
    """One run over a plan. ``resume`` and ``force`` are what the user allows.

    ``inputs`` are files that it reads beside the checkpoint: nothing may be written over them.
    """

    checkpoint: Checkpoint
    audit: Audit
    plan: Plan
    budget: BudgetPlan | None = None
    inputs: tuple[Path, ...] = ()
    resume: bool = False
    force: bool = False
    files: OutputFiles = field(init=False)
    _files: list[OutputFile] = field(default_factory=list)
    _journal: Journal | None = None
    _finished: bool = False  # a file has its final name: only --resume can put the rest right

    def __post_init__(self) -> None:
        beside = [self.checkpoint.folder / name for name in (INDEX, CONFIG, *TEXTS, *OBJECTS)]
        read = [os.stat(path) for path in (*self.inputs, *beside) if path.exists()]
        inputs = (*(os.fstat(shard.fd) for shard in self.checkpoint.shards.values()), *read)
        self.files = OutputFiles(self.plan, self._plan_texts(), inputs, self.force)

    @property
    def out(self) -> Path:
        """The trunk's final name, after which the journal is named too."""
        return self.files.out

    def identity(self) -> dict[str, Any]:
        """What two runs must share for one to continue the other."""
        ours = self.plan.outputs[0].metadata["ds4q"]
        return {
            "options": self.plan.options.document(),
            "outputs": [[o.path.name, o.layout.file_bytes] for o in self.plan.outputs],
            "source_fingerprint": self.plan.fingerprint,
            "tool_version": ours["tool_version"],
        }

    # ------------------------------------------------------------ before work

    def preflight(self) -> None:
        """Refuse, before any work, what cannot end well: place, existing files, free space."""
        self.files.check_place(self.checkpoint)
        earlier = self._read_journal()
        unfinished = self.files.claim_all(earlier, resume=self.resume)
        if unfinished and not self.resume and not self.force:
            done = 0 if earlier is None else earlier.nbytes
            raise UnfinishedError(
                path=partial_path(self.out),
                found=f"{done:,} of {self.plan.file_bytes:,} bytes done",
            )
        if self.resume and not self.force and earlier is not None:
            check_identity(earlier, self.identity(), self.files.journal)
        if not (self.resume and earlier is not None and earlier.published):
            self._check_space()

    def _read_journal(self) -> Earlier | None:
        """What an earlier run left; ``force`` ignores a journal that cannot be used."""
        try:
            return read_journal(self.files.journal)
        except JournalError:
            if self.force:
                return None
            raise

    def _plan_texts(self) -> dict[Path, bytes]:
        """What a budget's plan says, by final name: the recipe that repeats it, and a report."""
        if self.budget is None:
            return {}
        out = self.plan.outputs[0].path
        report = json_text(self.budget.report())
        return {
            out.with_name(out.name + RECIPE_SUFFIX): self.budget.toml.encode(),
            out.with_name(out.name + REPORT_SUFFIX): report.encode(),
        }

    def _check_space(self) -> None:
        tensors = sum(len(output.layout.entries) for output in self.plan.outputs)
        needed = self.plan.file_bytes + tensors * RECEIPT_BYTES_PER_TENSOR
        partials = filter(Path.exists, self.files.partials)
        held = sum(path.stat().st_blocks * 512 for path in partials)
        free = free_bytes(self.out.parent)
        if needed > free + held:
            raise SpaceError(
                path=self.out.parent,
                expected=f"{needed:,} bytes",
                found=f"{free + held:,} bytes",
            )

    def finished_earlier(self, progress: Progress, *, tidy: bool) -> Summary | None:
        """With ``resume``: the summary of a job that had already published everything.

        Every file is read whole and compared with its receipt. With ``tidy`` a journal that has
        outlived its job is removed.

        Raises ``DamagedOutputError`` where a file of this plan differs from its receipt.
        """
        if not self.resume or self.force or any(map(os.path.lexists, self.files.partials)):
            return None
        earlier = self._read_journal()
        if earlier is not None and not earlier.published:
            return None
        planned = planned_receipts(self.plan)
        if planned is None or not self._texts_are_planned():
            return None
        with progress("check", self.plan.file_bytes) as advance:
            receipts = whole_receipts(self.plan, self.checkpoint, planned, advance)
        if tidy:
            self.files.remove_journal()
        return Summary(self.plan, self.budget, receipts, already_done=True)

    def _texts_are_planned(self) -> bool:
        """Whether the plan of a budget is beside its artifact, byte for byte."""
        try:
            return all(read_small(path, len(t)) == t for path, t in self.files.texts.items())
        except (OSError, Ds4qError):
            return False

    # ------------------------------------------------------------ work

    def run(self, threads: int, advance: Advance) -> Summary:
        """Write all outputs and their receipts. ``advance`` hears of packed bytes.

        An error of disk, source or options removes what was begun. A stop leaves it, whatever fails
        while it is under way; so does an unforeseen error, such as too little memory.
        """
        begin = time.perf_counter()
        try:
            earlier = self._read_journal() if self.resume and not self.force else None
            self._start(earlier)
            receipts, kept_bytes = self._write(earlier, threads, advance)
        except Exception as error:
            if (stop := stops.stop_behind(error)) is not None:
                raise stop from error
            kept = (LockedError, AppearedError, ForeignFileError, JournalError, SaturationError)
            if isinstance(error, Ds4qError | OSError) and not isinstance(error, kept):
                self._discard()
            if isinstance(error, OSError):
                raise self._write_error(error) from error
            raise
        finally:
            self._close()
        seconds = time.perf_counter() - begin
        return Summary(self.plan, self.budget, receipts, seconds, resumed_bytes=kept_bytes)

    def _start(self, earlier: Earlier | None) -> None:
        """Open partial files and journal, fresh or as an earlier run left them."""
        begun = None if earlier is not None else self._read_journal()
        for output in self.plan.outputs:
            self._files.append(self.files.open_output(output))
        self._finished = any(isinstance(file, StandingFile) for file in self._files)
        if earlier is not None:
            self._journal = Journal.reopen(self.files.journal, earlier)
        else:
            for file in self._files:
                file.reset()
            for abandoned in self.files.forget(begun) if begun is not None else ():
                abandoned.discard()
            self._journal = Journal.create(
                self.files.journal, self.identity(), _marks(self.checkpoint), self.files.replaced()
            )
        for file in self._files:
            file.allocate()

    def _write(
        self, earlier: Earlier | None, threads: int, advance: Advance
    ) -> tuple[tuple[Receipt, ...], int]:
        """All of the work; the receipts, and how many packed bytes an earlier run had written."""
        journal = self._journal
        if journal is None:
            raise JobError("the journal is not open")
        pipeline = Pipeline(
            self.checkpoint,
            self.audit,
            self.plan,
            self._files,
            journal,
            {} if earlier is None else earlier.blocks,
            advance,
        )
        pipeline.pack_all(threads)
        self.checkpoint.check_unchanged()
        digests: dict[str, str] = {}
        results: list[list[Packed]] = []
        for o, output in enumerate(self.plan.outputs):
            results.append([pipeline.results[o, t] for t in range(len(output.tensors))])
            for tensor, result in zip(output.tensors, results[-1], strict=True):
                names = [source.name for source in tensor.unit.tensors]
                digests |= dict(zip(names, result.sources, strict=True))
        digest = source_digest(self.checkpoint, digests)
        receipts = []
        for file, output, packed in zip(self._files, self.plan.outputs, results, strict=True):
            receipts.append(seal(file, output, self.plan, packed, digest))
            self.files.write_small(receipt_path(output.path), receipts[-1].encode())
        for path, text in self.files.texts.items():
            self.files.write_small(path, text)
        journal.publish()
        self._rename()
        kept_bytes = sum(packed.kept_bytes for packed in pipeline.results.values())
        return tuple(receipts), kept_bytes

    def _rename(self) -> None:
        """Give everything its name; a rename that an earlier run did is found done."""
        for _ in self.files.publish_all():
            self._finished = True

    # ------------------------------------------------------------ endings

    def _discard(self) -> None:
        """Remove what this run began, and has locked; what fails here hides no earlier error."""
        if self._finished or not self._files:
            return
        with stops.held():
            for file in self._files:
                with suppress(OSError):
                    file.discard()
            self.files.remove_partials()

    def _close(self) -> None:
        """Let go of the files. Everything that counts was synced: a failing close loses nothing."""
        with stops.held():
            for file in (*self._files, self._journal):
                with suppress(OSError):
                    if file is not None:
                        file.close()

    def _write_error(self, error: OSError) -> Ds4qError:
        """An operating system error as one line with the bytes that the job needs."""
        remedy = "nothing was left behind"
        if self._finished:
            remedy = "everything is written: run the command again with --resume"
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            remedy = f"the job needs {self.plan.file_bytes:,} bytes; {remedy}"
        return WriteError(
            error.strerror or str(error), path=error.filename or self.out, remedy=remedy
        )


def _marks(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """What shows that a shard is not the file that an earlier run read.

    The change time is among it: a tool that copies can restore the modification time.
    """
    marks = {}
    for name, shard in checkpoint.shards.items():
        status = os.fstat(shard.fd)
        times = [status.st_mtime_ns, status.st_ctime_ns]
        marks[name] = [status.st_dev, status.st_ino, status.st_size, *times]
    return marks
