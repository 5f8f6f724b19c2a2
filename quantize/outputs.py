"""The files of a quantize job: their names, whose they are, and how they get their final names.

``OUT`` is the user's name. Every other name is derived from it (``OUT.receipt``, the draft's,
``OUT.plan.toml``, ``OUT.plan.json``; ``.partial`` behind each; ``OUT.journal``) and is the user's
as well, until the file that has it is proven to be ds4q's own, which no option skips:

- a journal, a receipt, a plan and a draft by how they begin;
- an unfinished artifact by ``MARK``, which it has from its first moment until it is sealed. From
  then on it begins as an artifact does, and is ds4q's if a journal beside it names it with its
  length, or, where it is shorter, with its source.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds4q.artifact.files import (
    AppearedError,
    ForeignFileError,
    Recognize,
    claim,
    create,
    file_identity,
    file_kind,
    fsync_folder,
    named,
    open_regular,
    publish,
    read_head,
    remove_own,
)
from ds4q.artifact.hfq import MAGIC, flat
from ds4q.artifact.locks import LockedError, WriteError
from ds4q.artifact.receipt import is_receipt, receipt_path
from ds4q.artifact.writer import PARTIAL_SUFFIX, PartialFile
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.errors import JobError
from ds4q.quantize.journal import Earlier, is_journal, journal_path
from ds4q.quantize.plan import Output, Plan

U8 = npt.NDArray[np.uint8]
MARK = b"ds4q.unfinished.job\n"  # of a partial file before it is sealed
RECIPE_SUFFIX = ".plan.toml"  # beside an artifact of a budget: the recipe that repeats it
REPORT_SUFFIX = ".plan.json"  # and what was chosen, and why
_REPORT = re.compile(rb'\{\n(?:  "schema_version": \d+,\n)?  "border": \{\n    "last"')
MAX_NAME_BYTES = 255  # of every common file system


class OutputExistsError(JobError):
    """A file has the name that an output should get."""

    rule = "output exists"
    cure = "choose another name, or replace it with --force"


class UnfinishedError(JobError):
    """An earlier job left its partial file."""

    rule = "an unfinished job lies here"
    cure = "continue it with --resume, or start over with --force"


class OutputPlaceError(JobError):
    """The output cannot be placed where the user asked."""

    rule = "output cannot be written there"


class StandingError(JobError):
    """What an earlier run of a job published before it was cut off is not what the job makes."""

    rule = "the file has its final name, and is not what this job makes"
    cure = "move it away, then run the command again with --resume"


class StandingFile:
    """An output that an earlier run published, in place of the partial file.

    Nothing is written to it: what would be has to be there, else ``StandingError``.
    """

    def __init__(self, path: Path, file_bytes: int) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self._fd = open_regular(path, follow=False)

    def pwrite(self, data: bytes | U8, offset: int) -> None:
        """Compare ``data`` with what is at ``offset``."""
        wanted = np.frombuffer(flat(data), dtype=np.uint8)
        there = np.empty_like(wanted)
        self.pread_into(there, offset)
        if not np.array_equal(there, wanted):
            raise StandingError(path=self.path, found=f"other bytes from byte {offset:,} on")

    def pread_into(self, out: U8, offset: int) -> None:
        """Fill ``out`` from ``offset``."""
        with named(self.path):
            done = 0
            while done < out.nbytes:
                n = os.preadv(self._fd, [out.data[done:]], offset + done)
                if n == 0:
                    raise StandingError(path=self.path, found="a shorter file")
                done += n

    def reset(self) -> None:
        """Nothing is begun anew."""

    def allocate(self) -> None:
        """Hold the length to the plan."""
        found = os.fstat(self._fd).st_size
        if found != self.file_bytes:
            raise StandingError(path=self.path, expected=self.file_bytes, found=found)

    def sync(self) -> None:
        """Nothing was written."""

    def discard(self) -> None:
        """Nothing was begun."""
        self.close()

    def close(self) -> None:
        """The file stays."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


OutputFile = PartialFile | StandingFile


def partial_path(path: Path) -> Path:
    """Where the file that will be ``path`` is until it is published."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def is_artifact(head: bytes) -> bool:
    """Whether a file that begins so is an artifact."""
    return head.startswith(MAGIC)


def is_plan(head: bytes) -> bool:
    """Whether a file that begins so is the recipe or the report of a budget."""
    recipe = head.startswith(b'name = "') and b'\ndescription = "planned for ' in head
    return recipe or _REPORT.match(head) is not None


@dataclass(slots=True)
class OutputFiles:
    """The files of one plan.

    Parameters
    ----------
    texts : what a budget's plan says, by final name
    inputs : files that the job reads, which are never written over
    force : the user allows replacing ``OUT`` and what is proven to be ds4q's own beside it
    """

    plan: Plan
    texts: Mapping[Path, bytes]
    inputs: tuple[os.stat_result, ...]
    force: bool
    _earlier: Earlier | None = None
    _lengths: dict[str, int] = field(default_factory=dict)  # of artifacts that a journal names
    _replaceable: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    _standing: set[Path] = field(default_factory=set)  # published by a run that was cut off

    @property
    def out(self) -> Path:
        """The trunk's final name."""
        return self.plan.outputs[0].path

    @property
    def journal(self) -> Path:
        """The journal's name."""
        return journal_path(self.out)

    @property
    def targets(self) -> list[Path]:
        """Final names in the order in which they appear: the trunk last, receipts first."""
        paths = list(self.texts)
        for output in reversed(self.plan.outputs):
            paths += [receipt_path(output.path), output.path]
        return paths

    @property
    def partials(self) -> Iterator[Path]:
        """Where the files of ``targets`` are until they are published."""
        return map(partial_path, self.targets)

    # ------------------------------------------------------------ before work

    def check_place(self, source: Checkpoint) -> None:
        """Refuse an output without a folder, inside the source folder, or with too long a name.

        Beside a source that is a single file an output may lie.
        """
        folder = self.out.parent
        if not folder.is_dir():
            raise OutputPlaceError(
                "output folder does not exist", path=folder, remedy="create it, or choose another"
            )
        inside = source.folder.resolve() in (folder.resolve(), *folder.resolve().parents)
        if inside and not source.single:
            raise OutputPlaceError(
                "output lies inside the source folder",
                path=self.out,
                remedy="choose a folder outside the checkpoint",
            )
        names = [partial_path(path).name for path in self.targets] + [self.journal.name]
        longest = max(names, key=lambda name: len(os.fsencode(name)))
        if (nbytes := len(os.fsencode(longest))) > MAX_NAME_BYTES:
            raise OutputPlaceError(
                "output name is too long",
                path=self.out,
                expected=f"at most {MAX_NAME_BYTES} bytes for the longest name beside it",
                found=f"{nbytes} bytes: {longest}",
                remedy=f"choose a name that is {nbytes - MAX_NAME_BYTES} bytes shorter",
            )

    def claim_all(self, earlier: Earlier | None, *, resume: bool) -> bool:
        """Prove every derived name to be free or ds4q's own; whether an unfinished job lies here.

        ``earlier`` is what its journal says.

        Raises
        ------
        ForeignFileError : a derived name is taken by something that ds4q did not write
        OutputPlaceError : ``OUT`` is not a regular file, or is an input
        OutputExistsError : a final name is taken, and the user did not allow replacing
        """
        self._earlier = earlier
        self._lengths |= {} if earlier is None else earlier.outputs
        unfinished = earlier is not None
        for path in self.targets:
            partial = partial_path(path)
            unfinished |= claim(partial, self._partial_kind(path), inputs=self.inputs) is not None
        for path in reversed(self.targets):
            self._check_final(path, resume=resume)
        return unfinished

    def _check_final(self, path: Path, *, resume: bool) -> None:
        """Refuse a final name that may not be replaced; remember the file that may be."""
        if path == self.out:
            if not self._check_trunk():
                return
        elif claim(path, self._kind(path), inputs=self.inputs) is None:
            return
        found = file_identity(path)
        if found is None or self.force:
            return
        earlier = self._earlier if resume else None
        if earlier is not None and earlier.replaces.get(path.name) == found:
            self._replaceable[path] = found
        elif earlier is not None and self._published(path, earlier):
            self._standing.add(path)
        else:
            raise OutputExistsError(path=path)

    def _check_trunk(self) -> bool:
        """Whether a regular file that is not an input has the trunk's name."""
        try:
            status = self.out.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(status.st_mode):
            raise OutputPlaceError(
                "output is a folder, a device or a link, not a file",
                path=self.out,
                found=file_kind(status.st_mode),
                remedy="name the file itself",
            )
        if any(os.path.samestat(status, other) for other in self.inputs):
            raise OutputPlaceError(
                "output would replace an input of this job",
                path=self.out,
                remedy="choose another name for the output",
            )
        return True

    def _published(self, path: Path, earlier: Earlier) -> bool:
        """Whether the earlier run published ``path`` before it was cut off."""
        if not earlier.published or os.path.lexists(partial_path(path)):
            return False
        if self._kind(path) is not is_artifact:
            return True  # of its kind, as was proven
        return earlier.outputs.get(path.name) == path.lstat().st_size and is_artifact(
            read_head(path)
        )

    def _kind(self, path: Path) -> Recognize:
        """How a finished file is recognized."""
        if path in self.texts:
            return is_plan
        return is_artifact if path in (o.path for o in self.plan.outputs) else is_receipt

    def _partial_kind(self, path: Path) -> Recognize:
        """How the unfinished file of ``path`` is recognized."""
        kind = self._kind(path)
        return self._unfinished(path) if kind is is_artifact else kind

    def _unfinished(self, path: Path) -> Recognize:
        """How the partial file of an artifact is recognized, sealed or not."""
        nbytes = self._lengths.get(path.name)
        source = "" if self._earlier is None else self._earlier.identity.get("source_fingerprint")

        def ours(head: bytes) -> bool:
            if head.startswith(MARK) or not is_artifact(head) or nbytes is None:
                return head.startswith(MARK)
            found = partial_path(path).lstat().st_size
            # A power loss can cut a sealed file; its metadata then still names the job's source.
            cut = found < nbytes and f'"source_fingerprint":"{source}"'.encode() in head
            return found == nbytes or cut

        return ours

    # ------------------------------------------------------------ work

    def open_output(self, output: Output) -> OutputFile:
        """The locked partial file of an output, or the file that was published."""
        if output.path in self._standing:
            return StandingFile(output.path, output.layout.file_bytes)
        return PartialFile(
            output.path,
            output.layout.file_bytes,
            mark=MARK,
            recognize=self._partial_kind(output.path),
            inputs=self.inputs,
        )

    def write_small(self, path: Path, data: bytes) -> None:
        """Write a small file whole and durably under the partial name of ``path``.

        Where ``path`` itself was published, it is compared instead.
        """
        if path in self._standing:
            if read_head(path, len(data) + 1) != data:
                raise StandingError(path=path)
            return
        partial = partial_path(path)
        if claim(partial, self._kind(path), inputs=self.inputs) is not None:
            partial.unlink()
        os.close(create(partial, data))

    def replaced(self) -> dict[str, tuple[int, ...]]:
        """The files that the user allows to be replaced, for the journal."""
        found = {path: file_identity(path) for path in self.targets} if self.force else {}
        kept = {path.name: identity for path, identity in found.items() if identity is not None}
        return kept | {path.name: identity for path, identity in self._replaceable.items()}

    def publish_all(self) -> Iterator[Path]:
        """Give every file its final name; yields each after its rename.

        A rename that an earlier run did is found done. Nothing is renamed while any final name is
        taken by a file that appeared meanwhile.
        """
        waiting = [path for path in self.targets if os.path.lexists(partial_path(path))]
        for path in self.targets:
            if path not in waiting and not os.path.lexists(path):
                raise WriteError(
                    "finished file disappeared before it was renamed", path=partial_path(path)
                )
        for path in waiting:
            if os.path.lexists(path) and not self._may_replace(path):
                raise self._appeared(path)
        self._lengths |= {o.path.name: o.layout.file_bytes for o in self.plan.outputs}
        for path in waiting:
            claim(partial_path(path), self._partial_kind(path), inputs=self.inputs)
        for path in waiting:
            try:
                publish(partial_path(path), path, replace=self._may_replace)
            except AppearedError:
                raise self._appeared(path) from None
            yield path
        fsync_folder(self.out.parent)
        self.remove_journal()

    def remove_journal(self) -> None:
        """Remove the journal of a job that is done."""
        remove_own(self.journal, is_journal)
        fsync_folder(self.out.parent)

    def _may_replace(self, path: Path) -> bool:
        if self.force:
            return self._check_trunk() if path == self.out else bool(claim(path, self._kind(path)))
        return file_identity(path) == self._replaceable.get(path, ())

    @staticmethod
    def _appeared(path: Path) -> AppearedError:
        return AppearedError(
            path=path, remedy="move it away, then run the command again with --resume"
        )

    # ------------------------------------------------------------ endings

    def remove_partials(self) -> None:
        """Remove the small partial files and the journal; a failure keeps that file only."""
        own = {partial_path(receipt_path(o.path)): is_receipt for o in self.plan.outputs}
        own |= {partial_path(path): is_plan for path in self.texts}
        for path, kind in (*own.items(), (self.journal, is_journal)):
            with suppress(OSError):
                remove_own(path, kind)

    def forget(self, begun: Earlier) -> Iterator[PartialFile]:
        """The partial files of an abandoned job that this one does not write anew, locked.

        Their names come from its journal, in which only plain names are accepted.
        """
        ours = {output.path.name for output in self.plan.outputs}
        for name in begun.outputs.keys() - ours:
            path = self.out.with_name(name)
            remove_own(partial_path(receipt_path(path)), is_receipt)
            if os.path.lexists(partial_path(path)):
                with suppress(LockedError, ForeignFileError):  # another job has it, or a user
                    yield PartialFile(
                        path, 0, mark=MARK, recognize=self._unfinished(path), inputs=self.inputs
                    )
