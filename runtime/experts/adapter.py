"""Owns the file of an expert predictor, and what it predicts. Fits nothing and fetches nothing.

From the input h of layer L's router an entry predicts the scores of layer L + 1's router, up to
what all experts share: ``z(L + 1) = B (A h(L)) + offset``; with that router's bias added, the best
are candidates. The router itself still chooses: a wrong guess costs a read, never a token.

Layout, little-endian, nothing between the parts:

========  ==================================================================================
bytes     what
========  ==================================================================================
8         magic ``HFADPT`` and two zero bytes
5 x 4     u32: version (3), entries, d_model, n_experts, rank
4, n      u32 n, then n bytes of canonical JSON: ``About``. Not in version 1
entries   u32 source layer L, rising; f16 A [rank, d_model]; f16 B [n_experts, rank];
          f32 offset [n_experts], not in version 1
16        xxh3-128 of all before it, big-endian. Not in version 1
========  ==================================================================================

Rows of A and columns of B come in falling order of what they explain, so the first r of them are
the predictor of rank r. Version 1 is hipfire's: it does not say which model it was fitted on.
Version 2 names the artifact only. Version 3 also names the checkpoint: a predictor fits every
artifact that was made from it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ds4q.artifact.errors import MetadataError
from ds4q.artifact.fastpath import FastPath, jit
from ds4q.artifact.files import beginning, open_regular
from ds4q.artifact.metadata import canonical, parse_metadata
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.errors import AdapterError
from ds4q.runtime.experts.header import Identity

F32 = npt.NDArray[np.float32]

MAGIC = b"HFADPT\0\0"
is_adapter = beginning(MAGIC)
"""Whether a file that begins so is a predictor."""

VERSION = 3
STATE = "router-input"  # h: what layer L's router multiplies, normed and scaled
TARGET = "score-before-bias"  # z: sqrt(softplus(logits)) of layer L + 1
NORMALISATION = "centred over tokens and experts"  # what all experts share is not predicted
MAX_ABOUT_BYTES = 1 << 20

_HEAD = struct.Struct("<8s5I")
_WORD = struct.Struct("<I")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class About:
    """What a predictor was fitted on.

    Attributes
    ----------
    artifact : ``artifact_identity`` of the one that ran
    state, target, normalisation : what h and z are
    ridge : strength of the penalty, as a share of the mean variance of h
    tokens : positions in the fit
    texts : a digest of the token ids of each trace in the fit
    source : fingerprint of the model's checkpoint; "" in version 2, or where it is not known
    """

    artifact: str
    state: str
    target: str
    normalisation: str
    ridge: float
    tokens: int
    texts: tuple[str, ...]
    source: str = ""


class Entry(NamedTuple):
    """What predicts one layer: A [rank, d], B [E, rank] and the offset [E]."""

    a: F32
    b: F32
    offset: F32


def predict_reference(x: F32, a: F32, b: F32, offset: F32) -> F32:
    """Scores [T, E] of ``x`` [T, d], from A transposed [d, rank] and B transposed [rank, E]."""
    scores: F32 = np.matmul(np.matmul(x, a), b)
    return np.add(scores, offset, out=scores)


@jit
def _predict_fast(x: F32, a: F32, b: F32, offset: F32) -> F32:
    # One thread, on purpose: those of a BLAS spin after a product and starve what reads experts.
    scores = np.empty((x.shape[0], b.shape[1]), dtype=np.float32)
    small = np.empty(a.shape[1], dtype=np.float32)
    whole = a.shape[0] // 4 * 4
    for t in range(x.shape[0]):
        small[:] = 0
        row = x[t]
        for i in range(
            0, whole, 4
        ):  # four at a time: sums are loaded and stored a quarter as often
            for k in range(small.shape[0]):
                small[k] += (row[i] * a[i, k] + row[i + 1] * a[i + 1, k]) + (
                    row[i + 2] * a[i + 2, k] + row[i + 3] * a[i + 3, k]
                )
        for i in range(whole, a.shape[0]):
            for k in range(small.shape[0]):
                small[k] += row[i] * a[i, k]
        out = scores[t]
        out[:] = offset
        for k in range(small.shape[0]):
            for e in range(out.shape[0]):
                out[e] += small[k] * b[k, e]
    return scores


predict = FastPath(predict_reference, _predict_fast)


class Adapter:
    """Predicts the scores of the next layer's router.

    Parameters
    ----------
    entries : by source layer; not changed
    about : None for a file of version 1
    path : named in errors
    """

    def __init__(
        self, entries: Mapping[int, Entry], about: About | None, path: object = None
    ) -> None:
        self.entries = {  # column by column, as prediction goes through them
            layer: Entry(np.asfortranarray(a), np.asfortranarray(b), np.ascontiguousarray(offset))
            for layer, (a, b, offset) in sorted(entries.items())
        }
        self.about = about
        self.path = path
        first = next(iter(self.entries.values()))
        self.rank, self.hidden = first.a.shape
        self.experts = len(first.offset)

    def predict(self, layer: int, x: F32) -> F32:
        """Scores before bias of layer ``layer + 1`` [T, E], from ``x`` [T, d] of ``layer``.

        ``layer`` is one of ``entries``.
        """
        entry = self.entries[layer]
        scores: F32 = predict(np.ascontiguousarray(x), entry.a.T, entry.b.T, entry.offset)
        return scores

    def truncated(self, rank: int) -> Adapter:
        """The predictor of a lower rank that is in this one."""
        if not 1 <= rank <= self.rank:
            raise AdapterError(
                "no predictor of this rank in the file",
                path=self.path,
                expected=f"1 to {self.rank}",
                found=rank,
                remedy="train one of a higher rank (ds4q adapter train --rank R)",
            )
        cut = {layer: Entry(a[:rank], b[:, :rank], c) for layer, (a, b, c) in self.entries.items()}
        return Adapter(cut, self.about, self.path)

    def check_model(self, config: ModelConfig, model: Identity) -> list[str]:
        """As ``check``, of a model's config. Entries for layers that are not run are no matter."""
        return self.check(model, config.hidden_size, config.n_routed_experts)

    def check(self, model: Identity, hidden: int, experts: int) -> list[str]:
        """Refuse a predictor of another model, whose artifact may be any of its checkpoint.

        Returns
        -------
        lines for the user: that the model could not be compared, since the file is of an earlier
        version, which names an artifact or nothing

        Raises
        ------
        AdapterError : other sizes, or another checkpoint
        """
        if (self.hidden, self.experts) != (hidden, experts):
            raise AdapterError(
                "expert predictor of another model",
                path=self.path,
                expected=f"hidden size {hidden}, {experts} experts",
                found=f"{self.hidden}, {self.experts}",
            )
        doubt = "so it may be of another model: train it again (ds4q adapter train)"
        if self.about is None:
            return [f"{self.path}: version 1 does not say what it was fitted on, {doubt}"]
        same = Identity(self.about.artifact, self.about.source).same_model(model)
        if same is False:
            raise AdapterError(
                "expert predictor of another model, of the same hidden size and expert count",
                path=self.path,
                expected=f"source fingerprint {model.source}",
                found=self.about.source,
                remedy="train one from a trace of this model (ds4q adapter train)",
            )
        if same is None:
            return [f"{self.path}: fitted on another artifact, and names no checkpoint, {doubt}"]
        return []

    def encode(self) -> bytes:
        """The bytes of a file of version 3.

        A and B are rounded to float16; entries that are float16 already are kept exactly.

        Raises ``AdapterError`` where ``about`` is None.
        """
        if self.about is None:
            raise AdapterError("a predictor that names no model is not written", path=self.path)
        about = canonical(asdict(self.about))
        counts = (len(self.entries), self.hidden, self.experts, self.rank)
        parts = [_HEAD.pack(MAGIC, VERSION, *counts), _WORD.pack(len(about)), about]
        for layer, (a, b, offset) in self.entries.items():
            parts.append(_WORD.pack(layer))
            parts += [a.astype("<f2").tobytes(), b.astype("<f2").tobytes()]
            parts.append(offset.astype("<f4").tobytes())
        body = b"".join(parts)
        return body + xxhash.xxh3_128(body).digest()


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read a predictor of version 1, 2 or 3.

    Raises
    ------
    AdapterError : not a predictor, of another version, of a length that its counts do not give,
        damaged, or of numbers that are not finite. Counts are checked against the file's length
        before anything is allocated.
    """
    with open(open_regular(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        version, n, d, e, rank = _read_head(file, path)
        about_raw = _read_about(file, nbytes, path) if version > 1 else b""
        entry_bytes = 4 + 2 * rank * (d + e) + (4 * e if version > 1 else 0)
        begin = file.tell()
        end = begin + n * entry_bytes
        expected = end + (_DIGEST_BYTES if version > 1 else 0)
        if nbytes != expected:
            raise AdapterError(
                "file is cut short" if nbytes < expected else "bytes follow the end",
                path=path,
                expected=f"{expected} bytes for {n} entries of rank {rank}, {d} to {e}",
                found=nbytes,
            )
        file.seek(0)
        body = file.read(expected)
    if len(body) != expected:
        raise AdapterError("file changed while it was read", path=path)
    if version > 1 and xxhash.xxh3_128(body[:end]).digest() != body[end:]:
        raise AdapterError("file is damaged: its digest differs", path=path)
    about = _parse_about(about_raw, version, path) if version > 1 else None
    entries: dict[int, Entry] = {}
    for at in range(begin, end, entry_bytes):
        (layer,) = _WORD.unpack_from(body, at)
        if entries and layer <= max(entries):
            raise AdapterError("source layers do not rise", path=path, found=layer)
        entries[layer] = _entry(body, at + 4, (d, e, rank), version, path)
    return Adapter(entries, about, path)


def _read_head(file: BinaryIO, path: object) -> tuple[int, ...]:
    raw = file.read(_HEAD.size)
    if raw[: len(MAGIC)] != MAGIC:
        raise AdapterError("not an expert predictor", path=path, found=raw[: len(MAGIC)])
    if len(raw) < _HEAD.size:
        raise AdapterError("cut short in its header", path=path)
    _, version, *counts = _HEAD.unpack(raw)
    if not 1 <= version <= VERSION:
        raise AdapterError(
            "expert predictor of another version",
            path=path,
            expected=f"1 to {VERSION}",
            found=version,
        )
    if 0 in counts:
        raise AdapterError("a count of zero", path=path, found=counts)
    return version, *counts


def _read_about(file: BinaryIO, nbytes: int, path: object) -> bytes:
    raw = file.read(_WORD.size)
    (length,) = _WORD.unpack(raw) if len(raw) == _WORD.size else (0,)
    if not 0 < length <= min(MAX_ABOUT_BYTES, nbytes - file.tell()):
        raise AdapterError("length of its description out of bounds", path=path, found=length)
    return file.read(length)


def _parse_about(raw: bytes, version: int, path: object) -> About:
    try:
        document: dict[str, Any] = parse_metadata(raw, path)
        texts = document.pop("texts")
        if ("source" in document) != (version == VERSION):
            raise KeyError("source")
        about = About(texts=tuple(texts), **document)
    except (MetadataError, KeyError, TypeError) as error:
        raise AdapterError("description cannot be read", path=path, found=error) from None
    words = (
        about.artifact,
        about.state,
        about.target,
        about.normalisation,
        about.source,
        *about.texts,
    )
    if not all(type(word) is str for word in words):
        raise AdapterError("description cannot be read", path=path, found=words)
    made_for = (about.state, about.target, about.normalisation)
    if made_for != (STATE, TARGET, NORMALISATION):
        raise AdapterError(
            "expert predictor for another state",
            path=path,
            expected=(STATE, TARGET, NORMALISATION),
            found=made_for,
        )
    return about


def _entry(body: bytes, at: int, sizes: tuple[int, int, int], version: int, path: object) -> Entry:
    d, e, rank = sizes
    a = np.frombuffer(body, "<f2", rank * d, at).reshape(rank, d).astype(np.float32)
    at += 2 * rank * d
    b = np.frombuffer(body, "<f2", e * rank, at).reshape(e, rank).astype(np.float32)
    at += 2 * e * rank
    offset = np.zeros(e, np.float32)
    if version > 1:
        offset = np.frombuffer(body, "<f4", e, at).astype(np.float32)
    for part in (a, b, offset):
        if not np.isfinite(part).all():
            raise AdapterError("a number that is not finite", path=path)
    return Entry(a, b, offset)
