"""Stop signals: the first becomes one exception, where that is safe; later ones do nothing.

SIGINT, SIGTERM and SIGHUP stop a command. Python runs a signal handler between any two steps of the
main thread, and an exception raised there may leave a lock held for ever, release one that is not
held, or get lost in a destructor. So the handler raises only where none of this can happen, and
looks again a moment later where it can. It raises once: clean-up is never interrupted.

A process that does not end can still be ended: by a third signal ``GIVE_UP_S`` or more after the
first, by SIGQUIT, or by SIGKILL. Each leaves the files as a crash would, to be resumed.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

LOOK_AGAIN_S = 0.01
GIVE_UP_S = 10.0
GIVE_UP_SIGNALS = 3

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WAITS = threading.Condition.wait.__code__
_UNSAFE = frozenset(
    (
        *("threading", "queue", "concurrent.futures._base", "concurrent.futures.thread"),
        *("logging", "contextlib", "tempfile", "weakref", "_weakrefset", "signal"),
        *("importlib._bootstrap", "importlib._bootstrap_external", "numba.core.compiler_lock"),
    )
)
"""Modules that hold a lock, or something to be removed, between two of their own steps."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: stops a command just as Ctrl-C does; only the exit status differs."""


class _Stops:
    """What is known of the stop of this process; only the main thread changes it."""

    def __init__(self) -> None:
        self.installed = False
        self.around: frozenset[int] = frozenset()  # frames that the block was entered from
        self.held = 0
        self.arrivals = -1  # where the numbers of signals can be read, in the order of arrival
        self.forget()

    def forget(self) -> None:
        """No stop has come."""
        self._arrived()
        self.first = 0
        self.since_s = 0.0
        self.later = 0
        self.end = 0  # a later signal that ends more than what the first one stopped
        self.raised = False
        self._place = (0, 0)

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """The handler of all stop signals."""
        if not self.first:
            # Handlers of signals that wait together run in the order of their numbers.
            arrived = [number for number in self._arrived() if number in _SIGNALS]
            self.first, self.since_s = (arrived or [signum])[0], time.monotonic()
            self._raise_if_safe(frame)
            return
        self.later += 1
        self.end = signum if signum != signal.SIGINT else self.end
        if self.later + 1 >= GIVE_UP_SIGNALS and time.monotonic() - self.since_s >= GIVE_UP_S:
            with suppress(OSError):
                os.write(2, b"ds4q: ended without clean-up; files are as a crash leaves them\n")
            os._exit(128 + self.first if self.first == signal.SIGINT else 128 + signal.SIGTERM)

    def _arrived(self) -> bytes:
        """Numbers of the signals that came since the last call."""
        with suppress(OSError):  # none, or nowhere to read them
            return os.read(self.arrivals, 65536)
        return b""

    def look_again(self, signum: int, frame: FrameType | None) -> None:
        """The handler of the timer that runs while a stop waits for a safe place."""
        self._raise_if_safe(frame)

    def _raise_if_safe(self, frame: FrameType | None) -> None:
        if self.raised or not self.first:
            return
        if self.held or not self._is_safe(frame):
            signal.setitimer(signal.ITIMER_REAL, LOOK_AGAIN_S)
            return
        raise self.exception()

    def exception(self) -> KeyboardInterrupt:
        """The stop, to be raised by whoever asks."""
        self.raised = True
        return KeyboardInterrupt() if self.first == signal.SIGINT else Terminated()

    def _is_safe(self, frame: FrameType | None) -> bool:
        """Whether an exception may come out of the step that the main thread is at."""
        if frame is None:
            return False
        if frame.f_code is _WAITS:
            # Twice at one step: it waits there, and that step alone may be interrupted.
            before, self._place = self._place, (id(frame), frame.f_lasti)
            return before == self._place
        if frame.f_globals.get("__name__") in _UNSAFE:
            return False
        outer: FrameType | None = frame
        while outer is not None and id(outer) not in self.around:
            if _must_return(outer):
                return False
            outer = outer.f_back
        return True


def _frames_around() -> Iterator[int]:
    """Identities of the frames that enter ``caught``, which live as long as its block."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == contextmanager.__module__:
        frame = frame.f_back  # calls that end before the block begins
    while frame is not None:
        yield id(frame)
        frame = frame.f_back


def _must_return(frame: FrameType) -> bool:
    """Whether a frame of the block, however far out, must not be left by an exception."""
    code, name = frame.f_code, frame.f_globals.get("__name__") or ""
    if code.co_name == "__del__":  # the exception would be printed and forgotten
        return True
    if name.startswith("llvmlite."):  # LLVM calls back into Python, and would crash
        return True
    # Python notes a KeyboardInterrupt that leaves exec("..."), and kills its process at the end.
    executed = code.co_name == "<module>" and code.co_filename == "<string>"
    return executed and frame.f_back is not None


_stops = _Stops()


@contextmanager
def caught(*, to_the_end: bool = False) -> Iterator[None]:
    """Turn stop signals into exceptions in this block, in the main thread; elsewhere do nothing.

    ``to_the_end``: the process ends after the block, and no signal changes its exit status then.
    SIGHUP and SIGINT stay ignored where they are (nohup, a shell's background).
    """
    if _stops.installed or threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [
        number
        for number in _SIGNALS
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
    ]
    _stops.arrivals, arriving = _pipe()
    waking = signal.set_wakeup_fd(arriving, warn_on_full_buffer=False)
    _stops.forget()
    alarm = signal.signal(signal.SIGALRM, _stops.look_again)
    _stops.around = frozenset(_frames_around())
    _stops.installed = True
    if to_the_end:
        atexit.register(_ignore, ours)  # Python sets handlers back long before it has ended
    before: dict[int, Any] = {number: signal.signal(number, _stops.on_signal) for number in ours}
    try:
        yield
    finally:
        if to_the_end:
            _stops.raised = True  # what ends the interpreter is not to be interrupted
        else:
            _stops.held += 1  # nothing is raised while handlers are put back
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.setitimer(signal.ITIMER_REAL, 0)  # first: an alarm ends a process by default
            signal.signal(signal.SIGALRM, alarm)
            signal.set_wakeup_fd(waking)
            os.close(arriving)
            os.close(_stops.arrivals)
            _stops.arrivals = -1
            _stops.installed = False
            _stops.forget()
            _stops.held -= 1


def _pipe() -> list[int]:
    """A pipe that never waits, and takes no place of a standard stream that is closed."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends]
    for end, copy in zip(ends, high, strict=True):
        os.close(end)
        os.set_blocking(copy, False)
    return high


def _ignore(numbers: list[signal.Signals]) -> None:
    _stops.raised = True
    for number in (*numbers, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


class held:  # used as a block, like suppress
    """In this block no stop is raised; one that came meanwhile is raised at its end.

    For the few steps between making a file and being ready to remove it, and for clean-up.
    """

    def __enter__(self) -> None:
        self._counts = threading.current_thread() is threading.main_thread()
        if self._counts:
            _stops.held += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._counts:
            _stops.held -= 1
            if _stops.first and not _stops.raised and not _stops.held:
                raise _stops.exception()


def stop_behind(error: BaseException) -> KeyboardInterrupt | None:
    """The stop that was under way when ``error`` came; None without a stop signal.

    What fails during a stop may only follow from it; it is not a reason to discard work.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return seen
        seen = seen.__cause__ or seen.__context__
    return _stops.exception() if _stops.first else None


def go_on() -> None:
    """Ctrl-C ended no more than an answer: the next signal is a first again.

    A SIGTERM or SIGHUP that came meanwhile is raised now.
    """
    end = _stops.end
    _stops.forget()
    if end:
        _stops.first, _stops.since_s = end, time.monotonic()
        raise _stops.exception()


def word_of(stop: BaseException) -> tuple[str, int]:
    """How a command that was stopped ends: its word for stderr, and the exit status."""
    return ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
