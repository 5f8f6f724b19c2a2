"""Rotation on the device: the bits of the CPU's, and which hidden rows are left alone."""

from __future__ import annotations

import numpy as np
import pytest

from ds4q.artifact.formats._fwht import rotate
from ds4q.hipkern import matrix
from tests.hipkern.packed import FORMS, Rig, payload, rig

__all__ = ["rig"]  # a fixture


@pytest.mark.parametrize(("tokens", "cols"), [(1, 256), (3, 4096)])
def test_rows_are_rotated_to_the_bits_of_the_cpu(rig: Rig, tokens: int, cols: int) -> None:
    x = np.random.default_rng(1).standard_normal((tokens, cols)).astype(np.float32)
    x[0, :4] = 0.0, -0.0, 1e-44, -1e-44
    at, out = rig.put(x), rig.room(x.shape)
    rig.run("rotate.hip", "rotate", matrix.rotate_grid(cols, tokens), at, out, cols)
    found = rig.get(out, x.shape)
    np.testing.assert_array_equal(found.view(np.uint32), rotate(x).view(np.uint32))
    assert (found != x).any(axis=1).all()


@pytest.mark.parametrize("with_shared", [True, False])
def test_hidden_rows_of_rotated_downs_alone_are_rotated(rig: Rig, with_shared: bool) -> None:
    rng, width, k = np.random.default_rng(2), 512, 3
    forms = [FORMS[name] for name in ("MQ2G256Lloyd", "HFP4G32", "MQ2G256Lloyd", "BF16")]
    trios = [
        [rig.matrix(form, payload(form, 1, width, rng), 1, width)] * 3
        for form in (*forms, forms[0])
    ]
    table = rig.table([struct for trio in trios[:-1] for struct in trio])
    shared = rig.table(trios[-1]) if with_shared else 0
    ids = np.array([[0, 1, 2], [-1, 3, -2], [2, 0, 1]], np.int32)
    hidden = rng.standard_normal((3, k + 1, width)).astype(np.float32)
    at = rig.put(hidden)
    grid = matrix.rotate_hidden_grid(width, k, 3)
    rig.run("rotate.hip", "rotate_hidden", grid, table, shared, rig.put(ids), at, width, k)
    want = hidden.copy()
    turned = [(0, 0), (0, 2), (2, 0), (2, 1), *([(t, 3) for t in range(3)] if with_shared else [])]
    for place in turned:
        want[place] = rotate(hidden[place])
    np.testing.assert_array_equal(rig.get(at, hidden.shape), want)


def test_a_grid_without_the_shared_slot_leaves_its_rows(rig: Rig) -> None:
    rng, width, form = np.random.default_rng(3), 256, FORMS["MQ2G256Lloyd"]
    trio = [rig.matrix(form, payload(form, 1, width, rng), 1, width)] * 3
    hidden = rng.standard_normal((1, 2, width)).astype(np.float32)
    table, at = rig.table(trio), rig.put(hidden)
    ids = rig.put(np.zeros((1, 1), np.int32))
    rig.run("rotate.hip", "rotate_hidden", (1, 1, 1), table, table, ids, at, width, 1)
    found = rig.get(at, hidden.shape)
    np.testing.assert_array_equal(found[0, 0], rotate(hidden[0, 0]))
    np.testing.assert_array_equal(found[0, 1], hidden[0, 1])
