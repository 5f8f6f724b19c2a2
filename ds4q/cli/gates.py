"""Owns the options of ``ds4q verify`` that choose gates. The gates are in ``runtime/gates``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds4q.cli import common, experts

if TYPE_CHECKING:
    from ds4q.runtime.gates import Gate

NAMES = ("divergence", "fidelity", "neutrality", "load-time")
OWNED = {
    "divergence": ("against", "texts", "tokens", "window", "max_kl", "min_top1", "expert_cache"),
    "fidelity": ("against", "min_exact", "fast", "expert_cache"),
    "neutrality": ("prompts", "tokens", "cache", "fast", "policies", "adapter"),
    "load-time": ("cache", "profile", "baseline", "write_baseline", "max_ratio", "timeout", "runs"),
}
NEEDED = {"against": "--against REF.hfq", "texts": "--text FILE"}
OPTIONS = tuple(dict.fromkeys(name for owned in OWNED.values() for name in owned))
WORDS = {"texts": "--text", "policies": "--cache-policy", "adapter": "--prefetch"}
WORDS |= {"profile": "--cache-profile"}
MOST_TIMEOUT_S = 1e6  # days; a clock takes no endless time


def _number(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """A range lets NaN through, and nothing is above or below it."""
    if value is not None and value != value:
        raise click.BadParameter("nan is not a number")
    return value


_OPTIONS = [
    click.option(
        "--gate",
        "names",
        type=click.Choice(NAMES),
        multiple=True,
        help="Run the model; repeatable. divergence: how far its predictions are from another "
        "artifact's on texts; fidelity: whether it copies the identifiers that the other copies, "
        "200 in three repeats; neutrality: whether paging of experts leaves every token as it is; "
        "load-time: what loading reads and how long that takes, with paging and without.",
    ),
    click.option(
        "--against",
        type=click.Path(path_type=Path),
        metavar="REF.hfq",
        help="The artifact that divergence and fidelity compare with; fidelity wants the lossless "
        "one.",
    ),
    click.option(
        "--text",
        "texts",
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="FILE",
        help="Text for divergence: UTF-8, or decimal token ids in a file .ids; repeatable.",
    ),
    click.option(
        "--tokens",
        type=click.IntRange(min=1),
        metavar="N",
        show_default="all of the texts; of neutrality 192",
        help="divergence: compare at most N tokens; neutrality: continue each prompt by N. Each "
        "takes 4 bytes x vocabulary of temporary disk space (in TMPDIR).",
    ),
    click.option(
        "--window",
        type=click.IntRange(min=2),
        metavar="N",
        show_default="512, or what the model has positions for",
        help="Tokens that are read in one context: BOS and N-1 of the text.",
    ),
    click.option(
        "--max-kl",
        type=click.FloatRange(min=0),
        callback=_number,
        metavar="X",
        help="Fail where the mean KL divergence is above X nats a token.",
    ),
    click.option(
        "--min-top1",
        type=click.FloatRange(0, 1),
        callback=_number,
        metavar="X",
        help="Fail where less than this share of the most likely tokens is the same.",
    ),
    click.option(
        "--min-exact",
        type=click.FloatRange(0, 1),
        callback=_number,
        metavar="X",
        show_default="1, all of them",
        help="Let fidelity pass with this share of exact copies; 0 measures and does not judge.",
    ),
    click.option(
        "--expert-cache",
        type=experts.BUDGET,
        metavar="S|auto",
        show_default="all experts in memory",
        help="Let divergence and fidelity keep only so many bytes of routed experts in memory; "
        "auto: what memory leaves. No figure changes.",
    ),
    click.option(
        "--prompts",
        type=click.Path(path_type=Path),
        metavar="FILE.jsonl",
        show_default="built-in ones of 1, 7 and 300 tokens and about the attention window",
        help='Prompts for neutrality, one a line: {"text": "..."} or {"ids": [1, 2, 3]}.',
    ),
    click.option(
        "--cache",
        type=common.SIZE,
        metavar="S",
        show_default="the smallest that can be",
        help="Size of the small expert cache of neutrality and load-time.",
    ),
    click.option(
        "--cache-policy",
        "policies",
        type=click.Choice(["auto", "lru", "lfu", "slru"]),
        multiple=True,
        show_default="the one that run takes",
        help="What a cache of neutrality evicts; repeatable: one more run each.",
    ),
    click.option(
        "--prefetch",
        "adapter",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Let neutrality also run with the prefetch of this expert predictor.",
    ),
    click.option(
        "--fast",
        is_flag=True,
        help="Let neutrality run one layer of each kind only (hash-routed, learned routing, each "
        "compress ratio), and fidelity ask for 20 identifiers; the report says so.",
    ),
    click.option(
        "--cache-profile",
        "profile",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Warm-start profile for load-time: a paged load may read its experts, no others.",
    ),
    click.option(
        "--baseline",
        type=click.Path(path_type=Path),
        metavar="FILE.json",
        help="Fail where loads are slower than in this file of --write-baseline, each paired with "
        "a plain read of the same bytes; undecided where the machine is too noisy. Also compare "
        "the token ids that continue two fixed prompts.",
    ),
    click.option(
        "--write-baseline",
        type=click.Path(path_type=Path),
        metavar="FILE.json",
        help="Keep the times of load-time, if it passes, and the token ids of two fixed prompts, "
        "for --baseline.",
    ),
    click.option(
        "--max-ratio",
        type=click.FloatRange(min=0, min_open=True),
        callback=_number,
        metavar="X",
        show_default="1.10 with --baseline, else not judged",
        help="Fail where a load takes X times the baseline's, or of a plain read without one.",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True, max=MOST_TIMEOUT_S),
        callback=_number,
        metavar="S",
        show_default="120",
        help="Fail where a load takes longer than S seconds and a plain read does not.",
    ),
    click.option(
        "--runs",
        type=click.IntRange(min=1),
        metavar="N",
        show_default="7",
        help="Loads of each kind in load-time; 7 or more with --baseline, --write-baseline or "
        "--max-ratio, and twice as many where a verdict needs them.",
    ),
]


def gate_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that reach ``command`` as one argument, ``gates``."""

    @functools.wraps(command)
    def with_gates(*args: Any, **kwargs: Any) -> Any:
        chosen = {name: kwargs.pop(name) for name in ("names", *OPTIONS)}
        return command(*args, gates=gates_of(**chosen), **kwargs)

    for option in reversed(_OPTIONS):
        with_gates = option(with_gates)
    return with_gates


def gates_of(*, names: Sequence[str], **options: Any) -> list[Gate]:
    """The gates that were asked for, in that order; ``UsageError`` for what does not fit them."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if given["fast"] is False:
        del given["fast"]
    for name in given:
        owners = [gate for gate, owned in OWNED.items() if name in owned]
        if not set(owners) & set(names):
            raise click.UsageError(f"{_word(name)} belongs to --gate {' or '.join(owners)}")
    for gate in names:
        for name, words in NEEDED.items():
            if name in OWNED[gate] and name not in given:
                raise click.UsageError(f"--gate {gate} needs {words}")
    if not names:
        return []

    from ds4q.runtime.gates import Divergence, Fidelity, LoadTime, Neutrality
    from ds4q.runtime.gates.baseline import LEAST_PAIRS, is_baseline

    if "write_baseline" in given:
        common.claim_report(given["write_baseline"], "--write-baseline", is_baseline)

    judged = [name for name in ("baseline", "write_baseline", "max_ratio") if name in given]
    if judged and given.get("runs", LEAST_PAIRS) < LEAST_PAIRS:
        raise click.UsageError(f"{_word(judged[0])} needs --runs {LEAST_PAIRS} or more")
    kinds: dict[str, Callable[..., Gate]] = {
        "divergence": Divergence,
        "fidelity": Fidelity,
        "neutrality": Neutrality,
        "load-time": LoadTime,
    }
    renamed = {"timeout": "timeout_s"}
    return [
        kinds[gate](**{renamed.get(o, o): given[o] for o in OWNED[gate] if o in given})
        for gate in dict.fromkeys(names)
    ]


def _word(name: str) -> str:
    return WORDS.get(name, f"--{name.replace('_', '-')}")
