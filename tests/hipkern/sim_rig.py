"""Owns what tests of the simulated device share: its calls without the driver, and small kernels.

The driver checks and orders calls; what the device does with wrong ones only shows without it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4q.hipkern.library import open_library
from ds4q.hipkern.sim.control import Control
from ds4q.hipkern.source import FOLDER

SOURCE = """
#include "ds4q_dev.h"
DS4Q_KERNEL(gate, 32, (const volatile int* open)) {  // holds its stream until the host says go
  while (*open == 0) {
  }
}
DS4Q_KERNEL(late, 32, (const volatile int* open)) {  // long blocks; the last waits for the host
  if (ds4q_block_x() + 1 == ds4q_blocks_x()) {
    while (*open == 0) {
    }
  }
  for (volatile int i = 0; i < 20000; i = i + 1) {
  }
}
DS4Q_KERNEL(scale, 64, (const float* x, float* y, float by, int n)) {
  ds4q_u32 i = ds4q_block_x() * 64 + ds4q_thread();
  if ((int)i < n) y[i] = x[i] * by;
}
DS4Q_KERNEL(add, 64, (float* y, const float* by, int n)) {
  ds4q_u32 i = ds4q_block_x() * 64 + ds4q_thread();
  if ((int)i < n) y[i] += by[0];
}
DS4Q_KERNEL(sums, 96, (const float* x, float* y, int n)) {  // per block: lanes, tree, groups
  DS4Q_SHARED(float, part, 3);
  const float* row = x + (ds4q_u64)ds4q_block_x() * n;
  float s = 0;
  for (int i = (int)ds4q_thread(); i < n; i += 96) s += row[i];
  s = ds4q_group_sum(s);
  if (ds4q_lane() == 0) part[ds4q_thread() / 32] = s;
  ds4q_barrier();
  if (ds4q_thread() == 0) y[ds4q_block_x()] = part[0] + part[1] + part[2];
}
DS4Q_KERNEL(shuffled_sums, 32, (const float* x, float* sum, float* peak)) {
  float s = x[ds4q_thread()], p = s;
  for (ds4q_u32 d = 1; d < 32; d *= 2) {
    s = s + ds4q_shuffle(s, ds4q_lane() ^ d);
    p = ds4q_max(p, ds4q_shuffle(p, ds4q_lane() ^ d));
  }
  sum[ds4q_thread()] = s, sum[32 + ds4q_thread()] = ds4q_group_sum(x[ds4q_thread()]);
  peak[ds4q_thread()] = p, peak[32 + ds4q_thread()] = ds4q_group_max(x[ds4q_thread()]);
}
DS4Q_KERNEL(reversed, 64, (const float* x, float* y, int wait)) {
  DS4Q_SHARED(float, tile, 64);
  tile[ds4q_thread()] = x[ds4q_thread()];
  if (wait) ds4q_barrier();
  y[ds4q_thread()] = tile[63 - ds4q_thread()];
}
DS4Q_KERNEL(stale, 32, (float* y)) {  // block 0 leaves something in shared memory
  DS4Q_SHARED(float, tile, 32);
  y[ds4q_block_x() * 32 + ds4q_thread()] = tile[ds4q_thread()];
  tile[ds4q_thread()] = 1.0f;
}
DS4Q_KERNEL(tiles, 32, (const float* x, float* y, int wait)) {  // two tiles in flight
  DS4Q_SHARED(float, tile, 256);
  float* mine = tile + 4 * ds4q_thread();
  ds4q_copy16(mine, x + 4 * ds4q_thread());
  ds4q_copy_commit();
  ds4q_copy16(mine + 128, x + 128 + 4 * ds4q_thread());
  ds4q_copy_commit();
  if (wait) ds4q_copy_wait<1>();
  y[ds4q_thread()] = mine[0];
  y[32 + ds4q_thread()] = mine[128];  // still on its way
  if (wait > 1) ds4q_copy_wait<0>();
  y[64 + ds4q_thread()] = mine[128];
}
DS4Q_KERNEL(misaligned, 32, (const float* x)) {
  DS4Q_SHARED(float, tile, 32);
  if (ds4q_thread() == 3) ds4q_copy16(tile, x + 1);
}
DS4Q_KERNEL(early, 64, (int who)) {  // one lane leaves before a barrier
  if ((int)ds4q_thread() == who) return;
  ds4q_barrier();
}
DS4Q_KERNEL(parted, 64, (float* y)) {  // half a group sums while the other half waits
  if (ds4q_lane() < 16) {
    y[0] = ds4q_group_sum(1.0f);
  } else {
    ds4q_group_barrier();
  }
}
DS4Q_KERNEL(narrow, 16, (float* y)) { y[0] = ds4q_shuffle(1.0f, ds4q_lane() ^ 16); }
DS4Q_KERNEL(greedy, 32, (float* y)) {
  DS4Q_SHARED(float, tile, 20000);
  y[0] = tile[0];
}
DS4Q_KERNEL(overshoot, 32, (int at)) {
  DS4Q_SHARED(float, tile, 31);
  DS4Q_SHARED(float, other, 32);
  other[ds4q_thread()] = 0;
  tile[ds4q_thread() < 31 ? (int)ds4q_thread() : at] = 1.0f;
}
DS4Q_KERNEL(deep, 64, (float* y, int n)) {  // kernels may keep a few KB
  float kept[8192];
  for (int i = 0; i < 8192; i++) kept[i] = (float)(i % n);
  ds4q_barrier();
  float s = 0;
  for (int i = 0; i < 8192; i++) s += kept[i];
  y[ds4q_thread()] = s;
}
DS4Q_KERNEL(beyond, 32, (float* y, int n)) { y[n] = 1.0f; }
DS4Q_KERNEL(places, 32, (ds4q_u32* y)) {
  ds4q_u32 at = ds4q_block_x() + ds4q_blocks_x() * (ds4q_block_y() + 3 * ds4q_block_z());
  if (ds4q_thread() == 0) y[at] = ds4q_block_x() + 10 * ds4q_block_y() + 100 * ds4q_block_z();
}
DS4Q_KERNEL(mixed, 32, (float* y, int n, float f, ds4q_u64 big, int last)) {
  if (ds4q_thread() == 0) y[0] = (float)n, y[1] = f, y[2] = (float)(big >> 32), y[3] = (float)last;
}
DS4Q_KERNEL(count, 32, (ds4q_u32* total)) { ds4q_sim.atomic_add(total, 1); }
"""

F32 = npt.NDArray[np.float32]


class Rig:
    """Calls of the library: ``ok`` gives what a call returns after success, ``code`` its code."""

    def __init__(self) -> None:
        library = open_library()
        self.hip, self.rtc = library.hip, library.hiprtc
        self.control = Control(Path(library.path).parents[1])
        kind = self.hip.hipMemcpyKind
        self.h2d, self.d2h = kind.hipMemcpyHostToDevice, kind.hipMemcpyDeviceToHost
        self.d2d, self.any = kind.hipMemcpyDeviceToDevice, kind.hipMemcpyDefault
        self._module: Any = None
        self._functions: dict[str, Any] = {}

    @staticmethod
    def ok(result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result[0]
        return result[1] if len(result) == 2 else result[1:]

    def call(self, name: str, *arguments: Any) -> Any:
        return self.ok(getattr(self.hip, name)(*arguments))

    def code(self, name: str, *arguments: Any) -> int:
        return int(getattr(self.hip, name)(*arguments)[0])

    def compile(self, source: str, *options: str) -> bytearray:
        header = (FOLDER / "ds4q_dev.h").read_bytes()
        text, names = source.encode(), ([header], [b"ds4q_dev.h"])
        program = self.ok(self.rtc.hiprtcCreateProgram(text, b"test.hip", 1, *names))
        given = [option.encode() for option in options]
        result = self.rtc.hiprtcCompileProgram(program, len(given), given)[0]
        size = self.ok(self.rtc.hiprtcGetProgramLogSize(program))
        log = bytearray(size)
        self.ok(self.rtc.hiprtcGetProgramLog(program, log))
        if int(result):
            self.ok(self.rtc.hiprtcDestroyProgram(program.createRef()))
            raise ValueError(f"{result.name}: {log[:-1].decode()}")
        code = bytearray(self.ok(self.rtc.hiprtcGetCodeSize(program)))
        self.ok(self.rtc.hiprtcGetCode(program, code))
        self.ok(self.rtc.hiprtcDestroyProgram(program.createRef()))
        return code

    def function(self, name: str) -> Any:
        """A kernel of ``SOURCE``, which is compiled once and stays loaded."""
        if self._module is None:
            self._module = self.call("hipModuleLoadData", self.compile(SOURCE))
        if name not in self._functions:
            self._functions[name] = self.call("hipModuleGetFunction", self._module, name.encode())
        return self._functions[name]

    def launch(
        self, stream: Any, name: str, grid: int | tuple[int, int, int], block: int, *values: Any
    ) -> int:
        shape = (grid, 1, 1) if isinstance(grid, int) else grid
        sizes = (*shape, block, 1, 1, 0)
        return self.code(
            "hipModuleLaunchKernel", self.function(name), *sizes, stream, None, tuple(values)
        )

    def device(self, array: F32) -> Any:
        """A pointer to a copy of ``array`` in device memory."""
        at = self.call("hipMalloc", array.nbytes)
        self.call("hipMemcpy", at, array, array.nbytes, self.h2d)
        return at

    def read(self, at: Any, *shape: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
        out = np.zeros(shape, dtype)
        self.call("hipMemcpy", out, at, out.nbytes, self.d2h)
        return out

    def settle(self) -> None:
        """Give work that waits for nothing the time to be done, on a stream that waits for none."""
        stream, flag = self.call("hipStreamCreateWithFlags", 1), self.pinned(1, np.int32)
        flag[1][0] = 1
        for _ in range(20):
            assert self.launch(stream, "late", 1, 32, flag[0]) == 0
        self.call("hipStreamSynchronize", stream)
        self.call("hipStreamDestroy", stream)

    def pinned(self, shape: int, dtype: Any = np.float32) -> tuple[Any, npt.NDArray[Any]]:
        """Pinned memory and an array over it."""
        nbytes = shape * np.dtype(dtype).itemsize
        at = self.call("hipHostMalloc", nbytes, 0)
        raw = (ctypes.c_uint8 * nbytes).from_address(int(at))
        return at, np.frombuffer(raw, dtype)


def i32(value: int) -> ctypes.c_int:
    return ctypes.c_int(value)


def f32(value: float) -> ctypes.c_float:
    return ctypes.c_float(value)
