"""Owns the options that say how routed experts are kept, and telling what became of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ds4q.cli.common import Size, amount_text, claim_report, say

if TYPE_CHECKING:
    from ds4q.runtime.experts.options import CacheOptions
    from ds4q.runtime.spread import Spread

F = TypeVar("F", bound=Callable[..., Any])


class _Budget(Size):
    """A size, ``auto``, or the 0 that only the artifact can tell the minimum to."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value).strip()
        if text == "auto" or re.fullmatch("0+", text):
            return text if text == "auto" else 0
        return super().convert(value, param, ctx)


class _Owner(click.ParamType):
    """``RANK/RANKS``."""

    name = "owner"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", str(value), re.ASCII)
        if found is None or int(found[1]) >= int(found[2]):
            self.fail(f"{value!r} is not RANK/RANKS, as 0/2 and 1/2", param, ctx)
        return int(found[1]), int(found[2])


class Devices(click.Choice[str]):
    """One of the kinds of devices; several, with commas, for the runtime to refuse by name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        parts = str(value).split(",")
        return ",".join(super(Devices, self).convert(part, param, ctx) for part in parts)


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """What a command's line says of routed experts and of ranks; option names are field names."""

    expert_cache: Any
    cache_policy: str | None
    cache_profile: Path | None
    prefetch: Path | None
    prefetch_top: int | None
    expert_owner: tuple[int, int] | None
    cold: str | None
    no_check_reads: bool
    require_receipt: bool
    trace: Path | None
    trace_states: bool
    tensor_parallel: int

    def cache(self) -> CacheOptions | None:
        """What to load with; None where nothing was said.

        Raises ``click.UsageError`` for an option without the one that it belongs to.
        """
        from ds4q.runtime.experts.options import CacheOptions

        values = {each.name: getattr(self, each.name) for each in fields(self)}
        given = {name for name, value in values.items() if value is not None and value is not False}
        given -= {"tensor_parallel"}
        if not given:
            return None
        _check_usage(given)
        if self.trace is not None:
            from ds4q.runtime.experts.header import is_trace

            claim_report(self.trace, "--trace", is_trace)
        return CacheOptions(
            budget=self.expert_cache,
            policy=self.cache_policy,
            profile=self.cache_profile,
            adapter=self.prefetch,
            prefetch_top=self.prefetch_top,
            owner=self.expert_owner,
            cold="none" if self.cold else None,
            check_reads=not self.no_check_reads,
            require_receipt=self.require_receipt,
            trace=self.trace,
            trace_states=self.trace_states,
        )

    def spread(self, device: str) -> Spread:
        """What to run on; ``device`` may name several."""
        from ds4q.runtime.spread import Spread

        return Spread(self.tensor_parallel, tuple(device.split(",")))


# Of options that page: without --expert-cache all experts are in memory and nothing is read later.
_PAGED = ("cache_policy", "cache_profile", "prefetch")
_BELONGS = {"prefetch_top": "prefetch", "trace_states": "trace", "cold": "expert_owner"}


def _check_usage(given: set[str]) -> None:
    """Refuse an option of ``given`` that means nothing with the others, or without another."""
    for name, other in _BELONGS.items():
        if name in given and other not in given:
            raise click.UsageError(f"{_word(name)} belongs to {_word(other)}")
    for name in (each for each in _PAGED if each in given):
        if "cold" in given:
            raise click.UsageError(f"{_word(name)} is for experts that are paged, not --cold none")
        if "expert_cache" not in given:
            raise click.UsageError(f"{_word(name)} belongs to --expert-cache")
    if {"require_receipt", "no_check_reads"} <= given:
        raise click.UsageError("--require-receipt and --no-check-reads exclude each other")
    if "expert_owner" in given and not {"cold", "expert_cache"} & given:
        raise click.UsageError(
            "--expert-owner needs --cold none, to hold all of its experts, or --expert-cache, to "
            "page them"
        )


def _word(name: str) -> str:
    return f"--{name.replace('_', '-')}"


BUDGET = _Budget()
_FILE = click.Path(dir_okay=False, path_type=Path)
_OPTIONS = (
    click.option(
        "--expert-cache",
        type=BUDGET,
        metavar="S|auto",
        help="Keep only so many bytes of routed experts in memory and read the others when they "
        "are needed; auto: what memory leaves. The text stays the same.",
    ),
    click.option(
        "--cache-policy",
        type=click.Choice(["auto", "lru", "lfu", "slru"]),
        help="What is evicted: the least recently, or least frequently used, or segmented LRU. "
        "The default, auto, chooses while it runs.",
    ),
    click.option(
        "--cache-profile",
        type=_FILE,
        metavar="FILE",
        help="Begin with the experts that this profile (ds4q cache profile) names.",
    ),
    click.option(
        "--prefetch",
        type=_FILE,
        metavar="FILE",
        help="Read experts ahead that this predictor (ds4q adapter train) expects.",
    ),
    click.option(
        "--prefetch-top",
        type=click.IntRange(min=1),
        metavar="M",
        help="Read so many ahead, for each token and layer.",
    ),
    click.option(
        "--expert-owner",
        type=_Owner(),
        metavar="R/N",
        help="Hold only the experts of rank R of N, from 0 on; the others contribute zero.",
    ),
    click.option(
        "--cold",
        type=click.Choice(["none"]),
        help="With --expert-owner: all of its experts are in memory, and no others anywhere.",
    ),
    click.option(
        "--no-check-reads",
        is_flag=True,
        help="Do not compare the tensors that are read with the receipt's digests.",
    ),
    click.option(
        "--require-receipt",
        is_flag=True,
        help="Fail where there is no receipt of this very file to compare tensors with.",
    ),
    click.option(
        "--trace",
        type=_FILE,
        metavar="FILE",
        help="Record which experts each layer asks for, for ds4q cache.",
    ),
    click.option(
        "--trace-states",
        is_flag=True,
        help="Record what routers see as well, for ds4q adapter train. Large.",
    ),
    click.option(
        "--tensor-parallel",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help="Ranks that share every matrix; there is one yet.",
    ),
)


def expert_options(command: F) -> F:
    """The options of ``ExpertOptions``, passed as ``experts``."""

    @functools.wraps(command)
    def gathered(**values: Any) -> Any:
        own = {each.name: values.pop(each.name) for each in fields(ExpertOptions)}
        return command(experts=ExpertOptions(**own), **values)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered  # type: ignore[return-value]


# --- what became of it ------------------------------------------------------------------------


def cache_report(
    counters: Mapping[str, Any] | None, asked: CacheOptions | None, timings: Mapping[str, Any]
) -> dict[str, Any] | None:
    """``cache`` of ``--json`` and ``--stats``; None where no cache was asked for.

    Parameters
    ----------
    counters : of the engine; None where nothing is paged
    timings : ``prefill_s`` and ``decode_s``: each phase's are divided into ``shares`` of waiting
        for experts, computing with them, and the rest
    """
    if asked is None or not asked.paged:
        return None
    if counters is None:
        return {"paging": False}
    report = {"paging": True} | dict(counters)
    report["reads"] = reads = dict(counters["reads"])
    for phase in ("prefill", "decode"):
        counts, total = counters[phase], timings[f"{phase}_s"]
        shares = None
        if total:
            io, compute = counts["io_s"] / total, counts["compute_s"] / total
            shares = {"io": io, "compute": compute, "rest": 1 - io - compute}
        own = {f"read_p{n}_us": reads.pop(f"{phase}_read_p{n}_us") for n in (50, 99)}
        report[phase] = counts | own | {"shares": shares}
    return report


def say_cache(report: Mapping[str, Any], *, verbose: bool) -> None:
    """The figures of ``cache_report`` on stderr."""
    if not report["paging"]:
        return
    if verbose and (memory := report.get("memory")):
        say(
            f"expert cache: {report['slots']} slots a layer by {report['policy']}, "
            f"{amount_text(memory['slots_bytes'])} of which {amount_text(memory['wasted_bytes'])} "
            f"stay empty, and {amount_text(memory['staging_bytes'])} to read through"
        )
    for phase in ("prefill", "decode"):
        counts = report[phase]
        asked = counts["distinct"]
        if not asked:
            continue
        hits = asked - counts["compulsory"] - counts["misses"]
        spent = ""
        if shares := counts["shares"]:
            spent = "; time: " + ", ".join(f"{shares[name]:.0%} {name}" for name in shares)
        say(
            f"experts, {phase}: {hits / asked:.1%} of {asked:,} in memory, "
            f"{counts['compulsory']:,} first uses, {counts['misses']:,} misses, "
            f"{counts['evictions']:,} evictions, {amount_text(counts['bytes'])} read{spent}"
        )
    reads = report["reads"]
    say(
        f"expert reads: {reads['reads']:,} ({reads['reads_checked']:,} checked), p50 "
        f"{reads['read_p50_us'] / 1000:.2f} ms, p99 {reads['read_p99_us'] / 1000:.2f} ms"
    )


def say_breakdown(load_s: Mapping[str, float]) -> None:
    """What loading took, part by part."""
    parts = (f"{name.replace('_', ' ')} {seconds:.3f} s" for name, seconds in load_s.items())
    say("loading: " + ", ".join(parts))
