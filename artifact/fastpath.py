"""Owns the pairing of a compiled kernel with its numpy reference. Knows no format and no model.

``DS4Q_REFERENCE=1`` is read at each call, so one process can run both sides. Every pair is listed
in ``PAIRS``; a test runs each pair of codecs on the same input and compares the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

PAIRS: list[FastPath[Any, Any]] = []


def reference_wanted() -> bool:
    """True while ``DS4Q_REFERENCE=1`` asks for the numpy paths."""
    return os.environ.get("DS4Q_REFERENCE") == "1"


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
    return cast(F, numba.njit(nogil=True, cache=True, error_model="numpy")(function))
