"""Products of packed matrices: float64 within the bound of the stated sum, bits that stay."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from ds4q.hipkern import matrix
from tests.hipkern.packed import (
    F32,
    FORMS,
    ONE_EACH,
    U8,
    Form,
    Rig,
    bound,
    columns,
    dot_steps,
    multiplied,
    payload,
    rig,
    values_of,
)

__all__ = ["rig"]  # a fixture

# Columns: one block, tails of one and three blocks, all lanes and one more block. Then shapes that
# are streamed: 8, 4, 2 and 1 rows of a window, one part, two; also with rows left over.
SHAPES = ((5, 32), (33, 96), (9, 160), (3, 2048 + 32), (2, 4096 + 96))
MOVED = ("HFP4G32", "Q8F16", "MQ2G256Lloyd", "ROCmFP3Mix-1", "ROCmFP2Mix-1")
STREAMED = ((100, 512), (53, 1024), (27, 2048), (19, 4096), (13, 8192))


def _multiply(
    rig: Rig,
    form: Form,
    weights: list[tuple[U8, int, int]],
    x: F32,
    firsts: tuple[int, ...] = (),
    share: int = 0,
) -> list[F32]:
    """``x W^T`` of several matrices in one launch; ``share`` rows of a block, 0: as they come."""
    tokens, x_stride = len(x), x.shape[1]
    at, packed, outs, blocks = rig.put(x), [], [], 0
    for i, (data, rows, cols) in enumerate(weights):
        struct = rig.matrix(form, data, rows, cols, firsts[i] if firsts else 0)
        outs.append(rig.room((tokens, rows)))
        packed.append(matrix.pack_job(struct, at, outs[-1], x_stride, rows, blocks, share))
        blocks += -(-rows // (share or matrix.linear_rows(form.decoder, rows, cols)))
    kernel = matrix.linear_kernel(tokens)
    rig.run(
        "linear.hip", kernel, (blocks, 1, 1), rig.table(packed), len(packed), tokens,
        DS4Q_DECODER=form.decoder,
    )  # fmt: skip
    return [rig.get(out, (tokens, w[1])) for out, w in zip(outs, weights, strict=True)]


def _check(form: Form, data: U8, rows: int, x: F32, found: F32) -> None:
    cols = x.shape[1]
    w = multiplied(form, data, rows, cols).astype(np.float64)
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(w).T
    error = np.abs(found - x.astype(np.float64) @ w.T)
    assert (error <= bound(dot_steps(form, cols), magnitude)).all(), (error / magnitude).max()
    assert magnitude.min() > 0


@pytest.mark.parametrize("name", ONE_EACH)
def test_products_are_within_the_bound_of_float64(rig: Rig, name: str) -> None:
    form, rng = FORMS[name], np.random.default_rng(4)
    for rows, asked in (*SHAPES, *STREAMED):
        cols = columns(form, asked)
        data = payload(form, rows, cols, rng)
        x = rng.standard_normal((2, cols)).astype(np.float32)
        for tokens in (1, 2) if rows < 8 else (1,):
            (found,) = _multiply(rig, form, [(data, rows, cols)], x[:tokens])
            _check(form, data, rows, x[:tokens], found)
        if rows >= 13:  # streamed: a group that takes several windows, one after the other
            share = 4 * matrix.GROUPS * max(1, 4096 // cols)
            (more,) = _multiply(rig, form, [(data, rows, cols)], x[:1], share=share)
            np.testing.assert_array_equal(more, found)


@pytest.mark.parametrize("name", ONE_EACH)
def test_bits_do_not_depend_on_the_batch(rig: Rig, name: str) -> None:
    form, rng = FORMS[name], np.random.default_rng(5)
    _same_bits(rig, form, 21, columns(form, 288), range(2, 10), rng)
    _same_bits(rig, form, 8, 2048, (2,), rng)


def _same_bits(
    rig: Rig, form: Form, rows: int, cols: int, batches: Iterable[int], rng: np.random.Generator
) -> None:
    data = payload(form, rows, cols, rng)
    x = rng.standard_normal((max(batches), cols)).astype(np.float32)
    alone = np.concatenate(
        [_multiply(rig, form, [(data, rows, cols)], x[t : t + 1])[0] for t in range(len(x))]
    )
    for tokens in batches:
        (found,) = _multiply(rig, form, [(data, rows, cols)], x[:tokens])
        np.testing.assert_array_equal(found, alone[:tokens])


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("asked", [512, 2048, 8192])
def test_bits_do_not_depend_on_where_a_matrix_lies(rig: Rig, name: str, asked: int) -> None:
    """Aligned rows are copied 16 bytes at a time; a matrix cut out of another begins anywhere."""
    form, rng = FORMS[name], np.random.default_rng(6)
    rows, cols = 96 if asked == 512 else 12, columns(form, asked)
    data = payload(form, rows, cols, rng)
    x = rng.standard_normal((1, cols)).astype(np.float32)
    weights = [(data, rows, cols)] * 4
    found = _multiply(rig, form, weights, x, firsts=(0, 1, 6, 15))
    _check(form, data, rows, x, found[0])
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", ["BF16", "HFP4G32"])
def test_jobs_of_one_launch_are_those_of_their_own(rig: Rig, name: str, tokens: int) -> None:
    form, rng = FORMS[name], np.random.default_rng(7)
    cols = 320
    weights = [(payload(form, rows, cols, rng), rows, cols) for rows in (1, 64, 7, 100)]
    x = rng.standard_normal((tokens, cols)).astype(np.float32)
    together = _multiply(rig, form, weights, x)
    for found, weight in zip(together, weights, strict=True):
        np.testing.assert_array_equal(found, _multiply(rig, form, [weight], x)[0])


def test_the_row_of_a_book_is_chosen_by_each_half(rig: Rig) -> None:
    """Mode 1 of 106 by hand: {.9 -.2 .3 -.85} x 4, {.05 -.11 .28 -.3} x 4 (see FORMAT.md)."""
    form = FORMS["ROCmFP2Mix-1"]
    block = bytes.fromhex("27272727363636364033")
    data = np.frombuffer(block * 4, np.uint8)
    x = np.zeros((1, 128), dtype=np.float32)
    x[0, 0], x[0, 16] = 1, 1024
    (found,) = _multiply(rig, form, [(data, 1, 128)], x)
    levels = values_of(form, data, 1, 128)[0]
    assert found[0, 0] == levels[0] + 1024 * levels[16] != 0
