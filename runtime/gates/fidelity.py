"""Owns the fidelity gate: whether an artifact copies identifiers as its lossless twin does.

Quantization that structural checks and small divergences do not show turns up as identifiers that
are almost right. After Luce-Org/lucebox (``server/docs/DS4.md``): 20 identifiers, temperature 0,
three repeats, and anything but a verbatim copy is a miss. The identifiers are the first ones of a
seeded generator that the lossless artifact copies, so that a miss is the quantization's.

The prompt names the task and the identifier and nothing else. ``Repeat exactly: X`` is what
ds4-tiny was taught, and large chat models answer it with the bare identifier.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ds4q.artifact.report import Check, Failure
from ds4q.runtime.errors import GateError
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.gates.asking import Asker, ask_fresh_process, require_tokenizer
from ds4q.runtime.gates.identifiers import SEED, identifiers
from ds4q.runtime.gates.pair import Measurement, Model, Surroundings, read_pair

PROMPT = "Repeat exactly: {}"
IDENTIFIERS = 20
MOST_DRAWN = 100
OTHER_BATCH_TOKENS = 7  # fewer than any prompt has, so that each goes in by several batches
LOSSLESS = "fp4"

REPEATS = {
    "fresh-process": "a new Python process, which loads the artifact and asks for each in turn",
    "after-another": "one process; before each identifier the model copies another one",
    "smallest-cache": "experts paged through as many slots as one token needs; also another number "
    "of threads, and prompts in batches of 7 tokens",
}


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The gate ``fidelity``: passes if every identifier is copied verbatim in every repeat.

    Attributes
    ----------
    against : the lossless artifact (recipe ``fp4``) of the same checkpoint
    min_exact : so many exact copies are enough; None demands all
    seed : of the identifiers
    """

    name: ClassVar[str] = "fidelity"
    against: str | os.PathLike[str]
    min_exact: int | None = None
    seed: int = SEED

    def prepare(self, path: str | os.PathLike[str], where: Surroundings) -> Measurement:
        """What has the reference choose identifiers and the artifact copy them; see ``Gate``."""
        model, reference = read_pair(path, self.against)
        _require_lossless_twin(model, reference)
        for each in (reference, model):
            require_tokenizer(each.tokenizer, each.path)
        return partial(self._run, model, reference, where)

    def _run(self, model: Model, reference: Model, where: Surroundings, check: Check) -> None:
        chosen, drawn = _choose(reference, self.seed, where)
        found = {
            "fresh-process": _fresh_process(model, chosen, where),
            "after-another": _after_another(model, chosen, where),
            "smallest-cache": _smallest_cache(model, chosen, where),
        }
        exact = {name: _equal(chosen, answers) for name, answers in found.items()}
        of = sum(len(answers) for answers in found.values())
        check.figures |= {
            "exact": sum(exact.values()),
            "of": of,
            "drawn": drawn,
            "repeats": exact,
            "prompt": PROMPT.format("X"),
            "seed": self.seed,
            "top_k": model.config.num_experts_per_tok,
            "against": reference.path.name,
        }
        check.notes += [f"{name} ({exact[name]}): {REPEATS[name]}" for name in found]
        self._judge(check, chosen, found)

    def _judge(self, check: Check, chosen: Sequence[str], found: dict[str, list[str]]) -> None:
        """Misses are failures, unless as many as were asked for are exact."""
        misses = [
            Failure(f"not copied verbatim ({name})", expected=wanted, found=answer)
            for name, answers in found.items()
            for wanted, answer in zip(chosen, answers, strict=True)
            if answer != wanted
        ]
        exact, of = check.figures["exact"], check.figures["of"]
        enough = of if self.min_exact is None else self.min_exact
        if exact >= enough:
            check.notes += [miss.line() for miss in misses]
            return
        check.fail(Failure("too few exact copies", expected=f"{enough} of {of}", found=str(exact)))
        for miss in misses:
            check.fail(miss)


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


def _choose(reference: Model, seed: int, where: Surroundings) -> tuple[list[str], int]:
    """The first identifiers that the reference copies, and how many were drawn for that."""
    asker = Asker(reference.load(where), path=reference.path)
    chosen: list[str] = []
    with where.progress("choosing identifiers", IDENTIFIERS, unit="identifiers") as advance:
        for drawn, identifier in enumerate(identifiers(seed), start=1):
            if asker.ask(PROMPT.format(identifier)) == identifier:
                chosen.append(identifier)
                advance(1)
            if len(chosen) == IDENTIFIERS:
                return chosen, drawn
            if drawn == MOST_DRAWN:
                break
    raise GateError(
        "the reference copies too few identifiers to judge by",
        path=reference.path,
        expected=f"{IDENTIFIERS} of {MOST_DRAWN} drawn",
        found=len(chosen),
        remedy="use a model that follows instructions",
    )


def _fresh_process(model: Model, chosen: Sequence[str], where: Surroundings) -> list[str]:
    where.tell(f"fidelity: asking a fresh process for {len(chosen)} identifiers")
    questions = [PROMPT.format(identifier) for identifier in chosen]
    return ask_fresh_process(model.path, questions, threads=where.threads)


def _after_another(model: Model, chosen: Sequence[str], where: Surroundings) -> list[str]:
    """The neighbour's question goes before: what stays behind of it would be seen in the answer."""
    asker = Asker(model.load(where), path=model.path)
    answers = []
    with where.progress("after another", len(chosen), unit="identifiers") as advance:
        for before, identifier in zip([*chosen[1:], chosen[0]], chosen, strict=True):
            asker.ask(PROMPT.format(before))
            answers.append(asker.ask(PROMPT.format(identifier)))
            advance(1)
    return answers


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


def _equal(wanted: Sequence[str], found: Sequence[str]) -> int:
    return sum(a == b for a, b in zip(wanted, found, strict=True))
