"""Owns ``ds4q adapter``: traces in, an expert predictor or its figures out. No arithmetic."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds4q.cli import common

if TYPE_CHECKING:
    from ds4q.runtime.experts.evaluation import Evaluation

FULL = "full"


class Rank(click.ParamType):
    """A rank, or ``full``."""

    name = "rank"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        if value == FULL or value is None:
            return None
        text = str(value)
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
            self.fail(
                f"{value!r} is not a rank; write a number of 1 or more, or {FULL}", param, ctx
            )
        return int(text)


@click.group("adapter")
def command() -> None:
    """Fit and judge expert predictors.

    A predictor (adapter) tells from what layer L's router sees which experts layer L+1 will choose.
    With it, ds4q run --prefetch reads experts before they are asked for. It never changes a token:
    the router still chooses.

    \b
    Example: ds4q run m.hfq --raw --max-tokens 1 \\
                 --trace book.trace --trace-states < book.txt
             ds4q adapter train book.trace -o m.adapter
             ds4q adapter eval m.adapter other.trace
    """


@command.command("train")
@click.argument(
    "traces",
    type=click.Path(path_type=Path),
    nargs=-1,
    required=True,
    metavar="TRACE...",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The file to write. An earlier predictor is replaced.",
)
@click.option(
    "--rank",
    type=Rank(),
    default="128",
    show_default=True,
    metavar="R",
    help="Most numbers that a state is reduced to; full: as many as there are experts.",
)
@click.option(
    "--ridge",
    type=float,
    default=1e-3,
    show_default=True,
    metavar="X",
    help="Penalty on large weights, as a share of the states' mean variance.",
)
@common.json_option
@common.talk_options
def train_command(
    traces: tuple[Path, ...],
    output: Path,
    rank: int | None,
    ridge: float,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Fit a predictor to traces with router states (ds4q run --trace FILE --trace-states).

    Example: ds4q adapter train book.trace -o m.adapter
    """
    from ds4q.artifact.newfile import NewFile
    from ds4q.runtime.experts.adapter import is_adapter
    from ds4q.runtime.experts.fit import LEAST_RIDGE, MOST_RIDGE, train

    begin = time.perf_counter()
    if not LEAST_RIDGE <= ridge <= MOST_RIDGE:
        raise click.BadParameter(
            f"{ridge} is not from {LEAST_RIDGE:g} to {MOST_RIDGE:g}", param_hint="--ridge"
        )
    common.claim_report(output, "--output", is_adapter)
    with common.writing(output), NewFile(output) as file:
        with common.progress("fitting", len(traces), unit="traces", quiet=quiet) as advance:
            adapter = train(traces, rank=rank, ridge=ridge, advance=advance)
        nbytes = file.write(adapter.encode())
        file.publish()
    document = {
        "output": str(output),
        "bytes": nbytes,
        "source_layers": list(adapter.entries),
        "rank": adapter.rank,
        "experts": adapter.experts,
        "seconds": time.perf_counter() - begin,
    } | (asdict(adapter.about) if adapter.about else {})
    if as_json:
        common.emit_json(document)
        return
    common.line(
        f"{output}: {len(adapter.entries)} layers of {adapter.experts} experts, "
        f"rank {adapter.rank}, {document['tokens']:,} tokens, {document['seconds']:.1f} s"
    )


@command.command("eval")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.argument("trace", type=click.Path(path_type=Path), metavar="TRACE")
@click.option(
    "--rank",
    "ranks",
    type=Rank(),
    multiple=True,
    show_default="8 to 128 and full, as far as the file has them",
    metavar="R",
    help="Judge the predictor of this rank that is in the file; full is all of it. Repeatable.",
)
@common.json_option
@common.talk_options
def eval_command(
    file: Path,
    trace: Path,
    ranks: tuple[int | None, ...],
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Judge a predictor on a trace of text that was not in its fit.

    For the M best predictions of each layer and token: how many of the chosen experts are among
    them, how many are wasted, how many are left to fetch late, and fetches in all, over those
    without prediction. Beside it stand three predictors that need no fit.

    Example: ds4q adapter eval m.adapter other.trace
    """
    from ds4q.runtime.experts.adapter import read_adapter
    from ds4q.runtime.experts.evaluation import evaluate
    from ds4q.runtime.experts.trace import read_trace

    adapter, recorded = read_adapter(file), read_trace(trace)
    found = evaluate(
        adapter,
        recorded,
        ranks=[adapter.rank if rank is None else rank for rank in ranks] or None,
    )
    if found.held_out is False and not quiet:
        common.warn(f"{trace}: this text was in the fit; judge on another one")
    header = recorded.header
    for note in adapter.check(header.model, header.hidden, header.experts):
        if not quiet:
            common.warn(note)
    if as_json:
        common.emit_json({"adapter": str(file), "trace": str(trace)} | asdict(found))
    else:
        _print(found)


def _print(found: Evaluation) -> None:
    common.line(
        f"{found.tokens:,} tokens, {found.layers} layers, {found.top_k} experts chosen in each"
    )
    head = ("predictor", "rank", "M", "recall", "covers", "wasted", "late", "fetches")
    rows = [
        (
            predictor.name,
            "" if predictor.rank is None else str(predictor.rank),
            str(each.m),
            f"{100 * each.recall:.1f} %",
            f"{each.covers:.2f}",
            f"{each.wasted:.2f}",
            f"{each.late:.2f}",
            f"{each.fetches:.2f}x",
        )
        for predictor in found.predictors
        for each in predictor.top
    ]
    common.print_table(head, rows)
