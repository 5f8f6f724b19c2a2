"""Owns the question whether a HIP library and its devices are here. Starts no kernel.

The library is loaded in a child process, and so may hang or crash: drivers do. The file runs on
its own (``python probe.py``) with the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

LIBRARY = "libamdhip64.so"
COMPILER = "libhiprtc.so"
TIMEOUT_S = 30.0
NO_DEVICE = (100, 101)
"""hipErrorNoDevice, and hipErrorInvalidDevice, which HIP 5 gives for the same."""

PROPERTIES_BYTES = 1472
NAME_AT, MEMORY_AT, ARCH_AT = 0, 288, 1160
"""Where hipDeviceProp_tR0600 keeps name, memory and architecture; its suffix fixes the layout."""

TEXT_BYTES = 256


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device: its name, architecture (``gfx1151``, ``sim``, ``sm_90``) and memory in bytes."""

    name: str
    arch: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class HipReport:
    """What was found: the library's name, its version, its devices, and what went wrong.

    ``library`` is None where none could be loaded; ``version`` is HIP's own number
    (major * 10^7 + minor * 10^5 + patch since HIP 5). ``found`` describes the devices, where the
    library can. ``hiprtc`` is the version of the run-time compiler, None where it is absent.
    """

    library: str | None = None
    version: int | None = None
    devices: int = 0
    problem: str | None = None
    found: tuple[DeviceReport, ...] = ()
    hiprtc: str | None = None


def candidates(environ: Mapping[str, str], library: str = LIBRARY) -> list[str]:
    """Names to load, in the order of HIP's Python bindings: ROCm's folder, then the loader's."""
    root = environ.get("ROCM_PATH") or environ.get("ROCM_HOME") or "/opt/rocm"
    return [str(Path(root) / "lib" / library), library]


def probe(environ: Mapping[str, str] | None = None, *, timeout_s: float = TIMEOUT_S) -> HipReport:
    """Ask in a child process; whatever the library does, this returns.

    Parameters
    ----------
    environ : environment of the child (``ROCM_PATH``, ``LD_LIBRARY_PATH``); this process's if None
    timeout_s : after so many seconds the child is killed
    """
    env = dict(os.environ if environ is None else environ)
    try:
        child = subprocess.run(
            [sys.executable, "-I", __file__],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return HipReport(problem=f"{LIBRARY} did not answer within {timeout_s:g} s")
    except OSError as error:
        return HipReport(problem=f"could not start {sys.executable}: {error.strerror}")
    if child.returncode < 0:
        end = signal.strsignal(-child.returncode)
        return HipReport(problem=f"{LIBRARY} crashed when it was asked: {end}")
    try:
        facts = json.loads(child.stdout)
        found = tuple(DeviceReport(**device) for device in facts.pop("found"))
        return HipReport(**facts, found=found)
    except (ValueError, TypeError, KeyError, AttributeError):  # no such document
        return HipReport(problem=f"{LIBRARY} ended the process (status {child.returncode})")


def ask(names: Iterable[str]) -> HipReport:
    """Load the first library of ``names`` that loads, here, and ask for version and devices."""
    failures = []
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            failures.append(str(error))
        else:
            return _question(name, library)
    return HipReport(problem="; ".join(failures))


def _question(name: str, library: ctypes.CDLL) -> HipReport:
    version, devices = ctypes.c_int(0), ctypes.c_int(0)
    try:
        status = library.hipRuntimeGetVersion(ctypes.byref(version))
        if status != 0:
            return HipReport(name, problem=f"hipRuntimeGetVersion failed with error {status}")
        status = library.hipGetDeviceCount(ctypes.byref(devices))
    except AttributeError as error:  # ctypes: undefined symbol
        return HipReport(name, problem=str(error))
    if status in NO_DEVICE:
        return HipReport(name, version.value)
    if status != 0:
        problem = f"hipGetDeviceCount failed with error {status}"
        return HipReport(name, version.value, problem=problem)
    found = tuple(_device(library, index) for index in range(devices.value))
    return HipReport(name, version.value, devices.value, found=tuple(d for d in found if d))


def _device(library: ctypes.CDLL, index: int) -> DeviceReport | None:
    properties = ctypes.create_string_buffer(PROPERTIES_BYTES)
    try:
        if library.hipGetDevicePropertiesR0600(properties, index) != 0:
            return None
    except AttributeError:  # HIP before 6.0
        return None

    def text(at: int) -> str:
        return properties.raw[at : at + TEXT_BYTES].split(b"\0")[0].decode("utf-8", "replace")

    total_bytes = int.from_bytes(properties.raw[MEMORY_AT : MEMORY_AT + 8], "little")
    return DeviceReport(text(NAME_AT), text(ARCH_AT), total_bytes)


def compiler_version(names: Iterable[str]) -> str | None:
    """Version of the first run-time compiler of ``names`` that loads; None where none does."""
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    for name in names:
        try:
            library = ctypes.CDLL(name)
            if library.hiprtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0:
                return f"{major.value}.{minor.value}"
        except (OSError, AttributeError):
            continue
    return None


if __name__ == "__main__":
    answer = os.dup(1)
    os.dup2(2, 1)  # drivers print, at exit too: only the answer goes to the parent
    report = ask(candidates(os.environ))
    if report.library is not None:
        names = candidates(os.environ, COMPILER)
        report = replace(report, hiprtc=compiler_version(names))
    os.write(answer, json.dumps(asdict(report)).encode())
