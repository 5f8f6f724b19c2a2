"""Owns a checkpoint's files: shards, index, config and texts, opened and read by pread.

Knows no architecture: what a tensor means is told by ``deepseek4.py``, whether all are there by
``audit.py``. Nothing is mapped into memory, because a file that is cut while it is mapped kills the
process; a short pread is an ordinary error.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ds4q.artifact.files import NotRegularError, open_regular
from ds4q.artifact.metadata import canonical
from ds4q.artifact.places import broken_link
from ds4q.quantize.errors import (
    ChangedSourceError,
    ConfigError,
    DuplicateNameError,
    FileKindError,
    IndexMismatchError,
    JsonFileError,
    MissingFileError,
    SourceReadError,
    UnfinishedFileError,
)
from ds4q.quantize.index import (
    INDEX,
    SUFFIX,
    UNFINISHED,
    absent_of_many,
    like,
    parse_index,
    shard_names,
)
from ds4q.quantize.safetensors import (
    MAX_NESTING,
    Entry,
    nesting,
    parse_json,
    pread_exact,
    read_header,
    refuse_byte_order_mark,
    refuse_lfs_pointer,
)

CONFIG = "config.json"
TEXTS = ("tokenizer.json", "chat_template.jinja")
OBJECTS = ("tokenizer_config.json", "generation_config.json")
PREFIX = "model."
MAX_TEXT_BYTES = 256 << 20  # of config, tokenizer, index: what an artifact's metadata may hold
MAX_READ_BYTES = 1 << 30  # of one system call; Linux stops short of 2 GiB
GATE_SUFFIX = "ffn.gate.weight"

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a shard: header ``dtype`` and ``shape``, ``offset`` absolute in the shard.

    ``name`` lacks an optional leading ``model.``; ``raw_name`` is what the shard says.
    """

    name: str
    raw_name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One open shard; ``identity`` is what must not change while it is read."""

    path: Path
    fd: int = field(repr=False)
    size: int
    data_offset: int
    identity: tuple[int, int, int, int]  # device, inode, size, mtime_ns


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts that an artifact carries along; None where the file is absent."""

    tokenizer: str | None
    tokenizer_config: dict[str, Any] | None
    generation_config: dict[str, Any] | None
    chat_template: str | None


class Checkpoint:
    """An open checkpoint: every header parsed, index and shards compared, no data read yet.

    Reading is thread-safe; ``close`` must wait for the readers. Use :meth:`open`.

    Attributes
    ----------
    folder : where the shards are
    single : one file was opened, not a folder
    config : config.json as parsed; empty where it is absent from a partial checkpoint
    config_raw : its bytes, None where absent
    tensors : name -> tensor, sorted by name
    shards : file name -> shard, sorted by name
    warnings : what is unusual but not wrong
    """

    def __init__(self, folder: Path, *, single: bool = False) -> None:
        self.folder = folder
        self.single = single
        self.config: dict[str, Any] = {}
        self.config_raw: bytes | None = None
        self.tensors: dict[str, SourceTensor] = {}
        self.shards: dict[str, ShardInfo] = {}
        self.texts = Texts(None, None, None, None)
        self.warnings: list[str] = []
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, allow_partial: bool = False) -> Checkpoint:
        """Open a folder of shards, or one ``.safetensors`` file with what lies beside it.

        Parameters
        ----------
        allow_partial : config.json, and shards that no index names, may be absent

        Raises
        ------
        SourceError : the first broken rule of file, header, index or config
        """
        path = Path(folder)
        # os.path answers False where pathlib would raise (a name too long, a NUL).
        if os.path.isdir(path):
            checkpoint = cls(path)
        elif path.suffix == SUFFIX and os.path.lexists(path):
            checkpoint = cls(path.parent, single=True)
        elif os.path.exists(path):
            raise FileKindError(path=path)
        else:
            raise MissingFileError(broken_link(path), path=path)
        try:
            if not checkpoint.single:
                checkpoint._open_folder(allow_partial)
            else:
                checkpoint._add_shards([path.name])
            checkpoint._read_texts(allow_partial)
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every shard; reading afterwards is an error."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for shard in self.shards.values():
                    os.close(shard.fd)

    # ------------------------------------------------------------ opening

    def _open_folder(self, allow_partial: bool) -> None:
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            raise SourceReadError(
                f"folder cannot be listed: {error.strerror}", path=self.folder
            ) from error
        present = shard_names(names)
        raw_index = read_text(self.folder / INDEX)
        if raw_index is None:
            if not present:
                what = f"no {SUFFIX} file in the folder{like(names, SUFFIX)}"
                raise MissingFileError(what, path=self.folder)
            absent = absent_of_many(present)
            if absent and not allow_partial:
                found = f"{len(absent)} absent{like(names, absent[0])}"
                raise MissingFileError(
                    "shard is missing", path=self.folder / absent[0], found=found
                )
            self.warnings += [f"shard {name} is absent" for name in absent]
            self._add_shards(present)
            return
        weight_map, total_size = parse_index(raw_index, self.folder / INDEX)
        self.warnings += [
            f"{name} is not named by {INDEX}, and not used"
            for name in sorted(set(present) - set(weight_map.values()))
        ]
        named = sorted(set(weight_map.values()))
        # Every shard is looked for before one is opened: a missing file should not cost a read.
        for name in named:
            if not os.path.exists(self.folder / name):
                lost = sorted(t for t, shard in weight_map.items() if shard == name)
                raise IndexMismatchError(
                    "the index names a shard that is not there",
                    path=self.folder / name,
                    tensor=lost[0],
                    found=f"{len(lost)} tensors without their shard{like(names, name)}",
                    remedy="download the shard",
                )
        self._add_shards(named, weight_map)
        self._compare_index(weight_map, total_size)

    def _add_shards(
        self, names: Iterable[str], weight_map: Mapping[str, str] | None = None
    ) -> None:
        """Open shards and take their tensors; an index says which of several copies counts."""
        found: dict[str, SourceTensor] = {}
        stale: dict[str, list[str]] = {}  # by shard
        elsewhere: set[str] = set()
        for shard in names:
            for entry in self._open_shard(shard):
                if weight_map is not None and weight_map.get(entry.name, shard) != shard:
                    stale.setdefault(shard, []).append(entry.name)
                    elsewhere.add(entry.name)
                    continue
                name = entry.name.removeprefix(PREFIX)
                at = self.shards[shard].data_offset + entry.start
                tensor = SourceTensor(
                    name, entry.name, entry.dtype, entry.shape, shard, at, entry.stop - entry.start
                )
                twin = found.setdefault(name, tensor)
                if twin is not tensor:
                    raise DuplicateNameError(
                        path=self.shards[shard].path,
                        tensor=entry.name,
                        found=f"{twin.raw_name} in {twin.shard}",
                        remedy=None
                        if twin.shard == shard
                        else "keep one copy of each tensor: move one of the two files away",
                    )
        self.tensors = dict(sorted(found.items()))
        lost = elsewhere - {tensor.raw_name for tensor in found.values()}
        if lost and weight_map is not None:
            name = min(lost)
            raise IndexMismatchError(
                "the index maps a tensor to the wrong shard",
                path=self.folder / INDEX,
                tensor=name,
                expected=weight_map[name],
                found=next(shard for shard, copies in stale.items() if name in copies),
            )
        for shard, copies in stale.items():
            more = f" and {len(copies) - 1} more" if len(copies) > 1 else ""
            self.warnings.append(
                f"{shard} holds a copy of {copies[0]}{more} that is not used: {INDEX} names "
                "another shard"
            )

    def _open_shard(self, name: str) -> list[Entry]:
        path = self.folder / name
        fd = _open(path)
        if fd is None:
            raise MissingFileError("shard is not there", path=path)
        try:
            status = os.fstat(fd)
            header = read_header(fd, status.st_size, path)
        except BaseException:
            os.close(fd)
            raise
        self.shards[name] = ShardInfo(
            path, fd, status.st_size, header.data_offset, _identity(status)
        )
        return header.entries

    def _compare_index(self, weight_map: dict[str, str], total_size: int | None) -> None:
        """Index against headers, both ways; a wrong total is common in the field: a warning."""
        path = self.folder / INDEX
        held = {t.raw_name: t for t in self.tensors.values()}
        for name in sorted(weight_map):
            if name not in held:
                raise IndexMismatchError(
                    f"the index maps a tensor to {weight_map[name]}, which does not hold it",
                    path=path,
                    tensor=name,
                )
        for name in held:
            if name not in weight_map:
                raise IndexMismatchError(
                    f"{held[name].shard} holds a tensor that the index does not name",
                    path=path,
                    tensor=name,
                )
        held_bytes = sum(t.nbytes for t in held.values())
        if total_size is not None and total_size != held_bytes:
            self.warnings.append(
                f"{INDEX}: total_size is {total_size}, the shards hold {held_bytes} bytes"
            )

    def _read_texts(self, allow_partial: bool) -> None:
        folder = self.folder
        self.config_raw = read_text(folder / CONFIG)
        if self.config_raw is not None:
            self.config = _object(self.config_raw, folder / CONFIG)
        elif not allow_partial:
            raise ConfigError(
                "config.json is missing",
                path=folder / CONFIG,
                remedy="download it, or give --allow-partial for a part of a model",
            )
        else:
            self.warnings.append(f"{CONFIG} is absent")
        texts: dict[str, str | None] = {}
        objects: dict[str, dict[str, Any] | None] = {}
        for name in TEXTS:
            raw = read_text(folder / name)
            texts[name] = None if raw is None else _utf8(raw, folder / name)
        for name in OBJECTS:
            raw = read_text(folder / name)
            objects[name] = None if raw is None else _object(raw, folder / name)
        tokenizer = texts["tokenizer.json"]
        if tokenizer is None:
            self.warnings.append("tokenizer.json is absent: the model will run on token ids only")
        else:
            parse_json(tokenizer.encode(), folder / "tokenizer.json")
        self.texts = Texts(
            tokenizer,
            objects["tokenizer_config.json"],
            objects["generation_config.json"],
            texts["chat_template.jinja"],
        )

    # ------------------------------------------------------------ reading

    def read_into(self, tensor: SourceTensor, out: U8, start: int = 0) -> None:
        """Fill ``out`` (uint8, contiguous) with the tensor's bytes from ``start`` on.

        Raises
        ------
        SourceReadError : the range leaves the tensor, or the shard no longer holds the bytes
        """
        if start < 0 or start + out.nbytes > tensor.nbytes:
            raise SourceReadError(
                "read outside the tensor",
                path=tensor.shard,
                tensor=tensor.name,
                expected=f"a range within {tensor.nbytes} bytes",
                found=f"[{start}, {start + out.nbytes}]",
            )
        shard = self.shards[tensor.shard]
        if self._closed:
            raise SourceReadError("checkpoint is closed", path=shard.path, tensor=tensor.name)
        view, at, got = out.data, tensor.offset + start, 0
        while got < len(view):
            try:
                n = os.preadv(shard.fd, [view[got : got + MAX_READ_BYTES]], at + got)
            except OSError as error:
                raise SourceReadError(
                    f"read failed: {error.strerror}", path=shard.path, tensor=tensor.name
                ) from error
            if n == 0:
                raise SourceReadError(
                    "shard ended during a read",
                    path=shard.path,
                    tensor=tensor.name,
                    expected=f"{len(view)} bytes at offset {at}",
                    found=got,
                    remedy="something cut the file; download it again",
                )
            got += n

    def read(self, tensor: SourceTensor) -> U8:
        """All bytes of ``tensor``, 1-D, freshly allocated."""
        out = np.empty(tensor.nbytes, np.uint8)
        self.read_into(tensor, out)
        return out

    def check_unchanged(self) -> None:
        """Raise ChangedSourceError unless every shard is the file that was opened."""
        for shard in self.shards.values():
            try:
                now = _identity(os.stat(shard.path))
            except OSError as error:
                raise ChangedSourceError(path=shard.path, found=error.strerror) from None
            if now != shard.identity:
                changed = [
                    f"{what} {new} instead of {old}"
                    for what, old, new in zip(
                        ("device", "inode", "size", "mtime_ns"), shard.identity, now, strict=True
                    )
                    if old != new
                ]
                raise ChangedSourceError(path=shard.path, found=", ".join(changed))

    def fingerprint(self) -> str:
        """SHA-256 (hex) of config.json, every name, dtype and shape, and the router weights' bytes.

        Known before any work, and the same however the tensors are spread over shards.
        """
        gates = [
            [name, self._digest(tensor)]
            for name, tensor in self.tensors.items()
            if name.endswith(GATE_SUFFIX)
        ]
        config = None if self.config_raw is None else hashlib.sha256(self.config_raw).hexdigest()
        tensors = [[t.name, t.dtype, list(t.shape)] for t in self.tensors.values()]
        content = canonical({"config": config, "gates": gates, "tensors": tensors})
        return hashlib.sha256(content).hexdigest()

    def _digest(self, tensor: SourceTensor) -> str:
        hasher = xxhash.xxh3_128()
        block = np.empty(min(tensor.nbytes, 1 << 22), np.uint8)
        for start in range(0, tensor.nbytes, max(len(block), 1)):
            part = block[: tensor.nbytes - start]
            self.read_into(tensor, part, start)
            hasher.update(part.data)
        return hasher.hexdigest()


def _open(path: Path) -> int | None:
    """A regular file, open for reading; None where it does not exist.

    A file that a program is still downloading is refused, though it may have its full length.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        if (what := broken_link(path)) is not None:
            raise MissingFileError(what, path=path) from None
        return None
    except NotRegularError as error:
        raise FileKindError(
            "not a regular file",
            path=path,
            found=error.found,
            remedy="put the file itself here, or move this away",
        ) from None
    except OSError as error:
        raise SourceReadError(
            f"open failed: {error.strerror}",
            path=path,
            remedy="make the file readable, or move it away",
        ) from error
    for suffix in UNFINISHED:
        if os.path.lexists(f"{path}{suffix}"):
            os.close(fd)
            raise UnfinishedFileError(path=path, found=f"{path.name}{suffix} beside it")
    return fd


def read_text(path: Path) -> bytes | None:
    """The bytes of a small file; None where it does not exist. A git-lfs pointer is refused."""
    fd = _open(path)
    if fd is None:
        return None
    try:
        status = os.fstat(fd)
        if status.st_size > MAX_TEXT_BYTES:
            raise JsonFileError(
                "file is too long", path=path, expected=f"<= {MAX_TEXT_BYTES}", found=status.st_size
            )
        raw = pread_exact(fd, status.st_size, 0, path)
    finally:
        os.close(fd)
    refuse_lfs_pointer(raw, path)
    return raw


def _utf8(raw: bytes, path: Path) -> str:
    refuse_byte_order_mark(raw, path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonFileError("not UTF-8", path=path, found=f"byte {error.start}") from None


def _object(raw: bytes, path: Path) -> dict[str, Any]:
    value = parse_json(raw, path)
    if nesting(value) > MAX_NESTING:
        raise JsonFileError(f"nested more than {MAX_NESTING} levels deep", path=path)
    return value


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
