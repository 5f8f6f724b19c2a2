"""Owns how well experts can be predicted: a fitted predictor beside three that need no fit.

Everything is judged on recorded states, layer by layer and token by token, by what the router then
chose. No cache is in play: what a prediction saves also depends on what is resident anyway.
T tokens, K chosen, M predicted, E experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ds4q.runtime.errors import AdapterError, TraceError
from ds4q.runtime.experts.adapter import Adapter
from ds4q.runtime.experts.fit import Pair, Texts, pairs, sources
from ds4q.runtime.experts.predict import best
from ds4q.runtime.experts.trace import RouterRecord, Trace
from ds4q.runtime.model.moe import scores

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

RANKS = (8, 16, 32, 64, 128)
LAST_TOKEN, TOKEN_PROFILE, NEXT_GATE = "last token", "token profile", "gate(L+1) on h(L)"


@dataclass(frozen=True, slots=True)
class Figures:
    """A predictor that names ``m`` experts for each layer and token.

    Attributes
    ----------
    recall : share of the chosen experts that were named
    covers, wasted, late : experts per layer and token: chosen and named, named only, chosen only
    fetches : named or chosen, over what is chosen
    """

    m: int
    recall: float
    covers: float
    wasted: float
    late: float
    fetches: float


@dataclass(frozen=True, slots=True)
class Predictor:
    """What one predictor is worth. ``rank`` is None for those that were not fitted."""

    name: str
    rank: int | None
    top: tuple[Figures, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Predictors on one trace.

    Attributes
    ----------
    held_out : the text was not in the fit; None where the predictor does not say what was
    tokens, layers : positions, and layers predicted at each
    top_k : experts that a router chooses
    """

    held_out: bool | None
    tokens: int
    layers: int
    top_k: int
    predictors: tuple[Predictor, ...]


def default_tops(top_k: int, experts: int) -> tuple[int, ...]:
    """M as in the published table for K = 6 (4, 6, 8, 12), in proportion."""
    wanted = (-(-2 * top_k // 3), top_k, -(-4 * top_k // 3), 2 * top_k)
    return tuple(sorted({min(m, experts) for m in wanted}))


def evaluate(adapter: Adapter, trace: Trace, *, ranks: Sequence[int] | None = None) -> Evaluation:
    """Judge a predictor at several ranks, and those that need no fit, on a trace's states.

    Parameters
    ----------
    ranks : None takes 8 to 128 and the predictor's own, as far as it has them

    Raises
    ------
    AdapterError : a predictor of another model, or of a lower rank than asked for
    TraceError : the trace cannot be read, or holds no states
    """
    header = trace.header
    adapter.check(header.model, header.hidden, header.experts)
    if missing := [layer for layer in sources(header) if layer not in adapter.entries]:
        raise AdapterError("expert predictor lacks layers", path=adapter.path, found=missing)
    if ranks is None:
        ranks = [*(rank for rank in RANKS if rank < adapter.rank), adapter.rank]
    cut = [adapter.truncated(rank) for rank in ranks]
    tops = default_tops(header.top_k, header.experts)
    tallies = [_Tally(tops) for _ in cut]
    free = {LAST_TOKEN: _Tally(tops), TOKEN_PROFILE: _Tally(tops), NEXT_GATE: _Tally(tops)}
    recent, profile = _Recency(header.experts), _Profile(header.experts)
    routers: dict[int, RouterRecord] = {}
    text, layers = Texts(header), set()
    for pair in pairs(trace, routers):
        text.add(pair)
        layer, ids = pair.target.layer, pair.target.ids.astype(np.int64)
        layers.add(layer)
        router = routers.get(layer)
        if router is None:
            raise TraceError("the trace lacks a router", path=trace.path, found=f"layer {layer}")
        x = pair.source.hidden.astype(np.float32)
        for tally, part in zip(tallies, cut, strict=True):
            tally.add(best(np.add(part.predict(layer - 1, x), router.bias), tops[-1]), ids)
        gate = scores(x @ router.gate.T) + router.bias
        free[NEXT_GATE].add(best(gate, tops[-1]), ids)
        free[LAST_TOKEN].add(recent.predict(pair, tops[-1]), ids)
        free[TOKEN_PROFILE].add(profile.predict(pair, tops[-1]), ids)
    fitted = [
        Predictor("adapter", part.rank, tally.figures())
        for part, tally in zip(cut, tallies, strict=True)
    ]
    others = [Predictor(name, None, tally.figures()) for name, tally in free.items()]
    held_out = None if adapter.about is None else text.digest() not in adapter.about.texts
    return Evaluation(held_out, text.tokens, len(layers), header.top_k, (*fitted, *others))


@dataclass(slots=True)
class _Tally:
    """Hits of the first M of each prediction."""

    tops: Iterable[int]
    asked: int = 0
    rows: int = 0
    hits: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, named: I64, ids: I64) -> None:
        self.rows += len(ids)
        self.asked += ids.size
        chosen = (named[:, :, None] == ids[:, None, :]).any(axis=2).sum(axis=0)  # by place
        for m in self.tops:
            self.hits[m] += int(chosen[:m].sum())

    def figures(self) -> tuple[Figures, ...]:
        k, found = self.asked / self.rows, []
        for m in self.tops:
            covers = self.hits[m] / self.rows
            fetches = (m + k - covers) / k
            found.append(Figures(m, covers / k, covers, m - covers, k - covers, fetches))
        return tuple(found)


class _Recency:
    """The experts that the layer used last: those of the token before, then of the one before."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._seen: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    def predict(self, pair: Pair, m: int) -> I64:
        target = pair.target
        sequence, used = self._seen.get(target.layer, (-1, np.zeros(0, np.int64)))
        if sequence != target.sequence:
            used = np.full(self._experts, -1, np.int64)
            self._seen[target.layer] = (target.sequence, used)
        named = np.empty((len(target.ids), m), np.int64)
        k = target.ids.shape[1]
        for row, ids in enumerate(target.ids):
            named[row] = np.argsort(-used, kind="stable")[:m]
            used[ids] = (target.token + row + 1) * k - np.arange(k)  # the best first
        return named


class _Profile:
    """What the layer chose for this token before, then what it chose for any."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._by_token: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        self._all: dict[int, npt.NDArray[np.int64]] = {}

    def predict(self, pair: Pair, m: int) -> I64:
        target = pair.target
        nothing = np.zeros(self._experts, np.int64)
        every = self._all.setdefault(target.layer, nothing.copy())
        named = np.empty((len(target.ids), m), np.int64)
        for row, (token, ids) in enumerate(zip(target.tokens.tolist(), target.ids, strict=True)):
            counts = self._by_token.setdefault((target.layer, token), nothing.copy())
            named[row] = np.lexsort((-every, -counts))[:m]
            counts[ids] += 1
            every[ids] += 1
        return named
