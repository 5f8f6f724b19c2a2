"""Owns the files of an export while they are written: beside the output, named as a whole.

Everything lies in the folder ``OUT.partial`` until it is complete and on the disk. An error or a
stop removes it; nothing that was there before is replaced.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from ds4q.artifact import stops
from ds4q.artifact.files import free_bytes, fsync_folder, publish
from ds4q.artifact.hfq import U8, flat
from ds4q.artifact.locks import WriteError
from ds4q.artifact.writer import PARTIAL_SUFFIX
from ds4q.quantize.export.plan import PlannedFile
from ds4q.quantize.job import SpaceError
from ds4q.quantize.outputs import OutputExistsError, OutputPlaceError, UnfinishedError


def check_place(out: Path) -> None:
    """Refuse, before any work, an output that has no folder or that would replace something."""
    if out.name in ("", ".."):
        raise OutputPlaceError("output is not a name", found=repr(str(out)), remedy="name a file")
    if not out.parent.is_dir():
        raise OutputPlaceError(
            "output folder does not exist", path=out.parent, remedy="create it, or choose another"
        )
    if os.path.lexists(out):
        raise OutputExistsError(path=out, remedy="choose another name, or remove it first")


class Staging:
    """The planned files of an output, at their final lengths, in ``OUT.partial``.

    A context manager: what was not published is removed at its end.

    Raises
    ------
    WriteError : a system call failed
    UnfinishedError : ``OUT.partial`` is there: of an export that runs, or that was killed
    SpaceError : fewer bytes are free than the files take
    """

    def __init__(self, out: Path, files: Sequence[PlannedFile], *, folder: bool) -> None:
        self._out, self._planned, self._is_folder = out, files, folder
        self._nbytes = sum(file.nbytes for file in files)
        self._folder = out.with_name(out.name + PARTIAL_SUFFIX)
        self._fds: list[int] = []
        self._made = self._published = False

    def __enter__(self) -> Staging:
        free = free_bytes(self._out.parent)
        if self._nbytes > free:
            raise SpaceError(
                path=self._out.parent, expected=f"{self._nbytes:,} bytes", found=f"{free:,} bytes"
            )
        try:
            with stops.held():
                self._make_folder()
                self._create()
        except BaseException:  # a stop that waited for the end of these steps, too
            if self._made:
                self._discard()
            raise
        return self

    def _make_folder(self) -> None:
        with self._writing():
            try:
                self._folder.mkdir()
            except FileExistsError:
                remedy = "if no other export to this place is running, remove it and try again"
                raise UnfinishedError(
                    "an unfinished export lies here", path=self._folder, remedy=remedy
                ) from None
            self._made = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._published:
            self._discard()
        self._close()

    def _create(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for number, file in enumerate(self._planned):
            with self._writing():
                self._fds.append(os.open(self._folder / file.name, flags, 0o666))
                os.ftruncate(self._fds[number], file.nbytes)
            self.pwrite(number, file.front, 0)

    def pwrite(self, number: int, data: bytes | U8, offset: int) -> None:
        """Write all of ``data`` at ``offset`` of a file; any thread may."""
        view = flat(data)
        with self._writing():
            while view:
                n = os.pwrite(self._fds[number], view, offset)
                if n == 0:
                    raise OSError(errno.EIO, "write returned 0 bytes")
                view, offset = view[n:], offset + n

    def publish(self) -> None:
        """Force everything to the disk and give it its name."""
        with self._writing():
            for fd in self._fds:
                os.fsync(fd)
            fsync_folder(self._folder)
            whole = self._folder if self._is_folder else self._folder / self._planned[0].name
            publish(whole, self._out)
            self._published = True
            if not self._is_folder:
                with suppress(OSError):  # a file that is not ours may be in it
                    self._folder.rmdir()
            fsync_folder(self._out.parent)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A failing system call becomes a ``WriteError``."""
        try:
            yield
        except OSError as error:
            where = self._out if self._published else self._folder
            remedy = "nothing was left behind"
            if self._published:
                remedy = f"{self._out} is written, but may not be on the disk yet"
            elif error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                remedy = f"the export needs {self._nbytes:,} bytes; {remedy}"
            what = error.strerror or str(error)
            raise WriteError(what, path=error.filename or where, remedy=remedy) from error

    def _close(self) -> None:
        while self._fds:
            with suppress(OSError):  # what counts was synced before
                os.close(self._fds.pop())

    def _discard(self) -> None:
        """Remove what this export wrote; a file that is not its own stays, and its folder then too.

        A failure must not hide what went wrong first.
        """
        with stops.held():
            with suppress(OSError):
                for fd, file in zip(self._fds, self._planned, strict=False):
                    path = self._folder / file.name
                    if os.path.samestat(os.fstat(fd), path.lstat()):
                        path.unlink()
                self._folder.rmdir()
            self._close()
