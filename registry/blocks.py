"""Owns what a download keeps on disk until it is whole: ``NAME.partial`` and its journal of blocks.

The journal (``NAME.partial.blocks``) is text. Its first line says what is fetched; each later line
gives the number and xxh3-128 of a block that was written. A block of an earlier run is believed
only if the bytes in the partial file still have the digest, so neither a torn line nor data that a
power loss swallowed can survive into the file.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ds4q.artifact.files import free_bytes, named
from ds4q.artifact.writer import PARTIAL_SUFFIX, PartialFile, fsync_folder, write_durably
from ds4q.registry.errors import ExistsError, SpaceError, UnfinishedError

FORMAT = "ds4q.blocks.v1"
BEGINNING = b'{"format": "ds4q.blocks'  # of a journal, of whichever version
SUFFIX = ".blocks"
BLOCK_BYTES = 4 << 20
MAX_JOURNAL_BYTES = 256 << 20
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class About:
    """What is fetched: from where, how long, which version, and the digest wanted of it (or "")."""

    url: str
    size_bytes: int
    validator: str
    sha256: str

    def continues(self, earlier: About) -> bool:
        """Whether blocks that ``earlier`` left are blocks of this file."""
        if earlier.size_bytes != self.size_bytes:
            return False
        if earlier.url == self.url and self.validator and earlier.validator:
            return earlier.validator == self.validator
        return bool(self.sha256) and earlier.sha256 == self.sha256


class Blocks:
    """The partial file of ``final``, held by this process alone.

    Attributes
    ----------
    about : what an earlier run fetched, or None
    digests : block number -> xxh3-128 (hex) of each block that was noted

    Raises
    ------
    LockedError : another process fetches the same file
    UnfinishedError : a partial file without a journal of ours, a journal that is not ours, or in
        the place of either what is no file
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        partial = final.with_name(final.name + PARTIAL_SUFFIX)
        self.journal = partial.with_name(partial.name + SUFFIX)
        for path in (partial, self.journal):
            _check_place(path)
        self.file = PartialFile(final, 0)
        self.about: About | None = None
        self.digests: dict[int, str] = {}
        self._append_to = -1
        self._ours = True  # or there is none
        self._lock = threading.Lock()
        try:
            valid_bytes = self._read_journal()
            if self.about is not None:
                self._append_to = self._open_journal()
                with named(self.journal):
                    os.ftruncate(self._append_to, valid_bytes)
            elif os.fstat(self.file.fd).st_size:
                raise UnfinishedError(path=self.file.path)
            elif not self._ours:
                raise UnfinishedError(path=self.journal)
        except BaseException:
            self.close()
            raise

    def start(self, about: About) -> None:
        """Begin a file anew; what an earlier run left is given up."""
        self._close_journal()
        with named(self.file.path):
            os.ftruncate(self.file.fd, 0)
        self.about, self.digests = about, {}
        text = json.dumps({"format": FORMAT, "block_bytes": BLOCK_BYTES} | asdict(about))
        write_durably(self.journal, text.encode() + b"\n")
        self._append_to = self._open_journal()
        self.file.file_bytes = about.size_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the disk that the partial file has already."""
        return os.fstat(self.file.fd).st_blocks * 512

    def record(self, number: int, digest: str) -> None:
        """Note that a block was written whole; any thread may call it."""
        view = memoryview(f"{number} {digest}\n".encode())
        with self._lock:
            self.digests[number] = digest
            with named(self.journal):
                while view:
                    view = view[os.write(self._append_to, view) :]

    def publish(self, *, replace: bool) -> None:
        """Give the file its final name, durably.

        Raises ``ExistsError`` where something stands there and ``replace`` does not allow it.
        """
        self.file.sync()
        if replace:
            os.replace(self.file.path, self.final)
        else:
            self._name_it()
        self.journal.unlink(missing_ok=True)
        fsync_folder(self.final.parent)

    def close(self) -> None:
        """Let go of the file. What was written stays; a file with nothing in it goes."""
        self._close_journal()
        if self.about is None and self.file.fd >= 0 and not os.fstat(self.file.fd).st_size:
            self.file.discard()
        self.file.close()

    def _name_it(self) -> None:
        """Rename, but never onto another file: a link refuses what a rename would replace."""
        try:
            os.link(self.file.path, self.final)
        except FileExistsError:
            raise ExistsError(path=self.final) from None
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if os.path.lexists(self.final):
                raise ExistsError(path=self.final) from None
            os.rename(self.file.path, self.final)
        else:
            os.unlink(self.file.path)

    def _open_journal(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self.journal, flags)

    def _close_journal(self) -> None:
        fd, self._append_to = self._append_to, -1
        if fd >= 0:
            with suppress(OSError):  # lines that are lost cost no more than a block each
                os.close(fd)

    def _read_journal(self) -> int:
        """Fill ``about`` and ``digests``; return the length of the part that is believed."""
        try:
            with open(self._open_journal(), "rb") as file:
                raw = file.read(MAX_JOURNAL_BYTES)
        except FileNotFoundError:
            return 0
        lines = raw.split(b"\n")[:-1]  # what follows the last line break is torn
        self.about = _about(lines[0]) if lines else None
        if self.about is None:
            self._ours = raw.startswith(BEGINNING) or BEGINNING.startswith(raw)  # or it is torn
            return 0
        self.file.file_bytes = self.about.size_bytes
        valid_bytes = len(lines[0]) + 1
        for number, digest, length in _records(lines[1:]):
            self.digests[number] = digest
            valid_bytes += length
        return valid_bytes


def _check_place(path: Path) -> None:
    """Refuse what is no file: a folder, a pipe, or a link, which might lead anywhere."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder"}
        kind = kinds.get(stat.S_IFMT(mode), "something that is no file")
        remedy = "move it away, or name another folder with --models-dir"
        raise UnfinishedError(f"{kind} stands where a download goes", path=path, remedy=remedy)


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raise ``SpaceError`` unless the disk of ``folder`` has so many bytes free."""
    free = free_bytes(folder)
    if needed_bytes > free:
        raise SpaceError(path=folder, expected=f"{needed_bytes:,} bytes", found=f"{free:,} bytes")


def _about(line: bytes) -> About | None:
    """The first line of a journal; None where it is not one of this version."""
    try:
        document = json.loads(line)
        if document.pop("format") != FORMAT or document.pop("block_bytes") != BLOCK_BYTES:
            return None
        about = About(**document)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    kinds = {"size_bytes": int}
    sound = all(type(getattr(about, f.name)) is kinds.get(f.name, str) for f in fields(About))
    return about if sound and about.size_bytes > 0 else None


def _records(lines: list[bytes]) -> Iterator[tuple[int, str, int]]:
    """Block number, digest and length of each line, up to the first that is damaged."""
    for line in lines:
        number, _, digest = line.partition(b" ")
        if not number.isdigit() or len(number) > 12 or len(digest) != 32 or not digest.isalnum():
            return
        yield int(number), digest.decode("ascii"), len(line) + 1
