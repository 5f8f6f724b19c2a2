"""Streams that run apart, events, the null stream, copies, and replay of what was captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.hipkern.sim_rig import Rig, f32, i32

N = 256
NOT_READY = 600


class Gate:
    """Holds a stream until ``open``: order is then a matter of waits, not of luck."""

    def __init__(self, rig: Rig, stream: Any) -> None:
        self._at, self._flag = rig.pinned(1, np.int32)
        self._flag[0] = 0
        assert rig.launch(stream, "gate", 1, 32, self._at) == 0

    def open(self) -> None:
        self._flag[0] = 1


@pytest.mark.parametrize("waits", [False, True])
def test_a_launch_needs_a_wait_for_the_copy_on_another_stream(rig: Rig, waits: bool) -> None:
    upload, compute = rig.call("hipStreamCreate"), rig.call("hipStreamCreate")
    pinned, host = rig.pinned(N)
    host[:] = 1.0
    x, y = rig.call("hipMalloc", 4 * N), rig.call("hipMalloc", 4 * N)
    gate = Gate(rig, upload)
    rig.call("hipMemcpyAsync", x, pinned, 4 * N, rig.h2d, upload)
    landed = rig.call("hipEventCreate")
    rig.call("hipEventRecord", landed, upload)
    if waits:
        rig.call("hipStreamWaitEvent", compute, landed, 0)
    assert rig.launch(compute, "scale", 4, 64, x, y, f32(2), i32(N)) == 0
    if not waits:
        rig.call("hipStreamSynchronize", compute)
    assert rig.code("hipEventQuery", landed) == NOT_READY
    gate.open()
    rig.call("hipDeviceSynchronize")
    assert rig.code("hipEventQuery", landed) == 0
    got = rig.read(y, N)
    assert np.isnan(got).sum() == (0 if waits else N)
    for stream in (upload, compute):
        rig.call("hipStreamDestroy", stream)


@pytest.mark.parametrize(("flags", "expected"), [(0, 2.0), (1, np.nan)])
def test_the_null_stream_waits_for_all_but_non_blocking_ones(
    rig: Rig, flags: int, expected: float
) -> None:
    stream = rig.call("hipStreamCreateWithFlags", flags)
    x, y = rig.device(np.ones(N, np.float32)), rig.call("hipMalloc", 4 * N)
    first = rig.call("hipMalloc", 4 * N)
    gate = Gate(rig, stream)
    assert rig.launch(stream, "scale", 4, 64, x, first, f32(2), i32(N)) == 0
    assert rig.launch(None, "scale", 4, 64, first, y, f32(1), i32(N)) == 0
    done = rig.call("hipEventCreate")
    rig.call("hipEventRecord", done, None)
    if flags:
        rig.call("hipEventSynchronize", done)
    else:
        assert rig.code("hipEventQuery", done) == NOT_READY
    gate.open()
    rig.call("hipDeviceSynchronize")
    np.testing.assert_array_equal(rig.read(y, N), np.full(N, expected, np.float32))
    rig.call("hipStreamDestroy", stream)


def test_blocking_streams_wait_for_the_null_stream(rig: Rig) -> None:
    stream = rig.call("hipStreamCreate")
    x, first = rig.device(np.ones(N, np.float32)), rig.call("hipMalloc", 4 * N)
    y = rig.call("hipMalloc", 4 * N)
    gate = Gate(rig, None)
    assert rig.launch(None, "scale", 4, 64, x, first, f32(2), i32(N)) == 0
    assert rig.launch(stream, "scale", 4, 64, first, y, f32(2), i32(N)) == 0
    rig.settle()
    assert rig.code("hipStreamQuery", stream) == NOT_READY
    gate.open()
    rig.call("hipStreamSynchronize", stream)
    assert rig.read(y, N).tolist() == [4.0] * N
    rig.call("hipStreamDestroy", stream)


def test_a_launch_is_done_when_all_its_blocks_are(rig: Rig) -> None:
    rig.control.set(threads=2)
    flag, opened = rig.pinned(1, np.int32)
    opened[0] = 0
    stream = rig.call("hipStreamCreate")
    assert rig.launch(stream, "late", 200, 32, flag) == 0
    rig.settle()
    assert rig.code("hipStreamQuery", stream) == NOT_READY
    opened[0] = 1
    rig.call("hipStreamSynchronize", stream)
    rig.call("hipStreamDestroy", stream)


def test_pageable_copies_are_synchronous_and_counted(rig: Rig) -> None:
    stream = rig.call("hipStreamCreate")
    x = rig.call("hipMalloc", 4 * N)
    host = np.ones(N, np.float32)
    rig.call("hipMemcpyAsync", x, host, host.nbytes, rig.h2d, stream)
    host[:] = 7.0  # too late to be seen
    assert rig.code("hipStreamQuery", stream) == 0
    assert rig.read(x, N).tolist() == [1.0] * N
    pinned, _ = rig.pinned(N)
    rig.call("hipMemcpyAsync", x, pinned, 4 * N, rig.h2d, stream)
    assert rig.control.get("pageable_copies") == 1
    rig.call("hipStreamDestroy", stream)


def test_events_measure_what_lies_between_them(rig: Rig) -> None:
    start, stop = rig.call("hipEventCreate"), rig.call("hipEventCreate")
    untimed = rig.call("hipEventCreateWithFlags", 2)
    assert rig.code("hipEventElapsedTime", start, stop) == 400  # never recorded
    rig.call("hipEventRecord", start, None)
    gate = Gate(rig, None)
    rig.call("hipEventRecord", stop, None)
    rig.call("hipEventRecord", untimed, None)
    assert rig.code("hipEventElapsedTime", start, stop) == NOT_READY
    gate.open()
    rig.call("hipEventSynchronize", stop)
    assert rig.call("hipEventElapsedTime", start, stop) > 0
    rig.call("hipDeviceSynchronize")
    assert rig.code("hipEventElapsedTime", start, untimed) == 400


def test_work_of_a_destroyed_stream_is_still_done(rig: Rig) -> None:
    stream = rig.call("hipStreamCreate")
    x, y = rig.device(np.ones(N, np.float32)), rig.call("hipMalloc", 4 * N)
    gate = Gate(rig, stream)
    assert rig.launch(stream, "scale", 4, 64, x, y, f32(3), i32(N)) == 0
    rig.call("hipStreamDestroy", stream)
    assert rig.code("hipStreamSynchronize", stream) == 400
    gate.open()
    rig.call("hipDeviceSynchronize")
    assert rig.read(y, N).tolist() == [3.0] * N


def test_delays_change_nothing_that_is_ordered(rig: Rig) -> None:
    rig.control.set(delay_us=300, delay_seed=4)
    streams = [rig.call("hipStreamCreate") for _ in range(2)]
    event = rig.call("hipEventCreate")
    x, by = rig.device(np.zeros(N, np.float32)), rig.device(np.ones(1, np.float32))
    for step in range(20):
        stream = streams[step % 2]
        rig.call("hipStreamWaitEvent", stream, event, 0)
        assert rig.launch(stream, "add", 4, 64, x, by, i32(N)) == 0
        rig.call("hipEventRecord", event, stream)
    rig.call("hipDeviceSynchronize")
    assert rig.read(x, N).tolist() == [20.0] * N
    for stream in streams:
        rig.call("hipStreamDestroy", stream)


def captured(rig: Rig, stream: Any, calls: Callable[[], None]) -> Any:
    rig.call("hipStreamBeginCapture", stream, rig.hip.hipStreamCaptureMode(0))
    calls()
    graph = rig.call("hipStreamEndCapture", stream)
    made = rig.call("hipGraphInstantiate", graph, 0)
    rig.call("hipGraphDestroy", graph)
    return made[0] if isinstance(made, tuple) else made


def test_a_replay_takes_arguments_from_the_capture_and_contents_from_now(rig: Rig) -> None:
    stream = rig.call("hipStreamCreate")
    x, y = rig.call("hipMalloc", 4 * N), rig.call("hipMalloc", 4 * N)
    pinned, host = rig.pinned(N)
    out, got = rig.pinned(N)
    by = f32(2)

    def step() -> None:
        rig.call("hipMemcpyAsync", x, pinned, 4 * N, rig.h2d, stream)
        assert rig.launch(stream, "scale", 4, 64, x, y, by, i32(N)) == 0
        rig.call("hipMemcpyAsync", out, y, 4 * N, rig.d2h, stream)
        rig.call("hipMemsetAsync", x, 0, 4 * N, stream)

    exec_ = captured(rig, stream, step)
    assert rig.code("hipStreamQuery", stream) == 0
    assert np.isnan(rig.read(y, N)).all()  # capturing ran nothing
    by.value = 100.0
    for value in (1.0, 5.0, -3.0):
        host[:] = value
        rig.call("hipGraphLaunch", exec_, stream)
        rig.call("hipStreamSynchronize", stream)
        assert got.tolist() == [2 * value] * N
        assert rig.read(x, N).tolist() == [0.0] * N
    assert rig.control.get("graph_launches") == 3
    rig.call("hipGraphExecDestroy", exec_)
    rig.call("hipStreamDestroy", stream)
    assert rig.code("hipGraphLaunch", exec_, None) == 400


def test_replays_follow_each_other_and_the_stream(rig: Rig) -> None:
    rig.control.set(delay_us=100)
    stream, other = rig.call("hipStreamCreate"), rig.call("hipStreamCreate")
    x, by = rig.device(np.zeros(N, np.float32)), rig.device(np.ones(1, np.float32))
    exec_ = captured(rig, stream, lambda: _add(rig, stream, x, by))
    for _ in range(10):
        rig.call("hipGraphLaunch", exec_, stream)
        _add(rig, stream, x, by)
    done = rig.call("hipEventCreate")
    rig.call("hipEventRecord", done, stream)
    rig.call("hipStreamWaitEvent", other, done, 0)
    rig.call("hipGraphLaunch", exec_, other)
    rig.call("hipStreamSynchronize", other)
    assert rig.read(x, N).tolist() == [21.0] * N
    rig.call("hipGraphExecDestroy", exec_)
    for one in (stream, other):
        rig.call("hipStreamDestroy", one)


def _add(rig: Rig, stream: Any, x: Any, by: Any) -> None:
    assert rig.launch(stream, "add", 4, 64, x, by, i32(N)) == 0


def test_a_fork_is_captured_and_replayed_apart(rig: Rig) -> None:
    main, side = rig.call("hipStreamCreate"), rig.call("hipStreamCreate")
    fork, join = rig.call("hipEventCreate"), rig.call("hipEventCreate")
    x = rig.device(np.ones(N, np.float32))
    y, z = rig.call("hipMalloc", 4 * N), rig.call("hipMalloc", 4 * N)
    flag, opened = rig.pinned(1, np.int32)
    opened[0] = 0

    def step(joins: bool) -> None:
        rig.call("hipEventRecord", fork, main)
        rig.call("hipStreamWaitEvent", side, fork, 0)
        assert rig.launch(side, "gate", 1, 32, flag) == 0
        assert rig.launch(side, "scale", 4, 64, x, z, f32(3), i32(N)) == 0
        assert rig.launch(main, "scale", 4, 64, x, y, f32(2), i32(N)) == 0
        rig.call("hipEventRecord", join, side)
        if joins:
            rig.call("hipStreamWaitEvent", main, join, 0)
        assert rig.launch(main, "add", 4, 64, y, z, i32(N)) == 0

    exec_ = captured(rig, main, lambda: step(True))
    assert rig.code("hipEventQuery", join) == 907
    rig.call("hipGraphLaunch", exec_, main)
    # The main branch has gone past its first kernel while the side waits.
    pinned, host = rig.pinned(1)
    watch = rig.call("hipStreamCreateWithFlags", 1)
    for _ in range(10000):
        rig.call("hipMemcpyAsync", pinned, y, 4, rig.d2h, watch)
        rig.call("hipStreamSynchronize", watch)
        if host[0] == 2.0:
            break
    assert host[0] == 2.0
    assert rig.code("hipStreamQuery", main) == NOT_READY
    opened[0] = 1
    rig.call("hipStreamSynchronize", main)
    assert rig.read(y, N).tolist() == [5.0] * N
    rig.call("hipGraphExecDestroy", exec_)
    with pytest.raises(AssertionError, match="904"):
        captured(rig, main, lambda: step(False))
    assert rig.code("hipStreamQuery", main) == 0
    for stream in (main, side, watch):
        rig.call("hipStreamDestroy", stream)


def test_a_replay_starts_and_ends_with_its_stream(rig: Rig) -> None:
    """A branch that follows nothing in the graph, and that nothing in the graph follows."""
    main, side = rig.call("hipStreamCreate"), rig.call("hipStreamCreate")
    fork, join = rig.call("hipEventCreate"), rig.call("hipEventCreate")
    x, before = rig.device(np.ones(N, np.float32)), rig.call("hipMalloc", 4 * N)
    y, z = rig.call("hipMalloc", 4 * N), rig.call("hipMalloc", 4 * N)
    flag, opened = rig.pinned(1, np.int32)
    opened[0] = 0

    def step() -> None:
        rig.call("hipEventRecord", fork, main)
        rig.call("hipStreamWaitEvent", side, fork, 0)
        assert rig.launch(side, "scale", 4, 64, before, y, f32(2), i32(N)) == 0
        assert rig.launch(side, "gate", 1, 32, flag) == 0
        rig.call("hipEventRecord", join, side)
        rig.call("hipStreamWaitEvent", main, join, 0)

    exec_ = captured(rig, main, step)
    gate = Gate(rig, main)
    assert rig.launch(main, "scale", 4, 64, x, before, f32(2), i32(N)) == 0
    rig.call("hipGraphLaunch", exec_, main)
    assert rig.launch(main, "scale", 4, 64, y, z, f32(2), i32(N)) == 0
    rig.settle()
    gate.open()
    rig.settle()
    assert rig.code("hipStreamQuery", main) == NOT_READY
    opened[0] = 1
    rig.call("hipStreamSynchronize", main)
    assert rig.read(z, N).tolist() == [8.0] * N
    rig.call("hipGraphExecDestroy", exec_)
    for stream in (main, side):
        rig.call("hipStreamDestroy", stream)


def test_two_replays_of_one_graph_do_not_overlap(rig: Rig) -> None:
    streams = [rig.call("hipStreamCreateWithFlags", 1) for _ in range(2)]
    x, by = rig.device(np.zeros(N, np.float32)), rig.device(np.ones(1, np.float32))
    exec_ = captured(rig, streams[0], lambda: _add(rig, streams[0], x, by))
    gate = Gate(rig, streams[0])
    for stream in streams:
        rig.call("hipGraphLaunch", exec_, stream)
    rig.settle()
    assert rig.code("hipStreamQuery", streams[1]) == NOT_READY
    gate.open()
    rig.call("hipDeviceSynchronize")
    assert rig.read(x, N).tolist() == [2.0] * N
    rig.call("hipGraphExecDestroy", exec_)
    for stream in streams:
        rig.call("hipStreamDestroy", stream)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("hipStreamSynchronize", 900),
        ("hipDeviceSynchronize", 900),
        ("hipMalloc", 900),
        ("hipFree", 900),
        ("hipMemcpyAsync", 900),
        ("hipMemcpy", 906),
        ("hipStreamWaitEvent", 905),
    ],
)
def test_what_a_capture_cannot_hold_breaks_it(rig: Rig, call: str, code: int) -> None:
    stream, outside = rig.call("hipStreamCreate"), rig.call("hipEventCreate")
    rig.call("hipEventRecord", outside, None)
    x = rig.device(np.zeros(N, np.float32))
    host = np.zeros(N, np.float32)  # pageable
    arguments: dict[str, tuple[Any, ...]] = {
        "hipStreamSynchronize": (stream,),
        "hipDeviceSynchronize": (),
        "hipMalloc": (64,),
        "hipFree": (x,),
        "hipMemcpyAsync": (x, host, 4 * N, rig.h2d, stream),
        "hipMemcpy": (x, host, 4 * N, rig.h2d),
        "hipStreamWaitEvent": (stream, outside, 0),
    }
    rig.call("hipStreamBeginCapture", stream, rig.hip.hipStreamCaptureMode(0))
    assert rig.code(call, *arguments[call]) == code
    assert rig.launch(stream, "scale", 4, 64, x, x, f32(1), i32(N)) == 901
    assert rig.code("hipStreamEndCapture", stream) == 901
    assert rig.code("hipStreamSynchronize", stream) == 0
    rig.call("hipStreamDestroy", stream)


def test_a_replay_of_what_was_freed_is_refused(rig: Rig) -> None:
    stream = rig.call("hipStreamCreate")
    pinned, _ = rig.pinned(N)
    x = rig.call("hipMalloc", 4 * N)
    exec_ = captured(
        rig, stream, lambda: rig.call("hipMemcpyAsync", x, pinned, 4 * N, rig.h2d, stream)
    )
    rig.call("hipGraphLaunch", exec_, stream)
    rig.call("hipFree", x)
    assert rig.code("hipGraphLaunch", exec_, stream) == 1
    rig.call("hipGraphExecDestroy", exec_)
    rig.call("hipStreamDestroy", stream)


def test_a_kernel_that_reads_what_was_freed_reads_nan(rig: Rig) -> None:
    stream = rig.call("hipStreamCreate")
    x, y = rig.device(np.ones(N, np.float32)), rig.call("hipMalloc", 4 * N)

    def step() -> None:
        assert rig.launch(stream, "scale", 4, 64, x, y, f32(2), i32(N)) == 0

    exec_ = captured(rig, stream, step)
    rig.call("hipGraphLaunch", exec_, stream)
    assert rig.read(y, N).tolist() == [2.0] * N
    rig.call("hipFree", x)
    other = rig.device(np.ones(N, np.float32))  # does not take the place of x
    rig.call("hipGraphLaunch", exec_, stream)
    assert np.isnan(rig.read(y, N)).all()
    rig.call("hipFree", other)
    rig.call("hipGraphExecDestroy", exec_)
    rig.call("hipStreamDestroy", stream)
