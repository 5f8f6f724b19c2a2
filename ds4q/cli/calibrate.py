"""Owns ``ds4q calibrate``: options in, an imatrix and its figures out. No model code."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ds4q.cli import common, experts

if TYPE_CHECKING:
    from ds4q.runtime.calibrate import Calibration


@click.command("calibrate")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.hfq")
@click.option(
    "--text",
    "texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    required=True,
    metavar="FILE",
    help="Text to read, UTF-8; a name in .ids means decimal token ids. Repeatable.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="IMATRIX",
    help="The file to write. An earlier imatrix is replaced.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    show_default="all of the texts",
    metavar="N",
    help="Read at most N tokens of text.",
)
@click.option(
    "--window",
    type=click.IntRange(min=2),
    show_default="512, or what the model has positions for",
    metavar="N",
    help="Tokens that are read in one context: BOS and N-1 of the text.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Replace an output file that is no imatrix, but no artifact or receipt.",
)
@click.option(
    "--expert-cache",
    type=experts.BUDGET,
    metavar="S|auto",
    show_default="auto",
    help="Keep only so many bytes of routed experts in memory; auto: what memory leaves. A layer's "
    "experts are the most that is ever needed. The imatrix stays the same.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "hip"]),
    default="cpu",
    show_default=True,
    help="Where layers run; on hip a whole layer is on the device at a time.",
)
@common.threads_option
@common.json_option
@common.talk_options
def command(
    file: Path,
    texts: tuple[Path, ...],
    output: Path,
    tokens: int | None,
    window: int | None,
    force: bool,
    expert_cache: Any,
    device: Literal["cpu", "hip"],
    threads: int,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Measure what a model's experts see, for ds4q quantize --imatrix.

    The artifact reads the texts. For each routed expert the imatrix holds how many tokens came to
    it, how much they weighed, and the mean square of each input of its matrices. It belongs to the
    checkpoint that the artifact was made from.

    All tokens go through one layer after another, so memory holds one layer. Between layers their
    hidden states take 64 KiB of disk a token for DeepSeek-V4-Flash, in TMPDIR, and 176 KiB where
    the expert cache is smaller than a layer.

    Example: ds4q calibrate flash.hfq --text wiki.txt -o flash.imatrix
    """
    if device == "hip" and expert_cache is not None:
        raise click.UsageError("--expert-cache is for --device cpu: hip holds a layer's experts")

    from ds4q.api import calibrate

    with common.writing(output):
        done = calibrate(
            file,
            texts,
            output,
            limit_tokens=tokens,
            window_tokens=window,
            threads=threads,
            force=force,
            expert_cache=expert_cache,
            device=device,
            tell=(lambda line: None) if quiet else common.say,
            warn=common.warn,
            progress=partial(common.progress, quiet=quiet),
        )
    if as_json:
        common.emit_json(asdict(done) | {"bytes": output.stat().st_size})
    else:
        _print(done)
    if done.unseen and not quiet:
        common.warn(
            f"{output}: {done.unseen} of {done.layers * done.experts} experts saw no token and "
            "will take the mean of their layer; calibrate on more text"
        )


def _print(done: Calibration) -> None:
    common.line(
        f"{done.output}: {done.layers} layers of {done.experts} experts, "
        f"{done.tokens:,} tokens in {done.windows:,} windows, {done.seconds:.1f} s"
    )
