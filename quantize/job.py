"""Owns a whole quantize run: preflight, fresh start or resume, sealing, publishing, clean-up.

What stands at a final name is always a whole file. A stop leaves the partial files and the journal
for ``--resume``; a failure removes them, unless the first file already has its final name.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4q.artifact import stops
from ds4q.artifact.digest import sha256_stream
from ds4q.artifact.errors import ArtifactError, Ds4qError
from ds4q.artifact.files import free_bytes
from ds4q.artifact.hfq import Reader
from ds4q.artifact.metadata import front_digest
from ds4q.artifact.receipt import Receipt, read_receipt, receipt_path
from ds4q.artifact.types import RAW, TYPES
from ds4q.artifact.writer import (
    PARTIAL_SUFFIX,
    LockedError,
    PartialFile,
    WriteError,
    fsync_folder,
    write_durably,
)
from ds4q.quantize.audit import Audit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.convert import Events
from ds4q.quantize.errors import JobError
from ds4q.quantize.journal import Earlier as EarlierJournal
from ds4q.quantize.journal import (
    Journal,
    check_identity,
    journal_path,
    read_journal,
)
from ds4q.quantize.pipeline import Earlier, Packed, Pipeline, seal, source_digest
from ds4q.quantize.plan import Output, Plan

if TYPE_CHECKING:
    from ds4q.quantize.budget import BudgetPlan

RECEIPT_BYTES_PER_TENSOR = 512  # generous: a compressed row takes about 150
RECIPE_SUFFIX = ".plan.toml"  # beside an artifact of a budget: the recipe that repeats it
REPORT_SUFFIX = ".plan.json"  # and what was chosen, and why
Advance = Callable[[int], None]


class OutputExistsError(JobError):
    """Something stands where the output should go."""

    rule = "output exists"
    cure = "choose another name, or replace it with --force"


class UnfinishedError(JobError):
    """An earlier job left its partial file."""

    rule = "an unfinished job lies here"
    cure = "continue it with --resume, or start over with --force"


class OutputPlaceError(JobError):
    """The output cannot be placed where the user asked."""

    rule = "output cannot be written there"


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

    def document(self) -> dict[str, Any]:
        """The JSON document; keys of the trunk at the top, sidecars in a list."""
        parts = [_describe(output) for output in self.plan.outputs]
        for part, receipt in zip(parts, self.receipts, strict=False):
            part["sha256"] = receipt.sha256
        events = Events()
        for receipt in self.receipts:
            for tensor in receipt.tensors:
                events.add(Events.of(tensor.events))
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
                "warnings": list(self.plan.warnings),
            }
            | ({} if self.budget is None else {"budget": self.budget.report()})
        )


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
    _files: list[PartialFile] = field(default_factory=list)
    _journal: Journal | None = None
    _finished: bool = False  # a file has its final name: only --resume can put the rest right

    @property
    def out(self) -> Path:
        """The trunk's final name, after which the journal is named too."""
        return self.plan.outputs[0].path

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
        folder = self.out.parent
        if not folder.is_dir():
            raise OutputPlaceError(
                "output folder does not exist", path=folder, remedy="create it, or choose another"
            )
        if self.checkpoint.folder.resolve() in (folder.resolve(), *folder.resolve().parents):
            raise OutputPlaceError(
                "output lies inside the source folder",
                path=self.out,
                remedy="choose a folder outside the checkpoint",
            )
        self._check_inputs()
        earlier = read_journal(journal_path(self.out))
        unfinished = earlier is not None or any(_partial(p).exists() for p in self._targets())
        for path in reversed(self._targets()):
            _check_target(path)
            _check_target(_partial(path))
            # An unfinished job beside existing output was begun with --force.
            if path.exists() and not self.force and not (self.resume and unfinished):
                raise OutputExistsError(path=path)
        if unfinished and not self.resume and not self.force:
            done = 0 if earlier is None else earlier.nbytes
            raise UnfinishedError(
                path=_partial(self.out), found=f"{done:,} of {self.plan.file_bytes:,} bytes done"
            )
        if self.resume and not self.force and earlier is not None:
            check_identity(earlier, self.identity(), journal_path(self.out))
        if not (self.resume and earlier is not None and earlier.published):
            self._check_space()

    def _check_inputs(self) -> None:
        """No output may take the place of what the job reads, whatever the user allows."""
        targets = self._targets()
        written = [*targets, *map(_partial, targets), journal_path(self.out)]
        for path, source in itertools.product(written, self.inputs):
            if path.exists() and source.exists() and path.samefile(source):
                raise OutputPlaceError(
                    "output would replace an input of this job",
                    path=path,
                    remedy="choose another name for the output",
                )

    def _targets(self) -> list[Path]:
        """Final names in the order in which they appear: the trunk last, receipts first."""
        paths = list(self._plan_texts())
        for output in reversed(self.plan.outputs):
            paths += [receipt_path(output.path), output.path]
        return paths

    def _plan_texts(self) -> dict[Path, bytes]:
        """What a budget's plan says, by final name: the recipe that repeats it, and a report."""
        if self.budget is None:
            return {}
        report = json.dumps(self.budget.report(), indent=2, sort_keys=True) + "\n"
        return {
            self.out.with_name(self.out.name + RECIPE_SUFFIX): self.budget.toml.encode(),
            self.out.with_name(self.out.name + REPORT_SUFFIX): report.encode(),
        }

    def _check_space(self) -> None:
        tensors = sum(len(output.layout.entries) for output in self.plan.outputs)
        needed = self.plan.file_bytes + tensors * RECEIPT_BYTES_PER_TENSOR
        held = sum(p.stat().st_blocks * 512 for p in map(_partial, self._targets()) if p.exists())
        free = free_bytes(self.out.parent)
        if needed > free + held:
            raise SpaceError(
                path=self.out.parent,
                expected=f"{needed:,} bytes",
                found=f"{free + held:,} bytes",
            )

    def finished_earlier(self) -> Summary | None:
        """With ``resume``: the summary of a job that had already published everything."""
        if not self.resume or self.force or journal_path(self.out).exists():
            return None
        receipts = self._receipts_of(lambda path: path, read_whole=False)
        if receipts is None:
            return None
        return Summary(self.plan, self.budget, receipts, already_done=True)

    def _receipts_of(
        self, place: Callable[[Path], Path], *, read_whole: bool
    ) -> tuple[Receipt, ...] | None:
        """Receipts of this plan's outputs; None unless all are there and fit plan and files.

        ``place`` says where to look for what belongs at a final name; ``read_whole`` compares the
        SHA-256 of the files too.
        """
        receipts = []
        for output in self.plan.outputs:
            try:
                receipt = read_receipt(place(receipt_path(output.path)))
                with Reader(place(output.path)) as reader:
                    if not self._is_planned(output, reader, receipt):
                        return None
                    if read_whole:
                        found = sha256_stream(reader.pread_into, reader.file_bytes)
                        if found != receipt.sha256:
                            return None
            except (ArtifactError, OSError):
                return None
            receipts.append(receipt)
        return tuple(receipts)

    def _is_planned(self, output: Output, reader: Reader, receipt: Receipt) -> bool:
        """Whether file and receipt are what this plan makes of this source."""
        ours = reader.metadata.get("ds4q", {})
        planned = output.metadata["ds4q"]
        return (
            ours.get("source_fingerprint") == receipt.source_fingerprint == self.plan.fingerprint
            and ours.get("source_digest") == receipt.source_digest
            and ours.get("recipe") == receipt.recipe == planned["recipe"]
            and ours.get("recipe_sha256") == planned.get("recipe_sha256")
            and ours.get("imatrix_sha256") == planned.get("imatrix_sha256")
            and ours.get("encoding") == planned.get("encoding")
            and ours.get("tool_version") == receipt.tool_version == planned["tool_version"]
            and reader.file_bytes == receipt.file_bytes == output.layout.file_bytes
            and front_digest(reader.header_raw, reader.index_raw)
            == receipt.index_xxh3
            == planned["index_xxh3"]
        )

    # ------------------------------------------------------------ work

    def run(self, threads: int, advance: Advance) -> Summary:
        """Write all outputs and their receipts. ``advance`` hears of packed bytes.

        An error of disk, source or options removes what was begun. A stop leaves it, whatever fails
        while it is under way; so does an unforeseen error, such as too little memory.
        """
        begin = time.perf_counter()
        try:
            earlier = self._earlier()
            receipts = None
            if earlier is not None and earlier.published:
                # The renames were cut off. Only whole files may get a name, so they are read again.
                receipts = self._receipts_of(_standing, read_whole=True)
            if receipts is not None:
                kept_bytes = self.plan.payload_bytes
                advance(kept_bytes)
                self._finished = True
                self._rename()
            else:
                self._start(earlier)
                receipts, kept_bytes = self._write(earlier, threads, advance)
        except Exception as error:
            if (stop := stops.stop_behind(error)) is not None:
                raise stop from error
            if isinstance(error, Ds4qError | OSError) and not isinstance(error, LockedError):
                self._discard()
            if isinstance(error, OSError):
                raise self._write_error(error) from error
            raise
        finally:
            self._close()
        seconds = time.perf_counter() - begin
        return Summary(self.plan, self.budget, receipts, seconds, resumed_bytes=kept_bytes)

    def _earlier(self) -> EarlierJournal | None:
        """What an earlier run left, where the user wants to go on with it."""
        return read_journal(journal_path(self.out)) if self.resume and not self.force else None

    def _start(self, earlier: EarlierJournal | None) -> None:
        """Open partial files and journal, fresh or as an earlier run left them."""
        path = journal_path(self.out)
        begun = None if earlier is not None else read_journal(path)
        for output in self.plan.outputs:
            self._files.append(PartialFile(output.path, output.layout.file_bytes))
        for file in self._files:
            file.allocate()
        if earlier is not None:
            self._journal = Journal.reopen(path, earlier)
            return
        if begun is not None:
            self._forget(begun)
        self._journal = Journal.create(path, self.identity(), _marks(self.checkpoint))

    def _forget(self, begun: EarlierJournal) -> None:
        """Remove the partial files of an abandoned job that this one does not write anew."""
        ours = {output.path.name for output in self.plan.outputs}
        for name in {Path(name).name for name, _ in begun.identity["outputs"]} - ours:
            path = self.out.with_name(name)
            if _partial(path).exists():
                with suppress(LockedError):  # then another job has it by now
                    PartialFile(path, 0).discard()
            _partial(receipt_path(path)).unlink(missing_ok=True)

    def _write(
        self, earlier: EarlierJournal | None, threads: int, advance: Advance
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
            Earlier() if earlier is None else self._trusted(earlier),
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
            write_durably(_partial(receipt_path(output.path)), receipts[-1].encode())
        for path, text in self._plan_texts().items():
            write_durably(_partial(path), text)
        journal.publish()
        self._rename()
        kept_bytes = sum(packed.kept_bytes for packed in pipeline.results.values())
        return tuple(receipts), kept_bytes

    def _trusted(self, earlier: EarlierJournal) -> Earlier:
        now = _marks(self.checkpoint)
        return Earlier(
            {(r.output, r.tensor, r.block): r for r in earlier.blocks},
            frozenset(name for name in now if earlier.shards.get(name) != now[name]),
        )

    def _rename(self) -> None:
        """Give everything its name; a rename that an earlier run did is found done."""
        folder = self.out.parent
        for target in self._targets():
            source = _partial(target)
            if source.exists():
                os.replace(source, target)
                self._finished = True
            elif not target.exists():
                raise WriteError("finished file disappeared before it was renamed", path=source)
        fsync_folder(folder)
        journal_path(self.out).unlink(missing_ok=True)
        fsync_folder(folder)

    # ------------------------------------------------------------ endings

    def _discard(self) -> None:
        """Remove what this run began, and has locked; what fails here hides no earlier error."""
        if self._finished or not self._files:
            return
        texts = [*self._plan_texts(), *(receipt_path(file.final) for file in self._files)]
        with stops.held():
            for file in self._files:
                with suppress(OSError):
                    file.discard()
            for path in (*map(_partial, texts), journal_path(self.out)):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

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


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL_SUFFIX)


def _standing(path: Path) -> Path:
    """Where a finished file is whose rename may have been cut off."""
    partial = _partial(path)
    return partial if partial.exists() else path


def _check_target(path: Path) -> None:
    """Only a regular file may be replaced, whatever the user allows."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OutputPlaceError(
            "output is a folder, a device or a link, not a file",
            path=path,
            remedy="name the file itself",
        )
