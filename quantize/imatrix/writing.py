"""Writing an imatrix: where it may go, and deterministic bytes, published atomically."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy.typing as npt
import xxhash

from ds4q.artifact.files import read_head
from ds4q.artifact.hfq import MAGIC
from ds4q.artifact.metadata import canonical
from ds4q.artifact.newfile import NewFile
from ds4q.artifact.receipt import is_receipt
from ds4q.quantize.errors import JobError
from ds4q.quantize.imatrix.own import BEGINNING, DTYPES, FORMAT, LayerStatistics
from ds4q.quantize.safetensors import LENGTH_BYTES


class ImatrixPlaceError(JobError):
    """An imatrix cannot be written where the user asked."""

    rule = "imatrix cannot be written there"


def claim_place(path: Path, *, force: bool) -> None:
    """Refuse a place where an imatrix cannot go: no folder, no file, or somebody else's file.

    An imatrix of ours is replaced; another file only with ``force``; an artifact or a receipt,
    which ``force`` can only mean by mistake, never.
    """
    folder = path.parent
    if not folder.is_dir():
        raise ImatrixPlaceError(
            "output folder does not exist", path=folder, remedy="create it, or choose another"
        )
    if not os.access(folder, os.W_OK):
        raise ImatrixPlaceError("output folder cannot be written to", path=folder)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise ImatrixPlaceError(
            "output is a folder, a device or a link, not a file",
            path=path,
            remedy="name the file itself",
        )
    head = read_head(path)
    if head.startswith(MAGIC) or is_receipt(head):
        raise ImatrixPlaceError(
            "output is an artifact or a receipt", path=path, remedy="choose another name"
        )
    if not force and not head.startswith(BEGINNING, LENGTH_BYTES):
        raise ImatrixPlaceError(
            "output exists and is no imatrix of ds4q",
            path=path,
            remedy="choose another name, or give --force to replace it",
        )


def write_imatrix(
    path: Path,
    layers: Sequence[LayerStatistics],
    *,
    fingerprint: str,
    total_tokens: int,
    window_tokens: int,
    texts: Sequence[str],
    force: bool = False,
) -> str:
    """Write a file of ours, whole or not at all; return its SHA-256 (hex).

    The same statistics give the same bytes.

    Parameters
    ----------
    layers : statistics of layers 0, 1, ..., of one size
    fingerprint, texts : SHA-256 (hex) of the source and of each text
    total_tokens, window_tokens : positions that went through the model, and of a whole window
    force : replace a file that is no imatrix

    Raises
    ------
    ImatrixPlaceError : something else stands there
    WriteError : another process writes the same file, or it cannot be written
    AppearedError : a file appeared at ``path`` meanwhile
    """
    claim_place(path, force=force)
    metadata = {
        "format": FORMAT,
        "source_fingerprint": fingerprint,
        "texts": json.dumps(list(texts), separators=(",", ":")),
        "tokens": str(total_tokens),
        "window_tokens": str(window_tokens),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    end, tensors_digest = 0, xxhash.xxh3_128()
    for name, values in _tensors(layers):
        header[name] = {
            "data_offsets": [end, end + values.nbytes],
            "dtype": "I64" if values.dtype.kind == "i" else "F32",
            "shape": list(values.shape),
        }
        end += values.nbytes
        tensors_digest.update(values.tobytes())
    metadata["tensors_xxh3"] = tensors_digest.hexdigest()
    raw = canonical(header)
    raw += b" " * (-len(raw) % 8)
    front = len(raw).to_bytes(LENGTH_BYTES, "little") + raw
    digest = hashlib.sha256()
    with NewFile(path) as file:
        for data in chain([front], (values.tobytes() for _, values in _tensors(layers))):
            file.write(data)
            digest.update(data)
        file.publish()
    return digest.hexdigest()


def _tensors(layers: Sequence[LayerStatistics]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Names and little-endian arrays in the order of the file."""
    for number, layer in enumerate(layers):
        for part, dtype in DTYPES.items():
            values = getattr(layer, part).astype("<i8" if dtype == "I64" else "<f4", copy=False)
            yield f"layers.{number}.ffn.experts.{part}", values
