"""Owns command lines that are stopped: a process that forks each of them. Asserts nothing itself.

Reads a JSON line ``{"words": [...], "log": file}``, answers with the process id, then with its exit
status. The child is the command as a process of its own, to its very end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class Commands:
    """The test's end of the forking process; use as a context manager."""

    def __enter__(self) -> Commands:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.stopping"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def start(self, words: list[str], log: Path) -> int:
        """The process id of ``ds4q WORDS``, whose stderr goes to ``log``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"words": words, "log": str(log)}) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def end(self, pid: int, timeout_s: float) -> int | None:
        """The exit status; None where it hung, and was killed."""
        hung = threading.Event()

        def kill() -> None:
            hung.set()
            os.kill(pid, 9)

        timer = threading.Timer(timeout_s, kill)
        timer.start()
        status = int(self._answer())
        timer.cancel()
        return None if hung.is_set() else status

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def _child(request: dict[str, Any]) -> None:
    import signal

    from ds4q.artifact import stops
    from ds4q.cli import main

    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, null), (1, null), (2, log)):
        os.dup2(source, target)
    with stops.caught(to_the_end=True):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        main(request["words"])


def _serve() -> None:
    import signal

    from ds4q import api  # noqa: F401  # what every command imports
    from tests.quantize import models

    models.warm_up()
    for line in sys.stdin:
        # What is sent before the child has its handlers waits for them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        child = os.fork()
        if child == 0:
            _child(json.loads(line))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        os.write(1, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    import signal as _signal

    _STOPS = {_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP}
    _serve()
