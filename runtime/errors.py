"""Owns the error classes of the runtime room. Message building belongs to the artifact room."""

from __future__ import annotations

from ds4q.artifact.errors import Ds4qError


class RunError(Ds4qError):
    """A model cannot be loaded, checked or run as asked."""

    rule = "cannot run"


class WeightError(RunError, ValueError):
    """Packed bytes, shapes or activations that do not fit each other; nothing was read."""

    rule = "weight does not fit"


class BackendTypeError(RunError):
    """A tensor type that this backend has no kernel for."""

    rule = "no kernel for this tensor type"
    cure = "quantize with a recipe whose types this backend runs"
