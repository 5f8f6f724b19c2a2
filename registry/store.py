"""Owns the folder of models: paths inside it, what was verified there, a file against its entry.

Fetches nothing, removes nothing, and knows no tag.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ds4q.artifact.digest import sha256_stream
from ds4q.artifact.errors import ChangedError, TruncatedError
from ds4q.artifact.files import (
    ForeignFileError,
    NotRegularError,
    TooLongError,
    claim,
    open_regular,
    read_small,
    remove_own,
    write_whole,
)
from ds4q.artifact.hfq import U8, pread_all
from ds4q.artifact.places import broken_link, home_folder
from ds4q.artifact.report import Failure
from ds4q.registry.entries import Entry, Sidecar
from ds4q.registry.names import inner_name

Identity = dict[str, int]
VERIFIED = ".verified"  # folder of notes; begins with a dot, as no registered file may
GIVEN_UP = ".given-up"  # the same, of files that stay although a tag of theirs was removed
MAX_NOTE_BYTES = 1 << 16


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
        sha256 = self._read_note(VERIFIED, name).get("sha256")
        return sha256 if isinstance(sha256, str) else None

    def note_verified(self, name: str, sha256: str) -> None:
        """Remember that the file as it is now has this digest, until it changes.

        A folder that cannot be written to takes no note: the file is read again next time.
        """
        status = self.path(name).stat()
        self._write_note(VERIFIED, name, identity_of(status) | {"sha256": sha256})

    def given_up(self, name: str) -> frozenset[str]:
        """Tags that were removed while this file stayed for another one of its tags."""
        tags = self._read_note(GIVEN_UP, name).get("tags")
        sound = isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)
        return frozenset(tags) if isinstance(tags, list) and sound else frozenset()

    def give_up(self, name: str, tags: Iterable[str]) -> None:
        """Remember that these tags were removed, and the file stays for others."""
        held = sorted(self.given_up(name).union(tags))
        self._write_note(GIVEN_UP, name, identity_of(self.path(name).stat()) | {"tags": held})

    def take_back(self, name: str, tag: str) -> None:
        """Have a tag need the file again, which was removed before."""
        if tag in (tags := self.given_up(name)):
            status = self.path(name).stat()
            self._write_note(GIVEN_UP, name, identity_of(status) | {"tags": sorted(tags - {tag})})

    def broken(self, name: str) -> str | None:
        """``broken link to TARGET`` where that is what has the name."""
        return broken_link(self.path(name))

    def digest(self, name: str, *, advance: Callable[[int], None] = lambda nbytes: None) -> str:
        """SHA-256 (hex) of a file, which is read and noted. Raises as ``digest_of``."""
        path = self.path(name)
        with opened(path) as (fd, status):
            sha256 = _sha256(fd, status, path, advance)
        self._write_note(VERIFIED, name, identity_of(status) | {"sha256": sha256})
        return sha256

    def forget(self, name: str) -> None:
        """Drop the notes of a file that is gone."""
        for kind in (VERIFIED, GIVEN_UP):
            if (place := self._note(kind, name)) is not None:
                remove_own(place, is_note)

    def _read_note(self, kind: str, name: str) -> dict[str, object]:
        """What was noted of a file as it is now; nothing where it changed since."""
        place = self._note(kind, name)
        try:
            if place is None:
                return {}
            note = json.loads(read_small(place, MAX_NOTE_BYTES, follow=False))
            now = identity_of(self.path(name).stat())
        except (OSError, ValueError, RecursionError, NotRegularError, TooLongError):
            return {}
        sound = isinstance(note, dict) and {key: note.get(key) for key in now} == now
        return note if sound else {}

    def _write_note(self, kind: str, name: str, note: Mapping[str, object]) -> None:
        """Note something, unless the folder takes no notes or the name has a file of the user's."""
        with suppress(OSError, ForeignFileError):
            (self.folder / kind).mkdir(exist_ok=True)
            if (place := self._note(kind, name)) is not None:
                ours = claim(place, is_note) is not None
                write_whole(place, json.dumps(note), replace=ours)

    def _note(self, kind: str, name: str) -> Path | None:
        """Where a note is; None where its folder is not one: a link there is not followed."""
        self.path(name)
        folder = self.folder / kind
        real = folder.is_dir() and not folder.is_symlink()
        return folder / name if real else None


def is_note(head: bytes) -> bool:
    """Whether a file that begins so notes what a file of the folder was."""
    return head.startswith(b'{"size": ')


def digest_of(path: Path, *, advance: Callable[[int], None] = lambda nbytes: None) -> str:
    """SHA-256 (hex) of a file, read whole; ``advance`` hears of bytes that were read.

    Raises
    ------
    ChangedError : the file changed while it was read
    NotRegularError : not a regular file
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
    fd = open_regular(path)
    try:
        yield fd, os.fstat(fd)
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
