"""Owns what is built here and kept under ``DS4Q_HOME``: whole files, and libraries with a digest.

Knows neither what is built nor for which device.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import xxhash

from ds4q.artifact.files import write_whole
from ds4q.artifact.locks import FileLock
from ds4q.hipkern.errors import HipError, HipLibraryError

NO_ROOM = "No space left on device"  # as compilers and linkers tell ENOSPC


def publish(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` whole, or not at all, with the mode that the umask allows."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data, mode=0o666, replace=True)  # in a folder of ds4q's own
    except OSError as error:
        raise _not_kept(error, path.parent) from None


def libraries(home: Path, names: Iterable[str], make: Callable[[Path], None]) -> Path:
    """``home``, with the libraries ``names`` in its ``lib``; built where one is absent or damaged.

    ``make`` is given an empty folder and puts ``lib`` into it.
    """
    names = sorted(names)
    if _whole(home, names):
        return home
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        turn = home.with_name(f"{home.name}.lock")
        with open(turn, "wb") as file:
            lock = FileLock(file.fileno(), turn, wait=True)
            try:  # who comes second finds what the first has built
                if not _whole(home, names):
                    _build(home, names, make)
            finally:
                lock.release()
    except OSError as error:
        raise _not_kept(error, home.parent) from None
    return home


def _build(home: Path, names: Sequence[str], make: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(
        prefix=home.name, suffix=".part", dir=home.parent, ignore_cleanup_errors=True
    ) as folder:
        made = Path(folder)
        make(made)
        digest = _digest(made, names)
        (home / "lib").mkdir(parents=True, exist_ok=True)
        for name in names:  # a process that has the old file open keeps it
            os.replace(made / "lib" / name, home / "lib" / name)
    publish(home / "digest", digest)


def _digest(home: Path, names: Sequence[str]) -> bytes:
    parts = [xxhash.xxh3_128_hexdigest((home / "lib" / name).read_bytes()) for name in names]
    return "\n".join(parts).encode()


def _whole(home: Path, names: Sequence[str]) -> bool:
    try:
        return (home / "digest").read_bytes() == _digest(home, names)
    except OSError:
        return False


def _not_kept(error: OSError, folder: Path) -> HipError:
    if error.errno == errno.ENOSPC:
        remedy = "make room there, or set DS4Q_HOME to a folder on another disk"
    else:
        remedy = "set DS4Q_HOME to a folder that can be written"
    return HipError(
        f"what was compiled cannot be kept: {error.strerror}", path=folder, remedy=remedy
    )


def run_compilers(lines: Sequence[list[str]], what: str, log: Path) -> None:
    """Run compilers at once; all have ended when this returns or raises.

    Raises
    ------
    HipLibraryError : one failed to build ``what``; with its first line, and all it said in ``log``
    """
    runs: list[subprocess.Popen[bytes]] = []
    try:
        runs.extend(_start(line) for line in lines)  # keeps those before one that does not start
        texts = [run.communicate()[0].decode(errors="replace") for run in runs]
    finally:
        for run in runs:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGTERM)  # g++ is a parent of what compiles
            with run:  # closes its pipe and waits
                pass
    for line, run, text in zip(lines, runs, texts, strict=True):
        if run.returncode != 0:
            raise _failed(line, run.returncode, text, what, log)


def _start(line: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    except OSError as error:
        raise HipLibraryError(
            f"the compiler cannot be started: {error.strerror}",
            path=line[0],
            remedy="install g++ anew",
        ) from None


def _failed(line: list[str], status: int, text: str, what: str, log: Path) -> HipLibraryError:
    said = f"{what} did not compile with {line[0]}"
    found = first_error(text)
    if status < 0:
        stopped = signal.strsignal(-status) or f"signal {-status}"
        return HipLibraryError(
            f"{said}, which was stopped", found=stopped, remedy="run the command again"
        )
    if NO_ROOM in found:
        room = f"make room in {log.parent} and in {tempfile.gettempdir()}"
        return HipLibraryError(said, found=found, remedy=f"{room}, or set DS4Q_HOME and TMPDIR")
    publish(log, f"{' '.join(line)}\n\n{text}".encode())
    return HipLibraryError(
        said,
        path=log,
        found=found or f"status {status} without a word",
        remedy="the file holds the compiler's whole log; install a newer g++, or report it",
    )


def first_error(log: str) -> str:
    """The line of a compiler's log that says what is wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line for line in lines if NO_ROOM in line]  # a linker's, before collect2's "error"
    told += [line for line in lines if re.search(r"\berror\b", line)]
    return next(iter([*told, *lines]), "")
