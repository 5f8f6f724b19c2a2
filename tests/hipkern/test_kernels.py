"""Launching by name: arguments against declarations, one module a build, code objects by file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.hipkern import kernels as module
from ds4q.hipkern.driver import Device
from ds4q.hipkern.errors import HipCallError, HipUsageError
from ds4q.hipkern.handles import Buffer
from ds4q.hipkern.kernels import Kernels
from ds4q.hipkern.source import FOLDER
from ds4q.hipkern.streams import Stream

TEXT = """\
// every: block 64, LDS 0 bytes
#include "ds4q_dev.h"
#ifndef PLUS
#define PLUS 0
#endif
DS4Q_KERNEL(every, 64, (int* y, int i, float f, ds4q_u64 wide, ds4q_u32 u, const int* more)) {
  if (ds4q_thread() != 0) return;
  y[0] = i + PLUS;
  y[1] = (int)ds4q_bits(f);
  y[2] = (int)(wide >> 32);
  y[3] = (int)u;
  y[4] = more ? more[0] : -1;
  y[5] = (int)ds4q_threads();
  y[6] = (int)(ds4q_blocks_x() * 10 + ds4q_blocks_y());
}
DS4Q_KERNEL(nothing, 32, ()) {}
"""
GOOD = (7, 1.5, 5 << 32, 1 << 31, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ds4q_dev.h").write_bytes((FOLDER / "ds4q_dev.h").read_bytes())
    (tmp_path / "k.hip").write_text(TEXT)
    return tmp_path


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    with device.stream() as stream:
        yield stream


@pytest.fixture
def out(device: Device) -> Iterator[Buffer]:
    with device.alloc(64) as out:
        yield out


def values(stream: Stream, out: Buffer) -> list[int]:
    found = np.zeros(16, np.int32)
    stream.download(found, out.address)
    return [int(x) for x in found]


def test_arguments_arrive(device: Device, folder: Path, stream: Stream, out: Buffer) -> None:
    kernels = Kernels(device, folder)
    kernels.launch(stream, "k.hip", "nothing", (1, 1, 1))
    kernels.launch(stream, "k.hip", "every", (3, 2, 1), out, *GOOD)
    assert values(stream, out)[:7] == [7, 0x3FC00000, 5, -(1 << 31), -1, 64, 32]
    kernels.launch(stream, "k.hip", "every", (1, 1, 1), out.address, np.int32(8), *GOOD[1:4], out)
    stream.synchronize()
    assert values(stream, out)[0] == 8
    assert values(stream, out)[4] == 8, "more is out itself"


def test_each_set_of_defines_is_a_module_of_its_own(
    device: Device, folder: Path, stream: Stream, out: Buffer
) -> None:
    kernels = Kernels(device, folder)
    for plus in (0, 100, 0, 100):
        kernels.launch(stream, "k.hip", "every", (1, 1, 1), out, *GOOD, defines={"PLUS": plus})
        assert values(stream, out)[0] == 7 + plus
    same = kernels.function("k.hip", "every", {"PLUS": 100})
    assert same is kernels.function("k.hip", "every", {"PLUS": 100})
    same.launch(stream, (1, 1, 1), out, *GOOD)
    assert values(stream, out)[0] == 107
    two = {"PLUS": 1, "OTHER": 2}, {"OTHER": 2, "PLUS": 1}
    first, second = (kernels.function("k.hip", "every", defines) for defines in two)
    assert first._module is second._module


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (GOOD[:-1], "wrong number of arguments: expected 6 .*pointer, int, float.*, found 5"),
        ((*GOOD, 1), "found 7"),
        ((7.0, *GOOD[1:]), r"argument 1 is of the wrong kind: expected int, found 7\.0 \(float\)"),
        ((1 << 31, *GOOD[1:]), "argument 1 is .* expected int, found 2147483648"),
        ((7, 1, *GOOD[2:]), r"argument 2 is .* expected float, found 1 \(int\)"),
        ((*GOOD[:2], -1, *GOOD[3:]), "argument 3 is .* expected ds4q_u64, found -1"),
        ((*GOOD[:3], "4", 0), "argument 4 is .* found '4'"),
        ((*GOOD[:4], None), "argument 5 is .* expected pointer, found None"),
        ((*GOOD[:4], 12), "argument 5 is .* expected pointer, found 12"),
        ((*GOOD[:4], 1.0), "argument 5 is .* expected pointer"),
    ],
)
def test_arguments_of_another_kind_are_refused(
    device: Device, folder: Path, stream: Stream, out: Buffer, arguments: Any, problem: str
) -> None:
    kernels = Kernels(device, folder)
    for _ in range(2):  # an error is not remembered as a success
        with pytest.raises(HipUsageError, match=problem):
            kernels.launch(stream, "k.hip", "every", (1, 1, 1), out, *arguments)
    stream.synchronize()


def test_a_value_out_of_range_is_refused_after_others_of_its_type_passed(
    device: Device, folder: Path, stream: Stream, out: Buffer
) -> None:
    every = Kernels(device, folder).function("k.hip", "every")
    every.launch(stream, (1, 1, 1), out, *GOOD)
    with pytest.raises(HipUsageError, match="argument 1 is of the wrong kind"):
        every.launch(stream, (1, 1, 1), out, 1 << 40, *GOOD[1:])
    stream.synchronize()


def test_launches_that_cannot_be_are_refused(
    device: Device, folder: Path, stream: Stream, out: Buffer
) -> None:
    kernels = Kernels(device, folder)
    with pytest.raises(HipUsageError, match="a grid without blocks"):
        kernels.launch(stream, "k.hip", "every", (1, 0, 1), out, *GOOD)
    with pytest.raises(HipUsageError, match="declares no kernel of this name"):
        kernels.launch(stream, "k.hip", "all", (1, 1, 1))
    with pytest.raises(HipUsageError, match="no such kernel file"):
        kernels.launch(stream, "absent.hip", "every", (1, 1, 1))
    freed = device.alloc(64)
    freed.free()
    with pytest.raises(HipUsageError, match="this Buffer was freed"):
        kernels.launch(stream, "k.hip", "every", (1, 1, 1), freed, *GOOD)


def test_a_kernel_that_a_build_leaves_out_is_told_by_name(device: Device, folder: Path) -> None:
    (folder / "k.hip").write_text(
        '#include "ds4q_dev.h"\n#if defined(WITH)\n' + "DS4Q_KERNEL(k, 32, (int n)) {}\n#endif\n"
    )
    kernels = Kernels(device, folder)
    kernels.function("k.hip", "k", {"WITH": 1})
    with pytest.raises(HipCallError, match=r"k\.hip: k: .*hipErrorNotFound \(500\)"):
        kernels.function("k.hip", "k")


def test_builds_are_prepared_together(
    device: Device, folder: Path, stream: Stream, out: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels(device, folder)
    kernels.prepare([("k.hip", {"PLUS": plus}) for plus in range(1, 5)], workers=4)
    monkeypatch.setattr(module, "compile_source", None)  # nothing is left to build
    for plus in range(1, 5):
        kernels.launch(stream, "k.hip", "every", (1, 1, 1), out, *GOOD, defines={"PLUS": plus})
        assert values(stream, out)[0] == 7 + plus


def test_a_code_object_for_other_hardware_is_refused(device: Device) -> None:
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    header[18] = 224  # EM_AMDGPU
    with pytest.raises(HipCallError, match="is for another architecture; build it for this one"):
        device.module(bytes(header), "k.hip")
