"""Owns the counts of a pager and what a trace hears of it. Decides nothing, and does not lock.

A dispatch is entered when it is planned, in the order in which policies are asked. So a replay of
the trace meets what the run met, also where several threads asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt

from ds4q.runtime.experts.catalogue import Key
from ds4q.runtime.experts.reading import Purpose
from ds4q.runtime.experts.store import Phase
from ds4q.runtime.experts.trace import Outcome, Recorder

_NAMES = {  # of what a distinct expert can meet
    Outcome.HIT: "hits",
    Outcome.WARM: "warm_hits",
    Outcome.PREFETCHED: "prefetched",
    Outcome.COMPULSORY: "compulsory",
    Outcome.MISS: "misses",
}


class Dispatch(NamedTuple):
    """What a trace tells of a dispatch beside its experts; ``ids`` [T, K] are all of its bands'."""

    number: int
    sequence: int
    token: int  # position of the first
    ids: npt.ArrayLike


@dataclass(slots=True)
class Demand:
    """Counts of one phase; ``met`` by Outcome, and summed the distinct experts asked for."""

    accesses: int = 0
    met: list[int] = field(default_factory=lambda: [0] * len(Outcome))
    evictions: int = 0
    bytes: int = 0
    failed: int = 0  # dispatches
    wait_s: float = 0.0

    def told(self) -> dict[str, Any]:
        """By name."""
        return {
            "accesses": self.accesses,
            "distinct": sum(self.met),
            **{name: self.met[outcome] for outcome, name in _NAMES.items()},
            "evictions": self.evictions,
            "bytes": self.bytes,
            "failed": self.failed,
            "wait_s": self.wait_s,
        }


@dataclass(slots=True)
class Ahead:
    """What became of reads ahead of their use: issued = used + dropped + those still unused."""

    issued: int = 0
    used: int = 0
    late: int = 0  # of those used: still being read when asked for
    dropped: int = 0  # never used: overwritten, or failed
    failed: int = 0
    bytes: int = 0
    bytes_used: int = 0


class Ledger:
    """The counts of all layers.

    Attributes
    ----------
    demands : by phase
    ahead : by purpose
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self.demands: dict[Phase, Demand] = {"prefill": Demand(), "decode": Demand()}
        self.ahead: dict[Purpose, Ahead] = {p: Ahead() for p in Purpose if p != Purpose.DEMAND}
        self._recorder = recorder
        self._changes: list[tuple[Key, bool]] = []  # that the trace has not heard of
        self._told = (0, 0, 0)  # of reads ahead, by the last record

    def enter(
        self,
        layer: int,
        phase: Phase,
        outcomes: Mapping[int, Outcome],
        *,
        accesses: int,
        evictions: int,
        nbytes: int,
        dispatch: Dispatch | None,
    ) -> None:
        """Count a band, and record it where it is described."""
        demand = self.demands[phase]
        demand.accesses += accesses
        demand.evictions += evictions
        demand.bytes += nbytes
        for outcome in outcomes.values():
            demand.met[outcome] += 1
        if self._recorder is not None and dispatch is not None:
            self._record(self._recorder, layer, phase, outcomes, nbytes, dispatch)

    @property
    def demanded(self) -> bool:
        """Whether anything was asked for yet."""
        return any(demand.accesses for demand in self.demands.values())

    def changed(self, key: Key, came: bool) -> None:
        """``key`` became resident by the warm start, or is no longer since its read failed."""
        if self._recorder is not None:
            self._changes.append((key, came))

    def told(self) -> dict[str, Any]:
        """All counts, by phase and by purpose; ``prefetch``: all but the warm start's."""
        ahead = {purpose.name.lower(): asdict(count) for purpose, count in self.ahead.items()}
        certain, guesses = ahead["certain"], ahead["speculative"]
        return {
            **{phase: demand.told() for phase, demand in self.demands.items()},
            "prefetch": {name: certain[name] + guesses[name] for name in certain},
            **ahead,
        }

    def _record(
        self,
        recorder: Recorder,
        layer: int,
        phase: Phase,
        outcomes: Mapping[int, Outcome],
        nbytes: int,
        dispatch: Dispatch,
    ) -> None:
        changes, self._changes = self._changes, []
        for key, came in changes:
            (recorder.warm if came else recorder.gone)(*key)
        certain, guesses = self.ahead[Purpose.CERTAIN], self.ahead[Purpose.SPECULATIVE]
        told = (
            certain.issued + guesses.issued,
            certain.used + guesses.used,
            certain.dropped + guesses.dropped,
        )
        issued, used, dropped = (new - old for new, old in zip(told, self._told, strict=True))
        self._told = told
        recorder.dispatch(
            dispatch.number,
            dispatch.sequence,
            phase,
            dispatch.token,
            layer,
            dispatch.ids,
            list(outcomes),
            list(outcomes.values()),
            issued=issued,
            used=used,
            dropped=dropped,
            nbytes=nbytes,
        )
