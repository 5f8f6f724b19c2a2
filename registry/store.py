"""Owns the folder of models: paths inside it, what was verified there, a file against its entry.

Fetches nothing, removes nothing, and knows no tag.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ds4q.artifact.digest import sha256_stream
from ds4q.artifact.errors import ChangedError, TruncatedError
from ds4q.artifact.hfq import U8, pread_all
from ds4q.artifact.places import home_folder
from ds4q.artifact.report import Failure
from ds4q.registry.entries import Entry, Sidecar
from ds4q.registry.errors import RegistryError
from ds4q.registry.names import inner_name

Identity = dict[str, int]
NOTES = ".verified"  # begins with a dot: no registered file can be called so


def models_folder() -> Path:
    """Where models are kept unless the user names a folder: ``models`` in ``DS4Q_HOME``."""
    return home_folder() / "models"


def identity_of(status: os.stat_result) -> Identity:
    """What tells a file from one that has taken its place, or was written to since.

    The change time is among it: a tool that copies can set the modification time back.
    """
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }


class Store:
    """The files of one folder.

    Parameters
    ----------
    folder : need not exist yet; where it is a link, the link is followed once, here
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))

    def path(self, name: str) -> Path:
        """Where the file of that plain name is, or would be.

        Raises
        ------
        UnsafeNameError : a name that would lead out of the folder
        """
        return self.folder / inner_name(name, what="name of a model file", path=self.folder)

    def size(self, name: str) -> int | None:
        """Bytes of a file that is there; None where there is none."""
        try:
            status = self.path(name).stat()
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def verified(self, name: str) -> str | None:
        """SHA-256 (hex) that was noted for the file as it is now; None where none was."""
        path, place = self.path(name), self._note(name)
        try:
            note = json.loads(place.read_bytes())
            now = identity_of(path.stat())
        except (OSError, ValueError):
            return None
        if not isinstance(note, dict) or {key: note.get(key) for key in now} != now:
            return None
        sha256 = note.get("sha256")
        return sha256 if isinstance(sha256, str) else None

    def note_verified(self, name: str, sha256: str) -> None:
        """Remember that the file as it is now has this digest, until it changes.

        A folder that cannot be written to takes no note: the file is read again next time.
        """
        self._write_note(name, identity_of(self.path(name).stat()) | {"sha256": sha256})

    def digest(self, name: str, *, advance: Callable[[int], None] = lambda nbytes: None) -> str:
        """SHA-256 (hex) of a file, which is read and noted. Raises as ``digest_of``."""
        path = self.path(name)
        with opened(path) as (fd, status):
            sha256 = _sha256(fd, status, path, advance)
        self._write_note(name, identity_of(status) | {"sha256": sha256})
        return sha256

    def forget(self, name: str) -> None:
        """Drop the note of a file that is gone."""
        self._note(name).unlink(missing_ok=True)

    def _write_note(self, name: str, note: Mapping[str, int | str]) -> None:
        place = self._note(name)
        temporary = place.with_name(f".{secrets.token_hex(8)}")
        with suppress(OSError):
            place.parent.mkdir(exist_ok=True)
            try:
                temporary.write_text(json.dumps(note))
                os.replace(temporary, place)
            finally:
                temporary.unlink(missing_ok=True)

    def _note(self, name: str) -> Path:
        self.path(name)
        return self.folder / NOTES / name


def digest_of(path: Path, *, advance: Callable[[int], None] = lambda nbytes: None) -> str:
    """SHA-256 (hex) of a file, read whole; ``advance`` hears of bytes that were read.

    Raises
    ------
    ChangedError : the file changed while it was read
    RegistryError : not a regular file
    """
    with opened(path) as (fd, status):
        return _sha256(fd, status, path, advance)


def compare_size(what: Entry | Sidecar, found: int) -> Iterator[Failure]:
    """The failure that a length of ``found`` bytes is, if it is one."""
    expected = what.size_bytes
    if expected is None or found == expected:
        return
    if found < expected:
        message = f"{what.file} is incomplete: {found} of {expected} bytes"
    else:
        message = f"{what.file} is longer than its registry entry says"
    yield Failure(message, expected=expected, found=found)


def compare_sha256(what: Entry | Sidecar, found: str) -> Iterator[Failure]:
    """The failure that a digest is, if it is one; a file of the right size is taken for granted."""
    if what.sha256 is not None and found != what.sha256.lower():
        message = f"SHA-256 of {what.file} differs from its registry entry"
        yield Failure(message, expected=what.sha256, found=found)


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A regular file, open for reading, and what it was when it was opened."""
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise RegistryError("not a regular file", path=path)
        yield fd, status
    finally:
        os.close(fd)


def _sha256(fd: int, status: os.stat_result, path: Path, advance: Callable[[int], None]) -> str:
    def read(out: U8, offset: int) -> None:
        pread_all(fd, out, offset, path=path)
        advance(out.nbytes)

    try:
        sha256 = sha256_stream(read, status.st_size)
    except TruncatedError:
        raise ChangedError(path=path) from None
    if identity_of(os.fstat(fd)) != identity_of(status):
        raise ChangedError(path=path)
    return sha256
