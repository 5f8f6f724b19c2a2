"""Owns the processes in which a job is killed at a chosen system call. Asserts nothing itself.

Two uses as a script. With no argument it serves requests, one JSON line each: a fork of a process
that has everything compiled runs one job, so that a kill costs milliseconds. With arguments
``SIGNAL CALL N WORDS...`` it is the command line ``ds4q WORDS...``, which sends itself the signal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CALLS = ("pwrite", "write", "fsync", "ftruncate", "link", "replace", "unlink")


def places(call: str) -> list[tuple[Any, str]]:
    """Where a system call is made: ``replace`` is the publishing of a file, however it is done."""
    from ds4q.quantize import outputs

    return [(outputs, "publish")] if call == "replace" else [(os, call)]


class Counted:
    """Counts the calls of some functions of ``os``; before the chosen one a signal is sent."""

    def __init__(self, call: str | None = None, n: int = 0, number: int = signal.SIGKILL) -> None:
        self.counts = dict.fromkeys(CALLS, 0)
        self._lock = threading.Lock()
        for name in CALLS:
            for module, attribute in places(name):
                real = getattr(module, attribute)
                setattr(module, attribute, self._counted(name, real, call, n, number))

    def _counted(self, name: str, real: Any, call: str | None, n: int, number: int) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.counts[name] += 1
                due = name == call and self.counts[name] == n
            if due:
                os.kill(os.getpid(), number)
                _wait_for_the_stop()
            return real(*args, **kwargs)

        return wrapper


def _wait_for_the_stop() -> None:
    """Hold a thread that writes until the stop is raised in the main one, however busy it is."""
    from ds4q.artifact import stops

    if threading.current_thread() is not threading.main_thread():
        while not stops._stops.raised:
            time.sleep(0.001)


class Server:
    """The test's end of a serving script; use as a context manager."""

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def job(
        self,
        source: Path,
        out: Path,
        *,
        call: str | None = None,
        n: int = 0,
        at_bytes: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Run one job. ``call`` and ``n``, or ``at_bytes`` of progress, say where it is killed.

        Returns ``{"killed": bool, "error": text or None, "counts": calls of a whole run}``.
        """
        request: dict[str, Any] = {"source": str(source), "out": str(out), "options": options}
        request |= {"call": call, "n": n, "at_bytes": at_bytes}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def _serve() -> None:
    from tests.quantize import models  # imports and compiles; no thread may be alive at the fork

    models.warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(readable)
            _run(request, writable)
        os.close(writable)
        with os.fdopen(readable) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        answer = json.loads(text) if text else {"error": None, "counts": {}}
        print(json.dumps(answer | {"killed": killed}), flush=True)


def _run(request: dict[str, Any], answer: int) -> None:
    from contextlib import contextmanager

    from tests.quantize import models

    real_write = os.write
    trap = Counted(request["call"], request["n"])
    done, lock = 0, threading.Lock()

    @contextmanager
    def progress(label: str, total: int) -> Any:
        def advance(nbytes: int) -> None:
            nonlocal done
            with lock:
                done += nbytes
            if request["at_bytes"] is not None and done >= request["at_bytes"]:
                os.kill(os.getpid(), signal.SIGKILL)

        yield advance

    error = None
    resumed = 0
    try:
        summary = models.run(
            Path(request["source"]), Path(request["out"]), progress=progress, **request["options"]
        )
        resumed = summary.resumed_bytes
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    report = {"error": error, "counts": trap.counts, "resumed_bytes": resumed}
    real_write(answer, json.dumps(report).encode())
    os._exit(0)


def _command_line(number: int, call: str, n: int, words: list[str]) -> None:
    from ds4q.cli import main

    sys.argv = ["ds4q", *words]
    Counted(call, n, number)
    main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if len(sys.argv) > 1:
        _command_line(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        _serve()
