"""Tables of what sequences keep: rows go where they belong, and to nobody else."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from ds4q.runtime import kvtable
from ds4q.runtime.kvtable import Held, Table
from ds4q.runtime.kvtype import STORED, KvType


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("path", ["fast", "reference"])
def test_rows_go_to_their_owners(kv_type: KvType, path: Literal["fast", "reference"]) -> None:
    put = kvtable.put.fast if path == "fast" else kvtable.put.reference
    stored = STORED[kv_type]
    held = [Held(np.full((rows, 3), 7, dtype=stored)) for rows in (4, 9, 6)]
    rows = np.arange(15, dtype=stored).reshape(5, 3)
    put(rows, np.array([3, 8, 0, 2, 7]), np.array([0, 1, 0, 2, 1]), Table(held))
    expected = [np.full_like(each.rows, 7) for each in held]
    expected[0][[3, 0]] = rows[[0, 2]]
    expected[1][[8, 7]] = rows[[1, 4]]
    expected[2][2] = rows[3]
    for each, wanted in zip(held, expected, strict=True):
        assert np.array_equal(each.rows, wanted)


def test_a_table_follows_rows_that_moved() -> None:
    held = Held(np.zeros((2, 3), dtype=np.float32))
    held.hold(np.zeros((8, 3), dtype=np.float32))
    kvtable.put.fast(np.ones((1, 3), np.float32), np.array([7]), np.array([0]), Table([held]))
    assert held.rows[7].tolist() == [1, 1, 1]
