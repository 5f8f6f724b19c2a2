"""A small output that grows by appending: a trace, a profile, a predictor, an imatrix.

Until it is whole the file is ``NAME.partial``, locked, and begins with ``UNFINISHED`` in place of
its own first bytes. This distinguishes what a killed run left from any other file of that name, and
only such a file is ever replaced.
"""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from ds4q.artifact import stops
from ds4q.artifact.files import AppearedError, unless_changed
from ds4q.artifact.locks import WriteError
from ds4q.artifact.writer import UNFINISHED, PartialFile

_ANOTHER = "choose another output"
_REMEDIES = {
    errno.ENOSPC: f"make room there, or {_ANOTHER}",
    errno.EDQUOT: f"make room there, or {_ANOTHER}",
    errno.EFBIG: f"{_ANOTHER}, where files may be longer",
    errno.ENAMETOOLONG: "choose a shorter name: while it is written, it ends in .partial",
}


class NewFile:
    """An output that only this process writes; a context that ends unpublished removes it.

    Parameters
    ----------
    final : where it is published, through a link if it is one. A file that is there now stays until
        then and is replaced; a file that appears or changes meanwhile is kept

    Raises
    ------
    LockedError : another process writes the same file
    ForeignFileError : ``NAME.partial`` is not ds4q's
    WriteError : nothing can be written there
    """

    def __init__(self, final: str | os.PathLike[str]) -> None:
        self.final = _target(Path(final))
        self._may_replace = unless_changed(self.final)
        self._head = b""
        self._nbytes = 0
        with stops.held():
            try:
                self._partial = PartialFile(self.final, 0)
            except OSError as error:
                raise self._error(error) from None
            # A stop may come before anybody holds this object who would discard it.
            self._undo = weakref.finalize(self, self._partial.discard)
            try:
                self._partial.reset()
            except OSError as error:
                self.discard()
                raise self._error(error) from None

    def write(self, data: bytes) -> int:
        """Append all of ``data`` and return its length; a failure removes the unfinished file."""
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
        """Give the file its name, durably; a failure removes the unfinished file.

        Raises ``AppearedError`` where the file of that name is not the one that was there before.
        """
        with stops.held():
            try:
                self._partial.pwrite(self._head, 0)
                os.ftruncate(self._partial.fd, self._nbytes)
                self._partial.sync()
                self._partial.publish(replace=self._may_replace)
            except OSError as error:
                self.discard()
                raise self._error(error) from None
            except (AppearedError, WriteError):
                self.discard()
                raise
            self._undo.detach()
            self._partial.close()

    def discard(self) -> None:
        """Remove what was not published; a second call does nothing."""
        self._undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.discard()

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
    """``final``, or where it leads as a link; ``WriteError`` where no file can be published."""
    if final.is_symlink():
        final = Path(os.path.realpath(final))
    found = "a folder" if final.is_dir() else "a link to itself" if final.is_symlink() else None
    if found is not None:
        raise WriteError(f"cannot be written: it is {found}", path=final, remedy=_ANOTHER)
    return final
