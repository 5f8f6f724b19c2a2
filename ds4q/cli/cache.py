"""Owns ``ds4q cache``: traces in, prices of policies or a warm-start profile out. Computes none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds4q.cli import common

if TYPE_CHECKING:
    from ds4q.runtime.experts.header import Header
    from ds4q.runtime.experts.trace import Trace

SHARES = (0.05, 0.10, 0.20, 0.40)  # of the experts, priced beside the run's own slots


@click.group("cache")
def command() -> None:
    """Choose an expert cache by what a recorded run would have read.

    \b
    Example: ds4q run m.hfq -p "..." --expert-cache 8GiB --trace run.trace
             ds4q cache replay run.trace --budget 8GiB --budget 16GiB
             ds4q cache profile run.trace -o m.profile
             ds4q run m.hfq -p "..." --expert-cache 16GiB --cache-profile m.profile
    """


@command.command("replay")
@click.argument("file", type=click.Path(path_type=Path), metavar="TRACE")
@click.option(
    "--budget",
    "budgets",
    type=common.SIZE,
    multiple=True,
    metavar="S",
    help="Bytes of slots over all layers, repeatable. Default: the run's own, and what 5, 10, 20 "
    "and 40 % of the experts that it held take.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="P",
    help="auto, lru, lfu, slru or lfu:DECAY, repeatable. Default: the first four.",
)
@click.option(
    "--artifact",
    type=click.Path(path_type=Path),
    metavar="FILE.hfq",
    help="Refuse a trace of any other artifact.",
)
@common.html_option
@common.json_option
@common.talk_options
def replay(
    file: Path,
    budgets: tuple[int, ...],
    policies: tuple[str, ...],
    artifact: Path | None,
    html: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Tell what other cache policies and budgets would have read in the run that TRACE records.

    Example: ds4q cache replay run.trace --budget 8GiB --policy auto --policy lru

    First the run itself is replayed, and must meet every hit and miss again. Then every policy is
    run at every budget, beside Belady's bound: what an eviction that knew the future would have
    read. "gap" is the share of the way from LRU to that bound.

    Exit status 1: TRACE is cut short or altered, or its run cannot be reproduced.
    """
    if html is not None:
        common.claim_page(html)
    from ds4q.runtime.errors import CacheError
    from ds4q.runtime.experts.policy import POLICIES, parameters_of
    from ds4q.runtime.experts.replay import Workload, compare, reproduce
    from ds4q.runtime.experts.trace import read_trace

    chosen = list(dict.fromkeys(policies or POLICIES))
    for name in chosen:
        try:
            parameters_of(name)
        except CacheError as error:
            raise click.BadParameter(str(error), param_hint="--policy") from None
    start = time.perf_counter()
    trace = read_trace(file)
    _check_artifact(trace, artifact)
    slots = _slots(trace.header, budgets)
    own = reproduce(trace)
    workload = Workload.of(trace)
    header, rows = trace.header, []
    runs = len(slots) * (1 + len({*chosen, "lru"}))
    with common.progress("replaying", runs, unit="caches", quiet=quiet) as advance:
        for each in slots:
            rows += compare(workload, chosen, each, advance)
    tokens = sum(workload.tokens.values())
    document: dict[str, Any] = {
        "trace": str(file),
        "artifact": header.artifact,
        "tokens": workload.tokens,
        "run": {
            "policy": header.policy,
            "parameters": header.parameters,
            "slots": header.slots,
            "experts": header.experts,
            "owned": header.owned,
            "warm_start": header.warm_start,
            "limits": header.limits,
            "counters": own.told(),
        },
        "replays": [row.document(sum(header.slot_bytes), tokens) for row in rows],
    }
    if as_json:
        common.emit_json(document)
    else:
        _print(document)
    if html is not None:
        common.write_page(html, _page(document, time.perf_counter() - start))


@command.command("profile")
@click.argument("file", type=click.Path(path_type=Path), metavar="TRACE")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The file to write. An earlier profile is replaced.",
)
@common.json_option
@common.talk_options
def profile(file: Path, output: Path, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Write which experts of each layer TRACE used most, for ds4q run --cache-profile.

    Example: ds4q cache profile run.trace -o m.profile

    The profile belongs to the model: it fits every artifact of the checkpoint that was traced.
    """
    from ds4q.artifact.newfile import NewFile
    from ds4q.runtime.experts.profile import Profile, is_profile
    from ds4q.runtime.experts.trace import read_trace

    common.claim_report(output, "--output", is_profile)
    with common.writing(output), NewFile(output) as new:
        made = Profile.of(read_trace(file))
        new.write(made.encode())
        new.publish()
    used = [len(ids) for ids in made.experts]
    if as_json:
        common.emit_json(
            {
                "output": str(output),
                "artifact": made.artifact,
                "digest": made.digest,
                "layers": len(used),
                "experts": used,
            }
        )
    else:
        spread = f"{min(used)} to {max(used)}" if min(used) < max(used) else str(used[0])
        common.line(
            f"{output}: {len(used)} layers, {spread} experts used in each, digest {made.digest}"
        )


def _check_artifact(trace: Trace, artifact: Path | None) -> None:
    from ds4q.artifact.hfq import Reader
    from ds4q.runtime.errors import TraceError
    from ds4q.runtime.experts.trace import artifact_identity

    if artifact is None:
        return
    with Reader(artifact) as reader:
        identity = artifact_identity(reader)
    if identity != trace.header.artifact:
        raise TraceError(
            f"trace of another artifact than {artifact}",
            path=trace.path,
            expected=identity,
            found=trace.header.artifact,
        )


def _slots(header: Header, budgets: tuple[int, ...]) -> list[int]:
    """Slots a layer of each budget, smallest first."""
    from ds4q.runtime.errors import CacheError

    one = sum(header.slot_bytes)
    if not budgets:
        shares = [int(share * header.held) for share in SHARES]
        return sorted({header.slots, *(n for n in shares if n >= header.least)})
    least = min(budgets) // one
    if least < header.least:
        raise CacheError(
            f"the budget is too small: a token needs {header.least} slots in every layer",
            expected=f"at least {header.least * one:,} bytes",
            found=f"{min(budgets):,} bytes, {least} slots",
        )
    return sorted({min(budget // one, header.held) for budget in budgets})


def _of_rank(owned: tuple[int, int], experts: int) -> str:
    start, stop = owned
    return "" if stop - start == experts else f", of the rank with experts {start} to {stop - 1}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _shown(row: dict[str, Any]) -> dict[str, str]:
    """A row for people, by column."""
    over = row["bytes_over_lru"]
    return {
        "budget": common.amount_text(row["budget_bytes"]),
        "slots": str(row["slots"]),
        "policy": row["policy"],
        "hits": _percent(row["hit_rate"]),
        "reads": f"{row['reads']:,}",
        "compulsory": f"{row['compulsory']:,}",
        "read": common.amount_text(row["bytes"]),
        "a token": common.amount_text(row["bytes_per_token"]),
        "over LRU": "-" if over is None else f"{100 * (over - 1):+.1f} %",
        "gap": _percent(row["gap"]),
    }


def _print(document: dict[str, Any]) -> None:
    run, tokens = document["run"], document["tokens"]
    common.line(
        f"{document['trace']}: {tokens['prefill']:,} tokens of prompts, "
        f"{tokens['decode']:,} generated; {run['policy']} with {run['slots']} slots a layer"
        f"{_of_rank(run['owned'], run['experts'])}, reproduced exactly"
    )
    for phase, counts in run["counters"].items():
        counted = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in counts.items())
        common.line(f"  {phase}: {counted}")
    rows = [_shown(row) for row in document["replays"]]
    shown: list[Sequence[str] | None] = []
    for before, row in zip([rows[0], *rows], rows, strict=False):
        if row["slots"] != before["slots"]:
            shown.append(None)
        shown.append(tuple(row.values()))
    common.print_table(tuple(rows[0]), shown, left=["policy"])


def _page(document: dict[str, Any], seconds: float) -> str:
    from ds4q import __version__
    from ds4q.artifact.report import NOT_JUDGED, Check, Report
    from ds4q.quantize.page import gather, render

    run = document["run"]
    repeated = Check("the run, reproduced", seconds=seconds)
    repeated.figures = {
        "artifact": document["artifact"],
        "policy": run["policy"],
        "slots": run["slots"],
        "tokens": document["tokens"],
        **run["counters"],
    }
    priced = Check("other policies and budgets", unjudged=NOT_JUDGED)
    priced.figures = {"caches": [_shown(row) for row in document["replays"]]}
    report = Report({"path": document["trace"]}, [repeated, priced])
    return render(gather({"kind": "trace", "path": document["trace"]}, [], __version__, report))
