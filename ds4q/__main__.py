"""Owns starting: what ``ds4q`` and ``python -m ds4q`` call. Imports the rest when it is called."""

import sys


def entry() -> None:
    """The ``ds4q`` command as a process of its own."""
    try:
        from ds4q.artifact import stops

        with stops.caught(to_the_end=True):
            from ds4q.cli import main

            main()
    except KeyboardInterrupt as stop:  # before the command line could take it, or after
        terminated = "ds4q.artifact.stops" in sys.modules and isinstance(stop, stops.Terminated)
        sys.stderr.write("ds4q: terminated\n" if terminated else "ds4q: interrupted\n")
        sys.exit(143 if terminated else 130)


if __name__ == "__main__":
    entry()
