"""The driver on the simulated device: owners, order, graphs, and every way in which calls fail."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ds4q.hipkern.driver import BUILT_ARCHS, Device
from ds4q.hipkern.errors import (
    DeviceLostError,
    DeviceMemoryError,
    HipCallError,
    HipLibraryError,
    HipUsageError,
    NoDeviceError,
)
from ds4q.hipkern.sim.control import Control

MANY = 1 << 20


def data(n: int = 4096, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


# ---- what is here --------------------------------------------------------------------------------


def test_a_simulated_device_says_that_it_is_one(device: Device) -> None:
    assert (device.kind, device.arch) == ("sim", "sim")
    assert "simulated" in device.name
    assert "simulated on this CPU" in " ".join(device.notes)
    assert 0 < device.free_bytes() <= device.total_bytes


@pytest.mark.parametrize(("arch", "count"), [*((arch, 1) for arch in BUILT_ARCHS), ("gfx1036", 2)])
def test_amd_hardware_is_never_claimed(device: Device, arch: str, count: int) -> None:
    device.kind, device.arch = "amd", arch
    assert len(device.notes) == count
    assert "no kernel of ds4q has run on AMD hardware" in device.notes[0]
    assert count == 1 or "never compiled for gfx1036" in device.notes[1]


def test_a_device_that_is_not_there(device: Device) -> None:
    with pytest.raises(HipUsageError, match="no such device: expected 0 to 0, found 1"):
        Device.open(1)


def test_a_library_without_a_device(sim: Control) -> None:
    sim.set(devices=0)
    with pytest.raises(NoDeviceError, match="a HIP library is here, but no device"):
        Device.open()


@pytest.mark.parametrize("code", [100, 101])
def test_both_codes_for_no_device_mean_the_same(device: Device, sim: Control, code: int) -> None:
    sim.set(fail=f"hipMalloc:1:{code}")
    with pytest.raises(NoDeviceError, match="DS4Q_HIP=sim"):
        device.alloc(16)


# ---- memory --------------------------------------------------------------------------------------


def test_memory_belongs_to_whoever_frees_it_first(device: Device, sim: Control) -> None:
    before = device.free_bytes()
    with device.alloc(MANY) as buffer:
        assert device.free_bytes() <= before - MANY
        assert device.live() == (f"Buffer of {MANY} bytes",)
    assert device.live() == ()
    assert device.free_bytes() == before
    sim.set(fail="hipFree:1:1")
    buffer.free()  # calls nothing
    with pytest.raises(HipUsageError, match="this Buffer was freed"):
        _ = buffer.address


def test_out_of_memory_says_what_is_needed_and_what_is_free(device: Device, sim: Control) -> None:
    sim.set(memory_bytes=MANY + sim.get("live_bytes"))  # of tests whose hipFree fails
    with device.alloc(MANY // 2), pytest.raises(DeviceMemoryError) as caught:
        device.alloc(MANY)
    assert "expected 1,048,576 bytes on the device, found 524,288 bytes free" in str(caught.value)
    assert caught.value.code == 2


def test_pinned_memory_that_is_out_speaks_of_the_host(device: Device, sim: Control) -> None:
    sim.set(fail="hipHostMalloc:1:2")
    with pytest.raises(DeviceMemoryError) as caught:
        device.pinned(MANY)
    assert "expected 1,048,576 bytes of host memory that can be pinned; free" in str(caught.value)
    assert "ulimit -l" in str(caught.value)
    assert "on the device" not in str(caught.value)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_allocation_needs_a_size(device: Device, nbytes: int) -> None:
    with pytest.raises(HipUsageError, match="needs a size"):
        device.alloc(nbytes)


def test_bytes_come_back_through_arrays_and_pinned_memory(device: Device) -> None:
    stream, there, pinned = device.stream(), device.alloc(8192), device.pinned(8192)
    first, second = data(seed=1), data(seed=2)
    stream.upload(there.address, first)
    pinned.array[:4096] = second
    stream.upload(there.address + 4096, pinned, 4096)
    back = np.zeros(8192, np.uint8)
    stream.download(back, there.address)
    np.testing.assert_array_equal(back, np.concatenate([first, second]))
    stream.move(there.address, there.address + 4096, 4096)
    stream.fill(there.address + 4096, 7, 4095)
    stream.download(pinned, there.address)
    stream.synchronize()
    np.testing.assert_array_equal(pinned.array[:4096], second)
    assert set(pinned.array[4096:8191]) == {7}
    assert pinned.array[8191] == second[-1]
    pinned.free()
    with pytest.raises(HipUsageError, match="this Pinned was freed"):
        _ = pinned.array


def test_only_pinned_memory_is_copied_by_itself(device: Device, sim: Control) -> None:
    stream, there, pinned = device.stream(), device.alloc(MANY), device.pinned(MANY)
    sim.set(delay_us=50_000, delay_seed=1)
    stream.upload(there.address, data(MANY))
    assert stream.query(), "nothing keeps the array alive after the call"
    stream.upload(there.address, pinned.array[4096:8192])  # a view of it is pinned, too
    assert not stream.query()
    stream.synchronize()
    assert stream.query()
    assert sim.get("pageable_copies") == 1


def test_a_copy_of_an_array_waits_whatever_the_library_does(device: Device, sim: Control) -> None:
    stream, there, pinned = device.stream(), device.alloc(64), device.pinned(64)
    sim.set(fail="hipStreamSynchronize:1:1")
    stream.upload(there.address, pinned)
    with pytest.raises(HipCallError, match="hipStreamSynchronize failed"):
        stream.upload(there.address, data(64))
    sim.set(fail="hipStreamSynchronize:1:1")
    with pytest.raises(HipCallError, match="hipStreamSynchronize failed"):
        stream.download(data(64), there.address)


def test_what_is_pinned_is_told_by_address(device: Device) -> None:
    held = [device.pinned(100) for _ in range(5)]
    middle = held[2].address
    assert all(device.is_pinned(p.address, 100) for p in held)
    assert not device.is_pinned(middle, 101)
    assert not device.is_pinned(middle - 1, 2)
    held[2].free()
    assert not device.is_pinned(middle, 100)


def test_copies_that_do_not_fit_are_refused(device: Device) -> None:
    stream, there = device.stream(), device.alloc(64)
    with pytest.raises(HipUsageError, match="not contiguous"):
        stream.upload(there.address, data(64)[::2])
    with pytest.raises(HipUsageError, match="expected at most 64 bytes, found 65"):
        stream.upload(there.address, data(64), 65)
    target = data(64)
    target.flags.writeable = False
    with pytest.raises(HipUsageError, match="read-only"):
        stream.download(target, there.address)
    with pytest.raises(HipUsageError, match="not a byte: found 256"):
        stream.fill(there.address, 256, 64)
    with pytest.raises(HipCallError, match="hipErrorInvalidValue"):  # past the buffer's end
        stream.upload(there.address + 1, data(64))


# ---- order ---------------------------------------------------------------------------------------


def test_an_event_orders_two_streams(device: Device, sim: Control) -> None:
    sim.set(delay_us=20_000, delay_seed=3)
    writer, reader = device.stream(), device.stream()
    there, up, down = device.alloc(MANY), device.pinned(MANY), device.pinned(MANY)
    up.array[:] = data(MANY)
    writer.upload(there.address, up)
    event = writer.record()
    reader.wait(event)
    reader.download(down, there.address)
    reader.synchronize()
    np.testing.assert_array_equal(down.array, up.array)


def test_events_tell_time(device: Device, sim: Control) -> None:
    stream, there = device.stream(), device.alloc(MANY)
    start = stream.record()
    sim.set(delay_us=10_000, delay_seed=1)
    for _ in range(4):
        stream.fill(there.address, 0, MANY)
    stop = stream.record()
    assert not stop.query()
    stop.synchronize()
    assert stop.query()
    assert start.elapsed_ms(stop) > 1
    again = stream.record(stop)
    assert again is stop
    device.synchronize()
    assert device.live().count("Event") == 2


def test_threads_share_a_device(device: Device) -> None:
    def round_trip(seed: int) -> bool:
        with device.stream() as stream, device.alloc(MANY) as there:
            sent, back = data(MANY, seed), np.zeros(MANY, np.uint8)
            stream.upload(there.address, sent)
            stream.download(back, there.address)
            return bool(np.array_equal(sent, back))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(round_trip, range(8)))


def test_handles_that_were_freed_are_refused(device: Device) -> None:
    stream = device.stream()
    event = stream.record()
    event.free()
    with pytest.raises(HipUsageError, match="this Event was freed"):
        stream.wait(event)
    stream.free()
    with pytest.raises(HipUsageError, match="this Stream was freed"):  # not the null stream
        stream.synchronize()


# ---- graphs --------------------------------------------------------------------------------------


def test_a_graph_replays_what_was_captured(device: Device) -> None:
    stream, there = device.stream(), device.alloc(64)
    up, down = device.pinned(64), device.pinned(64)
    stream.fill(there.address, 1, 64)
    with stream.capture() as capture:
        stream.upload(there.address, up)
        stream.fill(there.address + 32, 9, 32)
        stream.download(down, there.address)
        with pytest.raises(HipUsageError, match="no graph before"):
            capture.graph()
    stream.download(seen := np.zeros(64, np.uint8), there.address)
    assert set(seen) == {1}, "nothing runs while it is captured"
    graph = capture.graph()
    for value in (3, 4):  # what the pinned block holds counts at the launch
        up.array[:] = value
        graph.launch(stream)
        stream.synchronize()
        assert set(down.array[:32]) == {value}
        assert set(down.array[32:]) == {9}
    graph.free()
    with pytest.raises(HipUsageError, match="this Graph was freed"):
        graph.launch(stream)


def test_a_capture_refuses_what_it_could_not_replay(device: Device) -> None:
    stream, there = device.stream(), device.alloc(64)
    with stream.capture() as capture:
        with pytest.raises(HipUsageError, match="only copies of pinned memory"):
            stream.upload(there.address, data(64))
        with pytest.raises(HipUsageError, match="captured already"), stream.capture():
            pass
        stream.fill(there.address, 5, 64)
    capture.graph().launch(stream)
    stream.download(seen := np.zeros(64, np.uint8), there.address)
    assert set(seen) == {5}


def test_a_failed_capture_leaves_the_stream_usable(device: Device, sim: Control) -> None:
    stream, there = device.stream(), device.alloc(64)

    def works() -> bool:
        with stream.capture() as capture:
            stream.fill(there.address, 6, 64)
        with capture.graph() as graph:
            graph.launch(stream)
            stream.synchronize()
        return True

    with pytest.raises(KeyError, match="mine"), stream.capture() as capture:  # noqa: PT012
        stream.fill(there.address, 5, 64)
        raise KeyError("mine")
    with pytest.raises(HipUsageError, match="no graph"):
        capture.graph()
    assert works()
    with pytest.raises(HipCallError) as caught, stream.capture():
        stream.synchronize()  # cannot be recorded, and breaks the capture
    assert 900 <= caught.value.code < 910
    assert works()
    sim.set(fail="hipGraphInstantiateWithFlags:1:2")
    with pytest.raises(DeviceMemoryError), stream.capture():
        stream.fill(there.address, 5, 64)
    assert works()
    assert sim.get("live_graphs") == 0


# ---- failures ------------------------------------------------------------------------------------


def test_a_failed_call_names_function_code_and_remedy(device: Device, sim: Control) -> None:
    stream = device.stream()
    sim.set(fail="hipEventRecord:1:801")
    with pytest.raises(HipCallError) as caught:
        stream.record()
    error = caught.value
    assert (error.function, error.code) == ("hipEventRecord", 801)
    assert error.code_name == "hipErrorNotSupported"
    assert "hipEventRecord failed with hipErrorNotSupported (801)" in str(error)
    assert "install a newer ROCm" in str(error)
    assert not device.lost


def test_a_code_that_the_binding_does_not_know_is_still_an_error(
    device: Device, sim: Control
) -> None:
    sim.set(fail="hipMalloc:1:12345")
    with pytest.raises(
        HipCallError, match=r"hipMalloc failed with unknown to hip-python \(12345\)"
    ):
        device.alloc(16)


def test_a_function_that_the_library_lacks(device: Device) -> None:
    with pytest.raises(HipLibraryError, match="hipMallocManaged cannot be called"):
        device.call("hipMallocManaged", 16, 1)


@pytest.mark.parametrize("code", [700, 719])
def test_a_lost_device_is_told_once_and_freed_quietly(sim: Control, code: int) -> None:
    device = Device.open()
    stream, there = device.stream(), device.alloc(64)
    with stream.capture() as capture:
        stream.fill(there.address, 1, 64)
    graph, event, pinned = capture.graph(), stream.record(), device.pinned(64)
    sim.set(lost_after=1, lost_code=code)
    with pytest.raises(DeviceLostError, match=r"dmesg"):
        stream.synchronize()
    assert device.lost
    with pytest.raises(DeviceLostError):
        event.query()
    there.free()
    assert len(device.live()) == 4, (graph, pinned)
    device.close()
    assert device.live() == ()


def test_the_first_error_is_the_one_that_is_told(sim: Control) -> None:
    before = sim.get("live_allocations")
    with pytest.raises(KeyError, match="mine"), Device.open() as device:  # noqa: PT012
        device.alloc(64)
        sim.set(fail="hipFree:1:1")
        raise KeyError("mine")
    assert sim.get("live_allocations") == before + 1, "the failed call did happen"


def test_closing_frees_the_rest_and_tells_what_failed(sim: Control) -> None:
    device = Device.open()
    before = Counter(sim.live())
    for _ in range(3):
        device.alloc(64)
    stream = device.stream()
    stream.record()
    device.pinned(64)
    sim.set(fail="hipFree:1:1")
    with pytest.raises(HipCallError, match="hipFree failed"):
        device.close()
    assert sim.live() == before + Counter(allocations=1)
    device.close()
    with pytest.raises(HipUsageError, match="hipMalloc on a device that was closed"):
        device.alloc(64)


def test_work_is_finished_before_what_it_uses_is_freed(sim: Control) -> None:
    sim.set(delay_us=20_000, delay_seed=1)
    with Device.open() as device:
        stream, there, pinned = device.stream(), device.alloc(MANY), device.pinned(MANY)
        for _ in range(4):
            stream.download(pinned, there.address)
    assert sim.get("copies") == 4
    before = sim.live()
    device = Device.open()
    device.stream(), device.alloc(64)
    sim.set(fail="hipStreamSynchronize:1:1,hipFree:1:1", delay_us=0)
    with pytest.raises(HipCallError, match="hipStreamSynchronize failed"):  # the first of two
        device.close()
    assert sim.live().get("streams", 0) == before.get("streams", 0)
