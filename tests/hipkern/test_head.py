"""argmax over logits: numpy's choice, ties, NaN, any number of blocks."""

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
    logits = np.zeros((4, 700), np.float32)
    logits[0, [699, 300, 40]] = 2.0
    logits[1] = -0.0
    logits[1, 5] = 0.0  # equal to -0.0
    logits[2] = -np.inf
    logits[3, [650, 20]] = np.inf
    assert _argmax(rig, logits, 3) == [40, 0, 0, 20]


def test_nan_never_wins(rig: Rig) -> None:
    logits = np.full((3, 700), np.nan, np.float32)
    logits[1, 600] = -np.inf
    logits[2] = np.where(np.arange(700) % 2, -np.arange(700), np.nan)
    logits[2, 4] = -np.nan
    assert _argmax(rig, logits, 3) == [0, 600, 1]
