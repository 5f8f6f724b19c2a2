"""The whole way on an NVIDIA GPU: driver, graphs, failures, and every kernel's bits.

Each test asks a child process, since a process opens one HIP library.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


def on_gpu(*words: str) -> str:
    """What a Python with these words prints when its library is the one for NVIDIA GPUs."""
    env = {**os.environ, "DS4Q_HIP": "cuda"}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_every_kernel_gives_the_simulated_devices_bits() -> None:
    found = re.search(r"(\d+) of (\d+) kernels equal", on_gpu("-m", "ds4q.hipkern.selftest"))
    assert found is not None
    assert found[1] == found[2] != "0"


ORDER = """
import numpy as np
from ds4q.hipkern.driver import Device
with Device.open() as device:
    print(device.kind, device.arch.startswith("sm_"), 0 < device.free_bytes() < device.total_bytes)
    one, two, n = device.stream(), device.stream(), 1 << 24
    memory, pinned = device.alloc(2 * n), device.pinned(n)
    pinned.array[:] = np.random.default_rng(1).integers(0, 256, n, dtype=np.uint8)
    one.upload(memory.address, pinned)
    two.wait(one.record())
    with two.capture() as capture:
        two.move(memory.address + n, memory.address, n)
        two.fill(memory.address, 7, n)
    graph, back = capture.graph(), np.empty(2 * n, np.uint8)
    graph.launch(two)
    two.download(back, memory.address)
    print(bool((back[n:] == pinned.array).all()), bool((back[:n] == 7).all()))
    first, last = one.record(), two.record()
    device.synchronize()
    print(one.query(), two.query(), abs(first.elapsed_ms(last)) < 1000)
"""


def test_copies_events_and_graphs_keep_their_order() -> None:
    assert on_gpu("-c", ORDER).split() == ["cuda", *["True"] * 7]


FAILURES = """
from ds4q.hipkern.driver import Device
from ds4q.hipkern.errors import HipError
from ds4q.hipkern.kernels import Kernels
device = Device.open()
kernels, stream = Kernels(device), device.stream()
def fails(call):
    try:
        call()
    except HipError as error:
        print(type(error).__name__, error.code)
elf = b"\\x7fELF" + bytes(14) + (224).to_bytes(2, "little") + bytes(44)
fails(lambda: device.alloc(1 << 50))
fails(lambda: device.module(elf, "for amd"))
fails(lambda: kernels.launch(stream, "head.hip", "argmax", (1, 1, 1), 1 << 20, 1 << 20, 64))
fails(stream.synchronize)
print(device.lost)
device.close()
"""


def test_failures_have_their_meaning() -> None:
    words = on_gpu("-c", FAILURES).split()
    assert words == [
        *("DeviceMemoryError", "2", "HipCallError", "209", "DeviceLostError", "700", "True"),
    ]
