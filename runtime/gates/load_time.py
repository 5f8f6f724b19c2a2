"""Owns the load-time gate: what loading an artifact costs, with paging of experts and without it.

An artifact is loaded with all experts in memory, with a cache that holds them all, and with a small
one; each load in a process of its own (``loading.py``), the file driven out of the page cache
before it, all of them in turn, since disks and neighbours drift. Beside each, a plain parallel read
of the same bytes tells what the disk can. What a load reads is counted and has to be right to the
byte; seconds are judged where reading takes long enough to be told from starting.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ds4q.artifact.hfq import Reader, pread_all
from ds4q.artifact.report import Check, Failure
from ds4q.runtime.errors import GateError
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.experts.profile import read_profile
from ds4q.runtime.experts.trace import artifact_identity
from ds4q.runtime.gates import loading
from ds4q.runtime.gates.loading import I64, Load
from ds4q.runtime.gates.pagecache import drop
from ds4q.runtime.gates.pair import Measurement, Model, Surroundings
from ds4q.runtime.gates.prompts import read_small
from ds4q.runtime.source import Tensors

RUNS = 7
MAX_RATIO = 1.25
TIMEOUT_S = 120.0
PAGED_RATIO = 1.2  # of a paged load to a plain read of what it reads
SAME_RATIO = 1.05  # of a load with a cache that holds everything to one without a cache
JUDGED_S = 1.0  # reading takes less: starting decides, which no ratio to a read can judge
START_S = 60.0  # a process that is given no time to start would tell nothing
LANES = 4
PIECE_BYTES = 16 << 20
PAGE_BYTES = 4096
Mask = npt.NDArray[np.bool_]
FORMAT = "ds4q load-time baseline 1"
MAX_BASELINE_BYTES = 1 << 20

_EXPERT = re.compile(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.w[123]\.weight")


@dataclass(frozen=True, slots=True)
class Front:
    """What is known of an artifact before it is loaded.

    Attributes
    ----------
    identity : of its header, metadata and index
    spans : i64 [N, 2] begin and end of every matrix of a routed expert, in the file's order
    keys : i64 [N, 2] layer and expert of each
    """

    identity: str
    spans: I64
    keys: I64

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Front:
        """Of the artifact ``path``."""
        with Reader(path) as reader:
            named = ((_EXPERT.fullmatch(name), entry) for name, entry in reader.tensors.items())
            rows = sorted(
                (entry.offset, entry.offset + entry.nbytes, *map(int, match.groups()))
                for match, entry in named
                if match is not None
            )
            found = np.array(rows, np.int64).reshape(-1, 4)
            return cls(artifact_identity(reader), found[:, :2], found[:, 2:])

    @property
    def expert_bytes(self) -> int:
        """Of all routed experts."""
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    def of_experts(self, reads: I64, but: Collection[tuple[int, int]] = ()) -> Mask:
        """Which of ``reads`` [N, 3] touch an expert other than ``but``, pairs of layer and id.

        One past the page cache is of whole pages: what it has in its first and its last one may
        belong to a neighbour.
        """
        other = [tuple(key) not in but for key in self.keys.tolist()]
        before = np.concatenate(([0], np.cumsum(other)))
        margin = np.where(reads[:, 2] != 0, PAGE_BYTES, 0)
        first = np.searchsorted(self.spans[:, 1], reads[:, 0] + margin, "right")
        behind = np.searchsorted(self.spans[:, 0], reads[:, 0] + reads[:, 1] - margin, "left")
        found: Mask = before[np.maximum(first, behind)] > before[first]
        return found


@dataclass(slots=True)
class Arm:
    """The loads of one kind, and the plain reads of what they read."""

    name: str
    cache: dict[str, Any] | None
    loads: list[Load] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median of the loads."""
        return statistics.median(load.seconds for load in self.loads)

    @property
    def ratio(self) -> float:
        """Median of load over plain read, of the same turn."""
        pairs = zip(self.loads, self.plain_s, strict=True)
        return statistics.median(load.seconds / plain for load, plain in pairs)

    @property
    def reads(self) -> I64:
        """Of the first load: the others have to equal it."""
        return self.loads[0].reads

    def figures(self) -> dict[str, Any]:
        """Seconds, and what was read."""
        return {
            "ratio": self.ratio,
            "seconds": self.seconds,
            "seconds_min": min(load.seconds for load in self.loads),
            "seconds_max": max(load.seconds for load in self.loads),
            "plain_s": statistics.median(self.plain_s),
            "first_token_s": statistics.median(load.first_token_s for load in self.loads),
            "reads": len(self.reads),
            "bytes": int(self.reads[:, 1].sum()),
        }


@dataclass(frozen=True, slots=True)
class LoadTime:
    """The gate ``load-time``: passes if loads read what they must, and as fast as the disk can.

    Attributes
    ----------
    cache : bytes of the small cache; None takes the smallest, top-k slots a layer
    profile : warm-start profile of the small cache: its experts may be read while loading
    baseline : JSON of an earlier ``write_baseline``; ratios may exceed its own ``max_ratio`` times
    write_baseline : where to keep the ratios of this run, if it passes
    max_ratio : times the ratio of the baseline, 1.25 if None; without a baseline, times the plain
        read, and not judged if None
    timeout_s : most seconds of a load, where the disk can read the file in that time
    runs : loads of each kind
    """

    name: ClassVar[str] = "load-time"
    cache: int | None = None
    profile: str | os.PathLike[str] | None = None
    baseline: str | os.PathLike[str] | None = None
    write_baseline: str | os.PathLike[str] | None = None
    max_ratio: float | None = None
    timeout_s: float = TIMEOUT_S
    runs: int = RUNS

    def prepare(self, path: str | os.PathLike[str], where: Surroundings) -> Measurement:
        """What loads the artifact ``path`` again and again; see ``Gate``."""
        model = Model.read(path)
        front = Front.read(path)
        warm = self._warm(model, front)
        limits = None
        if self.baseline is not None:
            limits = _baseline(self.baseline)
            self._check_same(limits, {"artifact": front.identity, "device": where.device})
        caches = self._caches(model)
        model.check_cache(loading.options_of(caches["paged"]), where)
        model.check_cache(loading.options_of(caches["all"]), where, holds_all=True)
        return partial(self._run, model, front, warm, limits, caches, where)

    def _run(
        self,
        model: Model,
        front: Front,
        warm: Sequence[Sequence[int]],
        limits: dict[str, Any] | None,
        caches: Mapping[str, dict[str, Any]],
        where: Surroundings,
        check: Check,
    ) -> None:
        arms = [Arm(name, caches.get(name)) for name in ("off", "all", "paged")]
        cold = self._measure(arms, model.path, where)
        off = arms[0].figures()
        told = {arm.name: arm.figures() for arm in arms}
        for arm in arms:
            told[arm.name]["reads_of_experts"] = int(front.of_experts(arm.reads).sum())
        check.figures |= {name: off[name] for name in ("ratio", "seconds", "bytes")}
        check.figures |= {"runs": self.runs, "cold": cold, "device": where.device, "arms": told}
        if not cold:
            check.notes.append(
                "the file stayed in the page cache (in use, or in memory only): loads were warm"
            )
        judge_reads(check, front, arms, warm)
        self._judge_seconds(check, arms, cold)
        state = {"artifact": front.identity, "device": where.device, "cold": cold}
        if limits is not None:
            self._check_same(limits, {"cold": cold})
            self._judge_baseline(check, limits, told)
        elif self.max_ratio is not None:
            for arm in arms:
                _at_most(check, f"{arm.name}: load over plain read", self.max_ratio, arm.ratio)
        if self.write_baseline is not None:
            _write(Path(self.write_baseline), check, state, told)

    def _caches(self, model: Model) -> dict[str, dict[str, Any]]:
        """Options of the cache of each arm that has one."""
        config = model.config
        with Reader(model.path) as reader:
            catalogue = Catalogue(config, Tensors(reader), path=model.path)
        everything = {"budget": catalogue.slot_bytes * catalogue.experts}
        small: dict[str, Any] = {"slots": config.num_experts_per_tok}
        if self.cache is not None:
            small = {"budget": self.cache}
        if self.profile is not None:
            small["profile"] = os.fspath(self.profile)
        return {"all": everything, "paged": small}

    def _warm(self, model: Model, front: Front) -> Sequence[Sequence[int]]:
        """Experts by layer that a small cache may begin with, the most used first."""
        if self.profile is None:
            return ()
        config = model.config
        layers, experts = config.num_hidden_layers, config.n_routed_experts
        return read_profile(self.profile, front.identity, layers, experts).experts

    def _measure(self, arms: Sequence[Arm], path: Path, where: Surroundings) -> bool:
        """Load in turn, ``runs`` times; whether the file was never in the page cache before."""
        cold = drop(path)
        whole = np.array([[0, path.stat().st_size, 0]], np.int64)
        limit_s = START_S + max(2 * self.timeout_s, 10 * plain_read(path, whole))
        with where.progress("load-time", self.runs * len(arms), unit="loads") as advance:
            for _ in range(self.runs):
                for arm in arms:
                    cold &= drop(path)
                    load = loading.measure(
                        path,
                        threads=where.threads,
                        device=where.device,
                        cache=arm.cache,
                        limit_s=limit_s,
                    )
                    arm.loads.append(load)
                    cold &= drop(path)
                    arm.plain_s.append(plain_read(path, load.reads))
                    advance(1)
        return cold

    def _judge_seconds(self, check: Check, arms: Sequence[Arm], cold: bool) -> None:
        off, everything, paged = arms
        for arm in arms:
            plain, slowest = statistics.median(arm.plain_s), max(_seconds(arm))
            if slowest > self.timeout_s and plain > self.timeout_s:
                check.notes.append(
                    f"{arm.name}: the disk cannot do it in {self.timeout_s:g} s: a plain read of "
                    f"the same bytes takes {plain:.1f} s"
                )
            elif slowest > self.timeout_s:
                _at_most(check, f"{arm.name}: seconds of a load", self.timeout_s, slowest)
        if _judged(check, everything, "to those without a cache", cold):
            limit = max(SAME_RATIO * off.seconds, *_seconds(off))
            said = "all: median seconds, 1.05 times those without a cache or their slowest"
            _at_most(check, said, limit, everything.seconds)
        if _judged(check, paged, "to a plain read", cold):
            _at_most(check, "paged: load over plain read", PAGED_RATIO, paged.ratio)

    def _check_same(self, limits: dict[str, Any], state: dict[str, Any]) -> None:
        """Refuse a baseline that was measured in another state."""
        for key, value in state.items():
            if limits.get(key) != value:
                raise GateError(
                    f"the baseline is of another {key}",
                    path=self.baseline,
                    expected=value,
                    found=limits.get(key),
                    remedy="write one for this artifact with --write-baseline",
                )

    def _judge_baseline(self, check: Check, limits: dict[str, Any], told: dict[str, Any]) -> None:
        largest = MAX_RATIO if self.max_ratio is None else self.max_ratio
        for name, before in limits["arms"].items():
            now = told[name]
            said = f"{name}: load over plain read, {largest:g} times the baseline's"
            _at_most(check, said, largest * before["ratio"], now["ratio"])
            for count in ("reads", "bytes"):
                if now[count] != before[count]:
                    check.fail(
                        Failure(
                            f"{name}: {count} of a load are not the baseline's",
                            expected=before[count],
                            found=now[count],
                        )
                    )


def _write(path: Path, check: Check, state: dict[str, Any], told: dict[str, Any]) -> None:
    """Keep the ratios, unless they are those of a run that failed."""
    if not check.ok:
        check.notes.append(f"{path} was not written: the gate failed")
        return
    kept = {
        name: {key: figures[key] for key in ("ratio", "reads", "bytes")}
        for name, figures in told.items()
    }
    text = json.dumps({"format": FORMAT} | state | {"arms": kept}, indent=2) + "\n"
    path.write_text(text, encoding="utf-8")


def judge_reads(
    check: Check, front: Front, arms: Sequence[Arm], warm: Sequence[Sequence[int]]
) -> None:
    """Fail where a load reads other bytes than it must, or by another number of calls.

    Parameters
    ----------
    arms : without a cache, with one for everything, with a small one
    warm : experts by layer that the small one may begin with, as many as it has slots
    """
    off, everything, paged = arms
    for arm in (off, everything):
        for load in arm.loads:
            if load.paged is not None:
                check.fail(Failure(f"{arm.name}: experts are paged, though all of them fit"))
            _same(check, f"{arm.name}: reads of a load", len(off.reads), len(load.reads))
            nbytes = (_bytes(reads) for reads in (off.reads, load.reads))
            _same(check, f"{arm.name}: bytes of a load", *nbytes)
            _same(check, f"{arm.name}: bytes that a load reads twice", 0, read_twice(load.reads))
            _same(check, f"{arm.name}: reads after the load", 0, len(load.later))
    dense_bytes = _bytes(off.reads) - front.expert_bytes
    for load in paged.loads:
        if load.paged is None:
            check.fail(Failure("not exercised: paged: all experts are in memory; give it less"))
        slots = 0 if load.paged is None else load.paged["slots"]
        first = {(layer, e) for layer, experts in enumerate(warm) for e in experts[:slots]}
        others = front.of_experts(load.reads, first)
        _same(check, "paged: reads of experts by a load", 0, int(others.sum()))
        rest = load.reads[~front.of_experts(load.reads)]
        _same(check, "paged: bytes of all but experts", dense_bytes, _bytes(rest))
        _same(check, "paged: bytes that a load reads twice", 0, read_twice(rest))


def read_twice(reads: I64) -> int:
    """Bytes of the file that ``reads`` [N, 3] had before."""
    ordered = reads[np.argsort(reads[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ordered[:, 0] + ordered[:, 1])
    again = np.minimum(ends[:-1], ordered[1:, 0] + ordered[1:, 1]) - ordered[1:, 0]
    return int(again.clip(0).sum())


def plain_read(path: str | os.PathLike[str], reads: I64) -> float:
    """Seconds in which the bytes of ``reads`` [N, 3] come from the disk, neighbours in one piece.

    By as many threads as a load has, each into one buffer of its own.
    """
    pieces = [
        (begin, min(PIECE_BYTES, end - begin))
        for start, stop in _merged(reads)
        for begin, end in ((at, stop) for at in range(start, stop, PIECE_BYTES))
    ]
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    held = threading.local()

    def read(piece: tuple[int, int]) -> None:
        if not hasattr(held, "buffer"):
            held.buffer = np.empty(PIECE_BYTES, np.uint8)
        pread_all(fd, held.buffer[: piece[1]], piece[0], path=path)

    try:
        with ThreadPoolExecutor(LANES, "ds4q-plain") as pool:
            start_s = time.perf_counter()
            for _ in pool.map(read, pieces):
                pass
            return time.perf_counter() - start_s
    finally:
        os.close(fd)


def _merged(reads: I64) -> list[tuple[int, int]]:
    """Begin and end of the stretches of the file that ``reads`` [N, 3] cover."""
    merged: list[tuple[int, int]] = []
    for offset, nbytes, _ in sorted(reads.tolist()):
        if merged and offset <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], offset + nbytes)
        else:
            merged.append((offset, offset + nbytes))
    return merged


def _baseline(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``write_baseline`` wrote."""
    try:
        found = json.loads(read_small(path, MAX_BASELINE_BYTES))
        arms = {
            str(name): {
                "ratio": float(a["ratio"]),
                "reads": int(a["reads"]),
                "bytes": int(a["bytes"]),
            }
            for name, a in found["arms"].items()
        }
        if found["format"] == FORMAT and set(arms) == {"off", "all", "paged"}:
            return {**found, "arms": arms}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        pass
    raise GateError(
        "not a baseline of load times", path=path, remedy="write one with --write-baseline FILE"
    )


def _judged(check: Check, arm: Arm, against: str, cold: bool) -> bool:
    """Whether the disk decides how long a load takes; says so where it does not."""
    plain = statistics.median(arm.plain_s)
    if cold and plain >= JUDGED_S:
        return True
    check.notes.append(
        f"{arm.name}: seconds are not compared {against}, but reads and bytes are: reading takes "
        f"{plain:.2f} s{' from the disk' if cold else ' from memory'}, starting decides"
    )
    return False


def _bytes(reads: I64) -> int:
    return int(reads[:, 1].sum())


def _seconds(arm: Arm) -> list[float]:
    return [load.seconds for load in arm.loads]


def _at_most(check: Check, said: str, limit: float, found: float) -> None:
    if not found <= limit:
        check.fail(Failure(said, expected=f"at most {limit:.4g}", found=f"{found:.4g}"))


def _same(check: Check, said: str, wanted: int, found: int) -> None:
    if found != wanted:
        check.fail(Failure(said, expected=wanted, found=found))
