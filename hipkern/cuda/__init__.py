"""Owns building the HIP libraries that run on NVIDIA GPUs. Knows neither kernels nor devices.

``libamdhip64.so`` and ``libhiprtc.so`` are built here from C++, on first use: the names that
hip-python calls, over the CUDA driver and NVRTC. They are a way to run the same kernels and the
same host path on another maker's hardware, and tell nothing about the speed of an AMD GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ds4q.artifact.places import expanded
from ds4q.hipkern.cache import libraries, run_compilers
from ds4q.hipkern.errors import HipLibraryError

SOURCES = Path(__file__).parent
LIBRARIES = {"libamdhip64.so": "hip.cpp", "libhiprtc.so": "hiprtc.cpp"}
DRIVER = "libcuda.so.1"
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden")


def build(cache_dir: Path) -> Path:
    """The folder to use as ``ROCM_PATH``; built under ``cache_dir`` where it is not there yet.

    Raises
    ------
    HipLibraryError : NVRTC or a C++ compiler is missing, or the compiler refused the source
    HipError : ``cache_dir`` cannot be written
    """
    return build_for(cache_dir, DRIVER, find_nvrtc())


def build_for(cache_dir: Path, driver: str, nvrtc: str) -> Path:
    """``build`` for a driver and a compiler library of given names; neither needs to be there."""
    compiler = _compiler()
    defines = (f'-DDS4Q_CUDA_DRIVER="{driver}"', f'-DDS4Q_NVRTC="{nvrtc}"')
    digest = hashlib.sha256(repr((compiler, FLAGS, defines)).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    folder = cache_dir / f"cuda-{digest.hexdigest()[:16]}"
    log = cache_dir / f"{folder.name}.log"
    return libraries(
        folder, LIBRARIES, lambda work: _compile([*compiler, *FLAGS, *defines], work, log)
    )


def find_nvrtc() -> str:
    """NVRTC's library: of the wheel, of ``CUDA_HOME`` or ``CUDA_PATH``, or the loader's."""
    tried = list(_nvrtc_candidates())
    for name in tried:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    raise HipLibraryError(
        "NVRTC, which compiles kernels for an NVIDIA GPU, was not found",
        expected="one of " + ", ".join(tried),
        remedy="pip install nvidia-cuda-nvrtc, or set CUDA_HOME",
    )


def _nvrtc_candidates() -> Iterator[str]:
    for entry in sys.path:
        for found in sorted(Path(entry).glob("nvidia/*/lib/libnvrtc.so.[0-9]*"), reverse=True):
            yield str(found)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield str(Path(expanded(os.environ[variable])) / "lib64" / "libnvrtc.so")
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def _compiler() -> tuple[str, ...]:
    for name in ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return (found,)
    raise HipLibraryError(
        "no C++ compiler builds the library over NVIDIA's driver",
        expected="g++, clang++ or c++ on the PATH",
        remedy="install g++",
    )


def _compile(command: list[str], work: Path, log: Path) -> None:
    (work / "lib").mkdir()
    lines = [
        [*command, str(SOURCES / code), "-o", str(work / "lib" / library), "-ldl"]
        for library, code in LIBRARIES.items()
    ]
    run_compilers(lines, "the library over NVIDIA's driver", log)
    log.unlink(missing_ok=True)  # of an attempt that failed
