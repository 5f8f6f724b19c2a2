"""``NUMERICS`` and what was computed under it: both change together or not at all.

If a test here fails and the change of sums is meant, raise ``NUMERICS`` and record the new values.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from ds4q.artifact.types import F32
from ds4q.runtime.backend.cpu import CpuBackend
from ds4q.runtime.gates import loading
from ds4q.runtime.gates.baseline import encoded_prompts
from ds4q.runtime.gates.pair import Model
from ds4q.runtime.numerics import NUMERICS
from tests.runtime.backend import packs

SUMS = {1: "0ff7c684f5aec319"}
IDS = {1: {"benchmark": "f6fa63ecce78ddd0", "free": "6c492cb2a9465b6d"}}


def test_the_order_of_additions_is_that_of_the_version() -> None:
    """All products are powers of two, so that only the order of their sums decides the bits."""
    rng = np.random.default_rng(11)

    def powers(rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        signs = rng.choice([-1.0, 1.0], (rows, 512))
        return np.asarray(signs * 2.0 ** rng.integers(-12, 13, (rows, 512)), np.float32)

    weight, _ = packs.plain(F32, powers(33).view(np.uint32))
    found = CpuBackend(2).linear(weight, powers(5))
    assert found.dtype == np.float32
    assert hashlib.sha256(found.astype("<f4").tobytes()).hexdigest()[:16] == SUMS[NUMERICS]


def test_the_fixed_prompts_continue_as_in_the_version(tiny_artifact: Path) -> None:
    model = Model.read(tiny_artifact)
    prompts = encoded_prompts(model.tokenizer, model.config.vocab_size, 1000)
    load = loading.measure(tiny_artifact, threads=2, prompts=[*prompts.values()], new_tokens=32)
    found = {
        name: hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest()[:16]
        for name, ids in zip(prompts, load.ids, strict=True)
    }
    assert [len(ids) for ids in load.ids] == [32, 32]
    assert found == IDS[NUMERICS]
