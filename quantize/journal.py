"""The journal of a job: which blocks are in the partial files.

Text, one JSON object a line behind its own digest, beside the trunk output (``NAME.journal``). The
first line is the job's identity; each later line says that a run of rows was written, and what came
of it. The journal is a hint and never evidence: a resumed job computes every block again from the
source and compares it with the partial file, so no line of it can change an artifact.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

import xxhash

from ds4q.artifact.files import claim, create, open_regular, remove_own
from ds4q.quantize.errors import JobError

FORMAT = "ds4q.journal.v1"
SUFFIX = ".journal"
MAX_LINE_BYTES = 1 << 20
MAX_BLOCKS = 4 << 20

_BEGINNING = re.compile(rb'[0-9a-f]{16} \{"format":"ds4q\.journal\.')
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC

Key = tuple[int, int, int]
"""Output, tensor within it, block within that."""


class JournalError(JobError):
    """A journal of ds4q's that does not say what it should."""

    rule = "the journal of an unfinished job cannot be used"
    cure = "start over with --force"

    def __init__(self, what: str = "", **where: Any) -> None:
        super().__init__(what if what.startswith(self.rule) else f"{self.rule}: {what}", **where)


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

    @property
    def key(self) -> Key:
        """Where it belongs in a plan."""
        return self.output, self.tensor, self.block


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
    def create(
        cls,
        path: Path,
        identity: dict[str, Any],
        shards: dict[str, list[int]],
        replaces: Mapping[str, Sequence[int]],
    ) -> Journal:
        """A new journal, which has its first line from its first moment.

        Parameters
        ----------
        shards : what is read: name -> numbers that change with the file
        replaces : final names that the user allows to be replaced, likewise
        """
        head = {"format": FORMAT, "identity": identity, "shards": shards, "replaces": replaces}
        remove_own(path, is_journal)
        os.close(create(path, _line(head)))
        return cls(path, os.open(path, _FLAGS))

    @classmethod
    def reopen(cls, path: Path, earlier: Earlier) -> Journal:
        """Go on behind the last whole line of an earlier run."""
        fd = os.open(path, _FLAGS)
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


def _document(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line; None for a torn or damaged one."""
    digest, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or digest != xxhash.xxh3_64_hexdigest(text).encode():
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier run left: its identity, the blocks it wrote, whether only renames are left.

    ``replaces`` are final names that its user allowed to be replaced, with what the files were.
    ``valid_bytes`` ends behind the last whole line; behind the one about the renames none is read.
    """

    identity: dict[str, Any]
    shards: dict[str, list[int]]
    replaces: dict[str, tuple[int, ...]]
    blocks: dict[Key, BlockRecord]
    published: bool
    valid_bytes: int

    @property
    def outputs(self) -> dict[str, int]:
        """Names of the artifacts, and their lengths."""
        return dict(self.identity["outputs"])

    @property
    def nbytes(self) -> int:
        """Packed bytes that were written."""
        return sum(block.nbytes for block in self.blocks.values())


def is_journal(head: bytes) -> bool:
    """Whether a file that begins so is the journal of a job, of any version."""
    return _BEGINNING.match(head) is not None


def read_journal(path: Path) -> Earlier | None:
    """The journal at ``path``; None where there is none.

    Lines from the first torn or damaged one on are ignored.

    Raises
    ------
    ForeignFileError : not a journal of ds4q's
    JournalError : its first line is damaged, or a whole line does not say what it should
    """
    if claim(path, is_journal) is None:
        return None
    blocks: dict[Key, BlockRecord] = {}
    published = False
    with open(open_regular(path, follow=False), "rb") as file:
        line = file.readline(MAX_LINE_BYTES)
        head = _document(line)
        if head is None:
            raise JournalError("its first line is damaged", path=path)
        identity, shards, replaces = _head(head, path)
        valid_bytes = len(line)
        while (document := _document(line := file.readline(MAX_LINE_BYTES))) is not None:
            if document == {"publish": True}:
                published = True
                valid_bytes += len(line)
                break
            block = _block(document, path)
            blocks[block.key] = block
            valid_bytes += len(line)
            if len(blocks) > MAX_BLOCKS:
                raise JournalError(f"more than {MAX_BLOCKS} blocks", path=path)
    return Earlier(identity, shards, replaces, blocks, published, valid_bytes)


def _head(
    document: dict[str, Any], path: Path
) -> tuple[dict[str, Any], dict[str, list[int]], dict[str, tuple[int, ...]]]:
    """Identity, shards and replaceable files of a first line."""
    if document.get("format") != FORMAT:
        raise JournalError("of another version", path=path, found=document.get("format"))
    identity, shards = document.get("identity"), document.get("shards", {})
    replaces = document.get("replaces", {})
    if not isinstance(identity, dict) or not _are_numbers(shards) or not _are_numbers(replaces):
        raise JournalError("its first line does not name a job", path=path)
    outputs = identity.get("outputs")
    if not isinstance(outputs, list) or not all(map(_is_output, outputs)):
        raise JournalError("its first line does not name the outputs", path=path)
    return identity, shards, {name: tuple(numbers) for name, numbers in replaces.items()}


def _are_numbers(value: Any) -> TypeGuard[dict[str, list[int]]]:
    """Whether ``value`` maps names to lists of integers."""
    return isinstance(value, dict) and all(
        isinstance(numbers, list) and all(type(number) is int for number in numbers)
        for numbers in value.values()
    )


def _is_output(value: Any) -> bool:
    """Whether ``value`` is the plain name of an output and its length."""
    if not isinstance(value, list) or len(value) != 2 or type(value[0]) is not str:
        return False
    name, nbytes = value
    plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
    return plain and type(nbytes) is int and nbytes >= 0


def _block(document: dict[str, Any], path: Path) -> BlockRecord:
    """The record of a whole line."""
    kinds = {"packed": str, "sources": list, "events": dict, "books": str}
    for name in BlockRecord.__slots__:
        value = document.get(name, "" if name == "books" else None)
        if type(value) is not kinds.get(name, int) or (type(value) is int and value < 0):
            raise JournalError(
                f"a line has a wrong {name}",
                path=path,
                expected=kinds.get(name, int).__name__,
                found=type(value).__name__,
            )
    if document.keys() - set(BlockRecord.__slots__):
        raise JournalError("a line has unknown keys", path=path)
    if not all(type(source) is str for source in document["sources"]):
        raise JournalError("a line has a wrong sources", path=path, expected="a list of str")
    return BlockRecord(**document | {"sources": tuple(document["sources"])})


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
