"""Stop signals: one exception, where it is safe; nothing in clean-up; a way out when stuck."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ds4q.artifact import stops
from ds4q.artifact.stops import Terminated

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def terminal() -> Iterator[None]:
    """Python's own handlers, whatever these tests were started by."""
    before = [signal.getsignal(number) for number in ALL]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in zip(ALL, before, strict=True):
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("first", ALL)
@pytest.mark.parametrize("second", ALL)
def test_only_the_first_signal_is_raised(first: int, second: int) -> None:
    kind = KeyboardInterrupt if first == signal.SIGINT else Terminated
    cleaned = []

    def work() -> None:
        try:
            send(first)
        finally:
            send(second)
            send(second)
            cleaned.append("whole")

    with stops.caught():
        with pytest.raises(KeyboardInterrupt) as caught:
            work()
        assert type(caught.value) is kind
        send(second)
    assert cleaned == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


BUSY = """
import os, sys
from ds4q.artifact import stops
try:
    with stops.caught(to_the_end=True):
        os.write(1, b"ready\\n")
        sum(range(10**8))  # seconds, in which Python looks at no signal
        sum(range(10**8))
except KeyboardInterrupt as stop:
    sys.exit(stops.word_of(stop)[1])
"""


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ((signal.SIGTERM, signal.SIGINT), 143),
        ((signal.SIGHUP, signal.SIGINT), 143),
        ((signal.SIGINT, signal.SIGTERM), 130),
        ((signal.SIGINT, signal.SIGHUP, signal.SIGTERM), 130),
    ],
)
def test_the_first_to_come_decides_also_where_python_sees_them_together(
    signals: tuple[signal.Signals, ...], status: int
) -> None:
    """Python runs the handlers of signals that wait in the order of their numbers."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        for number in signals:
            time.sleep(0.05)
            child.send_signal(number)
        assert child.wait(300) == status


def test_a_stop_waits_for_the_end_of_a_held_block() -> None:
    steps = []

    def work() -> None:
        with stops.held():
            with stops.held():
                send(signal.SIGTERM)
                time.sleep(3 * stops.LOOK_AGAIN_S)
                steps.append("inner")
            steps.append("outer")
        steps.append("never")

    with stops.caught(), pytest.raises(Terminated):
        work()
    assert steps == ["inner", "outer"]


def test_a_stop_that_was_taken_as_less_leaves_the_next_to_be_raised() -> None:
    with stops.caught():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                send(signal.SIGINT)
            stops.go_on()
        with pytest.raises(KeyboardInterrupt) as caught:
            send(signal.SIGINT)
        send(signal.SIGTERM)  # while the first is dealt with
        assert type(caught.value) is KeyboardInterrupt
        with pytest.raises(Terminated):
            stops.go_on()


class Lock:
    """A lock whose ``step`` is a signal, as if it came while ``threading`` handles the lock."""

    def __init__(self, step: str) -> None:
        self._lock = threading.Lock()
        self._step = step

    def _at(self, step: str) -> None:
        if step == self._step:
            self._step = ""
            frame: FrameType | None = sys._getframe(2)
            assert frame is not None
            assert frame.f_globals["__name__"] == "threading"
            # What Python does between two steps of that frame.
            stops._stops.on_signal(signal.SIGTERM, frame)

    def acquire(self, *arguments: Any) -> bool:
        got = self._lock.acquire(*arguments)
        self._at("acquire")
        return got

    def release(self) -> None:
        self._lock.release()
        self._at("release")

    def __enter__(self) -> bool:
        got = self._lock.acquire()
        self._at("enter")
        return got

    def __exit__(self, *error: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("step", ["enter", "release", "acquire"])
def test_a_stop_leaves_no_lock_held_and_releases_none_twice(step: str) -> None:
    """An exception at these steps is 'release unlocked lock', or a lock that stays held."""
    lock = Lock(step)

    def work() -> None:
        turn = threading.Condition(lock)  # type: ignore[arg-type]
        with turn:
            turn.wait(0.001)
        time.sleep(60)  # the next look raises here

    with stops.caught(), pytest.raises(Terminated):
        work()
    assert lock.acquire(False)


def test_a_stop_ends_a_wait_that_nothing_else_ends() -> None:
    waits: list[Any] = [Future().result, threading.Event().wait]
    for wait in waits:
        timer = threading.Timer(0.05, send, [signal.SIGTERM])
        timer.start()
        with stops.caught(), pytest.raises(Terminated):
            wait()
        timer.join()


def test_a_stop_is_not_lost_in_a_destructor() -> None:
    class Thing:
        def __del__(self) -> None:
            send(signal.SIGTERM)

    def work() -> None:
        thing = Thing()
        del thing
        time.sleep(60)

    with stops.caught(), pytest.raises(Terminated):
        work()


def test_the_stop_behind_an_error() -> None:
    assert stops.stop_behind(ValueError()) is None
    stop = Terminated()

    def clean_up() -> None:
        try:
            raise stop
        finally:
            raise RuntimeError("release unlocked lock")

    with pytest.raises(RuntimeError) as caught:
        clean_up()
    assert stops.stop_behind(caught.value) is stop
    with stops.caught(), stops.held():
        send(signal.SIGHUP)
        assert isinstance(stops.stop_behind(ValueError()), Terminated)


STUCK = """
import signal, sys, time
from ds4q.artifact import stops
stops.GIVE_UP_S = float(sys.argv[1])
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with stops.caught(to_the_end=True), stops.held():
    for seen in range(4):
        print("ready", flush=True)
        while bool(stops._stops.first) + stops._stops.later == seen:
            time.sleep(0.001)
"""


@pytest.mark.parametrize(("give_up_s", "signals"), [("0", 3), ("1000", 4)])
def test_a_third_signal_ends_what_is_stuck_but_not_at_once(give_up_s: str, signals: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, give_up_s], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        for number in (*ALL, signal.SIGINT)[:signals]:
            assert child.stdout.readline() == b"ready\n"
            child.send_signal(number)
        out, err = child.communicate(timeout=300)
    assert out == b""
    assert (b"ended without clean-up" in err) == (signals == 3)
    if signals == 3:
        assert child.returncode == 130


ENDING = """
import atexit, os, signal, sys, time
from ds4q.artifact import stops
signal.signal(signal.SIGHUP, signal.SIG_DFL)
def late():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
with stops.caught(to_the_end=True):
    atexit.register(late)
"""


def test_a_signal_while_the_process_ends_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_stop_does_not_pass_through_the_compiler() -> None:
    """LLVM calls Python functions, which must not end in an exception."""
    names: dict[str, Any] = {"send": send, "__name__": "llvmlite.binding.ffi", "done": []}
    exec("def call():\n    send(15)\n    done.append(1)\n", names)

    def work() -> None:
        names["call"]()
        time.sleep(60)

    with stops.caught(), pytest.raises(Terminated):
        work()
    assert names["done"] == [1]


EXECUTING = """
import os, signal, sys, time
from ds4q.artifact import stops
with stops.caught(to_the_end=True):
    try:
        exec("os.kill(os.getpid(), signal.SIGINT)")
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_a_stop_in_executed_text_keeps_the_exit_status(tmp_path: Path) -> None:
    """Imports run such text, for named tuples and data classes."""
    (tmp_path / "executing.py").write_text(EXECUTING)
    paths = f"{Path(stops.__file__).parents[2]}{os.pathsep}{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-m", "executing"],
        capture_output=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert (done.returncode, done.stderr) == (130, b"")
