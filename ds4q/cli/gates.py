"""Owns the options of ``ds4q verify`` that choose gates. The gates are in ``runtime/gates``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ds4q.runtime.gates import Gate

NAMES = ("divergence", "fidelity")
OF_DIVERGENCE = ("texts", "tokens", "window", "max_kl", "min_top1")
OF_FIDELITY = ("min_exact",)
FIDELITY_ANSWERS = 60


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
        help="Run the model against another artifact; repeatable. divergence: how far its "
        "predictions are from the other's on texts; fidelity: whether it copies the identifiers "
        "that the other copies, 20 in three repeats.",
    ),
    click.option(
        "--against",
        type=click.Path(path_type=Path),
        metavar="REF.hfq",
        help="The artifact that gates compare with; fidelity wants the lossless one.",
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
        show_default="all of the texts",
        help="Compare at most N tokens. Each takes 4 bytes x vocabulary of temporary disk space "
        "(in TMPDIR).",
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
        type=click.IntRange(0, FIDELITY_ANSWERS),
        metavar="N",
        show_default=f"all {FIDELITY_ANSWERS}",
        help="Let fidelity pass with N exact copies.",
    ),
]


def gate_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that reach ``command`` as one argument, ``gates``."""

    @functools.wraps(command)
    def with_gates(*args: Any, **kwargs: Any) -> Any:
        chosen = {name: kwargs.pop(name) for name in ("names", "against")}
        chosen |= {name: kwargs.pop(name) for name in (*OF_DIVERGENCE, *OF_FIDELITY)}
        return command(*args, gates=gates_of(**chosen), **kwargs)

    for option in reversed(_OPTIONS):
        with_gates = option(with_gates)
    return with_gates


def gates_of(*, names: Sequence[str], against: Path | None, **options: Any) -> list[Gate]:
    """The gates that were asked for, in that order; ``UsageError`` for what does not fit them."""
    given = [name for name, value in options.items() if value not in (None, ())]
    for gate, owned in (("divergence", OF_DIVERGENCE), ("fidelity", OF_FIDELITY)):
        idle = [name for name in owned if name in given]
        if idle and gate not in names:
            raise click.UsageError(f"{_word(idle[0])} belongs to --gate {gate}")
    if against is None and names:
        raise click.UsageError(f"--gate {names[0]} needs --against REF.hfq")
    if against is not None and not names:
        raise click.UsageError("--against belongs to --gate")
    if "divergence" in names and not options["texts"]:
        raise click.UsageError("--gate divergence needs --text FILE")
    if against is None:
        return []

    from ds4q.runtime.gates import Divergence, Fidelity

    gates: dict[str, Gate] = {
        "divergence": Divergence(against, **{name: options[name] for name in OF_DIVERGENCE}),
        "fidelity": Fidelity(against, **{name: options[name] for name in OF_FIDELITY}),
    }
    return [gates[name] for name in dict.fromkeys(names)]


def _word(name: str) -> str:
    return "--text" if name == "texts" else f"--{name.replace('_', '-')}"
