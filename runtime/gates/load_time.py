"""The load-time gate: what loading an artifact reads and costs, with and without paging of experts.

An artifact is loaded with all experts in memory, with a cache that holds them all, and with a small
one; each load in a process of its own (``loading.py``), the file driven out of the page cache
before it, the kinds in turn. What a load reads is counted and has to be right to the byte. Seconds
are judged as ratios: each load is paired with a plain read of the same bytes and with fixed work
of the processor (``yardstick.py``). Against a baseline (``baseline.py``) the verdict is pass, fail
or undecided.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import find_receipt
from ds4q.artifact.report import Check, Failure
from ds4q.runtime.errors import GateError
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.experts.header import Identity
from ds4q.runtime.experts.profile import read_profile
from ds4q.runtime.experts.trace import identity_of
from ds4q.runtime.gates import loading
from ds4q.runtime.gates.baseline import (
    ARMS,
    LEAST_PAIRS,
    Baseline,
    Kept,
    encoded_prompts,
    write,
)
from ds4q.runtime.gates.loading import I64
from ds4q.runtime.gates.pair import Measurement, Model, Surroundings
from ds4q.runtime.gates.pairs import Arm, Bench
from ds4q.runtime.gates.quotient import centre, outcome, quotient, slowdown
from ds4q.runtime.source import Tensors

RUNS = LEAST_PAIRS
MAX_RATIO = 1.10
TIMEOUT_S = 120.0
PAGED_RATIO = 1.2  # of a paged load to a plain read of what it reads
SAME_RATIO = 1.05  # of a load with a cache that holds everything to one without a cache
JUDGED_S = 1.0  # reading takes less: starting decides, which no ratio to a read can judge
PAGE_BYTES = 4096
ALPHA = 0.02  # chance of each wrong verdict, over all arms and looks of one run
SAME_ALPHA = 0.001  # of calling loads unlike that are alike; most runs look for nothing else
LOOKS = 2  # after the runs that were asked for, and after twice as many
LEAST_SHARE = 0.9  # of the processors; with less, a slow load may be the neighbours' fault
NOISY = "undecided: the machine is too noisy"
Mask = npt.NDArray[np.bool_]

_EXPERT = re.compile(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.w[123]\.weight")


@dataclass(frozen=True, slots=True)
class Front:
    """What is known of an artifact before it is loaded.

    Attributes
    ----------
    identity : of the model
    spans : i64 [N, 2] begin and end of every matrix of a routed expert, in the file's order
    keys : i64 [N, 2] layer and expert of each
    """

    identity: Identity
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
            return cls(identity_of(reader), found[:, :2], found[:, 2:])

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


@dataclass(frozen=True, slots=True)
class LoadTime:
    """The gate ``load-time``: passes if loads read what they must, and are not slower than before.

    Attributes
    ----------
    cache : bytes of the small cache; None takes the smallest, top-k slots a layer
    profile : warm-start profile of the small cache: its experts may be read while loading
    baseline : JSON of an earlier ``write_baseline``; loads may be ``max_ratio`` times as slow
    write_baseline : where to keep times and token ids of this run, if it passes
    max_ratio : 1.10 if None; without a baseline, of a load to its plain read, not judged if None
    timeout_s : most seconds of a load, where the disk can read the file in that time
    runs : pairs of each kind; twice as many for a new baseline, or where a verdict needs them
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
        if self._judges and self.runs < LEAST_PAIRS:
            raise GateError(
                "too few loads for a verdict on their time",
                expected=f"--runs {LEAST_PAIRS} or more",
                found=self.runs,
                remedy="leave out --runs",
            )
        model = Model.read(path)
        front = Front.read(path)
        warm = self._warm(model, front)
        state: dict[str, Any] = {"artifact": front.identity.artifact, "sha256": _sha256(path)}
        state |= {"device": where.device, "threads": where.threads}
        baseline = None
        if self.baseline is not None:
            baseline = Baseline.read(self.baseline)
            baseline.check_state(state)
        caches = self._caches(model)
        model.check_cache(loading.options_of(caches["paged"]), where)
        model.check_cache(loading.options_of(caches["all"]), where, holds_all=True)
        return partial(self._run, model, front, warm, baseline, state, caches, where)

    @property
    def _judges(self) -> bool:
        given = self.baseline, self.write_baseline, self.max_ratio
        return any(each is not None for each in given)

    def _run(
        self,
        model: Model,
        front: Front,
        warm: Sequence[Sequence[int]],
        baseline: Baseline | None,
        state: dict[str, Any],
        caches: Mapping[str, dict[str, Any]],
        where: Surroundings,
        check: Check,
    ) -> None:
        arms = [Arm(name, caches.get(name)) for name in ARMS]
        prompts = {}
        if baseline is not None or self.write_baseline is not None:
            config = model.config
            positions = config.max_position_embeddings
            prompts = encoded_prompts(model.tokenizer, config.vocab_size, positions)
        bench = Bench(model.path, where, self.timeout_s)
        ids = bench.first(arms, prompts)
        bench.pairs(arms, self.runs if self.write_baseline is None else LOOKS * self.runs)
        judge_reads(check, front, arms, warm)
        self._judge_outcomes(bench, arms, baseline)
        off = arms[0].figures()
        figures_of = {arm.name: arm.figures() for arm in arms}
        for arm in arms:
            figures_of[arm.name]["reads_of_experts"] = int(front.of_experts(arm.reads).sum())
        check.figures |= {name: off[name] for name in ("ratio", "seconds", "bytes")}
        check.figures |= {"runs": self.runs, "cold": bench.cold, "device": where.device}
        check.figures["arms"] = figures_of
        if not bench.cold:
            check.notes.append(
                "the file stayed in the page cache (in use, or in memory only): loads were warm"
            )
        state = state | {"cold": bench.cold}
        if baseline is not None:
            baseline.check_state(state)
            _judge_counts(check, baseline, figures_of)
            baseline.check_ids(check, ids)
        self._judge_seconds(check, arms, bench.cold)
        self._report_outcomes(check, arms, baseline)
        if self.write_baseline is not None:
            kept = {arm.name: Kept(arm.series, len(arm.reads), _bytes(arm.reads)) for arm in arms}
            if check.ok:
                write(self.write_baseline, state, kept, ids)
                _note_share(check, arms, "verdicts by this baseline may be undecided")
            else:
                check.notes.append(f"{self.write_baseline} was not written: the gate did not pass")

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

    def _judge_outcomes(self, bench: Bench, arms: Sequence[Arm], baseline: Baseline | None) -> None:
        """Judge every arm; load those that are undecided as often again, and judge them once more.

        Looking twice, at several arms, gives noise several chances, so each look takes its part
        of ``ALPHA``.
        """
        if baseline is None and self.max_ratio is None:
            return
        limit = MAX_RATIO if self.max_ratio is None else self.max_ratio
        alpha = ALPHA / LOOKS / len(arms)
        for look in range(LOOKS):
            undecided = [arm for arm in arms if arm.outcome in (None, "undecided")]
            if look and undecided:
                bench.pairs(undecided, self.runs)
            for arm in undecided:
                if baseline is not None:
                    before = baseline.arms[arm.name].series
                    arm.intervals, arm.outcome = slowdown(arm.series, before, limit, alpha)
                else:
                    arm.intervals = {"read": centre(arm.ratios, alpha)}
                    arm.outcome = outcome(arm.intervals.values(), limit)
                    if arm.outcome == "fail" and arm.share < LEAST_SHARE:
                        arm.outcome = "undecided"

    def _report_outcomes(
        self, check: Check, arms: Sequence[Arm], baseline: Baseline | None
    ) -> None:
        """Failures of slow and of undecided arms; the outcome of the gate."""
        limit = MAX_RATIO if self.max_ratio is None else self.max_ratio
        what = "the plain read" if baseline is None else "the baseline"
        for arm in arms:
            if arm.outcome in (None, "pass"):
                continue
            low = min(each.low for each in arm.intervals.values())
            high = max(each.high for each in arm.intervals.values())
            said = f"{arm.name}: load time to that of {what}, in pairs with a plain read"
            if arm.outcome == "undecided":
                said = f"{NOISY}: {said}; run it again when less else is running"
            found = f"{low:.3g} to {high:.3g} in {len(arm.load_s)} pairs"
            check.fail(Failure(said, expected=f"at most {limit:.4g}", found=found))
        outcomes = {arm.outcome for arm in arms}
        if outcomes != {None}:
            undecided = sum(arm.outcome == "undecided" for arm in arms)
            check.undecided = undecided == check.count > 0
            check.figures["outcome"] = (
                "pass" if check.ok else "undecided" if check.undecided else "fail"
            )
            _note_share(check, arms, "their load may have decided how long loads took")

    def _judge_seconds(self, check: Check, arms: Sequence[Arm], cold: bool) -> None:
        """What the loads of this run say without a baseline; red only beyond doubt."""
        off, everything, paged = arms
        for arm in arms:
            plain = statistics.median(arm.read_s)
            if arm.seconds > self.timeout_s and plain > self.timeout_s:
                check.notes.append(
                    f"{arm.name}: the disk cannot do it in {self.timeout_s:g} s: a plain read of "
                    f"the same bytes takes {plain:.1f} s"
                )
            elif arm.seconds > self.timeout_s:
                _at_most(check, f"{arm.name}: seconds of a load", self.timeout_s, arm.seconds)
        if _judged(check, everything, "to those without a cache", cold):
            found = quotient(everything.load_s, off.load_s, SAME_ALPHA)
            _at_most(check, "all: seconds to those without a cache", SAME_RATIO, found.low)
        if _judged(check, paged, "to a plain read", cold):
            found = centre(paged.ratios, ALPHA)
            if paged.share >= LEAST_SHARE:
                _at_most(check, "paged: load over plain read", PAGED_RATIO, found.low)
            elif found.low > PAGED_RATIO:
                check.notes.append("paged: load over plain read was not judged: see below")
                _note_share(check, [paged], "their load may have decided how long loads took")


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


def _sha256(path: str | os.PathLike[str]) -> str | None:
    """Of the artifact, as its receipt says it; None without a receipt."""
    with Reader(path) as reader:
        found = find_receipt(reader)
    return None if found is None else found[1].sha256


def _judge_counts(check: Check, baseline: Baseline, figures_of: Mapping[str, Any]) -> None:
    for name, before in baseline.arms.items():
        for count, wanted in (("reads", before.reads), ("bytes", before.bytes)):
            if figures_of[name][count] != wanted:
                said = f"{name}: {count} of a load are not the baseline's"
                check.fail(Failure(said, expected=wanted, found=figures_of[name][count]))


def _note_share(check: Check, arms: Sequence[Arm], so: str) -> None:
    share = min(arm.share for arm in arms)
    if share < LEAST_SHARE:
        check.notes.append(
            f"other processes, or a limit of this one, took {1 - share:.0%} of the processors "
            f"meanwhile: {so}"
        )


def _judged(check: Check, arm: Arm, against: str, cold: bool) -> bool:
    """Whether the disk decides how long a load takes; says so where it does not."""
    plain = statistics.median(arm.read_s)
    if cold and plain >= JUDGED_S:
        return True
    check.notes.append(
        f"{arm.name}: seconds are not compared {against}, but reads and bytes are: reading takes "
        f"{plain:.2f} s{' from the disk' if cold else ' from memory'}, starting decides"
    )
    return False


def _bytes(reads: I64) -> int:
    return int(reads[:, 1].sum())


def _at_most(check: Check, said: str, limit: float, found: float) -> None:
    if not found <= limit:
        check.fail(Failure(said, expected=f"at most {limit:.4g}", found=f"{found:.4g}"))


def _same(check: Check, said: str, wanted: int, found: int) -> None:
    if found != wanted:
        check.fail(Failure(said, expected=wanted, found=found))
