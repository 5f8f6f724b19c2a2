"""Owns ``ds4q verify``: options in, report out. The checks are joined in ``ds4q/api.py``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ds4q.artifact.errors import one_line
from ds4q.cli import common
from ds4q.cli.gates import gate_options

if TYPE_CHECKING:
    from ds4q.api import Verification
    from ds4q.artifact.report import Report
    from ds4q.runtime.gates import Gate


@click.command("verify")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.hfq")
@click.option(
    "--source",
    type=click.Path(path_type=Path),
    metavar="SRC",
    help="Compare every code, scale byte and dense value with this checkpoint.",
)
@click.option(
    "--receipt",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Receipt to check against; else FILE.hfq.receipt, or one in the folder that fits.",
)
@click.option(
    "--imatrix",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The importance matrix that the artifact was made with; --source needs it then.",
)
@click.option(
    "--errors-only",
    is_flag=True,
    help="With --source: measure what re-encoded experts lost, without encoding them again.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "hip"]),
    default="cpu",
    show_default=True,
    help="hip: also decode every weight on the device and compare the bits with the CPU's; gates "
    "neutrality and load-time run there.",
)
@gate_options
@click.option(
    "--junit",
    type=click.Path(path_type=Path),
    metavar="FILE.xml",
    help="Also write the report as JUnit XML.",
)
@common.html_option
@common.threads_option
@common.json_option
@common.talk_options
def command(
    file: Path,
    source: Path | None,
    receipt: Path | None,
    imatrix: Path | None,
    errors_only: bool,
    device: Literal["cpu", "hip"],
    gates: list[Gate],
    junit: Path | None,
    html: Path | None,
    threads: int,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Prove that an artifact is sound, unchanged since it was made, and equal to its source.

    Example: ds4q verify flash.hfq --source DeepSeek-V4-Flash

    With --gate the model is run, too, and held against another artifact:
    ds4q verify mix.hfq --gate divergence --against flash.hfq --text book.txt

    or against itself, with experts paged through a small cache:
    ds4q verify mix.hfq --gate neutrality --gate load-time

    Exit status 0: every check passed; 1: at least one failed.
    """
    if source is None and (imatrix is not None or errors_only):
        raise click.UsageError("--imatrix and --errors-only belong to --source")
    if junit is not None:
        common.claim_report(junit, "--junit", b"ds4q verify")
    if html is not None:
        if html == junit:
            raise click.UsageError("--html and --junit name the same file")
        common.claim_page(html)
    from ds4q.api import verify

    report = verify(
        file,
        source=source,
        receipt=receipt,
        imatrix=imatrix,
        errors_only=errors_only,
        device=device,
        gates=gates,
        threads=threads,
        progress=partial(common.progress, quiet=quiet),
        tell=(lambda line: None) if quiet else common.say,
    )
    if as_json:
        common.emit_json(report.document())
    else:
        _print(report)
    if junit is not None:  # last: what is on the screen must not be lost with it
        common.write_report(junit, report.junit())
    if html is not None:
        common.write_report(html, _page(report))
    if not report.ok:
        click.get_current_context().exit(1)


def _page(report: Verification) -> str:
    from ds4q import __version__
    from ds4q.artifact.describe import describe
    from ds4q.quantize.page import gather, render

    if report.reader is None:
        document = {"kind": "artifact", "path": report.artifact["path"]}
        return render(gather(document, [], __version__, report))
    return render(gather(*describe(report.reader), __version__, report, report.errors))


def _print(report: Report) -> None:
    """The table on stdout; failures on stderr, where errors go."""
    common.print_table(report.table())
    for check in report.checks:
        for note in check.notes:
            click.echo(f"{check.name}: {note}")
    for line in report.failure_lines():
        common.say(one_line(line))
    size = report.artifact.get("bytes")
    about = f" ({size:,} bytes)" if size is not None else ""
    click.echo(f"{one_line(report.artifact['path'])}{about}: {'ok' if report.ok else 'FAILED'}")
