"""Owns docs/cli.md: writes the text of every ``ds4q COMMAND --help``, 80 columns wide."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from ds4q.cli import COMMANDS, main

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
WIDTH = 80

HEAD = """\
# The command line

Written by `make docs` from the commands' own help; change the help, not this page.

Results go to standard output, everything else to standard error. `--json` prints exactly one JSON
document. Progress bars appear only on a terminal; elsewhere progress is at most one line a second.
Sizes take `8GiB` (1024s), `98GB` (1000s) or a number of bytes.

Names and values from files and servers cannot control a terminal: control characters,
bidirectional controls and line breaks in them appear as `\\x1b` or `\\u202e`, in logs, JUnit and
HTML, too; a byte of a file name that is not UTF-8 appears as `\\xe9`. Messages cut an expected or
found value at 500 characters. A stream whose encoding lacks a character escapes it; the exit
status is about the job. A model's text goes unchanged into a pipe or file; on a terminal U+FFFD
replaces its control characters other than line breaks and tabs, and those that reorder text.

Every JSON document begins with `schema_version`, as do the JSON files that commands write for
scripts (`--stats`, the report of a budget's plan). It is one number for all of them, now 1: it
rises when a key is renamed, removed or changes its meaning. New keys may appear at any time and
leave it as it is. A [registry document](registry.md) and a [load-time baseline](gates.md), which
ds4q reads back, have numbers of their own.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | the job or a check failed; one line on standard error says what, where and what to do |
| 2 | wrong usage |
| 130 | interrupted (SIGINT) |
| 143 | terminated (SIGTERM, SIGHUP) |

The first of these signals stops a command: `quantize` and `registry pull` keep what they have done
and can be continued, other commands remove the files that they had not finished. Signals that
follow change nothing, except that `serve` ends at once. A command that does not end can be ended by
a third signal, 10 seconds or more after the first, by SIGQUIT (Ctrl-\\), or by SIGKILL; then files
stay as a crash leaves them.

| environment | meaning |
|---|---|
| `DS4Q_<COMMAND>_<OPTION>` | value of an option: `DS4Q_RUN_THREADS=4` is `ds4q run --threads 4` |
| `DS4Q_HOME` | folder of models, of your registry and of what was compiled (default below) |
| `DS4Q_REGISTRY_URL` | the [registry](registry.md) document to use in place of the bundled one |
| `DS4Q_REFERENCE=1` | the numpy reference in place of every compiled kernel: slow, for checking |

Without `DS4Q_HOME` that folder is `ds4q` in `XDG_CACHE_HOME`, else `~/.cache/ds4q`. A leading `~`
is expanded in every path, also in `--output=~/x` and in variables, where shells leave it.
"""


def commands() -> dict[str, click.Command]:
    """Every command by its words after ``ds4q``; those of a group follow it."""
    found: dict[str, click.Command] = {}
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        if command is None:
            raise KeyError(name)
        found[name] = command
        if isinstance(command, click.Group):
            found |= {f"{name} {word}": inner for word, inner in sorted(command.commands.items())}
    return found


def help_text(words: str) -> str:
    """What ``ds4q WORDS --help`` prints on a terminal of ``WIDTH`` columns."""
    with ExitStack() as stack:
        command: click.Command = main
        ctx = stack.enter_context(_context(main, "ds4q", None))
        for word in words.split():
            inner = command.get_command(ctx, word) if isinstance(command, click.Group) else None
            if inner is None:
                raise KeyError(words)
            command = inner
            ctx = stack.enter_context(_context(command, word, ctx))
        return command.get_help(ctx)


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return command.make_context(
        name,
        [],
        parent,
        resilient_parsing=True,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
    )


def page() -> str:
    """The whole of docs/cli.md."""
    parts = [HEAD, "## ds4q\n", _block(help_text(""))]
    for name in commands():
        parts += [f"##{'#' * name.count(' ')} ds4q {name}\n", _block(help_text(name))]
    return "\n".join(parts)


def _block(text: str) -> str:
    return "```\n" + "\n".join(line.rstrip() for line in text.splitlines()) + "\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    click.echo(f"wrote {PAGE}")
