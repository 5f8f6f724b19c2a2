"""Owns the ``ds4q`` group: which commands exist, and what an error becomes. No command's work.

A command is a module here that exposes ``command``; it is imported when it is called, so that
``ds4q --help`` needs neither numpy nor numba. Every way to end is decided in ``ending``.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from ds4q import __version__
from ds4q.artifact import stops
from ds4q.artifact.errors import (
    MAX_PATH,
    Ds4qError,
    ThreadRefusedError,
    cut,
    escape_unencodable,
)
from ds4q.artifact.places import reason
from ds4q.cli.common import VERBOSE, UserPath, say, say_traceback

COMMANDS = {
    "quantize": "Turn a DeepSeek-V4 checkpoint into an HFQ artifact.",
    "verify": "Prove that an artifact is sound and equal to its source.",
    "inspect": "Show what is in an artifact, a receipt, a trace or a checkpoint.",
    "run": "Generate text from an artifact.",
    "serve": "Serve an artifact over HTTP, as OpenAI's API, with a page to chat.",
    "calibrate": "Measure what a model's experts see, for quantize --imatrix.",
    "cache": "Choose an expert cache by what a recorded run asked for.",
    "adapter": "Fit and judge what predicts experts, for run --prefetch.",
    "export": "Write an artifact as safetensors or GGUF.",
    "registry": "Know artifacts by tag: list, fetch, register, verify, remove.",
    "sign": "Sign an artifact and its receipt.",
    "doctor": "Report what this machine can do.",
}
"""Name and one line of each command, in the order of ``ds4q --help``."""

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
STDOUT = 1


class Ds4q(click.Group):
    """The group: commands by name from ``COMMANDS``, errors as one line and an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        # What libraries start of their own where they can, and end the process where they cannot.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if cmd_name != "adapter":  # the one that multiplies large matrices
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        command: click.Command = importlib.import_module(f"ds4q.cli.{cmd_name}").command
        _prepare(command, f"DS4Q_{cmd_name}")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            super().invoke(ctx)
            sys.stdout.flush()  # a full disk or a closed pipe shows here, not after exit
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            ctx.exit(ending(error, verbose=ctx.meta.get(VERBOSE, False)))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run one command line and end in ``SystemExit`` with the documented status."""
        # One name under `python -m ds4q` too; the exit statuses are decided here, not by click.
        kwargs |= {"prog_name": "ds4q", "standalone_mode": False}
        with _standard_streams(), stops.caught():
            try:
                status = super().main(*args, **kwargs)
            except click.ClickException as error:
                words = io.StringIO()
                error.show(file=words)
                for each in words.getvalue().rstrip("\n").split("\n"):  # it quotes arguments
                    say(each)
                status = error.exit_code
            except click.Abort as error:  # what click makes of a stop outside of ``invoke``
                stop = stops.stop_behind(error)
                status = EXIT_INTERRUPTED if stop is None else ending(stop)
            except (Exception, KeyboardInterrupt) as error:  # help to a full disk, say
                status = ending(error)
        sys.exit(status)


def _prepare(command: click.Command, prefix: str) -> None:
    """Let options be set as ``PREFIX_OPTION``, and expand ``~`` in every path.

    The commands of a group have its name in between. click's own rule would follow the names of
    Python parameters.
    """
    for option in command.params:
        if type(option.type) is click.Path:
            option.type = UserPath.of(option.type)
        if isinstance(option, click.Option):
            word = max(option.opts, key=len).lstrip("-")
            option.envvar = f"{prefix}_{word}".upper().replace("-", "_")
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            _prepare(inner, f"{prefix}_{name}")


def ending(error: BaseException, *, verbose: bool = False) -> int:
    """Say on stderr what ended the command, in one line, and return the exit status.

    A stop (SIGINT, SIGTERM, SIGHUP) is followed by the notes that ``common.last_words`` left on it.
    """
    if isinstance(error, KeyboardInterrupt):
        word, status = stops.word_of(error)
        say(f"ds4q: {word}")
        for note in getattr(error, "__notes__", []):
            say(note)
        return status
    if isinstance(error, BrokenPipeError):
        return EXIT_FAILED  # the reader left: `ds4q inspect FILE | head`
    error = ThreadRefusedError.of(error) or error
    if isinstance(error, Ds4qError):
        text = str(error)
    elif isinstance(error, OSError):
        text = _os_error_text(error)
    elif isinstance(error, MemoryError):
        text = f"out of memory: {error}" if str(error) else "out of memory"
    else:
        text = f"internal error: {type(error).__name__}: {error}; this is a bug in ds4q: please "
        text += "report it with the lines above" if verbose else "report it with what -v adds"
        if verbose:
            say_traceback(error)
        text = cut(text, MAX_PATH)
    say(f"ds4q: error: {text}")
    return EXIT_FAILED


def _os_error_text(error: OSError) -> str:
    """``FILE: No space left on device``, and the second file where a call has two (a rename)."""
    if error.filename == STDOUT:
        return f"standard output cannot be written: {reason(error)}"
    files = [
        os.fsdecode(name) if isinstance(name, bytes) else str(name)
        for name in (error.filename, error.filename2)
        if name is not None
    ]
    return f"{' -> '.join(files)}: {reason(error)}" if files else reason(error)


class _Stdout(io.BufferedWriter):
    """Standard output, whose errors name its descriptor: whatever writes to it, help included.

    Not the raw stream: a stop that is raised between a raw write and its return repeats the bytes.
    """

    def write(self, data: Any, /) -> int:
        with _naming_stdout():
            return super().write(data)

    def flush(self) -> None:
        with _naming_stdout():
            super().flush()


@contextmanager
def _naming_stdout() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = STDOUT
        raise


def _name_stdout() -> None:
    """Replace ``sys.stdout`` by a stream whose errors name it; tests' own streams stay."""
    old = sys.stdout
    if sys.__stdout__ not in (old, None) or not isinstance(old, io.TextIOWrapper):
        return
    old.flush()
    sys.stdout = io.TextIOWrapper(
        _Stdout(io.FileIO(STDOUT, "w", closefd=False)),
        encoding=old.encoding,
        line_buffering=old.line_buffering,
    )


@contextmanager
def _standard_streams() -> Iterator[None]:
    """Have all three, and let a reader that left neither complain nor change the exit status.

    What is said to a stderr that was closed goes nowhere; a result for such a stdout is an error.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # Else the next file opened would become, say, stderr.
            os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_RDWR)
        if getattr(sys, name) is None:  # Python's word for a stream that was closed at start
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    _name_stdout()
    escape_unencodable(sys.stdout, sys.stderr)  # an encoding is never why a job fails
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # Python flushes once more at exit: let that go nowhere
                with suppress(OSError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@click.command(
    cls=Ds4q,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="ds4q %(version)s")
def main() -> None:
    """Quantize, verify and run DeepSeek-V4 checkpoints as HFQ artifacts.

    Results go to stdout, everything else to stderr. Exit status: 0 done, 1 the job or a check
    failed, 2 wrong usage, 130 interrupted, 143 terminated. Options may also be set in the
    environment: DS4Q_RUN_THREADS=4 is --threads 4 for 'ds4q run'.
    """
