"""Stands in for the loads of the load-time gate: what they read, and how long they take."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ds4q.artifact.hfq import Reader
from ds4q.runtime.gates import yardstick
from ds4q.runtime.gates.baseline import NEW_TOKENS
from ds4q.runtime.gates.loading import I64, Load

EXPERT_BYTES = 192 * 38912  # 4 layers of 16 experts of three matrices


def reads_of(path: Path, *, experts: bool = True) -> list[list[int]]:
    """One read of the front, and one of each tensor."""
    with Reader(path) as reader:
        entries = [e for e in reader.tensors.values() if experts or ".experts." not in e.name]
        first = min(entry.offset for entry in reader.tensors.values())
        return [[0, first, 0], *([entry.offset, entry.nbytes, 0] for entry in entries)]


@dataclass
class Loads:
    """Stands in for the processes: what they read, and how long they and the disk take."""

    path: Path
    reads: dict[str, list[list[int]]]
    seconds: dict[str, float] = field(default_factory=lambda: {"off": 3, "all": 3, "paged": 1.15})
    plain_s: dict[str, float] = field(default_factory=lambda: {"off": 2, "all": 2, "paged": 1})
    later: dict[str, list[list[int]]] = field(default_factory=dict)
    paged: dict[str, Any] = field(default_factory=lambda: {"paged": {"slots": 4}})
    cold: bool = True
    spread: float = 0  # of loads and plain reads
    processor: float = 1
    share: float = 1
    ids: list[list[int]] = field(default_factory=lambda: [[1] * NEW_TOKENS, [2] * NEW_TOKENS])
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    draws: np.random.Generator = field(default_factory=lambda: np.random.default_rng(4))

    def noisy(self, seconds: float) -> float:
        return float(seconds * np.exp(self.draws.normal(0, self.spread)))

    def measure(self, path: Path, **options: Any) -> Load:
        cache = options["cache"]
        name = (
            "off" if cache is None else "all" if cache.get("budget", 0) >= EXPERT_BYTES else "paged"
        )
        self.asked.append((name, options))
        self.order.append(name)
        seconds = self.noisy(self.seconds[name])
        return Load(
            seconds,
            seconds / 2,
            seconds + 1,
            as_reads(self.reads[name]),
            as_reads(self.later.get(name, [])),
            self.paged.get(name),
            self.ids if options["prompts"] else [],
        )

    def timed_read(self, path: Path, reads: I64) -> tuple[float, bool]:
        """Of what one of the arms reads."""
        name = next(name for name in self.reads if self.reads[name] == reads.tolist())
        self.order.append("plain")
        return self.noisy(self.plain_s[name]), self.cold

    def fixed_work(self) -> yardstick.Work:
        self.order.append("work")
        return yardstick.Work(self.noisy(0.1) * self.processor, 0.2 * self.processor, self.share)

    def drop(self, path: Path) -> bool:
        return self.cold


def as_reads(rows: list[list[int]]) -> I64:
    return np.array(rows, np.int64).reshape(-1, 3)


def lines(check: Any) -> list[str]:
    return [failure.line() for failure in check.failures]
