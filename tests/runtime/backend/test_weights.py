"""Packed weights: every size is checked before a kernel may see an address."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from ds4q.artifact.errors import CodingError, TensorTypeError
from ds4q.artifact.formats import Coding
from ds4q.artifact.types import (
    BF16,
    F32,
    HFP4G32,
    Q8F16,
    ROCMFP2,
    ROCMFP2_MIX,
    ROCMFP3_MIX,
    ROCMFP6,
    TensorType,
)
from ds4q.runtime.backend import Expert, Weight
from ds4q.runtime.errors import WeightError
from tests.checks import check_refused
from tests.runtime.backend import packs


def test_a_weight_keeps_its_bytes_and_knows_their_address() -> None:
    data = np.arange(2 * 33, dtype=np.uint8)
    weight = Weight(HFP4G32.id, 2, 32, data)
    assert weight.data is data
    assert weight.row_bytes == 33
    assert weight.address == data.ctypes.data
    assert weight.matrix == (data.ctypes.data, 0, HFP4G32.id, 33)


def test_a_part_of_a_payload_is_a_weight() -> None:
    """Groups of stacked rows are multiplied without a copy."""
    whole, _ = packs.draw(BF16, 6, 64, seed=1)
    half = Weight(BF16.id, 3, 64, whole.data[3 * 128 :])
    assert half.address == whole.address + 3 * 128
    assert np.shares_memory(half.data, whole.data)


@pytest.mark.parametrize("nbytes", [65, 67, 0])
def test_a_wrong_length_is_refused(nbytes: int) -> None:
    check_refused(
        WeightError,
        lambda: Weight(HFP4G32.id, 2, 32, np.zeros(nbytes, dtype=np.uint8)),
        says=["HFP4G32 matrix 2 x 32", "expected 66 bytes", f"found {nbytes} bytes"],
    )


def test_bytes_that_do_not_lie_in_one_run_are_refused() -> None:
    data = np.zeros(256, dtype=np.uint8)
    wrong: Any
    for wrong in (data[::2], data[:128].reshape(2, 64), data[:128].view(np.int8)):
        make = functools.partial(Weight, BF16.id, 1, 64, wrong)
        check_refused(WeightError, make, says=["not one contiguous run"])


@pytest.mark.parametrize(
    ("kind", "rows", "cols"),
    [(HFP4G32, 1, 33), (Q8F16, 2, 48), (F32, 0, 4), (F32, 4, 0), (F32, -1, 4)],
    ids=packs.name,
)
def test_a_shape_that_the_type_cannot_hold_is_refused(
    kind: TensorType, rows: int, cols: int
) -> None:
    check_refused(
        WeightError,
        lambda: Weight(kind.id, rows, cols, np.zeros(64, dtype=np.uint8)),
        says=[f"found ({rows}, {cols})"],
    )


def test_an_unknown_type_number_is_refused() -> None:
    check_refused(TensorTypeError, lambda: Weight(99, 1, 32, np.zeros(33, dtype=np.uint8)))


@pytest.mark.parametrize(
    ("kind", "coding", "says"),
    [
        (ROCMFP2_MIX, None, "mix-unregistered"),
        (ROCMFP3_MIX, None, "mix-unregistered"),
        (ROCMFP3_MIX, "dual", "mix-unregistered"),
        (ROCMFP3_MIX, packs.TWO_BIT, "mix-table-format"),
        (ROCMFP2, None, "variant-missing"),
        (ROCMFP2, packs.TWO_BIT, "variant-missing"),
        (ROCMFP2, "zero", "variant-unknown"),
        (ROCMFP6, None, "variant-missing"),
        (ROCMFP6, "dual", "variant-unknown"),
    ],
    ids=packs.name,
)
def test_bytes_without_their_coding_are_refused(
    kind: TensorType, coding: Coding | None, says: str
) -> None:
    """Never the fixed levels, another mode or another variant in its place."""
    data = np.zeros(kind.payload_bytes((2, 128)), dtype=np.uint8)
    check_refused(CodingError, lambda: Weight(kind.id, 2, 128, data, coding), says=[says])


def test_a_weight_holds_its_level_table_for_the_kernels() -> None:
    weight, _ = packs.draw((ROCMFP3_MIX, packs.THREE_BIT), 2, 64, seed=1)
    assert weight.levels is not None
    at = weight.levels.ctypes.data
    assert weight.matrix == (weight.data.ctypes.data, at, ROCMFP3_MIX.id, 28)


def test_matrices_of_an_expert_must_fit_each_other() -> None:
    def make(rows: int, cols: int) -> Weight:
        return packs.draw(HFP4G32, rows, cols, seed=1)[0]

    expert = Expert(make(64, 32), make(64, 32), make(32, 64))
    each = (expert.gate, expert.up, expert.down)
    assert expert.matrices.tolist() == [number for w in each for number in w.matrix]
    assert expert.nbytes == 2 * 64 * 33 + 32 * 50
    check_refused(
        WeightError,
        lambda: Expert(make(64, 32), make(96, 32), make(32, 64)),
        says=["gate and up"],
    )
    check_refused(
        WeightError,
        lambda: Expert(make(64, 32), packs.draw(F32, 64, 32, seed=1)[0], make(32, 64)),
        says=["gate and up"],
    )
    check_refused(
        WeightError,
        lambda: Expert(make(64, 32), make(64, 32), make(64, 32)),
        says=["down", "expected (32, 64)", "found (64, 32)"],
    )
