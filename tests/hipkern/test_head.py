"""argmax over logits: numpy's choice, ties, what is not finite, any number of blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.hipkern.dense import F32, Rig, open_rig


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with open_rig() as rig:
        yield rig


def _argmax(rig: Rig, logits: F32, blocks: int) -> list[int]:
    tokens, n = logits.shape
    parts, ids = rig.room(tokens, blocks, 2), rig.room(tokens)
    rig.run("head.hip", "argmax_parts", (blocks, tokens, 1), rig.put(logits), parts, n)
    rig.run("head.hip", "argmax", (1, tokens, 1), parts, ids, blocks)
    return [int(i) for i in rig.get(ids, tokens, dtype=np.int32)]


@pytest.mark.parametrize("blocks", [1, 3, 40])
def test_the_greatest_logit_wins(rig: Rig, blocks: int) -> None:
    logits = np.random.default_rng(1).normal(size=(5, 3001)).astype(np.float32)
    logits[1, 3000] = logits[2, 0] = 9.0
    logits[3] -= 50.0  # all negative
    assert _argmax(rig, logits, blocks) == list(logits.argmax(axis=1))


def test_a_whole_vocabulary(rig: Rig) -> None:
    logits = np.random.default_rng(2).normal(size=(1, 129_280)).astype(np.float32)
    assert _argmax(rig, logits, 128) == [int(logits.argmax())]


def test_ties_go_to_the_lower_id(rig: Rig) -> None:
    logits = np.zeros((2, 700), np.float32)
    logits[0, [699, 300, 40]] = 2.0
    logits[1] = -0.0
    logits[1, 5] = 0.0  # equal to -0.0
    assert _argmax(rig, logits, 3) == [40, 0]


def test_what_is_not_finite_leaves_no_choice(rig: Rig) -> None:
    logits = np.zeros((6, 700), np.float32)
    logits[0] = np.nan
    for row, value in enumerate((np.nan, -np.nan, np.inf, -np.inf), 1):
        logits[row, 699 - row] = value
    logits[5, 3] = np.finfo(np.float32).max
    assert _argmax(rig, logits, 3) == [-1, -1, -1, -1, -1, 3]
