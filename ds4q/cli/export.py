"""Owns the ``ds4q export`` command: options in, summary out. The work is ``quantize/export/``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds4q.cli import common

if TYPE_CHECKING:
    from ds4q.quantize.export import Exported


@click.command("export")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.hfq")
@click.option(
    "--to",
    "to",
    type=click.Choice(["safetensors", "gguf"]),
    required=True,
    help="Format to write: safetensors is for experts that are kept as they were.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="OUT",
    help="File to write, or with safetensors a folder of shards unless it ends in .safetensors. "
    "Nothing is replaced.",
)
@click.option(
    "--only",
    type=click.Choice(["experts"]),
    help="Write the routed experts and leave out everything else.",
)
@click.option(
    "--variant-107",
    type=click.Choice(["dual", "affine", "s40", "sign"]),
    help="With gguf: how the runtime that will read it takes type 107, which must be how the "
    "artifact has it.",
)
@click.option(
    "--fp6-code32",
    type=click.Choice(["zero", "neg32"]),
    help="With gguf: what code 32 of type 102 is to that runtime.",
)
@common.threads_option
@common.json_option
@common.talk_options
def command(
    file: Path,
    to: Any,
    output: Path,
    only: str | None,
    variant_107: str | None,
    fp6_code32: str | None,
    threads: int,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Write an artifact as safetensors, for whoever reads checkpoints, or as GGUF.

    Example: ds4q export flash.hfq --to safetensors -o flash-experts --only experts

    Nothing is encoded or rounded: codes and scale bytes move as they are, or the export is refused.
    """
    if to != "gguf" and (variant_107 or fp6_code32):
        raise click.UsageError("--variant-107 and --fp6-code32 are for --to gguf")
    from ds4q.api import export

    with common.writing(output):
        done = export(
            file,
            output,
            to=to,
            only_experts=only == "experts",
            variant_107=variant_107,
            fp6_code32=fp6_code32,
            threads=threads,
            progress=partial(common.progress, quiet=quiet),
        )
    if as_json:
        common.emit_json(done.document())
    else:
        _print(done)
    for warning in done.warnings:
        common.warn(warning)


def _print(done: Exported) -> None:
    document = done.document()
    common.line(
        f"wrote {done.output}: {document['bytes']:,} bytes, "
        f"{document['tensors']:,} tensors in {document['seconds']:.1f} s"
    )
    for kind, entry in document["types"].items():
        common.line(f"  {kind:10} {entry['tensors']:>8,} tensors {entry['bytes']:>20,} bytes")
    for why, count in document["left_out"].items():
        common.line(f"left out {count:,} tensors: {why}")
