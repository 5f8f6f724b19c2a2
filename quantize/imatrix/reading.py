"""Owns the importance of weight columns: which file says it, and what it says of each expert.

Statistics come from ``ds4q calibrate`` (``own.py``) or from llama.cpp (``gguf.py``, ``llama.py``).
The importance of a column is the mean square of the input that meets it: to minimise the sum of
importance times squared error over a row is to minimise the expected squared error of the row's
product, inputs taken as uncorrelated. Means are given as measured, since encoders depend on their
ratios only.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds4q.artifact.files import NotRegularError, open_regular
from ds4q.artifact.places import broken_link
from ds4q.quantize.config import Dims
from ds4q.quantize.errors import ImatrixError, ImatrixModelError
from ds4q.quantize.imatrix.gguf import GGUF_MAGIC, read_gguf
from ds4q.quantize.imatrix.llama import NO_FINGERPRINT, LlamaFile, read_legacy
from ds4q.quantize.imatrix.own import Layer, Means, OwnFile, Sizes, demand_sizes
from ds4q.quantize.safetensors import pread_exact

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
_Identity = tuple[int, int, int, int]  # device, inode, size, mtime_ns

_CACHED_LAYERS = 4  # a layer of Flash is 13 MB; encoders work on one or two at a time


class Imatrix:
    """Statistics of every routed expert, read layer by layer when they are asked for.

    Thread-safe. The file is opened for each layer anew and must stay as it is. Use
    :func:`read_imatrix`.

    Attributes
    ----------
    path : the file
    sha256 : of the file, hex
    fingerprint : of the checkpoint that was measured; None where the format has no place for it
    sizes : layers, experts, hidden size, expert width
    unseen : how many (layer, expert) saw no token and take the mean over their layer's experts
    warnings : what is unusual but not wrong
    """

    def __init__(
        self, path: Path, identity: _Identity, sha256: str, stored: OwnFile | LlamaFile
    ) -> None:
        self.path = path
        self.sha256 = sha256
        self.fingerprint = stored.fingerprint if isinstance(stored, OwnFile) else None
        self.sizes: Sizes = stored.sizes
        self.warnings = [] if self.fingerprint else [f"{path}: {NO_FINGERPRINT}"]
        self._identity = identity
        self._stored = stored
        self._layers: dict[int, Layer] = {}
        self._lock = threading.Lock()
        self.unseen = sum(self._count_unseen(layer) for layer in range(self.sizes.layers))

    def importance(self, layer: int, expert: int, projection: str) -> F32:
        """Mean square of every input of ``w1``, ``w2`` or ``w3``, f32 (K,); not to be changed.

        Of an expert that saw no token: the mean over the experts of its layer, weighted by tokens.
        All zero where no expert of the layer saw one.
        """
        values = self._layer(layer).means[projection].values
        row: F32 = values[expert if len(values) > 1 else 0]
        return row

    def tokens(self, layer: int) -> I64:
        """How many tokens were routed to each expert, i64 (E,); all 1 where the file has none."""
        return self._layer(layer).tokens

    def gain(self, layer: int) -> F32:
        """Mean square of the routing weight of those tokens, f32 (E,); all 1 where there is none.

        An error of the expert's output reaches the layer's output with this power.
        """
        return self._layer(layer).gain

    def _layer(self, layer: int) -> Layer:
        with self._lock:
            found = self._layers.pop(layer, None) or self._filled(layer)
            self._layers[layer] = found  # the one used last stands last
            if len(self._layers) > _CACHED_LAYERS:
                del self._layers[next(iter(self._layers))]
        return found

    def _read(self, layer: int) -> Layer:
        with _opened(self.path) as (fd, identity):
            if identity != self._identity:
                raise ImatrixError("imatrix changed while it was in use", path=self.path)
            return self._stored.read(fd, layer)

    def _count_unseen(self, layer: int) -> int:
        """Experts of a layer that lack tokens; every number of the layer is checked on the way."""
        means = self._read(layer).means.values()
        unseen = np.zeros(self.sizes.experts, bool)
        for found in means:
            unseen |= found.counts == 0
        return int(unseen.sum())

    def _filled(self, layer: int) -> Layer:
        """A layer whose experts without tokens have the mean of the others."""
        stored = self._read(layer)
        filled: dict[int, Means] = {}  # w1 and w3 may be one array: it stays one
        for found in stored.means.values():
            filled.setdefault(id(found), _fill(found))
        means = {w: filled[id(found)] for w, found in stored.means.items()}
        return Layer(means, stored.tokens, stored.gain)


def read_imatrix(
    path: str | os.PathLike[str], *, dims: Dims | None, fingerprint: str | None
) -> Imatrix:
    """Open an imatrix of ours or of llama.cpp and check all of it.

    Parameters
    ----------
    dims : sizes of the model that it is for; None takes the file's word
    fingerprint : ``Checkpoint.fingerprint()`` of that model; None asks for none. A file of
        llama.cpp has none to compare, which is a warning

    Raises
    ------
    ImatrixModelError : measured on another checkpoint, or of other sizes
    ImatrixMissingError : a layer or a tensor is absent
    ImatrixValueError : a number that cannot be a mean square or a count
    ImatrixError : not an imatrix, or a damaged one: numbers of ours must have their digest
    """
    path = Path(path)
    with _opened(path) as (fd, identity):
        stored = _parse(fd, identity[2], path, dims)
        demand_sizes(dims, stored.sizes, path)
        if isinstance(stored, OwnFile):
            if fingerprint not in (None, stored.fingerprint):
                raise ImatrixModelError(path=path, expected=fingerprint, found=stored.fingerprint)
            stored.demand_digest(fd)
        with os.fdopen(os.dup(fd), "rb") as file:
            file.seek(0)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Imatrix(path, identity, sha256, stored)


def _parse(fd: int, size_bytes: int, path: Path, dims: Dims | None) -> OwnFile | LlamaFile:
    head = pread_exact(fd, min(size_bytes, 8), 0, path)
    # Both begin with a number. The upper half of a header's length is 0, a name's length is not.
    if len(head) == 8 and head[4:] == bytes(4):
        return OwnFile(fd, size_bytes, path, None if dims is None else dims.sizes["K"])
    read = read_gguf if head.startswith(GGUF_MAGIC) else read_legacy
    with os.fdopen(os.dup(fd), "rb") as file:
        return LlamaFile(read(file, size_bytes, path), path, dims)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, _Identity]]:
    """A descriptor of a regular file, and what must not change about it."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        raise ImatrixError(
            broken_link(path) or "imatrix is not there",
            path=path,
            remedy="make one with ds4q calibrate",
        ) from None
    except NotRegularError as error:
        raise ImatrixError("not a regular file", path=path, found=error.found) from None
    try:
        status = os.fstat(fd)
        yield fd, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    finally:
        os.close(fd)


def _fill(found: Means) -> Means:
    """Rows without tokens take the mean of the others, weighted by tokens."""
    idle = found.counts == 0
    if not idle.any() or idle.all():
        return found
    weights = found.counts / found.counts.sum()
    values = found.values.copy()
    values[idle] = (weights[:, None] * found.values).sum(axis=0)
    return Means(values, found.counts)
