"""Owns the unfinished file of a trace, a profile or a predictor. Knows nothing of what is in it.

Until it is whole a file is ``NAME.partial``, locked, and begins with ``UNFINISHED`` in place of its
own first bytes. So what a killed run left can be told from any other file of that name, and is the
only thing there that is ever replaced.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from ds4q.artifact.writer import PartialFile, WriteError, fsync_folder

UNFINISHED = b"ds4q.unfinished\n"

_NOT_OURS = {errno.EISDIR: "a folder", errno.ELOOP: "a link"}  # of opening the unfinished file
_ANOTHER = "choose another output"
_REMEDIES = {
    errno.ENOSPC: f"make room there, or {_ANOTHER}",
    errno.EDQUOT: f"make room there, or {_ANOTHER}",
    errno.EFBIG: f"{_ANOTHER}, where files may be longer",
    errno.ENAMETOOLONG: "choose a shorter name: while it is written, it ends in .partial",
}


class NewFile:
    """A file in the making, of this process alone; left as a context unpublished, it is removed.

    Parameters
    ----------
    final : where it is published; what stands there meanwhile stays, and is replaced then. Of a
        link, what it leads to

    Raises
    ------
    LockedError : another process writes the same file
    WriteError : ``NAME.partial`` is not ours, or nothing can be written there
    """

    def __init__(self, final: str | os.PathLike[str]) -> None:
        self.final = _target(Path(final))
        self._head = b""
        self._nbytes = 0
        try:
            self._partial = PartialFile(self.final, 0)
        except OSError as error:
            if error.errno in _NOT_OURS:
                raise _in_the_way(_NOT_OURS[error.errno], error.filename) from None
            raise self._error(error) from None
        try:
            self._take()
        except OSError as error:
            self._partial.discard()
            raise self._error(error) from None

    def write(self, data: bytes) -> int:
        """Append all of ``data``, and return its length; after a failure nothing is left."""
        head = data[: len(UNFINISHED) - len(self._head)]
        try:
            self._partial.pwrite(data[len(head) :], self._nbytes + len(head))
        except OSError as error:
            self.discard()
            raise self._error(error) from None
        self._head += head
        self._nbytes += len(data)
        return len(data)

    def publish(self) -> None:
        """Give the file its name, durably; after a failure nothing is left."""
        try:
            self._partial.pwrite(self._head, 0)
            os.ftruncate(self._partial.fd, self._nbytes)
            self._partial.sync()
            os.replace(self._partial.path, self.final)
            fsync_folder(self.final.parent)
        except OSError as error:
            self.discard()
            raise self._error(error) from None
        self._partial.close()

    def discard(self) -> None:
        """Remove what was not published; a second call does nothing."""
        if self._partial.fd >= 0:
            self._partial.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.discard()

    def _take(self) -> None:
        """Begin anew in what is empty, or was left by a killed run."""
        fd = self._partial.fd
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        if not regular or os.pread(fd, len(UNFINISHED), 0) not in (b"", UNFINISHED):
            self._partial.close()
            raise _in_the_way("a file that ds4q did not leave", self._partial.path)
        os.ftruncate(fd, 0)
        self._partial.pwrite(UNFINISHED, 0)

    def _error(self, error: OSError) -> WriteError:
        folder = self.final.parent
        if not folder.is_dir():
            return WriteError(
                f"cannot be written: there is no folder {str(folder)!r}",
                path=self.final,
                remedy=f"make it, or {_ANOTHER}",
            )
        return WriteError(
            f"cannot be written: {error.strerror or error}",
            path=self.final,
            remedy=_REMEDIES.get(error.errno or 0, _ANOTHER),
        )


def _target(final: Path) -> Path:
    """``final``, or what it leads to; ``WriteError`` where no file can be published."""
    if final.is_symlink():
        final = Path(os.path.realpath(final))
    found = "a folder" if final.is_dir() else "a link to itself" if final.is_symlink() else None
    if found is not None:
        raise WriteError(f"cannot be written: it is {found}", path=final, remedy=_ANOTHER)
    return final


def _in_the_way(what: str, path: object) -> WriteError:
    return WriteError(
        f"{what} stands where the unfinished file would",
        path=path,
        remedy=f"move it away, or {_ANOTHER}",
    )
