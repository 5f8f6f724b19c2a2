"""Owns the journal of a job: what is already in the partial files, so that a stop costs one block.

Text, one JSON object a line behind its own digest, beside the trunk output (``NAME.journal``). The
first line is the job's identity; each later line says that a run of rows was written, with its
digests. A line is believed only if it is whole and the bytes in the partial file still have the
digest, so neither a torn line nor data that a power loss swallowed can survive into an artifact.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from ds4q.artifact.writer import write_durably
from ds4q.quantize.errors import JobError

FORMAT = "ds4q.journal.v1"
SUFFIX = ".journal"


class ResumeError(JobError):
    """The journal belongs to another job."""

    rule = "cannot resume: the unfinished file belongs to another job"
    cure = "repeat the command with the same source and options, or start over with --force"


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """Rows ``first`` .. of tensor ``tensor`` (number within output ``output``) were written.

    ``packed`` and ``sources`` are xxh3-128 (hex) of the packed rows and of the source bytes that
    they came from (weight, then scale where there is one; of an FP8 scale the whole grid);
    ``events`` what the conversion met; ``books`` the text of the tensor's fitted books, or empty.
    """

    output: int
    tensor: int
    block: int
    nbytes: int
    packed: str
    sources: tuple[str, ...]
    events: dict[str, float]
    books: str = ""


def journal_path(out: Path) -> Path:
    """Where the journal of the job that writes ``out`` lies."""
    return out.with_name(out.name + SUFFIX)


class Journal:
    """An open journal; ``record`` may be called by any thread."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._lock = threading.Lock()

    @classmethod
    def create(cls, path: Path, identity: dict[str, Any], shards: dict[str, list[int]]) -> Journal:
        """A new journal. ``shards`` says what was read: name -> numbers that change with the file.

        A first line cut by a crash is no journal; the partial file beside it is then started over.
        """
        write_durably(path, _line({"format": FORMAT, "identity": identity, "shards": shards}))
        return cls(path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))

    @classmethod
    def reopen(cls, path: Path, earlier: Earlier) -> Journal:
        """Go on behind the last whole line of an earlier run."""
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(fd, earlier.valid_bytes)
        return cls(path, fd)

    def _append(self, document: dict[str, Any]) -> None:
        view = memoryview(_line(document))
        with self._lock:
            while view:
                view = view[os.write(self._fd, view) :]

    def record(self, block: BlockRecord) -> None:
        """Append one line; the data must already have been written."""
        self._append(asdict(block))

    def publish(self) -> None:
        """Note that all outputs are complete on disk and only the renames are left."""
        self._append({"publish": True})
        self.sync()

    def sync(self) -> None:
        """Force the journal to the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close; the file stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _line(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return f"{xxhash.xxh3_64_hexdigest(text)} ".encode() + text + b"\n"


def _document(line: bytes) -> dict[str, Any]:
    """The object of a whole line; ``ValueError`` for a torn or damaged one."""
    digest, _, text = line.partition(b" ")
    if digest.decode("ascii") != xxhash.xxh3_64_hexdigest(text):
        raise ValueError("line differs from its digest")
    document: dict[str, Any] = json.loads(text)
    return document


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier run left: its identity, the blocks it wrote, whether only renames are left.

    ``valid_bytes`` ends behind the last believed line that is not about the renames.
    """

    identity: dict[str, Any]
    shards: dict[str, list[int]]
    blocks: list[BlockRecord]
    published: bool
    valid_bytes: int

    @property
    def nbytes(self) -> int:
        """Packed bytes that were written."""
        return sum(block.nbytes for block in self.blocks)


def read_journal(path: Path) -> Earlier | None:
    """The journal at ``path``; None where there is none or not even its first line is whole."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line break is torn
    except FileNotFoundError:
        return None
    head: tuple[dict[str, Any], dict[str, list[int]]] | None = None
    blocks: list[BlockRecord] = []
    valid_bytes, published = 0, False
    for line in lines:
        try:
            document = _document(line)
            if head is None:
                if document["format"] != FORMAT:
                    return None
                head = document["identity"], document["shards"]
            elif "publish" in document:
                published = True
                break
            else:
                document["sources"] = tuple(document["sources"])
                blocks.append(BlockRecord(**document))
        except (ValueError, TypeError, KeyError):
            break  # nothing behind a damaged line is believed
        valid_bytes += len(line) + 1
    if head is None:
        return None
    return Earlier(*head, blocks, published, valid_bytes)


def check_identity(earlier: Earlier, identity: dict[str, Any], path: Path) -> None:
    """Raise ``ResumeError`` naming the first thing in which the two jobs differ."""
    differs = _difference(earlier.identity, identity)
    if differs is not None:
        place, before, now = differs
        raise ResumeError(f"{ResumeError.rule} ({place})", path=path, expected=before, found=now)


def _difference(before: Any, now: Any, place: str = "") -> tuple[str, Any, Any] | None:
    """Place (``options.recipe.name``) and both values of the first difference of two documents."""
    if before == now:
        return None
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return place, before, now
    for key in sorted(before.keys() | now.keys(), key=lambda key: (key != "name", key)):
        inner = f"{place}.{key}" if place else key
        found = _difference(before.get(key), now.get(key), inner)
        if found is not None:
            return found
    return None
