"""What the simulated device answers to wrong calls, and to a test that wants it to fail."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ds4q.hipkern.sim.control import Control
from tests.hipkern.sim_rig import Rig, f32, i32

N = 256


def test_the_device_says_that_it_is_simulated(rig: Rig) -> None:
    properties = rig.call("hipGetDeviceProperties", 0)
    assert properties.name == "ds4q simulated device (CPU)"
    assert properties.gcnArchName == "sim"
    assert properties.warpSize == 32
    assert properties.totalGlobalMem == rig.control.get("memory_bytes")


def test_no_device(rig: Rig) -> None:
    rig.control.set(devices=0)
    assert rig.code("hipInit", 0) == 101
    assert rig.code("hipGetDeviceCount") == 100
    assert rig.code("hipMalloc", 64) == 101
    assert rig.code("hipRuntimeGetVersion") == 0
    rig.control.set(devices=1)
    assert rig.call("hipGetDeviceCount") == 1


def test_memory_ends_where_the_setting_says(rig: Rig) -> None:
    used = rig.control.get("live_bytes")
    rig.control.set(memory_bytes=used + 1000)
    assert rig.call("hipMemGetInfo") == (1000, used + 1000)
    assert rig.code("hipMalloc", 1001) == 2
    at = rig.call("hipMalloc", 600)
    assert rig.code("hipMalloc", 401) == 2
    assert rig.call("hipMemGetInfo")[0] == 400
    assert rig.code("hipHostMalloc", 5000, 0) == 0  # not of the device
    rig.call("hipFree", at)
    assert rig.call("hipMemGetInfo")[0] == 1000


def test_fresh_memory_is_nan(rig: Rig) -> None:
    at = rig.call("hipMalloc", 4 * N)
    assert np.isnan(rig.read(at, N)).all()
    rig.call("hipFree", at)


def test_copies_stay_in_allocations_and_directions(rig: Rig) -> None:
    host = np.zeros(2 * N, np.float32)
    x = rig.call("hipMalloc", 4 * N)
    y = rig.call("hipMalloc", 4 * N)
    inside = ctypes.c_void_p(int(x) + 4)
    before = ctypes.c_void_p(int(x) - 4)
    assert rig.code("hipMemcpy", x, host, 4 * N, rig.h2d) == 0
    assert rig.code("hipMemcpy", inside, host, 4 * N - 4, rig.h2d) == 0
    assert rig.code("hipMemcpy", x, y, 4 * N, rig.d2d) == 0
    assert rig.code("hipMemcpy", host, x, 4 * N, rig.any) == 0
    for wrong in (
        (x, host, 4 * N + 1, rig.h2d),
        (inside, host, 4 * N, rig.h2d),
        (before, host, 8, rig.h2d),
        (before, host, 8, rig.any),
        (x, host, 4, rig.d2h),
        (host, x, 4, rig.h2d),
        (x, host, 4, rig.d2d),
        (host, x, 4 * N + 4, rig.d2h),
    ):
        assert rig.code("hipMemcpy", *wrong) == 1
        assert rig.code("hipMemcpyAsync", *wrong, None) == 1
    assert rig.code("hipMemset", x, 0, 4 * N + 1) == 1
    rig.call("hipFree", y)
    assert rig.code("hipMemcpy", x, y, 4, rig.d2d) == 1
    assert rig.code("hipMemcpy", host, y, 4, rig.any) == 1
    assert rig.code("hipMemset", y, 0, 4) == 1
    assert rig.code("hipFree", y) == 1
    assert rig.code("hipFree", inside) == 1
    assert rig.code("hipHostFree", x) == 1
    rig.call("hipFree", x)


def test_a_write_beyond_an_allocation_shows_when_it_is_freed(
    rig: Rig, capfd: pytest.CaptureFixture[str]
) -> None:
    at = rig.call("hipMalloc", 4 * N)
    assert rig.launch(None, "beyond", 1, 32, at, i32(N - 1)) == 0
    rig.call("hipDeviceSynchronize")
    assert rig.launch(None, "beyond", 1, 32, at, i32(N)) == 0
    assert rig.code("hipFree", at) == 700
    assert rig.control.get("overruns") == 1
    assert "wrote beyond an allocation of 1024 bytes" in capfd.readouterr().err


def test_faults_hit_the_named_call_and_only_it(rig: Rig) -> None:
    rig.control.set(fail="hipMalloc:2:2,hipEventRecord:1:719")
    first = rig.call("hipMalloc", 64)
    assert rig.code("hipMalloc", 64) == 2
    assert rig.code("hipGetLastError") == 2
    assert rig.code("hipGetLastError") == 0
    rig.call("hipFree", rig.call("hipMalloc", 64))
    event = rig.call("hipEventCreate")
    assert rig.code("hipEventRecord", event, None) == 719
    assert rig.code("hipEventRecord", event, None) == 0
    rig.call("hipEventDestroy", event)
    rig.call("hipFree", first)
    for bad in ("hipMalloc", "hipMalloc:0:2", "hipMalloc:1:0", "hipMalloc:x:2"):
        with pytest.raises(ValueError, match="no setting"):
            rig.control.set(fail=bad)


def test_a_lost_device_answers_every_call_and_takes_back_what_it_gave(rig: Rig) -> None:
    rig.function("stale")
    before = rig.control.live()
    at, stream = rig.call("hipMalloc", 64), rig.call("hipStreamCreate")
    pinned, event = rig.call("hipHostMalloc", 64, 0), rig.call("hipEventCreate")
    rig.control.set(lost_after=2, lost_code=709)
    assert rig.code("hipStreamQuery", stream) == 0
    assert rig.code("hipStreamQuery", stream) == 709
    assert rig.code("hipMalloc", 64) == 709
    assert rig.launch(stream, "stale", 1, 32, at) == 709
    assert rig.control.live() != before
    assert rig.code("hipFree", at) == 709
    assert rig.code("hipHostFree", pinned) == 709
    assert rig.code("hipEventDestroy", event) == 709
    assert rig.code("hipStreamDestroy", stream) == 709
    assert rig.control.live() == before


def test_what_is_not_freed_is_counted(rig: Rig) -> None:
    rig.function("scale")
    before = rig.control.live()
    stream, event = rig.call("hipStreamCreate"), rig.call("hipEventCreate")
    at, pinned = rig.call("hipMalloc", 64), rig.call("hipHostMalloc", 64, 0)
    rig.call("hipStreamBeginCapture", stream, rig.hip.hipStreamCaptureMode(2))
    graph = rig.call("hipStreamEndCapture", stream)
    exec_ = rig.call("hipGraphInstantiate", graph, 0)[0]
    module = rig.call("hipModuleLoadData", rig.compile('#include "ds4q_dev.h"\n'))
    more = {kind: rig.control.live()[kind] - before.get(kind, 0) for kind in rig.control.live()}
    assert more == dict.fromkeys(more, 1)
    assert len(more) == 7
    for name, handle in {
        "hipModuleUnload": module,
        "hipGraphExecDestroy": exec_,
        "hipGraphDestroy": graph,
        "hipHostFree": pinned,
        "hipFree": at,
        "hipEventDestroy": event,
        "hipStreamDestroy": stream,
    }.items():
        assert rig.code(name, handle) == 0
        assert rig.code(name, handle) in (1, 400)  # freed twice
    assert rig.control.live() == before


def test_images_that_are_not_for_this_device(rig: Rig) -> None:
    amd = bytearray(64)
    amd[:20] = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\xe0\x00"
    assert rig.code("hipModuleLoadData", amd) == 209
    assert rig.code("hipModuleLoadData", bytearray(b"__CLANG_OFFLOAD_BUNDLE__")) == 209
    assert rig.code("hipModuleLoadData", bytearray(b"// no image at all, but text")) == 200
    plain = Path(rig.hip.__file__).read_bytes()  # a shared library without kernels
    assert rig.code("hipModuleLoadData", bytearray(plain)) in (209, 303)


def test_a_kernel_that_is_not_there(rig: Rig) -> None:
    code = rig.compile('#include "ds4q_dev.h"\nDS4Q_KERNEL(one, 32, (int* x)) { x[0] = 1; }\n')
    module = rig.call("hipModuleLoadData", code)
    function = rig.call("hipModuleGetFunction", module, b"one")
    assert rig.code("hipModuleGetFunction", module, b"two") == 500
    assert rig.code("hipModuleGetGlobal", module, b"two") == 500
    rig.call("hipModuleUnload", module)
    assert rig.code("hipModuleGetFunction", module, b"one") == 400
    sizes = (1, 1, 1, 32, 1, 1, 0)
    assert rig.code("hipModuleLaunchKernel", function, *sizes, None, None, (i32(0),)) == 400


def test_a_source_that_does_not_compile_names_its_line(rig: Rig) -> None:
    with pytest.raises(ValueError, match=r"COMPILATION: test\.hip:2:.*error") as caught:
        rig.compile("\nint f( {}\n")
    assert "/tmp" not in str(caught.value)
    with pytest.raises(ValueError, match="INVALID_OPTION: ds4q sim: option --use_fast_math"):
        rig.compile("", "--use_fast_math")


def test_options_reach_the_compiler(rig: Rig) -> None:
    source = '#include "ds4q_dev.h"\n#if SIZE != 3\n#error wrong\n#endif\n'
    assert rig.compile(source, "-DSIZE=3", "--gpu-architecture=sim", "-O3")
    with pytest.raises(ValueError, match="wrong"):
        rig.compile(source, "-DSIZE=4")


def test_bits_do_not_depend_on_the_processor_or_the_level(rig: Rig) -> None:
    source = (
        '#include "ds4q_dev.h"\n'
        "DS4Q_KERNEL(mix, 64, (const float* x, float* y)) {\n"
        "  float v = x[ds4q_thread()];\n"
        "  float h = ds4q_half(ds4q_to_half(v * 1e-5f));\n"
        "  y[ds4q_thread()] = ds4q_sqrt(ds4q_fma(v, v, h)) / (v + 3.0f) + ds4q_exp(v) * v - h;\n"
        "}\n"
    )
    x = np.random.default_rng(3).standard_normal(64).astype(np.float32)
    at, out = rig.device(x), rig.call("hipMalloc", 256)
    seen = set()
    for options in (["-march=x86-64"], ["-march=x86-64-v3"], ["-O0"], ["-O3"], []):
        if options == ["-march=x86-64-v3"] and "avx2" not in Path("/proc/cpuinfo").read_text():
            continue
        module = rig.call("hipModuleLoadData", rig.compile(source, *options))
        function = rig.call("hipModuleGetFunction", module, b"mix")
        sizes = (1, 1, 1, 64, 1, 1, 0)
        rig.call("hipModuleLaunchKernel", function, *sizes, None, None, (at, out))
        seen.add(rig.read(out, 64).tobytes())
        rig.call("hipModuleUnload", module)
    assert len(seen) == 1
    assert np.isfinite(np.frombuffer(seen.pop(), np.float32)).all()


def test_settings_come_from_the_environment_too(rig: Rig) -> None:
    library = Path(rig.control.folder) / "lib" / "libamdhip64.so"
    script = (
        "import ctypes, sys\n"
        f"library = ctypes.CDLL({str(library)!r})\n"
        "print(library.ds4q_sim_get(b'threads'), library.hipInit(0), library.hipInit(0))\n"
    )
    env = {**os.environ, "DS4Q_SIM_THREADS": "7", "DS4Q_SIM_FAIL": "hipInit:2:719"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["7", "0", "719"]
    env["DS4Q_SIM_THREADS"] = "many"
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode < 0
    assert "DS4Q_SIM_THREADS=many is not understood" in done.stderr


def test_an_unknown_setting_or_count_is_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="no setting speed=1"):
        rig.control.set(speed=1)
    with pytest.raises(ValueError, match="counts no speed"):
        rig.control.get("speed")


def test_using_undoes_itself(rig: Rig) -> None:
    control: Control = rig.control
    before = control.get("threads")
    with control.using(threads=before + 1, delay_us=5):
        assert control.get("threads") == before + 1
    assert control.get("threads") == before
    assert control.get("delay_us") == 0


def test_launches_and_copies_are_counted(rig: Rig) -> None:
    x = rig.device(np.zeros(N, np.float32))
    for _ in range(3):
        assert rig.launch(None, "scale", 4, 64, x, x, f32(1), i32(N)) == 0
    rig.read(x, N)
    assert rig.control.get("launches") == 3
    assert rig.control.get("copies") == 2
