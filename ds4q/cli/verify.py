"""Owns ``ds4q verify``: options in, report out. No check: ``ds4q/api.py`` joins them.

What several paths and folders stand for is found by ``ds4q/targets.py``.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ds4q.artifact.errors import Ds4qError
from ds4q.cli import common
from ds4q.cli.gates import gate_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ds4q.api import Verification
    from ds4q.artifact.report import Report
    from ds4q.runtime.gates import Gate


@click.command("verify")
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH..."
)
@click.option(
    "--source",
    "sources",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="SRC",
    help="Compare every code, scale byte and dense value with this checkpoint; repeatable: each "
    "artifact is compared with the one whose fingerprint it names.",
)
@click.option(
    "--receipt",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Receipt to check against; else FILE.hfq.receipt, or one in the folder that fits.",
)
@click.option("--require-receipt", is_flag=True, help="Fail where an artifact has no receipt.")
@click.option(
    "--registry",
    "tag",
    metavar="TAG",
    help="Also hold the artifact to the registry's entry: length, SHA-256, kind, sidecars.",
)
@click.option(
    "--public-key",
    type=click.Path(path_type=Path),
    metavar="KEY.pem",
    help="Fail unless this key has signed each artifact (needs ds4q[sign]).",
)
@click.option(
    "--signature",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The artifact's signature, if not FILE.hfq.sig.",
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
    "run there, too.",
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
    paths: tuple[Path, ...],
    sources: tuple[Path, ...],
    receipt: Path | None,
    require_receipt: bool,
    tag: str | None,
    public_key: Path | None,
    signature: Path | None,
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

    PATH may also be a registry file, a folder of artifacts and registry files, or several of all
    these: each is checked, and entries are held to the files beside them.
    ds4q verify models/ --source DeepSeek-V4-Flash --junit report.xml

    Exit status 0: every check passed; 1: at least one failed or is undecided (load-time on a
    machine that is too noisy).
    """
    if not sources and (imatrix is not None or errors_only):
        raise click.UsageError("--imatrix and --errors-only belong to --source")
    if signature is not None and public_key is None:
        raise click.UsageError("--signature belongs to --public-key")
    _claim_reports(junit, html)

    options: dict[str, Any] = {
        "imatrix": imatrix,
        "errors_only": errors_only,
        "public_key": public_key,
        "require_receipt": require_receipt,
        "device": device,
        "threads": threads,
        "progress": partial(common.progress, quiet=quiet),
        "tell": (lambda line: None) if quiet else common.say,
    }
    together = len(paths) > 1 or len(sources) > 1 or paths[0].is_dir()
    reports: list[Report]
    page = None
    with _reported(junit, paths[0]):  # until it is done, no earlier report stands
        from ds4q import targets  # seconds, in which a stop may come

        found = targets.Targets.of(paths)
        for link in found.unfollowed:
            common.warn(f"{link}: a link to a folder, which was not followed; name it to check it")
        if together or found.artifacts != paths:
            if receipt or tag or signature or html or gates:
                raise click.UsageError(
                    "--receipt, --registry, --signature, --gate, --html: for one artifact, and "
                    "one --source"
                )
            reports = [*targets.verify_targets(found, sources=sources, **options)]
        else:
            source = sources[0] if sources else None
            options |= {"source": source, "receipt": receipt, "gates": gates}
            options |= {"signature": signature}
            page = _verify_one(paths[0], tag, options)
            reports = [page]
    try:
        if junit is not None:  # first: a full standard output must not cost it
            _write_junit(junit, reports)
        if html is not None and page is not None:
            common.write_page(html, _page(page))
    finally:  # nor it what is on the screen
        if as_json:
            common.emit_json(targets.document_of(reports) if together else reports[0].document())
        else:
            _print_all(reports, together)
    if not all(report.ok for report in reports):
        click.get_current_context().exit(1)


def _claim_reports(junit: Path | None, html: Path | None) -> None:
    """Refuse, before any work, reports that could not be written or that are the user's."""
    from ds4q.artifact.report import is_junit

    if junit is not None:
        common.claim_report(junit, "--junit", is_junit)
    if html is not None:
        if html == junit:
            raise click.UsageError("--html and --junit name the same file")
        common.claim_page(html)


def _write_junit(path: Path, reports: list[Report]) -> None:
    from ds4q.artifact.report import is_junit, junit

    common.write_report(path, junit(reports), is_junit)


@contextmanager
def _reported(junit: Path | None, path: Path) -> Iterator[None]:
    """Replace an earlier report, which must not stand for this run, by one that says what failed.

    While the block runs, and if it is stopped in whatever way, it says that the run did not finish.
    """
    from ds4q.artifact.report import Failure, Report

    def write(message: str) -> None:
        if junit is not None:
            report = Report({"path": str(path), "name": path.name})
            with report.check("verify") as check:
                check.fail(Failure(message))
            _write_junit(junit, [report])

    write("the run did not finish")
    try:
        yield
    except (Ds4qError, OSError) as error:
        write(str(error))
        raise


def _verify_one(path: Path, tag: str | None, options: dict[str, Any]) -> Verification:
    """One artifact, held to the registry's entry where that is asked for."""
    from ds4q import targets
    from ds4q.registry.entries import load_registry

    entry = None if tag is None else load_registry().resolve(tag)
    return targets.verify_artifact(path, entry=entry, **options)


def _page(report: Verification) -> str:
    from ds4q import __version__
    from ds4q.artifact.describe import describe
    from ds4q.quantize.page import gather, render

    if report.reader is None:
        document = {"kind": "artifact", "path": report.artifact["path"]}
        return render(gather(document, [], __version__, report))
    return render(gather(*describe(report.reader), __version__, report, report.errors))


def _print_all(reports: list[Report], together: bool) -> None:
    for report in reports:
        _print(report, f"{report.artifact['path']}: " if together else "")
    if together:
        failed = sum(not report.ok for report in reports)
        verdict = f"FAILED ({failed:,})" if failed else "ok"
        common.line(f"{len(reports):,} targets: {verdict}")


def _print(report: Report, prefix: str) -> None:
    """The table on stdout; failures on stderr, where errors go, ``prefix`` before each."""
    common.print_checks(report)
    for check in report.checks:
        for note in check.notes:
            common.line(f"{check.name}: {note}")
    for line in report.failure_lines():
        common.say(prefix + line)
    size = report.artifact.get("bytes")
    about = f" ({size:,} bytes)" if size is not None else ""
    common.line(f"{report.artifact['path']}{about}: {report.result}")
