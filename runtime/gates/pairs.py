"""Loading an artifact again and again, each load in a pair with what it is measured against."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ds4q.runtime.gates import loading, pagecache, yardstick
from ds4q.runtime.gates.baseline import NEW_TOKENS
from ds4q.runtime.gates.loading import I64, Load
from ds4q.runtime.gates.pair import Surroundings
from ds4q.runtime.gates.quotient import Interval, Outcome, Series

START_S = 60.0  # that a process gets to start, whatever the limit of a load is
PROMPTS_S = 3600.0  # and to continue the prompts of a baseline


@dataclass(slots=True)
class Arm:
    """The loads of one kind.

    Attributes
    ----------
    loads : all of them; the first one, which may compile kernels, is not timed
    load_s, read_s, work : of each pair: the load, the plain read of its bytes, the fixed work
    outcome : None while it is not judged
    """

    name: str
    cache: dict[str, Any] | None
    loads: list[Load] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    work: list[yardstick.Work] = field(default_factory=list)
    outcome: Outcome | None = None
    intervals: dict[str, Interval] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Median of the loads."""
        return statistics.median(self.load_s)

    @property
    def ratios(self) -> list[float]:
        """Load over plain read, of each pair."""
        return [load / read for load, read in zip(self.load_s, self.read_s, strict=True)]

    @property
    def share(self) -> float:
        """Median share of the processors that the fixed work got."""
        return statistics.median(work.share for work in self.work)

    @property
    def reads(self) -> I64:
        """Of the first load: the others have to equal it."""
        return self.loads[0].reads

    @property
    def series(self) -> Series:
        """What a baseline keeps of the times."""
        one_s, all_s = ([getattr(work, name) for work in self.work] for name in ("one_s", "all_s"))
        return Series(self.load_s, self.read_s, one_s, all_s)

    def figures(self) -> dict[str, Any]:
        """Seconds, what was read, and the verdict where there is one."""
        found: dict[str, Any] = {
            "ratio": statistics.median(self.ratios),
            "seconds": self.seconds,
            "seconds_min": min(self.load_s),
            "seconds_max": max(self.load_s),
            "plain_s": statistics.median(self.read_s),
            "processor_share": self.share,
            "first_token_s": statistics.median(load.first_token_s for load in self.loads),
            "reads": len(self.reads),
            "bytes": int(self.reads[:, 1].sum()),
            "pairs": len(self.load_s),
        }
        if self.outcome is not None:
            bounds = {name: each._asdict() for name, each in self.intervals.items()}
            found |= {"outcome": self.outcome, "slower_by": bounds}
        return found


class Bench:
    """Loads an artifact, in pairs with what its loads are measured against.

    Attributes
    ----------
    cold : whether the file was never in the page cache before a load or a plain read
    """

    def __init__(self, path: Path, where: Surroundings, timeout_s: float) -> None:
        self._path = path
        self._where = where
        self.cold = pagecache.drop(path)
        whole = np.array([[0, path.stat().st_size, 0]], np.int64)
        self._limit_s = START_S + max(2 * timeout_s, 10 * yardstick.plain_read(path, whole))

    def first(
        self, arms: Sequence[Arm], prompts: Mapping[str, Sequence[int]]
    ) -> dict[str, list[int]]:
        """Load each arm once, untimed; returns the ids that continue ``prompts`` in "off"."""
        ids: dict[str, list[int]] = {}
        with self._where.progress("load-time: first loads", len(arms), unit="loads") as advance:
            for arm in arms:
                wanted = list(prompts.values()) if arm.cache is None else []
                self._load(arm, wanted)
                if wanted:
                    ids = dict(zip(prompts, arm.loads[-1].ids, strict=True))
                advance(1)
        return ids

    def pairs(self, arms: Sequence[Arm], count: int) -> None:
        """So many pairs of each arm, in turn; which half comes first alternates."""
        total = count * len(arms)
        with self._where.progress("load-time", total, unit="loads") as advance:
            for number in range(count):
                for arm in arms:
                    steps = [self._load_timed, self._work, self._read]
                    for step in steps if number % 2 == 0 else reversed(steps):
                        step(arm)
                    advance(1)

    def _load_timed(self, arm: Arm) -> None:
        self._load(arm)
        arm.load_s.append(arm.loads[-1].seconds)

    def _work(self, arm: Arm) -> None:
        arm.work.append(yardstick.fixed_work())

    def _read(self, arm: Arm) -> None:
        seconds, cold = yardstick.timed_read(self._path, arm.reads)
        arm.read_s.append(seconds)
        self.cold &= cold

    def _load(self, arm: Arm, prompts: Sequence[Sequence[int]] = ()) -> None:
        self.cold &= pagecache.drop(self._path)
        load = loading.measure(
            self._path,
            threads=self._where.threads,
            device=self._where.device,
            cache=arm.cache,
            limit_s=self._limit_s + (PROMPTS_S if prompts else 0),
            prompts=prompts,
            new_tokens=NEW_TOKENS,
        )
        arm.loads.append(load)
