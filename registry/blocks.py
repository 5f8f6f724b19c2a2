"""What a download keeps on disk until it is whole: ``NAME.partial`` and its journal of blocks.

The journal (``NAME.partial.blocks``) is text. Its first line says what is fetched; each later line
gives the number and xxh3-128 of a block that was written. A block of an earlier run is believed
only if the bytes in the partial file still have the digest, so neither a torn line nor data that a
power loss swallowed can survive into the file.

Both files are ds4q's own only by their beginnings. A partial file begins with ``MARK`` until its
first block arrives; from then on the journal beside it, which was there first, vouches for it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ds4q.artifact import stops
from ds4q.artifact.files import (
    AppearedError,
    ForeignFileError,
    claim,
    free_bytes,
    fsync_folder,
    named,
    read_head,
    read_small,
    remove_own,
    write_whole,
)
from ds4q.artifact.writer import PARTIAL_SUFFIX, PartialFile
from ds4q.registry.errors import ExistsError, SpaceError, UnfinishedError

FORMAT = "ds4q.blocks.v1"
BEGINNING = b'{"format": "ds4q.blocks'  # of a journal, of any version
MARK = b"ds4q.unfinished.pull\n"  # of a partial file without its first block
SUFFIX = ".blocks"
BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 10  # of a journal's first line
MAX_JOURNAL_BYTES = 32 << 20  # enough for a file of 3 TB


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
    ForeignFileError : one of the two names is taken by something that no download left
    UnfinishedError : the partial file holds data, and its journal cannot be used
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        partial = final.with_name(final.name + PARTIAL_SUFFIX)
        self.journal = partial.with_name(partial.name + SUFFIX)
        claim(self.journal, is_journal)
        self.file = PartialFile(final, 0, mark=MARK, recognize=lambda head: vouches(self.journal))
        self.about: About | None = None
        self.digests: dict[int, str] = {}
        self._append_to = -1
        self._lock = threading.Lock()
        try:
            valid_bytes = self._read_journal()
            if self.about is not None:
                self._append_to = self._open_journal()
                with named(self.journal):
                    os.ftruncate(self._append_to, valid_bytes)
            elif self._holds_data():
                raise UnfinishedError(path=self.file.path)
        except BaseException:
            self.close()
            raise

    def start(self, about: About) -> None:
        """Start the file over; what an earlier run left is given up."""
        self._close_journal()
        with named(self.file.path):
            self.file.reset()
        self.about, self.digests = about, {}
        text = json.dumps({"format": FORMAT, "block_bytes": BLOCK_BYTES} | asdict(about))
        write_whole(
            self.journal, text + "\n", replace=lambda path: claim(path, is_journal) is not None
        )
        self._append_to = self._open_journal()
        self.file.file_bytes = about.size_bytes

    def _holds_data(self) -> bool:
        return os.fstat(self.file.fd).st_size > len(MARK)

    @property
    def held_bytes(self) -> int:
        """Bytes of the disk that the partial file has already."""
        return os.fstat(self.file.fd).st_blocks * 512 if self._holds_data() else 0

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

        Raises ``ExistsError`` where a file has that name and ``replace`` does not allow it.
        """
        self.file.allocate()  # the mark may be longer than the file
        self.file.sync()
        with stops.held():  # else a journal could outlive its file, and nothing would remove it
            try:
                self.file.publish(replace=replace)
            except AppearedError:
                raise ExistsError(path=self.final) from None
            except OSError:
                if not os.path.lexists(self.file.path):  # it has its name; only syncing failed
                    remove_own(self.journal, is_journal)
                raise
            remove_own(self.journal, is_journal)
            fsync_folder(self.final.parent)

    def close(self) -> None:
        """Release the file. What was written stays; a file without data is removed."""
        self._close_journal()
        if self.about is None and self.file.fd >= 0 and not self._holds_data():
            self.file.discard()
        self.file.close()

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
            raw = read_small(self.journal, MAX_JOURNAL_BYTES, follow=False)
        except FileNotFoundError:
            return 0
        lines = raw.split(b"\n")[:-1]  # what follows the last line break is torn
        self.about = _about(lines[0]) if lines else None
        if self.about is None:
            return 0
        self.file.file_bytes = self.about.size_bytes
        valid_bytes = len(lines[0]) + 1
        for number, digest, length in _records(lines[1:]):
            self.digests[number] = digest
            valid_bytes += length
        return valid_bytes


def is_journal(head: bytes) -> bool:
    """Whether a file that begins so is the journal of a download."""
    return head.startswith(BEGINNING)


def vouches(journal: Path) -> bool:
    """Whether a journal of ours shows that the partial file beside it is a download's."""
    if claim(journal, is_journal) is None:
        return False
    about = _about(read_head(journal, MAX_LINE_BYTES))
    partial = journal.with_name(journal.name.removesuffix(SUFFIX))
    with suppress(FileNotFoundError):
        return about is not None and partial.lstat().st_size <= about.size_bytes
    return about is not None


def is_begun(final: Path) -> bool:
    """Whether an unfinished download of ``final`` is there, and not a file of the user's."""
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    journal = partial.with_name(partial.name + SUFFIX)
    with suppress(ForeignFileError):
        if vouches(journal):
            return True
    with suppress(ForeignFileError):
        return claim(partial, lambda head: head.startswith(MARK)) is not None
    return False


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raise ``SpaceError`` unless the disk of ``folder`` has so many bytes free."""
    free = free_bytes(folder)
    if needed_bytes > free:
        raise SpaceError(path=folder, expected=f"{needed_bytes:,} bytes", found=f"{free:,} bytes")


def _about(line: bytes) -> About | None:
    """The first line of a journal, whatever follows; None where it is not of this version."""
    try:
        document = json.loads(line.split(b"\n", 1)[0])
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
