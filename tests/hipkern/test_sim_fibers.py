"""Blocks on fibers: meeting points, order of lanes, shared memory, copies, divergence."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.hipkern.sim_rig import Rig, f32, i32

FAILED = 719


def test_a_reduction_has_the_same_bits_for_any_order_and_threads(rig: Rig) -> None:
    x = np.random.default_rng(1).standard_normal((40, 1000)).astype(np.float32)
    at, out = rig.device(x), rig.call("hipMalloc", 160)
    seen = set()
    for threads, seed in [(1, 0), (2, 0), (3, 5), (1, 6), (4, 7)]:
        rig.control.set(threads=threads, lane_seed=seed)
        rig.call("hipMemset", out, 0xFF, 160)
        assert rig.launch(None, "sums", 40, 96, at, out, i32(1000)) == 0
        seen.add(rig.read(out, 40).tobytes())
    assert len(seen) == 1
    sums = np.frombuffer(seen.pop(), np.float32)
    bound = 1000 * 2.0**-24 * np.abs(x.astype(np.float64)).sum(1)
    assert (np.abs(sums - x.astype(np.float64).sum(1)) < bound).all()


def test_group_sums_are_the_shuffles_of_other_targets(rig: Rig) -> None:
    x = np.random.default_rng(2).standard_normal(32).astype(np.float32)
    sums, peaks = rig.call("hipMalloc", 256), rig.call("hipMalloc", 256)
    assert rig.launch(None, "shuffled_sums", 1, 32, rig.device(x), sums, peaks) == 0
    by_shuffle, by_group = rig.read(sums, 2, 32)
    assert by_shuffle.tobytes() == by_group.tobytes()
    assert len(set(by_group.tolist())) == 1
    np.testing.assert_array_equal(rig.read(peaks, 2, 32), x.max())


def test_a_barrier_is_needed_and_works(rig: Rig) -> None:
    x = np.arange(64, dtype=np.float32)
    at, out = rig.device(x), rig.call("hipMalloc", 256)
    assert rig.launch(None, "reversed", 1, 64, at, out, i32(1)) == 0
    np.testing.assert_array_equal(rig.read(out, 64), x[::-1])
    assert rig.launch(None, "reversed", 1, 64, at, out, i32(0)) == 0
    assert np.isnan(rig.read(out, 64)).any()


def test_lane_order_decides_who_reads_too_early(rig: Rig) -> None:
    at, out = rig.device(np.arange(64, dtype=np.float32)), rig.call("hipMalloc", 256)
    missing = set()
    for seed in range(4):
        rig.control.set(lane_seed=seed)
        assert rig.launch(None, "reversed", 1, 64, at, out, i32(0)) == 0
        missing.add(np.isnan(rig.read(out, 64)).tobytes())
    assert len(missing) == 4


def test_a_block_does_not_see_what_another_left_in_shared_memory(rig: Rig) -> None:
    rig.control.set(threads=1)
    out = rig.call("hipMalloc", 4 * 32 * 8)
    assert rig.launch(None, "stale", 8, 32, out) == 0
    assert np.isnan(rig.read(out, 8 * 32)).all()


def test_an_asynchronous_copy_lands_at_its_wait(rig: Rig) -> None:
    x = np.arange(256, dtype=np.float32)
    at, out = rig.device(x), rig.call("hipMalloc", 3 * 128)
    assert rig.launch(None, "tiles", 1, 32, at, out, i32(2)) == 0
    first, early, second = rig.read(out, 3, 32)
    np.testing.assert_array_equal(first, x[:128:4])
    assert np.isnan(early).all()
    np.testing.assert_array_equal(second, x[128::4])


@pytest.mark.parametrize(
    ("name", "block", "values", "message"),
    [
        ("tiles", 32, (0,), "thread 0 ends with 2 asynchronous copies that it never waited for"),
        ("tiles", 32, (1,), "thread 0 ends with 1 asynchronous copies"),
        ("misaligned", 32, (), "thread 3 copies 16 bytes from or to an address"),
        ("early", 64, (37,), "waits at a barrier that thread 37 never reaches: it has ended"),
        ("parted", 64, (), "thread 16 reaches a group barrier while others"),
        ("narrow", 16, (), "thread 0 shuffles from lane 16 of a group of 16"),
        ("overshoot", 32, (31,), "wrote beyond a shared object of 124 bytes"),
        ("greedy", 32, (), "thread 0 needs more than 65536 bytes of shared memory"),
    ],
)
def test_a_kernel_gone_wrong_fails_the_next_synchronisation_and_is_named(
    rig: Rig,
    capfd: pytest.CaptureFixture[str],
    name: str,
    block: int,
    values: tuple[int, ...],
    message: str,
) -> None:
    at, out = rig.device(np.zeros(256, np.float32)), rig.call("hipMalloc", 4 * 96)
    pointers = {"tiles": (at, out), "misaligned": (at,), "early": (), "overshoot": ()}.get(
        name, (out,)
    )
    stream = rig.call("hipStreamCreate")
    assert rig.launch(stream, name, 1, block, *pointers, *map(i32, values)) == 0
    assert rig.code("hipStreamSynchronize", stream) == FAILED
    said = capfd.readouterr().err
    assert f"ds4q sim: kernel {name}, block (0, 0, 0): " in said
    assert message in said
    assert rig.code("hipStreamSynchronize", stream) == 0
    assert rig.control.get("failed_launches") == 1
    # What the failed block left behind is not met by the next.
    assert rig.launch(stream, "tiles", 1, 32, at, out, i32(2)) == 0
    assert rig.code("hipStreamSynchronize", stream) == 0
    rig.call("hipStreamDestroy", stream)


def test_a_divergence_of_many_blocks_is_told_once(
    rig: Rig, capfd: pytest.CaptureFixture[str]
) -> None:
    assert rig.launch(None, "early", 500, 64, i32(0)) == 0
    assert rig.code("hipDeviceSynchronize") == FAILED
    assert capfd.readouterr().err.count("\n") == 1


def test_a_kernel_may_keep_kilobytes_across_a_barrier(rig: Rig) -> None:
    out = rig.call("hipMalloc", 256)
    assert rig.launch(None, "deep", 1, 64, out, i32(7)) == 0
    assert set(rig.read(out, 64).tolist()) == {float(sum(i % 7 for i in range(8192)))}


def test_blocks_of_a_grid_have_three_places(rig: Rig) -> None:
    out = rig.call("hipMalloc", 4 * 24)
    assert rig.launch(None, "places", (2, 3, 4), 32, out) == 0
    expected = [x + 10 * y + 100 * z for z in range(4) for y in range(3) for x in range(2)]
    assert rig.read(out, 24, dtype=np.uint32).tolist() == expected


def test_arguments_arrive_in_both_forms(rig: Rig) -> None:
    out = rig.call("hipMalloc", 16)
    values = (out, i32(-3), f32(0.5), ctypes.c_ulonglong(9 << 32), i32(4))
    assert rig.launch(None, "mixed", 1, 32, *values) == 0
    assert rig.read(out, 4).tolist() == [-3.0, 0.5, 9.0, 4.0]
    address = ctypes.c_void_p(int(out))
    kept = (address, i32(-4), f32(0.25), ctypes.c_ulonglong(8 << 32), i32(5))
    pointers = (ctypes.c_void_p * 5)(*(ctypes.addressof(value) for value in kept))
    sizes = (1, 1, 1, 32, 1, 1, 0)
    table = ctypes.addressof(pointers)
    rig.call("hipModuleLaunchKernel", rig.function("mixed"), *sizes, None, table, None)
    assert rig.read(out, 4).tolist() == [-4.0, 0.25, 8.0, 5.0]


def test_a_launch_that_fits_no_device_is_refused(rig: Rig) -> None:
    at = rig.call("hipMalloc", 256)
    assert rig.launch(None, "stale", 1, 64, at) == 9
    assert rig.launch(None, "stale", 0, 32, at) == 9
    assert rig.launch(None, "stale", (1, 65536, 1), 32, at) == 9
    assert rig.launch(None, "stale", (2**31 - 1, 1, 1), 32, at) == 9
    assert rig.launch(None, "stale", 1, 32, at, i32(1)) == 1
    assert rig.launch(None, "stale", 1, 32) == 1
    function = rig.function("stale")
    sizes = (1, 1, 1, 32, 1, 1)
    assert rig.code("hipModuleLaunchKernel", function, *sizes, 64, None, None, (at,)) == 1


def test_shared_objects_may_be_filled(rig: Rig) -> None:
    assert rig.launch(None, "overshoot", 5, 32, i32(30)) == 0
    assert rig.code("hipDeviceSynchronize") == 0


def test_atomics_count_over_threads(rig: Rig) -> None:
    rig.control.set(threads=4)
    total = rig.call("hipMalloc", 4)
    rig.call("hipMemset", total, 0, 4)
    assert rig.launch(None, "count", 3000, 32, total) == 0
    assert rig.read(total, 1, dtype=np.uint32)[0] == 96000
