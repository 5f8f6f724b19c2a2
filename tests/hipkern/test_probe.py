"""The probe answers whatever the HIP library does: absent, broken, silent, crashing."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ds4q.hipkern.probe import (
    ARCH_AT,
    COMPILER,
    LIBRARY,
    MEMORY_AT,
    NAME_AT,
    PROPERTIES_BYTES,
    DeviceReport,
    HipReport,
    ask,
    candidates,
    compiler_version,
    probe,
)

CC = shutil.which("cc") or shutil.which("gcc")
needs_cc = pytest.mark.skipif(CC is None, reason="needs a C compiler to build a fake HIP library")


def rocm_with(folder: Path, source: str) -> dict[str, str]:
    """Build ``source`` as the HIP library of a ROCm folder; the environment that names it."""
    (folder / "lib").mkdir()
    code = folder / "fake.c"
    code.write_text(source)
    library = str(folder / "lib" / LIBRARY)
    subprocess.run([str(CC), "-shared", "-fPIC", "-o", library, str(code)], check=True)
    return {**os.environ, "ROCM_PATH": str(folder)}


def library_source(count: str, version: str = "*v = 70152345; return 0;") -> str:
    return f"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int hipRuntimeGetVersion(int *v) {{ {version} }}
int hipGetDeviceCount(int *n) {{ {count} }}
"""


@needs_cc
def test_a_library_with_devices(tmp_path: Path) -> None:
    env = rocm_with(tmp_path, library_source('puts("driver chatter"); *n = 2; return 0;'))
    assert probe(env) == HipReport(str(tmp_path / "lib" / LIBRARY), 70152345, 2)


@needs_cc
def test_devices_are_described_where_the_library_can(tmp_path: Path) -> None:
    """The layout is that of hipDeviceProp_tR0600, which the suffix fixes."""
    env = rocm_with(
        tmp_path,
        library_source("*n = 3; return 0;")
        + """
#include <string.h>
int hipGetDevicePropertiesR0600(char *p, int i) {
  if (i == 1) return 1;
  memset(p, 'x', 1472);
  strcpy(p, i ? "Second" : "First");
  strcpy(p + 1160, "gfx942:sramecc+");
  *(unsigned long *)(p + 288) = 1000 + i;
  return 0;
}
""",
    )
    report = probe(env)
    assert report.devices == 3
    assert report.found == (
        DeviceReport("First", "gfx942:sramecc+", 1000),
        DeviceReport("Second", "gfx942:sramecc+", 1002),
    )
    assert report.hiprtc is None


def test_the_layout_of_properties_is_the_bindings() -> None:
    hip = pytest.importorskip("rocm.bindings.hip")
    properties = hip.hipDeviceProp_t()
    assert properties.c_sizeof() == PROPERTIES_BYTES
    for at, text in ((NAME_AT, b"Card"), (ARCH_AT, b"gfx1151"), (MEMORY_AT, b"\x05")):
        ctypes.memmove(int(properties) + at, text, len(text))
    seen = properties.name, properties.gcnArchName, properties.totalGlobalMem
    assert seen == ("Card", "gfx1151", 5)


@needs_cc
def test_the_run_time_compiler_is_looked_for_beside_the_library(tmp_path: Path) -> None:
    env = rocm_with(tmp_path, library_source("*n = 0; return 100;"))
    code = tmp_path / "rtc.c"
    code.write_text("int hiprtcVersion(int *a, int *b) { *a = 7; *b = 1; return 0; }")
    library = str(tmp_path / "lib" / COMPILER)
    subprocess.run([str(CC), "-shared", "-fPIC", "-o", library, str(code)], check=True)
    assert probe(env).hiprtc == "7.1"
    assert compiler_version([str(code), str(tmp_path / "lib" / LIBRARY)]) is None


@needs_cc
@pytest.mark.parametrize("code", [100, 101])
def test_no_device_is_not_a_problem(tmp_path: Path, code: int) -> None:
    env = rocm_with(tmp_path, library_source(f"*n = 7; return {code};"))
    assert probe(env) == HipReport(str(tmp_path / "lib" / LIBRARY), 70152345, 0)


@needs_cc
def test_failing_calls_are_told(tmp_path: Path) -> None:
    env = rocm_with(tmp_path, library_source("return 999;"))
    report = probe(env)
    assert (report.version, report.devices) == (70152345, 0)
    assert report.problem == "hipGetDeviceCount failed with error 999"


@needs_cc
def test_a_failing_version_call_is_told(tmp_path: Path) -> None:
    env = rocm_with(tmp_path, library_source("return 0;", version="return 3;"))
    assert probe(env).problem == "hipRuntimeGetVersion failed with error 3"


@needs_cc
def test_a_crash_stays_in_the_child(tmp_path: Path) -> None:
    env = rocm_with(tmp_path, library_source("abort();"))
    assert probe(env) == HipReport(problem=f"{LIBRARY} crashed when it was asked: Aborted")


@needs_cc
def test_a_library_that_ends_the_process(tmp_path: Path) -> None:
    env = rocm_with(tmp_path, library_source('puts("{}x"); exit(4);'))
    assert probe(env) == HipReport(problem=f"{LIBRARY} ended the process (status 4)")


@needs_cc
def test_a_silent_library_is_killed(tmp_path: Path) -> None:
    env = rocm_with(tmp_path, library_source("sleep(600); return 0;"))
    report = probe(env, timeout_s=2)
    assert report == HipReport(problem=f"{LIBRARY} did not answer within 2 s")


@needs_cc
def test_a_library_without_the_symbols(tmp_path: Path) -> None:
    env = rocm_with(tmp_path, "int something_else(void) { return 0; }")
    report = probe(env)
    assert report.library == str(tmp_path / "lib" / LIBRARY)
    assert "hipRuntimeGetVersion" in (report.problem or "")


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    fake = tmp_path / LIBRARY
    fake.write_bytes(b"not ELF" * 100)
    report = ask([str(fake), str(tmp_path / "absent.so")])
    assert report.library is None
    assert report.devices == 0
    assert str(fake) in (report.problem or "")
    assert "absent.so" in (report.problem or "")


def test_the_first_library_that_loads_is_asked(tmp_path: Path) -> None:
    libc = ctypes.util.find_library("c")
    assert libc is not None
    report = ask([str(tmp_path / "absent.so"), libc])
    assert report.library == libc
    assert "hipRuntimeGetVersion" in (report.problem or "")


@pytest.mark.parametrize(
    ("environ", "first"),
    [
        ({}, "/opt/rocm/lib/libamdhip64.so"),
        ({"ROCM_HOME": "/h"}, "/h/lib/libamdhip64.so"),
        ({"ROCM_PATH": "/p", "ROCM_HOME": "/h"}, "/p/lib/libamdhip64.so"),
        ({"ROCM_PATH": ""}, "/opt/rocm/lib/libamdhip64.so"),
    ],
)
def test_where_the_library_is_looked_for(environ: dict[str, str], first: str) -> None:
    assert candidates(environ) == [first, LIBRARY]


def test_a_python_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    assert "could not start" in (probe().problem or "")


@pytest.mark.gpu
@pytest.mark.skipif("DS4Q_HIP" in os.environ, reason="ROCm is looked for; DS4Q_HIP names another")
def test_a_machine_with_a_gpu_says_so() -> None:
    report = probe()
    assert report.problem is None
    assert report.devices >= 1
