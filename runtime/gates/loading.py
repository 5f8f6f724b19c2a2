"""Owns one load of an artifact in a process of its own, timed, with every read of the file.

Run as a script it is that process: what to load as JSON on stdin, what it cost as JSON on stdout.
It imports nothing but what it measures, so that it can measure another version of this package:
the one that ``PYTHONPATH`` leads to.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import Ds4qError
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import GateError

if TYPE_CHECKING:
    from ds4q.runtime.experts.options import CacheOptions

I64 = npt.NDArray[np.int64]
TOKEN = 0  # that is asked for the first answer


class Load(NamedTuple):
    """What a load cost.

    Attributes
    ----------
    seconds, cpu_s : until the model was loaded, and of the processor meanwhile
    first_token_s : until one more token had gone through it
    reads : [N, 3] offset, bytes and whether past the page cache, of each read of the load
    later : the same, of the first token
    paged : what the pager counted; None where all experts are in memory
    ids : the token ids that continue each prompt, where any was given
    """

    seconds: float
    cpu_s: float
    first_token_s: float
    reads: I64
    later: I64
    paged: dict[str, Any] | None
    ids: list[list[int]]


class Reads:
    """Counts what this process reads of one file, whichever handle it reads it by."""

    CALLS = ("pread", "preadv", "read", "readv")

    def __init__(self, path: str) -> None:
        status = os.stat(path)
        self._file = status.st_dev, status.st_ino
        self._seen: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Stand in for the calls of ``os`` from now on."""
        for name in self.CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def take(self) -> list[tuple[int, int, int]]:
        """(offset, bytes, whether past the page cache) of each read since the last call."""
        with self._lock:
            seen, self._seen = self._seen, []
        return seen

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(fd: int, buffer: Any, *more: Any) -> Any:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != self._file:
                return call(fd, buffer, *more)
            offset = more[0] if name.startswith("p") else os.lseek(fd, 0, os.SEEK_CUR)
            found = call(fd, buffer, *more)
            nbytes = found if isinstance(found, int) else len(found)
            direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            with self._lock:
                self._seen.append((offset, nbytes, direct))
            return found

        return counted


def measure(
    path: str | os.PathLike[str],
    *,
    threads: int,
    device: str = "cpu",
    cache: Mapping[str, Any] | None = None,
    tree: str | os.PathLike[str] | None = None,
    limit_s: float | None = None,
    prompts: Sequence[Sequence[int]] = (),
    new_tokens: int = 0,
) -> Load:
    """Load an artifact in a new Python process, and ask it for one token.

    Parameters
    ----------
    cache : options of ``CacheOptions``; None keeps all experts in memory
    tree : root of another version of this package, to measure that
    limit_s : a process that takes longer is ended
    prompts : continued after all else, each by ``new_tokens`` ids, greedily and past ends of text

    Raises
    ------
    GateError : it failed, or was ended
    """
    places = sys.path if tree is None else [os.fspath(tree)]
    search = os.pathsep.join(os.path.abspath(place) for place in places)
    asked = {"path": os.fspath(path), "threads": threads, "device": device, "cache": cache}
    asked |= {"prompts": prompts, "new_tokens": new_tokens}
    # By its own path: an older version has no such module. -P keeps its folder out of the search.
    command = [sys.executable, "-P", os.path.abspath(__file__)]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=os.environ | {"PYTHONPATH": search},
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise GateError(
            "the load did not end", path=path, expected=f"at most {limit_s:.0f} s"
        ) from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise GateError(
            "the process that loads it failed",
            path=path,
            expected="exit status 0",
            found=f"{done.returncode}: {said[-1] if said else 'no word on stderr'}",
        )
    found = json.loads(done.stdout)
    reads, later = (np.array(found[name], np.int64).reshape(-1, 3) for name in ("reads", "later"))
    seconds, cpu_s, first_token_s = (found[n] for n in ("seconds", "cpu_s", "first_token_s"))
    return Load(seconds, cpu_s, first_token_s, reads, later, found["paged"], found["ids"])


def options_of(cache: Mapping[str, Any]) -> CacheOptions:
    """``CacheOptions`` of JSON."""
    from ds4q.runtime.experts.options import CacheOptions  # an older version has none

    profile = {"profile": Path(cache["profile"])} if "profile" in cache else {}
    return CacheOptions(**dict(cache) | profile)


def main() -> None:
    """Do what stdin asks for."""
    asked = json.load(sys.stdin)
    path, options = asked["path"], {}
    load: Callable[..., Any] = Engine.load
    if asked["device"] == "hip":
        from ds4q.runtime.device.engine import HipEngine

        load = HipEngine.load
    else:
        options["threads"] = asked["threads"]
    if asked["cache"] is not None:
        options["cache"] = options_of(asked["cache"])
    reads = Reads(path)
    reads.watch()
    try:
        start, cpu = time.perf_counter(), time.process_time()
        engine = load(path, **options)
        loaded, used = time.perf_counter(), time.process_time()
        of_load = reads.take()
        engine.forward(engine.new_state(), [TOKEN])
        first = time.perf_counter()
        paged = engine.cache_counters() if asked["cache"] is not None else None
        later = reads.take()
        ids = [_continued(engine, prompt, asked["new_tokens"]) for prompt in asked["prompts"]]
        if asked["cache"] is not None or asked["device"] == "hip":
            engine.close()
    except (Ds4qError, OSError, MemoryError) as error:
        sys.exit(str(error))
    times = {"seconds": loaded - start, "cpu_s": used - cpu, "first_token_s": first - start}
    print(json.dumps(times | {"paged": paged, "reads": of_load, "later": later, "ids": ids}))


def _continued(engine: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The ``count`` ids that follow ``prompt``, the most likely one each time."""
    state, found, fed = engine.new_state(), [], list(prompt)
    for _ in range(count):
        fed = [int(engine.forward(state, fed)[-1].argmax())]
        found += fed
    return found


if __name__ == "__main__":
    main()
