"""Owns the build of the simulated HIP libraries. What they do is in the C++ files beside this one.

They stand in for ROCm on a machine without a GPU: kernels run on the CPU, as fibers. They serve
tests and ``DS4Q_HIP=sim``, and say nothing about the speed of AMD hardware.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ds4q.hipkern.cache import libraries, run_compilers
from ds4q.hipkern.errors import HipLibraryError

HERE = Path(__file__).parent
KERNELS = HERE.parent / "kernels"
# Files of a unit are compiled as one: most of the time goes to standard headers. Only fibers earn
# from more than -O1.
UNITS = {
    "fibers": ("-O2", ("fiber", "pool")),
    "runtime": ("-O1", ("settings", "memory", "queues", "graphs", "modules", "api", "errors")),
    "hiprtc": ("-O1", ("hiprtc",)),
}
LIBRARIES = {"libamdhip64.so": ("fibers", "runtime"), "libhiprtc.so": ("hiprtc",)}
FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
FAST_CPU = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})  # what x86-64-v3 adds

__all__ = ["build", "compiler_command"]


def build(cache_dir: Path, compiler: str | None = None, flags: Sequence[str] = ()) -> Path:
    """Folder to use as ``ROCM_PATH``: ``lib/libamdhip64.so`` and ``lib/libhiprtc.so``, built once.

    Parameters
    ----------
    cache_dir : where builds are kept, a folder for each state of source, compiler and flags
    compiler : a command (``g++``, ``clang++``), or ``zig`` for the ``ziglang`` package's; if None,
        ``g++``, or zig where that is missing
    flags : added when the libraries are compiled (``-DDS4Q_SIM_UCONTEXT``), not to modules

    Raises
    ------
    HipLibraryError : no compiler, or it failed
    HipError : ``cache_dir`` cannot be written
    """
    command = compiler_command(compiler)
    march = _march("ziglang" in command)
    sources = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp"), KERNELS / "ds4q_dev.h"])
    key = hashlib.sha256(repr((command, march, UNITS, FLAGS, tuple(flags))).encode())
    for source in sources:
        key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    home = cache_dir / f"sim-{key.hexdigest()[:16]}"
    log = cache_dir / f"{home.name}.log"
    return libraries(home, LIBRARIES, lambda work: _compile(command, march, flags, work, log))


def compiler_command(compiler: str | None = None) -> list[str]:
    """Words that start a C++ compiler; see ``build``."""
    if compiler == "zig" or (compiler is None and shutil.which("g++") is None):
        if importlib.util.find_spec("ziglang") is None:
            found = "no g++ and no ziglang" if compiler is None else "no ziglang"
            raise HipLibraryError(
                f"the simulated device needs a C++ compiler: {found} is here",
                remedy="install g++, or pip install ziglang",
            )
        return [sys.executable, "-m", "ziglang", "c++", "-fno-sanitize=undefined"]
    name = compiler or "g++"
    if shutil.which(name) is None:
        raise HipLibraryError(
            f"the simulated device needs a C++ compiler: {name} is not here",
            remedy="install it",
        )
    return [name]


def _march(zig: bool) -> list[str]:
    """What modules may use of the processor, f16 in hardware above all; bits do not depend on it.

    Modules are kept by their source and must run on the machine that made them, no other.
    """
    if os.uname().machine != "x86_64":
        return []
    try:
        with open("/proc/cpuinfo") as lines:
            known = next(set(line.split()) for line in lines if line.startswith("flags"))
    except (OSError, StopIteration):
        known = set()
    name = "x86-64-v3" if known >= FAST_CPU else "x86-64"
    return [f"-mcpu={name.replace('-', '_')}"] if zig else [f"-march={name}"]


def _compile(
    command: list[str], march: list[str], flags: Sequence[str], work: Path, log: Path
) -> None:
    (work / "lib").mkdir()
    # Modules use no standard library, and zig would first build its own for "c++".
    modules = ["cc" if word == "c++" else word for word in command]
    words = "\\n".join(modules), "\\n".join(march)
    shared = [*FLAGS, "-DDS4Q_SIM", f"-I{HERE}", f"-I{KERNELS}"]
    shared += [f'-DDS4Q_SIM_CXX="{words[0]}"', f'-DDS4Q_SIM_MARCH="{words[1]}"', *flags]
    lines = []
    for unit, (level, names) in UNITS.items():
        source = work / f"unit-{unit}.cpp"
        source.write_text("".join(f'#include "{name}.cpp"\n' for name in names))
        lines.append(
            [*command, *shared, level, "-c", str(source), "-o", str(work / f"unit-{unit}.o")]
        )
    run_compilers(lines, "the simulated device", log)
    lines = []
    for library, units in LIBRARIES.items():
        objects = [str(work / f"unit-{unit}.o") for unit in units]
        lines.append([*command, "-shared", "-pthread", *flags, *objects, "-ldl"])
        lines[-1] += ["-o", str(work / "lib" / library)]
    run_compilers(lines, "the simulated device", log)
    log.unlink(missing_ok=True)  # of an attempt that failed
