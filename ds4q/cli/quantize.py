"""Owns the ``ds4q quantize`` command: options in, summary out. The work is ``quantize/job.py``."""

from __future__ import annotations

import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds4q.cli import common
from ds4q.cli.registry_own import Registration, added_document, print_added

if TYPE_CHECKING:
    from ds4q.quantize.job import Summary

PRIMED_SHARDS = 2  # the job begins with the first; more would only get in its way
VARIANTS = ("dual", "affine", "s40", "sign")


@click.command("quantize")
@click.argument("source", type=click.Path(path_type=Path), metavar="SRC")
@click.option(
    "-o",
    "--output",
    "out",
    required=True,
    metavar="OUT.hfq",
    help="Artifact to write; a draft model goes beside it (OUT-dspark.hfq, OUT-mtp.hfq).",
)
@click.option(
    "--recipe",
    type=common.PATH_OR_WORD,
    default="fp4",
    show_default=True,
    metavar="NAME|FILE.toml",
    help="fp4 is lossless; fp4-q8 and fp4-f16 round the dense tensors. Experts re-encoded: "
    "rocmfp4, rocmfp4-fast, rocmfp3, rocmfp6-zero, rocmfp6-neg32, rocmfp8, rocmfp2 (dual, or "
    "rocmfp2-affine, -s40, -sign), rocmfp23, mix, mix2; budget spends a size target; a .toml file "
    "holds rules.",
)
@click.option(
    "--imatrix",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Weigh the errors of re-encoded experts by this file (ds4q calibrate makes one).",
)
@click.option(
    "--target-size",
    "target_bytes",
    type=common.SIZE,
    metavar="S",
    help="With --recipe budget: the most bytes that OUT.hfq may have, as 98GB or 90GiB.",
)
@click.option(
    "--target-bpw",
    type=click.FloatRange(min=0, min_open=True),
    metavar="B",
    help="With --recipe budget: the most bits per weight of the routed experts, as 2.75.",
)
@click.option(
    "--per-projection",
    is_flag=True,
    help="With --recipe budget: one type for gate and up of all experts of a layer and one for "
    "down, as ds4q export --to gguf needs.",
)
@click.option(
    "--variant-107",
    type=click.Choice(VARIANTS),
    metavar="V",
    help=f"How type 107 is to be read, where the recipe leaves it open: {', '.join(VARIANTS)}.",
)
@click.option(
    "--include-prefix",
    "include",
    multiple=True,
    metavar="P",
    help="Keep only tensors whose names begin with P; repeatable.",
)
@click.option(
    "--exclude-prefix",
    "exclude",
    multiple=True,
    metavar="P",
    help="Leave out tensors whose names begin with P; repeatable, applied after the includes.",
)
@click.option(
    "--dspark",
    "draft",
    type=click.Choice(["split", "keep", "drop"]),
    default="split",
    show_default=True,
    help="Draft tensors (mtp.*): to a file of their own, into OUT.hfq, or nowhere.",
)
@click.option(
    "--allow-partial", is_flag=True, help="Accept a folder that holds only a part of the model."
)
@click.option(
    "--allow-saturation",
    is_flag=True,
    help="Write re-encoded experts even where more than 1 % of a tensor's blocks lie outside the "
    "range of its type.",
)
@click.option(
    "--register",
    "tag",
    metavar="TAG",
    help="Then register the artifact under this tag, as 'ds4q registry add' does.",
)
@click.option(
    "--dry-run", is_flag=True, help="Say what would be written, to the byte; write nothing."
)
@click.option("--resume", is_flag=True, help="Go on with an unfinished job of the same source.")
@click.option("--force", is_flag=True, help="Replace existing output, or an unfinished job.")
@common.threads_option
@common.json_option
@common.talk_options
def command(
    source: Path,
    out: str,
    recipe: str,
    imatrix: Path | None,
    target_bytes: int | None,
    target_bpw: float | None,
    per_projection: bool,
    variant_107: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    draft: Any,
    allow_partial: bool,
    allow_saturation: bool,
    tag: str | None,
    dry_run: bool,
    resume: bool,
    force: bool,
    threads: int,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Turn the checkpoint SRC (a folder of safetensors) into an HFQ artifact and its receipt.

    Example: ds4q quantize DeepSeek-V4-Flash -o flash.hfq

    The source is audited before any work. A stopped job goes on with --resume; nothing stands at a
    final name before it is complete.
    """
    if resume and force:
        raise click.UsageError("--resume goes on with a job, --force starts over: give one of them")
    _check_wish(recipe, variant_107, target_bytes, target_bpw, per_projection)
    registration = None if tag is None else Registration(tag, Path(out))
    from ds4q.artifact.readahead import prime

    prime(sorted(source.glob("*.safetensors"))[:PRIMED_SHARDS])
    from ds4q.api import quantize
    from ds4q.quantize.journal import journal_path

    def resume_line() -> str | None:
        return _resume_line() if os.path.lexists(journal_path(Path(out))) else None

    with common.last_words(resume_line):
        summary = quantize(
            source,
            out,
            recipe=recipe,
            variant_107=variant_107,
            imatrix=imatrix,
            target_bytes=target_bytes,
            target_bpw=target_bpw,
            per_projection=per_projection,
            include=include,
            exclude=exclude,
            draft=draft,
            allow_partial=allow_partial,
            allow_saturation=allow_saturation,
            dry_run=dry_run,
            resume=resume,
            force=force,
            threads=threads,
            progress=partial(common.progress, quiet=quiet),
            warn=common.warn,
        )
    added = None
    try:
        if registration is not None and not dry_run:
            added = registration.finish(summary, quiet=quiet)
    finally:  # what was written is told, whatever becomes of its tag
        if as_json:
            told = {} if added is None else {"registered": added_document(added)}
            common.emit_json(summary.document() | told)
        else:
            _print(summary, dry_run=dry_run, verbose=verbose)
    if added is not None and not as_json:
        print_added(added)


def _check_wish(
    recipe: str,
    variant_107: str | None,
    target_bytes: int | None,
    target_bpw: float | None,
    per_projection: bool,
) -> None:
    """Refuse words that do not fit each other as wrong usage, before any work."""
    from ds4q.quantize.choose import Wish
    from ds4q.quantize.errors import JobError

    try:
        Wish(recipe, variant_107, target_bytes, target_bpw, per_projection).check()
    except JobError as error:
        raise click.UsageError(str(error)) from None


def _resume_line() -> str:
    """The command that goes on with this job: the same words, with --resume."""
    words = [w for w in sys.argv[1:] if w not in ("--force", "--resume")]
    return "continue with: " + shlex.join(["ds4q", *words, "--resume"])


def _print(summary: Summary, *, dry_run: bool, verbose: bool) -> None:
    from ds4q.artifact.receipt import saturation_note

    document = summary.document()
    verb = "would write" if dry_run else "already there:" if summary.already_done else "wrote"
    for part in (document, *document["sidecars"]):
        name = part["output"]
        common.line(f"{verb} {name}: {part['bytes']:,} bytes, {part['tensors']:,} tensors")
        for kind, entry in part["types"].items():
            common.line(f"  {kind:10} {entry['tensors']:>8,} tensors {entry['bytes']:>20,} bytes")
        if part["bpw_experts"] is not None:
            common.line(f"  experts    {part['bpw_experts']:.4f} bits per weight")
        if "sha256" in part:
            common.line(f"  sha256     {part['sha256']}")
    if summary.budget is not None:
        if dry_run or verbose:
            for line in summary.budget.table().splitlines():
                common.line(line)
        if not dry_run:
            name = str(summary.plan.trunk.path)
            common.line(f"plan: {name}.plan.toml (a recipe that repeats it), {name}.plan.json")
    if document["skipped"]:
        common.line(f"{document['skipped']:,} source tensors left out (listed in the receipt)")
        if verbose:
            for name, why in summary.plan.skipped:
                common.line(f"  {name}: {why}")
    events = document["events"]
    if events.get("inexact"):
        common.line(
            f"rounded {events['inexact']:,} dense values, largest error {events['max_error']:.3g}"
        )
    tensors = (tensor for receipt in summary.receipts for tensor in receipt.tensors)
    if (note := saturation_note(tensor.saturated_blocks for tensor in tensors)) is not None:
        common.line(note)
    if not dry_run:
        common.line(
            f"{document['seconds']:.1f} s"
            + (
                f", {summary.resumed_bytes:,} bytes from an earlier run"
                if summary.resumed_bytes
                else ""
            )
        )
