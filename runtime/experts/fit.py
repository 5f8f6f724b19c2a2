"""Owns fitting an expert predictor to recorded router states. Knows no file format of its own.

For each layer L the scores of layer L + 1 (before bias) are regressed on the input of layer L's
router, both centred: normal equations in float64 with a ridge. What all experts share is left out,
since it tells none from another. Then the rank is cut by the singular values of the fitted scores:
that loses least of what tells experts apart, which a cut by the singular values of the weights
would not (on ds4-tiny, rank 8 of 16 and M = K = 4: recall 60.8 against 58.3 %).
d hidden size, E experts, T tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ds4q.runtime.errors import AdapterError, TraceError
from ds4q.runtime.experts.adapter import (
    NORMALISATION,
    STATE,
    TARGET,
    About,
    Adapter,
    Entry,
)
from ds4q.runtime.experts.header import Header
from ds4q.runtime.experts.trace import RouterRecord, StatesRecord, Trace, read_trace

F64 = npt.NDArray[np.float64]

RIDGE = 1e-3
LEAST_RIDGE, MOST_RIDGE = 1e-9, 1e6  # less cannot be told from none in float64
RANK = 128
MAX_SUMS_BYTES = 1 << 30  # of the sums of layers that are fitted in one pass over the traces
_ROWS = 256  # a product of so many rows at a time costs a fraction of one by one


class Pair(NamedTuple):
    """The states of a layer and those of the next, of the same tokens."""

    source: StatesRecord
    target: StatesRecord


def sources(header: Header) -> range:
    """Layers whose next chooses by score."""
    return range(max(header.hash_layers - 1, 0), header.layers - 1)


def pairs(trace: Trace, routers: dict[int, RouterRecord] | None = None) -> Iterator[Pair]:
    """Neighbouring layers' states, as recorded; ``routers`` is filled with those of the trace.

    Raises
    ------
    TraceError : the trace holds no states, not those of both layers, or those of one rank
    """
    header, wanted = trace.header, sources(trace.header)
    if header.held < header.experts:
        raise TraceError(
            "the trace is of one rank, whose states are not the model's",
            path=trace.path,
            expected=f"of a run that held all {header.experts} experts",
            found=f"{header.owned[0]} to {header.owned[1] - 1}",
            remedy="record it without --expert-owner",
        )
    last: StatesRecord | None = None
    for record in trace:
        if isinstance(record, RouterRecord) and routers is not None:
            routers[record.layer] = record
        if not isinstance(record, StatesRecord):
            continue
        if record.layer - 1 in wanted:
            place = (record.layer - 1, record.sequence, record.token, len(record.ids))
            found = None if last is None else (last.layer, last.sequence, last.token, len(last.ids))
            if last is None or found != place:
                raise TraceError(
                    "states of a layer are missing",
                    path=trace.path,
                    expected=f"layer, sequence, first token, tokens {place}",
                    found=found,
                )
            yield Pair(last, record)
        last = record
    if last is None:
        raise TraceError(
            "the trace holds no router states",
            path=trace.path,
            remedy="record them: ds4q run --trace FILE --trace-states",
        )


class Texts:
    """A digest of the token ids that a trace ran over, to tell a text that was in a fit."""

    def __init__(self, header: Header) -> None:
        self._first = max(header.hash_layers - 1, 0)
        self._hasher = xxhash.xxh3_128()
        self.tokens = 0

    def add(self, pair: Pair) -> None:
        """Count the tokens of a pair, once for all layers."""
        if pair.source.layer == self._first:
            self._hasher.update(pair.source.tokens.tobytes())
            self.tokens += len(pair.source.tokens)

    def digest(self) -> str:
        """xxh3-128 (hex) of the ids so far."""
        return self._hasher.hexdigest()


@dataclass(slots=True)
class _Waiting:
    """Rows that are not in the sums yet."""

    hidden: list[npt.NDArray[np.float16]]
    scores: list[npt.NDArray[np.float32]]
    rows: int = 0


class Sums:
    """The normal equations of one layer: means and products of h [T, d] and z [T, E]."""

    def __init__(self, d: int, e: int) -> None:
        self.rows = 0
        self._h, self._z = np.zeros(d), np.zeros(e)
        self._hh, self._hz = np.zeros((d, d)), np.zeros((d, e))
        self._waiting = _Waiting([], [])

    @staticmethod
    def nbytes(d: int, e: int) -> int:
        """Bytes of the sums of one layer."""
        return 8 * (d + e) * (d + 1)

    def add(self, pair: Pair) -> None:
        """Count the rows of a pair."""
        waiting = self._waiting
        waiting.hidden.append(pair.source.hidden)
        waiting.scores.append(pair.target.scores)
        waiting.rows += len(pair.source.hidden)
        if waiting.rows >= _ROWS:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, _Waiting([], [])
        if not waiting.rows:
            return
        h = np.concatenate(waiting.hidden).astype(np.float64)
        z = np.concatenate(waiting.scores).astype(np.float64)
        self.rows += len(h)
        self._h += h.sum(axis=0)
        self._z += z.sum(axis=0)
        self._hh += h.T @ h
        self._hz += h.T @ z

    def solve(self, ridge: float, rank: int) -> Entry:
        """The entry of ``rank`` that explains most, rounded as the file keeps it.

        Raises
        ------
        AdapterError : states that are not finite, or that are all alike
        """
        self._flush()
        h, z = self._h / self.rows, self._z / self.rows
        covariance = self._hh / self.rows - np.outer(h, h)
        mean = float(covariance.trace()) / len(h)
        if not np.isfinite(mean) or not np.isfinite(z).all() or mean <= 0:
            raise AdapterError("states that nothing can be fitted to", found=f"variance {mean}")
        both = self._hz / self.rows - np.outer(h, z)
        stiff = covariance.copy()
        stiff.flat[:: len(h) + 1] += ridge * mean
        weights = np.linalg.solve(stiff, both)  # [d, E]
        weights -= weights.mean(axis=1, keepdims=True)
        _, vectors = np.linalg.eigh(weights.T @ covariance @ weights)  # of the fitted scores
        b = vectors[:, ::-1][:, :rank]
        a = (weights @ b).T
        # float16 keeps most where both factors of a component are of one size
        size = np.sqrt(abs(b).max(axis=0) / np.maximum(abs(a).max(axis=1), np.finfo(float).tiny))
        a = (a * size[:, None]).astype(np.float16).astype(np.float64)
        b = (b / size).astype(np.float16).astype(np.float64)
        if not np.isfinite(a).all() or not np.isfinite(b).all():
            raise AdapterError("a fit that float16 cannot hold", remedy="train with more text")
        offset = z - b @ (a @ h)
        return Entry(*(part.astype(np.float32) for part in (a, b, offset)))


def train(
    traces: Sequence[str | os.PathLike[str]],
    *,
    rank: int | None = RANK,
    ridge: float = RIDGE,
    sums_bytes: int = MAX_SUMS_BYTES,
    advance: Callable[[int], None] = lambda traces: None,
) -> Adapter:
    """Fit a predictor to the states of traces.

    Parameters
    ----------
    rank : most that is kept; None keeps all that there is, which is no more than E
    ridge : strength of the penalty, as a share of the mean variance of h
    sums_bytes : memory of the sums; the traces are read as often as this makes necessary, and one
        layer is always done
    advance : hears of each trace that was read for the last time

    Raises
    ------
    TraceError : a trace cannot be read, holds no states, or is of one rank
    AdapterError : traces of different models or of one text, states that nothing can be fitted to,
        or a ridge or rank out of range
    """
    if not LEAST_RIDGE <= ridge <= MOST_RIDGE or (rank is not None and rank < 1):
        raise AdapterError(
            "ridge or rank out of range",
            expected=f"ridge {LEAST_RIDGE:g} to {MOST_RIDGE:g}, rank 1 or more",
            found=f"{ridge}, {rank}",
            remedy="",
        )
    opened = [read_trace(path) for path in traces]
    header = opened[0].header
    for other in opened[1:]:
        if not header.model.same_model(other.header.model):
            raise AdapterError(
                "traces of different models",
                path=other.path,
                expected=f"artifact {header.artifact}",
                found=other.header.artifact,
                remedy="give traces of one artifact, or of artifacts of one checkpoint",
            )
    layers = sources(header)
    if not layers:
        raise AdapterError("a model without two layers that choose by score", path=opened[0].path)
    most = min(header.hidden, header.experts)
    rank = most if rank is None else min(rank, most)
    entries: dict[int, Entry] = {}
    at_once = max(1, sums_bytes // Sums.nbytes(header.hidden, header.experts))
    texts: dict[str, Texts] = {}
    for start in range(0, len(layers), at_once):
        group = {layer: Sums(header.hidden, header.experts) for layer in layers[start:][:at_once]}
        texts = {}
        for trace in opened:
            text = _add_all(trace, group)
            digest = text.digest()
            if digest in texts:
                raise AdapterError(
                    "the text of another of these traces, which would count twice",
                    path=trace.path,
                    found=f"the tokens of {opened[list(texts).index(digest)].path}",
                    remedy="leave one of them out",
                )
            texts[digest] = text
            advance(start + at_once >= len(layers))
        for layer in list(group):
            entries[layer] = group.pop(layer).solve(ridge, rank)
    about = About(
        artifact=header.artifact,
        state=STATE,
        target=TARGET,
        normalisation=NORMALISATION,
        ridge=ridge,
        tokens=sum(text.tokens for text in texts.values()),
        texts=tuple(texts),
        source=header.source,
    )
    return Adapter(entries, about)


def _add_all(trace: Trace, group: dict[int, Sums]) -> Texts:
    text = Texts(trace.header)
    for pair in pairs(trace):
        text.add(pair)
        if pair.source.layer in group:
            group[pair.source.layer].add(pair)
    return text
