"""Owns what an export consists of: files, and where the bytes of each tensor go. Moves none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.hfq import TensorEntry
from ds4q.quantize.deepseek4 import Role, classify

U8 = npt.NDArray[np.uint8]


class ExportError(Ds4qError):
    """The artifact, or the wish, does not fit the format that it should be written in."""

    rule = "cannot export"


class Convert(Protocol):
    """Packed rows of an artifact -> what each place of their tensor holds of them.

    ``packed`` (1-D) holds rows ``first`` .. ``first + count`` of ``k`` elements each.
    """

    def __call__(self, packed: U8, first: int, count: int, k: int) -> tuple[U8, ...]: ...


@dataclass(frozen=True, slots=True)
class Place:
    """``nbytes`` at ``offset`` of file number ``file``; each row of a tensor takes as many."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor of the artifact: how it is converted, and a place for each result."""

    convert: Convert
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file to write: what it begins with (all of it, of a text) and its length."""

    name: str
    front: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class Written:
    """One tensor of an export, for people and scripts."""

    name: str
    type: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """All of an export, known before the first byte moves.

    Attributes
    ----------
    folder : whether the output is a folder of files, or the only file
    moves : by name of the artifact's tensor; others are left out
    left_out : reason -> number of the artifact's tensors that are left out for it
    """

    folder: bool
    files: tuple[PlannedFile, ...]
    moves: Mapping[str, Move]
    tensors: tuple[Written, ...]
    left_out: Mapping[str, int]
    warnings: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


NOT_ASKED_FOR = "not an expert's"  # why a tensor is left out with --only experts


def is_expert(entry: TensorEntry) -> bool:
    """Whether a tensor is a routed expert's matrix, of trunk or draft."""
    info = classify(entry.name)
    return info is not None and info.role is Role.EXPERT
