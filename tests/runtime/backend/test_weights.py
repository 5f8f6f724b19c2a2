"""Packed weights: every size is checked before a kernel may see an address."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from ds4q.artifact.errors import TensorTypeError
from ds4q.artifact.types import BF16, F32, HFP4G32, Q8F16, TensorType
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


def test_matrices_of_an_expert_must_fit_each_other() -> None:
    def make(rows: int, cols: int) -> Weight:
        return packs.draw(HFP4G32, rows, cols, seed=1)[0]

    Expert(make(64, 32), make(64, 32), make(32, 64))
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
