"""Lets ``python -m ds4q`` do what the ``ds4q`` command does."""

from ds4q.cli import entry

if __name__ == "__main__":
    entry()
