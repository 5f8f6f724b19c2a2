"""A terminal of its own for a command: what a test types goes in, what is shown comes out."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PATIENCE_S = 300.0  # only broken code waits so long
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")

# Makes its stdin the terminal of its session, from which Ctrl-C comes, and becomes the command.
LEADER = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """What a user sees of a command, and does.

    Attributes
    ----------
    process : the command, which leads a session of its own
    shown : all that was shown so far
    """

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self._seen = 0
        self._raw = b""

    @property
    def shown(self) -> str:
        return self._raw.decode("utf-8", "replace")

    def until(self, words: str) -> str:
        """All that was shown since the last call, up to and with ``words``."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.shown.find(words, self._seen)) < 0:
            if time.monotonic() > deadline or not self._read():
                raise AssertionError(f"no {words!r} in {self.shown[self._seen :]!r}")
        start, self._seen = self._seen, found + len(words)
        return self.shown[start : self._seen]

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def end(self) -> str:
        """All that was shown since the last ``until``, once the command has ended."""
        while self._read():
            pass
        self.process.wait(PATIENCE_S)
        start, self._seen = self._seen, len(self.shown)
        return self.shown[start:]

    def hang_up(self) -> None:
        """Close the terminal under the command, and wait for its end."""
        os.close(self._fd)
        self._fd = -1
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """Leave nothing behind."""
        self.process.kill()
        self.process.wait()
        if self._fd >= 0:
            os.close(self._fd)

    def _read(self) -> bool:
        """Wait for more; False once there is none."""
        if not select.select([self._fd], [], [], PATIENCE_S)[0]:
            return False
        data = b""
        with suppress(OSError):  # what Linux says when the other end is closed
            data = os.read(self._fd, 65536)
        self._raw += data
        return bool(data)


def plain(shown: str) -> str:
    """``shown`` without escapes, each line as the last carriage return left it."""
    lines = ESCAPES.sub("", shown).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rpartition("\r")[2] for line in lines)


@contextmanager
def terminal(*words: str, term: str = "xterm") -> Iterator[Terminal]:
    """``ds4q WORDS`` in a terminal; it is killed if the test leaves it running."""
    fd, inner = pty.openpty()
    settings = {"TERM": term, "COLUMNS": "60", "LINES": "24", "INPUTRC": os.devnull}
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, "-m", "ds4q", *words],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        env=os.environ | settings,
        start_new_session=True,
    )
    os.close(inner)
    made = Terminal(process, fd)
    try:
        yield made
    finally:
        made.close()
