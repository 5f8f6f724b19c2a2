"""What commands share: output, options, sizes, progress, last words. No command's work.

Standard output carries results only; whatever is for people's eyes while they wait goes to
standard error, and losing standard error never ends a job. Commands write through the functions of
this module alone: names and values from files and servers cannot send controls to the terminal.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ds4q.artifact.errors import MAX_PATH, cut, one_line
from ds4q.artifact.places import expanded

if TYPE_CHECKING:
    from ds4q.artifact.files import Recognize
    from ds4q.artifact.report import Report

F = TypeVar("F", bound=Callable[..., Any])

VERBOSE = "ds4q.verbose"
"""Key of ``click.Context.meta`` under which ``-v`` is known to the whole command line."""

MAX_THREADS = 1024
PLAIN_LINE_EVERY_S = 1.0
RATE_OVER_LINES = 10
PLAIN_TABLE_WIDTH = 200

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a model's text may not send to a terminal: all controls but newline and tab, and what
reorders the text after it. Joiners and direction marks belong to some languages, and stay."""


# --- output -----------------------------------------------------------------------------------


def line(text: str) -> None:
    """Write one line of a result to stdout, see ``one_line``."""
    click.echo(one_line(text), file=sys.stdout)  # by its name: else click writes UTF-8 as ASCII


def lines(text: str) -> None:
    """Write a result of several lines to stdout; what is foreign in it has no line breaks."""
    for each in text.removesuffix("\n").split("\n"):
        line(each)


def write_text(text: str) -> None:
    """Write ``text`` as it is to stdout, in UTF-8 whatever the locale says.

    For a terminal, a model's text is made ``visible`` first; into a pipe or file its bytes go
    unchanged.
    """
    if text:
        click.echo(text.encode("utf-8"), nl=False)


def visible(text: str) -> str:
    """``text`` of a model without what a terminal would obey: that becomes U+FFFD."""
    return _CONTROLS.sub("\ufffd", text.replace("\r", ""))


def say(text: str, *, style: Callable[[str], str] = str, newline: bool = True) -> None:
    """Write one line to stderr; a stderr that is gone or full does not fail the job.

    Parameters
    ----------
    style : adds the terminal's own escapes
    newline : end the line; else it waits for an answer
    """
    with suppress(OSError):  # by its name: above a bar, if there is one
        click.echo(style(one_line(text)), nl=newline, file=sys.stderr)


def say_traceback(error: BaseException) -> None:
    """Write the traceback of ``error`` to stderr."""
    for each in "".join(traceback.format_exception(error)).rstrip().split("\n"):
        say(each)


def warn(text: str) -> None:
    """Write a warning to stderr; ``--quiet`` does not hide it."""
    say(f"ds4q: warning: {cut(text, MAX_PATH)}")


def emit_json(document: dict[str, Any]) -> None:
    """Write the one JSON document of ``--json`` to stdout, with its ``schema_version``."""
    from ds4q.artifact.report import json_text

    click.echo(json_text(document), nl=False)


@contextmanager
def last_words(line: Callable[[], str | None]) -> Iterator[None]:
    """Should the block be stopped (SIGINT, SIGTERM), end the command's output with ``line()``.

    The line is asked for at the stop; None leaves nothing to say.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        if text := line():
            stop.add_note(text)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Should the block be stopped, say whether ``path`` was written by it."""
    from ds4q.artifact.files import file_identity

    before = file_identity(path)

    def line() -> str:
        if file_identity(path) != before:
            return f"{path} is written"
        return f"{path} was not written; nothing unfinished was left"

    with last_words(line):
        yield


# --- files that a user names for a report ------------------------------------------------------


def claim_report(path: Path, option: str, is_ours: Recognize) -> None:
    """Refuse, before any work, a report file that could not be written or is not ours to replace.

    An existing file is replaced only if it is empty or begins as an earlier report does; a slip of
    the hand must not cost an artifact.
    """
    from ds4q.artifact.files import empty_or

    if not path.name:  # of "." and "/"
        raise click.BadParameter(f"no file is named: {str(path)!r} is a folder", param_hint=option)
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(path.parent)!r}", param_hint=option)
    if path.exists():
        if not path.is_file():
            raise click.BadParameter(f"{str(path)!r} is not a file", param_hint=option)
        if not empty_or(is_ours)(path):
            raise click.BadParameter(
                f"{str(path)!r} exists and is no earlier report; choose another name",
                param_hint=option,
            )
        if _is_stdout(path):
            raise click.BadParameter(
                f"{str(path)!r} is where standard output goes; choose another name",
                param_hint=option,
            )
    if not os.access(path.parent, os.W_OK):
        raise click.BadParameter(f"cannot write in {str(path.parent)!r}", param_hint=option)


def _is_stdout(path: Path) -> bool:
    with suppress(OSError, ValueError):  # no file, or none that the system knows
        return os.path.samestat(os.fstat(sys.stdout.fileno()), path.stat())
    return False


def write_report(path: Path, text: str, is_ours: Recognize) -> None:
    """Write ``text`` to a claimed file atomically; another file that appeared there is kept."""
    from ds4q.artifact.files import empty_or, write_whole

    try:
        write_whole(path, text, mode=0o666, replace=empty_or(is_ours))
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def claim_page(path: Path) -> None:
    """``claim_report`` for a page of ``--html``; without jinja2, ``PageError`` says what to do."""
    from ds4q.quantize.page import is_page, load_template

    claim_report(path, "--html", is_page)
    load_template()


def write_page(path: Path, text: str) -> None:
    """``write_report`` for a page that ``claim_page`` has claimed."""
    from ds4q.quantize.page import is_page

    write_report(path, text, is_page)


# --- options ----------------------------------------------------------------------------------


class Size(click.ParamType):
    """Bytes: ``8GiB`` (1024s), ``98GB`` or ``1.5GB`` (1000s), or a plain number."""

    name = "size"
    _PATTERN = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*(?:([KMGTP])(I?)B|B)?", re.ASCII | re.I)
    _POWERS = " KMGTP"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = self._PATTERN.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a size; write 8GiB, 98GB, 1.5GB or bytes", param, ctx)
        number, letter, binary = match.groups()
        power = self._POWERS.index(letter.upper()) if letter else 0
        size_bytes = int(Decimal(number) * (1024 if binary else 1000) ** power)
        if size_bytes < 1:
            self.fail(f"{value!r} is less than one byte", param, ctx)
        return size_bytes


SIZE = Size()


class UserPath(click.Path):
    """A path in which a leading ``~`` is expanded: shells leave ``--output=~/x`` as it is.

    An empty one, such as a variable that is not set leaves in a script, would mean this folder.
    """

    @classmethod
    def of(cls, path: click.Path) -> UserPath:
        """The same type, with ``~`` expanded."""
        made = cls()
        vars(made).update(vars(path))
        return made

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(PATH_OR_WORD.convert(value, param, ctx), param, ctx)


class PathOrWord(click.ParamType):
    """A path, or a word that is something else, such as a URL or a name."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty; name a file or folder, '.' for this one", param, ctx)
        return expanded(value) if isinstance(value, str) else value


PATH_OR_WORD = PathOrWord()


def available_cores() -> int:
    """CPU cores that this process may use (its affinity mask, not the machine's count)."""
    return len(os.sched_getaffinity(0))


def threads_option(command: F) -> F:
    """``--threads N``: defaults to every core that the process may use."""
    return click.option(
        "--threads",
        type=click.IntRange(1, MAX_THREADS),
        default=available_cores,
        show_default="all cores available",
        metavar="N",
        help="Number of threads; results never depend on it.",
    )(command)


def json_option(command: F) -> F:
    """``--json``, passed as ``as_json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document on stdout."
    )(command)


def html_option(command: F) -> F:
    """``--html FILE.html``: to be claimed before any work, see ``claim_page``."""
    return click.option(
        "--html",
        type=click.Path(path_type=Path),
        metavar="FILE.html",
        help="Also write a page with size breakdown and expert maps (needs ds4q[report]).",
    )(command)


def talk_options(command: F) -> F:
    """``-q/--quiet`` and ``-v/--verbose``."""

    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
        ctx.meta[VERBOSE] = value
        return value

    command = click.option(
        "-v",
        "--verbose",
        is_flag=True,
        callback=remember,
        help="Say more on stderr.",
    )(command)
    return click.option(
        "-q", "--quiet", is_flag=True, help="No progress and no statistics on stderr."
    )(command)


# --- progress ---------------------------------------------------------------------------------

Advance = Callable[[int], None]
"""Reports so many more units done; any thread may call it."""


@contextmanager
def progress(
    label: str, total: int, *, unit: str = "bytes", quiet: bool = False
) -> Iterator[Advance]:
    """Show how far a job is: a bar where stderr is a terminal, else at most one line a second.

    Parameters
    ----------
    label : what is being done, in a word or two
    total : units that make the job complete
    unit : ``"bytes"``, or the plural of what is counted
    quiet : show nothing
    """
    label = one_line(label)
    if quiet:
        yield lambda amount: None
    elif _stderr_can_redraw():
        with _bar(label, total, unit) as advance:
            yield advance
    else:
        yield _PlainLines(label, total, unit).advance


def _stderr_can_redraw() -> bool:
    dumb = os.environ.get("TERM", "dumb").lower() in ("", "dumb", "unknown")
    return not dumb and sys.stderr.isatty()


class _PlainLines:
    """Progress for logs: whole lines, the first after a second, none while nothing moves.

    Bytes also have a rate, of the last lines, and the time that the rest takes at that rate. What
    the first call reports may be an earlier run's work, and does not count for it.
    """

    def __init__(self, label: str, total: int, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = 0
        self._next_line_s = time.monotonic() + PLAIN_LINE_EVERY_S
        self._seen: deque[tuple[float, int]] = deque(maxlen=RATE_OVER_LINES)
        self._lock = threading.Lock()

    def advance(self, amount: int) -> None:
        with self._lock:
            self._done += amount
            now_s = time.monotonic()
            if not self._seen:
                self._seen.append((now_s, self._done))
            if now_s < self._next_line_s:
                return
            self._next_line_s = now_s + PLAIN_LINE_EVERY_S
            done = self._done
            pace = self._pace(now_s) if self._unit == "bytes" else ""
            self._seen.append((now_s, done))
        percent = 100 * done // self._total if self._total else 100
        amounts = f"{amount_text(done, self._unit)} of {amount_text(self._total, self._unit)}"
        say(f"{self._label}: {percent} % ({amounts}{pace})")

    def _pace(self, now_s: float) -> str:
        since_s, done = self._seen[0]
        if now_s <= since_s or self._done <= done:
            return ""
        rate = (self._done - done) / (now_s - since_s)
        left_s = max(self._total - self._done, 0) / rate
        return f", {amount_text(int(rate))}/s, {time_text(left_s)} left"


def time_text(seconds: float) -> str:
    """A time for people: ``45 s``, ``12 min``, ``3 h 5 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def amount_text(amount: int, unit: str = "bytes") -> str:
    """``amount`` for people: ``3.42 GB`` (1000s) for bytes, else ``17 tokens``."""
    if unit != "bytes":
        return f"{amount:,} {unit}"
    value, names = float(amount), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(names) > 1:
        value /= 1000
        names.pop(0)
    return f"{amount} bytes" if names[0] == "bytes" else f"{value:.3g} {names[0]}"


class _SafeStderr:
    """Stderr for rich, whose refresh thread would die with a traceback when the terminal goes."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


@contextmanager
def _bar(label: str, total: int, unit: str) -> Iterator[Advance]:
    from rich import progress as bars  # 60 ms that only a terminal has to pay
    from rich.console import Console

    counts = (
        (bars.DownloadColumn(), bars.TransferSpeedColumn())
        if unit == "bytes"
        else (bars.MofNCompleteColumn(), bars.TextColumn(unit, markup=False))
    )
    columns = bars.Progress(
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        *counts,
        bars.TimeRemainingColumn(),
        console=Console(file=_SafeStderr()),  # type: ignore[arg-type]  # what rich uses of IO[str]
        transient=True,
    )
    with columns:
        task = columns.add_task(label, total=total)
        yield lambda amount: columns.advance(task, amount)


def print_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    *,
    left: Collection[str] | None = None,
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print a table on stdout: as wide as it needs outside a terminal, without escapes.

    Parameters
    ----------
    head : names of the columns
    rows : cells; None is a gap between sections
    left : columns that are flush left, the others are not; None: all of them
    styles : word that a cell begins with -> its style on a terminal that has colours
    """
    from rich.console import Console  # slow to import, and only people need it
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in head:
        flush_left = left is None or name in left
        table.add_column(
            Text(one_line(name)),
            justify="left" if flush_left else "right",
            no_wrap=left is not None,
        )
    for row in rows:
        if row is None:
            table.add_section()
            continue
        cells = []
        for cell in row:
            style = (styles or {}).get(cell.split(" ")[0], "")
            cells.append(Text(one_line(cell), style=style))  # text, never markup
        table.add_row(*cells)
    terminal = sys.stdout.isatty()
    Console(width=None if terminal else PLAIN_TABLE_WIDTH, highlight=False).print(table)


def print_checks(report: Report) -> None:
    """Print the checks of ``report`` as a table; failures are listed by the caller."""
    head = ("check", "result", "seconds", "figures")
    styles = {"ok": "green", "FAILED": "red"}
    styles |= dict.fromkeys(("UNDECIDED", "measured,", "not"), "yellow")
    print_table(head, report.rows(), styles=styles)
