"""Owns which HIP library this process uses, and opening it. Knows no device.

``DS4Q_HIP=sim`` builds the simulated device, ``DS4Q_HIP=cuda`` the library over NVIDIA's driver;
unset leaves hip-python its own search. The binding opens a library once a process, so the first
choice stays.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ds4q.artifact.places import home_folder
from ds4q.hipkern.errors import HipLibraryError
from ds4q.hipkern.probe import candidates

VARIABLE = "DS4Q_HIP"
CHOICES = ("sim", "cuda")


@dataclass(frozen=True, slots=True)
class Library:
    """The opened library: hip-python's two modules, what was chosen, where it lies, its version.

    ``path`` is a bare name where the dynamic loader found it. ``rtc_problem`` says why the run-time
    compiler cannot be called.
    """

    hip: Any
    hiprtc: Any
    choice: str
    path: str
    version: int
    rtc_version: str
    rtc_problem: str


_lock = threading.Lock()
_opened: Library | None = None


def choice() -> str:
    """What ``DS4Q_HIP`` asks for: "", "sim" or "cuda"."""
    asked = os.environ.get(VARIABLE, "")
    if asked and asked not in CHOICES:
        raise HipLibraryError(
            f"{VARIABLE} names no library",
            expected=f"unset, {' or '.join(CHOICES)}",
            found=asked,
            remedy=f"unset {VARIABLE}, or give one of these words",
        )
    return asked


def open_library() -> Library:
    """The library of this process, opened at the first call.

    Raises
    ------
    HipLibraryError : no binding, no library, an unknown choice, or another one than is open
    """
    global _opened
    asked = choice()
    with _lock:
        if _opened is None:
            _opened = _open(asked)
        elif _opened.choice != asked:
            raise HipLibraryError(
                f"this process has opened another HIP library: {_opened.path}",
                expected=f"{VARIABLE}={_opened.choice}",
                found=f"{VARIABLE}={asked}",
                remedy="start a new process for another library",
            )
        return _opened


def _bindings() -> tuple[Any, Any]:
    try:
        from rocm.bindings import hip, hiprtc
    except ImportError as error:
        raise HipLibraryError(
            f"hip-python is not installed ({error})", remedy="pip install 'ds4q[hip]'"
        ) from None
    return hip, hiprtc


def told(error: RuntimeError) -> str:
    """What the binding says of dlopen and dlsym, without the marks of its byte strings."""
    return re.sub(r"""'?(?<!\w)b(['"])(.*?)\1'?""", r"\2", str(error))


def built_root(asked: str) -> str | None:
    """The folder to look into for library ``asked``, built where need be; None for ROCm's own."""
    if asked == "sim":
        from ds4q.hipkern import sim

        return str(sim.build(home_folder()))
    if asked == "cuda":
        from ds4q.hipkern import cuda

        return str(cuda.build(home_folder()))
    return None


def _open(asked: str) -> Library:
    hip, hiprtc = _bindings()
    root = built_root(asked)
    with _rocm_path(root):
        from rocm.bindings.util.paths import get_library_path

        path = os.fsdecode(get_library_path("amdhip64"))
        if root is not None and not path.startswith(root + os.sep):
            raise HipLibraryError(
                f"{VARIABLE}={asked} is set, but hip-python prefers another library",
                path=path,
                remedy=f"unset {VARIABLE}, or use a Python environment without that package",
            )
        version = _version(hip, path)
        rtc_version, rtc_problem = _rtc_version(hiprtc)
    return Library(hip, hiprtc, asked, path, version, rtc_version, rtc_problem)


@contextmanager
def _rocm_path(root: str | None) -> Iterator[None]:
    """Have hip-python look into ``root`` while both libraries are opened; None changes nothing."""
    if root is None:
        yield
        return
    before = os.environ.get("ROCM_PATH")
    os.environ["ROCM_PATH"] = root
    try:
        yield
    finally:
        if before is None:
            del os.environ["ROCM_PATH"]
        else:
            os.environ["ROCM_PATH"] = before


def _version(hip: Any, path: str) -> int:
    try:
        code, version = hip.hipRuntimeGetVersion()
    except RuntimeError as error:  # what the binding raises for dlopen and dlsym
        tried = dict.fromkeys([*candidates(os.environ), path])
        raise HipLibraryError(
            f"HIP is not available: {told(error)}; tried {', '.join(tried)}"
        ) from None
    if code:
        raise HipLibraryError(f"hipRuntimeGetVersion failed with {code.name} ({int(code)})")
    return int(version)


def _rtc_version(hiprtc: Any) -> tuple[str, str]:
    try:
        code, major, minor = hiprtc.hiprtcVersion()
    except RuntimeError as error:
        return "", told(error)
    if code:
        return "", f"hiprtcVersion failed with {code.name} ({int(code)})"
    return f"{major}.{minor}", ""
