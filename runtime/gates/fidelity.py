"""The fidelity gate: whether an artifact copies identifiers as its lossless twin does.

Quantization that structural checks and small divergences do not show turns up as identifiers that
are almost right. After Luce-Org/lucebox (``server/docs/DS4.md``): temperature 0, three repeats, and
anything but a verbatim copy is a miss. The identifiers are the first ones of a seeded generator
that the lossless artifact copies, so that a miss is the quantization's. Those that it copies with a
margin below ``MARGIN_FLOOR`` are counted and set apart: rounding of any kind may turn a near tie.

An identifier is exact if every repeat copies it. The repeats share prompts, and so are not
independent: interval and limit count identifiers, not answers.

The first repeat looks at its misses after ``LOOKS`` identifiers and ends the gate as failed where a
model exactly at the limit would miss as many with a probability of at most ``STOP_ERROR`` (an exact
binomial tail). Looking four times adds at most 4 x 0.1 % to the chance of a wrong failure. It never
passes early: a pass needs every identifier in every repeat.

The prompt names the task and the identifier and nothing else. ``Repeat exactly: X`` is what
ds4-tiny was taught, and large chat models answer it with the bare identifier.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ds4q.artifact.report import NOT_JUDGED, Check, Failure
from ds4q.runtime.errors import GateError
from ds4q.runtime.experts.options import Budget, CacheOptions
from ds4q.runtime.gates.asking import Asker, Margin, ask_fresh_process, require_tokenizer
from ds4q.runtime.gates.identifiers import SEED, identifiers
from ds4q.runtime.gates.pair import Measurement, Model, Surroundings, read_pair

PROMPT = "Repeat exactly: {}"
IDENTIFIERS = 200
FAST_IDENTIFIERS = 20
MARGIN_FLOOR = 0.5  # nats: the runner-up is at least 61 % as likely as the winner
LOOKS = (20, 50, 100, 150)
STOP_ERROR = 0.001
Z_95 = 1.959964  # two-sided
DRAWN_BEFORE_REFUSAL = 100
LEAST_SHARE_CHOSEN = 0.2  # of those drawn
OTHER_BATCH_TOKENS = 7  # fewer than any prompt has, so that each goes in by several batches
LOSSLESS = "fp4"

REPEATS = {
    "after-another": "one process; before each identifier the model copies another one",
    "fresh-process": "a new Python process, which loads the artifact and asks for each in turn",
    "smallest-cache": "experts paged through as many slots as one token needs; also another number "
    "of threads, and prompts in batches of 7 tokens",
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the reference made of the generator's identifiers.

    Attributes
    ----------
    chosen : those that it copies, near ties left out
    drawn : all that it was asked for
    near_ties : those that it copies with a margin below ``MARGIN_FLOOR``
    """

    chosen: Sequence[str]
    drawn: int
    near_ties: int


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The gate ``fidelity``: passes if enough identifiers are copied verbatim in every repeat.

    Attributes
    ----------
    against : the lossless artifact (recipe ``fp4``) of the same checkpoint
    min_exact : least share of exact copies; 0 judges nothing
    fast : ask for 20 identifiers
    seed : of the identifiers
    expert_cache : bytes of experts in memory, or "auto"; None: all. One repeat takes the smallest
        cache anyway
    """

    name: ClassVar[str] = "fidelity"
    against: str | os.PathLike[str]
    min_exact: float = 1.0
    fast: bool = False
    seed: int = SEED
    expert_cache: Budget | None = None

    def prepare(self, path: str | os.PathLike[str], where: Surroundings) -> Measurement:
        """What has the reference choose identifiers and the artifact copy them; see ``Gate``."""
        model, reference = read_pair(path, self.against)
        _require_lossless_twin(model, reference)
        for each in (reference, model):
            require_tokenizer(each.tokenizer, each.path)
        return partial(self._run, model, reference, where.paged(self.expert_cache))

    def _run(self, model: Model, reference: Model, where: Surroundings, check: Check) -> None:
        wanted = FAST_IDENTIFIERS if self.fast else IDENTIFIERS
        drawn = _choose(reference, wanted, self.seed, where)
        chosen = drawn.chosen
        found = {"after-another": _after_another(model, chosen, self.min_exact, where)}
        asked = chosen[: len(found["after-another"])]
        stopped = len(asked) < len(chosen)
        if not stopped:
            found["fresh-process"] = _fresh_process(model, chosen, where)
            found["smallest-cache"] = _smallest_cache(model, chosen, where)
        exact = sum(
            all(answers[n] == identifier for answers in found.values())
            for n, identifier in enumerate(asked)
        )
        low, high = wilson(exact, len(asked))
        copied = {
            name: sum(a == b for a, b in zip(asked, answers, strict=True))
            for name, answers in found.items()
        }
        check.unjudged = None if self.min_exact else NOT_JUDGED
        check.figures |= {
            "exact": exact,
            "of": len(asked),
            "drawn": drawn.drawn,
            "share": exact / len(asked),
            "share_low": low,
            "share_high": high,
            "min_exact": self.min_exact,
            "near_ties": drawn.near_ties,
            "margin_floor": MARGIN_FLOOR,
            "not_copied_by_reference": drawn.drawn - drawn.near_ties - len(chosen),
            "stopped_early": stopped,
            "repeats": copied,
            "prompt": PROMPT.format("X"),
            "seed": self.seed,
            "fast": self.fast,
            "top_k": model.config.num_experts_per_tok,
            "against": reference.path.name,
        }
        check.notes += [
            f"exact {exact} of {len(asked)}: {exact / len(asked):.1%}, 95 % interval {low:.1%} to "
            f"{high:.1%}; {drawn.near_ties} near ties of the reference set apart",
            *(f"{name} ({copied[name]}): {REPEATS[name]}" for name in found),
        ]
        if stopped:
            check.notes.append(
                f"stopped after {len(asked)} of {len(chosen)} identifiers: so many misses decide"
            )
        self._judge(check, exact / len(asked), _misses(asked, found))

    def _judge(self, check: Check, share: float, misses: Sequence[Failure]) -> None:
        """Misses are failures, unless as many copies as were asked for are exact."""
        if share >= self.min_exact:
            check.notes += [miss.line() for miss in misses]
            return
        found = f"{check.figures['exact']} of {check.figures['of']}"
        least = f"a share of at least {self.min_exact:g}"
        check.fail(Failure("too few exact copies", expected=least, found=found))
        for miss in misses:
            check.fail(miss)


def wilson(exact: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, JASA 22, 1927)."""
    share, z2 = exact / of, Z_95**2
    centre = share + z2 / (2 * of)
    half = Z_95 * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    low, high = (centre - half) / (1 + z2 / of), (centre + half) / (1 + z2 / of)
    # At the ends the formula gives 0 and 1 exactly; floats miss them by a little.
    return 0.0 if exact == 0 else low, 1.0 if exact == of else high


def decided(misses: int, asked: int, min_exact: float) -> bool:
    """Whether a model that copies a share of ``min_exact`` would hardly ever miss as many."""
    miss = 1 - min_exact
    tail = sum(
        math.comb(asked, n) * miss**n * min_exact ** (asked - n) for n in range(misses, asked + 1)
    )
    return tail <= STOP_ERROR


def _misses(asked: Sequence[str], found: dict[str, list[str]]) -> list[Failure]:
    """A failure for each wrong answer; repeats that gave the same one share it."""
    misses = []
    for number, identifier in enumerate(asked):
        by_answer: dict[str, list[str]] = {}
        for name, answers in found.items():
            by_answer.setdefault(answers[number], []).append(name)
        misses += [
            Failure(f"not copied verbatim ({', '.join(names)})", expected=identifier, found=answer)
            for answer, names in by_answer.items()
            if answer != identifier
        ]
    return misses


def _require_lossless_twin(model: Model, reference: Model) -> None:
    """Refuse a reference whose own errors would choose the identifiers."""
    if reference.recipe != LOSSLESS:
        raise GateError(
            "the reference is not lossless",
            path=reference.path,
            expected=f"recipe {LOSSLESS}",
            found=reference.recipe or "no recipe in its metadata",
            remedy=f"quantize the checkpoint with --recipe {LOSSLESS} and compare with that",
        )
    if model.source != reference.source:
        raise GateError(
            "the reference was made from another checkpoint",
            path=reference.path,
            expected=f"source fingerprint {model.source}",
            found=reference.source,
            remedy="compare artifacts of one checkpoint",
        )


def _choose(reference: Model, wanted: int, seed: int, where: Surroundings) -> Drawn:
    """The first ``wanted`` identifiers that the reference copies without a near tie.

    ``GateError`` as soon as it copies too few of them for that.
    """
    chosen: list[str] = []
    near_ties = 0
    with (
        reference.load(where) as engine,
        where.progress("choosing identifiers", wanted, unit="identifiers") as advance,
    ):
        asker = Asker(engine, path=reference.path)
        for drawn, identifier in enumerate(identifiers(seed), start=1):
            margin = Margin()
            if asker.ask(PROMPT.format(identifier), margin) == identifier:
                if margin.least < MARGIN_FLOOR:
                    near_ties += 1
                else:
                    chosen.append(identifier)
                    advance(1)
            if len(chosen) == wanted:
                return Drawn(chosen, drawn, near_ties)
            if drawn >= DRAWN_BEFORE_REFUSAL and len(chosen) < LEAST_SHARE_CHOSEN * drawn:
                break
    raise GateError(
        "the reference copies too few identifiers to judge by",
        path=reference.path,
        expected=f"{LEAST_SHARE_CHOSEN:.0%} of those drawn",
        found=f"{len(chosen)} of {drawn}, and {near_ties} near ties",
        remedy="use a model that follows instructions",
    )


def _after_another(
    model: Model, chosen: Sequence[str], min_exact: float, where: Surroundings
) -> list[str]:
    """Answers in turn, as far as the misses do not decide earlier.

    What stays behind of the identifier before would be seen in an answer; so another one goes
    before the first, too.
    """
    answers: list[str] = []
    misses = 0
    with (
        model.load(where) as engine,
        where.progress("after another", len(chosen), unit="identifiers") as advance,
    ):
        asker = Asker(engine, path=model.path)
        asker.ask(PROMPT.format(chosen[-1]))
        for identifier in chosen:
            answers.append(asker.ask(PROMPT.format(identifier)))
            misses += answers[-1] != identifier
            advance(1)
            if len(answers) in LOOKS and decided(misses, len(answers), min_exact):
                break
    return answers


def _fresh_process(model: Model, chosen: Sequence[str], where: Surroundings) -> list[str]:
    where.tell(f"fidelity: asking a fresh process for {len(chosen)} identifiers")
    questions = [PROMPT.format(identifier) for identifier in chosen]
    return ask_fresh_process(model.path, questions, where)


def _smallest_cache(model: Model, chosen: Sequence[str], where: Surroundings) -> list[str]:
    threads = 1 if where.threads > 1 else 2
    cache = CacheOptions(slots=model.config.num_experts_per_tok)
    engine = model.load(where, threads=threads, batch_tokens=OTHER_BATCH_TOKENS, cache=cache)
    answers = []
    with engine, where.progress("smallest cache", len(chosen), unit="identifiers") as advance:
        asker = Asker(engine, path=model.path)
        for identifier in chosen:
            answers.append(asker.ask(PROMPT.format(identifier)))
            advance(1)
    return answers
