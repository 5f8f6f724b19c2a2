"""Owns the pairing of a compiled kernel with its numpy reference. Knows no format and no model.

``DS4Q_REFERENCE=1`` is read when a pair is called, so one process can run both sides; ``steady``
holds what was read. Every pair is listed in ``PAIRS``; a test runs each pair of codecs on the same
input and compares the bytes.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numba
import xxhash

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_ROOT = Path(__file__).parents[1]

PAIRS: list[FastPath[Any, Any]] = []


_steady = threading.local()


def reference_wanted() -> bool:
    """True while ``DS4Q_REFERENCE=1`` asks for the numpy paths."""
    held: bool | None = getattr(_steady, "wanted", None)
    return os.environ.get("DS4Q_REFERENCE") == "1" if held is None else held


@contextmanager
def steady() -> Iterator[None]:
    """Within, this thread does not look again: a look takes 1 us, a step calls 200 kernels."""
    before = getattr(_steady, "wanted", None)
    _steady.wanted = reference_wanted()
    try:
        yield
    finally:
        _steady.wanted = before


class FastPath(Generic[P, R]):
    """A compiled function beside its reference of the same signature; calling it picks one."""

    def __init__(self, reference: Callable[P, R], fast: Callable[P, R]) -> None:
        self.reference = reference
        self.fast = fast
        self.__name__ = getattr(reference, "__name__", "kernel")
        self.__doc__ = reference.__doc__
        PAIRS.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self.reference if reference_wanted() else self.fast)(*args, **kwargs)


def jit(function: F) -> F:
    """Compile with numba: no GIL, cached on disk, floating point exactly as written."""
    room = function.__module__.split(".")[1]
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = os.path.join(before or _ROOT / room / "__pycache__", _stamp(room))
    compiled = functools.partial(numba.njit, nogil=True, error_model="numpy")
    try:
        return cast(F, compiled(cache=True)(function))
    except RuntimeError:  # no folder for a cache can be written: compile in each process
        return cast(F, compiled()(function))
    finally:
        config.CACHE_DIR = before


@functools.cache
def _stamp(room: str) -> str:
    """Name of the cache folder for exactly this source of the room's kernels, and of this one's.

    Numba looks only at the file of the function it compiles. A helper that is inlined from another
    file could change, and old machine code would go on running.
    """
    digest = xxhash.xxh3_64()
    for folder in sorted({_ROOT / "artifact", _ROOT / room}):
        for path in sorted(folder.rglob("*.py")):
            text = path.read_bytes()
            if b"numba" in text or b"fastpath" in text:
                digest.update(text)
    return f"kernels-{digest.hexdigest()}"
