"""Owns starting: what ``ds4q`` and ``python -m ds4q`` call. Imports the rest when it is called."""

import sys


def entry() -> None:
    """The ``ds4q`` command as a process of its own."""
    try:
        from ds4q.cli import OWN_PROCESS, main
    except KeyboardInterrupt:  # a stop while it is imported ends like any other
        sys.stderr.write("ds4q: interrupted\n")
        sys.exit(130)  # as ds4q.cli.EXIT_INTERRUPTED, which is not there
    main(obj=OWN_PROCESS)


if __name__ == "__main__":
    entry()
